"""Hold the files that no patch touches against upstream's own wheel.

A wheel's RECORD proves that its files are what its maker listed. That the maker listed upstream's
files is proven by the pinned wheel alone, which the provenance record names by hash.
"""

from __future__ import annotations

import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

from overlay.lines.line import PROJECTS
from overlay.wheels.distinfo import read_record
from overlay.wheels.inspect import Inspection, Problem
from overlay.wheels.layout import Shipped, wheel_path
from overlay.wheels.linewheels import VERSION_FILES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from overlay.lines.line import Upstream
    from overlay.wheels.distinfo import Row


def upstream_of(found: Inspection) -> Upstream | None:
    """Which upstream an inspected distribution is, if it carries a record of ours."""
    named = {project: upstream for upstream, project in PROJECTS.items()}
    return named.get(found.name) if found.record is not None else None


def check_baseline(
    found: Inspection, wheel: Path, own: Mapping[str, Row] | None = None
) -> Inspection:
    """Add a problem for each unpatched file that isn't upstream's.

    Args:
        found: of one of our wheels, or of one that is installed.
        wheel: the upstream's wheel that the record names; its hash was checked.
        own: rows of the RECORD, where ``found.where`` is no place on disk.
    """
    upstream = upstream_of(found)
    if upstream is None:
        return found
    theirs, ours = _of_wheel(wheel), _own(found) if own is None else own
    ours_alone = _patched(found, upstream, theirs) | {VERSION_FILES[upstream][0]}
    problems = []
    for path in sorted((theirs.keys() | ours.keys()) - ours_alone):
        if ".dist-info/" in path or not _belongs(path, theirs):
            continue
        if path not in ours:
            problems.append(_problem(path, "upstream's wheel has it, and no patch deletes it"))
        elif path not in theirs:
            problems.append(_problem(path, "neither upstream's wheel nor a patch has it"))
        elif ours[path].hash != theirs[path].hash:
            problems.append(_problem(path, "it differs from upstream's, and no patch touches it"))
    return replace(found, problems=(*found.problems, *problems))


def _problem(path: str, what: str) -> Problem:
    return Problem("baseline", path, f"{path}: {what}")


def _belongs(path: str, theirs: Mapping[str, Row]) -> bool:
    """Installers add files of their own: scripts outside of the folder, and compiled modules."""
    return path in theirs or not (path.startswith("..") or path.endswith(".pyc"))


def _of_wheel(wheel: Path) -> dict[str, Row]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
        return read_record(archive.read(name), name)


def _own(found: Inspection) -> dict[str, Row]:
    if found.where.is_file():
        return _of_wheel(found.where)
    folder = f"{found.name.replace('-', '_')}-{found.version}.dist-info"
    return read_record((found.where / folder / "RECORD").read_bytes(), folder)


def _patched(found: Inspection, upstream: Upstream, names: Mapping[str, Row]) -> set[str]:
    assert found.record is not None  # noqa: S101 - upstream_of() looked
    ships = (
        wheel_path(upstream, effect["path"], names)
        for patch in found.record["series"][upstream]
        for effect in patch["effect"]
    )
    return {ship.name for ship in ships if isinstance(ship, Shipped)}
