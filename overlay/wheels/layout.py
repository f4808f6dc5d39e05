"""Where a path of an upstream's tree ends up in that upstream's wheel.

Read out of the two builds, so that an overlay wheel holds what the upstream's own build of
the patched tree would hold, and refuses where only a real build can tell:

- vLLM: ``setup.py``, ``CMakeLists.txt``, ``cmake/`` and ``MANIFEST.in``. setuptools-scm adds
  every file that git tracks below ``vllm/`` to the package, whatever its name: all 2844 such
  files of 0.28.0 are in its wheel. Nothing below ``vllm/`` is a source of the compiled
  modules.
- FlashInfer: ``pyproject.toml`` (``package-dir`` and ``package-data``) and
  ``build_backend.py``. Kernel sources are shipped and compiled on demand; nothing is compiled
  by the build of the wheel.

``vllm/envs.py`` is run by vLLM's ``setup.py`` and ships all the same: what the build reads there
(target device, job counts, cache switches) has no effect on a build that compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from overlay.lines.line import Upstream


@dataclass(frozen=True, slots=True)
class Shipped:
    """The path is in the wheel, under ``name``."""

    name: str


@dataclass(frozen=True, slots=True)
class NotShipped:
    """The wheel doesn't depend on the path in any way."""


@dataclass(frozen=True, slots=True)
class BuildInput:
    """The path can change what a build makes: no overlay can carry it."""

    reason: str


Ship = Shipped | NotShipped | BuildInput

_VLLM_VENDORED = {
    # folders that cmake fills from other repositories, at build time
    "vllm/third_party/deep_gemm/": "cmake/external_projects/deepgemm.cmake",
    "vllm/third_party/flashmla/flash_mla_interface.py": "cmake/external_projects/flashmla.cmake",
    "vllm/third_party/fmha_sm100/": "cmake/external_projects/fmha_sm100.cmake",
    "vllm/third_party/tml_fa4/": "cmake/external_projects/tml_fa4.cmake",
    "vllm/third_party/triton_kernels/": "cmake/external_projects/triton_kernels.cmake",
    "vllm/vllm_flash_attn/": "cmake/external_projects/vllm_flash_attn.cmake",
}
_VLLM_VENDORED_BUT_TRACKED = {
    # setup.py: "source-controlled in vllm and should not be overwritten"
    "vllm/vllm_flash_attn/.gitkeep",
    "vllm/vllm_flash_attn/__init__.py",
    "vllm/vllm_flash_attn/flash_attn_interface.py",
}
_VLLM_INPUTS = {
    # folders
    "csrc": "source of the compiled modules",
    "cmake": "read by CMakeLists.txt",
    "rust": "source of vllm-rs and the _rust modules",
    "requirements": "setup.py makes the wheel's requirements of it",
    # files
    "CMakeLists.txt": "decides what is compiled, and how",
    "CMakePresets.json": "decides how it is compiled",
    "MANIFEST.in": "decides which files the package takes",
    "build_rust.sh": "builds the Rust artifacts",
    "pyproject.toml": "build requirements, metadata and package discovery",
    "rust-toolchain.toml": "decides which Rust compiler is used",
    "setup.cfg": "settings of setuptools",
    "setup.py": "is the build",
    "use_existing_torch.py": "rewrites build requirements before a build",
    ".gitattributes": "setuptools-scm leaves out what it marks export-ignore",
    "LICENSE": "is copied into the wheel's metadata folder",
    "README.md": "is the description in the wheel's METADATA",
}
_VLLM_IGNORED = {"benchmarks", "docker", "docs", "examples", "scripts", "tests"}

_FLASHINFER_MOVED = {
    # pyproject.toml, tool.setuptools.package-dir
    "csrc/": "flashinfer/data/csrc/",
    "include/": "flashinfer/data/include/",
    "3rdparty/cutlass/": "flashinfer/data/cutlass/",
    "3rdparty/spdlog/": "flashinfer/data/spdlog/",
    "3rdparty/cccl/": "flashinfer/data/cccl/",
}
_FLASHINFER_DATA_TREES = (
    # pyproject.toml, tool.setuptools.package-data: the entries that end in **
    "csrc/",
    "include/",
    "3rdparty/cutlass/include/",
    "3rdparty/cutlass/tools/util/include/",
    "3rdparty/spdlog/include/",
    "3rdparty/cccl/cub/cub/",
    "3rdparty/cccl/libcudacxx/include/",
    "3rdparty/cccl/thrust/thrust/",
)
_BLK64 = "flashinfer/cute_dsl/sparse/sm100_blk64"
_PUSH = "flashinfer/moe_ep/kernel_src/sm90/push_style_megamoe"
_FLASHINFER_DATA = {
    # the same table: folder to patterns, not recursive
    _BLK64: ("*.cpp", "*.cu", "*.h", "*.hpp"),
    f"{_BLK64}/instantiations": ("*.cu",),
    _PUSH: ("*.md",),
    f"{_PUSH}/src/a2a": ("*.cu", "*.cuh"),
    f"{_PUSH}/src/fp8_gemm": ("*.cu", "*.cuh"),
}
_FLASHINFER_INPUTS = {
    "LICENSE": "is copied into the wheel's metadata folder",
    "README.md": "is the description in the wheel's METADATA",
    "licenses": "is copied into the wheel's metadata folder",
    ".gitmodules": "decides which vendored sources a build gets",
    "build_backend.py": "is the build",
    "build_utils.py": "is imported by the build",
    "pyproject.toml": "build requirements, metadata and package discovery",
    "requirements.txt": "the wheel's requirements are made of it",
    "setup.cfg": "settings of setuptools",
    "setup.py": "would be the build",
    "version.txt": "the version is made of it",
    "MANIFEST.in": "decides which files the package takes",
}
_FLASHINFER_IGNORED = {
    *("benchmarks", "ci", "docker", "docs", "examples", "profiler", "scripts", "tests"),
    # distributions of their own, built from folders of their own
    *("flashinfer-cubin", "flashinfer-jit-cache"),
}

