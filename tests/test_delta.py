"""Binary diffs: base85 lines and deltas, whole and damaged."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.patches.delta import apply_delta, decode_line


@pytest.mark.parametrize("line", [b"A", b"Aabcd", b"zabcde", b"!abcde", b"Baaaa", b"A~~~~~"])
def test_malformed_binary_lines(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode_line(line)


def varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def copy_all(size: int) -> bytes:
    return bytes((0b10010000 | 0b100000, size & 0xFF, size >> 8))


def test_delta() -> None:
    base = b"0123456789"
    delta = varint(10) + varint(14) + copy_all(10) + b"\4abcd"
    assert apply_delta(base, delta) == b"0123456789abcd"


@pytest.mark.parametrize(
    ("delta", "why"),
    [
        (b"", "truncated"),
        (varint(9) + varint(10) + copy_all(10), "is for 9 bytes"),
        (varint(10) + varint(9) + copy_all(10), "another size"),
        (varint(10) + varint(11) + copy_all(11), "past the end"),
        (varint(10) + varint(4) + b"\4abc", "truncated"),
        (varint(10) + varint(0) + b"\0", "reserved"),
        (varint(10) + b"\x90", "truncated"),
        (varint(10) + b"\xff" * 1000, "size that no file has"),
        (varint(10) + varint(1 << 31) + copy_all(10), "more than 1024 MiB"),
    ],
)
def test_malformed_deltas(delta: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        apply_delta(b"0123456789", delta)


def test_delta_bomb_ends_at_its_stated_size() -> None:
    base = b"x" * 0xFFFF
    started = time.monotonic()
    with pytest.raises(ValueError, match="another size"):
        apply_delta(base, varint(len(base)) + varint(10) + copy_all(0xFFFF) * 100_000)
    assert time.monotonic() - started < 1


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=60), st.binary(max_size=40))
def test_any_delta_gives_bytes_or_a_value_error(base: bytes, delta: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(apply_delta(base, varint(len(base)) + delta), bytes)
