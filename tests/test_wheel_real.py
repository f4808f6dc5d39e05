"""Overlay wheels of the pinned releases, and the upstreams' own builds of the same trees.

The fast half makes overlays of the real wheels. The slow half builds the same patched tree with
the upstream's own backend, without a network, and compares member by member: that is the proof
that an overlay is what a build would have made. It needs ``BUILD_REQUIREMENTS`` in the
interpreter that runs the tests, which the nox session ``wheel-peers`` sees to.
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

import platformdirs
import pytest

from overlay import distinfo, layout
from overlay.index import fetch_release
from overlay.inspect import inspect_wheel
from overlay.report import Reporter
from overlay.wheel import Change, flashinfer_build_meta, overlay_wheel, vllm_version_file
from tests.support.wheels import canonical, effect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BUILD_REQUIREMENTS = (
    "apache-tvm-ffi>=0.1.6,!=0.1.8,!=0.1.8.post0,<0.2",
    "build",
    "cmake>=3.26.1",
    "jinja2",
    "ninja",
    "packaging>=24.2",
    "setuptools==80.10.2",  # what made vLLM's wheel, and states itself in it
    "setuptools-rust>=1.9.0",
    "setuptools-scm>=8.0",
    "wheel",
)

pytestmark = pytest.mark.real


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a pinned release is, and a patch that touches each kind of shipped file."""

    upstream: Literal["vllm", "flashinfer"]
    project: str
    version: str
    commit: str
    sdist: tuple[str, str]
    wheel: tuple[str, str]
    version_file: str
    rewrite: Callable[[bytes, str, str], bytes]
    requirements: Mapping[str, str]
    patched: Mapping[str, bytes | None]


