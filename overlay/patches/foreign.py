"""Patch files that this tool did not write, read into patches: quilt, DEP-3, git, mailboxes.

A folder gives its files in order, a file its mails. What stands above a diff becomes author,
date, subject and message; nothing of it is dropped but what ``git am`` drops of a mail.
"""

from __future__ import annotations

import codecs
import datetime
import email.errors
import email.header
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlay.errors import LineError, PatchError
from overlay.lines.line import SERIES_FILE, read_file
from overlay.patches.commits import NAME_LINE
from overlay.patches.loosediff import Part, read_diffs, split_parts
from overlay.patches.patch import Patch, parse_patch, split_trailers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

_SUFFIXES = re.compile(r"\.(patch|diff)\Z")
_NUMBERED = re.compile(r"([0-9]+)-.*\.(patch|diff)\Z")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lzma", ".Z", ".zip")
_FIELD = re.compile(r"([A-Za-z][A-Za-z0-9-]*):(?:[ \t]+(.*)|)\Z")
_NAME_LENGTH, _MAX_DATE = 48, 100
# Of a mail's way from sender to reader; 'git am' drops them
_TRANSPORT = re.compile(
    r"(mime-version|content-.*|message-id|to|cc|bcc|in-reply-to|references|received|return-path"
    r"|sender|reply-to|delivered-to|list-.*|x-.*|dkim-.*|arc-.*|authentication-results|lines"
    r"|status|organization|user-agent|precedence|errors-to)\Z"
)
# What 'git am' takes from the front of a subject
_EATEN = re.compile(r"\A(?:\s|:|[Rr][Ee]:|\[[^\]]*\])+")
_DIFFSTAT = re.compile(
    r"\s.* \|\s+(\d+|Bin)\b.*\Z| \.\.\.$| \d+ files? changed| (create|delete|rename|copy|mode) .*\d"
)
# A first paragraph is one of fields when it has one of these
_KNOWN = re.compile(
    r"(from|subject|date|description|author|origin|forwarded|last-update|bug|bug-.*|applied-upstream)\Z"
)
_ANY_DATE = "Thu, 1 Jan 1970 00:00:00 +0000"
_STAND_IN = "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n"
_Fields = list[tuple[str, list[str]]]
_DATES = (
    "%d %b %Y %H:%M:%S %z", "%b %d %H:%M:%S %Y %z", "%Y-%m-%d %H:%M:%S %z",
    "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One patch of a folder or mailbox, not read yet.

    Attributes:
        name: of the patch that it becomes.
        file: where it stands, for messages: file and, where there are several, its number.
        part: text and diffs; None where the file can't be split, and ``fault`` says why.
        strip: folders that its paths have in front.
    """

    name: str
    file: str
    part: Part | None
    strip: int
    fault: PatchError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What to take where a file doesn't say it.

    Attributes:
        author: ``Name <mail>``, or "" to refuse.
        date: git's raw form.
        charset: of the text above a diff.
    """

    author: str
    date: str
    charset: str = "utf-8"


def read_letters(path: Path, *, taken: Collection[str] = ()) -> list[Letter]:
    """The letters of a folder with a series file, of numbered mails, or of one file.

    Args:
        path: folder or file.
        taken: names that patches have already.

    Raises:
        LineError: the order can't be told, or a file can't be read.
    """
    used = set(taken)
    found = [
        letter
        for file, strip in _files(path)
        for letter in _letters(path if path.is_file() else path / file, file, strip, used)
    ]
    if not found:
        raise LineError(f"{path} names no patch", fix="name a folder of patches, or a mailbox")
    return found


def read_letter(letter: Letter, defaults: Defaults) -> Patch:
    """Read one letter. Raises ``PatchError`` with file and line where it can't be."""
    if letter.fault is not None or letter.part is None:
        raise letter.fault or PatchError(f"{letter.file}: is empty")
    part = letter.part
    if not part.diffs:
        raise PatchError(f"{letter.file}: holds no diff", fix="leave it out with --skip")
    diffs = read_diffs(part, file=letter.file, strip=letter.strip)
    patch = _Head(part, letter, defaults).patch()
    raw = part.head + b"".join(line + b"\n" for _, lines in part.diffs for line in lines)
    return replace(patch, name=letter.name, raw=raw, files=diffs)


def _files(path: Path) -> Iterator[tuple[str, int]]:
    """Files in order, each with how many folders its paths have in front."""
    if path.is_file():
        yield path.name, 1
        return
    if not path.is_dir():
        raise LineError(f"{path}: no such file or folder")
    if (path / SERIES_FILE).is_file():
        yield from _series(path)
        return
    files = [each.name for each in path.iterdir() if _SUFFIXES.search(each.name)]
    numbers = {name: int(found[1]) for name in files if (found := _NUMBERED.match(name))}
    loose = sorted(set(files) - set(numbers))
    if loose or len(set(numbers.values())) < len(numbers):
        said = f"{loose[0]} has no number" if loose else "two patches have the same number"
        raise LineError(
            f"nothing says the order of the patches in {path}",
            why=f"there is no '{SERIES_FILE}' file, and {said}",
            fix=f"write a '{SERIES_FILE}' file: one name a line",
        )
    for name in sorted(numbers, key=lambda each: numbers[each]):
        if name != "0000-cover-letter.patch":
            yield name, 1


def _series(folder: Path) -> Iterator[tuple[str, int]]:
    try:
        text = read_file(folder / SERIES_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise LineError(f"can't read {folder / SERIES_FILE}: {error}") from None
    seen: dict[str, int] = {}
    for at, line in enumerate(text.split("\n"), start=1):
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if not words:
            continue
        name, *options = words
        where = f"{SERIES_FILE}:{at}: {name}"
        strip = re.fullmatch(r"-p([0-9])", options[0]) if options else None
        if len(options) > 1 or (options and options[0] != "-pab" and not strip):
            raise LineError(
                f"{where} has the options {' '.join(options)}",
                why="of quilt's options only -p0 to -p9 and -pab can be carried",
                fix="write the patch so that it needs none ('quilt refresh -p1')",
            )
        if name in seen:
            raise LineError(f"{where} is listed already, at line {seen[name]}")
        seen[name] = at
        _check_inside(folder, name, where)
        yield name, int(strip[1]) if strip else 1


def _check_inside(folder: Path, name: str, where: str) -> None:
    if name.endswith(_COMPRESSED):
        raise LineError(f"{where} is compressed", fix="unpack it, and change its line")
    if not (folder / name).resolve().is_relative_to(folder.resolve()):
        raise LineError(f"{where} lies outside of {folder}", fix="copy it into the folder")


def _letters(path: Path, file: str, strip: int, used: set[str]) -> Iterator[Letter]:
    try:
        raw = read_file(path)
    except OSError as error:
        raise LineError(f"can't read {path}: {error.strerror}") from None
    stem = _SUFFIXES.sub("", file.rpartition("/")[2].removesuffix(".mbox"))
    try:
        parts = _merged(split_parts(raw, file=file))
    except PatchError as error:
        yield Letter(name=_name(stem, used), file=file, part=None, strip=strip, fault=error)
        return
    for number, part in enumerate(parts, start=1):
        where = file if len(parts) == 1 else f"{file}#{number}"
        subject = re.search(rb"^Subject: *(.*(?:\n[ \t].*)*)", part.head, re.MULTILINE)
        words = _EATEN.sub("", _plain(subject[1].decode(errors="replace"))) if subject else ""
        name = words[:_NAME_LENGTH] if len(parts) > 1 and words else stem
        yield Letter(name=_name(name, used), file=where, part=part, strip=strip)


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Parts with a diff each: text before the first mail goes with that mail."""
    found: list[Part] = []
    before = b""
    for part in parts:
        if part.diffs or part is parts[-1]:
            # What says the same twice, splits mails, or ends a message, is no text
            said = {*part.head.split(b"\n"), b"---"}
            lines = [
                line
                for line in before.split(b"\n")
                if not line or (line not in said and not line.startswith(b"From "))
            ]
            text = b"\n".join(lines).strip(b"\n")
            head = part.head + (b"\n---\n" + text + b"\n" if text else b"")
            found.append(replace(part, head=head))
            before = b""
        else:
            before += part.head
    return found


def _plain(subject: str) -> str:
    """A subject for a name: with encoded words decoded, where they can be."""
    try:
        return str(email.header.make_header(email.header.decode_header(subject)))
    except (UnicodeError, LookupError, ValueError, email.errors.MessageError):
        return subject


def _name(text: str, used: set[str]) -> str:
    words = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")
    words = re.sub(r"^([0-9]+[-_.]+)+", "", words)[:180].strip("-._") or "patch"
    numbered = [words, *(f"{words}-{number}" for number in range(2, len(used) + 3))]
    name = next(name for name in numbered if name not in used)
    used.add(name)
    return name


class _Head:
    """What stands above a diff."""

    def __init__(self, part: Part, letter: Letter, defaults: Defaults) -> None:
        self._file, self._at, self._defaults = letter.file, part.at, defaults
        self._title = letter.name
        stated = re.search(rb"^Content-Type:.*charset=\"?([\w.-]+)", part.head, re.MULTILINE | re.I)
        encoding = re.search(rb"^Content-Transfer-Encoding:\s*(\S+)", part.head, re.M | re.I)
        if encoding and encoding[1].lower() not in (b"7bit", b"8bit", b"binary"):
            raise PatchError(
                f"{self._file}: the mail is encoded as {encoding[1].decode(errors='replace')}",
                fix="decode it first, with 'git mailinfo'",
            )
        lines = self._decode(part.head, stated[1].decode() if stated else "").split("\n")
        # A name that the file has anyway, as git-dpm writes it too; another one is refused later
        own = _SUFFIXES.sub("", letter.file.rpartition("/")[2])
        names = (NAME_LINE.match(line) for line in lines)
        self._lines = [
            line
            for line, name in zip(lines, names, strict=True)
            if name is None or _SUFFIXES.sub("", name[1]) != own
        ]

    def _decode(self, head: bytes, stated: str) -> str:
        charset = stated or self._defaults.charset
        try:
            codecs.lookup(charset)
            text = head.decode(charset)
        except LookupError:
            raise PatchError(f"{self._file}: no charset {charset!r} is known") from None
        except UnicodeError as error:
            start = getattr(error, "start", 0)
            at = self._at + head.count(b"\n", 0, start)
            raise PatchError(
                f"{self._file}:{at}: the text is not {charset}: byte 0x{head[start]:02x}",
                fix="say what it is (--charset latin-1), or write it in UTF-8",
            ) from None
        for line, words in enumerate(text.split("\n"), start=self._at):
            if re.search(r"[\x00-\x08\x0e-\x1f]", words):
                raise PatchError(f"{self._file}:{line}: the text holds a control character")
        return text

    def patch(self) -> Patch:
        """A patch with this head, and a stand-in for its diff."""
        fields, text = self._fields()
        author = self._author(fields)
        date = self._date(fields)
        subject, described = self._subject(fields)
        mail = f"From: {author}\nDate: {_ANY_DATE}\nSubject: {subject}\n\n{_STAND_IN}"
        read = parse_patch(mail.encode(), name=self._file)
        return replace(
            read,
            subject=_EATEN.sub("", read.subject) or self._title,
            body=_body([*described, "", *text], fields),
            date=date,
        )

    def _fields(self) -> tuple[_Fields, list[str]]:
        """Fields of the first paragraph, and the text that follows."""
        lines = self._lines[1:] if self._lines[0].startswith("From ") else self._lines
        found: _Fields = []
        for line in lines:
            if match := _FIELD.match(line.rstrip()):
                found.append((match[1], [match[2] or ""]))
            elif found and line[:1] in (" ", "\t") and line.strip():
                found[-1][1].append(line.rstrip())
            else:
                break
        if not any(_KNOWN.match(key.lower()) for key, _ in found):
            return [], lines
        return found, lines[sum(len(value) for _, value in found) :]

    def _author(self, fields: _Fields) -> str:
        """One person with an address, as a commit needs it; other words stay in the message."""
        for key in ("from", "author"):
            value = _joined(_find(fields, key))
            if re.fullmatch(r"[^<>]*<[^<>\s@]+@[^<>\s]+>|[^\s<>@]+@[^\s<>]+", value):
                _take(fields, key)
                return value
        if not self._defaults.author:
            raise PatchError(
                f"{self._file}: names no author with an address",
                fix="say --author 'Name <mail>' for those that name none",
            )
        return self._defaults.author

    def _date(self, fields: _Fields) -> str:
        """Git's raw form. The day of a ``Last-Update`` stays in the message too."""
        value = _joined(_take(fields, "date") or _find(fields, "last-update"))
        if not value:
            return self._defaults.date
        plain = re.sub(r"\s*\([^)]*\)\Z", "", re.sub(r"\s+", " ", value[:_MAX_DATE]))
        plain = re.sub(r"\A\w{3},? ", "", plain)
        for form in _DATES if len(value) < _MAX_DATE else ():
            try:
                when = datetime.datetime.strptime(plain, form)
            except ValueError:
                continue
            when = when.replace(tzinfo=when.tzinfo or datetime.UTC)
            if when.year in range(1970, 2100):
                return f"{int(when.timestamp())} {when.strftime('%z')}"
        raise PatchError(
            f"{self._file}: it is dated {value[:60]!r}, which can't be read",
            fix="write it as 'Mon, 30 Nov 2026 12:00:00 +0000' or 2026-11-30",
        )

    def _subject(self, fields: _Fields) -> tuple[str, list[str]]:
        """The subject, and what a description says besides."""
        if subject := _joined(_take(fields, "subject")):
            return subject, []
        first, *rest = _take(fields, "description") or [""]
        rest = ["" if line.strip() == "." else line.removeprefix(" ") for line in rest]
        if not first and rest:
            first, *rest = rest
        return first.strip() or self._title, rest


def _find(fields: _Fields, key: str) -> list[str]:
    return next((value for name, value in fields if name.lower() == key), [])


def _take(fields: _Fields, key: str) -> list[str]:
    at = next((i for i, (name, _) in enumerate(fields) if name.lower() == key), None)
    return fields.pop(at)[1] if at is not None else []


def _joined(lines: Sequence[str]) -> str:
    return " ".join(line.strip() for line in lines).strip()


def _body(text: Sequence[str], fields: _Fields) -> str:
    """Message: the text, without what git writes about the diff, then the fields as trailers."""
    lines: list[str] = []
    is_below = False
    for line in (each.rstrip(" \t\r\v\f") for each in text):
        if line == "---":
            is_below = True
        elif not (is_below and _DIFFSTAT.match(line)):
            lines.append(line)
            continue
        lines.append("")
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    kept = []
    for key, (first, *more) in fields:
        first, *more = more if more and not first else (first, *more)
        if not _TRANSPORT.match(key.lower()):
            kept += [f"{key}: {first.strip()}", *(f" {line.strip()}" for line in more)]
    if not kept:
        return body
    gap = "\n" if split_trailers(body)[1] else "\n\n"
    return (body + gap if body else "") + "\n".join(kept)


def check_author(author: str) -> str:
    """An author as a commit needs one; ``LineError`` for what names none."""
    if not author.isprintable() or not re.fullmatch(r"[^<>]*[^<>\s] <[^<>\s]+>", author):
        raise LineError(f"--author {author!r} names no author", fix="say 'Name <mail>'")
    return author
