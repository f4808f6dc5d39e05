"""Faults of one patch file that can be seen in its text: message, trailers, added lines, form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from overlay.errors import PatchError
from overlay.patches.diff import EXECUTABLE, REGULAR, FileDiff, Kind, parse_diff
from overlay.patches.patch import NAME_TRAILER, TEMPLATES, Patch, message_faults, parse_patch
from overlay.patches.paths import quote_path
from overlay.wheels.layout import NotShipped, wheel_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.lines.line import Upstream

Severity = Literal["error", "hint"]

SUBJECT_LENGTH = 72
EXPORT = "change the commit in a checkout and export"

# Yocto's words, and whether something in brackets must follow
_STATUSES = {
    "Pending": "",
    "Denied": "",
    "Submitted": "where",
    "Backport": "version",
    "Inactive-Upstream": "reason",
    "Inappropriate": "reason",
}
_STATUS = re.compile(r"([A-Za-z-]+)(?:\s+\[(.*\S.*)\])?\Z")
_PULL_REQUEST = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*#[1-9][0-9]*\Z")
_TRAILERS = ("Requires", "Upstream", "Upstream-Status", "Remove-When")
_SUBJECT = re.compile(r"[\w./,+*{}-]+: \S")
_NUMBERED = re.compile(r"[0-9]+[-_.]")
_CONFLICT = re.compile(rb"(<{7}|>{7}|\|{7})( |\r?\n|\Z)")
_DIFF = re.compile(rb"^diff --git ", re.MULTILINE)
# In these a blank at a line's end is content
_BLANKS_COUNT = (b".md", b".patch", b".diff")
# Stands in for a diff that can't be read, so that the message above it is checked all the same
_STAND_IN = b"diff --git a/x b/x\nold mode 100644\nnew mode 100755\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        file: path below the folder of all lines, ``/``-separated.
        line: in that file, 1-based; 0 where the file as a whole is meant.
        code: stable name of the check.
        what: one sentence.
        fix: the next step, or "".
        severity: ``error`` makes the line refused; a ``hint`` is an advice.
    """

    file: str
    line: int
    code: str
    what: str
    fix: str = ""
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of reading a patch: the patch, if it can be read, and all its faults.

    ``requires`` is known also where only the diff is broken.
    """

    patch: Patch | None
    requires: tuple[str, ...]
    faults: tuple[Fault, ...]


def check_patch(raw: bytes, *, name: str, file: str, upstream: Upstream) -> Checked:
    """Read a patch file and look at everything in it that needs no tree.

    Args:
        raw: content of the file.
        name: of the patch.
        file: for the faults.
        upstream: whose tree it patches.
    """
    faults: list[Fault] = []
    readable: Patch | None = None
    shown: Patch | None = None
    try:
        readable = shown = parse_patch(raw, name=name)
    except PatchError as error:
        broken = _broken_diffs(raw, name) or [error]
        faults += [_from_error(fault, name, file) for fault in broken]
        shown = _without_diff(raw, name)
    if _NUMBERED.match(name):
        faults.append(
            Fault(file=file, line=0, code="numbered-name",
                  what=f"the name {name} starts with a number; order is the series file's alone",
                  fix="rename it, and its line in the series")
        )  # fmt: skip
    if shown is not None:
        faults += _message(shown, file)
        faults += _trailers(shown, file)
    if readable is not None:
        for diff in readable.files:
            faults += _added_lines(diff, file)
            faults += _modes(diff, file)
            faults += _shipping(diff, file, upstream)
        faults += _form(readable, file)
    return Checked(readable, shown.requires if shown else (), tuple(faults))


def _broken_diffs(raw: bytes, name: str) -> list[PatchError]:
    """The first error of every file diff that has one: a hunk can't hold a ``diff --git`` line."""
    starts = [found.start() for found in _DIFF.finditer(raw)]
    errors = []
    for start, end in pairwise([*starts, len(raw)]):
        try:
            parse_diff(raw[start:end], name=name, first_line=raw.count(b"\n", 0, start) + 1)
        except PatchError as error:
            errors.append(error)
    return errors


def _without_diff(raw: bytes, name: str) -> Patch | None:
    start = _DIFF.search(raw)
    head = raw[: start.start()] if start else raw.rstrip(b"\n") + b"\n\n"
    try:
        return parse_patch(head + _STAND_IN, name=name)
    except PatchError:
        return None


def _from_error(error: PatchError, name: str, file: str) -> Fault:
    at = re.match(re.escape(name) + r":(\d+): ", error.what)
    what = error.what[at.end() :] if at else error.what.removeprefix(f"{name}: ")
    code = "hunk-count" if "header counts" in what else "malformed"
    return Fault(file=file, line=int(at[1]) if at else 0, code=code, what=what, fix=error.fix)


