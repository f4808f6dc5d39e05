"""The real series on the real archives: golden base tree, and the trees of plain ``git am``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.lines.line import PROJECTS, UPSTREAMS, Line, Upstream, read_line
from overlay.report import Reporter
from overlay.sources.archive import read_archive
from overlay.sources.index import fetch_release
from overlay.trees.apply import apply_series
from overlay.trees.match import Verdict
from overlay.trees.store import Store, cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.trees.store import Commit
    from tests.conftest import Repo

pytestmark = pytest.mark.real

PATCHES = Path(__file__).parent.parent / "patches"
# Of vLLM v0.28.0's commit, computed by git from the archive; FlashInfer's archive is a subset
TREES = {"vllm": "1940041619b03a5d3d1a73e9cffc295de329ad9d"}


@pytest.fixture(scope="module")
def line() -> Line:
    return read_line(PATCHES, "infernal")


@pytest.fixture(scope="module", params=UPSTREAMS)
def imported(
    request: pytest.FixtureRequest, line: Line, make_store: Callable[..., Store]
) -> tuple[Upstream, Store, Commit]:
    upstream: Upstream = request.param
    pin = line.pin(upstream)
    archive = fetch_release(
        PROJECTS[upstream], pin.sdist.file, pin.sdist.sha256,
        cache=cache_folder(), offline=False, report=Reporter(quiet=True),
    )  # fmt: skip
    store = make_store(upstream)
    base = store.import_tree(
        read_archive(archive, generated=pin.generated),
        ref="refs/overlay/base/real", message="base\n", expect={},
    )  # fmt: skip
    return upstream, store, base


def test_base_tree(imported: tuple[Upstream, Store, Commit]) -> None:
    upstream, _, base = imported
    assert base.tree == TREES.get(upstream, base.tree)
    assert len(base.tree) == 40


def test_series_gives_the_trees_of_git_am(
    imported: tuple[Upstream, Store, Commit], line: Line, make_repo: Callable[[], Repo]
) -> None:
    upstream, store, base = imported
    patched = apply_series(store, base, line.series[upstream])
    assert {patch.verdict for patch in patched.patches} == {Verdict.APPLIES}

    plain = make_repo()
    plain.git("fetch", "--quiet", str(store.folder), "refs/overlay/base/real")
    plain.git("checkout", "--quiet", "FETCH_HEAD")
    plain.git("am", "--quiet", "--keep-cr", stdin=b"".join(p.raw for p in line.series[upstream]))
    commits = plain.git("rev-list", "--reverse", f"{base.commit}..HEAD").decode().split()
    assert [plain.tree(commit) for commit in commits] == [p.tree for p in patched.patches]
    for commit, patch in zip(commits, line.series[upstream], strict=True):
        message = plain.git(
            "show", "--no-patch", "--format=%an <%ae> %ad%n%B", "--date=raw", commit
        )
        stated = f"{patch.author} <{patch.email}> {patch.date}\n{patch.message}"
        assert message.decode().strip() == stated.strip()


def test_no_patch_applies_to_the_patched_tree(
    imported: tuple[Upstream, Store, Commit], line: Line
) -> None:
    upstream, store, base = imported
    patched = apply_series(store, base, line.series[upstream])
    top = store.find(patched.commit)
    assert top is not None
    for patch in line.series[upstream]:
        assert not apply_series(store, top, [patch]).patches[0].verdict.good, patch.name
