"""What is asked of an engine before a build, by a FAKE ``docker`` that says what it is told."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from overlay.errors import EngineError
from overlay.images.build import _Log, _refusal
from overlay.images.engine import check_room, find_builder

if TYPE_CHECKING:
    from pathlib import Path

PLATFORMS = "Platforms: linux/amd64, linux/amd64/v2"
INFO = {
    "ServerVersion": "26.1.5+dfsg1",
    "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
}
ANSWERS = {
    "buildx version": "github.com/docker/buildx 0.13.1+ds1 0.13.1+ds1-3",
    "buildx inspect": f"Name: default\nDriver: docker\n\n{PLATFORMS}",
    "info --format": json.dumps(INFO),
}


def fake(folder: Path, monkeypatch: pytest.MonkeyPatch, **answers: str | None) -> None:
    """Put a FAKE docker on the PATH; None makes it fail."""
    said = ANSWERS | {name.replace("_", " "): text for name, text in answers.items()}
    said["info --format"] = said.pop("info", None) or said["info --format"]
    cases = "".join(
        f"'{words}') cat {folder / words.replace(' ', '-')};;\n"
        for words, text in said.items()
        if text is not None
    )
    for words, text in said.items():
        (folder / words.replace(" ", "-")).write_text(text or "")
    docker = folder / "docker"
    docker.write_text(
        f'#!/bin/sh\ncase "$1 $2" in\n{cases}*) echo "no $1 $2" >&2; exit 1;;\nesac\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_builder_that_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, monkeypatch)
    found = find_builder()
    assert (found.driver, found.version, found.buildx) == ("docker", "26.1.5+dfsg1", "0.13.1+ds1")


def test_a_remote_builder_is_asked_for_its_buildkit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = f"Driver: remote\nBuildKit version: v0.17.2\n{PLATFORMS}"
    fake(tmp_path, monkeypatch, buildx_inspect=remote)
    assert find_builder().version == "v0.17.2"


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ({"buildx_version": None}, "Docker has no buildx"),
        ({"buildx_version": "github.com/docker/buildx v0.12.9 x"}, "too old"),
        ({"buildx_inspect": None}, "no Docker engine that answers"),
        (
            {"buildx_inspect": "Driver: docker\nError: can't connect"},
            "no Docker engine that answers",
        ),
        (
            {"buildx_inspect": "Driver: docker\nPlatforms: linux/arm64"},
            "can't build for linux/amd64",
        ),
        ({"info": json.dumps({**INFO, "ServerVersion": "25.0.3"})}, "25.0.3, which is too old"),
        ({"info": json.dumps({**INFO, "DriverStatus": []})}, "can't export an image"),
        ({"info": "nothing"}, "does not say what it is"),
        (
            {"buildx_inspect": f"Driver: remote\nBuildKit version: v0.12.5\n{PLATFORMS}"},
            "BuildKit is v0.12.5, which is too old",
        ),
    ],
)
def test_a_builder_that_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, str | None], what: str
) -> None:
    fake(tmp_path, monkeypatch, **answers)
    with pytest.raises(EngineError, match=what) as caught:
        find_builder()
    assert caught.value.fix


def test_no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="no Docker client") as caught:
        find_builder()
    assert "install Docker" in caught.value.fix


def test_no_room(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(EngineError, match="GB are free") as caught:
        check_room(tmp_path, 10**18)
    assert "docker builder prune" in caught.value.fix


@pytest.mark.parametrize(
    ("lines", "kind", "what"),
    [
        (["#9 1.2 proof: torch was replaced"], "image", "isn't what it would claim"),
        (["write /x: no space left on device"], "engine", "is full"),
        (["ERROR: failed to resolve source metadata for x"], "engine", "base image can't be had"),
        (["Cannot connect to the Docker daemon at x"], "engine", "went away"),
        (["#9 ERROR: process did not complete"], "image", "can't be built"),
    ],
)
def test_what_a_failed_build_is_refused_with(lines: list[str], kind: str, what: str) -> None:
    log = _Log()
    for line in lines:
        log.take(line)
    error = _refusal(log)
    assert (error.kind, what in error.what) == (kind, True)
    assert error.fix


def test_steps_and_their_times_are_read() -> None:
    log = _Log()
    for line in (
        "#7 [upstream 1/1] RUN bash",
        "#7 DONE 5.5s",
        "#8 [x] y",
        "#8 DONE 0.0s",
        "#9 CACHED",
    ):
        log.take(line)
    assert log.times() == {"upstream 1/1: RUN bash": 5.5}
