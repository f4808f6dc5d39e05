"""Every tree that a line's series passes through, read from the store without a working tree."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.patches.paths import unquote_path
from overlay.trees.match import Verdict, match_patch
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from overlay.lines.line import Line, Upstream
    from overlay.trees.apply import Applied, Patched
    from overlay.trees.match import Tree

PYTHON = (".py", ".pyi")


class View:
    """Files of one tree by their path as text."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def get(self, path: str) -> bytes | None:
        """Content of a file, or None."""
        entry = self.tree.get(path.encode())
        return entry.data if entry else None

    def text(self, path: str) -> str:
        """Text of a file that must be there."""
        data = self.get(path)
        if data is None:
            raise LookupError(f"there is no {path}")
        return data.decode()

    def module(self, path: str) -> ast.Module | None:
        """A Python file, parsed; None where there is none."""
        data = self.get(path)
        return None if data is None else parse(data)


@functools.lru_cache(maxsize=4096)
def parse(source: bytes) -> ast.Module:
    """Parse once however many trees hold the same bytes."""
    return ast.parse(source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The trees of both upstreams in one state of the line."""

    vllm: View
    flashinfer: View

    def of(self, upstream: Upstream) -> View:
        return self.vllm if upstream == "vllm" else self.flashinfer


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What one patch made of one upstream.

    ``touched`` are the Python files that the patch left behind; ``base`` is the bare pin,
    ``after`` the tree with this patch and all before it.
    """

    upstream: Upstream
    patch: str
    touched: tuple[str, ...]
    base: View
    after: View


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """A line, applied."""

    line: Line
    patched: Mapping[Upstream, Patched]

    def base(self) -> Pair:
        """The bare pins."""
        return Pair(**{name: self._view(name, one.tree.base.tree) for name, one in self._all()})

    def final(self) -> Pair:
        """The patched trees."""
        return Pair(**{name: self._view(name, one.tree.tree) for name, one in self._all()})

    def states(self) -> list[State]:
        """One state a patch, in order, of both upstreams."""
        return [
            State(
                upstream=name,
                patch=applied.name,
                touched=_python_files(applied),
                base=self._view(name, one.tree.base.tree),
                after=self._view(name, applied.tree),
            )
            for name, one in self._all()
            for applied in one.tree.patches
        ]

    def touched(self, upstream: Upstream) -> set[str]:
        """Python files that a series leaves changed."""
        return {
            path
            for applied in self.patched[upstream].tree.patches
            for path in _python_files(applied)
        }

    def without(self, name: str) -> tuple[Pair, dict[str, Verdict]]:
        """The line as it would be without one patch, and what becomes of the others then.

        Nothing is written: a state that nobody will build has no place in the store.
        """
        upstream, left_out = self.line.patch(name)
        one = self.patched[upstream]
        tree = StoredTree(one.store.reader, one.tree.base.tree)
        verdicts: dict[str, Verdict] = {}
        lost = {left_out.name}
        for patch in self.line.series[upstream]:
            if patch is left_out:
                continue
            outcome = match_patch(patch, tree)
            verdict = Verdict.BLOCKED if lost & set(patch.requires) else outcome.verdict
            verdicts[patch.name] = verdict
            if verdict.good:
                tree.changes |= outcome.changes
            elif verdict is not Verdict.MERGED:
                lost.add(patch.name)
        final = self.final()
        views = {"vllm": final.vllm, "flashinfer": final.flashinfer, upstream: View(tree)}
        return Pair(**views), verdicts

    def names(self) -> list[str]:
        """All patches of the line, as vllm/NAME and flashinfer/NAME."""
        return [f"{name}/{patch.name}" for name, one in self._all() for patch in one.tree.patches]

    def _all(self) -> Collection[tuple[Upstream, Patched]]:
        return self.patched.items()

    def _view(self, upstream: Upstream, tree: str) -> View:
        return View(StoredTree(self.patched[upstream].store.reader, tree))


def _python_files(applied: Applied) -> tuple[str, ...]:
    paths = (unquote_path(e.path.encode()).decode() for e in applied.effects if e.mode != "000000")
    return tuple(path for path in paths if path.endswith(PYTHON))
