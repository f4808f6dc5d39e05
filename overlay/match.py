"""Apply one patch to one tree, strictly, and say what became of it.

Strict means: every byte of context counts, no fuzz, no white-space leniency, nothing applied
in reverse. A hunk may sit at other lines than it states (``offset``) when exactly one place
fits; where several fit git would take the nearest, and we refuse. The patched content is the
same as that of ``git apply``, which the tests hold it against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from overlay.delta import apply_delta
from overlay.diff import EXECUTABLE, REGULAR, SYMLINK, FileDiff, Hunk, Kind
from overlay.objects import blob_id
from overlay.paths import quote_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.patch import Patch


class Verdict(StrEnum):
    """What became of one patch on one tree (DESIGN.md, Verdicts)."""

    APPLIES = "applies"
    OFFSET = "offset"
    MERGED = "merged"
    PARTLY_MERGED = "partly-merged"
    CONFLICT = "conflict"
    BLOCKED = "blocked"

    @property
    def good(self) -> bool:
        """Whether the patch is part of the patched tree."""
        return self in (Verdict.APPLIES, Verdict.OFFSET)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of a tree."""

    mode: int
    data: bytes = field(repr=False)


class Tree(Protocol):
    """The tree that a patch meets."""

    def get(self, path: bytes) -> Entry | None:
        """The file at ``path``, or None."""

    def is_folder(self, path: bytes) -> bool:
        """Whether ``path`` is a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one hunk, or of a file diff as a whole.

    Attributes:
        verdict: ``applies``, ``offset``, ``merged`` or ``conflict``.
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


def match_patch(patch: Patch, tree: Tree) -> Outcome:
    """Apply ``patch`` to ``tree``, which stays as it is."""
    findings: list[Finding] = []
    changes: dict[bytes, Entry | None] = {}
    removed = {
        diff.old_path
        for diff in patch.files
        if diff.kind in (Kind.DELETE, Kind.RENAME) and diff.old_path is not None
    }
    for diff in patch.files:
        found, made = _match_file(diff, tree, removed)
        findings += found
        # a rename's source must not undo what another diff puts at that path
        changes |= {p: e for p, e in made.items() if e is not None or p not in changes}
    verdict = _sum_up(findings)
    return Outcome(
        verdict=verdict, findings=tuple(findings), changes=changes if verdict.good else {}
    )


def _sum_up(findings: list[Finding]) -> Verdict:
    seen = {finding.verdict for finding in findings}
    if seen <= {Verdict.APPLIES, Verdict.OFFSET}:
        return Verdict.OFFSET if Verdict.OFFSET in seen else Verdict.APPLIES
    if seen == {Verdict.MERGED}:
        return Verdict.MERGED
    return Verdict.PARTLY_MERGED if Verdict.MERGED in seen else Verdict.CONFLICT


def _match_file(
    diff: FileDiff, tree: Tree, removed: set[bytes]
) -> tuple[list[Finding], dict[bytes, Entry | None]]:
    """Findings for one file diff, and the paths it changes when all of them are good."""

    def found(verdict: Verdict, why: str = "") -> Finding:
        return Finding(verdict=verdict, path=quote_path(diff.path), at=diff.at, why=why)

    old = tree.get(diff.old_path) if diff.old_path is not None else None
    obstacle = _obstacle(diff, old, tree, removed)
    if obstacle:
        merged = _is_merged(diff, tree)
        return [found(Verdict.MERGED if merged else Verdict.CONFLICT, obstacle)], {}
    content = old.data if old else b""
    findings: list[Finding] = []
    if diff.binary is not None:
        try:
            content = _binary(diff, content)
        except ValueError as error:
            merged = _is_merged(diff, tree)
            return [found(Verdict.MERGED if merged else Verdict.CONFLICT, str(error))], {}
    elif diff.hunks:
        findings, content = _match_hunks(diff, content)
    if diff.kind is Kind.DELETE and content and not _bad(findings):
        findings.append(found(Verdict.CONFLICT, "the file holds more than the patch deletes"))
    changes: dict[bytes, Entry | None] = {}
    if diff.old_path is not None and diff.kind in (Kind.DELETE, Kind.RENAME):
        changes[diff.old_path] = None
    if diff.new_path is not None:
        mode = diff.new_mode or (old.mode if old else REGULAR)
        changes[diff.new_path] = Entry(mode=mode, data=content)
    return findings or [found(Verdict.APPLIES)], changes


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
        if tree.is_folder(diff.new_path):
            return f"{quote_path(diff.new_path)} is a folder"
        for parent in _parents(diff.new_path):
            if parent not in removed and tree.get(parent) is not None:
                return f"{quote_path(parent)} is a file, the patch wants a folder there"
    return ""


def _parents(path: bytes) -> Iterator[bytes]:
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path


def _is_merged(diff: FileDiff, tree: Tree) -> bool:
    """Whether the tree holds already what a diff of a whole file would make of it."""
    now = tree.get(diff.path)
    if diff.kind is Kind.DELETE:
        return now is None
    if now is None or (diff.new_mode is not None and now.mode != diff.new_mode):
        return False
    if diff.kind is Kind.ADD and diff.binary is None:
        return now.data == (diff.hunks[0].new if diff.hunks else b"")
    if diff.hunks:
        return all(_places(now.data, hunk.new, hunk, 0) for hunk in diff.hunks)
    if diff.new_blob is not None:
        return len(diff.new_blob) >= 40 and blob_id(now.data).encode() == diff.new_blob
    # only the mode, or only the name, was to change
    return diff.old_path is None or diff.kind is Kind.MODIFY or tree.get(diff.old_path) is None


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
    findings: list[Finding] = []
    out = bytearray()
    done = drift = 0  # bytes of the old content used up; lines by which the last hunk was off
    for hunk in diff.hunks:
        verdict, start, why = _place(content, hunk, done, drift)
        if verdict.good:
            drift = content.count(b"\n", 0, start) + 1 - max(hunk.old_start, 1)
            out += content[done:start] + hunk.new
            done = start + len(hunk.old)
        findings.append(Finding(verdict=verdict, path=quote_path(diff.path), at=hunk.at, why=why))
    return findings, bytes(out + content[done:])


def _place(content: bytes, hunk: Hunk, after: int, drift: int) -> tuple[Verdict, int, str]:
    """Verdict, byte offset and evidence for one hunk."""
    places = _places(content, hunk.old, hunk, after)
    lines = {content.count(b"\n", 0, start) + 1: start for start in places}
    stated = max(hunk.old_start, 1)
    for line in dict.fromkeys((stated + drift, stated)):
        if line in lines:
            verdict = Verdict.APPLIES if line == stated else Verdict.OFFSET
            why = "" if line == stated else f"at line {line}, the patch says {stated}"
            return verdict, lines[line], why
    if len(lines) == 1:
        ((line, start),) = lines.items()
        return Verdict.OFFSET, start, f"at line {line}, the patch says {stated}"
    if lines:
        listed = ", ".join(map(str, sorted(lines)))
        return Verdict.CONFLICT, -1, f"ambiguous: the context fits at lines {listed}"
    if merged := _places(content, hunk.new, hunk, 0):
        line = content.count(b"\n", 0, merged[0]) + 1
        return Verdict.MERGED, -1, f"the change is there already, at line {line}"
    return Verdict.CONFLICT, -1, f"the context at line {stated} is not in the file"


def _places(content: bytes, wanted: bytes, hunk: Hunk, after: int) -> list[int]:
    """Byte offsets where ``wanted`` stands as whole lines, by git's rules for strict context.

    A hunk at line 0 or 1 fits only the start of a file; one without context below its change
    only the end; one without any old line only an empty file.
    """
    if not wanted:
        return [0] if not content else []
    found = []
    start = content.find(wanted, after)
    while start >= 0:
        end = start + len(wanted)
        whole = (start == 0 or content[start - 1 : start] == b"\n") and (
            wanted.endswith(b"\n") or end == len(content)
        )
        at_start = hunk.old_start > 1 or start == 0
        at_end = hunk.trailing > 0 or end == len(content)
        if whole and at_start and at_end:
            found.append(start)
        start = content.find(wanted, start + 1)
    return found


__all__ = [
    "EXECUTABLE", "REGULAR", "SYMLINK", "Entry", "Finding", "Outcome", "Tree", "Verdict",
    "match_patch",
]  # fmt: skip
