"""Resolves what an image installs, by uv, on whatever index pip is configured for.

Works from metadata: nothing large is downloaded. No folder of the machine counts (find-links), so
that a lock is the same everywhere at one time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from overlay.errors import ImageError, MachineError
from overlay.images.requirements import Locked
from overlay.lines.line import PROJECTS
from overlay.sources.pipconfig import read_pip_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from overlay.images.requirements import Requirements
    from overlay.lines.line import Settings

GLIBC = 36
"""Minor version of glibc 2 in the base images: Debian 12's."""

# Compiler parts of the toolkit. Some wheels bring their own, which then are the line's too; the
# runtime is torch's.
_TORCHS_OWN = {"cuda-toolkit", "nvidia-cuda-runtime"}


def resolve_line(settings: Settings, wheels: Sequence[Path], toolkit: Requirements) -> list[Locked]:
    """What a line's image needs beside vLLM and FlashInfer.

    Args:
        settings: of the line, with an image.
        wheels: upstream's two wheels.
        toolkit: the lock of the CUDA toolkit; compilers that wheels ask for are held to it.
    """
    assert settings.image is not None  # noqa: S101 - callers look first
    packages = settings.image.packages
    wanted = [*requirements_of(wheels), f"torch=={settings.torch}", *settings.image.needs]
    wanted += [f"{name}=={package.version}" for name, package in packages.items()]
    held = [
        f"{one.name}=={one.version}"
        for one in toolkit.wheels.values()
        if one.name not in _TORCHS_OWN
    ]
    found = resolve(wanted, settings.image.python, constraints=held)
    for one in found:
        package = packages.get(one.name)
        if package and (package.file, package.sha256) != (one.file, one.sha256):
            raise ImageError(
                f"{one.name} {one.version} on the index isn't what line.toml pins",
                why=f"the index has {one.file} with {one.sha256}",
                fix=f"correct [image.packages.{one.name}], once you know why they differ",
            )
    return found


def requirements_of(wheels: Sequence[Path]) -> list[str]:
    """What wheels require, except one another; extras aside."""
    found = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            raw, _ = parse_email(archive.read(name))
        found += [Requirement(text) for text in raw.get("requires_dist", [])]
    own = {canonicalize_name(project) for project in PROJECTS.values()}
    return [
        str(one)
        for one in found
        if canonicalize_name(one.name) not in own
        and (one.marker is None or "extra" not in str(one.marker))
    ]


def resolve(wanted: Iterable[str], python: str, *, constraints: Sequence[str] = ()) -> list[Locked]:
    """One wheel a project that fits together with all others.

    Args:
        wanted: requirements.
        python: minor version.
        constraints: versions that hold where something asks for the project.

    Raises:
        ImageError: there is no solution, or a project has no wheel for the platform.
        MachineError: uv is missing.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-lock-") as scratch:
        source, held = Path(scratch, "wanted.in"), Path(scratch, "held.txt")
        made = Path(scratch, "pylock.toml")
        source.write_text("".join(f"{line}\n" for line in wanted))
        held.write_text("".join(f"{line}\n" for line in constraints))
        argv = (
            _uv(), "pip", "compile", "--quiet", "--no-header", "--no-annotate",
            "--no-config", "--format=pylock.toml", "--only-binary=:all:",
            f"--python-version={python}", f"--python-platform=x86_64-manylinux_2_{GLIBC}",
            f"--constraints={held}", f"--output-file={made}", str(source),
        )  # fmt: skip
        done = subprocess.run(argv, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ImageError(
                "uv finds no set of packages that fit together",
                why=done.stderr.strip()[-2000:],
                fix="see what uv says; correct the pins in line.toml, or the network",
            )
        packages = tomllib.loads(made.read_text())["packages"]
    order = _tags(python)
    return [_wheel(one, order) for one in packages]


def _wheel(package: Mapping[str, Any], order: Mapping[Any, int]) -> Locked:
    """The wheel that pip would take: the one whose best tag comes first."""
    ranked = []
    for wheel in package.get("wheels", []):
        name = wheel.get("name") or unquote(str(wheel["url"]).rpartition("/")[2])
        tags = parse_wheel_filename(name)[3]
        rank = min((order[tag] for tag in tags if tag in order), default=-1)
        if rank >= 0:
            ranked.append((rank, name, wheel["hashes"]["sha256"]))
    if not ranked:
        raise ImageError(
            f"{package['name']} {package.get('version')} has no wheel for the base image",
            why=f"x86-64, glibc 2.{GLIBC}",
            fix="hold it to a version that has one",
        )
    _, name, sha256 = min(ranked)
    return Locked(
        name=canonicalize_name(package["name"]),
        version=package["version"],
        file=name,
        sha256=sha256,
    )


def _tags(python: str) -> dict[Any, int]:
    version = tuple(int(part) for part in python.split("."))
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)]
    for alias, after in (("manylinux2014", 17), ("manylinux2010", 12), ("manylinux1", 5)):
        platforms.insert(platforms.index(f"manylinux_2_{after}_x86_64") + 1, f"{alias}_x86_64")
    platforms.append("linux_x86_64")
    interpreter = f"cp{''.join(python.split('.'))}"
    tags = [
        *cpython_tags(version, abis=[interpreter], platforms=platforms),
        *compatible_tags(version, interpreter=interpreter, platforms=platforms),
    ]
    return {tag: rank for rank, tag in enumerate(tags)}


def _uv() -> str:
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if found is None:
        raise MachineError("uv is missing", fix="pip install uv; it resolves what images install")
    return found


def _environment() -> dict[str, str]:
    """pip's configuration in uv's words; what the environment says to uv already stands."""
    config = read_pip_config()
    said = {
        "UV_DEFAULT_INDEX": " ".join(config.index_urls),
        "UV_INDEX": " ".join(config.extra_index_urls),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip's rule: all indexes count alike
        "SSL_CERT_FILE": config.cert or "",
    }
    own = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    return {**{name: value for name, value in said.items() if value}, **own}
