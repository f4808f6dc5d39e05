"""What an image's last layer holds: the difference between upstream's wheels and a line's own.

Changed and added files, paths that go, and the metadata folder, whose name has the version in it.
``images/apply_overlay.py`` lays it over an installation of upstream's wheels.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from packaging.utils import parse_wheel_filename

from overlay.wheels.distinfo import read_record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from overlay.wheels.distinfo import Row

FILES, MANIFEST = "files", "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What one wheel changes of another.

    Attributes:
        old, new: names of the metadata folders.
        files: members of the new wheel that are written.
        gone: members of the old wheel that the new one lacks, metadata aside.
    """

    old: str
    new: str
    files: tuple[str, ...]
    gone: tuple[str, ...]


def write_difference(pairs: Iterable[tuple[Path, Path]], folder: Path) -> list[Difference]:
    """Write the difference of each pair (upstream's wheel, ours) into a new folder.

    Both were verified: upstream's against its pin, ours was made of it.
    """
    found = []
    for theirs, ours in pairs:
        one = _compare(theirs, ours)
        _extract(ours, one.files, folder / FILES)
        found.append(one)
    text = json.dumps([asdict(one) for one in found], indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n")
    return found


def _compare(theirs: Path, ours: Path) -> Difference:
    old_rows, new_rows = _rows(theirs), _rows(ours)
    old, new = _info(theirs), _info(ours)
    changed = [
        name
        for name, row in new_rows.items()
        if name.startswith(f"{new}/") or name not in old_rows or old_rows[name].hash != row.hash
    ]
    gone = [name for name in old_rows if not name.startswith(f"{old}/") and name not in new_rows]
    return Difference(old=old, new=new, files=tuple(sorted(changed)), gone=tuple(sorted(gone)))


def _info(wheel: Path) -> str:
    name, version, *_ = parse_wheel_filename(wheel.name)
    return f"{name.replace('-', '_')}-{version}.dist-info"


def _rows(wheel: Path) -> dict[str, Row]:
    with zipfile.ZipFile(wheel) as archive:
        name = f"{_info(wheel)}/RECORD"
        return read_record(archive.read(name), name)


def _extract(wheel: Path, names: Iterable[str], folder: Path) -> None:
    """Write members with the modes that an installer gives them."""
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(name))
            executable = archive.getinfo(name).external_attr >> 16 & 0o111
            target.chmod(0o755 if executable else 0o644)
