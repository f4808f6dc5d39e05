"""A line's SM120 module for real: compiled, taken apart, installed, loaded, and refused.

``nox -s kernels -- LINE`` runs this. The compiler and its cache are real, and so are the installed
FlashInfer and what it loads; torch is a CPU build, and no GPU is there. Nothing here runs a kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.kernels import compile as compiling
from overlay.kernels.aot import write_wheel
from overlay.kernels.compile import ARCH, MODULE, SM, Compiled, compile_module, lay_out
from overlay.kernels.toolchain import Toolchain, find_toolchain
from overlay.lines.line import Line, read_line
from overlay.lines.record import make_record
from overlay.report import Reporter
from overlay.sources.pipconfig import read_pip_config
from overlay.sources.source import Sources
from overlay.trees.pipeline import apply_line
from overlay.trees.store import cache_folder
from overlay.wheels.inspect import inspect_installed
from overlay.wheels.kernelwheel import PACKAGE, PROJECT
from tests.support.installers import Uv, cpu_torch, make_venv, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from overlay.lines.line import Upstream
    from overlay.trees.apply import Patched

    Note = Callable[[str, object], None]

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
BUILD = (sys.executable, str(ROOT / "build.py"), "--patches", str(ROOT / "patches"))


@pytest.fixture(scope="session")
def line() -> Line:
    return read_line(ROOT / "patches", os.environ.get("OVERLAY_LINE", "infernal"))


@pytest.fixture(scope="session")
def patched(line: Line) -> dict[Upstream, Patched]:
    return apply_line(line, Sources(cache=cache_folder(), report=Reporter(quiet=True)))


@pytest.fixture(scope="session")
def tools(line: Line) -> Toolchain:
    return find_toolchain(line.settings.cuda, cached=True)


@pytest.fixture(scope="session")
def made(line: Line, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the verb says, with the wheel."""
    out = tmp_path_factory.mktemp("kernels")
    done = subprocess.run(
        (*BUILD, "kernels", line.name, "--json", "--out", str(out)),
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="session")
def bare(patched: Mapping[Upstream, Patched], tools: Toolchain, made: object) -> Compiled:
    """The bare pin's module, out of the cache that ``made`` has filled."""
    state = patched["flashinfer"]
    return compile_module(state.store, state.tree.base.tree, tools, cache_folder(), jobs=2)


