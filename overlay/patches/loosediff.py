"""Read diffs as other tools write them: ``diff -u``, quilt, Subversion, git with other prefixes.

Each file diff is put into git's form and handed to ``overlay.patches.diff``, which does the reading
and all the checks. What is said is kept, and nothing is made up: a path that could be read in two
ways, content that isn't there, or text that no tool knows, is a ``PatchError``.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlay.errors import PatchError
from overlay.patches.diff import FileDiff, Kind, parse_diff
from overlay.patches.paths import quote_path, unquote_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_GIT = b"diff --git "
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@")
# Lines around a file diff that say nothing of their own; 'diff' is the command that was run
_NOISE = re.compile(rb"(Index: |={20,}$|diff -(?!-git ))")
# 'From ' of a mail, as git writes it, or as a mailbox has it: a name and a date
_FROM = re.compile(rb"From \S+ .*\d\d:\d\d:\d\d.* \d{4}")
# Where a hunk stands whose line numbers can't be believed: in the only place that fits
UNPLACED = 999_999_999
_MAX_FROM = 200
_MAX_NAME = 1 << 14
_SIGNATURE = (b"-- ", b"--")
# What a line of a hunk starts with; below a signature it is the rest of one, not its text
_SIGNS = (b" ", b"+", b"-", b"@", b"\\")
# What diff(1) writes behind a path, for a reader and for telling that a file was not there
_TIME = re.compile(
    rb"(?<![ \t])[ \t]+(?:\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?(?:\.\d+)?(?: [+-]\d{4})?"
    rb"|\w{3} \w{3} +\d+ \d\d:\d\d:\d\d (?:\w+ )?\d{4}(?: [+-]\d{4})?)\s*\Z"
)
# What diff(1) says of two files in place of a diff
_SAID = re.compile(
    rb"(Binary files|Files|Symbolic links) \S+ and \S+ differ\Z"
    rb"|File \S+ is an? .+ while file \S+ is an? .+\Z|Only in \S+: \S+\Z"
)
_QUOTED = re.compile(rb'("(?:[^"\\]|\\.)*")(.*)\Z')
# The instant 0, which says that there is no file; to the letter, as git reads it
_ISO = re.compile(
    rb"(1969-12-31|1970-01-01) +([0-2]\d):([0-5]\d):00(?:\.0+)? ([-+])([0-2]\d):?([0-5]\d)\Z"
)
_CTIME = re.compile(rb"Thu Jan +1 \d\d:\d\d:\d\d (?:\w+ )?1970")
_BACKUP = (b".orig", b"~", b".old", b".bak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A piece of a patch file: a mail, or all there is.

    Attributes:
        head: what stands before its first file diff.
        at: line of the file on which ``head`` begins, 1-based.
        diffs: the file diffs, each with the number of its first line.
    """

    head: bytes
    at: int
    diffs: tuple[tuple[int, tuple[bytes, ...]], ...]


def split_parts(raw: bytes, *, file: str) -> list[Part]:
    """The mails of a file, or the one part that it is.

    Raises ``PatchError`` for text between file diffs: it may be a diff that nobody reads.
    """
    lines = raw.split(b"\n")
    if lines[-1]:
        raise _error(file, len(lines), "the last line has no end: is the file cut off?")
    return _Splitter(lines[:-1], file).parts()


def read_diffs(part: Part, *, file: str, strip: int = 1) -> tuple[FileDiff, ...]:
    """The file diffs of a part.

    Args:
        part: as ``split_parts`` found it.
        file: for messages.
        strip: how many folders to take from the front of a path, as ``patch -p`` does.
    """
    found = [_read(lines, at, file, strip) for at, lines in part.diffs]
    seen: dict[bytes, FileDiff] = {}
    for diff in found:
        for path in diff.paths:
            before = seen.get(path)
            if before and not (before.kind is Kind.DELETE and diff.kind is Kind.ADD):
                raise _error(
                    file, diff.at, f"{quote_path(path)} is changed by two diffs, here and at "
                    f"line {before.at}", "make one of them ('quilt refresh' does)",
                )  # fmt: skip
            seen[path] = diff
    return tuple(found)


