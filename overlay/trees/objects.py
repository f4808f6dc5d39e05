"""Git's object ids and trees, computed from bytes. SHA-1 is git's choice, not ours."""

from __future__ import annotations

import hashlib

NO_BLOB = "0" * 40


def object_id(kind: str, data: bytes) -> str:
    """Hex id of an object of ``kind`` (blob, tree, commit) with content ``data``."""
    head = f"{kind} {len(data)}\0".encode()
    return hashlib.sha1(head + data, usedforsecurity=False).hexdigest()


def blob_id(data: bytes) -> str:
    """Hex id of a file's content."""
    return object_id("blob", data)


def parse_tree(data: bytes) -> dict[bytes, tuple[int, str]]:
    """Names of one tree object, each with its mode and hex id."""
    found: dict[bytes, tuple[int, str]] = {}
    at = 0
    while at < len(data):
        space, nul = data.index(b" ", at), data.index(b"\0", at)
        found[data[space + 1 : nul]] = (int(data[at:space], 8), data[nul + 1 : nul + 21].hex())
        at = nul + 21
    return found
