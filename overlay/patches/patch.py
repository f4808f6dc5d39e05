"""A patch: one mail in git's format, read as bytes into author, message, trailers and diff.

What ``git am`` would make of the mail is what we make of it; what it would cut or change in
silence, ``message_faults`` names.
"""

from __future__ import annotations

import datetime
import email.errors
import email.header
import email.utils
import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from overlay.errors import PatchError
from overlay.patches.diff import FileDiff, parse_diff

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX = ".patch"
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}\Z")
# The name travels with a commit in this trailer; patch files never hold it.
NAME_TRAILER = "Patch-Name"

# What 'new' writes where a plain diff says nothing; lint complains until each is replaced.
TEMPLATES = {
    "subject": "area: say in a few words what it does",
    "reason": "Say why, so that a maintainer can judge it.",
    "Remove-When": "say what makes this patch unnecessary",
}

_TRAILER = re.compile(r"([A-Za-z][A-Za-z0-9-]*): (.*)\Z")
_PREFIX = re.compile(r"\[[^\]]*PATCH[^\]]*\]\s*")
_ADDRESS = re.compile(r"(.*?)\s*<([^<>]*)>\Z")
_DATE = re.compile(r"(\w{3}, +)?\d{1,2} \w{3} [1-9]\d{3} \d\d:\d\d:\d\d [+-]\d{4}\Z", re.ASCII)
# The years that git takes: its tm_to_time_t() knows 1970 to 2099
_DATES = range(4102444800)
# Lines after which git would find another diff than the one that we read
_HIDDEN_DIFF = re.compile(rb"^(?:--- \S|\+\+\+ |@@ -|Index: |diff -)", re.MULTILINE)
_EATEN_PREFIX = re.compile(r"\s*(\[|[Rr][Ee]:|:)")
_IN_BODY_HEADER = re.compile(r"(From|Subject|Date|Content-Type|Content-Transfer-Encoding): ?")


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch of a series.

    Attributes:
        name: file name without ``.patch``; what ``Requires:`` refers to.
        raw: the file, byte for byte.
        author, email: as git has them.
        date: git's raw form, ``<seconds> <+hhmm>``.
        subject: without ``[PATCH]``.
        body: message after the subject, trailers included, no blank line at either end.
        files: the diff.
    """

    name: str
    raw: bytes = field(repr=False)
    author: str
    email: str
    date: str
    subject: str
    body: str
    files: tuple[FileDiff, ...] = field(repr=False)

    @property
    def message(self) -> str:
        """Subject and body as a commit message, one line end at the end."""
        return f"{self.subject}\n\n{self.body}\n" if self.body else f"{self.subject}\n"

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the file, in hex."""
        return hashlib.sha256(self.raw).hexdigest()

    @cached_property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        """``(key, value)`` pairs of the last paragraph, continuation lines joined by a space."""
        return parse_trailers(self.body)

    def trailer(self, key: str) -> tuple[str, ...]:
        """All values of one trailer; keys compare without case, as git's do."""
        return tuple(value for k, value in self.trailers if k.lower() == key.lower())

    @property
    def requires(self) -> tuple[str, ...]:
        """Names of the patches that this one needs."""
        return tuple(
            name.strip()
            for value in self.trailer("Requires")
            for name in value.split(",")
            if name.strip()
        )

    @property
    def reason(self) -> str:
        """The body without its trailers."""
        return split_trailers(self.body)[0]


def parse_patch(raw: bytes, *, name: str) -> Patch:
    """Read one mail. Raises ``PatchError`` with the line number when it isn't one."""
    headers, at = _headers(raw, name)
    body, diff_at = _split_body(raw, at)
    if diff_at < 0:
        raise PatchError(f"{name}: holds no diff", fix="write it with 'export' from a checkout")
    if hidden := _HIDDEN_DIFF.search(raw, at + len(body), diff_at):
        line = raw.count(b"\n", 0, hidden.start()) + 1
        raise PatchError(
            f"{name}:{line}: a line that starts a diff, but no diff of git's follows",
            fix="indent it if it is part of the message; else write the diff with 'export'",
        )
    author, address = _author(headers, name)
    return Patch(
        name=name,
        raw=raw,
        author=author,
        email=address,
        date=_date(_header(headers, b"date", name), name),
        subject=_subject(headers, name),
        body=_body(body, name),
        files=parse_diff(raw[diff_at:], name=name, first_line=raw.count(b"\n", 0, diff_at) + 1),
    )


