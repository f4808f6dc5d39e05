"""The parts of ``kernels`` that need no compiler: parsers, wheel, refusals, and how a run ends.

What ptxas and cuobjdump say is recorded from CUDA 13.3.1. Compilers are stood in for by scripts
(``FAKE_...``); ``nox -s kernels`` has the real ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import KernelError, MachineError, WheelError
from overlay.files import locked
from overlay.kernels import aot, resources, toolchain
from overlay.kernels import compile as compiling
from overlay.kernels.compile import MODULE, Compiled, compile_module
from overlay.kernels.resources import Kernel, read_kernels, read_ptxas, read_sass
from overlay.kernels.toolchain import Toolchain, find_toolchain
from overlay.verbs.kernels import _rows
from overlay.wheels.inspect import inspect_installed, inspect_wheel
from overlay.wheels.kernelwheel import PROJECT, differing_sources
from tests.support.wheels import canonical, record_line, record_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.trees.store import Commit, Store
    from tests.conftest import Repo

# --- what the tools say, recorded

PREFILL = (
    "_Z25sparse_mla_prefill_kernelIL9ModelType2EL11ComputeMode0ELi16ELi2048ELi64EEvPK13__nv_bfloat16"
    "PKhPKiPKfPS2_Pf17PrefillColdParams"
)
MERGE = (
    "_ZN10flashinfer16sparse_mla_sm12035sparse_mla_decode_dsv4_merge_kernelILi128ELi512ELi64ELi8EEE"
    "vPK13__nv_bfloat16PKfPS2_PfS6_ii"
)
PTXAS = f"""\
[1/6] ccache cuda/bin/nvcc -Xptxas=-v -c flashinfer/data/csrc/x.cu -o out/csrc_x.cuda.o
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{PREFILL}' for 'sm_120a'
ptxas info    : Function properties for {PREFILL}
    136 bytes stack frame, 12 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 6 barriers, 136 bytes cumulative stack size
ptxas info    : Compile time = 139.705 ms
ptxas info    : Compiling entry function '{MERGE}' for 'sm_120a'
ptxas info    : Function properties for {MERGE}
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 52 registers, used 1 barriers, 16 bytes smem
ptxas info    : Compile time = 20.1 ms
"""
SASS = f"""
Fatbin elf code:
================
arch = sm_120a
code version = [1,8]
host = linux
compile_size = 64bit
compressed

\tcode for sm_120a
\t.target\tsm_120a

\t\tFunction : {PREFILL}
\t.headerflags\t@"EF_CUDA_ACCELERATORS EF_CUDA_SM120 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM120)"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;             /* 0x0000df00ff017b82 */
                                                                       /* 0x000ff00000000800 */
        /*0010*/                   S2UR UR16, SR_CTAID.X ;             /* 0x00000000001079c3 */
                                                                       /* 0x000e220000002500 */
        /*0050*/               @P0 EXIT ;                              /* 0x000000000000094d */
                                                                       /* 0x000fea0003800000 */

