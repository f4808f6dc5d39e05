"""Apply one patch to one tree, strictly, and say what became of it.

Strict means: every byte of context counts, no fuzz, no white-space leniency, nothing applied
in reverse. A hunk may sit at other lines than it states (``offset``) when exactly one place
fits; where several fit git would take the nearest, and we refuse. Nor does a hunk go where its
change may have been made already: a patch never applies to a tree that holds it. The patched
content is the same as that of ``git apply``, which the tests hold it against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from overlay.patches.delta import apply_delta
from overlay.patches.diff import EXECUTABLE, REGULAR, SYMLINK, FileDiff, Hunk, Kind
from overlay.patches.paths import parents, quote_path
from overlay.trees.objects import blob_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from overlay.patches.patch import Patch


class Verdict(StrEnum):
    """What became of one patch on one tree (DESIGN.md, Verdicts)."""

    APPLIES = "applies"
    OFFSET = "offset"
    CONTEXT = "context"
    MOVED = "moved"
    MERGED = "merged"
    PARTLY_MERGED = "partly-merged"
    REWORKED = "reworked"
    CONFLICT = "conflict"
    BLOCKED = "blocked"

    @property
    def good(self) -> bool:
        """Whether the patch, as it stands in its file, is part of the patched tree."""
        return self in (Verdict.APPLIES, Verdict.OFFSET)

    @property
    def carried(self) -> bool:
        """Whether a move carries the patch by itself, or what upstream has left of it."""
        return self.good or self in (Verdict.CONTEXT, Verdict.MOVED, Verdict.PARTLY_MERGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of a tree."""

    mode: int
    data: bytes = field(repr=False)


class Tree(Protocol):
    """The tree that a patch meets."""

    def get(self, path: bytes) -> Entry | None:
        """The file at ``path``, or None."""

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        """Whether any file lies below ``path``, those of ``without`` left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one hunk, or of a file diff as a whole.

    Attributes:
        verdict: ``applies``, ``offset``, ``merged`` or ``conflict``; of a patch that was carried
            by a three-way merge also ``context`` or ``moved``.
        path: of the file, as text.
        at: line in the patch file.
        why: evidence for a person.
    """

    verdict: Verdict
    path: str
    at: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one patch. ``changes`` maps paths to new files (None: deleted) and is
    empty unless the verdict is good."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    changes: dict[bytes, Entry | None] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOutcome:
    """What became of one file diff. ``changes`` counts only if no finding is bad."""

    diff: FileDiff
    findings: tuple[Finding, ...]
    changes: dict[bytes, Entry | None] = field(repr=False)

    @property
    def good(self) -> bool:
        """Whether all of it applies."""
        return all(finding.verdict.good for finding in self.findings)


def match_patch(patch: Patch, tree: Tree) -> Outcome:
    """Apply ``patch`` to ``tree``, which stays as it is."""
    findings: list[Finding] = []
    changes: dict[bytes, Entry | None] = {}
    for file in match_files(patch, tree):
        findings += file.findings
        # a rename's source must not undo what another diff puts at that path
        changes |= {p: e for p, e in file.changes.items() if e is not None or p not in changes}
    verdict = sum_up(findings)
    return Outcome(
        verdict=verdict, findings=tuple(findings), changes=changes if verdict.good else {}
    )


def match_files(patch: Patch, tree: Tree) -> Iterator[FileOutcome]:
    """``match_patch`` file by file: each against ``tree``, as if the others all applied."""
    added = {diff.new_path: diff for diff in patch.files if diff.kind is Kind.ADD}
    removed = {
        diff.old_path
        for diff in patch.files
        if diff.kind in (Kind.DELETE, Kind.RENAME) and diff.old_path is not None
    }
    for diff in patch.files:
        # A change of type is a deletion and an addition: what counts is what comes instead
        retyped = added.get(diff.path) if diff.path in removed else None
        if retyped is not None and _is_merged(retyped, tree):
            merged = _finding(diff, Verdict.MERGED, "the new file is there already")
            yield FileOutcome(diff=diff, findings=(merged,), changes={})
            continue
        found, made = _match_file(diff, tree, removed)
        yield FileOutcome(diff=diff, findings=tuple(found), changes=made)


def sum_up(findings: Sequence[Finding]) -> Verdict:
    """The verdict on a whole from those on its parts."""
    seen = {finding.verdict for finding in findings}
    if seen <= {Verdict.APPLIES, Verdict.OFFSET}:
        return Verdict.OFFSET if Verdict.OFFSET in seen else Verdict.APPLIES
    if seen == {Verdict.MERGED}:
        return Verdict.MERGED
    return Verdict.PARTLY_MERGED if Verdict.MERGED in seen else Verdict.CONFLICT


def _finding(diff: FileDiff, verdict: Verdict, why: str = "", at: int | None = None) -> Finding:
    return Finding(
        verdict=verdict, path=quote_path(diff.path), at=diff.at if at is None else at, why=why
    )


