"""The installed packages of an image: on disk while it is built, in its layers afterwards.

Every file is read once and kept as size, mode and hashes; of a few the content is kept as well.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from overlay.errors import ImageError, WheelError
from overlay.lines.upstreams import UPSTREAMS
from overlay.wheels.distinfo import read_record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from overlay.wheels.distinfo import Row

PREFIX = "opt/vllm"
"""The environment of an image, below its root."""

_CHUNK = 1 << 20  # bytes
_MAX_KEPT = 64 << 20  # bytes of one file of which the content is kept
_PACKAGES = tuple(f"{upstream}/" for upstream in UPSTREAMS)


class _Source(Protocol):
    """A file as it is found: ``oci.Entry``, or one on disk."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def mode(self) -> int: ...
    @property
    def size(self) -> int: ...
    def chunks(self) -> Iterator[bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One file: its kind, permission bits, size, and hashes of a regular one.

    ``blob`` is git's id, in vLLM's and FlashInfer's own folders alone.
    """

    kind: str
    mode: int
    size: int
    sha256: bytes = b""
    blob: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """An installed distribution; ``rows`` of its RECORD, by path below site-packages."""

    name: str
    version: str
    info: str
    rows: Mapping[str, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What lies below site-packages, and beside it what RECORDs name there.

    Attributes:
        files: by path relative to site-packages; ``../../../bin/vllm`` is one too.
        texts: content of metadata and of what tells a version.
    """

    files: Mapping[str, Seen]
    texts: Mapping[str, bytes]

    def infos(self) -> list[str]:
        """The dist-info folders."""
        tops = {path.partition("/")[0] for path in self.files}
        return sorted(top for top in tops if top.endswith(".dist-info"))


def read_image_site(entries: Iterable[_Source]) -> Site:
    """Read the environment of an image: the files below ``PREFIX``, paths from the image's root.

    Raises:
        ImageError: it has no site-packages, or several.
    """
    return _read(entries, PREFIX)


def read_disk_site(prefix: Path) -> Site:
    """Read an environment that lies on disk."""
    return _read(_walk(prefix), "")


@dataclass(frozen=True, slots=True)
class _OnDisk:
    path: str
    kind: str
    mode: int
    size: int
    where: str

    def chunks(self) -> Iterator[bytes]:
        with open(self.where, "rb") as file:  # noqa: PTH123
            while data := file.read(_CHUNK):
                yield data


def _walk(prefix: Path) -> Iterator[_OnDisk]:
    for folder, folders, names in os.walk(prefix):
        for name in (*names, *folders):
            where = os.path.join(folder, name)  # noqa: PTH118 - many
            found = os.lstat(where)
            if stat.S_ISDIR(found.st_mode):
                continue
            kind = "file" if stat.S_ISREG(found.st_mode) else "link"
            path = posixpath.relpath(where, prefix)
            yield _OnDisk(path, kind, stat.S_IMODE(found.st_mode), found.st_size, where)


def _read(entries: Iterable[_Source], prefix: str) -> Site:
    found: dict[str, Seen] = {}
    texts: dict[str, bytes] = {}
    sites: set[str] = set()
    for entry in entries:
        if entry.kind == "folder":
            continue
        path = posixpath.relpath(entry.path, prefix) if prefix else entry.path
        parts = path.split("/")
        if len(parts) > 3 and parts[0] == "lib" and parts[2] == "site-packages":
            sites.add("/".join(parts[:3]))
        inside = path.partition("/site-packages/")[2]
        data = bytearray() if _is_kept(inside) else None
        found[path] = _look(entry, inside.startswith(_PACKAGES), data)
        if data is not None:
            texts[path] = bytes(data)
    if len(sites) != 1:
        raise ImageError(
            f"the environment {PREFIX} has {len(sites)} folders of packages, not one",
            why=", ".join(sorted(sites)),
            fix="name an image that 'vllm-overlay image' built",
        )
    (site,) = sites
    return Site(
        files={posixpath.relpath(path, site): seen for path, seen in found.items()},
        texts={posixpath.relpath(path, site): data for path, data in texts.items()},
    )


def _look(entry: _Source, is_upstreams: bool, kept: bytearray | None) -> Seen:
    if entry.kind != "file":
        return Seen(kind=entry.kind, mode=entry.mode, size=0)
    if kept is not None and entry.size > _MAX_KEPT:
        raise ImageError(f"{entry.path} is too large: {entry.size} bytes")
    state = hashlib.sha256()
    blob = hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False) if is_upstreams else None
    for data in entry.chunks():
        state.update(data)
        if blob is not None:
            blob.update(data)
        if kept is not None:
            kept += data
    return Seen(
        kind="file", mode=entry.mode, size=entry.size, sha256=state.digest(),
        blob=blob.hexdigest() if blob is not None else "",
    )  # fmt: skip


def _is_kept(inside: str) -> bool:
    """Whether a file's content is needed: metadata, and torch's word on its CUDA."""
    top, _, rest = inside.partition("/")
    is_metadata = top.endswith(".dist-info") and "/" not in rest
    return is_metadata or inside == "torch/version.py"


# --- one distribution ------------------------------------------------------------------------


class SiteFiles:
    """The files of one distribution, for ``overlay.wheels.inspect``."""

    installed = True

    def __init__(self, site: Site, rows: Mapping[str, Row]) -> None:
        self._site, self._rows = site, rows

    def names(self) -> Collection[str]:
        """What RECORD lists."""
        return self._rows

    def has(self, name: str) -> bool:
        """Whether something lies there."""
        return name in self._site.files

    def read(self, name: str) -> bytes:
        """Content of a file of metadata."""
        return self._site.texts[name]

    def digest(self, name: str, algorithm: str) -> tuple[bytes, int]:
        """Hash and size."""
        seen = self._site.files[name]
        if seen.kind != "file":
            raise WheelError(f"{name} is no regular file")
        if algorithm == "sha1":
            return bytes.fromhex(seen.blob), seen.size
        if algorithm != "sha256":
            raise WheelError(f"RECORD has a {algorithm} for {name}; sha256 is what is looked at")
        return seen.sha256, seen.size

    def executable(self, name: str) -> bool:
        """Whether its owner may run it."""
        return bool(self._site.files[name].mode & stat.S_IXUSR)


def rows_of(site: Site, info: str) -> dict[str, Row]:
    """Rows of a distribution's RECORD, paths made plain."""
    name = f"{info}/RECORD"
    if name not in site.texts:
        raise WheelError(f"{info} has no RECORD")
    rows = read_record(site.texts[name], name)
    return {posixpath.normpath(path): row for path, row in rows.items()}
