"""Git's binary diffs: base85 lines and deltas, as gitformat-pack(5) and git's apply.c have them."""

from __future__ import annotations

import base64
import zlib

# Bytes that one delta may make: the same bound as for a file in an archive
MAX_RESULT = 1 << 30


def decode_line(line: bytes) -> bytes:
    """One line of a binary diff: a letter for the size (A-Z, a-z: 1 to 52 bytes), then base85.

    Raises ValueError when it is malformed.
    """
    first = line[0]
    size = first - 64 if 65 <= first <= 90 else first - 70 if 97 <= first <= 122 else 0
    chunk = base64.b85decode(line[1:])
    if len(line) % 5 != 1 or not 0 < size <= len(chunk) < size + 4:
        raise ValueError("wrong line length")
    return chunk[:size]


def inflate(packed: bytes, size: int) -> bytes:
    """What ``packed`` inflates to; ValueError when that isn't ``size`` bytes and no more."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(packed, size + 1)
    except zlib.error:
        raise ValueError("it does not inflate") from None
    if len(data) != size or not stream.eof or stream.unused_data:
        raise ValueError("it has another size than it states")
    return data


def apply_delta(base: bytes, delta: bytes) -> bytes:
    """The content that ``delta`` makes of ``base``; ValueError when it doesn't belong to it."""
    try:
        return _Delta(delta).apply(base)
    except IndexError:
        raise ValueError("delta is truncated") from None


class _Delta:
    def __init__(self, delta: bytes) -> None:
        self._delta = delta
        self._at = 0

    def _byte(self) -> int:
        byte = self._delta[self._at]
        self._at += 1
        return byte

    def _size(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value
            if shift > 28:
                raise ValueError("delta states a size that no file has")

    def apply(self, base: bytes) -> bytes:
        old, new = self._size(), self._size()
        if old != len(base):
            raise ValueError(f"delta is for {old} bytes, the file has {len(base)}")
        if new > MAX_RESULT:
            raise ValueError(f"delta makes more than {MAX_RESULT >> 20} MiB")
        out = bytearray()
        while self._at < len(self._delta):
            command = self._byte()
            if command & 0x80:
                out += self._copy(base, command)
            elif command:
                out += self._insert(command)
            else:
                raise ValueError("delta holds a reserved command")
            if len(out) > new:  # before a few bytes have made gigabytes
                break
        if len(out) != new:
            raise ValueError("delta makes another size than it states")
        return bytes(out)

    def _copy(self, base: bytes, command: int) -> bytes:
        """Bits 0-3 say which bytes of the offset follow, bits 4-6 which of the length."""
        numbers = bytes(self._byte() if command >> bit & 1 else 0 for bit in range(7))
        start = int.from_bytes(numbers[:4], "little")
        length = int.from_bytes(numbers[4:], "little") or 0x10000
        if start + length > len(base):
            raise ValueError("delta copies past the end")
        return base[start : start + length]

    def _insert(self, length: int) -> bytes:
        if self._at + length > len(self._delta):
            raise ValueError("delta is truncated")
        self._at += length
        return self._delta[self._at - length : self._at]