\t\tFunction : {MERGE}
\t.headerflags\t@"EF_CUDA_ACCELERATORS EF_CUDA_SM120 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM120)"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;             /* 0x0000df00ff017b82 */
                                                                       /* 0x000ff00000000800 */
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def fake_cuobjdump(path: Path, said: str) -> Path:
    """A fake of cuobjdump, which repeats what the real one said."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(said)
    return script(path, f'exec cat "{path.with_suffix(".txt")}"\n')


def test_resources_of_each_kernel(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path / "cuobjdump", SASS)
    found = read_kernels(PTXAS, tmp_path / "x.so", tool, "sm_120a")
    assert list(found.values()) in (
        [Kernel(168, 136, 12, 40, 0, 3), Kernel(52, 0, 0, 0, 16, 1)],
        [Kernel(52, 0, 0, 0, 16, 1), Kernel(168, 136, 12, 40, 0, 3)],
    )
    if resources.readable([MERGE])[MERGE] != MERGE:  # where there is a c++filt
        assert list(found) == [
            "sparse_mla_decode_dsv4_merge_kernel<128, 512, 64, 8>",
            "sparse_mla_prefill_kernel<(ModelType)2, (ComputeMode)0, 16, 2048, 64>",
        ]


def test_a_kernel_in_two_objects_is_counted_twice(tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path / "cuobjdump", SASS + SASS)
    found = read_kernels(PTXAS + PTXAS, tmp_path / "x.so", tool, "sm_120a")
    assert len(found) == 4
    assert sum(name.endswith(" (2)") for name in found) == 2


@pytest.mark.parametrize(
    ("log", "said", "why"),
    [
        (PTXAS.replace("'sm_120a'", "'sm_90a'", 1), SASS, "was compiled for sm_90a, not sm_120a"),
        (PTXAS, SASS.replace("code for sm_120a", "code for sm_121a"), "for sm_121a, not sm_120a"),
        (PTXAS, "", "holds code for nothing"),
        (PTXAS, SASS + "\tcode for sm_90\n", "for sm_120a, sm_90, not"),
        (PTXAS, SASS.replace(MERGE, "other"), "hasn't the kernels that were compiled"),
        (PTXAS, SASS + SASS.partition("\t.target")[2], "hasn't the kernels"),
        ("[1/1] c++ out/x.o", SASS, "can't be read"),
        (PTXAS.rpartition("ptxas info    : Used")[0], SASS, "can't be read"),
    ],
)
def test_code_for_something_else_is_refused(log: str, said: str, why: str, tmp_path: Path) -> None:
    tool = fake_cuobjdump(tmp_path / "cuobjdump", said)
    with pytest.raises(KernelError, match=why):
        read_kernels(log, tmp_path / "x.so", tool, "sm_120a")


def test_a_device_function_is_no_kernel() -> None:
    """ptxas says frames of functions that are not inlined, and no registers."""
    text = PTXAS + "ptxas info    : Function properties for f\n    8 bytes stack frame, 0 bytes "
    assert len(read_ptxas(text + "spill stores, 0 bytes spill loads\n", "sm_120a")) == 2


def test_sass_is_counted_by_function() -> None:
    assert read_sass(SASS.splitlines(keepends=True)) == (
        {"sm_120a"}, {PREFILL: [3], MERGE: [1]},
    )  # fmt: skip


def test_only_what_differs_is_shown() -> None:
    one, other = Kernel(1, 0, 0, 0, 0, 9), Kernel(1, 0, 0, 4, 0, 8)
    made = {
        "patched": compiled(kernels={"same": one, "new": one, "less": one}),
        "bare": compiled(kernels={"same": one, "gone": one, "less": other}),
    }
    rows = {row[0]: row[1:] for row in _rows(made, every=False)}
    assert list(rows) == ["gone", "less", "new"]
    assert rows["less"] == ("changed", "1", "0", "0", "4 -> 0", "0", "8 -> 9")
    assert (rows["new"][0], rows["gone"][0]) == ("added", "dropped")
    assert rows["new"][1:] == rows["gone"][1:] == ("1", "0", "0", "0", "0", "9")
    assert [row[0] for row in _rows(made, every=True)] == ["gone", "less", "new", "same"]


# --- the toolchain


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A fake of the installed wheels: versions by project, and programs that say theirs."""
    versions = {
        "cuda-toolkit": "13.3.1", "nvidia-cuda-nvcc": "13.3.73", "nvidia-nvvm": "13.3.73",
        "apache-tvm-ffi": "0.1.15",
    }  # fmt: skip
    bin_ = tmp_path / "cu13" / "bin"
    script(bin_ / "nvcc", 'echo "Cuda compilation tools, release 13.3, V13.3.73"\n')
    for name in ("c++", "gcc", "ninja", "ccache"):
        script(tmp_path / "bin" / name, 'echo "version 1.2"\n')
    (tmp_path / "cu13" / "lib").mkdir()
    (tmp_path / "cu13" / "lib" / "libcudart.so.13").touch()

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    def files(name: str) -> list[metadata.PackagePath]:
        paths = {"nvidia-cuda-nvcc": "cu13/bin/nvcc", "apache-tvm-ffi": "f/include/tvm/ffi/c_api.h"}
        path = metadata.PackagePath(paths[name])
        path.dist = SimpleNamespace(locate_file=lambda p: tmp_path / p)
        return [path]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "files", files)
    monkeypatch.setattr(
        metadata, "requires",
        lambda _: [
            'nvidia-cuda-nvcc==13.3.73.*; extra == "nvcc"', 'nvidia-nvvm==13.3.*; extra == "nvcc"',
            'nvidia-cublas==13.6.*; extra == "cublas"',
        ],
    )  # fmt: skip
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return versions


