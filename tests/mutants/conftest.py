"""The line under test and its defects; the patched environment that CPU tests run in.

``OVERLAY_LINE`` names the line, ``OVERLAY_PATCHED_PYTHON`` the interpreter of an environment with
its wheels: this session itself runs in the project's own.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.app import App
from overlay.checks.sessions import PATCHED_PYTHON_VARIABLE, SURVIVOR_CODE
from overlay.trees.apply import refuse_bad
from overlay.trees.pipeline import apply_line
from tests.mutants.bench import Bench, Survivor
from tests.mutants.defects import lost_patches, read_catalogue
from tests.mutants.runs import Warm
from tests.mutants.shadow import read_environment
from tests.static.trees import Trees

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mutants.defects import Defect

ROOT = Path(__file__).absolute().parents[2]
CATALOGUE = Path(__file__).with_name("defects.toml")
_APP = App(patches=ROOT / "patches")
_SURVIVED = pytest.StashKey[bool]()


def defects_of(line_name: str, catalogue: Path = CATALOGUE) -> list[Defect]:
    """All defects, the lost patches of the line among them."""
    found = read_catalogue(catalogue)
    return [*found.defect, *lost_patches(_APP.line(line_name), found)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a defect."""
    if "defect" in metafunc.fixturenames:
        found = defects_of(os.environ["OVERLAY_LINE"])
        metafunc.parametrize("defect", found, ids=[one.name for one in found])


@pytest.fixture(scope="session")
def trees() -> Trees:
    """The line, applied."""
    line = _APP.line(os.environ["OVERLAY_LINE"])
    patched = apply_line(line, _APP.sources)
    for upstream, one in patched.items():
        refuse_bad(one.tree, line.name, upstream)
    return Trees(line=line, patched=patched)


@pytest.fixture(scope="session")
def bench(
    trees: Trees, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    """What tries the selected defects, as many at once as there are cores."""
    python = Path(os.environ[PATCHED_PYTHON_VARIABLE])
    wanted: list[Any] = [
        item.callspec.params["defect"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "defect" in getattr(item, "fixturenames", ())
    ]
    cores = len(os.sched_getaffinity(0))
    warm = [Warm(python, ROOT) for _ in range(cores)]
    pool = ThreadPoolExecutor(max_workers=cores)
    try:
        bench = Bench(
            environment=read_environment(python), root=ROOT, trees=trees, pool=pool,
            scratch=tmp_path_factory.mktemp("shadows"), warm=warm,
        )  # fmt: skip
        bench.begin(wanted)
        yield bench
    finally:
        for one in warm:  # first: a run that nobody waits for any more ends with it
            one.close()
        pool.shutdown(cancel_futures=True)


def pytest_exception_interact(
    node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]
) -> None:
    """Remember a survivor: it has an exit code of its own."""
    if call.excinfo is not None and call.excinfo.errisinstance(Survivor):
        node.config.stash[_SURVIVED] = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell survivors from what goes wrong otherwise."""
    if session.config.stash.get(_SURVIVED, False):
        session.exitstatus = SURVIVOR_CODE
