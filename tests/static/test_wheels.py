"""What the wheels of the line ask for is what the line is pinned to."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.metadata import Metadata
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from overlay.lines.line import PROJECTS
from overlay.lines.record import make_record
from overlay.report import Reporter
from overlay.wheels.distinfo import overlay_version
from overlay.wheels.linewheels import build_wheels

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.app import App
    from tests.static.trees import Trees


@pytest.fixture(scope="module")
def metadata(app: App, trees: Trees) -> Iterator[dict[str, Metadata]]:
    """METADATA of the two wheels, built for this."""
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-static-") as folder:
        built = build_wheels(
            trees.line, trees.patched, app.sources, Path(folder), Reporter(quiet=True)
        )
        yield {one.upstream: _read(one.path) for one in built}


def _read(wheel: Path) -> Metadata:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=False)


def _asked(metadata: Metadata, project: str) -> list[str]:
    """Specifiers of the requirements on a project that hold without extras."""
    return [
        str(one.specifier)
        for one in metadata.requires_dist or ()
        if one.name == project and (one.marker is None or one.marker.evaluate({"extra": ""}))
    ]


def test_vllm_asks_for_the_flashinfer_of_its_line(
    metadata: dict[str, Metadata], trees: Trees
) -> None:
    record = make_record(trees.line, {name: one.tree for name, one in trees.patched.items()})
    ours = overlay_version(trees.line.settings.flashinfer.version, record)
    assert _asked(metadata["vllm"], PROJECTS["flashinfer"]) == [f"=={ours}"]
    assert metadata["flashinfer"].version == Version(ours)
    assert metadata["flashinfer"].version in SpecifierSet(f"=={ours}")
    # Upstream's own build can't stand in for it
    assert Version(trees.line.settings.flashinfer.version) not in SpecifierSet(f"=={ours}")


def test_torch_is_the_one_of_the_line(metadata: dict[str, Metadata], trees: Trees) -> None:
    assert _asked(metadata["vllm"], "torch") == [f"=={trees.line.settings.torch}"]
    for asked in _asked(metadata["flashinfer"], "torch"):
        assert Version(trees.line.settings.torch) in SpecifierSet(asked)


@pytest.mark.parametrize("upstream", ["vllm", "flashinfer"])
def test_the_wheels_serve_every_python_of_the_line(
    upstream: str, minor: str, metadata: dict[str, Metadata]
) -> None:
    asked = metadata[upstream].requires_python
    assert asked is None or f"{minor}.0" in asked


def test_replaced_requirements_are_replaced(metadata: dict[str, Metadata], trees: Trees) -> None:
    for project, requirement in trees.line.settings.requirements.items():
        asked = _asked(metadata["vllm"], project)
        assert requirement.upstream not in asked or requirement.upstream == requirement.line, (
            project
        )
        assert len(asked) == 1, project
