"""Both wheels of a line, installed by pip and by uv, and what resolvers make of them.

Slow and large: real wheels, their real requirements, the machine's real package index. Two
questions are kept apart. *Resolving* is asked for a GPU machine, with everything that vLLM
requires, and installs nothing. *Installing* is done on this machine, with a CPU build of torch
where a find-links folder has one (else the index's CUDA build is taken: some gigabytes more),
without the few packages that break an import beside it (``installers.UNUSABLE_ON_CPU``).

``nox -s install -- LINE [pip|uv]`` runs this for a line.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from overlay.lines.line import PROJECTS, Line, read_line
from overlay.wheels import layout
from tests.support.installers import (
    Chosen,
    Installer,
    Pip,
    Uv,
    fingerprints,
    make_venv,
    run,
    sha256,
    size_of,
    wheel_metadata,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = [pytest.mark.real, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "tests" / "install" / "check_imports.py"
LOG = logging.getLogger(__name__)
FLASHINFER = PROJECTS["flashinfer"]


@pytest.fixture(scope="session")
def line() -> Line:
    """The line of the variable ``OVERLAY_INSTALL_LINE``, which the nox session sets."""
    return read_line(ROOT / "patches", os.environ.get("OVERLAY_INSTALL_LINE", "infernal"))


@pytest.fixture(scope="session")
def wheels(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Both wheels of the line by project, built into one folder that has nothing else."""
    out = tmp_path_factory.mktemp("wheels")
    command = (sys.executable, str(ROOT / "build.py"), "--patches", str(ROOT / "patches"))
    run(*command, "wheel", line.name, "--out", str(out)).check()
    found = {project_of(file): file for file in out.glob("*.whl")}
    assert sorted(found) == sorted(PROJECTS.values())
    yield found
    shutil.rmtree(out)  # pytest would keep three of them


@pytest.fixture(params=["pip", "uv"])
def installer(request: pytest.FixtureRequest) -> Installer:
    if request.param == "pip":
        return Pip()
    pytest.importorskip("uv", reason="uv isn't here: it is in the dependency group 'install'")
    return Uv()


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """The interpreter of an empty environment, which is removed after the test: it grows large."""
    folder = tmp_path / "venv"
    yield make_venv(folder)
    shutil.rmtree(folder)


@pytest.fixture
def constraints(tmp_path: Path, line: Line) -> str:
    """Keeps to the torch of a GPU machine: ``===`` doesn't take a CPU build for it."""
    file = tmp_path / "constraints.txt"
    file.write_text(f"torch==={line.settings.torch}\n", encoding="utf-8")
    return f"--constraint={file}"


def project_of(wheel: Path) -> str:
    return canonicalize_name(wheel_metadata(wheel)["name"])


def version(wheel: Path) -> str:
    return str(wheel_metadata(wheel)["version"])


def chosen(answer: Mapping[str, Chosen] | str) -> Mapping[str, Chosen]:
    assert not isinstance(answer, str), answer[-4000:]
    return answer


def test_both_wheels_install_and_import(
    installer: Installer, python: Path, wheels: dict[str, Path], line: Line, tmp_path: Path
) -> None:
    installer.install(python, f"torch=={line.settings.torch}").check()
    torch = fingerprints(python)["torch"]
    began = time.monotonic()
    installer.install_on_cpu(python, list(wheels.values()), tmp_path)
    seconds = time.monotonic() - began

    there = fingerprints(python)
    assert there["torch"] == torch, "the installer replaced torch"
    for project, wheel in wheels.items():
        assert there[project][0] == version(wheel)
    LOG.info(
        "%s: %d packages in %.0f s, %.2f GB, torch %s",
        type(installer).__name__,
        len(there),
        seconds,
        size_of(python.parent.parent) / 1e9,
        torch[0],
    )
    assert not installer.dropped() & {canonicalize_name(name) for name in there}

    found = check_imports(python)
    assert found["ok"], found["wrong"]
    assert found["dists"] == {project: version(wheel) for project, wheel in wheels.items()}
    # the index's CUDA build is 2.13.0 by its metadata and 2.13.0+cu130 by its own word
    assert Version(found["torch"]).public == line.settings.torch
    assert_all_patched_files_checked(found, line)
    assert_only_dropped_are_missing(installer, python, found["unmet"])
    assert_as_recorded_but_for_shared(python, found["shared"])

    # our versions satisfy upstream's version numbers: naming those brings nothing else in
    for upstream, project in PROJECTS.items():
        wanted = f"{project}=={line.pin(upstream).version}"
        installer.install(python, "--no-deps", "--no-index", wanted).check()
    assert fingerprints(python) == there

    assert_tampering_is_seen(python, found)


def check_imports(python: Path) -> dict[str, Any]:
    began = time.monotonic()
    done = run(str(python), "-I", "-W", "ignore", str(CHECK))
    start = done.output.rfind("\n{\n") + 1 if not done.output.startswith("{\n") else 0
    assert done.output[start:].startswith("{"), done.output[-4000:]
    found: dict[str, Any] = json.loads(done.output[start:])
    LOG.info("imports took %.0f s: %s", time.monotonic() - began, found.get("modules"))
    return {**found, "ok": done.ok}


def inspect(python: Path) -> list[dict[str, str]]:
    """The problems that ``vllm-overlay inspect --installed`` finds; it must look at both wheels."""
    command = (sys.executable, str(ROOT / "build.py"), "inspect", "--installed", "--json")
    done = run(*command, "--python", str(python))
    found = json.loads(done.output)["found"]
    assert sorted(one["name"] for one in found) == sorted(PROJECTS.values())
    problems = [problem for one in found for problem in one["problems"]]
    assert done.ok == (not problems), done.output[-4000:]
    return problems


