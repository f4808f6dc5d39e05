"""Overlay wheels of the pinned releases, and the upstreams' own builds of the same trees.

The fast half makes overlays of the real wheels. The slow half builds the same patched tree with
the upstream's own backend, without a network, and compares member by member: that is the proof
that an overlay is what a build would have made. It needs the dependency group
``wheel-peers`` in the interpreter that runs the tests; the nox session of that name sees to it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from overlay.lines.line import PROJECTS, Pin, Settings, Upstream, read_line, read_toml
from overlay.report import Reporter
from overlay.sources.index import fetch_release
from overlay.sources.source import Sources
from overlay.trees.pipeline import apply_line
from overlay.trees.store import cache_folder
from overlay.wheels import distinfo, layout
from overlay.wheels.inspect import inspect_wheel
from overlay.wheels.linewheels import build_wheels
from overlay.wheels.wheel import Change, flashinfer_build_meta, overlay_wheel, vllm_version_file
from tests.support.wheels import canonical, effect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Release = Callable[["Case", Literal["sdist", "wheel"]], Path]

pytestmark = pytest.mark.real


ROOT = Path(__file__).resolve().parents[1]
SETTINGS = read_toml(ROOT / "patches/infernal/line.toml", Settings)


@dataclass(frozen=True, slots=True)
class Case:
    """An upstream of the line, and a patch that touches each kind of path that it has."""

    upstream: Upstream
    version_file: str
    rewrite: Callable[[bytes, str, str], bytes]
    requirements: Mapping[str, str]
    patched: Mapping[str, bytes | None]

    @property
    def pin(self) -> Pin:
        return SETTINGS.vllm if self.upstream == "vllm" else SETTINGS.flashinfer

    @property
    def commit(self) -> str:
        return self.pin.commit_text


VLLM = Case(
    "vllm",
    "vllm/_version.py",
    vllm_version_file,
    {"flashinfer-python": f"=={SETTINGS.flashinfer.version}"},
    {
        "vllm/envs.py": b"\n# patched\n",
        "vllm/v1/worker/gpu/warmup.py": b"\n# patched\n",
        "vllm/v1/worker/gpu/README.md": b"\npatched\n",
        "vllm/v1/attention/backends/mla/added.py": b"ADDED = True\n",
        "vllm/added_folder/added.txt": b"git tracks it, so the wheel has it\n",
        "vllm/added_folder/.hidden": b"git tracks it, so the wheel has it\n",
        "vllm/added_folder/added.cuh": b"// git tracks it, so the wheel has it\n",
        "vllm/collect_env.py": None,
        "vllm/distributed/kv_transfer/README.md": None,
        "tests/added.py": b"SHIPPED = False\n",
        "docs/added.md": b"not shipped\n",
        "tools/pre_commit/added.py": b"SHIPPED = False\n",
    },
)
FLASHINFER = Case(
    "flashinfer",
    "flashinfer/_build_meta.py",
    flashinfer_build_meta,
    {},
    {
        "csrc/sparse_mla_sm120_prefill.cu": b"\n// patched\n",
        "csrc/added/added.cu": b"// every file below csrc ships\n",
        "csrc/added/.hidden": b"save hidden ones\n",
        "include/flashinfer/added.cuh": b"// every file below include ships\n",
        "include/flashinfer/utils.cuh": b"\n// patched\n",
        "3rdparty/spdlog/include/spdlog/version.h": b"\n// patched\n",
        "3rdparty/cccl/python/added.txt": b"not shipped\n",
        "flashinfer/mla/__init__.py": b"\n# patched\n",
        "flashinfer/mla/added.py": b"ADDED = True\n",
        "flashinfer/mla/added.txt": b"not in package-data\n",
        "flashinfer/cute_dsl/sparse/sm100_blk64/added.cu": b"// in package-data\n",
        "flashinfer/collect_env.py": None,
        "csrc/sparse_mla_sm120_decode_dsv4.cu": None,
        "tests/added.py": b"SHIPPED = False\n",
    },
)


@pytest.fixture(scope="session")
def release() -> Callable[[Case, Literal["sdist", "wheel"]], Path]:
    """Path of a pinned release file, fetched once into the user's cache."""
    cache = cache_folder()

    def get(case: Case, kind: Literal["sdist", "wheel"]) -> Path:
        file = case.pin.sdist if kind == "sdist" else case.pin.wheel
        return fetch_release(
            PROJECTS[case.upstream],
            file.file,
            file.sha256,
            cache=cache,
            offline=False,
            report=Reporter(quiet=True),
        )

    return get


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def patch_tree(root: Path, case: Case) -> None:
    """Apply ``case.patched``: append to a file that is there, write one that isn't."""
    for path, data in case.patched.items():
        file = root / path
        if data is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as out:
                out.write(data)


