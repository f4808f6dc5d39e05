"""A line's checks as one archive, for a machine that has torch and a GPU but no network.

Holds the Python side of both wheels, the tests, the packages that such a machine lacks, and a
``run.sh``. Compiled modules are left out, and where a CUDA device makes vLLM import one there is a
stand-in, named as such. The same line and pins give the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlay.checks.receipt import is_by_product
from overlay.errors import CheckError, MachineError, UnavailableError, WheelError
from overlay.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlay.lines.line import Line
    from overlay.report import Reporter

LIMIT = 60_000_000
PINS = "tests/patched/offline"
SITE, WHEELS = "site", "wheels"

# What of a wheel travels. Of FlashInfer also the sources of the SM120 kernels, which it compiles
# where it runs.
_SUFFIXES = (".py", ".json")
_KERNEL_SOURCES = (
    "flashinfer/data/csrc/sparse_mla_sm120",
    "flashinfer/data/include/",
    "flashinfer/data/cutlass/include/",
    "flashinfer/data/spdlog/include/",
    "flashinfer/data/cccl/cub/",
    "flashinfer/data/cccl/libcudacxx/",
    "flashinfer/data/cccl/thrust/",
)
_KERNEL_HEADERS = "flashinfer/data/csrc/"
_NEVER = ("flashinfer/data/cutlass/python/", "flashinfer/data/cutlass/examples/")

# Modules that vLLM imports as soon as there is a CUDA device
_COMPILED = (
    "vllm/_C_stable_libtorch",
    "vllm/_C",
    "vllm/_moe_C",
    "vllm/_moe_C_stable_libtorch",
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/vllm_flash_attn/_vllm_fa3_C",
)
_STAND_IN = '"""A stand-in of vllm-overlay for a compiled module of vLLM. It has no operators."""\n'
# Asked while modules are imported; the answer is no
_QUESTIONS = """
import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")
for _name in (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
):
    _LIBRARY.define(f"{_name}(int cuda_device_capability) -> bool")
    _LIBRARY.impl(_name, lambda cuda_device_capability: False, "CompositeExplicitAutograd")
"""

# The newest C library that a wheel may ask for; pip takes each name literally
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(35, 16, -1)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An archive that was written; ``wheels`` are the packages in it."""

    path: Path
    size: int
    sha256: str
    files: int
    wheels: tuple[str, ...]


def make_bundle(
    line: Line,
    wheels: Sequence[Path],
    head: Mapping[str, Any],
    out: Path,
    *,
    root: Path,
    python: str,
    report: Reporter,
) -> Bundle:
    """Write the archive.

    Args:
        line: whose checks these are.
        wheels: the line's two wheels.
        head: of the receipt that a run writes (``overlay.checks.sessions.receipt_head``).
        out: file to write.
        root: the checkout.
        python: version of the machine's Python, such as 3.12.
        report: hears of progress.

    Raises:
        CheckError: the line has no pins for it, or the archive is too large.
        UnavailableError: pip can't get the packages.
    """
    members: dict[str, bytes] = {}
    for wheel in wheels:
        members |= dict(_of_wheel(wheel))
    members |= _stand_ins(members)
    for path in sorted((root / "tests" / "patched").rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and not any(is_by_product(part) for part in inside.parts):
            members[inside.as_posix()] = path.read_bytes()
    package = resources.files("overlay")
    for name in ("__init__.py", "checks/__init__.py", "checks/receipt_plugin.py"):
        members[f"overlay/{name}"] = package.joinpath(name).read_bytes()
    for name in ("run.sh", "unpack.py"):
        members[name] = package.joinpath("checks", "offline", name).read_bytes()
    members["head.json"] = json.dumps(head, indent=2).encode() + b"\n"
    with report.progress(f"packages for Python {python}"):
        packages = _download(root / PINS / f"{line.name}.txt", line.name, python)
    members |= {f"{WHEELS}/{name}": data for name, data in packages.items()}
    members["CONTENTS.txt"] = _contents(members).encode()
    with report.progress(f"write {out.name}"):
        data = _archive(members)
    if len(data) > LIMIT:
        raise CheckError(
            f"the bundle of {line.name} would have {len(data) / 1e6:.1f} MB",
            why=f"no more than {LIMIT / 1e6:.0f} MB travel",
            fix=f"take packages out of {PINS}/{line.name}.txt",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, data)
    return Bundle(
        path=out,
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        files=len(members),
        wheels=tuple(sorted(packages)),
    )


def _of_wheel(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and _travels(name):
                yield f"{SITE}/{name}", archive.read(name)


def _travels(name: str) -> bool:
    if name.startswith(_NEVER):
        return False
    if ".dist-info/" in name or name.startswith(_KERNEL_SOURCES):
        return True
    header = name.startswith(_KERNEL_HEADERS) and name.endswith((".h", ".cuh"))
    return name.endswith(_SUFFIXES) or (header and name.count("/") == 3)


def _stand_ins(members: Mapping[str, bytes]) -> dict[str, bytes]:
    made = {}
    for module in _COMPILED:
        name = f"{SITE}/{module}.py"
        if name in members:
            raise WheelError(f"vLLM's wheel has {module}.py: no stand-in may hide it")
        asked = _QUESTIONS if module.endswith("/_C_stable_libtorch") else ""
        made[name] = (_STAND_IN + asked).encode()
    made["STAND-INS.txt"] = (
        "Not vLLM's: empty modules in place of compiled ones, which a CUDA device makes it import\n"
        "and which are too large to travel. They have no operators; asked whether CUTLASS kernels\n"
        "are supported, the first answers no.\n\n"
        + "".join(f"{SITE}/{module}.py\n" for module in _COMPILED)
    ).encode()
    return made


def _download(pins: Path, line: str, python: str) -> dict[str, bytes]:
    """Wheels by file name, got by pip as the machine's configuration says."""
    if not pins.is_file():
        raise CheckError(
            f"{PINS}/{line}.txt is missing",
            fix="list there what a machine with torch and transformers lacks, NAME==VERSION a line",
        )
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-bundle-") as folder:
        argv = (
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--only-binary=:all:", "--implementation=cp", f"--python-version={python}",
            *(f"--platform={name}" for name in _PLATFORMS),
            "--dest", folder, "--requirement", str(pins),
        )  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(
                f"pip can't get the packages of {PINS}/{line}.txt for Python {python}",
                why=done.stderr.strip()[-2000:],
                fix="see what pip says; a network or a find-links folder is needed here",
            )
        found = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    if not found:
        raise MachineError(f"pip got nothing for {PINS}/{line}.txt")
    return found


def _contents(members: Mapping[str, bytes]) -> str:
    """Names and hashes of all members, as ``sha256sum -c`` reads them."""
    rows = (f"{hashlib.sha256(data).hexdigest()}  {n}\n" for n, data in sorted(members.items()))
    return "".join(rows)


def _archive(members: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    # mtime=0 and no name, or the same content would give other bytes tomorrow
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for name, data in sorted(members.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(info, io.BytesIO(data))
    return packed.getvalue()
