"""Bundles: what is in them, the same bytes each time, and what run.sh refuses."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from overlay.checks import bundle
from overlay.errors import CheckError, UnavailableError, WheelError
from overlay.report import Reporter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VLLM = {
    "vllm/__init__.py": b"x = 1\n",
    "vllm/tuned.json": b"{}\n",
    "vllm/_C_stable_libtorch.abi3.so": b"\x7fELF",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": b"\x7fELF",
    "vllm-1.dist-info/METADATA": b"Name: vllm\nVersion: 1\n",
    "vllm-1.dist-info/overlay.json": b"{}",
}
FLASHINFER = {
    "flashinfer/__init__.py": b"",
    "flashinfer/data/csrc/sparse_mla_sm120_prefill.cu": b"// kernel\n",
    "flashinfer/data/csrc/tvm_ffi_utils.h": b"// header\n",
    "flashinfer/data/csrc/gemm/other.h": b"// not ours\n",
    "flashinfer/data/csrc/other.cu": b"// not ours\n",
    "flashinfer/data/cutlass/examples/a.py": b"",
    "flashinfer/data/include/flashinfer/a.cuh": b"// header\n",
}


def wheel(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with tests, and a find-links folder with one package."""
    links, tests = tmp_path / "links", tmp_path / "root" / "tests" / "patched"
    links.mkdir()
    info = "dep-1.0.dist-info"
    text = b"Metadata-Version: 2.1\nName: dep\nVersion: 1.0\n"
    form = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {"dep.py": b"", f"{info}/METADATA": text, f"{info}/WHEEL": form, f"{info}/RECORD": b""}
    wheel(links / "dep-1.0-py3-none-any.whl", files)
    (tests / "offline").mkdir(parents=True)
    (tests / "offline" / "tiny.txt").write_text("dep==1.0\n")
    (tests / "test_a.py").write_text("def test_a(): pass\n")
    for by_product in ("__pycache__", ".pytest_cache"):
        (tests / by_product).mkdir()
        (tests / by_product / "x").write_text("")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "root"


def make(root: Path, out: str = "b.tar.gz", vllm: Mapping[str, bytes] = VLLM) -> bundle.Bundle:
    line: Any = SimpleNamespace(name="tiny")
    wheels = [wheel(root / "v.whl", vllm), wheel(root / "f.whl", FLASHINFER)]
    quiet = Reporter(quiet=True)
    head = {"line": "tiny"}
    return bundle.make_bundle(
        line, wheels, head, root / out, root=root, python="3.12", report=quiet
    )


def members(made: bundle.Bundle) -> dict[str, bytes]:
    with tarfile.open(made.path) as archive:
        found = {}
        for info in archive:
            assert (info.mtime, info.uid, info.gid, info.uname) == (0, 0, 0, "")
            file = archive.extractfile(info)
            assert file is not None
            found[info.name] = file.read()
    return found


def test_what_travels(root: Path) -> None:
    made = make(root)
    found = members(made)
    site = {name.removeprefix("site/") for name in found if name.startswith("site/")}
    stand_ins = {f"{name}.py" for name in bundle._COMPILED}
    left = {name for name in (*VLLM, *FLASHINFER) if name not in site}
    assert left == {
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
        "flashinfer/data/csrc/gemm/other.h",
        "flashinfer/data/csrc/other.cu",
        "flashinfer/data/cutlass/examples/a.py",
    }
    assert site - {*VLLM, *FLASHINFER} == stand_ins
    for name in stand_ins:
        assert f"site/{name}\n" in found["STAND-INS.txt"].decode()
        assert b"stand-in of vllm-overlay" in found[f"site/{name}"]
    tests = {name for name in found if name.startswith("tests/")}
    assert tests == {"tests/patched/test_a.py", "tests/patched/offline/tiny.txt"}
    assert made.wheels == ("dep-1.0-py3-none-any.whl",)
    assert "overlay/checks/receipt_plugin.py" in found
    assert str(root).encode() not in b"".join(found.values())


def test_the_same_bytes_again(root: Path) -> None:
    first, second = make(root), make(root, "other.tar.gz")
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.sha256 == second.sha256


def test_refusals(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WheelError, match=r"_C\.py"):
        make(root, vllm={**VLLM, "vllm/_C.py": b""})
    pins = root / "tests" / "patched" / "offline" / "tiny.txt"
    pins.write_text("absent==1.0\n")
    with pytest.raises(UnavailableError, match=r"absent|tiny"):
        make(root)
    pins.unlink()
    with pytest.raises(CheckError, match=r"tiny\.txt is missing"):
        make(root)
    pins.write_text("dep==1.0\n")
    monkeypatch.setattr(bundle, "LIMIT", 100)
    with pytest.raises(CheckError, match="MB"):
        make(root)
    assert not list(root.glob("*.tar.gz"))


def unpacked(root: Path, folder: Path) -> Path:
    with tarfile.open(make(root).path) as archive:
        archive.extractall(folder, filter="data")
    return folder


def run(folder: Path, *words: str, torch: str = "") -> subprocess.CompletedProcess[str]:
    """run.sh, with a fake torch that says what it is told about a device."""
    fake = folder.parent / "fake"
    fake.mkdir(exist_ok=True)
    (fake / "torch.py").write_text(torch)
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(fake)}
    argv = ("bash", str(folder / "run.sh"), *words)
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


def test_run_sh_refuses(root: Path, tmp_path: Path) -> None:
    folder = unpacked(root, tmp_path / "b")
    none = "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    assert "usage" in run(folder).stderr
    done = run(folder, str(tmp_path / "out"), torch=none)
    assert done.returncode != 0
    assert "no CUDA device" in done.stderr
    assert (folder / "deps" / "dep.py").is_file()
    (folder / "site" / "vllm" / "__init__.py").write_text("changed\n")
    done = run(folder, str(tmp_path / "out"), torch=none)
    assert done.returncode != 0
    assert "site/vllm/__init__.py: FAILED" in done.stdout
    assert "no CUDA device" not in done.stderr


def test_packages_that_are_there_stay_packed(root: Path, tmp_path: Path) -> None:
    folder = unpacked(root, tmp_path / "b")
    info = f"pytest-{'9' * 3}.dist-info/METADATA"
    wheel(folder / "wheels" / "pytest-999-py3-none-any.whl", {info: b"Name: pytest\n"})
    argv = (sys.executable, "unpack.py", "wheels", "deps")
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True)
    assert "pytest" in done.stdout
    assert not list((folder / "deps").glob("pytest*"))
    assert (folder / "deps" / "dep.py").is_file()


def test_contents_are_hashes_of_all_members(root: Path) -> None:
    found = members(make(root))
    named = {row.partition("  ")[2] for row in io.StringIO(found["CONTENTS.txt"].decode())}
    assert {name.strip() for name in named} == {*found} - {"CONTENTS.txt"}
