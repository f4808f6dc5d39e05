"""The real series carried between the real pins, against ``git cherry-pick`` of each patch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.lines.line import PROJECTS, UPSTREAMS, Upstream, find_lines, read_line
from overlay.moving.carry import carry_series, old_states, renames_between
from overlay.moving.evidence import find_postconditions
from overlay.report import Reporter
from overlay.sources.archive import read_archive
from overlay.sources.index import fetch_release
from overlay.trees.apply import PatchedTree, apply_series
from overlay.trees.match import Entry, Verdict
from overlay.trees.store import StoredTree, cache_folder
from tests.support.carrying import text

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.moving.carry import Carried
    from overlay.trees.store import Store
    from tests.conftest import Repo

pytestmark = pytest.mark.real

PATCHES = Path(__file__).parent.parent / "patches"
LINES = {name: read_line(PATCHES, name) for name in find_lines(PATCHES)}
# Near and far, and backwards; a checkout of vLLM costs seconds, so not all of them
PAIRS = [("eldritch", "infernal"), ("infernal", "next"), ("next", "eldritch")]


class Applied:
    """Every line's series on its own pin of one upstream, in one store, and in plain git."""

    def __init__(self, upstream: Upstream, store: Store, repo: Repo) -> None:
        self.upstream, self.store, self.repo = upstream, store, repo
        self.trees: dict[str, PatchedTree] = {}
        for name, line in LINES.items():
            pin = line.pin(upstream)
            archive = fetch_release(
                PROJECTS[upstream], pin.sdist.file, pin.sdist.sha256,
                cache=cache_folder(), offline=False, report=Reporter(quiet=True),
            )  # fmt: skip
            base = store.import_tree(
                read_archive(archive, generated=pin.generated),
                ref=f"refs/overlay/base/{name}", message=f"{name}\n", expect={},
            )  # fmt: skip
            self.trees[name] = apply_series(store, base, line.series[upstream])
        repo.git("fetch", "--quiet", str(store.folder), "refs/overlay/*:refs/overlay/*")

    def carry(self, old: str, new: str) -> list[Carried]:
        reader = self.store.reader
        series = LINES[old].series[self.upstream]
        trees = [self.trees[name].base.tree for name in (old, new)]
        before, after = old_states(series, StoredTree(reader, trees[0]))
        return list(
            carry_series(
                series, before, after, StoredTree(reader, trees[1]), git=self.store.git,
                renames=renames_between(self.store.git, *trees),
            )
        )  # fmt: skip

    def picked(self, old: str, new: str, names: set[str]) -> set[str]:
        """Those of ``names`` that git picks cleanly onto the new base; they are checked out."""
        git = self.repo.git
        git("checkout", "--quiet", "--force", "--detach", self.trees[new].base.commit)
        clean = set()
        for patch in self.trees[old].patches:
            if patch.name not in names:
                continue
            how = ("--allow-empty", "--keep-redundant-commits", "-Xdiff-algorithm=myers")
            git("cherry-pick", *how, patch.commit, ok=(0, 1))
            if git("status", "--porcelain", "--untracked-files=no"):
                git("cherry-pick", "--abort")
            else:
                clean.add(patch.name)
        return clean

    def changed(self, new: str) -> dict[bytes, Entry | None]:
        """What the checkout's commit changes of a line's base tree."""
        git = self.repo.git
        listed = git("diff-tree", "-r", "-z", "--no-renames", self.trees[new].base.tree, "HEAD")
        fields = listed.split(b"\0")[:-1]
        found: dict[bytes, Entry | None] = {}
        for head, path in zip(fields[::2], fields[1::2], strict=True):
            mode, blob = int(head.split()[1], 8), head.split()[3].decode()
            found[path] = Entry(mode=mode, data=git("cat-file", "blob", blob)) if mode else None
        return found


@pytest.fixture(scope="module", params=UPSTREAMS)
def applied(
    request: pytest.FixtureRequest,
    make_store: Callable[..., Store],
    make_repo: Callable[[], Repo],
) -> Applied:
    upstream: Upstream = request.param
    return Applied(upstream, make_store(upstream), make_repo())


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_as_git_cherry_picks(applied: Applied, old: str, new: str) -> None:
    made = applied.carry(old, new)
    # git would go on with a patch whose prerequisite is not there
    blocked = {one.name for one in made if one.verdict is Verdict.BLOCKED}
    picked = applied.picked(old, new, {one.name for one in made} - blocked)
    assert picked == {one.name for one in made if one.ok}
    changes = {path: entry for one in made for path, entry in one.changes.items()}
    assert applied.changed(new) == changes


@pytest.mark.parametrize("name", LINES)
def test_own_pin_changes_nothing(applied: Applied, name: str) -> None:
    made = applied.carry(name, name)
    assert {one.verdict for one in made} == {Verdict.APPLIES}
    tree = StoredTree(applied.store.reader, applied.trees[name].base.tree)
    after = StoredTree(applied.store.reader, applied.trees[name].tree)
    for one in made:
        tree.changes |= one.changes
    assert {path: after.get(path) for path in tree.changes} == tree.changes


def test_barrier_that_upstream_took(applied: Applied) -> None:
    if applied.upstream == "vllm":
        pytest.skip("is FlashInfer's")
    verdicts = {one.name: one.verdict for one in applied.carry("eldritch", "infernal")}
    assert verdicts["sparse-mla-prefill-barrier"] is Verdict.MERGED


def test_flag_that_the_newest_pin_has_right(applied: Applied) -> None:
    """vLLM 0.33.0 says by itself what ``dense-prefill-flag`` makes 0.28.0 say."""
    if applied.upstream == "flashinfer":
        pytest.skip("is vLLM's")
    asked = find_postconditions(PATCHES.parent)
    assert not asked.missing
    old, new = (
        {
            "vllm": StoredTree(applied.store.reader, applied.trees[name].base.tree),
            "flashinfer": text(),
        }
        for name in ("infernal", "next")
    )
    assert "dense_prefill" in asked.hold("dense-prefill-flag", old, new)
    assert asked.hold("dense-prefill-flag", old, old) == ""
    assert asked.hold("lse-plumbing", old, new) == ""
