"""Finds the upstream commit with which a patch stops going along, by bisection in a clone.

The candidates are the commits between two versions that touch the patch's files. At each one that
is tried the series is carried anew, in memory. Nothing is claimed that was not seen: the patch
holds right before the commit that is named, and does not with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlay.errors import GitError, UnavailableError
from overlay.moving.carry import carry_series, old_states
from overlay.moving.frontier import base_of
from overlay.moving.history import borrowed, read_history
from overlay.trees.git import ObjectReader
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from overlay.lines.line import Line, Pin
    from overlay.moving.frontier import Break, Frontier
    from overlay.moving.history import History, UpstreamCommit
    from overlay.patches.patch import Patch
    from overlay.report import Advance
    from overlay.sources.source import Sources
    from overlay.trees.git import Git
    from overlay.trees.match import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """What all bisections of one frontier share."""

    patches: Sequence[Patch]
    before: Sequence[Tree]
    after: Sequence[Tree]
    pins: Mapping[str, Pin]
    own: Pin
    clone: Path
    git: Git
    reader: ObjectReader
    tried: Advance

    def culprit(self, at: int, broken: Break) -> UpstreamCommit | None:
        """The commit that breaks patch number ``at``; None where no single one does."""
        patch = self.patches[at]
        old, new = self.pins[broken.after], self.pins[broken.version]
        history, seen = self._history(patch, old, new)
        commits = [c for c in reversed(history.of(patch).touching) if c.id not in seen]
        low, high = 0, len(commits)
        while low < high:  # the first commit with which it doesn't hold, if they go good to bad
            middle = (low + high) // 2
            if self._holds(at, commits[middle].id, history):
                low = middle + 1
            else:
                high = middle
        if low == len(commits) or not self._holds(at, f"{commits[low].id}^", history):
            return None
        return commits[low]

    def _history(self, patch: Patch, old: Pin, new: Pin) -> tuple[History, Collection[str]]:
        """History up to ``new``, and what of it lies before ``old``.

        From the line's own pin on, so that it knows of every rename; where that is on no branch
        of the clone, from ``old`` on.
        """
        try:
            history = read_history(self.clone, self.own, new, [patch])
            if old == self.own:
                return history, ()
            before = read_history(self.clone, self.own, old, [patch])
        except UnavailableError:
            return read_history(self.clone, old, new, [patch]), ()
        return history, {commit.id for commit in before.of(patch).touching}

    def _holds(self, at: int, commit: str, history: History) -> bool:
        self.tried(1)
        found = self.reader.get(commit)
        if found is None or found[1] != "commit":
            raise UnavailableError(
                f"{self.clone} lacks commit {commit}", fix="use a full clone, not a shallow one"
            )
        tree = StoredTree(self.reader, found[2][5:45].decode())
        upto = slice(at + 1)
        *_, last = carry_series(
            self.patches[upto], self.before[upto], self.after[upto], tree,
            git=self.git, renames=history.renamed,
        )  # fmt: skip
        return last.ok


def find_culprits(line: Line, found: Frontier, sources: Sources, clone: Path) -> Frontier:
    """``found`` with the commits that break its patches, as far as a clone tells them.

    Args:
        line: whose frontier it is.
        found: the frontier.
        sources: where base trees come from.
        clone: a repository of upstream with its history; it is only read.

    Raises:
        UnavailableError: ``clone`` is no repository.
    """
    patches = line.series[found.upstream]
    store = sources.store(found.upstream)
    base = StoredTree(store.reader, base_of(line, found.upstream, sources).tree)
    before, after = old_states(patches, base)
    own = line.pin(found.upstream)
    pins = {column.version: column.pin for column in found.columns if column.pin is not None}
    commits: dict[str, str] = {}
    label = f"{found.upstream}: looking for commits in {clone}"
    with borrowed(clone) as git, sources.report.progress(label) as tried:
        reader = ObjectReader(git)
        search = _Search(
            patches=patches, before=before, after=after, pins={**pins, own.version: own}, own=own,
            clone=clone, git=git, reader=reader, tried=tried,
        )  # fmt: skip
        try:
            for at, patch in enumerate(patches):
                broken = found.breaks(patch.name)
                if broken is None or broken.cell.goes or broken.cell.needs:
                    continue  # the trees don't show it; or what it needs has a culprit
                try:
                    commit = search.culprit(at, broken)
                except (UnavailableError, GitError) as error:
                    sources.report.say(f"{patch.name}: {error.what}")
                    continue
                if commit is None:
                    sources.report.say(f"{patch.name}: no single commit in {clone} breaks it")
                else:
                    commits[patch.name] = commit.text
        finally:
            reader.close()
    return replace(found, commits=commits)
