"""Zip files, member by member without recompressing.

The standard library reads and checks the central directory but can't copy a member as it is,
and what it compresses depends on the zlib at hand. Here members are copied as compressed bytes
and new ones are stored, so output depends on nothing but input.
"""

from __future__ import annotations

import os
import stat
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import WheelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s4B4H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_DATE = 0x21  # 1980-01-01, the zip epoch; the time of day is 0
_UTF8 = 0x800
_ENCRYPTED = 0x1 | 0x40 | 0x2000  # traditional, strong, masked headers
_PATCH_DATA = 0x20
_CHUNK = 1 << 19  # bytes; smaller members are read and written several at a time
_IN_MEMORY = 64 << 20  # bytes; what is read whole is text, a tenth of that at most
_LIMIT_32 = 0xFFFFFFFF
_LIMIT_16 = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file of a zip: sizes in bytes, ``start`` the offset of its compressed bytes."""

    name: str
    mode: int
    method: int
    crc: int
    packed: int
    size: int
    start: int


def read_members(fd: int, label: str) -> list[Member]:
    """Read and check the directory of the zip open at ``fd``, folders left out.

    Raises:
        WheelError: not a zip, or one whose members can't be trusted: duplicate or unsafe
            names, links and devices, encryption, methods other than stored and deflated,
            local headers that contradict the directory, members that overlap.
    """
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        try:
            # allowZip64 and data before the zip are its business; it opens no member here
            with zipfile.ZipFile(file) as archive:
                infos, end = archive.infolist(), archive.start_dir
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
            raise WheelError(f"{label} is no zip file", why=str(error), fix=_REFETCH) from error
    members: list[Member] = []
    names: set[str] = set()
    for info in infos:
        _check_name(info, label)
        if info.orig_filename in names:
            raise WheelError(f"{label} has two members called {info.orig_filename}", fix=_REFETCH)
        names.add(info.orig_filename)
        if not info.orig_filename.endswith("/"):
            members.append(_member(fd, info, label))
        elif info.file_size:
            raise WheelError(f"{label} has a folder with content: {info.filename}", fix=_REFETCH)
    _check_overlap(members, end, label)
    return members


_REFETCH = "Fetch the wheel again; if it is the pinned one, pin another."


def _check_name(info: zipfile.ZipInfo, label: str) -> None:
    name = info.orig_filename
    if name.startswith("/") or name[1:2] == ":":
        raise WheelError(f"{label} has a member with an absolute path: {name!r}", fix=_REFETCH)
    parts = name.removesuffix("/").split("/")
    if ".." in parts:
        raise WheelError(f"{label} has a member outside of the wheel: {name!r}", fix=_REFETCH)
    if "" in parts or "." in parts or "\\" in name or not name.isprintable():
        raise WheelError(f"{label} has a member with a malformed name: {name!r}", fix=_REFETCH)
    if not name.isascii() and not info.flag_bits & _UTF8:
        raise WheelError(
            f"{label} has a member whose name is in no stated encoding: {name!r}",
            why="Names that are not ASCII need the UTF-8 flag.",
            fix=_REFETCH,
        )


def _member(fd: int, info: zipfile.ZipInfo, label: str) -> Member:
    name = info.orig_filename
    mode = info.external_attr >> 16 if info.create_system == 3 else 0
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFLNK:
        raise WheelError(f"{label} has a symbolic link: {name}", fix=_REFETCH)
    if kind not in (0, stat.S_IFREG):
        raise WheelError(f"{label} has a member that is no regular file: {name}", fix=_REFETCH)
    if info.flag_bits & _ENCRYPTED:
        raise WheelError(f"{label} has an encrypted member: {name}", fix=_REFETCH)
    if info.flag_bits & _PATCH_DATA or info.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):
        raise WheelError(
            f"{label} has a member packed by method {info.compress_type}: {name}",
            why="Installers are only sure to know stored (0) and deflated (8).",
            fix=_REFETCH,
        )
    head = os.pread(fd, _LOCAL.size, info.header_offset) if info.header_offset >= 0 else b""
    fields = _LOCAL.unpack(head) if len(head) == _LOCAL.size else (b"",) * 11
    start = info.header_offset + _LOCAL.size
    raw = name.encode("utf-8")
    if (
        fields[0] != b"PK\x03\x04"
        or fields[3] != info.compress_type
        or os.pread(fd, fields[9], start) != raw
        or (info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size)
    ):
        raise WheelError(f"{label} contradicts itself about the member {name}", fix=_REFETCH)
    return Member(
        name=name,
        mode=stat.S_IFREG | (stat.S_IMODE(mode) & 0o777 if mode else 0o644),
        method=info.compress_type,
        crc=info.CRC,
        packed=info.compress_size,
        size=info.file_size,
        start=start + fields[9] + fields[10],
    )


def _check_overlap(members: list[Member], end: int, label: str) -> None:
    done = 0
    for member in sorted(members, key=lambda member: member.start):
        if member.start < done or member.start + member.packed > end:
            raise WheelError(f"{label} has members that overlap: {member.name}", fix=_REFETCH)
        done = member.start + member.packed


def read(fd: int, member: Member, label: str) -> bytes:
    """Return the content of one member of at most 64 MiB, its CRC checked."""
    if max(member.size, member.packed) > _IN_MEMORY:
        raise WheelError(f"{label} has an oversized member: {member.name}", fix=_REFETCH)
    data = os.pread(fd, member.packed, member.start)
    try:
        if member.method == zipfile.ZIP_DEFLATED:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size + 1)
    except zlib.error as error:
        raise _corrupt(member, label) from error
    if len(data) != member.size or zlib.crc32(data) != member.crc:
        raise _corrupt(member, label)
    return data


def chunks(fd: int, member: Member, label: str) -> Iterator[bytes]:
    """Yield the content of one member of any size, piece by piece, its CRC checked at the end."""
    unpack = zlib.decompressobj(-zlib.MAX_WBITS) if member.method == zipfile.ZIP_DEFLATED else None
    crc = size = done = 0
    try:
        while done < member.packed:
            data = os.pread(fd, min(_CHUNK, member.packed - done), member.start + done)
            done += len(data)
            if not data:
                break
            while data:
                piece = unpack.decompress(data, _CHUNK) if unpack else data
                data = unpack.unconsumed_tail if unpack else b""
                crc, size = zlib.crc32(piece, crc), size + len(piece)
                if size > member.size:
                    raise _corrupt(member, label)
                yield piece
        if unpack and (piece := unpack.flush()):
            crc, size = zlib.crc32(piece, crc), size + len(piece)
            yield piece
    except zlib.error as error:
        raise _corrupt(member, label) from error
    if crc != member.crc or size != member.size:
        raise _corrupt(member, label)


def _corrupt(member: Member, label: str) -> WheelError:
    return WheelError(f"{label} has a corrupt member: {member.name}", fix=_REFETCH)


def is_canonical(fd: int, members: Iterable[Member]) -> bool:
    """Whether ``Writer`` would make this zip of these members, in the directory's order.

    Then no byte of it can change unnoticed: what is neither content nor mode of a member is
    compared here.
    """
    central, count, offset = b"", 0, 0
    for m in members:
        local, entry = _headers(m.name, m.mode, m.method, m.crc, m.packed, m.size, offset)
        if m.start != offset + len(local) or os.pread(fd, len(local), offset) != local:
            return False
        central, count, offset = central + entry, count + 1, m.start + m.packed
    rest = central + _end(count, len(central), offset)
    return os.pread(fd, len(rest) + 1, offset) == rest


def _headers(
    name: str, mode: int, method: int, crc: int, packed: int, size: int, offset: int
) -> tuple[bytes, bytes]:
    """A member's local header, which stands at ``offset``, and its entry of the directory."""
    raw = name.encode("utf-8")
    flags = 0 if name.isascii() else _UTF8
    body = (flags, method, 0, _DATE, crc, packed, size, len(raw), 0)
    entry = _CENTRAL.pack(b"PK\x01\x02", 20, 3, 20, 0, *body, 0, 0, 0, mode << 16, offset)
    return _LOCAL.pack(b"PK\x03\x04", 20, *body) + raw, entry + raw