def parse_trailers(body: str) -> tuple[tuple[str, str], ...]:
    """``(key, value)`` pairs of a message's last paragraph, if it is one of trailers."""
    block = split_trailers(body)[1]
    found: list[tuple[str, str]] = []
    for line in block.split("\n") if block else ():
        if match := _TRAILER.match(line):
            found.append((match[1], match[2].strip()))
        else:
            key, value = found[-1]
            found[-1] = (key, f"{value} {line.strip()}")
    return tuple(found)


def split_trailers(body: str) -> tuple[str, str]:
    """Reason and trailer block. A block's lines are all ``Key: value`` or continuations."""
    head, _, last = body.rstrip("\n").rpartition("\n\n")
    lines = last.split("\n")
    if _TRAILER.match(lines[0]) and all(
        _TRAILER.match(line) or line[:1] in (" ", "\t") for line in lines
    ):
        return head, last
    return body, ""


def message_faults(patch: Patch) -> Iterator[str]:
    """What git's mail format would cut from this message, or eat of it."""
    if _EATEN_PREFIX.match(patch.subject):
        yield f"'git am' would eat the start of the subject {patch.subject[:40]!r}"
    if not patch.subject:
        yield "the subject is empty"
    lines = patch.body.split("\n")
    if _IN_BODY_HEADER.match(lines[0]):
        yield f"'git am' would take the first line {lines[0][:40]!r} for a mail header"
    head, at = _headers(patch.raw, patch.name)
    del head
    raw_body, diff_at = _split_body(patch.raw, at)
    yield from _raw_faults(raw_body, patch.raw[at + len(raw_body) : diff_at])
    for line in lines:
        if line.startswith("From "):
            yield f"'git am' would split the mail at {line[:40]!r}"


def _raw_faults(body: bytes, notes: bytes) -> Iterator[str]:
    if re.search(rb"[ \t\r]\n", body):
        yield "the message has white space at line ends, which git cuts"
    if b"\n\n\n" in body.strip(b"\n"):
        yield "the message has several blank lines in a row, which git folds"
    # Between "---" and the diff git ignores everything; only a diffstat has a place there.
    for line in notes.split(b"\n"):
        if line.strip(b"- \t\r") and not re.match(
            rb" .* \||\.\.\.| \d+ files? changed| (create|delete|rename|copy|mode) ", line
        ):
            shown = line[:40].decode(errors="replace")
            yield f"text after '---' is lost when git reads the mail: {shown!r}"


def _headers(raw: bytes, name: str) -> tuple[dict[bytes, bytes], int]:
    """Unfolded headers by lower-case name, and where the body starts."""
    if not raw.startswith((b"From ", b"From: ")):
        raise PatchError(
            f"{name}:1: is no mail in git's format (its first line is no 'From ')",
            fix="write it with 'export', or with git format-patch",
        )
    end = raw.find(b"\n\n")
    head = raw[: end if end >= 0 else len(raw)]
    if b"\r\n" in head:
        raise PatchError(
            f"{name}: the mail header has CRLF line ends: an editor or git's autocrlf rewrote it",
            fix="restore the file; '*.patch -text' in .gitattributes keeps git's hands off",
        )
    found: dict[bytes, bytes] = {}
    for line in re.sub(rb"\n[ \t]+", b" ", head).split(b"\n"):
        key, colon, value = line.partition(b":")
        if colon and not line.startswith(b"From "):
            found.setdefault(key.lower(), value.strip())
    _check_encoding(found, name)
    return found, end + 2 if end >= 0 else len(raw)


def _check_encoding(headers: dict[bytes, bytes], name: str) -> None:
    """Refuse a mail whose body isn't there byte for byte."""
    encoding = headers.get(b"content-transfer-encoding", b"8bit").decode(errors="replace").lower()
    kind = headers.get(b"content-type", b"text/plain").decode(errors="replace").lower()
    charset = re.search(r"charset=\"?([^\s;\"]*)", kind)
    if encoding not in ("7bit", "8bit", "binary"):
        what = encoding
    elif not kind.startswith("text/plain"):
        what = kind.partition(";")[0]
    elif charset and charset[1] not in ("utf-8", "us-ascii"):
        what = charset[1]
    else:
        return
    raise PatchError(
        f"{name}: the mail body is encoded as {what}",
        fix="decode it ('git mailinfo') or write it again with 'export'",
    )