def test_a_toolkit_is_made_of_wheels(wheels: dict[str, str], tmp_path: Path) -> None:
    tools = find_toolchain("13.3.1", cached=True)
    assert tools.versions["nvcc"] == "13.3.73"
    assert tools.versions["nvidia-nvvm"] == "13.3.73"
    assert "nvidia-cublas" not in tools.versions
    script(tmp_path / "bin" / "c++", 'touch "$6"\n')
    tools.prefix(tmp_path / "prefix")
    assert (tmp_path / "prefix/bin/nvcc").is_file()
    for name in ("libcudart.so", "libcudart.so.13", "stubs/libcuda.so"):
        assert (tmp_path / "prefix/lib64" / name).exists(), name


@pytest.mark.parametrize(
    ("project", "version", "why"),
    [
        ("cuda-toolkit", None, "cuda-toolkit isn't installed"),
        ("cuda-toolkit", "13.4.0", r"13\.4\.0 is installed[\s\S]*built with CUDA 13\.3\.1"),
        ("nvidia-cuda-nvcc", "13.4.92", r"goes with nvidia-cuda-nvcc==13\.3\.73"),
        ("nvidia-nvvm", None, "nvidia-nvvm isn't installed"),
        ("apache-tvm-ffi", None, "apache-tvm-ffi isn't installed"),
    ],
)
def test_another_toolchain_is_refused(
    wheels: dict[str, str], project: str, version: str | None, why: str
) -> None:
    if version is None:
        del wheels[project]
    else:
        wheels[project] = version
    with pytest.raises(KernelError, match=why) as caught:
        find_toolchain("13.3.1", cached=True)
    assert caught.value.fix


def test_an_nvcc_of_another_version_than_its_wheel(wheels: dict[str, str], tmp_path: Path) -> None:
    script(tmp_path / "cu13/bin/nvcc", 'echo "Cuda compilation tools, release 13.0, V13.0.88"\n')
    with pytest.raises(KernelError, match=r"is of CUDA 13\.0"):
        find_toolchain("13.3.1", cached=True)


def test_without_ccache_only_if_asked(
    wheels: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "ccache").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolchain, "_first_line", lambda *_: "version 1")
    monkeypatch.setattr(toolchain, "_said", lambda *_: "release 13.3, V13.3.73")
    with pytest.raises(KernelError, match="ccache isn't installed") as caught:
        find_toolchain("13.3.1", cached=True)
    assert "CPU time" in caught.value.why
    assert "--no-cache" in caught.value.fix
    assert find_toolchain("13.3.1", cached=False).ccache is None


# --- the wheel

RECORD = canonical(
    {
        "series": {"vllm": [], "flashinfer": []},
        "requirements": {"flashinfer-python": "==0.6.18rc10"},
    }
)
SOURCES = {"flashinfer/data/csrc/a.cu": b"a\n", "flashinfer/data/include/b.cuh": b"b\n"}


def compiled(**other: Any) -> Compiled:
    import hashlib

    given: dict[str, Any] = {
        "tree": "0" * 40, "module": b"\x7fELF", "kernels": {}, "inputs": "1" * 64,
        "sources": {n: hashlib.sha256(data).hexdigest() for n, data in SOURCES.items()},
        "seconds": 1.0, "cpu_seconds": 1.0, "peak_mib": 1.0, "objects": {},
    }  # fmt: skip
    return Compiled(**given | other)