def assert_as_recorded_but_for_shared(python: Path, shared: dict[str, list[str]]) -> None:
    """FlashInfer's wheel and torch-c-dlpack-ext's both have a ``build_backend.py`` at the top.

    No import needs it, and which of the two is there depends on the order of installation.
    """
    assert not [path for path in shared if path.startswith(("vllm/", "flashinfer/"))]
    assert inspect(python) == []
    LOG.info("shared with other distributions: %s", shared)


def assert_all_patched_files_checked(found: dict[str, Any], line: Line) -> None:
    """What the check left out must be what wheels leave out; every patched module was imported."""
    for upstream in PROJECTS:
        for patch in line.series[upstream]:
            for file in patch.files:
                ship = layout.wheel_path(upstream, file.path.decode(), found["files"])
                if isinstance(ship, layout.Shipped):
                    assert ship.name in found["files"]
                else:
                    assert file.path.decode() in found["not_shipped"]
    modules = [name for name in found["files"] if name.endswith(".py")]
    assert modules
    for name in modules:
        assert (
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            in (found["modules"])
        )


def assert_only_dropped_are_missing(
    installer: Installer, python: Path, unmet: list[list[str]]
) -> None:
    """Nothing is of a wrong version, and nothing is missing but what was left out on purpose."""
    dropped = installer.dropped()
    wrong = [
        row for row in unmet if row[2] or canonicalize_name(Requirement(row[1]).name) not in dropped
    ]
    assert not wrong
    complaints = installer.complaints(python)
    assert len(complaints) == len(unmet), complaints
    for complaint in complaints:
        assert "not installed" in complaint
        assert any(name in canonicalize_name(complaint) for name in dropped)


def assert_tampering_is_seen(python: Path, found: dict[str, Any]) -> None:
    """The checks above can fail: change one patched file, and they do."""
    name = next(name for name in found["files"] if name.endswith(".py"))
    (site,) = python.parent.parent.glob("lib/python*/site-packages")
    data = (site / name).read_bytes()
    (site / name).unlink()  # it may be a hard link into the installer's cache
    (site / name).write_bytes(data + b"\n")
    again = check_imports(python)
    assert not again["ok"]
    assert list(again["wrong"]) == [name]
    assert name in [problem["path"] for problem in inspect(python)]


@pytest.mark.parametrize("named", ["both-files", "find-links"])
def test_a_gpu_machine_can_have_them(
    installer: Installer,
    python: Path,
    wheels: dict[str, Path],
    line: Line,
    constraints: str,
    named: str,
    tmp_path: Path,
) -> None:
    """All that vLLM and FlashInfer require at once, CUDA torch and CUTLASS DSL among it."""
    vllm, ours = wheels["vllm"], wheels[FLASHINFER]
    how = [str(vllm), str(ours)] if named == "both-files" else [str(vllm), f"-f{vllm.parent}"]
    found = chosen(installer.resolve(python, tmp_path, constraints, *how))
    assert_a_gpu_set(found, wheels, line)


@pytest.mark.parametrize("minor", ["3.11", "3.12", "3.13"])
def test_uv_finds_a_set_for_every_python_of_the_line(
    python: Path,
    wheels: dict[str, Path],
    line: Line,
    constraints: str,
    minor: str,
    tmp_path: Path,
) -> None:
    """Not pip: it resolves for the interpreter at hand only."""
    pytest.importorskip("uv", reason="uv isn't here: it is in the dependency group 'install'")
    assert set(line.settings.python) <= {"3.11", "3.12", "3.13"}
    if minor not in line.settings.python:
        pytest.skip(f"{line.name} isn't for Python {minor}")
    links = f"--find-links={wheels['vllm'].parent}"
    target = (f"--python-version={minor}", "--python-platform=x86_64-manylinux_2_28")
    found = chosen(Uv().resolve(python, tmp_path, str(wheels["vllm"]), links, constraints, *target))
    assert_a_gpu_set(found, wheels, line)


def assert_a_gpu_set(found: Mapping[str, Chosen], wheels: dict[str, Path], line: Line) -> None:
    assert found["vllm"].version == version(wheels["vllm"])
    assert found[FLASHINFER].version == version(wheels[FLASHINFER])
    assert found[FLASHINFER].sha256 == sha256(wheels[FLASHINFER])
    assert found["torch"].version == line.settings.torch
    for wheel in wheels.values():
        for text in wheel_metadata(wheel)["requires_dist"]:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                got = found[canonicalize_name(wanted.name)].version
                assert wanted.specifier.contains(got, prereleases=True), (text, got)


def test_upstream_flashinfer_is_never_taken_for_ours(
    installer: Installer,
    python: Path,
    wheels: dict[str, Path],
    line: Line,
    constraints: str,
    tmp_path: Path,
) -> None:
    pin = line.pin("flashinfer")
    upstream = f"{FLASHINFER}=={pin.version}"
    offered = chosen(installer.resolve(python, tmp_path, upstream, "--no-deps"))
    # the control: the index is reached, and upstream's build of the same number is to be had
    assert offered[FLASHINFER] == Chosen(version=pin.version, sha256=pin.wheel.sha256)

    refusal = installer.resolve(python, tmp_path, constraints, str(wheels["vllm"]))
    assert isinstance(refusal, str), f"took {FLASHINFER} {refusal[FLASHINFER].version}"
    assert f"{FLASHINFER}=={version(wheels[FLASHINFER])}" in refusal
