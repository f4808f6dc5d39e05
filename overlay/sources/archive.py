"""Reads an sdist as a stream of files and links, and refuses what git could not hold safely.

Nothing is unpacked to disk. An archive is untrusted also when its hash is the pinned one: a
pin may have been written by somebody who looked at the hash only.
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn, cast

from overlay.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from typing import Any, Self

# vLLM: 106 MB in 6605 files. The limits stop a bomb long before a disk or the memory is full.
MAX_TOTAL = 4 << 30
MAX_FILE = 1 << 30
MAX_MEMBERS = 200_000
# What one header, with its extended headers, may take. tarfile reads those into memory whole.
MAX_HEADER = 8 << 20

_CHUNK = 1 << 16
_SPECIAL = {
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a fifo",
    tarfile.LNKTYPE: "a hard link",
}
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
# Code points that HFS+ ignores in a name: git's utf8.c, next_hfs_char().
_DOT_GIT = re.compile(r"\.git|git~1")
_DOT_GITMODULES = re.compile(r"\.gitmodules|gi\w*~\d+")
_HFS_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_FIX = "don't use this archive; check the pin, and where the file came from"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One file or symbolic link.

    Attributes:
        path: relative to the archive's one top folder, separated by ``/``.
        mode: git's: 0o100644, 0o100755 or 0o120000.
        data: the content; for a link its target.
    """

    path: bytes
    mode: int
    data: bytes


def read_archive(archive: Path, *, generated: Sequence[str] = ()) -> Iterator[Member]:
    """Yield the files and links of a ``.tar.gz`` in its own order.

    Some faults show only at the end (a link through another link, a truncated file), so what
    was read may be used only once the iterator is exhausted.

    Args:
        archive: the file; its hash is the caller's business.
        generated: names, relative to the top folder, that are left out: a file, or with a
            ``/`` at the end a folder. Each must be there.

    Raises:
        SourceError: the archive is damaged, unsafe, or lacks a name in ``generated``.
    """
    tree = _Tree(name=archive.name, generated=tuple(name.encode() for name in generated))
    with _damage_named(archive), archive.open("rb") as raw, gzip.GzipFile(fileobj=raw) as plain:
        source = _Bounded(plain, archive.name)
        source.allow(MAX_HEADER)
        with tarfile.open(
            fileobj=cast("Any", source),  # only read() is used with "r|"
            mode="r|",
            bufsize=_CHUNK,
            encoding="utf-8",
            errors="surrogateescape",
            tarinfo=_Header,
        ) as tar:
            while info := tar.next():
                member = _member(tree, tar, info, source)
                tar.members.clear()  # type: ignore[attr-defined]  # else it keeps every header
                if member is not None:
                    yield member
                source.allow(MAX_HEADER)
            source.allow(MAX_TOTAL)
            _check_rest(tree, tar)
    tree.check_end()