def _message(patch: Patch, file: str) -> Iterator[Fault]:
    subject_at = _line_of(patch.raw, b"Subject:")
    for what in message_faults(patch):
        yield Fault(
            file=file, line=subject_at if "subject" in what else 0, code="message", what=what,
            fix="reword the commit in a checkout and export",
        )  # fmt: skip
    if len(patch.subject) > SUBJECT_LENGTH:
        yield Fault(
            file=file, line=subject_at, code="subject",
            what=f"the subject has {len(patch.subject)} characters, "
            f"at most {SUBJECT_LENGTH} are allowed",
            fix="shorten it; the reason has room",
        )  # fmt: skip
    if patch.subject and not _SUBJECT.match(patch.subject):
        yield Fault(
            file=file, line=subject_at, code="subject",
            what=f"the subject {patch.subject[:40]!r} is not of the form 'area: what'",
            fix="start it with the part of upstream that it changes, such as 'attention: '",
        )  # fmt: skip
    for part, template in TEMPLATES.items():
        if template in patch.message:
            yield Fault(
                file=file, line=subject_at, code="template",
                what=f"the {part} is the template's: {template!r}",
                fix="reword the commit in a checkout and export",
            )  # fmt: skip
    if not patch.reason.strip():
        yield Fault(
            file=file, line=subject_at, code="no-reason",
            what="the message says no reason for the change",
            fix="add a paragraph between subject and trailers that says why",
        )  # fmt: skip


def _trailers(patch: Patch, file: str) -> Iterator[Fault]:
    if patch.trailer(NAME_TRAILER):
        yield Fault(
            file=file, line=_line_of(patch.raw, NAME_TRAILER.encode()), code="name-trailer",
            what=f"'{NAME_TRAILER}:' belongs in commits of a checkout, not in a patch file",
            fix="take it out, or write the patch with 'export'",
        )  # fmt: skip
    wanted = ["Upstream-Status", "Remove-When"]
    status = patch.trailer("Upstream-Status")
    # A backport names the version that has it; which pull request it was is not always public
    if status and status[0].split(" ")[0] == "Submitted":
        wanted.append("Upstream")
    for key in wanted:
        if not patch.trailer(key):
            yield _missing_trailer(patch, key, file)
    for key in ("Upstream-Status", "Remove-When"):
        if len(patch.trailer(key)) > 1:
            yield _trailer_fault(patch, key, f"'{key}:' is there more than once", file)
    yield from _trailer_values(patch, file)


def _trailer_values(patch: Patch, file: str) -> Iterator[Fault]:
    for value in patch.trailer("Upstream-Status"):
        if what := _status_fault(value):
            yield _trailer_fault(patch, "Upstream-Status", what, file)
    for value in patch.trailer("Upstream"):
        if not _PULL_REQUEST.match(value):
            what = f"'Upstream: {value}' names no pull request"
            yield _trailer_fault(patch, "Upstream", what, file, "write owner/repository#number")


def _missing_trailer(patch: Patch, key: str, file: str) -> Fault:
    fix = f"add a line '{key}: ...' to the last paragraph of the message"
    near = get_close_matches(key, [k for k, _ in patch.trailers if k not in _TRAILERS], n=1)
    if near:
        fix = f"'{near[0]}' may be a misspelling of it"
    elif re.search(rf"^{key}:", patch.reason, re.MULTILINE):
        fix = "trailers are the last paragraph, and nothing else may stand in it"
    return Fault(
        file=file, line=0, code="missing-trailer", what=f"the trailer '{key}:' is missing", fix=fix
    )


def _status_fault(value: str) -> str:
    match = _STATUS.match(value)
    if match is None or match[1] not in _STATUSES:
        known = ", ".join(f"{k} [{v}]" if v else k for k, v in _STATUSES.items())
        return f"'Upstream-Status: {value}' is none of: {known}"
    detail = _STATUSES[match[1]]
    if detail and match[2] is None:
        return f"'Upstream-Status: {match[1]}' must say its {detail}: {match[1]} [{detail}]"
    return ""


def _trailer_fault(patch: Patch, key: str, what: str, file: str, fix: str = "") -> Fault:
    line = _line_of(patch.raw, key.encode() + b":")
    return Fault(file=file, line=line, code="trailer", what=what, fix=fix or "correct the trailer")