def _match_file(
    diff: FileDiff, tree: Tree, removed: set[bytes]
) -> tuple[list[Finding], dict[bytes, Entry | None]]:
    """Findings for one file diff, and the paths it changes when all of them are good."""
    old = tree.get(diff.old_path) if diff.old_path is not None else None
    obstacle = _obstacle(diff, old, tree, removed)
    if obstacle:
        merged = _is_merged(diff, tree)
        return [_finding(diff, Verdict.MERGED if merged else Verdict.CONFLICT, obstacle)], {}
    content = old.data if old else b""
    findings: list[Finding] = []
    if diff.binary is not None:
        try:
            content = _binary(diff, content)
        except ValueError as error:
            merged = _is_merged(diff, tree)
            return [_finding(diff, Verdict.MERGED if merged else Verdict.CONFLICT, str(error))], {}
    elif diff.hunks:
        findings, content = _match_hunks(diff, content)
    if diff.kind is Kind.DELETE and content and not _bad(findings):
        findings.append(
            _finding(diff, Verdict.CONFLICT, "the file holds more than the patch deletes")
        )
    findings += _besides(diff, old, findings)
    changes: dict[bytes, Entry | None] = {}
    if diff.old_path is not None and diff.kind in (Kind.DELETE, Kind.RENAME):
        changes[diff.old_path] = None
    if diff.new_path is not None:
        mode = diff.new_mode or (old.mode if old else REGULAR)
        changes[diff.new_path] = Entry(mode=mode, data=content)
    return findings or [_finding(diff, Verdict.APPLIES)], changes


def _besides(diff: FileDiff, old: Entry | None, findings: list[Finding]) -> list[Finding]:
    """That a name or a mode is left to change where every hunk is there already."""
    if {finding.verdict for finding in findings} != {Verdict.MERGED} or old is None:
        return []
    if diff.kind not in (Kind.RENAME, Kind.COPY) and diff.new_mode in (None, old.mode):
        return []
    return [_finding(diff, Verdict.APPLIES, "its lines are there; its name or mode is not")]


def _bad(findings: list[Finding]) -> bool:
    return any(not finding.verdict.good for finding in findings)


def _obstacle(diff: FileDiff, old: Entry | None, tree: Tree, removed: set[bytes]) -> str:
    """Why a file diff can't even start, or ""."""
    if diff.old_path is not None:
        if old is None:
            return f"{quote_path(diff.old_path)} does not exist"
        if diff.old_mode is not None and diff.old_mode != old.mode:
            return f"mode is {old.mode:06o}, the patch expects {diff.old_mode:06o}"
    if diff.new_path is not None and diff.new_path != diff.old_path:
        if diff.new_path not in removed and tree.get(diff.new_path) is not None:
            return f"{quote_path(diff.new_path)} exists already"
        if tree.is_folder(diff.new_path, without=removed):
            return f"{quote_path(diff.new_path)} is a folder"
        for parent in parents(diff.new_path):
            if parent not in removed and tree.get(parent) is not None:
                return f"{quote_path(parent)} is a file, the patch wants a folder there"
    return ""


def _is_merged(diff: FileDiff, tree: Tree) -> bool:
    """Whether the tree holds already what a diff of a whole file would make of it."""
    now = tree.get(diff.path)
    if diff.kind is Kind.DELETE:
        return now is None
    if now is None or (diff.new_mode is not None and now.mode != diff.new_mode):
        return False
    if diff.kind is Kind.ADD and diff.binary is None:
        return now.data == (diff.hunks[0].new if diff.hunks else b"")
    if diff.new_blob is not None and len(diff.new_blob) >= 40:
        return blob_id(now.data).encode() == diff.new_blob or _are_there(diff, now.data)
    if diff.hunks or diff.binary:
        return _are_there(diff, now.data)
    # only the mode, or only the name, was to change
    if diff.kind is Kind.COPY:
        source = tree.get(diff.path if diff.old_path is None else diff.old_path)
        return source is not None and source.data == now.data
    return diff.old_path is None or diff.kind is Kind.MODIFY or tree.get(diff.old_path) is None


def _are_there(diff: FileDiff, content: bytes) -> bool:
    return bool(diff.hunks) and all(
        _places(content, hunk.new, hunk, 0, anywhere=True) for hunk in diff.hunks
    )


def _binary(diff: FileDiff, content: bytes) -> bytes:
    assert diff.binary is not None  # noqa: S101 - the caller looked
    if diff.old_blob is None or diff.new_blob is None or len(diff.old_blob) < 40:
        raise ValueError("a binary diff needs full blob ids (git's --full-index)")
    if diff.kind is not Kind.ADD and blob_id(content).encode() != diff.old_blob:
        raise ValueError(
            f"content is {blob_id(content)}, the patch expects {diff.old_blob.decode()}"
        )
    made = apply_delta(content, diff.binary.data) if diff.binary.is_delta else diff.binary.data
    if diff.kind is not Kind.DELETE and blob_id(made).encode() != diff.new_blob:
        raise ValueError("the binary diff makes other content than it states")
    return made


