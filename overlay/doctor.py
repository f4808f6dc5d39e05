"""What this machine lacks, and how it can be had: ``doctor``.

Every check stands alone and answers whatever happens; none changes the machine, and the network
is only touched when asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from filelock import FileLock, Timeout

from overlay.errors import MachineError, OverlayError
from overlay.lines.line import PROJECTS
from overlay.sources.pipconfig import Place, read_pip_config, redacted
from overlay.trees.git import MIN_GIT, git_version
from overlay.trees.store import CACHE_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Status = Literal["ok", "missing", "optional"]

MIN_PYTHON = (3, 11)
# The CUDA toolchain of the images
NVCC = (13, 3)
# Bytes that one line takes, as measured with infernal: its downloads, its two stores (twice,
# since packing writes the new pack beside the old one), and its wheels (twice, since a wheel is
# written beside the one that it replaces).
ROOM = 390_000_000 + 2 * 60_000_000 + 2 * 335_000_000
_SECONDS = 15.0  # that any program may take to say its version


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        name: of what was looked for.
        status: ``ok``; ``missing`` where the tool can't work without it; ``optional`` where it
            is not there, or not fit, and only ``purpose`` needs it.
        what: what was found.
        fix: how it can be had, or "".
        purpose: what it is for.
    """

    name: str
    status: Status
    what: str
    fix: str = ""
    purpose: str = ""


def examine(cache: Path, *, online: bool = False) -> list[Finding]:
    """Run all checks.

    Args:
        cache: the cache folder, which may not exist yet.
        online: also ask every configured package index and find-links page whether it answers.
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("python", _python),
        ("git", _git),
        ("pip", _pip),
        ("cache", lambda: _cache(cache)),
        ("room", lambda: _room(cache)),
    ]
    if online:
        checks.append(("network", _network))
    found = [finding for name, check in checks for finding in _safely(name, check, "missing")]
    for name, check in _OPTIONAL:
        found += _safely(name, check, "optional")
    return found


def is_fit(findings: list[Finding]) -> bool:
    """Whether nothing is missing."""
    return all(finding.status != "missing" for finding in findings)


def _safely(name: str, check: Callable[[], Iterator[Finding]], status: Status) -> list[Finding]:
    found: list[Finding] = []
    try:
        found.extend(check())
    except OverlayError as error:
        found.append(Finding(name=name, status=status, what=error.what, fix=error.fix))
    except Exception as error:  # noqa: BLE001,RUF100 - one odd machine must not hide the other answers
        what = f"can't be examined: {type(error).__name__}: {error}"
        found.append(Finding(name=name, status=status, what=what, fix="report this as a defect"))
    return found


def _python() -> Iterator[Finding]:
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= MIN_PYTHON:
        yield Finding(name="python", status="ok", what=have)
        return
    need = ".".join(map(str, MIN_PYTHON))
    yield Finding(
        name="python", status="missing", what=f"{have} runs this tool; {need} is needed",
        fix=f"install Python {need} or newer and run the tool with it",
    )  # fmt: skip


def _git() -> Iterator[Finding]:
    version = git_version()
    have, need = (".".join(map(str, numbers)) for numbers in (version, MIN_GIT))
    if version >= MIN_GIT:
        yield Finding(name="git", status="ok", what=have)
        return
    yield Finding(
        name="git", status="missing", what=f"{have} is too old: {need} or newer is needed",
        fix="install a newer git and put it first on the PATH",
    )  # fmt: skip


def _pip() -> Iterator[Finding]:
    config = read_pip_config()
    links = len(config.find_links)
    indexes = 0 if config.no_index else max(len(config.index_urls), 1)
    extra = 0 if config.no_index else len(config.extra_index_urls)
    what = f"{indexes + extra} package index(es), {links} find-links"
    if indexes + extra + links == 0:
        yield Finding(
            name="pip", status="missing", what="configured with no-index, and without find-links",
            fix="name a folder that holds the releases in PIP_FIND_LINKS, or allow an index",
        )  # fmt: skip
        return
    yield Finding(name="pip", status="ok", what=what)


def _network() -> Iterator[Finding]:
    from overlay.sources.download import Trouble
    from overlay.sources.web import Web, default_index

    config = read_pip_config()
    places = config.places(default_index())
    with Web(config, places, offline=False) as web:
        for place in places:
            name = f"{place.kind} {redacted(place.url)}"
            try:
                web.links(place, PROJECTS["vllm"], "")
            except Trouble as trouble:
                yield Finding(
                    name=name, status="missing", what=str(trouble), fix=_reach(place),
                )  # fmt: skip
            else:
                yield Finding(name=name, status="ok", what="answers")


def _reach(place: Place) -> str:
    if place.is_local:
        return "create it, or take it out of pip's configuration"
    return "check proxy and certificates in pip's configuration, or work with --offline"


def _cache(cache: Path) -> Iterator[Finding]:
    """Do for real what every verb does in the cache: make folders, replace files, lock."""
    made = _make_folders(cache)
    try:
        with tempfile.TemporaryDirectory(dir=cache, prefix=".doctor-") as scratch:
            problem = _probe(Path(scratch))
    except OSError as error:
        problem = f"can't be written to: {error.strerror}"
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # another process uses it by now
                folder.rmdir()
    if problem:
        yield Finding(
            name="cache", status="missing", what=f"{cache} {problem}",
            fix=f"set {CACHE_VARIABLE} to a folder on a local disk that you may write to",
        )  # fmt: skip
        return
    yield Finding(name="cache", status="ok", what=f"{cache} can be written to and locked")


def _make_folders(cache: Path) -> list[Path]:
    """Create what is missing of a folder; the created ones, outermost first."""
    missing = [path for path in (cache, *cache.parents) if not path.exists()]
    made = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
    except OSError:
        pass  # the probe says it
    return made


def _probe(folder: Path) -> str:
    """Why a folder won't do, or ""."""
    old, new = folder / "old", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    with new.open("rb") as file:
        os.fsync(file.fileno())
    new.replace(old)
    if old.read_bytes() != b"new" or new.exists():
        return "does not replace a file by renaming"
    lock = folder / "lock"
    try:
        with FileLock(lock, timeout=0):
            try:
                with FileLock(lock, timeout=0):
                    return "does not lock files: two processes would write at once"
            except Timeout:
                return ""
    except (Timeout, NotImplementedError):
        return "does not support file locks"