def _line_of(raw: bytes, start: bytes) -> int:
    found = re.search(rb"^" + re.escape(start), raw, re.MULTILINE | re.IGNORECASE)
    return raw.count(b"\n", 0, found.start()) + 1 if found else 0


def _added_lines(diff: FileDiff, file: str) -> Iterator[Fault]:
    path = quote_path(diff.path)
    # A line that moves keeps its blanks: they are upstream's
    removed = {line[1:] for hunk in diff.hunks for line in hunk.lines if line[:1] == b"-"}
    for hunk in diff.hunks:
        for at, line in _numbered(hunk.lines, hunk.at):
            if line[:1] != b"+" or line[1:] in removed:
                continue
            if what := _blank_fault(line[1:], diff.path):
                yield Fault(file=file, line=at, code="white-space", what=f"{path}: {what}",
                            fix=EXPORT)  # fmt: skip
            if _CONFLICT.match(line[1:]):
                yield Fault(file=file, line=at, code="conflict-marker",
                            what=f"{path}: a conflict marker is added", fix=EXPORT)  # fmt: skip
        if what := _line_end_fault(hunk.lines, is_new=diff.kind is Kind.ADD):
            yield Fault(file=file, line=hunk.at, code="line-ends", what=f"{path}: {what}",
                        fix=EXPORT)  # fmt: skip


def _numbered(lines: tuple[bytes, ...], at: int) -> Iterator[tuple[int, bytes]]:
    """Each line of a hunk with its line number in the patch file."""
    for line in lines:
        at += 1
        yield at, line
        at += not line.endswith(b"\n")  # the line that says so follows


def _blank_fault(line: bytes, path: bytes) -> str:
    text = line.removesuffix(b"\n").removesuffix(b"\r")
    if text != text.rstrip(b" \t\r") and not path.endswith(_BLANKS_COUNT):
        return "white space at the end of an added line"
    indent = text[: len(text) - len(text.lstrip(b" \t"))]
    if b" \t" in indent:
        return "a space before a tab in an added line's indent"
    return ""


def _line_end_fault(lines: tuple[bytes, ...], *, is_new: bool) -> str:
    added = [line.endswith(b"\r\n") for line in lines if line[:1] == b"+"]
    there = [line.endswith(b"\r\n") for line in lines if line[:1] != b"+"]
    if is_new and any(added) and not all(added[:-1]):
        return "the new file mixes CRLF and LF"
    if there and not any(there) and any(added):
        return "lines with CRLF are added among lines with LF"
    return ""


def _modes(diff: FileDiff, file: str) -> Iterator[Fault]:
    if diff.kind is not Kind.ADD or not diff.hunks:
        return
    is_script = diff.hunks[0].new.startswith(b"#!")
    if is_script and diff.new_mode == REGULAR:
        what = "starts with '#!' but is not executable"
    elif not is_script and diff.new_mode == EXECUTABLE:
        what = "is executable but does not start with '#!'"
    else:
        return
    yield Fault(
        file=file, line=diff.at, code="file-mode", what=f"new file {quote_path(diff.path)} {what}",
        fix="set its mode in a checkout with 'git update-index --chmod'", severity="hint",
    )  # fmt: skip


def _shipping(diff: FileDiff, file: str, upstream: Upstream) -> Iterator[Fault]:
    path = quote_path(diff.path)
    if diff.kind is Kind.ADD and isinstance(wheel_path(upstream, path, ()), NotShipped):
        yield Fault(
            file=file, line=diff.at, code="ships-nowhere",
            what=f"new file {path} is part of no wheel", severity="hint",
            fix="leave it out, unless a checkout is what it is for",
        )  # fmt: skip


def _form(patch: Patch, file: str) -> Iterator[Fault]:
    """Deviations from what ``export`` writes; they mean nothing, but cost a diff some day."""
    seen = []
    if not patch.raw.startswith(b"From " + b"0" * 40):
        seen.append("a commit id in the first line")
    short = [d for d in patch.files if d.new_blob is not None and len(d.new_blob) < 40]
    if short:
        seen.append("abbreviated blob ids")
    last = patch.raw.rstrip(b"\n").rpartition(b"\n--")[2].strip()
    if re.fullmatch(rb"[0-9]+\.[0-9][\w.() -]*", last):
        seen.append("git's version at the end")
    diff = _DIFF.search(patch.raw)
    if diff is not None and b"\n---\n" in patch.raw[: diff.start()]:
        seen.append("a diffstat")
    if seen:
        yield Fault(
            file=file, line=0, code="form", severity="hint",
            what=f"not as 'export' writes it: {', '.join(seen)}",
            fix="nothing now: 'export' keeps it until message or effect change",
        )  # fmt: skip
