"""Reads an image that lies on disk as an OCI layout: config, labels, and the files of its layers.

The image is data: nothing of it is run, and nothing is written. Every blob is held against its
digest before it is looked at. Files are shown as the container would see them, layers merged and
whiteouts honoured, without unpacking anything.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tarfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal

from overlay.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PLATFORM = {"os": "linux", "architecture": "amd64"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_TARS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)
_MAX_DOCUMENT = 16 << 20  # bytes of a manifest or config
_MAX_LAYER = 1 << 37  # bytes of a layer, unpacked: a full image has 10 GB
_CHUNK = 1 << 20  # bytes
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"
_FIX = "build or pull the image anew"

Kind = Literal["file", "link", "hardlink", "folder", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer: digest of the blob, digest of the tar in it, size of the blob in bytes."""

    digest: str
    diff_id: str
    size: int
    media_type: str
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of an image.

    Attributes:
        path: relative to the image's root, without ``.`` or ``..``.
        kind: a hard link's ``link`` is a path like this one, a symbolic link's is as written.
        mode: permission bits.
        size: bytes of a file.
        layer: index of the layer that it comes from.
    """

    path: str
    kind: Kind
    mode: int
    size: int
    link: str
    layer: int
    _content: IO[bytes] | None = field(default=None, repr=False, compare=False)

    def chunks(self) -> Iterator[bytes]:
        """The content of a file; only until the next entry is asked for."""
        left = self.size
        while self._content is not None and left:
            data = self._content.read(min(left, _CHUNK))
            if not data:
                raise ImageError(f"{self.path} is cut off in its layer", fix=_FIX)
            left -= len(data)
            yield data

    def read(self) -> bytes:
        """All of ``chunks``."""
        return b"".join(self.chunks())


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image for linux/amd64.

    Attributes:
        digest: of its manifest.
        config: the image's configuration, as JSON says it.
        layers: lowest first.
    """

    folder: Path
    digest: str
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    layers: tuple[Layer, ...]

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of the configuration."""
        found: Mapping[str, str] = self.config.get("config", {}).get("Labels") or {}
        return found

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables that a container of it begins with."""
        pairs = self.config.get("config", {}).get("Env") or []
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def files(self, under: str = "") -> Iterator[Entry]:
        """What a container would see, each path once, in no useful order.

        Args:
            under: only entries below this folder, such as ``opt/vllm``.

        Raises:
            ImageError: a layer isn't what the configuration says, or no layer at all.
        """
        view = _View()
        for number in reversed(range(len(self.layers))):
            yield from self._shown(number, view, under)
            view.next_layer()

    def _shown(self, number: int, view: _View, under: str) -> Iterator[Entry]:
        names: set[str] = set()
        with _opened(self.layers[number]) as archive:
            for member in archive:
                path = _clean(member.name)
                if path in names:
                    raise ImageError(f"a layer has {path} twice", fix=_FIX)
                names.add(path)
                if path and (entry := view.take(path, member, number)) and _below(path, under):
                    yield _with_content(entry, member, archive)


def read_layout(folder: Path) -> Image:
    """Read the image of an OCI layout, and check every blob that it is made of.

    Args:
        folder: with ``oci-layout``, ``index.json`` and ``blobs``.

    Raises:
        ImageError: it is no layout, a blob is missing or differs from its digest, or there is
            not exactly one image for linux/amd64.
    """
    try:
        json.loads((folder / "oci-layout").read_bytes())["imageLayoutVersion"]
        index = json.loads((folder / "index.json").read_bytes())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ImageError(
            f"{folder} is no OCI layout", why=str(error), fix="name the folder that 'image' wrote"
        ) from None
    with _form(f"the index of {folder}"):
        descriptor = _find(folder, index)
        manifest = json.loads(_document(folder, descriptor))
    with _form(f"the manifest of {folder}"):
        config = json.loads(_document(folder, manifest["config"]))
        diff_ids = config["rootfs"]["diff_ids"]
        if len(diff_ids) != len(manifest["layers"]) or any(
            not _DIGEST.match(one) for one in diff_ids
        ):
            raise ValueError("layers and diff_ids don't match")
        _check_config(config)
        layers = tuple(
            _layer(folder, one, diff_id)
            for one, diff_id in zip(manifest["layers"], diff_ids, strict=True)
        )
    return Image(
        folder=folder,
        digest=descriptor["digest"],
        manifest=manifest,
        config=config,
        layers=layers,
    )


