"""The folders that an image is built from, filled with pinned and verified files alone.

Named contexts of ``images/Dockerfile``. Wheels are linked from the cache, not copied, where both
lie on one disk.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import packaging
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

import overlay
from overlay.errors import ImageError
from overlay.images.difference import write_difference
from overlay.images.proof import Claims, write_claims
from overlay.lines.line import UPSTREAMS
from overlay.sources.index import fetch_release

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlay.images.labels import Labels
    from overlay.images.requirements import Locked, Requirements
    from overlay.lines.line import Line
    from overlay.report import Reporter
    from overlay.sources.source import Sources
    from overlay.wheels.linewheels import Built

CONTEXTS = ("wheels", "cuda-wheels", "upstream-wheels", "kernel-wheels", "changes", "proof")
"""By other names than the Dockerfile's stages, which they would replace."""

COMPILE = "compile-wheels"
"""For the target ``compile`` alone, which needs a context ``source`` as well."""

_WANTED = "requirements.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What an image is made of.

    Attributes:
        labels: what it will claim.
        requirements, toolkit: locks of its dependencies and of its CUDA toolkit.
        built: the line's own two wheels.
        kernels: wheel of kernels compiled ahead of time, or None.
        compiling: the lock of what extensions are built with, for the target ``compile``.
    """

    line: Line
    labels: Labels
    requirements: Requirements
    toolkit: Requirements
    built: Sequence[Built]
    kernels: Path | None
    compiling: Requirements | None = None


def write_contexts(inputs: Inputs, folder: Path, sources: Sources) -> None:
    """Fill ``folder`` with one folder a context; downloads what the cache lacks.

    Raises:
        ImageError: the kernel wheel is no wheel of FlashInfer's kernels.
        SourceError, UnavailableError: a wheel isn't what its lock says, or can't be had.
    """
    for name in CONTEXTS:
        (folder / name).mkdir(parents=True)
    is_full = inputs.labels.contents == "full"
    _locked(inputs.requirements.wheels.values() if is_full else (), folder / "wheels", sources)
    _locked(inputs.toolkit.wheels.values() if is_full else (), folder / "cuda-wheels", sources)
    if inputs.compiling is not None:
        (folder / COMPILE).mkdir()
        _locked(inputs.compiling.wheels.values(), folder / COMPILE, sources)
    bases = {upstream: sources.release(inputs.line, upstream) for upstream in UPSTREAMS}
    _wheels(bases.values(), folder / "upstream-wheels")
    _kernels(inputs.kernels, folder / "kernel-wheels")
    ours = {one.upstream: one.path for one in inputs.built}
    write_difference([(bases[up], ours[up]) for up in UPSTREAMS], folder / "changes")
    _program(folder / "proof")
    claims = claims_of(inputs.labels)
    (folder / "proof" / "claims.json").write_bytes(write_claims(claims))


def claims_of(labels: Labels) -> Claims:
    """What of labels can be held against an image's content."""
    return Claims(
        line=labels.line,
        digest=labels.digest,
        contents=labels.contents,
        versions={upstream: labels.upstream(upstream).version for upstream in UPSTREAMS},
        commits={upstream: labels.upstream(upstream).commit for upstream in UPSTREAMS},
        patches={upstream: labels.upstream(upstream).patches for upstream in UPSTREAMS},
        torch=labels.torch,
        torch_cuda=labels.torch_cuda,
        packages=labels.packages,
        needs=labels.needs,
    )


def _locked(wheels: Iterable[Locked], folder: Path, sources: Sources) -> None:
    """Fetch what a lock names, each by its hash."""
    wanted = list(wheels)
    report: Reporter = sources.report
    if wanted:
        report.say(f"{len(wanted)} wheels for {folder.name}/")
    for one in wanted:
        path = fetch_release(
            one.name, one.file, one.sha256,
            cache=sources.cache, offline=sources.offline, report=report,
        )  # fmt: skip
        _link(path, folder / one.file)
    (folder / _WANTED).write_text("".join(f"{one}\n" for one in wanted))


def _wheels(paths: Iterable[Path], folder: Path) -> None:
    lines = []
    for path in paths:
        name, version, *_ = parse_wheel_filename(path.name)
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        _link(path, folder / path.name)
        lines.append(f"{name}=={version} --hash=sha256:{sha256}\n")
    (folder / _WANTED).write_text("".join(lines))


def _kernels(wheel: Path | None, folder: Path) -> None:
    if wheel is None:
        (folder / _WANTED).write_text("")
        return
    try:
        name = parse_wheel_filename(wheel.name)[0]
    except InvalidWheelFilename as error:
        raise ImageError(f"{wheel.name} isn't the name of a wheel", why=str(error)) from None
    if name != "flashinfer-jit-cache":
        raise ImageError(
            f"{wheel.name} is a wheel of {name}, not of FlashInfer's kernels",
            fix="name the wheel that 'vllm-overlay kernels' wrote",
        )
    _wheels([wheel], folder)


def _program(folder: Path) -> None:
    """The package that proves, and the one library that it needs; both are Python alone."""
    for package in (overlay, packaging):
        source = Path(str(package.__file__)).parent
        for path in sorted(source.rglob("*.py")):
            target = folder / source.name / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)
