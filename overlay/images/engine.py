"""The Docker engine of the machine, through its own client and buildx.

What a build needs is asked for before it begins, so that a refusal costs seconds, not minutes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlay.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

MINIMUM_BUILDX, MINIMUM_BUILDKIT = (0, 13), (0, 13)
"""The first that set the times of files in layers (``rewrite-timestamp``)."""
MINIMUM_ENGINE = 26
"""The first engine with that BuildKit in it."""

_PLATFORM = "linux/amd64"
_INSTALL = "install Docker 26 or newer with buildx; on Debian 12 tests/images/provision.sh does it"
_BUILDER = (
    'turn its containerd image store on ("features": {"containerd-snapshotter": true} in '
    "daemon.json), or make a builder: docker buildx create --use --driver docker-container"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """What will build: kind of driver and version of BuildKit or of the engine."""

    driver: str
    version: str
    buildx: str


def find_builder() -> Builder:
    """The builder that buildx has selected, when it can build our images.

    Raises:
        EngineError: there is no client, no buildx, no engine, it is too old, or it can't export
            or build what is needed; each says what to do.
    """
    if shutil.which("docker") is None:
        raise EngineError("there is no Docker client", why="no 'docker' on the PATH", fix=_INSTALL)
    buildx = _buildx()
    told = _ask("buildx", "inspect", "--bootstrap")
    error = _field(told.stdout, "Error")  # buildx says so, and ends with 0
    if told.returncode or error:
        raise EngineError(
            "there is no Docker engine that answers",
            why=error or _last(told.stderr),
            fix="start it (systemctl start docker), or let DOCKER_HOST or 'docker context' name "
            f"one; else {_INSTALL}",
        )
    driver = _field(told.stdout, "Driver") or "docker"
    platforms = _field(told.stdout, "Platforms")
    if _PLATFORM not in re.split(r"[,\s*]+", platforms):
        raise EngineError(
            f"the builder can't build for {_PLATFORM}",
            why=f"it builds for {platforms or 'nothing'}",
            fix="select a builder on an x86-64 machine (docker buildx create --use)",
        )
    version = _engine() if driver == "docker" else _buildkit(told.stdout)
    return Builder(driver=driver, version=version, buildx=buildx)


def check_room(folder: Path, needed: int) -> None:
    """Refuse where a build could not be written.

    Args:
        folder: where the image goes; it or one above it exists.
        needed: bytes.
    """
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise EngineError(
            f"{free / 1e9:.1f} GB are free at {there}; the image takes about {needed / 1e9:.0f}",
            fix="free some room ('docker builder prune' gives back what old builds left), or "
            "name another disk with --out",
        )


def _buildx() -> str:
    told = _ask("buildx", "version")
    match = re.search(r"\bv?(\d+)\.(\d+)\S*", told.stdout)
    if told.returncode or match is None:
        raise EngineError("Docker has no buildx", why=_last(told.stderr), fix=_INSTALL)
    if (int(match[1]), int(match[2])) < MINIMUM_BUILDX:
        raise EngineError(
            f"buildx is {match[0]}, which is too old",
            why="0.13 is the first that can make an image the same twice",
            fix=_INSTALL,
        )
    return match[0]


def _engine() -> str:
    """Version of the engine, whose own BuildKit builds."""
    told = _ask("info", "--format", "{{json .}}")
    try:
        info: dict[str, Any] = json.loads(told.stdout)
        version = str(info["ServerVersion"])
        major = int(version.split(".")[0])
    except (ValueError, KeyError):
        raise EngineError(
            "the Docker engine does not say what it is", why=_last(told.stderr), fix=_INSTALL
        ) from None
    if major < MINIMUM_ENGINE:
        raise EngineError(
            f"the Docker engine is {version}, which is too old",
            why=f"{MINIMUM_ENGINE} is the first that can make an image the same twice",
            fix=_INSTALL,
        )
    if "io.containerd.snapshotter" not in json.dumps(info.get("DriverStatus")):
        raise EngineError("the Docker engine can't export an image as an OCI layout", fix=_BUILDER)
    return version


def _buildkit(text: str) -> str:
    version = _field(text, "BuildKit version") or _field(text, "Buildkit")
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < MINIMUM_BUILDKIT:
        raise EngineError(
            f"the builder's BuildKit is {version or 'of an unknown version'}, which is too old",
            why="0.13 is the first that can make an image the same twice",
            fix="make a newer one: docker buildx create --use --driver docker-container",
        )
    return version


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}:[ \t]*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _last(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-3:])


def _ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ("docker", *arguments),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            check=False, timeout=120,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError("Docker does not answer", why=str(error), fix=_INSTALL) from None
