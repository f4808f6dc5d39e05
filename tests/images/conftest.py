"""One engine for all tests here that build: ``running``, and the base image in it by digest."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from overlay.trees.store import cache_folder
from tests.images.engine import BASE, Engine, engine

if TYPE_CHECKING:
    from collections.abc import Iterator

NEEDED = ("docker", "dockerd", "docker-registry", "mmdebstrap", "skopeo")


@pytest.fixture(scope="session")
def running() -> Iterator[Engine]:
    """An engine with nothing in it but the stand-in for the base image."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.fail(f"not installed: {missing}; run tests/images/provision.sh")
    with engine(cache_folder() / "engine") as started:
        yield started


@pytest.fixture(scope="session")
def base(running: Engine) -> str:
    """The stand-in by digest, under the name that the engine's mirror answers to."""
    form = "{{index .RepoDigests 0}}"
    found = running.docker("image", "inspect", f"{running.registry}/{BASE}", "--format", form)
    return f"docker.io/{BASE}@{found.strip().rpartition('@')[2]}"
