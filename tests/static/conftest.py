"""The line under test, from ``OVERLAY_LINE``; its trees come out of the store."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from overlay.app import App
from overlay.checks.receipt_plugin import HEAD_VARIABLE
from overlay.lines.record import digest, make_record
from overlay.trees.apply import refuse_bad
from overlay.trees.pipeline import apply_line
from tests.static.trees import Trees

LINE_VARIABLE = "OVERLAY_LINE"
_APP = App(patches=Path(__file__).absolute().parents[2] / "patches")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a patch, by its place in the series; one a Python version that the line supports."""
    line = _APP.line(os.environ[LINE_VARIABLE])
    if "minor" in metafunc.fixturenames:
        metafunc.parametrize("minor", line.settings.python)
    if "patch_name" in metafunc.fixturenames:
        names = [f"{u}/{patch.name}" for u, series in line.series.items() for patch in series]
        metafunc.parametrize("patch_name", names)


@pytest.fixture(scope="session")
def app() -> App:
    return _APP


@pytest.fixture(scope="session")
def trees(app: App) -> Trees:
    """The line, applied."""
    line = app.line(os.environ[LINE_VARIABLE])
    patched = apply_line(line, app.sources)
    for upstream, one in patched.items():
        refuse_bad(one.tree, line.name, upstream)
    if head := os.environ.get(HEAD_VARIABLE):  # a receipt must not speak for other trees
        now = digest(make_record(line, {name: one.tree for name, one in patched.items()}))
        assert now == json.loads(Path(head).read_text())["digest"], "the line changed meanwhile"
    return Trees(line=line, patched=patched)
