"""Paths inside trees: bytes as git holds them, and their one spelling as text."""

from __future__ import annotations

import re

# One byte after a backslash in git's quoted paths.
_ESCAPES = {b"a": 7, b"b": 8, b"t": 9, b"n": 10, b"v": 11, b"f": 12, b"r": 13, b'"': 34, b"\\": 92}
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
        if part.lower().rstrip(b". ") in (b".git", b"git~1"):
            return "names git's own folder"
    return ""