@contextmanager
def _form(label: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ImageError(f"{label} is malformed", why=repr(error), fix=_FIX) from None


def _find(folder: Path, index: Mapping[str, Any], depth: int = 2) -> Mapping[str, Any]:
    """The one manifest for our platform; attestations, which name no platform, are passed over."""
    found = []
    for one in index["manifests"]:
        if one["mediaType"] in _INDEXES and depth:
            found.append(_find(folder, json.loads(_document(folder, one)), depth - 1))
        elif _is_ours(one.get("platform")):
            found.append(one)
    if len(found) != 1:
        seen = [one.get("platform") for one in index["manifests"]]
        raise ImageError(
            f"{folder} has {len(found)} images for linux/amd64, not one",
            why=f"platforms: {seen}",
            fix="build it for linux/amd64 (--platform), which is what the lines are made for",
        )
    return found[0]


def _is_ours(platform: Mapping[str, str] | None) -> bool:
    return platform is None or all(platform.get(key) == value for key, value in PLATFORM.items())


def _check_config(config: Mapping[str, Any]) -> None:
    if not _is_ours(config):
        raise ImageError(
            f"the image is for {config.get('os')}/{config.get('architecture')}",
            why="lines are made for linux/amd64",
            fix="build it with --platform linux/amd64",
        )
    inner = config.get("config", {})
    labels, environment = inner.get("Labels") or {}, inner.get("Env") or []
    if not all(isinstance(text, str) for text in (*labels, *labels.values(), *environment)):
        raise ValueError("labels and environment must be text")


def _layer(folder: Path, descriptor: Mapping[str, Any], diff_id: str) -> Layer:
    if descriptor["mediaType"] not in _TARS:
        raise ImageError(
            f"a layer has the form {descriptor['mediaType']}",
            why="layers are read as tar or tar.gz",
            fix="export it with gzip (compression=gzip,force-compression=true)",
        )
    path = _blob(folder, descriptor)
    digest = descriptor["digest"]
    with path.open("rb") as file:
        if f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" != digest:
            raise ImageError(f"layer {digest} has other content than its digest says", fix=_FIX)
    return Layer(
        digest=digest,
        diff_id=diff_id,
        size=descriptor["size"],
        media_type=descriptor["mediaType"],
        path=path,
    )


def _blob(folder: Path, descriptor: Mapping[str, Any]) -> Path:
    digest = descriptor["digest"]
    if not _DIGEST.match(digest):
        raise ValueError(f"{digest!r} is no digest")
    path: Path = folder / "blobs" / "sha256" / digest.removeprefix("sha256:")
    if path.is_symlink() or not path.is_file():
        raise ImageError(f"{folder} lacks the blob {digest}", fix=_FIX)
    if path.stat().st_size != descriptor["size"]:
        raise ImageError(f"the blob {digest} hasn't the size that is stated for it", fix=_FIX)
    return path


def _document(folder: Path, descriptor: Mapping[str, Any]) -> bytes:
    path = _blob(folder, descriptor)
    if descriptor["size"] > _MAX_DOCUMENT:
        raise ValueError(f"{descriptor['digest']} is too large for a document")
    data = path.read_bytes()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor["digest"]:
        raise ImageError(
            f"the blob {descriptor['digest']} has other content than its digest says", fix=_FIX
        )
    return data


# --- a layer's tar ---------------------------------------------------------------------------


class _Hashed:
    """What is read of a file, hashed on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._state, self._size = file, hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._state.update(data)
        self._size += len(data)
        if self._size > _MAX_LAYER:
            raise ImageError("a layer unpacks to more than 128 GiB", fix=_FIX)
        return data

    def digest(self) -> str:
        return f"sha256:{self._state.hexdigest()}"


@contextmanager
def _opened(layer: Layer) -> Iterator[tarfile.TarFile]:
    """The tar of a layer, as a stream; once through it is held against the diff id."""
    is_gzip = layer.media_type.endswith("gzip")
    try:
        with (gzip.open if is_gzip else open)(layer.path, "rb") as file:
            hashed = _Hashed(file)  # type: ignore[arg-type]
            with tarfile.open(fileobj=hashed, mode="r|") as archive:  # type: ignore[call-overload]
                yield archive
            while hashed.read(_CHUNK):
                pass
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile, UnicodeError) as error:
        raise ImageError(f"layer {layer.digest} can't be read", why=str(error), fix=_FIX) from None
    if hashed.digest() != layer.diff_id:
        raise ImageError(
            f"layer {layer.digest} unpacks to something else than the configuration says",
            why=f"{hashed.digest()}, not {layer.diff_id}",
            fix=_FIX,
        )


def _clean(name: str) -> str:
    """A member's path; the root itself is ""."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name or name.startswith("/"):
        raise ImageError(f"a layer has a member outside of the image: {name!r}", fix=_FIX)
    return "/".join(parts)


def _below(path: str, under: str) -> bool:
    return not under or path.startswith(f"{under}/")


def _kind(member: tarfile.TarInfo) -> Kind:
    if member.isreg():
        return "file"
    if member.isdir():
        return "folder"
    if member.islnk():
        return "hardlink"
    return "link" if member.issym() else "other"


def _with_content(entry: Entry, member: tarfile.TarInfo, archive: tarfile.TarFile) -> Entry:
    if entry.kind != "file":
        return entry
    return Entry(
        path=entry.path, kind=entry.kind, mode=entry.mode, size=entry.size, link="",
        layer=entry.layer, _content=archive.extractfile(member),
    )  # fmt: skip


class _View:
    """What upper layers leave to be seen of lower ones."""

    def __init__(self) -> None:
        self._folders: set[str] = set()
        self._gone: set[str] = set()  # with all that lies below them
        self._emptied: set[str] = set()  # opaque: only what lies below them
        self._pending: tuple[set[str], set[str], set[str]] = (set(), set(), set())

    def take(self, path: str, member: tarfile.TarInfo, layer: int) -> Entry | None:
        """The entry, unless it is hidden by an upper layer or is itself a whiteout."""
        folders, gone, emptied = self._pending
        parent, _, name = path.rpartition("/")
        if name == _OPAQUE:
            emptied.add(parent)
            return None
        if name.startswith(_WHITEOUT):
            gone.add(f"{parent}/{name[len(_WHITEOUT) :]}".lstrip("/"))
            return None
        kind = _kind(member)
        hidden = self._hidden(path, kind)
        (folders if kind == "folder" else gone).add(path)
        if hidden:
            return None
        return Entry(
            path=path, kind=kind, mode=member.mode & 0o7777,
            size=member.size if kind == "file" else 0,
            link=_clean(member.linkname) if kind == "hardlink" else member.linkname,
            layer=layer,
        )  # fmt: skip

    def next_layer(self) -> None:
        """From here on the layer that was just read hides what it has to."""
        folders, gone, emptied = self._pending
        self._folders |= folders
        self._gone |= gone
        self._emptied |= emptied
        self._pending = (set(), set(), set())

    def _hidden(self, path: str, kind: Kind) -> bool:
        if path in self._gone or path in self._folders:
            return True
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(len(parts))]
        return any(one in self._gone or one in self._emptied for one in above)
