"""Which release or patch brings a kernel that a tree lacks: asked of other trees' own sources.

Only what the cache holds is asked; nothing is downloaded for it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from overlay.errors import CapabilityError, OverlayError
from overlay.kernels.capability import Answer, Capability, read_capability
from overlay.lines.line import find_lines, read_line
from overlay.report import Reporter
from overlay.sources.releases import known_pins, offered, pin_release, with_pin
from overlay.trees.pipeline import apply_line
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from overlay.kernels.capability import Shape
    from overlay.lines.line import Line
    from overlay.sources.source import Sources
    from overlay.trees.apply import PatchedTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """Who has kernels for a shape.

    Attributes:
        release: the first release from the pin on that has them; empty if none does.
        patch: ``LINE/flashinfer/PATCH`` that adds them to a pin without; empty if none does.
        not_asked: releases before that one, or all, which the cache lacks.
    """

    release: str = ""
    patch: str = ""
    not_asked: tuple[str, ...] = ()

    def __str__(self) -> str:
        says = []
        if self.release:
            says.append(f"FlashInfer {self.release} has it")
        if self.patch:
            says.append(f"the patch {self.patch} adds it")
        if self.not_asked:
            says.append(f"not asked: {', '.join(self.not_asked)}")
        return "; ".join(says or ["no release or patch at hand has it"])


class Bringers:
    """Looks for a kernel in releases and in the lines' patches; reads no tree twice.

    Args:
        sources: where the cache is.
        root: the ``patches`` folder.
    """

    def __init__(self, sources: Sources, root: Path) -> None:
        self._root = root
        # A copy that can't reach the network, whatever the invocation may
        self._sources = replace(sources, offline=True, choices={}, report=Reporter(quiet=True))
        self._known = known_pins(root, "flashinfer")
        # By tree id: what it has; the answer to all, if it has nothing; None if it can't be read
        self._read: dict[str, Capability | Answer | None] = {}
        self._releases: dict[str, str] = {}  # tree ids by version; empty where there is none
        self._lines: list[tuple[str, PatchedTree]] | None = None

    def find(self, line: Line, shape: Shape) -> Brought:
        """Who has kernels for a shape that ``line`` lacks, on the pin that it was asked on."""
        release, not_asked = self._release(line, shape)
        return Brought(release=release, patch=self._patch(shape), not_asked=not_asked)

    def _release(self, line: Line, shape: Shape) -> tuple[str, tuple[str, ...]]:
        """The first release after the pin that has it, and those before it that aren't at hand."""
        not_asked: list[str] = []
        pinned = Version(line.pin("flashinfer").version)
        for version in self._versions():
            if Version(version) <= pinned:
                continue
            if version not in self._releases:
                self._releases[version] = self._tree(line, version)
            answer = self._ask(self._releases[version], shape)
            if answer is Answer.SUPPORTED:
                return version, tuple(not_asked)
            if answer is None:
                not_asked.append(version)
        return "", tuple(not_asked)

    def _versions(self) -> list[str]:
        """Final releases, and the pre-releases that lines stand on, oldest first."""
        found = {pin.version for pin in self._known}
        try:
            listed = offered(self._sources, "flashinfer")
        except OverlayError:  # no index was ever asked
            listed = {}
        found |= {
            text for text, release in listed.items()
            if not Version(text).is_prerelease and release.yanked is None and release.sdist
        }  # fmt: skip
        return sorted(found, key=Version)

    def _tree(self, line: Line, version: str) -> str:
        """The tree of a bare release; empty where the cache hasn't got it."""
        try:
            pins = [pin for pin in self._known if pin.version == version]
            pin = pins[0] if pins else pin_release(
                self._sources, "flashinfer", version, known=self._known
            )  # fmt: skip
        except OverlayError:  # not to be had without a network
            return ""
        store = self._sources.store("flashinfer")
        moved = with_pin(bare(line), "flashinfer", pin)
        commits = map(store.find, self._sources.refs(moved, "flashinfer"))
        return next((commit.tree for commit in commits if commit is not None), "")

    def _ask(self, tree: str, shape: Shape) -> Answer | None:
        """What a tree answers; None where there is none to ask."""
        if tree and tree not in self._read:
            store = self._sources.store("flashinfer")
            try:
                self._read[tree] = read_capability(StoredTree(store.reader, tree))
            except CapabilityError:  # it has none of the kernels
                self._read[tree] = Answer.UNSUPPORTED
            except OverlayError:
                self._read[tree] = None
        found = self._read.get(tree)
        return found.ask(shape).answer if isinstance(found, Capability) else found

    def _patch(self, shape: Shape) -> str:
        """The first patch of a line that adds it to a tree without."""
        if self._lines is None:
            self._lines = list(self._patched())
        for name, tree in self._lines:
            if self._ask(tree.tree, shape) is not Answer.SUPPORTED:
                continue
            before = self._ask(tree.base.tree, shape)
            for patch in tree.patches:
                if before is Answer.SUPPORTED:
                    break
                before = self._ask(patch.tree, shape)
                if before is Answer.SUPPORTED:
                    return f"{name}/flashinfer/{patch.name}"
        return ""

    def _patched(self) -> Iterator[tuple[str, PatchedTree]]:
        """FlashInfer's tree of each line that is in the cache and patches it."""
        for name in find_lines(self._root):
            with contextlib.suppress(OverlayError):  # another line's fault is not ours to tell
                line = read_line(self._root, name)
                if line.series["flashinfer"]:
                    states = apply_line(line, self._sources, upstreams=["flashinfer"])
                    yield name, states["flashinfer"].tree


def bare(line: Line) -> Line:
    """``line`` without its patches to FlashInfer."""
    return replace(line, series={**line.series, "flashinfer": ()})
