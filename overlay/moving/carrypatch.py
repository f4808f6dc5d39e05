"""Carry one patch to one tree: strictly where that goes, else file by file by three-way merges."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from overlay.moving.threeway import TWICE, Conflict, Merger, line_changes, made_twice
from overlay.patches.diff import FileDiff, Kind
from overlay.patches.paths import parents, quote_path
from overlay.trees.match import (
    Entry,
    FileOutcome,
    Finding,
    Outcome,
    Tree,
    Verdict,
    match_files,
    sum_up,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlay.patches.patch import Patch

    Changes = dict[bytes, Entry | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What became of one patch on the new base.

    Attributes:
        verdict: of the patch.
        findings: one a hunk, or one for a file diff as a whole.
        changes: paths that it changes on the new base, as carried so far (None: deleted); empty
            unless it is carried.
        conflicts: files that need a person; empty if it is carried.
        needs: bad patches that it stands on, declared or derived.
        replayed: keys of the recorded resolutions that were used.
        decided: "", or what the maintainer said: ``resolved`` or ``skipped``.
        settled: what the merge settled by itself, also where there are conflicts.
    """

    name: str
    verdict: Verdict
    findings: tuple[Finding, ...]
    changes: Changes = field(repr=False)
    conflicts: tuple[Conflict, ...] = ()
    needs: tuple[str, ...] = ()
    replayed: tuple[str, ...] = ()
    decided: str = ""
    settled: Changes = field(repr=False, default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nobody needs to do anything: it is carried, is upstream's now, or is skipped."""
        return self.decided == "skipped" or self.verdict.carried or self.verdict is Verdict.MERGED


def as_matched(patch: Patch, outcome: Outcome, *, name: str = "") -> Carried:
    """What strict matching made of a patch."""
    return Carried(
        name=name or patch.name,
        verdict=outcome.verdict,
        findings=outcome.findings,
        changes=outcome.changes,
        settled=outcome.changes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """What became of one file diff."""

    findings: tuple[Finding, ...]
    changes: Changes = field(default_factory=dict)
    conflict: Conflict | None = None
    replayed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carrier:
    """One patch that is carried to ``tree``.

    Attributes:
        before, after: the trees before and after it on the base that it was written for.
        tree: the new base, as carried so far; stays as it is.
        merger: for texts.
        replay, renames: as of ``overlay.moving.carry.carry_series``.
    """

    patch: Patch
    before: Tree
    after: Tree
    tree: Tree
    merger: Merger
    replay: Callable[[Conflict], bytes | None] | None
    renames: Callable[[bytes], bytes | None] | None

    def carry(self) -> Carried:
        """What becomes of it there."""
        found = list(match_files(self.patch, self.tree))
        verdict = sum_up([finding for file in found for finding in file.findings])
        if verdict is Verdict.MERGED or (verdict.good and not any(map(self._twice, found))):
            files = [_File(findings=file.findings, changes=file.changes) for file in found]
        else:
            files = [self._file(file) for file in found]
        changes: Changes = {}
        for file in files:
            changes |= {p: e for p, e in file.changes.items() if e is not None or p not in changes}
        findings = tuple(finding for file in files for finding in file.findings)
        conflicts = tuple(file.conflict for file in files if file.conflict is not None)
        if conflicts:
            verdict = Verdict.CONFLICT
        elif not verdict.good:
            # What a merge leaves as it is, is no change
            changes = {p: entry for p, entry in changes.items() if entry != self.tree.get(p)}
            verdict = _sum_up(findings, changes)
        return Carried(
            name=self.patch.name,
            verdict=verdict,
            findings=findings,
            changes=changes if verdict.carried else {},
            conflicts=conflicts,
            replayed=tuple(file.replayed for file in files if file.replayed),
            settled=changes,
        )

    def _file(self, file: FileOutcome) -> _File:
        """One file diff: its hunks strictly, as far as they are not there; else by a merge."""
        if all(finding.verdict is Verdict.MERGED for finding in file.findings):
            return _File(findings=file.findings)
        if all(f.verdict.good or f.verdict is Verdict.MERGED for f in file.findings):
            twice = self._twice(file)
            if twice is not None:
                return self._unsettled(file, twice.path, twice)
            return _File(findings=file.findings, changes=file.changes)
        diff = file.diff
        source = diff.old_path if diff.old_path is not None else diff.path
        if diff.kind is not Kind.ADD and self.tree.get(source) is None:
            moved = self._moved(diff, source)
            if moved is not None:
                return moved
        return self._merged(file, source, diff.path, Verdict.CONTEXT)

    def _twice(self, file: FileOutcome) -> Conflict | None:
        """A conflict if strict matching makes what upstream has made elsewhere in the file."""
        path = file.diff.path
        made = file.changes.get(path)
        if file.diff.old_path is None or made is None:
            return None
        ours, base = self.tree.get(file.diff.old_path), self.before.get(file.diff.old_path)
        theirs = self.after.get(path)
        if ours is None or base is None or theirs is None or ours.data == base.data:
            return None
        line = made_twice(file.diff.hunks, base.data, ours.data, theirs.data, made.data)
        if not line:
            return None
        return Conflict(
            path=path, kind="twice", base=base, ours=ours, theirs=theirs, marked=made.data,
            why=TWICE.format(line),
        )  # fmt: skip

    def _moved(self, diff: FileDiff, source: bytes) -> _File | None:
        """The same change where upstream has the file now, or None where that isn't known."""
        if diff.kind is Kind.RENAME and self.tree.get(diff.path) is not None:
            target: bytes | None = diff.path  # upstream made the same rename
        else:
            target = self.renames(source) if self.renames is not None else None
        if target is None or diff.kind is Kind.COPY or self.tree.get(target) is None:
            return None
        kind = Kind.MODIFY if diff.kind is Kind.RENAME else diff.kind
        there = replace(
            diff, kind=kind, old_path=target, new_path=None if kind is Kind.DELETE else target
        )
        if diff.kind is Kind.RENAME and target != diff.path:
            return None  # two ways to rename it: a person has to choose
        (file,) = match_files(replace(self.patch, files=(there,)), self.tree)
        why = f"upstream has {quote_path(source)} as {quote_path(target)}"
        if file.good:
            findings = tuple(_retold(f, Verdict.MOVED, why) for f in file.findings)
            return _File(findings=findings, changes=file.changes)
        return self._merged(file, target, target, Verdict.MOVED, why, old=diff)

    def _merged(
        self,
        file: FileOutcome,
        source: bytes,
        target: bytes,
        verdict: Verdict,
        why: str = "",
        *,
        old: FileDiff | None = None,
    ) -> _File:
        """Merge the file at ``source`` of the new tree and put it at ``target``."""
        diff = old or file.diff
        base = None if diff.old_path is None else self.before.get(diff.old_path)
        theirs = None if diff.new_path is None else self.after.get(diff.new_path)
        if diff.kind is Kind.DELETE:  # of a change of type: what comes instead
            theirs = self.after.get(diff.path)
        elif diff.kind is Kind.ADD:
            base = self.before.get(diff.path)
        ours = self.tree.get(source)
        conflict = self._in_the_way(source, target, base, ours, theirs)
        if conflict is None:
            made = self.merger.merge(target, base, ours, theirs, diff.hunks)
            if not isinstance(made, Conflict):
                findings = _told(file, ours, made, base, theirs, verdict, why)
                return _File(findings=findings, changes=_put(diff, source, target, made))
            conflict = made
        return self._unsettled(file, source, conflict)

    def _in_the_way(
        self,
        source: bytes,
        target: bytes,
        base: Entry | None,
        ours: Entry | None,
        theirs: Entry | None,
    ) -> Conflict | None:
        """What stands where a file is to be put, if anything does."""
        there = self.tree.get(target) if target != source else None
        if there is not None:
            why = "the file is there already"
        elif ours is not None and target == source:
            return None
        elif self.tree.is_folder(target) or any(
            self.tree.get(parent) is not None for parent in parents(target)
        ):
            why = "a folder, or a file in place of a folder, is in the way"
        else:
            return None
        return Conflict(
            path=target, kind="added", base=base, ours=there or ours, theirs=theirs, why=why
        )

    def _unsettled(self, file: FileOutcome, source: bytes, conflict: Conflict) -> _File:
        """A conflict, or its resolution that was recorded."""
        content = self.replay(conflict) if self.replay is not None and conflict.marked else None
        sides = conflict.ours, conflict.theirs
        if content is not None and sides[0] is not None and sides[1] is not None:
            base = conflict.base
            mode = sides[0].mode if base and base.mode == sides[1].mode else sides[1].mode
            entry = Entry(mode=mode, data=content)
            findings = tuple(
                _retold(f, Verdict.CONTEXT, "a recorded resolution settles it")
                if not f.verdict.good and f.verdict is not Verdict.MERGED
                else f
                for f in file.findings
            )
            changes = _put(file.diff, source, conflict.path, entry)
            return _File(findings=findings, changes=changes, replayed=conflict.key)
        findings = file.findings
        if all(finding.verdict is not Verdict.CONFLICT for finding in findings):
            findings = tuple(_retold(f, Verdict.CONFLICT, conflict.why) for f in findings)
        return _File(findings=findings, conflict=conflict)


def _put(diff: FileDiff, source: bytes, target: bytes, entry: Entry | None) -> Changes:
    changes: Changes = {target: entry}
    if diff.kind is Kind.RENAME and source != target:
        changes = {source: None, target: entry}
    return changes


def _retold(finding: Finding, verdict: Verdict, why: str) -> Finding:
    told = f"{why} ({finding.why})" if finding.why else why
    return Finding(verdict=verdict, path=finding.path, at=finding.at, why=told)


def _told(
    file: FileOutcome,
    ours: Entry | None,
    made: Entry | None,
    base: Entry | None,
    theirs: Entry | None,
    verdict: Verdict,
    why: str,
) -> tuple[Finding, ...]:
    """Findings of a clean merge: which hunks upstream has made, and which are carried."""
    nothing = Entry(mode=0, data=b"")
    wanted = line_changes((base or nothing).data, (theirs or nothing).data)
    done = line_changes((ours or nothing).data, (made or nothing).data)
    there = Counter(wanted)
    there.subtract(done)
    hunks = {hunk.at: hunk for hunk in file.diff.hunks}
    found = []
    for finding in file.findings:
        hunk = hunks.get(finding.at)
        own = line_changes(hunk.old, hunk.new) if hunk else wanted
        merged = made == ours or (own and all(_within(there[line], n) for line, n in own.items()))
        if merged or finding.verdict is Verdict.MERGED:
            there.subtract(own)
            found.append(_retold(finding, Verdict.MERGED, "the merge finds the change there"))
        elif finding.verdict.good and verdict is Verdict.CONTEXT:
            found.append(finding)
        else:
            found.append(_retold(finding, verdict, why or "a three-way merge carries it"))
    return tuple(found)


def _within(left: int, wanted: int) -> bool:
    return left >= wanted > 0 or left <= wanted < 0


def _sum_up(findings: Sequence[Finding], changes: Changes) -> Verdict:
    seen = {finding.verdict for finding in findings}
    if not changes:
        return Verdict.MERGED
    for verdict in (Verdict.MERGED, Verdict.MOVED, Verdict.CONTEXT, Verdict.OFFSET):
        if verdict in seen:
            return Verdict.PARTLY_MERGED if verdict is Verdict.MERGED else verdict
    return Verdict.APPLIES