def overlay(case: Case, wheel: Path, root: Path, out: Path) -> Path:
    """The overlay of a wheel by what ``case.patched`` made of the tree at ``root``."""
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(archive.namelist())
    changes, effects = [], []
    for path, change in case.patched.items():
        data = None if change is None else (root / path).read_bytes()
        effects.append(effect(path, data))
        ship = layout.wheel_path(case.upstream, path, names)
        assert not isinstance(ship, layout.BuildInput), path
        if isinstance(ship, layout.Shipped):
            changes.append(Change(path=ship.name, data=data))
    series = {"vllm": [], "flashinfer": []} | {case.upstream: [{"name": "all", "effect": effects}]}
    record = canonical({"series": series, "requirements": dict(case.requirements)})
    version = distinfo.overlay_version(case.pin.version, record)
    local = version.partition("+")[2]
    return overlay_wheel(
        wheel,
        case.pin.wheel.sha256,
        out,
        version=version,
        changes=changes,
        requirements={name: f"{name}{text}+{local}" for name, text in case.requirements.items()},
        record=record,
        rewrites={case.version_file: lambda data: case.rewrite(data, version, case.commit)},
        report=Reporter(quiet=True),
    )


def build(root: Path, out: Path, env: Mapping[str, str], *options: str) -> Path:
    """Build a wheel with the upstream's own backend; no network, no isolation."""
    isolated = ("unshare", "-rn") if _can_unshare() else ()
    dead = "http://127.0.0.1:9"  # where network namespaces can't be had: a proxy that isn't there
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), dead)
    argv = (
        *(*isolated, sys.executable, "-m", "build", "--wheel", "--no-isolation"),
        *("--skip-dependency-check", "--outdir", str(out), *options, str(root)),
    )
    done = subprocess.run(
        argv,
        cwd=out.parent,  # where no build.py stands in the way of the module
        env={**os.environ, **proxies, "PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": "315532800", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    (wheel,) = out.glob("*.whl")
    return wheel


def _can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(("unshare", "-rn", "true"), check=False).returncode == 0


def members(wheel: Path) -> dict[str, tuple[bytes, bool]]:
    """Content hash and executable bit by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename: (
                hashlib.sha256(archive.read(info)).digest(),
                bool(info.external_attr >> 16 & stat.S_IXUSR),
            )
            for info in archive.infolist()
        }


def differing(ours: Path, peer: Path) -> set[str]:
    """Names of members that aren't the same in both, the version left out of dist-info's."""
    a, b = members(ours), members(peer)
    names = {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    return {
        "dist-info/" + name.partition("/")[2] if ".dist-info/" in name else name for name in names
    }


@pytest.mark.parametrize("case", [VLLM, FLASHINFER], ids=lambda case: case.upstream)
def test_an_overlay_of_nothing_keeps_everything(
    case: Case, release: Release, tmp_path: Path
) -> None:
    wheel = release(case, "wheel")
    record = canonical({})
    version = distinfo.overlay_version(case.pin.version, record)
    result = overlay_wheel(
        wheel,
        case.pin.wheel.sha256,
        tmp_path,
        version=version,
        changes=[],
        requirements={},
        record=record,
        report=Reporter(quiet=True),
    )
    with zipfile.ZipFile(result) as archive:
        assert archive.testzip() is None
        order = [name for name in archive.namelist() if ".dist-info/" not in name]
    with zipfile.ZipFile(wheel) as archive:
        assert order == [name for name in archive.namelist() if ".dist-info/" not in name]
    before, after = members(wheel), members(result)
    name = PROJECTS[case.upstream].replace("-", "_")
    old, new = (f"{name}-{which}.dist-info/" for which in (case.pin.version, version))
    renamed = {name.replace(old, new): entry for name, entry in before.items()}
    changed = {name for name in renamed if renamed[name] != after[name]}
    assert changed == {new + "METADATA", new + "RECORD"}
    assert after.keys() - renamed.keys() == {new + "overlay.json"}


@pytest.mark.parametrize("case", [VLLM, FLASHINFER], ids=lambda case: case.upstream)
def test_every_file_of_the_archive_has_its_place_in_the_wheel(
    case: Case, release: Release, tmp_path: Path
) -> None:
    """The map from tree to wheel, against the content of both."""
    root = unpack(release(case, "sdist"), tmp_path)
    with zipfile.ZipFile(release(case, "wheel")) as archive:
        names = frozenset(archive.namelist())
        shipped = set()
        for file in root.rglob("*"):
            path = file.relative_to(root).as_posix()
            if not file.is_file() or path.split("/")[0].endswith(".egg-info"):
                continue
            # without the wheel's names: the rules alone must know what ships
            ship = layout.wheel_path(case.upstream, path, frozenset())
            if isinstance(ship, layout.Shipped):
                assert ship.name in names, path
                assert archive.read(ship.name) == file.read_bytes(), path
                shipped.add(ship.name)
            elif isinstance(ship, layout.NotShipped):
                assert path not in names
    unexplained = {
        name
        for name in names - shipped
        if ".dist-info/" not in name
        and not isinstance(layout.wheel_path(case.upstream, name, names), layout.BuildInput)
    }
    assert unexplained == set()


@pytest.mark.slow
def test_flashinfer_equals_its_own_build(release: Release, tmp_path: Path) -> None:
    case = FLASHINFER
    root = unpack(release(case, "sdist"), tmp_path / "tree")
    patch_tree(root, case)
    ours = overlay(case, release(case, "wheel"), root, tmp_path / "ours")
    assert inspect_wheel(ours).problems == ()
    check_flashinfer_peer(ours, build_flashinfer(root, tmp_path / "peer", _version(ours)))


def build_flashinfer(root: Path, out: Path, version: str) -> Path:
    """FlashInfer's own build of the tree at ``root`` (an unpacked sdist, patched)."""
    # outside of a git tree the backend keeps the version file that it finds
    meta = root / FLASHINFER.version_file
    meta.write_bytes(flashinfer_build_meta(meta.read_bytes(), version, FLASHINFER.commit))
    return build(root, out, {"BUILD_NVEP": "0", "FLASHINFER_BUILD_NO_PIP": "1"})


def check_flashinfer_peer(ours: Path, peer: Path) -> None:
    assert peer.name == ours.name
    assert differing(ours, peer) == {
        "dist-info/overlay.json",  # ours alone
        "dist-info/RECORD",  # lists it
        "dist-info/WHEEL",  # names its maker: upstream's setuptools, or the one here
    }


# Both modules are needed by what env.py imports, and fakes: torch isn't at hand where tests run.
_ASK_FLASHINFER = """
import sys, types
root = sys.argv[1]
for name in ("flashinfer", "flashinfer.jit"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [root + "/" + name.replace(".", "/")]
context = types.ModuleType("flashinfer.compilation_context")
context.CompilationContext = type("Fake", (), {"TARGET_CUDA_ARCHS": {(12, "0a")}})
sys.modules[context.__name__] = context
from flashinfer.jit import env
print(env.FLASHINFER_WORKSPACE_DIR)
"""


@pytest.mark.parametrize("series", ["none", "infernal"])
def test_what_flashinfer_says_to_the_version_at_import(
    series: str, release: Release, tmp_path: Path
) -> None:
    """See ``overlay.wheels.distinfo.flashinfer_build_meta`` for why it is what we want."""
    case = FLASHINFER
    root = tmp_path / "tree"
    nothing = Case(case.upstream, case.version_file, case.rewrite, {}, {})
    wheel = overlay(nothing, release(case, "wheel"), root, tmp_path / "ours")
    with zipfile.ZipFile(wheel) as archive:
        for name in ("version", "_build_meta", "jit/env"):
            archive.extract(f"flashinfer/{name}.py", root)
    if series != "none":
        (root / "flashinfer/jit/env.py").write_bytes(patched_file("flashinfer/jit/env.py"))

    def ask(**env: str) -> subprocess.CompletedProcess[str]:
        argv = (sys.executable, "-c", _ASK_FLASHINFER, str(root))
        own = {"PYTHONPATH": str(root), "HOME": str(tmp_path), **env}
        return subprocess.run(argv, env=own, capture_output=True, text=True, check=False)

    def refused(companion: str, stated: str) -> bool:
        fake = root / f"{companion}.py"
        fake.write_text(
            f"__version__ = {stated!r}\nget_cubin_dir = get_jit_cache_dir = lambda: '/none'\n"
        )
        answer = ask()
        assert ask(FLASHINFER_DISABLE_VERSION_CHECK="1").returncode == 0
        fake.unlink()
        assert (answer.returncode != 0) == ("does not match" in answer.stderr), answer.stderr
        return answer.returncode != 0

    version = _version(wheel)
    # kernels that were compiled from other sources are out of reach
    assert f"/flashinfer/{version}/120a" in ask().stdout
    assert refused("flashinfer_jit_cache", f"{case.pin.version}+cu130")
    # cubins come from no source that a patch can touch; the patch 'cubin-version' says so
    assert refused("flashinfer_cubin", case.pin.version) == (series == "none")
    assert not refused("flashinfer_cubin", version)
    for other in ("0.6.18", f"{case.pin.version}+other", f"{case.pin.version}.post1"):
        assert refused("flashinfer_cubin", other), other


def patched_file(path: str) -> bytes:
    """A file of the patched FlashInfer tree that the line ``infernal`` makes."""
    sources = Sources(cache=cache_folder(), report=Reporter(quiet=True))
    patched = apply_line(
        read_line(ROOT / "patches", "infernal"), sources, upstreams=(FLASHINFER.upstream,)
    )[FLASHINFER.upstream]
    blob = patched.store.reader.get(patched.tree.final()[path].blob)
    assert blob
    return blob[2]


TORCH = {
    # setup.py asks no more of torch than this; a CPU build of the real one would make it refuse
    "torch/__init__.py": "from . import version\n__version__ = '2.13.0'\n",
    "torch/version.py": "cuda = '13.0'\nhip = None\nxpu = None\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = None\nROCM_HOME = None\n",
}


def build_vllm(root: Path, out: Path, wheel: Path, version: str, commit: str) -> Path:
    """vLLM's own precompiled build of the tree at ``root`` (an unpacked sdist, patched)."""
    shutil.rmtree(root / "vllm.egg-info")
    for generated in ("setup.cfg", "PKG-INFO", "vllm/_version.py"):
        (root / generated).unlink()
    # what git tracks is what setuptools-scm has the wheel hold
    for verb in (("init", "--quiet"), ("add", "--force", "--all"), ("commit", "--quiet", "-mx")):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.invalid")
        own = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        subprocess.run(("git", "-C", str(root), *who, *verb), check=True, env=own)
    fake = out.with_name("fake-torch")
    for path, text in TORCH.items():
        (fake / path).parent.mkdir(parents=True, exist_ok=True)
        (fake / path).write_text(text)
    env = {
        "PYTHONPATH": str(fake),
        "SETUPTOOLS_SCM_PRETEND_METADATA": f'{{node="g{commit[:9]}"}}',
        "VLLM_PRECOMPILED_WHEEL_LOCATION": str(wheel),
        "VLLM_USE_PRECOMPILED": "1",
        "VLLM_VERSION_OVERRIDE": version,
    }
    return build(root, out, env, "-C--build-option=--py-limited-api=cp38")


@pytest.mark.slow
def test_vllm_equals_its_own_precompiled_build(release: Release, tmp_path: Path) -> None:
    case = VLLM
    root = unpack(release(case, "sdist"), tmp_path / "tree")
    patch_tree(root, case)
    wheel = release(case, "wheel")
    ours = overlay(case, wheel, root, tmp_path / "ours")
    assert inspect_wheel(ours).problems == ()
    check_vllm_peer(ours, build_vllm(root, tmp_path / "peer", wheel, _version(ours), case.commit))


@pytest.mark.slow
def test_infernal_equals_the_upstreams_own_builds(release: Release, tmp_path: Path) -> None:
    """The line itself: our wheels, and what the upstreams' builds make of the same trees."""
    line = read_line(ROOT / "patches", "infernal")
    sources = Sources(cache=cache_folder(), report=Reporter(quiet=True))
    patched = apply_line(line, sources)
    built = build_wheels(line, patched, sources, tmp_path / "ours", Reporter(quiet=True))
    ours = {one.upstream: one.path for one in built}
    trees = {}
    for case in (VLLM, FLASHINFER):
        trees[case.upstream] = root = unpack(release(case, "sdist"), tmp_path / case.upstream)
        state = patched[case.upstream]
        for effect_ in state.tree.final().values():
            blob = state.store.reader.get(effect_.blob)
            assert blob, "no patch of the line deletes a file"
            (root / effect_.path).write_bytes(blob[2])
    wheel = release(VLLM, "wheel")
    version = _version(ours["vllm"])
    peer = build_vllm(trees["vllm"], tmp_path / "peer-vllm", wheel, version, VLLM.commit)
    check_vllm_peer(ours["vllm"], peer)
    peer = build_flashinfer(trees["flashinfer"], tmp_path / "peer-fi", _version(ours["flashinfer"]))
    check_flashinfer_peer(ours["flashinfer"], peer)


def check_vllm_peer(ours: Path, peer: Path) -> None:
    assert differing(ours, peer) == {
        "dist-info/overlay.json",  # ours alone
        "dist-info/RECORD",  # lists it
        "dist-info/METADATA",  # our requirement on FlashInfer
    }
    changed = _lines(ours, "METADATA") ^ _lines(peer, "METADATA")
    assert {line.partition("==")[0] for line in changed} == {"Requires-Dist: flashinfer-python"}


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _lines(wheel: Path, name: str) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return set(archive.read(path).decode().splitlines())