def _header(headers: dict[bytes, bytes], key: bytes, name: str) -> str:
    if key not in headers:
        raise PatchError(
            f"{name}: the mail has no '{key.decode().title()}:' header",
            fix="write it with 'export', or with git format-patch",
        )
    return _decode(headers[key], name, f"'{key.decode().title()}:' header")


def _words(text: str, name: str, key: str) -> str:
    """Text with RFC 2047's encoded words decoded."""
    try:
        words = str(email.header.make_header(email.header.decode_header(text)))
    except (UnicodeError, LookupError, ValueError, email.errors.MessageError):
        raise PatchError(f"{name}: '{key}:' header can't be decoded") from None
    # A line break hidden in an encoded word would be a line of its own in what git reads
    if any(ord(letter) < 0x20 or 0xD800 <= ord(letter) < 0xE000 for letter in words):
        raise PatchError(f"{name}: '{key}:' header holds control characters")
    return words.strip()


def _author(headers: dict[bytes, bytes], name: str) -> tuple[str, str]:
    text = _header(headers, b"from", name)
    match = _ADDRESS.match(text)
    # Address before words: a comma or bracket inside an encoded word is part of the name
    author, address = (match[1], match[2].strip()) if match else ("", text)
    if author.startswith('"') and author.endswith('"') and len(author) > 1:
        author = re.sub(r"\\(.)", r"\1", author[1:-1])
    author = _words(author, name, "From") or address
    if not address or re.search(r"[<>\s\x00-\x1f]", address) or re.search(r"[<>]", author):
        raise PatchError(f"{name}: 'From:' names no author", fix="write 'From: Name <mail>'")
    return author, address


def _subject(headers: dict[bytes, bytes], name: str) -> str:
    subject = _words(_header(headers, b"subject", name), name, "Subject")
    match = _PREFIX.match(subject)
    return subject[match.end() :].strip() if match else subject


def _body(raw: bytes, name: str) -> str:
    """The message after the subject, cleaned as git cleans it."""
    text = _decode(raw, name, "message")
    if "\0" in text:
        raise PatchError(f"{name}: the message holds a NUL")
    lines = "\n".join(line.rstrip(" \t\r\v\f") for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _decode(text: bytes, name: str, what: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PatchError(
            f"{name}: the {what} is not UTF-8 (byte {error.start})",
            fix="write the message in UTF-8; the diff itself may hold any bytes",
        ) from None


def _date(text: str, name: str) -> str:
    """Git's raw form of a mail's date."""
    try:
        if not _DATE.match(text):  # what email.utils takes besides is guessed
            raise ValueError("not as mails have it")
        when = email.utils.parsedate_to_datetime(text)
        if when.tzinfo is None:  # "-0000": a time in UTC whose zone is not told
            when = when.replace(tzinfo=datetime.UTC)
        seconds = int(when.timestamp())
        zone = when.strftime("%z")
        if seconds not in _DATES or len(zone) != 5:
            raise ValueError("out of range")
    except (ValueError, OverflowError, TypeError) as error:
        raise PatchError(
            f"{name}: 'Date:' is no date that git takes: {text[:60]!r}",
            why=str(error)[:200],
            fix="write it as 'Mon, 30 Nov 2026 12:00:00 +0000'",
        ) from None
    return f"{seconds} {zone}"


def _split_body(raw: bytes, at: int) -> tuple[bytes, int]:
    """The message, and where the diff starts (-1: nowhere), by the rules of git-mailinfo."""
    breaks = re.compile(rb"^(?:diff -|Index: |--- \S|---[ \t\r\v\f]*$)", re.MULTILINE)
    cut = breaks.search(raw, at)
    if cut is None:
        return raw[at:], -1
    diff = re.compile(rb"^diff --git ", re.MULTILINE).search(raw, cut.start())
    return raw[at : cut.start()], diff.start() if diff else -1
