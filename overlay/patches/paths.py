"""Paths inside trees: bytes as git holds them, their one spelling as text, and in diff headers."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# One byte after a backslash in git's quoted paths.
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
# Code points that HFS+ ignores in a name: git's utf8.c, next_hfs_char()
_HFS_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_UNESCAPES = {value: key for key, value in _ESCAPES.items()}


def quote_path(path: bytes) -> str:
    """Text for a path: itself if it is plain UTF-8, else git's C-style quoting."""
    if not any(byte < 0x20 or byte in (0x22, 0x5C, 0x7F) for byte in path):
        try:
            return path.decode()
        except UnicodeDecodeError:
            pass
    out = []
    for byte in path:
        if byte in _UNESCAPES:
            out.append("\\" + _UNESCAPES[byte].decode())
        elif 0x20 <= byte < 0x7F:
            out.append(chr(byte))
        else:
            out.append(f"\\{byte:03o}")
    return '"' + "".join(out) + '"'


def unquote_path(text: bytes) -> bytes:
    """Inverse of ``quote_path``. Raises ValueError on malformed quoting."""
    if not text.startswith(b'"'):
        return text
    if len(text) < 2 or not text.endswith(b'"'):
        raise ValueError("unterminated quote")
    out = bytearray()
    at, end = 1, len(text) - 1
    while at < end:
        byte = text[at : at + 1]
        if byte == b'"':
            raise ValueError("quote inside quotes")
        if byte != b"\\":
            out += byte
            at += 1
        elif (escape := text[at + 1 : at + 2]) in _ESCAPES and at + 1 < end:
            out.append(_ESCAPES[escape])
            at += 2
        elif re.fullmatch(rb"[0-3][0-7]{2}", digits := text[at + 1 : min(at + 4, end)]):
            out.append(int(digits, 8))
            at += 4
        else:
            raise ValueError("unknown escape")
    return bytes(out)


def check_path(path: bytes) -> str:
    """Why a path can't be part of a tree, or "" when it can."""
    if not path:
        return "is empty"
    if path.startswith(b"/"):
        return "is absolute"
    if b"\0" in path or b"\n" in path:
        return "holds a NUL or a line break"
    for part in path.split(b"/"):
        if part in (b"", b".", b".."):
            return "leaves the tree or is not normal ('', '.' or '..' in it)"
        if _is_git_folder(part):
            return "names git's own folder"
    return ""


def parents(path: bytes) -> Iterator[bytes]:
    """The folders that hold ``path``, innermost first."""
    while b"/" in path:
        path = path.rpartition(b"/")[0]
        yield path


def _is_git_folder(part: bytes) -> bool:
    """Whether some file system takes a name for ``.git``: by case, NTFS's or HFS+'s rules."""
    name = _HFS_IGNORED.sub("", part.decode(errors="replace")).lower()
    return re.split(r"[:\\]", name)[0].rstrip(". ") in (".git", "git~1")


def named_paths(header: bytes, extended: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Old and new path of a file diff.

    Args:
        header: the line ``diff --git a/X b/Y`` from ``a/`` on, without its end.
        extended: the lines below it, by what they start with (``rename from``, ``---``).

    Raises:
        ValueError: two of the lines don't agree.
    """
    sides = _stated_paths(extended)
    for key in (b"rename", b"copy"):
        if key + b" from" in extended:
            old = unquote_path(extended[key + b" from"])
            new = unquote_path(extended[key + b" to"])
            if old == new:
                raise ValueError("both are the same")
            break
    else:
        stated = [path for path in sides.values() if path is not None]
        old = new = stated[0] if stated else _split_header(header)
    for sign, kind, path in ((b"---", b"new", old), (b"+++", b"deleted", new)):
        gone = kind + b" file mode" in extended
        if sign in sides and sides[sign] != (None if gone else path):
            raise ValueError(f"'{sign.decode()}' names another one")
    if not _says(header, old, new):
        raise ValueError("'diff --git' names other ones, and nothing says rename")
    return old, new


def _stated_paths(extended: Mapping[bytes, bytes]) -> dict[bytes, bytes | None]:
    """Paths of the ``---`` and ``+++`` lines; None for /dev/null."""
    found: dict[bytes, bytes | None] = {}
    for sign, prefix in ((b"---", b"a/"), (b"+++", b"b/")):
        if sign in extended:
            # git ends a path that holds a space with a tab, so that patch(1) sees where it stops
            path = unquote_path(extended[sign].removesuffix(b"\t"))
            found[sign] = None if path == b"/dev/null" else _strip_prefix(path, prefix)
    return found


def _says(header: bytes, old: bytes, new: bytes) -> bool:
    """Whether ``a/X b/Y`` names these two, quoted or not."""
    for at in (i for i, byte in enumerate(header) if byte == 0x20):
        with contextlib.suppress(ValueError):
            first, second = unquote_path(header[:at]), unquote_path(header[at + 1 :])
            if (first, second) == (b"a/" + old, b"b/" + new):
                return True
    return False


def _split_header(header: bytes) -> bytes:
    """The path of ``a/X b/X`` where no other line names it."""
    half = len(header) // 2
    return _strip_prefix(unquote_path(header[:half]), b"a/")


def _strip_prefix(path: bytes, prefix: bytes) -> bytes:
    if not path.startswith(prefix):
        raise ValueError(f"path {path[:60]!r} lacks the prefix {prefix.decode()}")
    return path[len(prefix) :]
