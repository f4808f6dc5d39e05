from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import MachineError, WheelError
from overlay.report import Reporter
from overlay.wheels import distinfo
from overlay.wheels.inspect import Inspection, inspect_installed, inspect_wheel
from overlay.wheels.wheel import Change, overlay_wheel
from tests.support.wheels import (
    canonical,
    effect,
    make_wheel,
    record_line,
    record_text,
    sha256,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = {
    "vllm/__init__.py": b"x = 1\n",
    "vllm/kept.py": b"k = 1\n",
    "vllm/gone.py": b"g = 1\n",
    "vllm/run.sh": b"#!/bin/sh\n",
    "build_backend.py": b"ours = True\n",
}
CHANGES = [
    Change(path="vllm/__init__.py", data=b"x = 3\n"),
    Change(path="vllm/added.py", data=b"a = 1\n", mode=0o100755),
    Change(path="vllm/gone.py", data=None),
]
EFFECTS = [
    [effect("vllm/__init__.py", b"x = 2\n"), effect("tests/x.py", b"nowhere\n")],
    [
        effect("vllm/__init__.py", b"x = 3\n"),  # the last effect on a path counts
        effect("vllm/added.py", b"a = 1\n", "100755"),
        effect("vllm/gone.py", None),
    ],
]
DOCUMENT: dict[str, Any] = {
    "series": {
        "vllm": [{"name": f"p{n}", "effect": effects} for n, effects in enumerate(EFFECTS)],
        "flashinfer": [],
    },
    "requirements": {"torch": "==2.13.0", "flashinfer-python": "==0.6.18rc10"},
}


def build(
    tmp_path: Path,
    document: dict[str, Any] | None = None,
    changes: list[Change] | None = None,
    record: bytes | None = None,
    requirements: dict[str, str] | None = None,
) -> Path:
    base = make_wheel(tmp_path, FILES)
    record = record or canonical(DOCUMENT if document is None else document)
    version = distinfo.overlay_version("0.28.0", record)
    local = version.partition("+")[2]
    if requirements is None:
        requirements = {"flashinfer-python": f"flashinfer-python==0.6.18rc10+{local}"}
    return overlay_wheel(
        base,
        sha256(base),
        tmp_path / "out",
        version=version,
        changes=CHANGES if changes is None else changes,
        requirements=requirements,
        record=record,
        report=Reporter(quiet=True),
    )


def tamper(
    wheel: Path,
    edit: Callable[[dict[str, bytes]], None],
    *,
    modes: dict[str, int] | None = None,
    honest: bool = False,
) -> None:
    """Write a wheel again with other content; ``honest``: RECORD goes along."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
        old = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    own = next(name for name in files if name.endswith("/RECORD"))
    edit(files)
    if honest:
        lines = [record_line(name, data) for name, data in files.items() if name != own]
        files[own] = record_text([*lines, (own, "", "")])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (modes or {}).get(name, old.get(name, 0o100644)) << 16
            archive.writestr(info, data)


def kinds(inspection: Inspection) -> set[tuple[str, str]]:
    """All but that ``tamper`` writes another zip: each test is about what else is seen."""
    return {(problem.kind, problem.path) for problem in inspection.problems} - {("form", "")}


def info_of(wheel: Path) -> str:
    name, version, *_ = wheel.name.split("-")
    return f"{name}-{version}.dist-info"


def test_a_wheel_that_is_what_it_says(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    found = inspect_wheel(wheel)
    assert found.problems == ()
    assert found.error() is None
    assert (found.name, found.version) == ("vllm", wheel.name.split("-")[1])
    assert found.record is not None
    assert found.record["line"] == "infernal"
    assert found.effects == 3, "three shipped paths; tests/ isn't"
    with zipfile.ZipFile(wheel) as archive:
        assert found.files == len(archive.namelist()) - 1, "all but RECORD"


def test_content_that_differs_from_record(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    tamper(wheel, lambda files: files.update({"vllm/kept.py": b"k = 2\n"}))
    found = inspect_wheel(wheel)
    assert kinds(found) == {("content", "vllm/kept.py")}
    error = found.error()
    assert isinstance(error, WheelError)
    assert "vllm/kept.py differs from its hash in RECORD" in str(error)


def test_patched_content_that_went_missing_with_a_right_record(tmp_path: Path) -> None:
    """A rebuild that lost the patches but kept the name: RECORD alone would pass it."""
    wheel = build(tmp_path)

    def lose(files: dict[str, bytes]) -> None:
        files["vllm/__init__.py"] = FILES["vllm/__init__.py"]
        files["vllm/gone.py"] = FILES["vllm/gone.py"]
        del files["vllm/added.py"]

    tamper(wheel, lose, honest=True)
    assert kinds(inspect_wheel(wheel)) == {
        ("effect", "vllm/__init__.py"),
        ("undeleted", "vllm/gone.py"),
        ("missing", "vllm/added.py"),
    }


def test_a_mode_that_differs(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    modes = {"vllm/added.py": 0o100644, "vllm/__init__.py": 0o100755}
    tamper(wheel, lambda _: None, modes=modes)
    assert kinds(inspect_wheel(wheel)) == {
        ("mode", "vllm/added.py"),
        ("mode", "vllm/__init__.py"),
    }


def test_files_and_rows_without_each_other(tmp_path: Path) -> None:
    wheel = build(tmp_path)

    def edit(files: dict[str, bytes]) -> None:
        files["vllm/extra.py"] = b""
        del files["vllm/kept.py"]

    tamper(wheel, edit)
    assert kinds(inspect_wheel(wheel)) == {
        ("unlisted", "vllm/extra.py"),
        ("missing", "vllm/kept.py"),
    }


def test_a_row_without_hash(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    own = f"{info_of(wheel)}/RECORD"

    def edit(files: dict[str, bytes]) -> None:
        row = ",".join(record_line("vllm/kept.py", files["vllm/kept.py"])).encode()
        assert row in files[own]
        files[own] = files[own].replace(row, b"vllm/kept.py,,")

    tamper(wheel, edit)
    assert kinds(inspect_wheel(wheel)) == {("no-hash", "vllm/kept.py")}


def test_a_bit_that_flipped(tmp_path: Path) -> None:
    """What an overlay of a verified, then damaged base would carry on."""
    wheel = build(tmp_path)
    data = bytearray(wheel.read_bytes())
    with zipfile.ZipFile(wheel) as archive:
        info = archive.getinfo("vllm/kept.py")
    data[info.header_offset + 30 + len(info.filename) + 3] ^= 4
    wheel.write_bytes(data)
    assert kinds(inspect_wheel(wheel)) == {("content", "vllm/kept.py")}


def test_a_record_that_was_edited(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    path = f"{info_of(wheel)}/overlay.json"

    def edit(files: dict[str, bytes]) -> None:
        record = json.loads(files[path])
        del record["series"]["vllm"][0]
        files[path] = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()

    tamper(wheel, edit, honest=True)
    assert kinds(inspect_wheel(wheel)) == {("digest", "")}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (canonical(DOCUMENT) + b"\n", "canonical"),
        (canonical(DOCUMENT | {"format": 2}), "format 2"),
        (canonical(DOCUMENT | {"series": {"vllm": []}}), "malformed"),
        (canonical(DOCUMENT | {"requirements": []}), "malformed"),
        (canonical({"series": {"vllm": [{"effect": [{}]}], "flashinfer": []}}), "malformed"),
        (b'{"line":"infernal"}', "malformed"),
        (canonical({"series": {"vllm": [{"name": 1, "effect": []}], "flashinfer": []}}), "malf"),
        (canonical(DOCUMENT | {"x": "X"}).replace(b'"X"', b'"\\ud800"'), "malformed"),
    ],
)
def test_a_record_of_no_use(tmp_path: Path, record: bytes, message: str) -> None:
    wheel = build(tmp_path, record=record)
    (problem,) = inspect_wheel(wheel).problems
    assert problem.kind == "provenance"
    assert message in problem.what


def test_a_record_that_is_too_deep(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    path = f"{info_of(wheel)}/overlay.json"
    tamper(wheel, lambda files: files.update({path: b"[" * 100_000}), honest=True)
    assert ("provenance", path) in kinds(inspect_wheel(wheel))


def test_a_record_that_names_a_build_input(tmp_path: Path) -> None:
    series = {"vllm": [{"name": "p", "effect": [effect("csrc/x.cu", b"")]}], "flashinfer": []}
    wheel = build(tmp_path, {"series": series}, changes=[])
    assert kinds(inspect_wheel(wheel)) == {("build-input", "csrc/x.cu")}


@pytest.mark.parametrize(
    "requirement", ["flashinfer-python==0.6.18rc10", "flashinfer-python==0.6.18rc10+infernal.o0"]
)
def test_a_requirement_that_lets_upstreams_build_in(tmp_path: Path, requirement: str) -> None:
    wheel = build(tmp_path, requirements={"flashinfer-python": requirement})
    assert kinds(inspect_wheel(wheel)) == {("requirement", "flashinfer-python")}


def test_metadata_of_another_version(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    path = f"{info_of(wheel)}/METADATA"

    def edit(files: dict[str, bytes]) -> None:
        files[path] = files[path].replace(b"\nVersion: 0.28.0", b"\nVersion: 0.28.1", 1)

    tamper(wheel, edit, honest=True)
    assert kinds(inspect_wheel(wheel)) == {("metadata", "")}


def test_an_upstream_wheel_has_no_record(tmp_path: Path) -> None:
    found = inspect_wheel(make_wheel(tmp_path, FILES))
    assert kinds(found) == {("no-provenance", "vllm-0.28.0.dist-info/overlay.json")}
    assert found.record is None
    assert found.files == len(FILES) + 3


def test_every_byte_of_a_wheel_counts(tmp_path: Path) -> None:
    wheel = build(tmp_path)
    whole = wheel.read_bytes()
    unseen = []

    def modes() -> list[int]:
        with zipfile.ZipFile(wheel) as archive:
            return [info.external_attr for info in archive.infolist()]

    honest = modes()
    for at in range(len(whole)):
        wheel.write_bytes(whole[:at] + bytes((whole[at] ^ 0x41,)) + whole[at + 1 :])
        try:
            # Nothing tells which permissions upstream gave to a file that no patch touches
            if not inspect_wheel(wheel).problems and modes() == honest:
                unseen.append(at)
        except WheelError:
            pass
    assert unseen == []


@pytest.mark.parametrize("edit", [b"%b\0", b"\0%b"])
def test_bytes_around_a_wheel(tmp_path: Path, edit: bytes) -> None:
    wheel = build(tmp_path)
    wheel.write_bytes(edit % wheel.read_bytes())
    found = inspect_wheel(wheel)
    assert [(problem.kind, problem.path) for problem in found.problems] == [("form", "")]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "vllm-1.0-py3-none-any.whl"
    os.mkfifo(pipe)
    with pytest.raises(WheelError, match="is no file"):
        inspect_wheel(pipe)


def test_what_is_no_wheel(tmp_path: Path) -> None:
    path = tmp_path / "vllm.zip"
    path.write_bytes(b"")
    with pytest.raises(WheelError, match="isn't the name of a wheel"):
        inspect_wheel(path)
    path = path.rename(tmp_path / "vllm-1-py3-none-any.whl")
    with pytest.raises(WheelError, match="no zip file"):
        inspect_wheel(path)
    path.unlink()
    with pytest.raises(MachineError, match="can't be read"):
        inspect_wheel(path)


# --- installed


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with a right overlay of vLLM, by a real pip."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv/bin/python"
    argv = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    wheel = build(folder)
    subprocess.run((*argv, "--no-index", "--no-deps", str(wheel)), check=True)
    return python


def site(python: Path) -> Path:
    (found,) = (python.parent.parent / "lib").glob("python*/site-packages")
    return found


def test_installed_as_it_was_built(installed: Path) -> None:
    (found,) = inspect_installed(installed)
    assert found.problems == ()
    assert (found.name, found.where) == ("vllm", site(installed))
    assert found.effects == 3
    assert found.files > len(FILES)
    assert not (site(installed) / "vllm/__pycache__/added.pyc").exists()


def test_installed_and_changed_since(installed: Path) -> None:
    here = site(installed)
    added, kept = here / "vllm/added.py", here / "vllm/kept.py"
    before = added.read_bytes()
    try:
        added.write_bytes(b"a = 2\n")
        kept.unlink()
        (here / "vllm/gone.py").write_bytes(b"")  # listed nowhere: not ours, but it is there
        (found,) = inspect_installed(installed)
        assert kinds(found) == {
            ("content", "vllm/added.py"),
            ("effect", "vllm/added.py"),
            ("missing", "vllm/kept.py"),
            ("undeleted", "vllm/gone.py"),
        }
    finally:
        added.write_bytes(before)
        kept.write_bytes(FILES["vllm/kept.py"])
        (here / "vllm/gone.py").unlink()


def test_a_file_that_another_distribution_replaced_is_a_note(installed: Path) -> None:
    """Both must agree: that it is not ours any more, and whose it is. A package's own never is."""
    here = site(installed)
    ours = {path: (here / path).read_bytes() for path in ("build_backend.py", "vllm/kept.py")}
    other = here / "other-1.dist-info"
    other.mkdir()
    theirs = b"theirs = True\n"
    rows = [distinfo.row(path, theirs) for path in ours]
    try:
        for path in ours:
            (here / path).write_bytes(theirs)
        (found,) = inspect_installed(installed)
        assert {path for _, path in kinds(found)} == set(ours)
        assert found.notes == ()
        (other / "RECORD").write_bytes(distinfo.format_record(rows))
        (found,) = inspect_installed(installed)
        assert kinds(found) == {("content", "vllm/kept.py")}
        assert [(note.path, note.what) for note in found.notes] == [
            ("build_backend.py", "build_backend.py is the one of other-1")
        ]
        (here / "build_backend.py").write_bytes(b"nobody's = True\n")
        (found,) = inspect_installed(installed)
        assert ("content", "build_backend.py") in kinds(found)
    finally:
        for path, data in ours.items():
            (here / path).write_bytes(data)
        (other / "RECORD").unlink(missing_ok=True)
        other.rmdir()


def test_nothing_is_imported(installed: Path) -> None:
    """The patched package may be broken, or need a GPU."""
    init = site(installed) / "vllm/__init__.py"
    before = init.read_bytes()
    try:
        init.write_bytes(b"raise SystemExit('imported')\n")
        (found,) = inspect_installed(installed)
        assert ("content", "vllm/__init__.py") in kinds(found)
    finally:
        init.write_bytes(before)


def test_installed_without_a_record(installed: Path) -> None:
    (record,) = site(installed).glob("vllm-*.dist-info/RECORD")
    moved = record.rename(record.with_name("MOVED"))
    try:
        (found,) = inspect_installed(installed)
        assert {kind for kind, _ in kinds(found)} == {"no-record"}
    finally:
        moved.rename(record)


def test_nothing_installed(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    assert inspect_installed(tmp_path / "venv/bin/python") == []


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="can't say what is installed"):
        inspect_installed(tmp_path / "python")
    with pytest.raises(MachineError, match="can't say what is installed"):
        inspect_installed(Path("/bin/false"))