@pytest.fixture(scope="session")
def python(
    line: Line, made: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """An environment with the patched FlashInfer, its kernels, and a CPU build of torch."""
    out, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("environment")
    run(*BUILD, "wheel", line.name, "--out", str(out)).check()
    (flashinfer,) = out.glob("flashinfer_python-*.whl")
    interpreter, uv = make_venv(folder / "venv"), Uv()
    torch = f"torch=={cpu_torch(line.settings.torch, read_pip_config().find_links)}"
    wheels = [flashinfer, Path(made["wheel"]["path"])]
    # beside a CPU build of torch nothing brings CUDA's runtime library, which modules link to
    runtime = f"nvidia-cuda-runtime=={made['versions']['nvidia-cuda-runtime']}"
    uv.install(interpreter, torch, runtime).check()
    uv.install_on_cpu(interpreter, wheels, folder, torch)
    yield interpreter
    run("rm", "-rf", str(folder))  # some gigabytes, of which pytest would keep three


def site(python: Path) -> Path:
    (found,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return found


# torch brings the runtime library into the process where it is a CUDA build
ASK = """
import ctypes, glob, json, os, sys
for path in glob.glob(sys.prefix + "/lib/python*/site-packages/nvidia/*/lib/libcudart.so.*"):
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
%s
from flashinfer.jit.mla import gen_sparse_mla_sm120_module
spec = gen_sparse_mla_sm120_module()
said = {"aot": spec.is_aot, "path": str(spec.aot_path)}
%s
print(json.dumps(said))
"""
LOAD = """
module = spec.build_and_load()
said["built"] = os.path.exists(spec.build_dir) and os.listdir(spec.build_dir)
try:
    module["sparse_mla_sm120_paged_attention"]()
except Exception as error:
    said["refusal"] = f"{type(error).__name__}: {error}"
try:
    candidates = module["candidates"]
    said["candidates"] = [list(candidates(1, heads, 512, 64, False, 64, "default")) for heads in (8, 129)]
except AttributeError:
    said["candidates"] = None
"""  # noqa: E501 - code that another interpreter runs


def ask(
    python: Path, workspace: Path, *, first: str = "", then: str = "", **env: str
) -> tuple[dict[str, Any], str]:
    """What FlashInfer says of the module in a process of its own, with no compiler on its PATH."""
    variables = {
        "PATH": "/nowhere", "HOME": str(workspace), "FLASHINFER_WORKSPACE_BASE": str(workspace),
        "FLASHINFER_CUDA_ARCH_LIST": ARCH, **env,
    }  # fmt: skip
    done = subprocess.run(
        (str(python), "-B", "-c", ASK % (first, then)),
        env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    answer = done.stdout.splitlines()[-1] if done.returncode == 0 else "{}"
    return json.loads(answer), done.stderr


def test_what_it_took(made: dict[str, Any], record_property: Note) -> None:
    for name in ("nvcc", "host compiler", "apache-tvm-ffi", "ccache"):
        record_property("compiled with", f"{name} {made['versions'][name]}")
    states = made["states"]
    for name, state in states.items():
        cached = sum(of == "cached" for of in state["objects"].values())
        record_property(
            "kernels",
            f"{name}: {len(state['kernels'])} for {made['architecture']}, inputs "
            f"{state['inputs'][:16]}; {state['seconds']} s, {state['cpu_seconds']} s of CPU time, "
            f"{state['peak_mib']} MiB in the largest process; {cached} of "
            f"{len(state['objects'])} objects cached",
        )
        assert state["kernels"]
        assert state["seconds"] > 0 < state["peak_mib"]
        for field in ("spill_stores", "spill_loads"):
            total = sum(kernel[field] for kernel in state["kernels"].values())
            record_property("spills", f"{name}: {field.replace('_', ' ')} {total} bytes")
        most = max(kernel["registers"] for kernel in state["kernels"].values())
        record_property("registers", f"{name}: at most {most}")
        assert most <= 255
    for name, kernel in states["patched"]["kernels"].items():
        if kernel["spill_stores"] or kernel["spill_loads"]:
            record_property(
                "kernels that spill",
                f"{name}: {kernel['registers']} registers, stores {kernel['spill_stores']} bytes, "
                f"loads {kernel['spill_loads']}",
            )
    bare, now = states["bare"]["kernels"], states["patched"]["kernels"]
    differing = sorted(name for name in bare.keys() | now.keys() if bare.get(name) != now.get(name))
    for name in differing or ["none"]:
        record_property("kernels that the patches change", name)


def test_all_code_is_for_sm_120a_and_none_is_left_to_a_driver(
    made: Mapping[str, Any], tools: Toolchain, tmp_path: Path
) -> None:
    with zipfile.ZipFile(made["wheel"]["path"]) as archive:
        module = Path(archive.extract(f"{PACKAGE}/modules/{MODULE}/{MODULE}.so", tmp_path))
    cuobjdump = str(tools.cuda / "bin" / "cuobjdump")
    listed = run(cuobjdump, "-lelf", str(module)).check().output
    files = re.findall(r"^ELF file +\d+: (\S+)$", listed, re.M)
    assert files
    assert {name.split(".")[-2] for name in files} == {SM}
    assert "No PTX file" in run(cuobjdump, "-lptx", str(module)).output


def test_flashinfer_picks_it_up_and_it_answers(
    python: Path, made: Mapping[str, Any], tmp_path: Path, record_property: Note
) -> None:
    said, errors = ask(python, tmp_path, then=LOAD)
    assert said.get("aot") is True, errors[-3000:]
    assert Path(said["path"]).is_relative_to(site(python) / PACKAGE)
    assert not said["built"], "something was compiled or at least begun"
    # it ran: it counted arguments
    assert "Mismatched number of arguments" in said["refusal"], said["refusal"]
    record_property("the module answers", said["refusal"].splitlines()[0][:160])
    if said["candidates"] is not None:
        assert said["candidates"][0]
        assert not said["candidates"][1]
        record_property("the module answers", f"candidates, 8 and 129 heads: {said['candidates']}")
    # the control: without the package, nothing is there
    assert ask(python, tmp_path, first=f'sys.modules["{PACKAGE}"] = None')[0]["aot"] is False


def test_it_is_what_it_says(python: Path, line: Line, made: Mapping[str, Any]) -> None:
    found = {one.name: one for one in inspect_installed(python)}
    assert sorted(found) == ["flashinfer-jit-cache", "flashinfer-python"]
    for one in found.values():
        assert one.problems == ()
        assert one.record is not None
        assert one.record["line"] == line.name
    assert found[PROJECT].version == found["flashinfer-python"].version
    assert run(*BUILD, "inspect", made["wheel"]["path"]).check()


def test_another_gpu_of_the_family_gets_none(python: Path, tmp_path: Path) -> None:
    """sm_120a doesn't run on 12.1: there FlashInfer must compile."""
    said, errors = ask(python, tmp_path, FLASHINFER_CUDA_ARCH_LIST="12.1a")
    assert said.get("aot") is False, errors[-3000:]
    assert ask(python, tmp_path, FLASHINFER_CUDA_ARCH_LIST="12.0f")[0]["aot"] is True


@contextlib.contextmanager
def edited(path: Path, data: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.unlink()  # an installer may have linked it to its cache
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("check", [{}, {"FLASHINFER_DISABLE_VERSION_CHECK": "1"}])
def test_refused_where_a_source_was_changed_since(
    python: Path, made: Mapping[str, Any], tmp_path: Path, check: dict[str, str]
) -> None:
    name = next(iter(made["states"]["patched"]["sources"]))
    path = site(python) / name
    with edited(path, path.read_bytes() + b"\n"):
        said, errors = ask(python, tmp_path, **check)
        assert not said
        assert f"{name} differs. Its kernels are not used" in errors
        found = {one.name: one for one in inspect_installed(python)}
    assert ("kernels", name) in {(p.kind, p.path) for p in found[PROJECT].problems}
    assert ask(python, tmp_path, **check)[0]["aot"] is True


def test_the_bare_pins_module_is_refused(
    python: Path, line: Line, bare: Compiled, tools: Toolchain, made: Mapping[str, Any],
    patched: Mapping[Upstream, Patched], tmp_path: Path,
) -> None:  # fmt: skip
    """A wheel that claims the line's version and record, of the bare pin's sources."""
    record = make_record(line, {upstream: one.tree for upstream, one in patched.items()})
    wheel = write_wheel(
        bare, tmp_path, public=line.settings.flashinfer.version, record=record,
        versions=tools.versions,
    )  # fmt: skip
    uv = Uv()
    reinstall = ("--reinstall", "--no-deps")
    uv.install(python, *reinstall, str(wheel)).check()
    try:
        said, errors = ask(python, tmp_path, FLASHINFER_DISABLE_VERSION_CHECK="1")
        if bare.sources == made["states"]["patched"]["sources"]:
            assert said["aot"] is True, errors[-3000:]  # no patch is in it: it is the same module
            assert wheel.read_bytes()
            assert made["states"]["bare"]["module"] == made["states"]["patched"]["module"]
        else:
            assert not said
            assert "was compiled from other sources than those of the installed" in errors
    finally:
        uv.install(python, *reinstall, made["wheel"]["path"]).check()


@pytest.mark.parametrize("local", ["", "+cu130"])
def test_upstreams_own_kernels_are_refused(
    python: Path, line: Line, tmp_path: Path, local: str
) -> None:
    """A fake of upstream's package: its version is real, its modules are those of the line.

    0.6 refuses to be imported, 0.7 says that it does without.
    """
    version = f"{line.settings.flashinfer.version}{local}"
    modules = str(site(python) / PACKAGE / "modules")
    fake = tmp_path / PACKAGE
    fake.mkdir()
    fake.joinpath("__init__.py").write_text(
        "from types import SimpleNamespace\n"
        f"__version__ = {version!r}\n"
        f"def get_jit_cache_dir(): return {modules!r}\n"
        "def get_jit_cache_providers(): return (SimpleNamespace(provider_id='fake', "
        "distribution='flashinfer-jit-cache', version=__version__, jit_cache_dir="
        f"{modules!r}, cuda_architectures=('sm120a',), modules=({MODULE!r},)),)\n"
    )
    said, errors = ask(python, tmp_path, PYTHONPATH=str(tmp_path))
    assert said.get("aot", False) is False
    assert f"flashinfer-jit-cache version ({version}) does not match" in errors
    allowed, errors = ask(
        python, tmp_path, PYTHONPATH=str(tmp_path), FLASHINFER_DISABLE_VERSION_CHECK="1"
    )
    assert allowed["aot"] is True, errors[-3000:]  # the control: it is that check which refuses


def test_flags_are_those_of_the_installed_package_beside_torch(
    python: Path, tools: Toolchain, patched: Mapping[Upstream, Patched], tmp_path: Path
) -> None:
    """What stands in for torch while the ninja file is made changes nothing in it."""
    root, state = tmp_path / "root", patched["flashinfer"]
    root.mkdir()
    lay_out(state.store, state.tree.tree, root)
    tools.prefix(root / "cuda")
    (root / "tvm_ffi").symlink_to(tools.tvm_ffi)
    (root / "python").symlink_to(sysconfig.get_path("include"))
    ours = compiling._generate(root)
    said, errors = ask(
        python, tmp_path, CUDA_HOME=str(root / "cuda"), PATH=os.environ["PATH"],
        FLASHINFER_EXTRA_CUDAFLAGS=compiling._FLAGS,
        then='spec.write_ninja(); said["ninja"] = spec.ninja_path.read_text()',
    )  # fmt: skip
    assert said, errors[-3000:]
    theirs: str = said["ninja"]
    theirs = re.sub(r"\S+/cached_ops/sparse_mla_sm120/", "out/", theirs)
    for long, short in (
        (f"{root}/", ""),
        (f"{site(python).resolve()}/tvm_ffi/include", "tvm_ffi"),
        (f"{site(python)}/tvm_ffi/include", "tvm_ffi"),
        (f"{site(python).resolve()}/", ""),
        (f"{site(python)}/", ""),
        (sysconfig.get_path("include"), "python"),
    ):
        theirs = theirs.replace(long, short)
    assert theirs == ours


def test_the_same_bytes_from_nothing_elsewhere(
    patched: Mapping[Upstream, Patched], tools: Toolchain, made: Mapping[str, Any], tmp_path: Path
) -> None:
    state = patched["flashinfer"]
    again = compile_module(
        state.store, state.tree.tree, replace(tools, ccache=None), tmp_path, jobs=2
    )
    assert set(again.objects.values()) == {"compiled"}
    with zipfile.ZipFile(made["wheel"]["path"]) as archive:
        assert archive.read(f"{PACKAGE}/modules/{MODULE}/{MODULE}.so") == again.module
    assert again.inputs == made["states"]["patched"]["inputs"]
