"""The target ``compile``: cmake configures the patched tree, and one real source compiles.

With everything that an image of the line has: torch as it is pinned, nvcc 13.3.1, sccache. What
vLLM's cmake would fetch from elsewhere is NOT here: cutlass is the part that FlashInfer ships, the
others are empty STAND-INS, so no more than that source can be built. Gigabytes and many minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest

from overlay.cli import main
from overlay.images.requirements import read_requirements
from overlay.lines.line import read_line
from overlay.trees.store import cache_folder
from tests.images.test_build import LINE, ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.images.engine import Engine

pytestmark = pytest.mark.real
OBJECT = "CMakeFiles/_C_stable_libtorch.dir/csrc/libtorch_stable/activation_kernels.cu.o"
# Empty, each with the files that cmake wants to see there
STAND_INS = {
    "vllm_flash_attn": (),
    "flash_mla": ("flash_mla/flash_mla_interface.py",),
    "qutlass": (
        "qutlass/third_party/cutlass/include/cutlass/cutlass.h",
        *(
            f"qutlass/csrc/{name}"
            for name in (
                "bindings.cpp", "gemm.cu", "gemm_ada.cu", "fused_quantize_mx.cu",
                "fused_quantize_nv.cu", "fused_quantize_mx_sm100.cu", "fused_quantize_nv_sm100.cu",
            )
        ),
    ),
    "deepgemm": (),
    "flash_kda": ("csrc/flash_kda.cpp", "csrc/smxx/fwd_launch.cu"),
    "fmha_sm100": (),
    "tml_fa4": (),
    "triton_kernels": (),
}  # fmt: skip
# What the line's own base image has, and a minimal Debian lacks
PACKAGES = "python3,python3-venv,python3-dev,g++,patch,git,ca-certificates"


@pytest.fixture(scope="module")
def compilers(running: Engine) -> str:
    """A stand-in for the line's base image that has a host compiler, by digest."""
    kept = cache_folder() / "engine" / "base-compilers.tar"
    if not kept.exists():
        made = kept.with_name("base-compilers.part.tar")
        argv = ("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}")
        subprocess.run((*argv, "bookworm", str(made)), check=True, stdin=subprocess.DEVNULL)
        made.rename(kept)
    name = f"{running.registry}/library/python"
    running.docker("import", str(kept), f"{name}:compilers")
    running.docker("push", "--quiet", f"{name}:compilers")
    form = "{{index .RepoDigests 0}}"
    found = running.docker("image", "inspect", f"{name}:compilers", "--format", form)
    return f"docker.io/library/python@{found.strip().rpartition('@')[2]}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Patched vLLM, and what its cmake asks for."""
    folder = tmp_path / "compile"
    (folder / "deps").mkdir(parents=True)
    assert (
        main(["--patches", str(ROOT / "patches"), "checkout", LINE, "vllm", str(folder / "vllm")])
        == 0
    )
    sdist = read_line(ROOT / "patches", LINE).settings.flashinfer.sdist
    with tarfile.open(cache_folder() / "downloads" / sdist.sha256 / sdist.file) as archive:
        for member in archive:
            inside = member.name.partition("/3rdparty/")[2]
            if inside.startswith("cutlass/") and member.isreg():
                member.name = inside
                archive.extract(member, folder / "deps", filter="data")
    for name, files in STAND_INS.items():
        for file in ("STAND-IN", *files):
            path = folder / "deps" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return folder


def bake(command: list[str], out: Path, running: Engine, *, jobs: int) -> str:
    """Run a bake command for that one object; what it said. ``jobs`` lets the step run again."""
    more = (
        "--progress=plain", "--provenance=false",
        f"--set=compile.args.TARGETS={OBJECT}", "--set=compile.args.ARCHITECTURES=12.0a",
        f"--set=compile.args.MAX_JOBS={jobs}", f"--set=compile.output=type=local,dest={out}",
    )  # fmt: skip
    done = subprocess.run(
        (*command[:-1], *more, command[-1]),
        env=running.environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def test_one_real_source_is_compiled(
    tree: Path, compilers: str, running: Engine, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    capfd.readouterr()
    argv = ["--patches", str(ROOT / "patches"), "image", LINE, "--print", "--json", "--quiet"]
    out = ("--base", compilers, "--compile", str(tree), "--out", str(tmp_path / LINE))
    assert main([*argv, *out]) == 0
    command = json.loads(capfd.readouterr().out)["command"]
    said = bake(command, tmp_path / "made", running, jobs=1)
    nvcc = read_requirements(ROOT / "images" / "cuda-13.3.lock").wheels["nvidia-cuda-nvcc"].version
    assert f"The CUDA compiler identification is NVIDIA {nvcc}" in said
    assert "CUDA supported target architectures: 12.0" in said
    assert re.search(r"Cache misses \(CUDA\) +1\n", said)
    made = (tmp_path / "made" / OBJECT).read_bytes()
    assert made.startswith(b"\x7fELF")
    again = bake(command, tmp_path / "again", running, jobs=2)
    assert re.search(r"Cache hits \(CUDA\) +1\n", again)
    assert (tmp_path / "again" / OBJECT).read_bytes() == made