def _match_hunks(diff: FileDiff, content: bytes) -> tuple[list[Finding], bytes]:
    """Findings hunk by hunk, and the new content (as far as the hunks applied)."""
    now = blob_id(content)
    if diff.kind is not Kind.ADD and _names(diff.new_blob, now):
        why = "the file is already what the patch makes of it"
        return [_finding(diff, Verdict.MERGED, why, hunk.at) for hunk in diff.hunks], content
    original = diff.kind is Kind.ADD or _names(diff.old_blob, now)
    findings: list[Finding] = []
    out = bytearray()
    done = 0  # bytes of the old content used up
    moved = False
    for hunk in diff.hunks:
        place = _place(content, hunk, done, original=original, moved=moved)
        if place.verdict.good:
            moved = moved or place.verdict is Verdict.OFFSET
            out += content[done : place.start] + hunk.new
            done = place.start + len(hunk.old)
        findings.append(_finding(diff, place.verdict, place.why, hunk.at))
    return findings, bytes(out + content[done:])


def _names(blob: bytes | None, full: str) -> bool:
    """Whether a perhaps abbreviated id of an index line names a blob."""
    return blob is not None and len(blob) >= 7 and full.startswith(blob.decode())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    verdict: Verdict
    start: int = -1  # byte offset, of a good verdict
    why: str = ""


def _place(content: bytes, hunk: Hunk, after: int, *, original: bool, moved: bool) -> _Place:
    """Where one hunk goes.

    Args:
        content: the old file.
        hunk: to place.
        after: byte offset from which on it may stand.
        original: whether this is the very file that the patch was written for.
        moved: whether an earlier hunk stands elsewhere than it states. Then the stated line
            is no more likely than another place.
    """
    places = _places(content, hunk.old, hunk, after)
    there = _places(content, hunk.new, hunk, 0, anywhere=True)
    stated = max(hunk.old_start, 1)
    strict = _places(content, hunk.new, hunk, 0).values()
    if not places:
        if there:
            line = next(iter(there))
            return _Place(
                verdict=Verdict.MERGED, why=f"the change is there already, at line {line}"
            )
        return _Place(
            verdict=Verdict.CONFLICT, why=f"the context at line {stated} is not in the file"
        )
    line = stated if stated in places and not moved else next(iter(places))
    if len(places) > 1 and (line != stated or moved):
        listed = ", ".join(map(str, list(places)[:8])) + (", ..." if len(places) > 8 else "")
        return _Place(
            verdict=Verdict.CONFLICT, why=f"ambiguous: the context fits at lines {listed}"
        )
    start = places[line]
    end = start + len(hunk.old)
    for twin, at in () if original else there.items():
        # Repeated lines: this may be the wrong one of two places, or the change made already.
        # Lines that stay when the rest of the hunk goes are no sign of that.
        if at < start or at + len(hunk.new) > end or at in strict:
            return _Place(
                verdict=Verdict.CONFLICT,
                why=f"ambiguous: the context fits at line {line}, "
                f"but the change may be there already, at line {twin}",
            )
    if line == stated:
        return _Place(verdict=Verdict.APPLIES, start=start)
    why = f"at line {line}, the patch says {stated}"
    return _Place(verdict=Verdict.OFFSET, start=start, why=why)


def _places(
    content: bytes, wanted: bytes, hunk: Hunk, after: int, *, anywhere: bool = False
) -> dict[int, int]:
    """Lines, each with its byte offset, where ``wanted`` stands as whole lines.

    By git's rules for strict context: a hunk at line 0 or 1 fits only the start of a file; one
    without context below its change only the end; one without any old line only an empty file.
    ``after`` is the start of a line. ``anywhere`` leaves start and end out of it.
    """
    if not wanted:
        return {} if content else {1: 0}
    found: dict[int, int] = {}
    line, counted = 1, 0
    for start in _line_starts(content, wanted, after):
        end = start + len(wanted)
        whole = wanted.endswith(b"\n") or end == len(content)
        at_start = anywhere or hunk.old_start > 1 or start == 0
        at_end = anywhere or hunk.trailing > 0 or end == len(content)
        if whole and at_start and at_end:
            line += content.count(b"\n", counted, start)
            counted = start
            found[line] = start
    return found


def _line_starts(content: bytes, wanted: bytes, after: int) -> Iterator[int]:
    """Offsets of ``wanted`` at the start of a line."""
    if after == 0 and content.startswith(wanted):
        yield 0
    start = content.find(b"\n" + wanted, max(after - 1, 0))
    while start >= 0:
        yield start + 1
        start = content.find(b"\n" + wanted, start + 1)


__all__ = [
    "EXECUTABLE", "REGULAR", "SYMLINK", "Entry", "FileOutcome", "Finding", "Outcome", "Tree",
    "Verdict", "match_files", "match_patch", "sum_up",
]  # fmt: skip