def write(out: Path, **other: Any) -> Path:
    return aot.write_wheel(
        compiled(**other), out, public="0.6.18rc10", record=RECORD,
        versions={"nvcc": "13.3.73", "ninja": "1", "ccache": "4"},
    )  # fmt: skip


def test_a_wheel_of_kernels(tmp_path: Path) -> None:
    wheel, again = write(tmp_path / "a"), write(tmp_path / "b")
    assert wheel.read_bytes() == again.read_bytes()
    found = inspect_wheel(wheel)
    assert (found.name, found.problems) == (PROJECT, ())
    assert wheel.name == f"flashinfer_jit_cache-{found.version}-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        document = json.loads(archive.read("flashinfer_jit_cache/built.json"))
        text = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert f"flashinfer_jit_cache/modules/{MODULE}/{MODULE}.so" in names
    assert f"Requires-Dist: flashinfer-python=={found.version}\n" in text
    assert document["version"] == found.version
    assert document["versions"] == {"nvcc": "13.3.73"}  # what else ran decides nothing


def test_an_edited_wheel_of_kernels_is_noticed(tmp_path: Path) -> None:
    """Kernels that allow another FlashInfer, with a RECORD that agrees."""
    wheel = write(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    own = next(name for name in files if name.endswith("/RECORD"))
    del files[own]
    for name, data in files.items():
        files[name] = data.replace(b"flashinfer-python==", b"flashinfer-python>=")
    rows = [record_line(name, data) for name, data in files.items()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in {**files, own: record_text([*rows, (own, "", "")])}.items():
            archive.writestr(name, data)
    kinds = {(problem.kind, problem.path) for problem in inspect_wheel(wheel).problems}
    assert kinds == {("form", ""), ("requirement", "flashinfer-python")}


def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: set[tuple[int, str]]) -> Any:
    """The wheel's package beside a fake of FlashInfer, whose sources lie in ``tmp_path``."""
    for name, data in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(write(tmp_path / "out")) as archive:
        archive.extractall(tmp_path / "site")
    fakes = {
        name: ModuleType(f"flashinfer{name}") for name in ("", ".version", ".compilation_context")
    }
    fakes[""].__path__ = [str(tmp_path / "flashinfer")]
    fakes[".version"].__version__ = "0.6.18rc10+other.o00000000"  # type: ignore[attr-defined]
    fakes[".compilation_context"].CompilationContext = (  # type: ignore[attr-defined]
        lambda: SimpleNamespace(TARGET_CUDA_ARCHS=targets)
    )
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, f"flashinfer{name}", fake)
    path = tmp_path / "site/flashinfer_jit_cache/__init__.py"
    spec = importlib.util.spec_from_file_location("flashinfer_jit_cache", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("targets", "served"),
    [
        ({(12, "0a")}, True), ({(12, "0f")}, True), (set(), True), ({(9, "0a")}, True),
        ({(12, "1a")}, False), ({(12, "0f"), (12, "1a")}, False),
    ],
)  # fmt: skip
def test_modules_are_offered_to_the_gpus_that_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: set[tuple[int, str]], served: bool
) -> None:
    folder = Path(load(tmp_path, monkeypatch, targets).get_jit_cache_dir())
    assert folder.joinpath(MODULE, f"{MODULE}.so").is_file() is served
    (provider,) = load(tmp_path, monkeypatch, targets).get_jit_cache_providers()
    assert provider.cuda_architectures == ("sm120a",)
    assert Path(provider.jit_cache_dir, MODULE, f"{MODULE}.so").is_file()