class _Splitter:
    def __init__(self, lines: Sequence[bytes], file: str) -> None:
        self._lines, self._file, self._at = lines, file, 0

    def parts(self) -> list[Part]:
        found: list[Part] = []
        while self._at < len(self._lines):
            found.append(self._part())
        return found

    def _line(self, ahead: int = 0) -> bytes:
        at = self._at + ahead
        return self._lines[at] if at < len(self._lines) else b""

    def _part(self) -> Part:
        start = self._at
        self._at += 1 if self._is_mail() else 0
        while self._at < len(self._lines) and not self._starts() and not self._is_mail():
            if _SAID.match(self._line()):
                raise _error(
                    self._file, self._at + 1, f"diff says this of files: {self._line()[:80]!r}",
                    "make the diff anew, by git; if it says so of nothing here, take it out",
                )  # fmt: skip
            self._at += 1
        end = self._at
        while end > start and (not self._lines[end - 1] or _NOISE.match(self._lines[end - 1])):
            end -= 1
        diffs = []
        signed = False
        while self._at < len(self._lines) and not self._is_mail():
            line = self._line()
            if self._starts():
                at = self._at
                diffs.append((at + 1, self._diff()))
                signed = False
            elif line in _SIGNATURE:
                signed = True
                self._at += 1
            elif (signed and line[:1] not in _SIGNS) or not line.strip() or _NOISE.match(line):
                self._at += 1
            else:
                raise _error(
                    self._file, self._at + 1, f"text that is no part of a diff: {line[:60]!r}",
                    "no tool reads it: put it above the first diff, or take it out",
                )  # fmt: skip
        head = b"".join(line + b"\n" for line in self._lines[start:end])
        return Part(head=head, at=start + 1, diffs=tuple(diffs))

    def _is_mail(self) -> bool:
        if len(self._line()) > _MAX_FROM or not _FROM.match(self._line()):
            return False
        return re.match(rb"[A-Za-z][A-Za-z-]*:( |$)", self._line(1)) is not None

    def _starts(self) -> bool:
        line = self._line()
        if line.startswith(_GIT):
            return True
        if line.startswith(b"@@ -"):
            raise _error(
                self._file, self._at + 1, "a hunk that no '---' and '+++' names a file for"
            )
        return (
            line.startswith(b"--- ")
            and self._line(1).startswith(b"+++ ")
            and self._line(2).startswith(b"@@ -")
        )

    def _diff(self) -> tuple[bytes, ...]:
        """One file diff, with blank lines in hunks as the context lines that they are."""
        taken: list[bytes] = []
        if self._line().startswith(_GIT):
            taken.append(self._next())
            while re.match(rb"[a-z]+ ", self._line()) and not self._line().startswith(b"diff "):
                taken.append(self._next())
            if self._line() == b"GIT binary patch":
                return (*taken, *self._binary())
            if self._line().startswith(b"Binary files "):
                return (*taken, self._next())
        if self._line().startswith(b"--- ") and self._line(1).startswith(b"+++ "):
            taken += [self._next(), self._next()]
            while self._line().startswith(b"@@ -"):
                taken += self._hunk()
        return tuple(taken)

    def _next(self) -> bytes:
        self._at += 1
        return self._lines[self._at - 1]

    def _hunk(self) -> list[bytes]:
        match = _HUNK.match(self._line())
        taken = [self._next()]
        old, new = (int(match[i] or 1) for i in (2, 3)) if match else (0, 0)
        while (old > 0 or new > 0) and self._at < len(self._lines):
            # git and patch alike take a blank line here for an empty line of context
            line = self._line() or b" "
            if line[:1] not in (b" ", b"-", b"+", b"\\"):
                break
            old -= line[:1] in (b" ", b"-")
            new -= line[:1] in (b" ", b"+")
            taken.append(line)
            self._at += 1
        # "no newline" belongs to the hunk; what looks like more lines does too, as a fault
        while self._line().startswith(b"\\ ") or (
            self._line()[:1] in (b" ", b"+", b"-")
            and self._line() not in _SIGNATURE
            and not self._line().startswith(b"--- ")
        ):
            taken.append(self._next())
        return taken

    def _binary(self) -> list[bytes]:
        taken = [self._next()]
        while re.match(rb"(literal|delta) \d+$", self._line()):
            while self._line():
                taken.append(self._next())
            taken.append(b"")
            self._at += 1
        return taken