VLLM = Pin(
    "vllm",
    "vllm",
    "0.28.0",
    "2cf0a6915ce544dc493a0990f2ea38d81601128a",
    (
        "vllm-0.28.0.tar.gz",
        "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
    ),
    (
        "vllm-0.28.0-cp38-abi3-manylinux_2_28_x86_64.whl",
        "addb0ffdaafd8155d75e9b3f5ddb3da28fdee9e8a7097ede91f7db2e9e1a3889",
    ),
    "vllm/_version.py",
    vllm_version_file,
    {"flashinfer-python": "==0.6.18rc10"},
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
FLASHINFER = Pin(
    "flashinfer",
    "flashinfer-python",
    "0.6.18rc10",
    "e62941a1da605fb9b3c8c50b23c9720df12cf6b4",
    (
        "flashinfer_python-0.6.18rc10.tar.gz",
        "c5fb02b6b900f1f43968f7338eefcdfc74d32e4ab3407e4e8e317543f2a10405",
    ),
    (
        "flashinfer_python-0.6.18rc10-py3-none-any.whl",
        "1c95e874f490c7a86a0f1b6504757f989a6ca72a5eafffd4f8e9361df4f7b9d8",
    ),
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
def release() -> Callable[[str, tuple[str, str]], Path]:
    """Path of a pinned release file, fetched once into the user's cache."""
    found = os.environ.get("VLLM_OVERLAY_CACHE")
    cache = Path(found) if found else platformdirs.user_cache_path("vllm-overlay")

    def get(project: str, file: tuple[str, str]) -> Path:
        return fetch_release(
            project, *file, cache=cache, offline=False, report=Reporter(quiet=True)
        )

    return get


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def patch_tree(root: Path, pin: Pin) -> None:
    """Apply ``pin.patched``: append to a file that is there, write one that isn't."""
    for path, data in pin.patched.items():
        file = root / path
        if data is None:
            file.unlink()
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab") as out:
                out.write(data)


def overlay(pin: Pin, wheel: Path, root: Path, out: Path) -> Path:
    """The overlay of a wheel by what ``pin.patched`` made of the tree at ``root``."""
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(archive.namelist())
    changes, effects = [], []
    for path, change in pin.patched.items():
        data = None if change is None else (root / path).read_bytes()
        effects.append(effect(path, data))
        ship = layout.wheel_path(pin.upstream, path, names)
        assert not isinstance(ship, layout.BuildInput), path
        if isinstance(ship, layout.Shipped):
            changes.append(Change(path=ship.name, data=data))
    series = {"vllm": [], "flashinfer": []} | {pin.upstream: [{"name": "all", "effect": effects}]}
    record = canonical({"series": series, "requirements": dict(pin.requirements)})
    version = distinfo.overlay_version(pin.version, record)
    local = version.partition("+")[2]
    return overlay_wheel(
        wheel,
        pin.wheel[1],
        out,
        version=version,
        changes=changes,
        requirements={name: f"{name}{text}+{local}" for name, text in pin.requirements.items()},
        record=record,
        rewrites={pin.version_file: lambda data: pin.rewrite(data, version, pin.commit)},
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


@pytest.mark.parametrize("pin", [VLLM, FLASHINFER], ids=lambda pin: pin.upstream)
def test_an_overlay_of_nothing_keeps_everything(
    pin: Pin, release: Callable[[str, tuple[str, str]], Path], tmp_path: Path
) -> None:
    wheel = release(pin.project, pin.wheel)
    record = canonical({})
    version = distinfo.overlay_version(pin.version, record)
    result = overlay_wheel(
        wheel,
        pin.wheel[1],
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
    old, new = (f"{pin.project.replace('-', '_')}-{v}.dist-info/" for v in (pin.version, version))
    renamed = {name.replace(old, new): entry for name, entry in before.items()}
    changed = {name for name in renamed if renamed[name] != after[name]}
    assert changed == {new + "METADATA", new + "RECORD"}
    assert after.keys() - renamed.keys() == {new + "overlay.json"}


@pytest.mark.parametrize("pin", [VLLM, FLASHINFER], ids=lambda pin: pin.upstream)
def test_every_file_of_the_archive_has_its_place_in_the_wheel(
    pin: Pin, release: Callable[[str, tuple[str, str]], Path], tmp_path: Path
) -> None:
    """The map from tree to wheel, against the content of both."""
    root = unpack(release(pin.project, pin.sdist), tmp_path)
    with zipfile.ZipFile(release(pin.project, pin.wheel)) as archive:
        names = frozenset(archive.namelist())
        shipped = set()
        for file in root.rglob("*"):
            path = file.relative_to(root).as_posix()
            if not file.is_file() or path.split("/")[0].endswith(".egg-info"):
                continue
            # without the wheel's names: the rules alone must know what ships
            ship = layout.wheel_path(pin.upstream, path, frozenset())
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
        and not isinstance(layout.wheel_path(pin.upstream, name, names), layout.BuildInput)
    }
    assert unexplained == set()


@pytest.mark.slow
def test_flashinfer_equals_its_own_build(
    release: Callable[[str, tuple[str, str]], Path], tmp_path: Path
) -> None:
    pin = FLASHINFER
    root = unpack(release(pin.project, pin.sdist), tmp_path / "tree")
    patch_tree(root, pin)
    ours = overlay(pin, release(pin.project, pin.wheel), root, tmp_path / "ours")
    assert inspect_wheel(ours).problems == ()
    # outside of a git tree the backend keeps the version file that it finds
    meta = root / pin.version_file
    meta.write_bytes(pin.rewrite(meta.read_bytes(), ours.name.split("-")[1], pin.commit))
    peer = build(root, tmp_path / "peer", {"BUILD_NVEP": "0", "FLASHINFER_BUILD_NO_PIP": "1"})
    assert peer.name == ours.name
    assert differing(ours, peer) == {
        "dist-info/overlay.json",  # ours alone
        "dist-info/RECORD",  # lists it
        "dist-info/WHEEL",  # names its maker: upstream's setuptools, or the one here
    }


TORCH = {
    # setup.py asks no more of torch than this; a CPU build of the real one would make it refuse
    "torch/__init__.py": "from . import version\n__version__ = '2.13.0'\n",
    "torch/version.py": "cuda = '13.0'\nhip = None\nxpu = None\n",
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": "CUDA_HOME = None\nROCM_HOME = None\n",
}


@pytest.mark.slow
def test_vllm_equals_its_own_precompiled_build(
    release: Callable[[str, tuple[str, str]], Path], tmp_path: Path
) -> None:
    pin = VLLM
    root = unpack(release(pin.project, pin.sdist), tmp_path / "tree")
    shutil.rmtree(root / "vllm.egg-info")
    for generated in ("setup.cfg", "PKG-INFO", "vllm/_version.py"):
        (root / generated).unlink()
    patch_tree(root, pin)
    # what git tracks is what setuptools-scm has the wheel hold
    for verb in (("init", "--quiet"), ("add", "--force", "--all"), ("commit", "--quiet", "-mx")):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.invalid")
        subprocess.run(("git", "-C", str(root), *who, *verb), check=True)
    fake = tmp_path / "fake-torch"
    for path, text in TORCH.items():
        (fake / path).parent.mkdir(parents=True, exist_ok=True)
        (fake / path).write_text(text)
    wheel = release(pin.project, pin.wheel)
    ours = overlay(pin, wheel, root, tmp_path / "ours")
    assert inspect_wheel(ours).problems == ()
    env = {
        "PYTHONPATH": str(fake),
        "SETUPTOOLS_SCM_PRETEND_METADATA": f'{{node="g{pin.commit[:9]}"}}',
        "VLLM_PRECOMPILED_WHEEL_LOCATION": str(wheel),
        "VLLM_USE_PRECOMPILED": "1",
        "VLLM_VERSION_OVERRIDE": ours.name.split("-")[1],
    }
    peer = build(root, tmp_path / "peer", env, "-C--build-option=--py-limited-api=cp38")
    assert differing(ours, peer) == {
        "dist-info/overlay.json",  # ours alone
        "dist-info/RECORD",  # lists it
        "dist-info/METADATA",  # our requirement on FlashInfer
    }
    changed = _lines(ours, "METADATA") ^ _lines(peer, "METADATA")
    assert {line.partition("==")[0] for line in changed} == {"Requires-Dist: flashinfer-python"}


def _lines(wheel: Path, name: str) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return set(archive.read(path).decode().splitlines())
