"""CUDA's compiler out of pinned wheels, put under one folder as a toolkit has it.

The wheels of ``cuda-toolkit`` share one folder, without ``lib64``, without the names that a linker
looks for, and without a driver to link against. What is missing is made beside links to the rest.
Which versions belong together is the metapackage's business: its own requirements are checked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from overlay.errors import KernelError

PROJECT = "cuda-toolkit"
EXTRAS = ("nvcc", "cccl", "cuobjdump", "nvdisasm")
# nvcc starts these; a cached object must not outlive one of them
PASSES = ("bin/ptxas", "bin/cudafe++", "bin/fatbinary", "nvvm/bin/cicc")
_GROUP = "install the project's dependency group 'kernels', or run 'nox -s kernels -- LINE'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What compiles, by path, and what it says it is.

    Attributes:
        cuda: folder of CUDA's wheels.
        tvm_ffi: folder of apache-tvm-ffi's headers.
        ninja, ccache: programs; no ``ccache`` where it is done without.
        versions: of all of it, by name.
    """

    cuda: Path
    tvm_ffi: Path
    ninja: Path
    ccache: Path | None
    versions: dict[str, str]

    def prefix(self, folder: Path) -> None:
        """Make ``folder`` a toolkit."""
        libraries = folder / "lib64"
        (libraries / "stubs").mkdir(parents=True)
        for name in ("bin", "include", "nvvm"):
            (folder / name).symlink_to(self.cuda / name)
        for library in sorted((self.cuda / "lib").iterdir()):
            (libraries / library.name).symlink_to(library)
            stem, found, _ = library.name.partition(".so.")
            if found:
                (libraries / f"{stem}.so").symlink_to(library)
        _make_stub(libraries / "stubs" / "libcuda.so")


def find_toolchain(cuda: str, *, cached: bool) -> Toolchain:
    """Find all that a compile needs, beside the running interpreter or on the PATH.

    Args:
        cuda: version of the line's toolkit, such as 13.3.1.
        cached: whether objects are to be kept, which needs ccache.

    Raises ``KernelError`` naming what is missing or of another version.
    """
    versions = _packages(cuda)
    folder = _cuda_folder()
    versions["nvcc"] = _nvcc_version(folder / "bin" / "nvcc", cuda)
    versions["host compiler"] = _first_line("gcc", "--version")  # the one that nvcc starts
    ninja = _program("ninja")
    versions["ninja"] = _first_line(str(ninja), "--version")
    ccache = _ccache() if cached else None
    if ccache:
        versions["ccache"] = _first_line(str(ccache), "--version").split()[-1]
    return Toolchain(cuda=folder, tvm_ffi=_tvm_ffi(), ninja=ninja, ccache=ccache, versions=versions)


def _packages(cuda: str) -> dict[str, str]:
    """Versions of the wheels, the metapackage first; they must be what it asks for."""
    found = {PROJECT: _installed(PROJECT)}
    if found[PROJECT] != cuda:
        raise KernelError(
            f"{PROJECT} {found[PROJECT]} is installed",
            why=f"the line is built with CUDA {cuda}",
            fix=f"install '{PROJECT}[{','.join(EXTRAS)}]=={cuda}'",
        )
    for text in metadata.requires(PROJECT) or ():
        wanted = Requirement(text)
        if wanted.marker is None or not any(wanted.marker.evaluate({"extra": e}) for e in EXTRAS):
            continue
        found[wanted.name] = _installed(wanted.name)
        if not wanted.specifier.contains(found[wanted.name]):
            raise KernelError(
                f"{wanted.name} {found[wanted.name]} is installed",
                why=f"{PROJECT} {cuda} goes with {wanted.name}{wanted.specifier}",
                fix=f"install '{PROJECT}[{','.join(EXTRAS)}]=={cuda}', which pins it",
            )
    return found | {"apache-tvm-ffi": _installed("apache-tvm-ffi")}


def _installed(project: str) -> str:
    try:
        return metadata.version(project)
    except metadata.PackageNotFoundError:
        raise KernelError(
            f"{project} isn't installed for this Python",
            why="kernels are compiled by CUDA's compiler from its wheels; no GPU is needed",
            fix=_GROUP,
        ) from None


def _cuda_folder() -> Path:
    for file in metadata.files("nvidia-cuda-nvcc") or ():
        if file.name == "nvcc" and file.parent.name == "bin":
            return Path(str(file.locate())).parent.parent
    raise KernelError("nvidia-cuda-nvcc is installed without its nvcc", fix="install it anew")


def _tvm_ffi() -> Path:
    for file in metadata.files("apache-tvm-ffi") or ():
        if file.as_posix().endswith("/include/tvm/ffi/c_api.h"):
            return Path(str(file.locate())).parent.parent.parent
    raise KernelError("apache-tvm-ffi is installed without its headers", fix="install it anew")


def _nvcc_version(nvcc: Path, cuda: str) -> str:
    text = _said(str(nvcc), "--version")
    found = re.search(r"release ([0-9.]+), V([0-9.]+)", text)
    if found is None or not f"{cuda}.".startswith(f"{found[1]}."):
        raise KernelError(
            f"{nvcc} is of CUDA {found[1] if found else 'an unknown version'}",
            why=f"the line is built with CUDA {cuda}; it says: {text.strip()[-200:]}",
            fix=f"install '{PROJECT}[{','.join(EXTRAS)}]=={cuda}' into a fresh environment",
        )
    return found[2]


def _ccache() -> Path:
    try:
        return _program("ccache")
    except KernelError:
        raise KernelError(
            "ccache isn't installed",
            why="without it each run compiles every file, one to eight minutes of CPU time a "
            "line, and as much again for the bare pin",
            fix=f"{_GROUP}; or go on without it: --no-cache",
        ) from None


def _program(name: str) -> Path:
    """A program beside the interpreter, as wheels install it, or on the PATH."""
    beside = Path(sys.executable).parent
    found = shutil.which(name, path=str(beside)) or shutil.which(name)
    if found is None:
        raise KernelError(f"{name} isn't installed", fix=_GROUP)
    return Path(found).absolute()


def _make_stub(path: Path) -> None:
    """An empty driver library to link against; the real one comes with the driver."""
    command = ("-shared", "-x", "c++", "/dev/null", "-o", str(path), "-Wl,-soname,libcuda.so.1")
    _said("c++", *command)


def _first_line(*argv: str) -> str:
    return _said(*argv).strip().partition("\n")[0]


def _said(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(
            f"{argv[0]} doesn't run",
            why=(getattr(error, "stderr", None) or str(error)).strip()[-1000:],
            fix="install g++ (12 to 15)" if argv[0] in ("gcc", "c++") else _GROUP,
        ) from None
    return done.stdout
