"""Which patches of a series stand on which, found out by leaving each one out.

A patch stands on another when, without that one and all that falls with it, it no longer applies
strictly, or applies at another place. All in memory: no commit, no process but the one reader.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from overlay.patches.diff import Kind
from overlay.patches.paths import quote_path
from overlay.trees.match import Entry, Outcome, match_patch
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from overlay.lines.line import Upstream
    from overlay.patches.diff import Hunk
    from overlay.patches.patch import Patch
    from overlay.trees.apply import PatchedTree
    from overlay.trees.store import Store

    Files = dict[bytes, Entry | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One patch stands on another.

    Attributes:
        patch: the later one.
        needs: the earlier one.
        text: whether ``patch`` falls when ``needs`` is left out.
        declared: whether ``patch`` says ``Requires: needs``.
        direct: whether no other edges lead the same way; a picture shows these.
        why: what happens to ``patch`` without ``needs``; empty unless ``text``.
    """

    patch: str
    needs: str
    text: bool
    declared: bool
    direct: bool
    why: str

    @property
    def kind(self) -> str:
        """``text and declared``, ``text only`` (not declared) or ``declared only``."""
        if self.text and self.declared:
            return "text and declared"
        return "text only" if self.text else "declared only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The patches of one series, in order, and what stands on what."""

    upstream: Upstream
    patches: tuple[str, ...]
    edges: tuple[Edge, ...]

    @property
    def drawn(self) -> tuple[Edge, ...]:
        """The edges that no other edges say already."""
        return tuple(edge for edge in self.edges if edge.direct)

    @property
    def undeclared(self) -> tuple[Edge, ...]:
        """What should be in a ``Requires:`` trailer."""
        return tuple(edge for edge in self.drawn if edge.text and not edge.declared)


class Whole:
    """A series of which every patch applies, to be asked what falls when some are left out."""

    def __init__(self, store: Store, patched: PatchedTree, patches: Sequence[Patch]) -> None:
        self._patches = patches
        self._tree = StoredTree(store.reader, patched.base.tree)
        paths = {p for patch in patches for d in patch.files for p in (d.old_path, d.new_path) if p}
        # Read once: every question starts from here
        self._start: Files = {path: self._tree.get(path) for path in paths}
        now = dict(self._start)
        self._changes = []
        for patch in patches:
            outcome = self._match(patch, now)
            self._changes.append(outcome.changes)
            now |= outcome.changes

    def falls(self, gone: Collection[str]) -> dict[str, str]:
        """What can't stay without the patches ``gone``: names in order, each with the reason.

        What falls is left out as well, before later patches are tried.
        """
        found: dict[str, str] = {}
        everything, rest = dict(self._start), dict(self._start)
        for patch, changes in zip(self._patches, self._changes, strict=True):
            if patch.name not in gone:
                if _alike(patch, everything, rest):
                    rest |= changes
                else:
                    outcome = self._match(patch, rest)
                    why = _fault(outcome) or _elsewhere(patch, everything, rest)
                    if why:
                        found[patch.name] = why
                    else:
                        rest |= outcome.changes
            everything |= changes
        return found

    def _match(self, patch: Patch, files: Files) -> Outcome:
        self._tree.changes = files
        return match_patch(patch, self._tree)


def derive(
    store: Store, patched: PatchedTree, upstream: Upstream, patches: Sequence[Patch]
) -> Graph:
    """The graph of one series.

    Args:
        store: holds the base tree.
        patched: the series, applied without a bad verdict.
        upstream: whose series.
        patches: the same patches as files.
    """
    whole = Whole(store, patched, patches)
    names = [patch.name for patch in patches]
    text = {(patch, needs): why for needs in names for patch, why in whole.falls({needs}).items()}
    declared = {(patch.name, needs) for patch in patches for needs in patch.requires}
    pairs = text.keys() | declared
    order = {name: at for at, name in enumerate(names)}
    edges = [
        Edge(
            patch=patch,
            needs=needs,
            text=(patch, needs) in text,
            declared=(patch, needs) in declared,
            direct=not _leads(pairs, patch, needs),
            why=text.get((patch, needs), ""),
        )
        for patch, needs in sorted(pairs, key=lambda pair: (order[pair[0]], order[pair[1]]))
    ]
    return Graph(upstream=upstream, patches=tuple(names), edges=tuple(edges))