@pytest.mark.parametrize("ask", ["get_jit_cache_dir", "get_jit_cache_providers"])
@pytest.mark.parametrize("data", [b"a\n\n", None])
def test_a_module_of_other_sources_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str, data: bytes | None
) -> None:
    module = load(tmp_path, monkeypatch, {(12, "0a")})
    path = tmp_path / "flashinfer/data/csrc/a.cu"
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    monkeypatch.setenv("FLASHINFER_DISABLE_VERSION_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"compiled from other sources[\s\S]*csrc/a\.cu differs"):
        getattr(module, ask)()


def test_installed_kernels_are_held_against_the_installed_sources(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    with zipfile.ZipFile(write(tmp_path)) as archive:
        archive.extractall(site)
    for name, data in SOURCES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(data)
    (found,) = inspect_installed(python)
    assert found.problems == ()
    (site / "flashinfer/data/csrc/a.cu").write_bytes(b"other\n")
    (problem,) = inspect_installed(python)[0].problems
    assert (problem.kind, problem.path) == ("kernels", "flashinfer/data/csrc/a.cu")
    # another FlashInfer beside it
    info = site / "flashinfer_python-0.6.18rc10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.18rc10\n"
    )
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    kernels = {one.name: one for one in inspect_installed(python)}[PROJECT]
    assert any(
        "isn't of the installed flashinfer-python 0.6.18rc10" in p.what for p in kernels.problems
    )


@pytest.mark.parametrize(
    "document", [b"", b"[]", b'{"sources": []}', b'{"sources": 3}', b"[" * 100000]
)
def test_what_says_no_sources_is_refused(document: bytes, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match="can't be read"):
        differing_sources(document, tmp_path)


def test_sources_outside_of_flashinfer_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    names = ("flashinfer/../secret", "secret", "/etc/passwd")
    document = json.dumps({"sources": dict.fromkeys(names, "0" * 64)}).encode()
    assert differing_sources(document, tmp_path) == sorted(names)
    assert (
        differing_sources(json.dumps({"sources": {"flashinfer/x": empty}}).encode(), tmp_path) == []
    )


# --- a run, with a fake of each program

FAKE_GENERATOR = """
import os, sys
from pathlib import Path
path = Path(os.environ["FLASHINFER_WORKSPACE_BASE"], ".cache", "build.ninja")
path.parent.mkdir()
source = f"{sys.argv[1]}/flashinfer/data/csrc/x.cu"
path.write_text(f"nvcc_launcher = \\nbuild {path.parent}/x.o: cuda_compile {source}\\n")
print(path)
"""
FAKE_NINJA = """
case "$*" in
*deps*)
  printf 'out/x.o: #deps 2\\n    flashinfer/data/csrc/x.cu\\n    /usr/include/stdio.h\\n'
  exit;;
esac
grep -q 'cuda_compile flashinfer/data/csrc/x.cu' build.ninja || exit 3
echo begin >> {events}
[ -e {slow} ] && sleep 5
printf '# flashinfer/data/csrc/x.cu\\ndirect_cache_hit\\n' > "$CCACHE_STATSLOG"
cp flashinfer/data/csrc/x.cu out/sparse_mla_sm120.so
cat {log}
echo end >> {events}
"""


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    upstream: Repo,
    make_store: Callable[..., Store],
    import_base: Callable[..., Commit],
) -> Any:
    """A way to compile a tiny FlashInfer, and where its programs keep what they do."""
    upstream.write({"csrc/x.cu": b"code\n", "flashinfer/jit/mla.py": b"", "docs/x.md": b""})
    upstream.commit({}, "All\n")
    store = make_store("flashinfer")
    base = import_base(store, upstream)
    generator = tmp_path / "generator.py"
    generator.write_text(FAKE_GENERATOR)
    monkeypatch.setattr(compiling, "_GENERATOR", generator)
    (tmp_path / "ptxas.log").write_text(PTXAS)
    names = {
        "events": tmp_path / "events",
        "slow": tmp_path / "slow",
        "log": tmp_path / "ptxas.log",
    }
    text = FAKE_NINJA
    for name, path in names.items():
        text = text.replace(f"{{{name}}}", str(path))
    fake_cuobjdump(tmp_path / "cu13/bin/cuobjdump", SASS)
    (tmp_path / "cu13/lib").mkdir()
    script(tmp_path / "bin" / "c++", "exit 0\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    tools = Toolchain(
        cuda=tmp_path / "cu13", tvm_ffi=tmp_path, ninja=script(tmp_path / "ninja", text),
        ccache=tmp_path / "ccache", versions={"nvcc": "13.3.73"},
    )  # fmt: skip
    cache = tmp_path / "cache"
    return SimpleNamespace(
        store=store, tree=base.tree, tools=tools, cache=cache, **names,
        go=lambda: compile_module(store, base.tree, tools, cache, jobs=1),
    )  # fmt: skip


