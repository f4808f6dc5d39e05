"""The layout of the cache folder, and which files in it are whose.

::

    downloads/<sha256>/<file>[.part|.ok|.ok.part], .lock
    stores/<upstream>.git, <upstream>.lock, .new-*/
    states/<upstream>/<key>.json
    frontier/<key>.json, releases/<upstream>/<key>.json

Nothing else is ever listed, and links are never followed.
"""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from overlay.lines.line import UPSTREAMS, Upstream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ItemKind = Literal["download", "store", "base", "tip", "states", "answers", "leftover"]

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_STATE = re.compile(r"[0-9a-f]{64}\.json\Z")
# What write_atomic leaves beside a state when its process is killed
_HALF_STATE = re.compile(r"\.[0-9a-f]{64}\.json\.[a-z0-9_]{8}\Z")
_ANSWERS = (("frontier",), *(("releases", upstream) for upstream in UPSTREAMS))
_RELEASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.(whl|tar\.gz|zip)\Z")
# What killed git processes leave in a repository, by folder
_GIT_LEFT = {
    ".": re.compile(r"(HEAD|config|packed-refs|shallow)\.lock\Z|shallow\.lock\.\w+\Z"),
    "objects/pack": re.compile(r"tmp_\w+\Z|\.tmp-[\w.-]+\Z"),
    "objects/info": re.compile(r"\w+\.lock\Z"),
}
_LOOSE_FOLDER = re.compile(r"[0-9a-f]{2}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing in the cache.

    Attributes:
        kind: what it is.
        name: of the file, upstream or ref.
        path: the file or folder.
        size: bytes; None for a ref, whose objects are shared.
        detail: for a person.
    """

    kind: ItemKind
    name: str
    path: Path
    size: int | None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Sizes of a store, in bytes, and how its objects lie."""

    size: int
    loose: int
    packs: int


def age(path: Path) -> float:
    """Seconds since a file was written; 0 when it went meanwhile."""
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def children(folder: Path) -> list[Path]:
    """Entries of a folder, sorted; none where it is a link, or not there, or closed to us."""
    if folder.is_symlink():
        return []
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_plain(path: Path) -> bool:
    """Whether it is a file and no link to one."""
    return path.is_file() and not path.is_symlink()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; links count nothing."""
    if path.is_symlink():
        return 0
    if path.is_dir():
        return sum(size_of(child) for child in children(path))
    try:
        return path.stat().st_size
    except OSError:
        return 0


def remove(path: Path) -> int:
    """Delete a file or a folder; how many bytes that freed. Gone already is fine."""
    size = size_of(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return size - size_of(path) if path.exists() else size
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _inside(cache: Path, *parts: str) -> list[Path]:
    """Entries of a folder of the layout, unless a link leads to it."""
    folder = cache
    for part in parts:
        folder = folder / part
        if folder.is_symlink():
            return []
    return children(folder)


def downloads(cache: Path) -> Iterator[Item]:
    """Release files, whole ones."""
    for home in _inside(cache, "downloads"):
        for path in _inside(cache, "downloads", home.name) if _SHA256.match(home.name) else ():
            if is_plain(path) and _RELEASE.match(path.name):
                stamped = path.with_name(path.name + ".ok").is_file()
                yield Item(
                    kind="download", name=path.name, path=path, size=size_of(path),
                    detail="verified" if stamped else "not verified yet",
                )  # fmt: skip


def parts(cache: Path) -> Iterator[Item]:
    """Release files that were never completed."""
    for home in _inside(cache, "downloads"):
        for path in _inside(cache, "downloads", home.name) if _SHA256.match(home.name) else ():
            whole = path.name.removesuffix(".part").removesuffix(".ok")
            if is_plain(path) and path.suffix == ".part" and _RELEASE.match(whole):
                yield _left(path, "of a download that was cut off")


def states(cache: Path, upstream: Upstream) -> list[Path]:
    """Kept states of one upstream."""
    found = _inside(cache, "states", upstream)
    return [path for path in found if _STATE.match(path.name) and is_plain(path)]


def answers(cache: Path) -> dict[str, list[Path]]:
    """What was found out once and is made again when it is asked for, by folder."""
    return {
        "/".join(folder): [
            path for path in _inside(cache, *folder) if _STATE.match(path.name) and is_plain(path)
        ]
        for folder in _ANSWERS
    }


def half_states(cache: Path, *folder: str) -> Iterator[Item]:
    """What was half-written below a folder when its writer was killed."""
    for path in _inside(cache, *folder):
        if _HALF_STATE.match(path.name) and is_plain(path):
            yield _left(path, "of a killed process")


def half_answers(cache: Path) -> Iterator[Item]:
    """Answers whose writer was killed."""
    for folder in _ANSWERS:
        yield from half_states(cache, *folder)


def store_leftovers(cache: Path, upstream: Upstream) -> Iterator[Item]:
    """What killed processes left in a store, and stores that were never completed."""
    for path in _inside(cache, "stores"):
        inside = [child.name for child in children(path)]
        if path.name.startswith(".new-") and inside == [f"{upstream}.git"]:
            yield _left(path, "of a store that was not completed")
    store = f"{upstream}.git"
    for folder, pattern in _GIT_LEFT.items():
        for path in _inside(cache, "stores", store, *folder.split("/")):
            if pattern.match(path.name) and is_plain(path):
                yield _left(path, "of a killed git process")
    for loose in _inside(cache, "stores", store, "objects"):
        for path in children(loose) if _LOOSE_FOLDER.match(loose.name) else ():
            if path.name.startswith("tmp_obj_") and is_plain(path):
                yield _left(path, "of a killed git process")
    yield from _ref_locks(cache / "stores" / store / "refs" / "overlay")


def _ref_locks(folder: Path) -> Iterator[Item]:
    for path in children(folder):
        if path.is_dir():
            yield from _ref_locks(path)
        elif path.suffix == ".lock" and is_plain(path):
            yield _left(path, "of a killed git process")


def leftovers(cache: Path) -> Iterator[Item]:
    """Everything that dead (or still running) processes left half-made."""
    yield from parts(cache)
    for upstream in UPSTREAMS:
        yield from half_states(cache, "states", upstream)
        yield from store_leftovers(cache, upstream)
    yield from half_answers(cache)


def _left(path: Path, detail: str) -> Item:
    return Item(kind="leftover", name=path.name, path=path, size=size_of(path), detail=detail)


def measure(store: Path) -> Measured:
    """Size of a store and number of its loose objects and packs."""
    objects = store / "objects"
    loose = sum(
        len(child.name) == 38
        for folder in children(objects)
        if _LOOSE_FOLDER.match(folder.name)
        for child in children(folder)
    )
    packs = sum(path.suffix == ".pack" for path in children(objects / "pack"))
    return Measured(size=size_of(store), loose=loose, packs=packs)
