"""Every patch of a line on other pins: carried, then weighed with all evidence at hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import UnavailableError
from overlay.lines.line import UPSTREAMS, Line, Pin, Upstream
from overlay.lines.lock import read_lock
from overlay.moving.carry import Carried, carry_series, old_states, renames_between
from overlay.moving.evidence import Dossier, find_postconditions, judge
from overlay.moving.history import History, read_history
from overlay.moving.resolutions import Resolutions
from overlay.moving.tombstones import Tombstone, merged, read
from overlay.sources.ondemand import OnDemandTree
from overlay.sources.releases import with_pin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlay.sources.source import Base, Sources

NO_HISTORY = (
    "no history at hand: which commits did it, and whether upstream took a patch and went on from "
    "there, can't be known (--history {upstream}=CLONE says it)"
)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """One series on one pin.

    Attributes:
        old, new: the pin that it stands on, and the one that it was carried to.
        dossiers: one a patch, in order.
        history: why history says nothing; empty where it was asked.
        postconditions: the same of postconditions.
    """

    upstream: Upstream
    old: Pin
    new: Pin
    dossiers: tuple[Dossier, ...]
    history: str = ""
    postconditions: str = ""

    @property
    def bad(self) -> tuple[Dossier, ...]:
        """Those that need a person."""
        return tuple(dossier for dossier in self.dossiers if not dossier.ok)


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """Looks at one line on other pins.

    Attributes:
        root: the ``patches`` folder.
        line: read already.
        pins: where to; the line's own for an upstream that isn't named.
        sources: give the base trees.
        clones: of upstreams, for their history.
    """

    root: Path
    line: Line
    pins: Mapping[Upstream, Pin]
    sources: Sources
    clones: Mapping[Upstream, Path]

    def examine(self, upstream: Upstream) -> Examined:
        """Carry one series and weigh what came of it.

        Raises when a base tree can't be had, or a clone that was named says nothing.
        """
        history, no_history = self._history(upstream)
        return self._weigh(upstream, self._carry(upstream, history), history, no_history)

    def weigh(self, upstream: Upstream, carried: Sequence[Carried]) -> Examined:
        """Weigh what came of a series, one outcome a patch in order."""
        return self._weigh(upstream, carried, *self._history(upstream))

    def _weigh(
        self,
        upstream: Upstream,
        carried: Sequence[Carried],
        history: History | None,
        no_history: str,
    ) -> Examined:
        patches = self.line.series[upstream]
        old, new = self.line.pin(upstream), self._pin(upstream)
        stones: tuple[Tombstone, ...] = read(self.root)
        asked, not_asked = self._postconditions(upstream)
        return Examined(
            upstream=upstream,
            old=old,
            new=new,
            history=no_history,
            postconditions=not_asked,
            dossiers=tuple(
                judge(
                    patch, one, history=history, does_without=asked.get(patch.name, ""),
                    stone=merged(stones, patch, upstream, new.version),
                )
                for patch, one in zip(patches, carried, strict=True)
            ),
        )  # fmt: skip

    def _pin(self, upstream: Upstream) -> Pin:
        return self.pins.get(upstream, self.line.pin(upstream))

    def _base(self, upstream: Upstream, pin: Pin) -> Base:
        """A bare pin."""
        lock = read_lock(self.line) if pin == self.line.pin(upstream) else None
        known = lock.known_trees(upstream) if lock else {}
        return self.sources.base(with_pin(self.line, upstream, pin), upstream, known)

    def _tree(self, upstream: Upstream, pin: Pin) -> OnDemandTree:
        return OnDemandTree(self.sources, upstream, self._base(upstream, pin))

    def _carry(self, upstream: Upstream, history: History | None) -> list[Carried]:
        git, patches = self.sources.store(upstream).git, self.line.series[upstream]
        old = self._base(upstream, self.line.pin(upstream))
        new = self._base(upstream, self._pin(upstream))
        by_content = renames_between(git, old.commit.tree, new.commit.tree)

        def renamed(path: bytes) -> bytes | None:
            return (history.renamed(path) if history else None) or by_content(path)

        before, after = old_states(patches, OnDemandTree(self.sources, upstream, old))
        return list(
            carry_series(
                patches, before, after, OnDemandTree(self.sources, upstream, new), git=git,
                replay=Resolutions(self.root).replay, renames=renamed,
            )
        )  # fmt: skip

    def _history(self, upstream: Upstream) -> tuple[History | None, str]:
        """Upstream's history between the pins; or why there is none."""
        old, new = self.line.pin(upstream), self._pin(upstream)
        if old == new:
            return None, ""
        patches = self.line.series[upstream]
        if upstream in self.clones:
            return read_history(self.clones[upstream], old, new, patches), ""
        choice = self.sources.choices.get(upstream, "archive")
        why = NO_HISTORY.format(upstream=upstream)
        if choice not in ("archive", "git") and Path(choice).is_dir():
            try:  # a source may be a clone
                return read_history(Path(choice), old, new, patches), ""
            except UnavailableError as error:
                why = f"{why}; {error.what}"
        return None, why

    def _postconditions(self, upstream: Upstream) -> tuple[dict[str, str], str]:
        """By patch: which of its postconditions the bare new pins meet; or why nobody knows."""
        patches = self.line.series[upstream]
        if self._pin(upstream) == self.line.pin(upstream):
            return {}, ""
        asked = find_postconditions(self.root.resolve().parent)
        if asked.missing:
            return {}, f"postconditions not asked: {asked.missing}"
        try:
            was = {name: self._tree(name, self.line.pin(name)) for name in UPSTREAMS}
            now = {name: self._tree(name, self._pin(name)) for name in UPSTREAMS}
        except UnavailableError as error:
            return {}, f"postconditions not asked: {error.what}"
        found = {patch.name: asked.hold(patch.name, was, now) for patch in patches}
        # To a postcondition a content that is missing looks like one that is wrong
        for tree in (*was.values(), *now.values()):
            if tree.missing is not None:
                return {}, f"postconditions not asked: {tree.missing.what}"
        return found, ""