_BINARIES = ("*.so", "*.so.*", "*.a", "*.o", "*.pyd", "*.dll", "*.dylib", "*.cubin", "*.fatbin")


def wheel_path(upstream: Upstream, path: str, wheel_names: Container[str]) -> Ship:
    """Say what an overlay may do with a patched path.

    Args:
        upstream: whose tree it is.
        path: path in the tree, ``/``-separated, relative.
        wheel_names: names of the members of the upstream's wheel.
    """
    return (_vllm if upstream == "vllm" else _flashinfer)(path, wheel_names)


def _vllm(path: str, wheel_names: Container[str]) -> Ship:
    top, _, rest = path.partition("/")
    if top == "vllm" and rest:
        return _vllm_package(path, wheel_names)
    if top in _VLLM_INPUTS:
        return BuildInput(_VLLM_INPUTS[top])
    if top == "tools":
        # the build runs tools/build_rust.py and tools/build_deepgemm_C.py; release builds run
        # the install_ and setup_ scripts beside them; the folders below are a developer's
        return NotShipped() if "/" in rest else BuildInput("a tool that builds run")
    if top in _VLLM_IGNORED:
        return NotShipped()
    if not rest and _is_text_for_people(top):
        return NotShipped()
    if top.startswith("."):
        return NotShipped()
    return BuildInput("not a path that vLLM's build is known to ignore")


def _vllm_package(path: str, wheel_names: Container[str]) -> Ship:
    if path == "vllm/_version.py":
        return BuildInput("the build writes it: version and commit")
    if _is_binary(path) or path == "vllm/vllm-rs":
        return BuildInput("made by a compiler")
    if path.endswith(".rs"):
        return BuildInput("Rust source")
    if path not in _VLLM_VENDORED_BUT_TRACKED:
        for vendored, by in _VLLM_VENDORED.items():
            if path.startswith(vendored):
                return BuildInput(f"filled by {by} from another repository")
    return Shipped(path)


def _flashinfer(path: str, wheel_names: Container[str]) -> Ship:
    top, _, rest = path.partition("/")
    if path == "flashinfer/_build_meta.py":
        return BuildInput("the build writes it: version and commit")
    if path.startswith("flashinfer/data/"):
        return BuildInput("the build empties and refills this folder; patch csrc/ or include/")
    if _is_binary(path):
        return BuildInput("made by a compiler")
    name = _flashinfer_name(path)
    if name is not None:
        return Shipped(name) if _flashinfer_takes(path) or name in wheel_names else NotShipped()
    if top in _FLASHINFER_INPUTS:
        return BuildInput(_FLASHINFER_INPUTS[top])
    if top in _FLASHINFER_IGNORED or (not rest and _is_text_for_people(top)):
        return NotShipped()
    if top.startswith("."):
        return NotShipped()
    return BuildInput("not a path that FlashInfer's build is known to ignore")


def _flashinfer_name(path: str) -> str | None:
    for folder, name in _FLASHINFER_MOVED.items():
        if path.startswith(folder):
            return name + path.removeprefix(folder)
    return path if path.startswith("flashinfer/") else None


def _flashinfer_takes(path: str) -> bool:
    """Whether ``package-data`` or package discovery picks up a file the wheel lacks as yet."""
    pure = PurePosixPath(path)
    if any(part.startswith(".") for part in pure.parts):
        return False  # setuptools' ** leaves hidden files out
    if path.startswith(_FLASHINFER_DATA_TREES):
        return True
    if pure.suffix in (".py", ".pyi") or pure.name == "py.typed":
        # setuptools takes these unasked, from every folder: each is a (namespace) package, save
        # those whose name has a dot
        return not any("." in part for part in pure.parts[:-1])
    patterns = _FLASHINFER_DATA.get(str(pure.parent), ())
    return any(fnmatchcase(pure.name, pattern) for pattern in patterns)


def _is_binary(path: str) -> bool:
    return any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in _BINARIES)


def _is_text_for_people(name: str) -> bool:
    return name.endswith((".md", ".rst")) or name in {
        "CODEOWNERS", "DCO", "NOTICE", "codecov.yml", "mkdocs.yaml",
    }  # fmt: skip
