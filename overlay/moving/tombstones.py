"""``patches/dropped.toml``: why a patch that some line carried is carried no more.

Other lines ask it whether upstream has a patch of theirs by now. Entries are only ever added.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from typing import TYPE_CHECKING, Literal

import msgspec
from packaging.version import InvalidVersion, Version

from overlay.files import locked, machine_errors, write_atomic
from overlay.lines.line import CODENAME, Strict, Upstream, read_toml
from overlay.patches.patch import NAME
from overlay.trees.store import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from overlay.patches.patch import Patch

FILE = "dropped.toml"
_HEAD = b"""\
# Patches that a line carried once, and why it does no more. Written by 'move' and 'drop', which
# only add; 'lint' and 'move' of other lines ask it.
"""


class Tombstone(Strict, frozen=True, rename="kebab"):
    """Why one line carries one patch no more.

    Attributes:
        patch: its name.
        upstream, line: whose series it was in.
        from_version: the pin's version that it was carried on.
        at_version: the pin's version that it was dropped on; the same unless by a move.
        why: ``merged`` (upstream has it), ``skipped`` (in a move), ``dropped``.
        sha256: of the patch file.
        reason: in words; may be empty where ``why`` says it all.
        pull: upstream's pull request, ``owner/repository#number``, if known.
        date: ``YYYY-MM-DD``, if somebody gave one.
    """

    patch: str
    upstream: Upstream
    line: str
    from_version: str
    at_version: str
    why: Literal["merged", "skipped", "dropped"]
    sha256: str
    reason: str = ""
    pull: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if not (NAME.match(self.patch) and CODENAME.match(self.line)):
            raise ValueError(f"{self.patch!r} of {self.line!r} is no patch of a line")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError("'sha256' must be 64 hex digits")
        for version in (self.from_version, self.at_version):
            try:
                Version(version)
            except InvalidVersion:
                raise ValueError(f"{version!r} is no version, such as 0.28.0") from None
        if self.date:
            datetime.date.fromisoformat(self.date)  # which raises ValueError by itself


class _File(Strict, frozen=True):
    dropped: tuple[Tombstone, ...] = ()


def read(root: Path) -> tuple[Tombstone, ...]:
    """All tombstones below ``root`` (the ``patches`` folder). Raises ``LineError``."""
    path = root / FILE
    return read_toml(path, _File).dropped if path.exists() else ()


def add(root: Path, *tombstones: Tombstone) -> None:
    """Add tombstones, all or none; one that is there already is not added again.

    Raises:
        LineError: the file can't be read; it stays as it is.
    """
    path = root / FILE
    with _changing(path):
        known = read(root)
        fresh = [stone for stone in dict.fromkeys(tombstones) if stone not in known]
        if fresh:
            old = path.read_bytes() if path.exists() else _HEAD
            end = b"" if old.endswith(b"\n") else b"\n"
            write_atomic(path, old + end + b"".join(_table(stone) for stone in fresh))


def take_back(root: Path, *tombstones: Tombstone) -> None:
    """Undo an ``add`` of these tombstones, since what they tell of did not happen."""
    path = root / FILE
    with _changing(path):
        old = path.read_bytes() if path.exists() else _HEAD
        new = old
        for stone in tombstones:
            new = new.replace(_table(stone), b"", 1)
        if new == _HEAD:
            path.unlink(missing_ok=True)
        elif new != old:
            write_atomic(path, new)


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    # Beside the stores, since a lock file in the patches folder would show in 'git status'
    lock = locked(cache_folder() / "stores" / "dropped.lock")
    with lock, machine_errors(path, is_cache=False):
        yield


def _table(stone: Tombstone) -> bytes:
    import tomli_w

    values = {key: value for key, value in msgspec.to_builtins(stone).items() if value != ""}
    return f"\n[[dropped]]\n{tomli_w.dumps(values)}".encode()


def merged(
    tombstones: Sequence[Tombstone], patch: Patch, upstream: Upstream, version: str
) -> Tombstone | None:
    """The tombstone that says that upstream has ``patch`` since ``version`` or before, if any.

    The oldest of several. A patch is known by its name or by its file.
    """
    found = [
        stone
        for stone in tombstones
        if stone.why == "merged"
        and stone.upstream == upstream
        and (stone.patch == patch.name or stone.sha256 == patch.sha256)
        and Version(stone.at_version) <= Version(version)
    ]
    return min(found, key=lambda stone: Version(stone.at_version), default=None)