class _Header(tarfile.TarInfo):
    """Makes a bad header an error: tarfile takes one after the first member for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as fault:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):  # the end mark
                raise
            if len(buf) < tarfile.BLOCKSIZE:
                raise EOFError("it ends without tar's end mark") from fault
            raise tarfile.ReadError(f"a bad header: {fault}") from fault


class _Bounded:
    """Hands out decompressed bytes while they are within what the caller allowed."""

    def __init__(self, plain: gzip.GzipFile, name: str) -> None:
        self._plain, self._name, self._done, self._limit = plain, name, 0, 0

    def allow(self, size: int) -> None:
        """Let ``size`` more bytes through, and one chunk that tarfile may read ahead."""
        self._limit = min(self._done + size + 2 * _CHUNK, MAX_TOTAL)

    def read(self, size: int) -> bytes:
        data = self._plain.read(size)
        self._done += len(data)
        if self._done > self._limit:
            what = "unpacks to more than is allowed"
            if self._limit < MAX_TOTAL:
                what = "has a header larger than is allowed"
            _refuse(self._name, what, f"limits: {MAX_TOTAL} bytes in all, {MAX_HEADER} a header")
        return data


@contextmanager
def _damage_named(archive: Path) -> Iterator[None]:
    """Turn what gzip, zlib and tarfile raise into a refusal that says what is wrong."""
    try:
        yield
    except gzip.BadGzipFile as fault:
        _refuse(archive.name, "is damaged, or not a gzip file at all", str(fault), cause=fault)
    except EOFError as fault:
        _refuse(archive.name, "is truncated", str(fault), cause=fault)
    except zlib.error as fault:
        _refuse(archive.name, "is damaged: it can't be decompressed", str(fault), cause=fault)
    except tarfile.TarError as fault:
        _refuse(archive.name, "is damaged, or not a tar archive", str(fault), cause=fault)
    except OSError as fault:
        raise SourceError(
            f"the archive {archive.name} can't be read",
            why=str(fault),
            fix="check that the file exists and that you may read it",
        ) from fault


def _refuse(name: str, what: str, why: str, *, cause: BaseException | None = None) -> NoReturn:
    raise SourceError(f"the archive {name} {what}", why=why, fix=_FIX) from cause


@dataclass(slots=True, kw_only=True)
class _Tree:
    """What was seen so far: enough to refuse the member that doesn't go with the others."""

    name: str
    generated: tuple[bytes, ...]
    top: bytes | None = None
    members: int = 0
    total: int = 0
    files: set[bytes] = field(default_factory=set)
    folders: set[bytes] = field(default_factory=set)
    links: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)  # what a target passes
    left_out: set[bytes] = field(default_factory=set)

    def refuse(self, path: bytes, what: str, why: str = "") -> NoReturn:
        shown = path.decode("utf-8", "backslashreplace")
        _refuse(self.name, f"holds {what}: {shown!r}", why)

    def relative(self, path: bytes) -> bytes:
        """``path`` below the top folder, b"" for that folder itself."""
        self.check_path(path)
        top, _, rest = path.partition(b"/")
        if self.top is None:
            self.top = top
        elif top != self.top:
            self.refuse(path, "more than one top folder", f"the first one: {self.top!r}")
        if re.match(rb"[A-Za-z]:", rest):
            self.refuse(path, "a path with a drive letter")
        return rest

    def check_path(self, path: bytes) -> None:
        if path.startswith(b"/"):
            self.refuse(path, "an absolute path")
        if re.match(rb"[A-Za-z]:", path):
            self.refuse(path, "a path with a drive letter")
        if b"\\" in path:
            self.refuse(path, "a path with a backslash")
        if b"\0" in path:
            self.refuse(path, "a path with a NUL byte")
        for part in path.split(b"/"):
            if part in (b"", b"."):
                self.refuse(path, "a path with an empty or '.' component")
            if part == b"..":
                self.refuse(path, "a path with '..'")
            if _is_like(part, _DOT_GIT):
                self.refuse(path, "a path that git takes for its own folder")

    def add_folder(self, path: bytes) -> None:
        if path in self.files:
            self.refuse(path, "a file and a folder of one name")
        while path and path not in self.folders:
            self.folders.add(path)
            path = path.rpartition(b"/")[0]
            if path in self.files:
                self.refuse(path, "a file and a folder of one name")

    def add_file(self, path: bytes) -> None:
        if not path:
            self.refuse(self.top or b"", "a file where its top folder should be")
        if path in self.files:
            self.refuse(path, "two members of one name")
        if path in self.folders:
            self.refuse(path, "a file and a folder of one name")
        self.add_folder(path.rpartition(b"/")[0])
        self.files.add(path)

    def add_link(self, path: bytes, target: bytes) -> None:
        """Follow the target by name alone, and keep each place on the way for ``check_end``."""
        if _is_like(path.rpartition(b"/")[2], _DOT_GITMODULES):
            self.refuse(path, "a link in the place of .gitmodules")
        if not target or b"\0" in target or b"\\" in target:
            self.refuse(path, "a link with a bad target", repr(target))
        if target.startswith(b"/") or re.match(rb"[A-Za-z]:", target):
            self.refuse(path, "a link with an absolute target", repr(target))
        at = path.split(b"/")[:-1]
        passed: list[bytes] = []
        for part in target.split(b"/"):
            if at:
                passed.append(b"/".join(at))
            if part == b".." and not at:
                self.refuse(path, "a link that leaves the tree", repr(target))
            if _is_like(part, _DOT_GIT):
                self.refuse(path, "a link into a folder that git takes for its own", repr(target))
            if part == b"..":
                at.pop()
            elif part not in (b"", b"."):
                at.append(part)
        self.links[path] = tuple(passed)

    def is_generated(self, path: bytes) -> bool:
        for name in self.generated:
            if path == name or (name.endswith(b"/") and path.startswith(name)):
                self.left_out.add(name)
                return True
        return False

    def check_end(self) -> None:
        for path, passed in self.links.items():
            if through := next((place for place in passed if place in self.links), None):
                self.refuse(path, "a link through another link", f"by way of {through!r}")
        if not self.files:
            _refuse(self.name, "holds no files", "an sdist has at least one")
        missing = [name.decode() for name in self.generated if name not in self.left_out]
        if missing:
            raise SourceError(
                f"the archive {self.name} lacks generated files that its pin names",
                why="not there: " + ", ".join(missing),
                fix="check that the pin's file name, hash and generated files go together",
            )


