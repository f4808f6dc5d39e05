"""A line's two wheels: pinned upstream wheels with the patched files in place of theirs."""

from __future__ import annotations

import zipfile
from collections.abc import Container
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from overlay.errors import SourceError, WheelError
from overlay.lines.line import PROJECTS, UPSTREAMS, Line, Upstream
from overlay.lines.record import make_record
from overlay.patches.paths import unquote_path
from overlay.trees.objects import NO_BLOB
from overlay.wheels.distinfo import overlay_version, requirements_of
from overlay.wheels.layout import BuildInput, Shipped, wheel_path
from overlay.wheels.wheel import Change, flashinfer_build_meta, overlay_wheel, vllm_version_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from overlay.report import Reporter
    from overlay.sources.source import Sources
    from overlay.trees.apply import Patched

# What each upstream's build writes into the package by itself, and how ours is made of it
VERSION_FILES: dict[Upstream, tuple[str, Callable[..., bytes]]] = {
    "vllm": ("vllm/_version.py", vllm_version_file),
    "flashinfer": ("flashinfer/_build_meta.py", flashinfer_build_meta),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One wheel that was written."""

    upstream: Upstream
    path: Path
    version: str
    changes: int


def build_wheels(
    line: Line,
    patched: Mapping[Upstream, Patched],
    sources: Sources,
    out: Path,
    report: Reporter,
) -> list[Built]:
    """Write both wheels of a line into ``out``.

    Raises ``WheelError`` when a patch touches what only a compile build can carry.
    """
    record = make_record(line, {upstream: patched[upstream].tree for upstream in UPSTREAMS})
    bases = {upstream: sources.release(line, upstream) for upstream in UPSTREAMS}
    names = {upstream: _Names(bases[upstream]) for upstream in UPSTREAMS}
    _refuse_build_inputs(line, patched, names)
    built = []
    for upstream in UPSTREAMS:
        pin = line.pin(upstream)
        version = overlay_version(pin.version, record)
        changes = _changes(upstream, patched[upstream], names[upstream])
        path, rewrite = VERSION_FILES[upstream]
        rewrite = partial(rewrite, version=version, commit=pin.commit_text, built=pin.wheel.commit)
        wheel = overlay_wheel(
            bases[upstream],
            pin.wheel.sha256,
            out,
            version=version,
            changes=changes,
            requirements=_requirements(line, record, bases["vllm"]) if upstream == "vllm" else {},
            record=record,
            rewrites={path: rewrite},
            verified=True,  # sources.release() has just checked it
            report=report,
        )
        built.append(Built(upstream=upstream, path=wheel, version=version, changes=len(changes)))
    return built


class _Names(Container[str]):
    """Names of a wheel's members, read when the first is asked for: most builds never ask."""

    def __init__(self, wheel: Path) -> None:
        self._wheel = wheel

    def __contains__(self, name: object) -> bool:
        return name in self._all

    @cached_property
    def _all(self) -> frozenset[str]:
        try:
            with zipfile.ZipFile(self._wheel) as archive:
                return frozenset(archive.namelist())
        except (OSError, zipfile.BadZipFile) as error:
            raise SourceError(f"{self._wheel.name} is no wheel", why=str(error)) from None


def _refuse_build_inputs(
    line: Line,
    patched: Mapping[Upstream, Patched],
    names: Mapping[Upstream, Container[str]],
) -> None:
    found = []
    for upstream in UPSTREAMS:
        for patch in patched[upstream].tree.patches:
            for effect in patch.effects:
                ship = wheel_path(upstream, _plain(effect.path), names[upstream])
                if isinstance(ship, BuildInput):
                    found.append(f"{upstream}/{patch.name}: {effect.path}: {ship.reason}")
    if found:
        raise WheelError(
            f"line {line.name} can't be built as an overlay: patches touch compiled sources or "
            "build inputs",
            why="\n".join(found),
            fix="build it from source (a compile build), or keep such changes out of the series",
        )


def _changes(upstream: Upstream, patched: Patched, names: Container[str]) -> list[Change]:
    changes = []
    for effect in patched.tree.final().values():
        ship = wheel_path(upstream, _plain(effect.path), names)
        if not isinstance(ship, Shipped):
            continue
        if effect.blob == NO_BLOB:
            if ship.name in names:  # a file that the series itself added is not there
                changes.append(Change(path=ship.name, data=None))
            continue
        blob = patched.store.reader.get(effect.blob)
        if blob is None:
            raise SourceError(f"blob {effect.blob} of {effect.path} is missing from the store")
        changes.append(Change(path=ship.name, data=blob[2], mode=int(effect.mode, 8)))
    return changes


def _requirements(line: Line, record: bytes, wheel: Path) -> dict[str, str]:
    """Requirements that replace upstream's, checked against what upstream's wheel says."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        stated = requirements_of(archive.read(metadata))
    found = {}
    for project, requirement in line.settings.requirements.items():
        upstreams = f"{project}{requirement.upstream}"
        if upstreams not in stated.get(project, []):
            raise WheelError(
                f"vLLM's wheel does not require {upstreams}",
                why=f"it says: {'; '.join(stated.get(project, [])) or 'nothing on ' + project}",
                fix=f"correct 'requirements.{project}.upstream' in line.toml",
            )
        found[project] = f"{project}{requirement.line}"
    ours = PROJECTS["flashinfer"]
    version = overlay_version(line.settings.flashinfer.version, record)
    return found | {ours: f"{ours}=={version}"}


def _plain(path: str) -> str:
    """A path as wheels have it; they hold UTF-8 names only."""
    try:
        return unquote_path(path.encode()).decode()
    except UnicodeDecodeError:
        raise WheelError(f"{path} can't be in a wheel: its name is not UTF-8") from None