def _end(count: int, size: int, offset: int) -> bytes:
    return _END.pack(b"PK\x05\x06", 0, 0, count, count, size, offset, 0)


class Writer:
    """Writes a zip to an empty file: headers of one canonical form, times all 1980-01-01.

    Args:
        fd: open for writing, at offset 0; stays open.
        advance: told how many bytes were written, each time that some were.
    """

    def __init__(self, fd: int, advance: Callable[[int], None] = lambda _: None) -> None:
        self._fd, self._advance = fd, advance
        self._central = bytearray()
        self._pending = bytearray()
        self._count = self._offset = self._window_start = 0
        self._read = memoryview(b"")
        self._buffer = memoryview(bytearray(_CHUNK))

    def copy(self, source: int, member: Member, name: str) -> None:
        """Add a member of the zip at ``source`` (always the same) as it is, under ``name``."""
        self._head(name, member.mode, member.method, member.crc, member.packed, member.size)
        if member.packed >= _CHUNK:
            self._flush()
            self._transfer(source, member)
        else:
            self._put(self._window(source, member))
        self._offset += member.packed

    def _window(self, source: int, member: Member) -> memoryview:
        """Return a small member's bytes; neighbours come along in the same read."""
        at = member.start - self._window_start
        if not 0 <= at <= len(self._read) - member.packed:
            self._read = memoryview(os.pread(source, _CHUNK, member.start))
            self._window_start, at = member.start, 0
            if len(self._read) < member.packed:
                raise _corrupt(member, "the base wheel")
        return self._read[at : at + member.packed]

    def store(self, name: str, data: bytes, mode: int) -> None:
        """Add a member of one's own; stored, since compressed bytes vary between zlibs."""
        self._head(name, mode, zipfile.ZIP_STORED, zlib.crc32(data), len(data), len(data))
        self._put(data)
        self._offset += len(data)

    def close(self) -> None:
        """Write the central directory."""
        if self._offset + len(self._central) > _LIMIT_32 or self._count >= _LIMIT_16:
            raise WheelError(
                f"the wheel would hold {self._count} members in {self._offset} bytes",
                why="Above 4 GiB or 65534 members a zip needs the ZIP64 form, not written here.",
                fix="Build this wheel with the upstream's own build.",
            )
        self._put(self._central)
        self._put(_end(self._count, len(self._central), self._offset))
        self._flush()

    def _head(self, name: str, mode: int, method: int, crc: int, packed: int, size: int) -> None:
        if max(packed, size, self._offset) >= _LIMIT_32:
            raise WheelError(
                f"{name} or its place in the wheel is beyond 4 GiB",
                why="That needs the ZIP64 form, which is not written here.",
                fix="Build this wheel with the upstream's own build.",
            )
        local, entry = _headers(name, mode, method, crc, packed, size, self._offset)
        self._central += entry
        self._put(local)
        self._offset += len(local)
        self._count += 1

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        self._pending += data
        if len(self._pending) >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._write(self._pending)
        self._pending.clear()

    def _write(self, data: bytearray | memoryview) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                done += (step := os.write(self._fd, view[done:]))
                self._advance(step)

    def _transfer(self, source: int, member: Member) -> None:
        # through one buffer that stays in the processor's cache: faster than copy_file_range,
        # which moves pages, and these seldom begin where a page does
        buffer = self._buffer
        done = 0
        while done < member.packed:
            step = os.preadv(source, [buffer[: member.packed - done]], member.start + done)
            if not step:
                raise _corrupt(member, "the base wheel")
            self._write(buffer[:step])
            done += step
