"""Faults of what a line says about its image: ``[image]`` in line.toml, and requirements.lock."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from overlay.errors import LineError
from overlay.images.requirements import lock_inputs, read_requirements, stale_inputs
from overlay.images.toolkit import read_toolkit
from overlay.lines.line import REQUIREMENTS_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from overlay.lines.line import ImageSettings, Package, Settings


def settings_faults(text: str, settings: Settings) -> Iterator[tuple[str, str]]:
    """Key and fault for each fault of ``[image]``; ``text`` is the file's."""
    image = settings.image
    if image is None:
        return
    tables: list[str] = re.findall(r"^\s*\[+([^\]]+)\]", text, re.MULTILINE)
    begun = tables.index("image") if "image" in tables else len(tables)
    behind = [name for name in tables[begun:] if name.split(".")[0] != "image"]
    if behind or "\n[image]\n" not in text:
        # Receipts speak for the settings above it
        yield "image", "'[image]' must be a line of its own, and the last table of the file"
    if image.python not in settings.python:
        yield "image.python", f"{image.python} is none of the line's: {', '.join(settings.python)}"
    for need in image.needs:
        try:
            Requirement(need)
        except InvalidRequirement as error:
            yield "image.needs", f"{need!r} is no requirement: {error}"
    yield from _package_faults(image)


def _package_faults(image: ImageSettings) -> Iterator[tuple[str, str]]:
    for name, package in image.packages.items():
        if name != canonicalize_name(name):
            yield f"image.packages.{name}", f"write its name as {canonicalize_name(name)}"
        elif not _agrees(name, package):
            what = f"{package.file} is no wheel of {name} {package.version}"
            yield f"image.packages.{name}.file", what


def _agrees(name: str, package: Package) -> bool:
    try:
        project, version, *_ = parse_wheel_filename(package.file)
        return project == name and version == Version(package.version)
    except (InvalidWheelFilename, InvalidVersion):
        return False


def lock_faults(folder: Path, settings: Settings) -> Iterator[tuple[bool, str, str]]:
    """For each fault of a line's lock: whether it is only a hint, what it is, what to do."""
    if settings.image is None:
        return
    path = folder / REQUIREMENTS_FILE
    again = f"run 'vllm-overlay image-lock {folder.name}'"
    if not path.exists():
        yield True, "is missing: no image can be built", again
        return
    try:
        toolkit = read_toolkit(folder.absolute().parent.parent / "images", settings.cuda)
        read = read_requirements(path)
    except LineError as error:
        yield False, error.what.removeprefix(f"{folder.name}/{REQUIREMENTS_FILE}:"), error.fix
        return
    for what in stale_inputs(read, lock_inputs(settings, toolkit)):
        yield False, f"is of another state of the line: {what}", again
