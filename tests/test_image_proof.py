"""The proof of an image: it passes on what was built, and each fault has a message of its own.

No engine: upstream's tiny wheels are unpacked as pip would, the difference is laid over them by the
very script that the Dockerfile runs, and the result is looked at on disk and as layers.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.cli import main
from overlay.images.contexts import _program
from overlay.images.difference import write_difference
from overlay.images.oci import read_layout
from overlay.images.proof import Claims, prove, write_claims
from overlay.images.site import PREFIX, read_disk_site, read_image_site
from overlay.lines.line import PROJECTS, UPSTREAMS, read_line
from overlay.lines.lock import read_lock
from tests.support.layouts import make_layout
from tests.support.tiny import FLASHINFER_FILES, VLLM_FILES, make_tiny
from tests.support.wheels import record_line, record_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.support.tiny import Tiny

IMAGES = Path(__file__).parent.parent / "images"
SITE = "lib/python3.11/site-packages"
TORCH = b"__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n"


def apply_overlay(changes: Path, site: Path) -> None:
    spec = importlib.util.spec_from_file_location("apply_overlay", IMAGES / "apply_overlay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(changes, site)


def install(wheel: Path, prefix: Path, script: str = "") -> None:
    """Unpack a wheel as pip does, with an INSTALLER and a script of its own."""
    site = prefix / SITE
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        record = next(n for n in archive.namelist() if n.endswith(".dist-info/RECORD"))
    info = record.rpartition("/")[0]
    added = {f"{info}/INSTALLER": b"pip\n"}
    if script:
        added[f"../../../bin/{script}"] = b"#!/opt/vllm/bin/python\n"
    with (site / record).open("ab") as file:
        for name, data in added.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_bytes(data)
            file.write(record_text([record_line(name, data)]))


def put(prefix: Path, name: str, version: str, files: Mapping[str, bytes]) -> None:
    """Install a distribution that consists of ``files``."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    whole = {**files, f"{info}/METADATA": metadata}
    rows = [record_line(path, data) for path, data in whole.items()]
    whole[f"{info}/RECORD"] = record_text([*rows, (f"{info}/RECORD", "", "")])
    for path, data in whole.items():
        target = prefix / SITE / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class Built:
    """An environment as an image has it, and what its labels claim."""

    def __init__(self, prefix: Path, claims: Claims, tiny: Tiny, changes: Path) -> None:
        self.prefix, self.claims, self.tiny, self.changes = prefix, claims, tiny, changes
        self.site = prefix / SITE

    def messages(self) -> list[str]:
        found = prove(read_disk_site(self.prefix), self.claims)
        return [problem.what for problem in found.problems]

    def info(self, upstream: str) -> Path:
        project = PROJECTS[upstream].replace("-", "_")  # type: ignore[index]
        (found,) = self.site.glob(f"{project}-*.dist-info")
        return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Tiny, Path, Claims]]:
    """The line ``tiny``, a folder with the environment and its changes, and what it may claim."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_OVERLAY_CACHE", str(folder / "cache"))
        tiny = make_tiny(folder / "project", patch)
        one = VLLM_FILES["vllm/one.py"].replace(b"= 3\n", b"= 33\n")
        tiny.add_patch("vllm", "first", {"vllm/one.py": one})
        tiny.add_patch("vllm", "second", {"vllm/new.py": b"new = 1\n", "vllm/old.py": None})
        source = FLASHINFER_FILES["csrc/prefill.cu"].replace(b"e 7\n", b"e x\n")
        tiny.add_patch("flashinfer", "check", {"csrc/prefill.cu": source})
        for verb in ("lock", "wheel"):
            assert main(["--patches", str(tiny.patches), verb, "tiny", "--quiet"]) == 0
        yield tiny, folder, _install_all(tiny, folder)


def _install_all(tiny: Tiny, folder: Path) -> Claims:
    line = read_line(tiny.patches, "tiny")
    lock = read_lock(line)
    assert lock is not None
    theirs = {up: tiny.index / line.pin(up).wheel.file for up in UPSTREAMS}
    ours = {
        up: next((tiny.root / "dist" / "tiny").glob(f"{PROJECTS[up].replace('-', '_')}-*"))
        for up in UPSTREAMS
    }
    prefix, changes = folder / "env", folder / "changes"
    for upstream in UPSTREAMS:
        install(theirs[upstream], prefix, script="vllm" if upstream == "vllm" else "")
    write_difference([(theirs[up], ours[up]) for up in UPSTREAMS], changes)
    apply_overlay(changes, prefix / SITE)
    put(prefix, "torch", "2.13.0", {"torch/__init__.py": b"", "torch/version.py": TORCH})
    put(prefix, "nvidia-cutlass-dsl", "4.6.2", {"cutlass/__init__.py": b""})
    return Claims(
        line="tiny",
        digest=lock.digest,
        contents="full",
        versions={up: line.pin(up).version for up in UPSTREAMS},
        commits={up: line.pin(up).commit_text for up in UPSTREAMS},
        patches={up: [patch.name for patch in line.series[up]] for up in UPSTREAMS},
        torch="2.13.0",
        torch_cuda="13.0.3",
        packages={},
        needs=("nvidia-cutlass-dsl>=4.6",),
    )


@pytest.fixture
def built(made: tuple[Tiny, Path, Claims], tmp_path: Path) -> Built:
    """A copy of the environment, to be spoilt."""
    tiny, folder, claims = made
    shutil.copytree(folder / "env", tmp_path / "env")
    return Built(tmp_path / "env", claims, tiny, folder / "changes")


def test_what_was_built_is_what_it_claims(built: Built) -> None:
    found = prove(read_disk_site(built.prefix), built.claims)
    assert found.problems == ()
    assert found.effects == 4  # two files written and one deleted in vLLM, one in FlashInfer
    assert not (built.site / "vllm" / "old.py").exists()
    assert not list(built.site.glob("vllm-1.2.3.dist-info"))
    assert (built.info("vllm") / "INSTALLER").read_bytes() == b"pip\n"


def test_the_layers_say_the_same_as_the_disk(built: Built, tmp_path: Path) -> None:
    files = {
        f"{PREFIX}/{path.relative_to(built.prefix).as_posix()}": path.read_bytes()
        for path in built.prefix.rglob("*")
        if path.is_file()
    }
    layout = make_layout(tmp_path / "layout", [{"etc/x": b""}, files])
    site = read_image_site(read_layout(layout.folder).files(PREFIX))
    on_disk = read_disk_site(built.prefix)
    assert {path: seen.sha256 for path, seen in site.files.items()} == {
        path: seen.sha256 for path, seen in on_disk.files.items()
    }
    # tarfile's own default is the mode that a wheel's file has
    assert prove(site, built.claims).problems == ()


def test_as_a_program_it_needs_no_more_than_it_brings(built: Built, tmp_path: Path) -> None:
    _program(tmp_path / "proof")
    claims = tmp_path / "claims.json"
    claims.write_bytes(write_claims(built.claims))
    argv = (
        sys.executable,
        "-S",
        "-s",
        "-m",
        "overlay.images.proof",
        str(claims),
        str(built.prefix),
    )
    env = {"PYTHONPATH": str(tmp_path / "proof"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (built.site / "vllm" / "one.py").write_bytes(b"other = 1\n")
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 25
    assert done.stderr.startswith("proof: vllm/one.py differs from its hash in RECORD\n")


# --- faults, each made for real ------------------------------------------------------------------


def test_a_patched_file_that_was_changed(built: Built) -> None:
    path = built.site / "flashinfer" / "data" / "csrc" / "prefill.cu"
    path.write_bytes(path.read_bytes() + b"// more\n")
    messages = built.messages()
    assert "flashinfer/data/csrc/prefill.cu differs from its hash in RECORD" in messages
    assert any("isn't what the last patch on it makes" in text for text in messages)


def test_a_file_that_a_patch_deleted_and_is_back(built: Built) -> None:
    (built.site / "vllm" / "old.py").write_bytes(b"old = True\n")
    assert "vllm/old.py is deleted by a patch and still there" in built.messages()


def test_two_wheels_claim_one_path(built: Built) -> None:
    put(built.prefix, "other", "1.0", {"vllm/two.py": b"two = 3\n"})
    (found,) = [text for text in built.messages() if "both install" in text]
    assert found.endswith("both install vllm/two.py, with other content each")
    assert "other 1.0" in found


def test_two_wheels_with_one_file_of_the_same_content_do_no_harm(built: Built) -> None:
    put(built.prefix, "one", "1.0", {"nvidia/__init__.py": b""})
    put(built.prefix, "two", "1.0", {"nvidia/__init__.py": b""})
    assert built.messages() == []


def test_torch_was_replaced_by_another_version(built: Built) -> None:
    shutil.rmtree(built.site / "torch-2.13.0.dist-info")
    put(built.prefix, "torch", "2.12.0", {"torch/__init__.py": b"", "torch/version.py": TORCH})
    assert built.messages() == [
        "torch 2.12.0 is installed; the line's is 2.13.0: a resolver replaced it"
    ]


def test_torch_was_replaced_by_a_build_for_the_cpu(built: Built) -> None:
    shutil.rmtree(built.site / "torch-2.13.0.dist-info")
    cpu = TORCH.replace(b"= '13.0'", b"= None")
    put(built.prefix, "torch", "2.13.0+cpu", {"torch/__init__.py": b"", "torch/version.py": cpu})
    assert built.messages() == [
        "torch 2.13.0+cpu is installed; the line's is 2.13.0: a resolver replaced it",
        "torch was built without CUDA; the labels say 13.0",
    ]


def test_torch_of_the_same_version_was_built_with_another_cuda(built: Built) -> None:
    other = TORCH.replace(b"13.0", b"12.8")
    put(built.prefix, "torch", "2.13.0", {"torch/__init__.py": b"", "torch/version.py": other})
    assert built.messages() == ["torch was built with CUDA 12.8; the labels say 13.0"]


@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_pip_preferred_upstreams_build(built: Built, upstream: str) -> None:
    shutil.rmtree(built.info(upstream))
    wheel = next(built.tiny.index.glob(f"{PROJECTS[upstream].replace('-', '_')}-*.whl"))  # type: ignore[index]
    install(wheel, built.prefix)
    (found,) = [text for text in built.messages() if "upstream's own build" in text]
    assert "without a patch: a resolver preferred it to" in found


def test_both_builds_are_installed(built: Built) -> None:
    install(next(built.tiny.index.glob("flashinfer_python-*.whl")), built.prefix)
    assert any("flashinfer-python is installed 2 times" in text for text in built.messages())


def test_kernels_compiled_ahead_of_time_from_other_sources(built: Built) -> None:
    put(built.prefix, "flashinfer-jit-cache", "4.5.6rc7", {"flashinfer_jit_cache/__init__.py": b""})
    (found,) = built.messages()
    assert found.startswith("flashinfer-jit-cache 4.5.6rc7 holds kernels compiled ahead of time")
    assert found.endswith("they would be used in place of the patched ones")


def test_kernels_that_only_have_the_right_version(built: Built) -> None:
    version = built.info("flashinfer").name.split("-")[1].removesuffix(".dist")
    put(built.prefix, "flashinfer-jit-cache", version, {"flashinfer_jit_cache/__init__.py": b""})
    (found,) = built.messages()
    assert "nothing says that its kernels are those of the patched sources" in found


def test_kernels_of_the_patched_sources_are_welcome(built: Built) -> None:
    info = built.info("flashinfer")
    version = info.name.split("-")[1].removesuffix(".dist")
    record = (info / "overlay.json").read_bytes()
    own = f"flashinfer_jit_cache-{version}.dist-info/overlay.json"
    put(built.prefix, "flashinfer-jit-cache", version, {own: record})
    assert built.messages() == []


def test_cubins_of_another_flashinfer(built: Built) -> None:
    put(built.prefix, "flashinfer-cubin", "4.5.5", {"flashinfer_cubin/__init__.py": b""})
    (found,) = built.messages()
    assert found.startswith("flashinfer-cubin 4.5.5 holds binaries for another FlashInfer")


def test_what_the_line_cannot_run_without_is_missing(built: Built) -> None:
    for path in built.site.glob("nvidia_cutlass_dsl-*"):
        shutil.rmtree(path)
    assert (
        "the line doesn't run without nvidia-cutlass-dsl>=4.6, which is missing" in built.messages()
    )


def test_an_extra_package_of_another_version(built: Built) -> None:
    put(built.prefix, "b12x", "1.5.0", {"b12x/__init__.py": b""})
    built.claims = replace(built.claims, packages={"b12x": "1.5.1"})
    assert built.messages() == ["the line needs b12x==1.5.1; 1.5.0 is installed"]


def test_files_that_came_from_no_wheel(built: Built) -> None:
    (built.site / "sitecustomize.py").write_bytes(b"import os\n")
    cache = built.site / "vllm" / "__pycache__"
    cache.mkdir()
    (cache / "one.cpython-311.pyc").write_bytes(b"\0")
    assert sorted(built.messages()) == [
        "sitecustomize.py came from no wheel: no RECORD lists it",
        "vllm/__pycache__/one.cpython-311.pyc is compiled Python, which would be run in place of "
        "its source",
    ]


def test_a_dependency_that_was_changed(built: Built) -> None:
    (built.site / "torch" / "__init__.py").write_bytes(b"print()\n")
    assert built.messages() == ["torch/__init__.py isn't what torch 2.13.0 installed"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("digest", "0" * 64, "vLLM is 1.2.3+tiny.o"),
        ("commits", {"vllm": "0" * 40, "flashinfer": "0" * 40}, "vLLM stands on "),
        ("patches", {"vllm": ["first"], "flashinfer": []}, "vLLM has the patches first, second"),
        ("contents", "small", "torch 2.13.0 is in an image that claims none"),
    ],
)
def test_labels_that_claim_something_else(
    built: Built, field: str, value: object, message: str
) -> None:
    built.claims = replace(built.claims, **{field: value})
    assert any(text.startswith(message) for text in built.messages()), built.messages()


def test_the_manifest_of_a_difference_names_both_folders(built: Built) -> None:
    found = json.loads((built.changes / "manifest.json").read_text())
    assert [one["gone"] for one in found] == [["vllm/old.py"], []]
    assert found[0]["old"] == "vllm-1.2.3.dist-info"