def _read(lines: tuple[bytes, ...], at: int, file: str, strip: int) -> FileDiff:
    sides = next((i for i, line in enumerate(lines) if line.startswith(b"--- ")), len(lines))
    try:
        if any(len(line) > _MAX_NAME for line in lines[: sides + 2]):
            raise ValueError("the paths of this diff are too long")
        if any(line.endswith(b"\r") for line in (*lines[:sides], *lines[sides : sides + 2])):
            raise ValueError(
                "the lines that name the file end in CR: the line ends of this diff were changed, "
                "and those of its content can't be told"
            )
        if lines[0].startswith(_GIT):
            head = _git_head(lines[:sides], lines[sides : sides + 2], strip)
            is_gone = False
        else:
            head, is_gone = _plain_head(lines[0], lines[1], strip)
    except ValueError as error:
        raise _error(file, at, str(error)) from None
    hunks = tuple(_agreeing(lines[sides + 2 :]))
    text = b"".join(line + b"\n" for line in (*head, *hunks))
    # such that line numbers in messages and findings are the file's own from the hunks on
    first = at + min(sides + 2, len(lines)) - len(head)
    try:
        (diff,) = parse_diff(text, name=file, first_line=first)
    except PatchError as error:  # its remedy is one for our own files
        raise PatchError(error.what, why=error.why) from None
    if hunks != lines[sides + 2 :]:
        # At its start a file has but one place
        placed = [replace(h, old_start=UNPLACED) if h.old_start > 1 else h for h in diff.hunks]
        diff = replace(diff, hunks=tuple(placed))
    if is_gone:  # a plain diff does not say with which mode
        diff = replace(diff, old_mode=None)
    return replace(diff, at=at)


def _agreeing(lines: Sequence[bytes]) -> Iterator[bytes]:
    """Hunks whose places on the new side follow from those on the old one.

    Where somebody has edited a hunk, or taken one out, they don't, and tools differ in which
    side they believe.
    """
    grown = left = 0
    for line in lines:
        match = _HUNK.match(line) if left <= 0 else None
        if match is None:
            left -= {b" ": 2, b"-": 1, b"+": 1}.get(line[:1], 0)
            yield line
            continue
        start, old, new = (int(number or 1) for number in match.groups())
        left = old + new
        place = start + (not old) + grown - (not new)
        grown += new - old
        yield re.sub(rb"\+\d+", b"+%d" % place, line, count=1)


def _git_head(extended: Sequence[bytes], sides: Sequence[bytes], strip: int) -> tuple[bytes, ...]:
    """Git's header with ``a/`` and ``b/``, whatever prefixes it was written with."""
    header = extended[0][len(_GIT) :]
    if strip == 1 and header.startswith((b"a/", b'"a/')):
        return (*extended, *sides)
    names = [_name(side[4:], strip)[0] for side in sides]
    pairs = list(_pairs(header, strip))
    if not any(names):
        same = [pair for pair in pairs if pair[0] == pair[1]]
        if len(same) != 1:
            raise ValueError("can't tell the paths of this diff: only 'diff --git' names them")
        pair = same[0]
    else:
        old, new = (name or names[1 - i] for i, name in enumerate(names))
        pair = (old or b"", new or b"")
    if pair not in pairs:
        raise ValueError("'diff --git' names other files than '---' and '+++'")
    stated = [quote_path(x + path).encode() for x, path in zip((b"a/", b"b/"), pair, strict=True)]
    marks = [
        sign + (text if name else b"/dev/null")
        for sign, text, name in zip((b"--- ", b"+++ "), stated, names, strict=False)
    ]
    return (_GIT + b" ".join(stated), *extended[1:], *marks)


