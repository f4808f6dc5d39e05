from __future__ import annotations

import pytest

from overlay.wheels.layout import BuildInput, NotShipped, Shipped, wheel_path


@pytest.mark.parametrize(
    "path",
    [
        "vllm/envs.py",
        "vllm/new/module.py",
        "vllm/new/data.json",
        "vllm/new/README.md",
        "vllm/.hidden",
        "vllm/distributed/kv_transfer/kv_connector/v1/hf3fs/utils/hf3fs_utils.cpp",
        "vllm/vllm_flash_attn/__init__.py",
        "vllm/vllm_flash_attn/flash_attn_interface.py",
        "vllm/third_party/pynvml.py",
    ],
)
def test_vllm_ships_all_that_git_tracks_in_the_package(path: str) -> None:
    assert wheel_path("vllm", path, ()) == Shipped(path)


@pytest.mark.parametrize(
    "path",
    [
        "csrc/attention/x.cu",
        "cmake/utils.cmake",
        "rust/src/lib.rs",
        "requirements/cuda.txt",
        "CMakeLists.txt",
        "MANIFEST.in",
        "pyproject.toml",
        "setup.py",
        "setup.cfg",
        "rust-toolchain.toml",
        "use_existing_torch.py",
        "tools/build_rust.py",
        "tools/install_deepgemm.sh",
        ".gitattributes",
        "README.md",
        "LICENSE",
        "vllm/_version.py",
        "vllm/new.so",
        "vllm/vllm-rs",
        "vllm/new.rs",
        "vllm/third_party/deep_gemm/x.py",
        "vllm/third_party/flashmla/flash_mla_interface.py",
        "vllm/vllm_flash_attn/cute/x.py",
        "vllm_other/__init__.py",
        "new_script.py",
        "vllm",
    ],
)
def test_vllm_build_inputs(path: str) -> None:
    ship = wheel_path("vllm", path, (path,))
    assert isinstance(ship, BuildInput)
    assert ship.reason


@pytest.mark.parametrize(
    "path",
    [
        "tests/a.py",
        "docs/a.md",
        "examples/a.py",
        "benchmarks/a.py",
        "docker/a",
        "scripts/a.py",
        "tools/pre_commit/a.py",
        ".github/a.yml",
        ".gitignore",
        "AGENTS.md",
        "mkdocs.yaml",
    ],
)
def test_vllm_ignores(path: str) -> None:
    assert wheel_path("vllm", path, ()) == NotShipped()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("csrc/new/x.cu", "flashinfer/data/csrc/new/x.cu"),
        ("csrc/x.jinja", "flashinfer/data/csrc/x.jinja"),
        ("include/flashinfer/x.cuh", "flashinfer/data/include/flashinfer/x.cuh"),
        ("3rdparty/cutlass/include/x.h", "flashinfer/data/cutlass/include/x.h"),
        ("3rdparty/cutlass/python/x.py", "flashinfer/data/cutlass/python/x.py"),
        ("3rdparty/spdlog/include/x.h", "flashinfer/data/spdlog/include/x.h"),
        ("3rdparty/cccl/cub/cub/x.cuh", "flashinfer/data/cccl/cub/cub/x.cuh"),
        ("flashinfer/mla/x.py", "flashinfer/mla/x.py"),
        ("flashinfer/x.pyi", "flashinfer/x.pyi"),
        ("flashinfer/cute_dsl/sparse/sm100_blk64/x.cu",) * 2,
        ("flashinfer/moe_ep/kernel_src/sm90/push_style_megamoe/src/a2a/x.cuh",) * 2,
    ],
)
def test_flashinfer_ships(path: str, name: str) -> None:
    assert wheel_path("flashinfer", path, ()) == Shipped(name)


@pytest.mark.parametrize(
    "path",
    [
        "tests/a.py",
        "docs/a.rst",
        "ci/a.json",
        "flashinfer-jit-cache/a.py",
        ".github/a.yml",
        "flashinfer/new.txt",
        "flashinfer/mla/x.cu",
        "flashinfer/not.a.package/x.py",
        "flashinfer/cute_dsl/sparse/sm100_blk64/deeper/x.cu",
        "csrc/.hidden",
        "3rdparty/cutlass/docs/x.md",
    ],
)
def test_flashinfer_ignores(path: str) -> None:
    assert wheel_path("flashinfer", path, ()) == NotShipped()


def test_flashinfer_keeps_what_the_wheel_has() -> None:
    assert wheel_path("flashinfer", "flashinfer/x.txt", {"flashinfer/x.txt"}) == Shipped(
        "flashinfer/x.txt"
    )


@pytest.mark.parametrize(
    "path",
    [
        "pyproject.toml",
        "build_backend.py",
        "build_utils.py",
        "requirements.txt",
        "setup.py",
        "version.txt",
        "licenses/LICENSE.x.txt",
        "README.md",
        "flashinfer/_build_meta.py",
        "flashinfer/data/csrc/x.cu",
        "flashinfer/x/libs.so.1",
        "3rdparty/nixl/x.cc",
        "new.py",
    ],
)
def test_flashinfer_build_inputs(path: str) -> None:
    ship = wheel_path("flashinfer", path, (path,))
    assert isinstance(ship, BuildInput)
    assert ship.reason