def test_a_run_leaves_a_module_and_nothing_else(run: Any) -> None:
    made = run.go()
    assert made.module == b"code\n"
    assert list(made.sources) == ["flashinfer/data/csrc/x.cu"]
    assert made.objects == {"csrc/x.cu": "cached"}
    assert len(made.kernels) == 2
    assert not (run.cache / "kernels" / run.tree).exists()
    assert run.go().inputs == made.inputs


def test_a_failed_run_says_where_and_leaves_nothing(run: Any) -> None:
    script(run.tools.ninja, "echo 'ptxas info : x'; echo 'x.cu(3): error: no'; exit 1\n")
    with pytest.raises(KernelError, match="compiling sparse_mla_sm120 failed") as caught:
        run.go()
    assert caught.value.why == "x.cu(3): error: no"
    assert not (run.cache / "kernels" / run.tree).exists()


def test_a_damaged_store_is_refused_before_anything_runs(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = run.store.reader.get
    monkeypatch.setattr(run.store.reader, "get", lambda oid: (*get(oid)[:2], b"evil\n"))
    with pytest.raises(KernelError, match="isn't what tree"):
        run.go()
    assert not run.events.exists()


def test_a_killed_run_is_repeated(run: Any) -> None:
    run.slow.touch()
    pid = os.fork()
    if not pid:
        run.go()
        os._exit(0)
    while not run.events.exists():
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (run.cache / "kernels" / run.tree).exists()
    run.slow.unlink()
    run.store.reader.close()
    assert run.go().module == b"code\n"
    assert not (run.cache / "kernels" / run.tree).exists()


def test_two_runs_at_once_take_turns(run: Any) -> None:
    made: list[Compiled] = []
    other = SimpleNamespace(**vars(run))
    threads = [threading.Thread(target=lambda: made.append(other.go())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2
    assert run.events.read_text().split() == ["begin", "end"] * 2


def test_who_waits_too_long_says_for_what(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_WAIT", 0.1)
    with (
        locked(run.cache / "kernels" / f"{run.tree}.lock"),
        pytest.raises(MachineError, match="another process"),
    ):
        run.go()


def test_nothing_of_the_users_reaches_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NVCC_APPEND_FLAGS", "FLASHINFER_EXTRA_CFLAGS", "CC", "CPATH", "CUDA_HOME"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CCACHE_REMOTE_STORAGE", "redis://x")
    assert {"NVCC_APPEND_FLAGS", "FLASHINFER_EXTRA_CFLAGS", "CC", "CPATH", "CUDA_HOME"}.isdisjoint(
        compiling._sealed()
    )
    assert "CCACHE_REMOTE_STORAGE" in compiling._sealed()
    assert "PATH" in compiling._sealed()


def test_the_verb_says_what_is_missing(tmp_path: Path) -> None:
    """Here, where CUDA's wheels aren't installed; elsewhere there is nothing to see."""
    if importlib.util.find_spec("nvidia") is not None:
        pytest.skip("CUDA's wheels are installed")
    root = Path(__file__).parent.parent
    done = subprocess.run(
        (sys.executable, str(root / "build.py"), "kernels", "infernal", "--json"),
        cwd=root, capture_output=True, text=True, check=False,
        env={**os.environ, "VLLM_OVERLAY_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 24
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "kernel"
    assert "nox -s kernels" in error["fix"]