@lru_cache(maxsize=4096)
def _is_like(part: bytes, name: re.Pattern[str]) -> bool:
    """Whether some file system takes ``part`` for ``name``, as git's path.c and utf8.c decide.

    NTFS drops blanks and dots at the end and what follows a colon, and has short names; HFS+
    ignores some code points; both ignore case.
    """
    text = _HFS_IGNORED.sub("", part.decode("utf-8", "surrogateescape"))
    text = text.partition(":")[0].rstrip(" .").lower()
    return name.fullmatch(text) is not None


def _member(
    tree: _Tree, tar: tarfile.TarFile, info: tarfile.TarInfo, source: _Bounded
) -> Member | None:
    """Check one header against what was seen, then read its content; None where git has none."""
    raw = info.name.encode("utf-8", "surrogateescape")
    tree.members += 1
    if tree.members > MAX_MEMBERS:
        _refuse(tree.name, "has too many members", f"limit: {MAX_MEMBERS}")
    path = tree.relative(raw)
    if info.isdir():
        tree.add_folder(path)
        return None
    if info.issym():
        target = info.linkname.encode("utf-8", "surrogateescape")
        tree.add_file(path)
        tree.add_link(path, target)
        kept = not tree.is_generated(path)
        return Member(path=path, mode=0o120000, data=target) if kept else None
    _check_regular(tree, raw, info)
    tree.add_file(path)
    data = _content(tar, info, source)
    if tree.is_generated(path):
        return None
    # git keeps the owner's x and nothing else
    return Member(path=path, mode=0o100755 if info.mode & 0o100 else 0o100644, data=data)


def _check_rest(tree: _Tree, tar: tarfile.TarFile) -> None:
    """Read on to the end, so that gzip compares its checksum; nothing may be hidden there."""
    stream = cast("Any", tar.fileobj)  # tarfile's own, as it has read ahead
    while data := stream.read(_CHUNK):
        if any(data):
            _refuse(tree.name, "has data after its end mark", "another archive may hide there")


def _check_regular(tree: _Tree, raw: bytes, info: tarfile.TarInfo) -> None:
    if info.type in _SPECIAL:
        tree.refuse(raw, _SPECIAL[info.type], "git has no such thing")
    if info.issparse():
        tree.refuse(raw, "a sparse file", "no sdist needs one")
    if info.type not in _REGULAR:
        tree.refuse(raw, "a member of unknown type", repr(info.type))
    if not 0 <= info.size <= MAX_FILE:
        tree.refuse(raw, "a file larger than is allowed", f"{info.size} bytes; limit: {MAX_FILE}")
    tree.total += info.size
    if tree.total > MAX_TOTAL:
        _refuse(tree.name, "unpacks to more than is allowed", f"limit: {MAX_TOTAL} bytes in all")


def _content(tar: tarfile.TarFile, info: tarfile.TarInfo, source: _Bounded) -> bytes:
    source.allow(info.size)
    stream = tar.extractfile(info)
    if stream is None:
        raise tarfile.ReadError(f"{info.name!r} has no content")
    data = stream.read()
    if len(data) != info.size:
        raise EOFError(f"{info.name!r} has {len(data)} of {info.size} bytes")
    return data