def _leads(pairs: Collection[tuple[str, str]], patch: str, needs: str) -> bool:
    """Whether a way of at least two edges leads from ``patch`` to ``needs``."""
    seen: set[str] = set()
    ahead = {b for a, b in pairs if a == patch and b != needs}
    while ahead:
        seen |= ahead
        ahead = {b for a, b in pairs if a in ahead} - seen
    return needs in seen


def _alike(patch: Patch, one: Files, other: Files) -> bool:
    """Whether a patch that only changes files meets the same files in both."""
    return all(
        diff.kind is Kind.MODIFY and one[diff.path] == other[diff.path] for diff in patch.files
    )


def _fault(outcome: Outcome) -> str:
    bad = [finding for finding in outcome.findings if not finding.verdict.good]
    return f"{bad[0].path}: {bad[0].why or bad[0].verdict}" if bad else ""


def _elsewhere(patch: Patch, everything: Files, rest: Files) -> str:
    """Why a patch that applies to the rest does so at another place than it should, or "".

    Only where its lines stand more than once is there another place for it.
    """
    for diff in patch.files:
        one, other = (f.get(diff.old_path) if diff.old_path else None for f in (everything, rest))
        if one is None or other is None or one.data == other.data:
            continue
        twice = [
            not (_is_once(one.data, h.old) and _is_once(other.data, h.old)) for h in diff.hunks
        ]
        if not any(twice):
            continue
        lines, others = _lines(one.data), _lines(other.data)
        should, does = _stands(diff.hunks, lines), _stands(diff.hunks, others)
        for doubtful, at, there in zip(twice, should, does, strict=True):
            if doubtful and not _same_line(lines, others, at, there):
                return f"{quote_path(diff.path)}: other lines of the same text would be changed"
    return ""


def _is_once(content: bytes, old: bytes) -> bool:
    first = content.find(old)
    return content.find(old, first + 1) < 0


def _lines(content: bytes) -> list[bytes]:
    return content.split(b"\n")


def _found(hunk: Hunk, lines: list[bytes]) -> list[int]:
    """Indices at which a hunk's old lines stand."""
    old = _lines(hunk.old.removesuffix(b"\n"))
    return [
        at for at, line in enumerate(lines) if line == old[0] and lines[at : at + len(old)] == old
    ]


def _stands(hunks: Sequence[Hunk], lines: list[bytes]) -> list[int]:
    """Where hunks of a patch that applies stand; -1 where several places would do."""
    found = []
    end, moved = 0, False
    for hunk in hunks:
        places = [at for at in _found(hunk, lines) if at >= end]
        stated = max(hunk.old_start, 1) - 1
        if stated in places and not moved:
            at = stated
        else:
            at = places[0] if len(places) == 1 else -1
            moved = True
        end = at + hunk.old.count(b"\n")
        found.append(at)
    return found


def _same_line(one: list[bytes], other: list[bytes], at: int, there: int) -> bool:
    """Whether a line is the counterpart of another, whichever end the files are compared from."""
    forward = _counterpart(one, other, at)
    backward = _counterpart(one[::-1], other[::-1], len(one) - 1 - at)
    return at >= 0 and forward == there and backward == len(other) - 1 - there


def _counterpart(one: list[bytes], other: list[bytes], at: int) -> int:
    """Index in ``other`` of the line at ``at`` in ``one``; -1: there is none."""
    pairs = zip(one, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    if at < same:
        return at
    blocks = SequenceMatcher(None, one[same:], other[same:], autojunk=False).get_matching_blocks()
    hit = [b.b + at - b.a for b in blocks if b.a <= at - same < b.a + b.size]
    return hit[0] if hit else -1
