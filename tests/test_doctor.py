"""Doctor: each check with a machine that has the thing and one that lacks it.

Programs that can't be had here (an old git, a GPU's tools) are shell scripts named as fakes.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from overlay import doctor
from overlay.doctor import ROOM, examine, is_fit
from overlay.trees.git import _git as find_git

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from overlay.doctor import Finding


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A PATH that holds the real git and else only what a test puts there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    git = shutil.which("git")
    assert git
    (folder / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(folder))
    find_git.cache_clear()
    yield folder
    find_git.cache_clear()


def fake(folder: Path, name: str, says: str, *, fails: bool = False) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {int(fails)}\n")
    path.chmod(0o755)


def found(cache: Path, **how: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(cache, **how)}


def test_a_fit_machine(fakes: Path, tmp_path: Path) -> None:
    findings = found(tmp_path / "cache")
    for name in ("python", "git", "pip", "cache", "room"):
        assert findings[name].status == "ok", findings[name]
    for name in ("uv", "quilt", "docker", "nvcc", "gpu"):
        assert findings[name].status == "optional"
        assert findings[name].purpose
        assert findings[name].fix
    assert is_fit(list(findings.values()))


def test_an_old_python(fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_PYTHON", (sys.version_info[0], sys.version_info[1] + 1))
    findings = found(tmp_path)
    assert findings["python"].status == "missing"
    assert not is_fit(list(findings.values()))


def test_an_old_git(fakes: Path, tmp_path: Path) -> None:
    fake(fakes, "git", "git version 2.31.9")
    finding = found(tmp_path)["git"]
    assert finding.status == "missing"
    assert "2.38" in finding.what
    assert "newer git" in finding.fix


@pytest.mark.parametrize("says", ["", "git version unknown"])
def test_a_git_that_does_not_say(fakes: Path, tmp_path: Path, says: str) -> None:
    fake(fakes, "git", says)
    assert found(tmp_path)["git"].status == "missing"


def test_no_git_hides_no_other_answer(fakes: Path, tmp_path: Path) -> None:
    (fakes / "git").unlink()
    findings = found(tmp_path)
    assert findings["git"].status == "missing"
    assert "install git" in findings["git"].fix
    assert findings["cache"].status == "ok"
    assert "gpu" in findings


def test_pip_without_any_place(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert found(tmp_path)["pip"].status == "missing"
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    finding = found(tmp_path)["pip"]
    assert (finding.status, finding.what) == ("ok", "0 package index(es), 1 find-links")


def test_pip_with_a_broken_configuration(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "pip.conf"
    broken.write_text("no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(broken))
    finding = found(tmp_path)["pip"]
    assert finding.status == "missing"
    assert finding.fix


def test_the_cache_is_as_it_was(fakes: Path, tmp_path: Path) -> None:
    assert found(tmp_path / "a" / "cache")["cache"].status == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    assert found(tmp_path / "b")["cache"].status == "ok"
    assert list((tmp_path / "b").iterdir()) == []


def test_a_cache_that_can_not_be_made(fakes: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    finding = found(tmp_path / "file" / "cache")["cache"]
    assert finding.status == "missing"
    assert "VLLM_OVERLAY_CACHE" in finding.fix


def test_a_file_system_without_locks(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unlocked:
        """Fake: every process gets the lock."""

        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(doctor, "FileLock", Unlocked)
    finding = found(tmp_path)["cache"]
    assert finding.status == "missing"
    assert "lock" in finding.what


@pytest.mark.parametrize(("free", "status"), [(ROOM, "ok"), (ROOM - 1, "missing")])
def test_room(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    class Usage:
        """Fake: a disk of a given size."""

    usage = Usage()
    usage.free = free  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    finding = found(tmp_path / "not" / "there")["room"]
    assert finding.status == status
    assert "1.2 GB" in finding.what


def test_room_for_one_line_is_what_was_measured() -> None:
    assert 1.1e9 < ROOM < 1.3e9


def test_tools_that_are_there(fakes: Path, tmp_path: Path) -> None:
    fake(fakes, "uv", "uv 0.9.1")
    fake(fakes, "quilt", "0.67")
    fake(fakes, "docker", "Docker 28.1")
    fake(fakes, "nvcc", "Cuda compilation tools, release 13.3, V13.3.1")
    fake(fakes, "nvidia-smi", "NVIDIA RTX PRO 6000, 12.0")
    findings = found(tmp_path)
    for name in ("uv", "quilt", "docker", "nvcc", "gpu"):
        assert findings[name].status == "ok", findings[name]
    assert findings["uv"].what == "uv 0.9.1"
    assert "12.0" in findings["gpu"].what


def test_tools_that_do_not_fit(fakes: Path, tmp_path: Path) -> None:
    fake(fakes, "docker", "no daemon", fails=True)
    fake(fakes, "nvcc", "Cuda compilation tools, release 13.0, V13.0.2")
    fake(fakes, "nvidia-smi", "NVIDIA H200, 9.0")
    (fakes / "uv").write_bytes(b"\0not a program")
    (fakes / "uv").chmod(0o755)
    findings = found(tmp_path)
    for name in ("uv", "docker", "nvcc", "gpu"):
        assert findings[name].status == "optional", findings[name]
    assert "13.0" in findings["nvcc"].what
    assert "13.3" in findings["nvcc"].what
    assert "H200" in findings["gpu"].what
    assert is_fit(list(findings.values()))


def test_a_program_that_hangs(fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fakes / "uv").write_text("#!/bin/sh\nread line </dev/zero\n")
    (fakes / "uv").chmod(0o755)
    monkeypatch.setattr(doctor, "_SECONDS", 0.5)
    assert "TimeoutExpired" in found(tmp_path)["uv"].what


def test_a_check_that_crashes_is_an_answer(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(doctor.shutil, "disk_usage", crash)
    findings = found(tmp_path)
    assert findings["room"].status == "missing"
    assert "ZeroDivisionError" in findings["room"].what
    assert findings["cache"].status == "ok"


def test_the_network_is_asked_only_when_told_to(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links, gone = tmp_path / "links", tmp_path / "gone"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    # Nobody listens at port 9 of the loopback
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "127.0.0.1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"{links} {gone}")
    monkeypatch.setattr("overlay.sources.download.BACKOFF", 0.0)
    assert not any("find-links " in name for name in found(tmp_path))
    findings = found(tmp_path, online=True)
    assert findings[f"find-links {links}"].status == "ok"
    assert findings[f"find-links {gone}"].status == "missing"
    (index,) = [finding for name, finding in findings.items() if name.startswith("index ")]
    assert index.status == "missing"
    assert "secret" not in repr(findings)