def _pairs(header: bytes, strip: int) -> Iterator[tuple[bytes, bytes]]:
    """All ways to read ``X Y`` as two paths."""
    for at in (i for i, byte in enumerate(header) if byte == 0x20):
        with contextlib.suppress(ValueError):
            first, second = unquote_path(header[:at]), unquote_path(header[at + 1 :])
            yield _strip(first, strip), _strip(second, strip)


def _plain_head(before: bytes, after: bytes, strip: int) -> tuple[tuple[bytes, ...], bool]:
    """Git's header for ``---`` and ``+++`` of a plain diff; whether the file goes."""
    (old, was_there), (new, is_there) = _name(before[4:], strip), _name(after[4:], strip)
    if not was_there and not is_there:
        raise ValueError("neither '---' nor '+++' names a file")
    path = _one(old, new)
    name, other = (quote_path(x + path).encode() for x in (b"a/", b"b/"))
    first = _GIT + name + b" " + other
    if not was_there:
        return (first, b"new file mode 100644", b"--- /dev/null", b"+++ " + other), False
    if not is_there:
        return (first, b"deleted file mode 100644", b"--- " + name, b"+++ /dev/null"), True
    return (first, b"--- " + name, b"+++ " + other), False


def _one(old: bytes | None, new: bytes | None) -> bytes:
    """The file that both name. Tools differ in whom they believe, so they must agree."""
    if old is None or new is None or old == new:
        path = old if old is not None else new
        assert path is not None  # noqa: S101 - the caller looked
        return path
    for path, copy in ((new, old), (old, new)):
        if any(copy == path + suffix for suffix in _BACKUP):
            return path
    raise ValueError(
        f"'---' names {quote_path(old)} and '+++' names {quote_path(new)}: "
        "git and patch each have a rule of their own to choose"
    )


def _name(text: bytes, strip: int) -> tuple[bytes | None, bool]:
    """The path of a ``---`` or ``+++`` line, and whether that side has a file."""
    if quoted := _QUOTED.match(text):
        name, rest = unquote_path(quoted[1]), quoted[2]
    elif b"\t" in text:
        name, _, rest = text.partition(b"\t")
    else:
        time = _TIME.search(text) if b" " in text else None
        name, rest = (text[: time.start()], time[0]) if time else (text, b"")
    if name == b"/dev/null":
        return None, False
    if name != name.strip():
        raise ValueError(f"can't tell where the path {name[:60]!r} ends")
    return _strip(name, strip), not _is_epoch(rest.strip())


def _is_epoch(time: bytes) -> bool:
    """Whether a time is the instant 0. One with a byte too many is none, to git too."""
    match = _ISO.match(time)
    if match is None:
        return _CTIME.search(time) is not None
    hours, minutes, zone_hours, zone_minutes = (int(match[i]) for i in (2, 3, 5, 6))
    zone = (zone_hours * 60 + zone_minutes) * (-1 if match[4] == b"-" else 1)
    day = 0 if match[1] == b"1970-01-01" else -24 * 60
    return day + hours * 60 + minutes == zone


def _strip(path: bytes, count: int) -> bytes:
    parts = path.split(b"/", count)
    if len(parts) <= count or not parts[-1]:
        raise ValueError(f"the path {quote_path(path)} has no {count} folders to strip (-p{count})")
    return parts[-1]


def _error(file: str, line: int, what: str, fix: str = "") -> PatchError:
    return PatchError(f"{file}:{line}: {what}", fix=fix)
