"""Read git's diff format: bytes in, files and hunks out. Nothing is decoded, nothing is guessed.

Stricter than ``git apply``: a blank line is no context line, text between two file diffs or
after the signature is an error, prefixes are ``a/`` and ``b/``, all lines that name a path or
a place must agree, hunks stand in order. Whatever git would pass over in silence could be a
lost change, so it raises ``PatchError`` with the patch's name and line number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from overlay.errors import PatchError
from overlay.patches.delta import decode_line, inflate
from overlay.patches.paths import check_path, named_paths, parents, quote_path

REGULAR, EXECUTABLE, SYMLINK = 0o100644, 0o100755, 0o120000
MODES = (REGULAR, EXECUTABLE, SYMLINK)

# Nine digits: no file has more lines, and no number of an attacker costs time
_HUNK = re.compile(
    rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(?: .*)?\n?\Z", re.DOTALL
)
_INDEX = re.compile(rb"index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?\Z")
# What git's mail ends with: two dashes and a space, then git's version
_SIGNATURE = (b"-- ", b"--")
_SIZE = re.compile(rb"(literal|delta) (\d{1,9})\n\Z")
# What the binary diffs of one patch may inflate to, all in all: else a kilobyte fills the memory
_MAX_BINARY = 256 << 20
_MAX_HEADER = 1 << 14
_KINDS = {
    b"new file mode": "add", b"deleted file mode": "delete", b"rename from": "rename",
    b"copy from": "copy",
}  # fmt: skip


class Kind(StrEnum):
    """What a file diff does to its path."""

    MODIFY = "modify"
    ADD = "add"
    DELETE = "delete"
    RENAME = "rename"
    COPY = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """One ``@@`` block.

    Attributes:
        old_start: first line of the old side, 1-based (0 when the old side is empty).
        new_start: the same of the new side.
        old: bytes of the old side, line ends included.
        new: bytes of the new side, line ends included.
        leading: count of context lines before the first change.
        trailing: count of context lines after the last change.
        at: line of the ``@@`` in the patch file, 1-based.
        lines: prefixed lines, as they stand in the patch.
    """

    old_start: int
    new_start: int
    old: bytes
    new: bytes
    leading: int
    trailing: int
    at: int
    lines: tuple[bytes, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binary:
    """A ``GIT binary patch``: the new content, whole or as a delta against the old one."""

    data: bytes = field(repr=False)
    is_delta: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDiff:
    """What a patch does to one file. ``old_path`` is None for an added file, ``new_path`` for a
    deleted one; modes are git's six octal digits, None where the diff doesn't state them."""

    kind: Kind
    old_path: bytes | None
    new_path: bytes | None
    old_mode: int | None
    new_mode: int | None
    old_blob: bytes | None
    new_blob: bytes | None
    hunks: tuple[Hunk, ...]
    binary: Binary | None
    at: int

    @property
    def path(self) -> bytes:
        """The path that names this diff to a reader: the new one, or the old one of a deletion."""
        path = self.new_path if self.new_path is not None else self.old_path
        assert path is not None  # noqa: S101 - the parser makes no diff without a path
        return path

    @property
    def paths(self) -> tuple[bytes, ...]:
        """Every path whose content or existence may change."""
        pair = (self.old_path if self.kind is not Kind.COPY else None, self.new_path)
        return tuple(dict.fromkeys(path for path in pair if path is not None))


def parse_diff(text: bytes, *, name: str, first_line: int = 1) -> tuple[FileDiff, ...]:
    """Parse the diff part of a patch.

    Args:
        text: from the first ``diff --git`` on, without a mail signature.
        name: of the patch, for messages.
        first_line: line number of ``text``'s first line in the patch file.
    """
    return _Parser(text, name, first_line).files()


class _Parser:
    def __init__(self, text: bytes, name: str, first_line: int) -> None:
        self._lines = [line + b"\n" for line in text.split(b"\n")[:-1]]
        self._name = name
        self._first = first_line
        self._at = 0
        self._binary_left = _MAX_BINARY
        if not text.endswith(b"\n"):
            raise self._fail("the last line has no end: is the file cut off?", at=len(self._lines))

    def _fail(self, what: str, *, at: int | None = None, fix: str = "") -> PatchError:
        line = self._first + (self._at if at is None else at)
        return PatchError(
            f"{self._name}:{line}: {what}",
            fix=fix or "write the patch with 'export', or with git format-patch",
        )

    def _peek(self) -> bytes:
        return self._lines[self._at] if self._at < len(self._lines) else b""

    def files(self) -> tuple[FileDiff, ...]:
        found = []
        while self._at < len(self._lines):
            line = self._peek()
            if line.startswith(b"diff --git "):
                found.append(self._file())
            elif line.rstrip(b"\n") in _SIGNATURE:
                self._signature()
            elif line.strip():
                raise self._fail(f"text that is no part of a diff: {line[:60]!r}")
            else:
                self._at += 1
        self._check_distinct(found)
        return tuple(found)

    def _signature(self) -> None:
        """Pass over ``-- `` and git's version. More could be the rest of a hunk, or a patch."""
        self._at += 1
        if self._peek()[:1] not in (b" ", b"+", b"-", b"@", b"\\"):
            self._at += 1
        while self._at < len(self._lines):
            if self._peek().strip():
                raise self._fail(f"text after the signature: {self._peek()[:60]!r}")
            self._at += 1

    def _check_distinct(self, files: list[FileDiff]) -> None:
        seen: dict[bytes, FileDiff] = {}
        new = {diff.new_path for diff in files if diff.new_path is not None}
        for diff in files:
            at = diff.at - self._first
            for path in diff.paths:
                before = seen.get(path)
                # git writes a change of type (a file becomes a link) as deletion and addition
                retyped = before and before.kind is Kind.DELETE and diff.kind is Kind.ADD
                if before and not retyped:
                    raise self._fail(
                        f"{quote_path(path)} is changed by two file diffs of this patch", at=at
                    )
                seen[path] = diff
            for parent in parents(diff.new_path or b""):
                if parent in new:
                    raise self._fail(
                        f"{quote_path(parent)} is a file and a folder after this patch", at=at
                    )

    def _file(self) -> FileDiff:
        at = self._at
        header = self._peek()[len(b"diff --git ") :].rstrip(b"\n")
        if len(header) > _MAX_HEADER:
            raise self._fail("the paths of this diff are too long")
        self._at += 1
        extended = self._extended()
        kind = self._kind(extended, at)
        try:
            old, new = named_paths(header, extended)
        except ValueError as error:
            raise self._fail(f"can't tell the paths of this diff: {error}", at=at) from None
        binary = self._binary()
        hunks: list[Hunk] = []
        while b"+++" in extended and self._peek().startswith(b"@@ "):
            hunks.append(self._hunk())
        index = extended.get(b"index")
        mode = _mode(extended.get(b"index mode"))
        diff = FileDiff(
            kind=kind,
            old_path=None if kind is Kind.ADD else old,
            new_path=None if kind is Kind.DELETE else new,
            old_mode=_mode(extended.get(b"old mode") or extended.get(b"deleted file mode")) or mode,
            new_mode=_mode(extended.get(b"new mode") or extended.get(b"new file mode")) or mode,
            old_blob=index.split(b"..")[0] if index else None,
            new_blob=index.split(b"..")[1] if index else None,
            hunks=tuple(hunks),
            binary=binary,
            at=self._first + at,
        )
        self._check(diff, at)
        return diff

    def _extended(self) -> dict[bytes, bytes]:
        keys = (
            b"old mode", b"new mode", b"deleted file mode", b"new file mode", b"copy from",
            b"copy to", b"rename from", b"rename to", b"similarity index", b"dissimilarity index",
        )  # fmt: skip
        found: dict[bytes, bytes] = {}
        while line := self._peek():
            bare = line.rstrip(b"\n")
            key = next((key for key in keys if bare.startswith(key + b" ")), None)
            if key in found:
                raise self._fail(f"{bare[:60]!r} is said a second time")
            if key is not None:
                found[key] = bare[len(key) + 1 :]
            elif bare.startswith(b"index "):
                match = _INDEX.match(bare)
                if match is None:
                    raise self._fail(f"malformed index line {bare[:80]!r}")
                found[b"index"] = match[1] + b".." + match[2]
                found[b"index mode"] = match[3] or b""
            elif bare.startswith(b"--- "):
                return found | self._sides()
            else:
                break
            self._at += 1
        return found

    def _sides(self) -> dict[bytes, bytes]:
        found = {}
        for sign in (b"---", b"+++"):
            if not self._peek().startswith(sign + b" "):
                raise self._fail(f"no '{sign.decode()}' line")
            found[sign] = self._peek().rstrip(b"\n")[4:]
            self._at += 1
        if not self._peek().startswith(b"@@ "):
            raise self._fail("no hunk below '---' and '+++'")
        return found

    def _kind(self, extended: dict[bytes, bytes], at: int) -> Kind:
        found = [key for key in _KINDS if key in extended]
        pairs = (("old mode", "new mode"), ("rename from", "rename to"), ("copy from", "copy to"))
        if len(found) > 1 or any(
            (one.encode() in extended) != (other.encode() in extended) for one, other in pairs
        ):
            raise self._fail("this diff's header contradicts itself", at=at)
        return Kind(_KINDS[found[0]]) if found else Kind.MODIFY

    def _hunk(self) -> Hunk:
        at = self._at
        match = _HUNK.match(self._peek())
        if match is None:
            raise self._fail(f"malformed hunk header {self._peek()[:60]!r}")
        counts = {side: int(match[i]) if match[i] else 1 for side, i in ((b"-", 2), (b"+", 4))}
        left = dict(counts)
        self._at += 1
        lines: list[bytes] = []
        while left[b"-"] > 0 or left[b"+"] > 0:
            line = self._peek()
            sign = line[:1]
            if sign not in (b" ", b"-", b"+"):
                raise self._fail(
                    f"hunk at line {self._first + at} ends early: its header counts "
                    f"{counts[b'-']} old and {counts[b'+']} new lines, {left[b'-']} old and "
                    f"{left[b'+']} new are missing",
                    fix="don't edit hunks by hand; change the commit in a checkout and export",
                )
            for side in (b"-", b"+") if sign == b" " else (sign,):
                left[side] -= 1
            self._at += 1
            # "\ No newline at end of file", in whichever language diff wrote it
            if self._peek().startswith(b"\\ "):
                line = line.removesuffix(b"\n")
                self._at += 1
            lines.append(line)
        after = self._peek()
        if (
            left[b"-"]
            or left[b"+"]
            or after[:1] in (b" ", b"+")
            or (after[:1] == b"-" and after.rstrip(b"\n") not in _SIGNATURE)
        ):
            raise self._fail(
                f"hunk at line {self._first + at} is longer than its header counts",
                fix="don't edit hunks by hand; change the commit in a checkout and export",
            )
        hunk = _make_hunk(int(match[1]), int(match[3]), tuple(lines), self._first + at)
        for side in (b"+", b"-"):
            texts = [line for line in lines if line[:1] != side]
            if any(not line.endswith(b"\n") for line in texts[:-1]):
                raise self._fail("a line without an end stands before others", at=at)
        if all(line[:1] == b" " for line in lines):
            raise self._fail("this hunk changes nothing", at=at)
        return hunk

    def _binary(self) -> Binary | None:
        if self._peek().startswith(b"Binary files "):
            raise self._fail("binary diff without content", fix="write it with 'export'")
        if self._peek() != b"GIT binary patch\n":
            return None
        self._at += 1
        forward = self._binary_hunk()
        if self._peek().startswith((b"literal ", b"delta ")):
            self._binary_hunk()  # the way back, which we never go
        return forward

    def _binary_hunk(self) -> Binary:
        match = _SIZE.match(self._peek())
        if match is None:
            raise self._fail("malformed binary diff: no size")
        self._binary_left -= int(match[2])
        if self._binary_left < 0:
            raise self._fail(f"binary diffs of more than {_MAX_BINARY >> 20} MiB in one patch")
        self._at += 1
        packed = bytearray()
        try:
            while (line := self._peek().rstrip(b"\n")) != b"":
                packed += decode_line(line)
                self._at += 1
            if not self._peek():
                raise ValueError("no blank line ends it")
            data = inflate(bytes(packed), int(match[2]))
        except ValueError as error:
            raise self._fail(f"malformed binary diff: {error}") from None
        self._at += 1
        return Binary(data=data, is_delta=match[1] == b"delta")

    def _check(self, diff: FileDiff, at: int) -> None:
        for path in (diff.old_path, diff.new_path):
            if path is not None and (why := check_path(path)):
                raise self._fail(f"path {quote_path(path)} {why}", at=at)
        for mode in (diff.old_mode, diff.new_mode):
            if mode is not None and mode not in MODES:
                raise self._fail(f"mode {mode:06o} is no file that a patch can carry", at=at)
        self._check_hunks(diff)
        changes = diff.hunks or diff.binary or diff.kind is not Kind.MODIFY
        if not changes and diff.old_mode == diff.new_mode:
            raise self._fail("this diff changes nothing", at=at)

    def _check_hunks(self, diff: FileDiff) -> None:
        end = grown = 0
        for hunk in diff.hunks:
            at = hunk.at - self._first
            if diff.kind is Kind.ADD and (hunk.old or len(diff.hunks) > 1):
                raise self._fail("a new file depends on old content", at=at)
            if diff.kind is Kind.DELETE and hunk.new:
                raise self._fail("a deleted file keeps content", at=at)
            old, new = _line_count(hunk.old), _line_count(hunk.new)
            # an empty side states the line before it
            start, new_start = hunk.old_start + (not old), hunk.new_start + (not new)
            if start <= end or new_start != start + grown:
                raise self._fail(
                    f"hunk at line {hunk.at} says another place than the hunks before it",
                    at=at,
                    fix="don't edit hunks by hand; change the commit in a checkout and export",
                )
            end, grown = start + old - 1, grown + new - old


def _line_count(text: bytes) -> int:
    return text.count(b"\n") + (text[-1:] not in (b"", b"\n"))


def _make_hunk(old_start: int, new_start: int, lines: tuple[bytes, ...], at: int) -> Hunk:
    changed = [i for i, line in enumerate(lines) if line[:1] != b" "] or [len(lines)]
    return Hunk(
        old_start=old_start,
        new_start=new_start,
        old=b"".join(line[1:] for line in lines if line[:1] != b"+"),
        new=b"".join(line[1:] for line in lines if line[:1] != b"-"),
        leading=changed[0],
        trailing=len(lines) - 1 - changed[-1] if changed[-1] < len(lines) else 0,
        at=at,
        lines=lines,
    )


def _mode(text: bytes | None) -> int | None:
    if not text:
        return None
    return int(text, 8) if re.fullmatch(rb"[0-7]{6}", text) else -1