def _room(cache: Path) -> Iterator[Finding]:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(there).free
    have, need = f"{free / 1e9:.1f} GB free", f"one line takes about {ROOM / 1e9:.1f} GB"
    if free >= ROOM:
        yield Finding(name="room", status="ok", what=f"{have} at {there}; {need}")
        return
    yield Finding(
        name="room", status="missing", what=f"{have} at {there}; {need}",
        fix=f"free some room, run 'vllm-overlay cache gc', or set {CACHE_VARIABLE} to a folder "
        "on another disk",
    )  # fmt: skip


# --- programs that some verbs and sessions use -----------------------------------------------


def _answer(*argv: str) -> str:
    """What a program prints. Raises ``MachineError`` where it isn't there or fails."""
    program = shutil.which(argv[0])
    if program is None:
        raise MachineError(f"{argv[0]} is not on the PATH")
    try:
        done = subprocess.run(
            (program, *argv[1:]), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(f"{argv[0]} does not run: {type(error).__name__}") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise MachineError(f"{' '.join(argv)} fails: {' '.join(last)}")
    return done.stdout.strip()


def _first_line(text: str) -> str:
    return text.splitlines()[0].strip() if text else "present"


def _tool(
    name: str, argvs: tuple[tuple[str, ...], ...], purpose: str, fix: str
) -> Callable[[], Iterator[Finding]]:
    """A check for a program that only has to run; all of ``argvs`` must answer."""

    def check() -> Iterator[Finding]:
        try:
            what = ", ".join(_first_line(_answer(*argv)) for argv in argvs)
        except MachineError as error:
            yield Finding(name=name, status="optional", what=error.what, fix=fix, purpose=purpose)
        else:
            yield Finding(name=name, status="ok", what=what, purpose=purpose)

    return check


def _nvcc() -> Iterator[Finding]:
    purpose = "compile builds and kernel checks outside an image"
    need = ".".join(map(str, NVCC))
    try:
        found = re.search(r"release (\d+)\.(\d+)", _answer("nvcc", "--version"))
        what = f"CUDA {found[1]}.{found[2]}" if found else "does not say its version"
        fits = found is not None and (int(found[1]), int(found[2])) == NVCC
    except MachineError as error:
        what, fits = error.what, False
    if fits:
        yield Finding(name="nvcc", status="ok", what=what, purpose=purpose)
        return
    yield Finding(
        name="nvcc", status="optional", what=f"{what}; {need} is wanted", purpose=purpose,
        fix=f"pip install 'cuda-toolkit[nvcc,cccl]=={need}.*'",
    )  # fmt: skip


def _gpu() -> Iterator[Finding]:
    purpose = "running the SM120 kernels (tests of the kind gpu)"
    fix = "run these tests on a machine with an SM120 GPU; all else needs none"
    query = ("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    try:
        gpus = [line.strip() for line in _answer(*query).splitlines() if line.strip()]
    except MachineError as error:
        yield Finding(name="gpu", status="optional", what=error.what, fix=fix, purpose=purpose)
        return
    fitting = [gpu for gpu in gpus if gpu.rpartition(",")[2].strip().startswith("12.")]
    what = "; ".join(fitting or gpus) or "no GPU"
    if fitting:
        yield Finding(name="gpu", status="ok", what=what, purpose=purpose)
        return
    yield Finding(
        name="gpu", status="optional", what=f"{what}: none is SM120", fix=fix, purpose=purpose
    )


_OPTIONAL: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("uv", _tool("uv", (("uv", "--version"),), "quick test environments; pip serves too",
                 "pip install uv")),
    ("quilt", _tool("quilt", (("quilt", "--version"),), "the benchmark of apply against quilt",
                    "install quilt from the distribution")),
    ("docker", _tool("docker",
                     (("docker", "version", "--format", "Docker {{.Server.Version}}"),
                      ("docker", "buildx", "version")),
                     "building images",
                     "install Docker with buildx, start it, and let this user reach it")),
    ("nvcc", _nvcc),
    ("gpu", _gpu),
)  # fmt: skip
