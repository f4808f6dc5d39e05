"""What a clone's history says of patches, on an upstream that did all that upstreams do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlay.errors import UnavailableError
from overlay.moving.history import History, UpstreamCommit, forwarded, read_history
from overlay.sources.releases import pin_commit
from tests.conftest import numbered
from tests.support.carrying import carry, series

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.patches.patch import Patch
    from overlay.trees.store import Store
    from tests.conftest import File, Repo

LONG = numbered(1, 60)
TEN, FIFTY = (b"line 10\n", b"the tenth\n"), (b"line 50\n", b"the fiftieth\n")


def edit(text: bytes, *edits: tuple[bytes, bytes]) -> bytes:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


class World:
    """A base with one patch on it, and an upstream that goes on from the base."""

    def __init__(self, repo: Repo) -> None:
        self.repo = repo
        self.base = repo.git("rev-parse", "HEAD").decode().strip()
        message = "Both\n\nUpstream: vllm-project/vllm#77\n"
        self.tip = repo.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, message)
        self.patches = series(repo, self.base, self.tip)
        repo.reset(self.base)

    def commit(self, files: dict[str | bytes, File], message: str) -> str:
        return self.repo.commit(files, message)

    def read(self, *, old: str = "", new: str = "HEAD", clone: Path | None = None) -> History:
        tip = self.repo.git("rev-parse", new).decode().strip()
        pins = [pin_commit("vllm", commit) for commit in (old or self.base, tip)]
        return read_history(clone or self.repo.path, pins[0], pins[1], self.patches)

    @property
    def patch(self) -> Patch:
        return self.patches[0]


@pytest.fixture
def world(upstream: Repo) -> World:
    return World(upstream)


def ids(commits: tuple[UpstreamCommit, ...]) -> list[str]:
    return [commit.id for commit in commits]


def test_nothing_to_tell(world: World) -> None:
    world.commit({"a.py": b"print(2)\n"}, "Elsewhere (#1)\n")
    history = world.read()
    assert history.commits == ()
    told = history.of(world.patch)
    assert (told.touching, told.taken, told.hunks, told.whole) == ((), (), (0, 2), False)


def test_taken_as_it_is_by_patch_id(world: World) -> None:
    world.commit({"pkg/long.py": edit(LONG, (b"line 1\n", b"1\n"))}, "Before (#1)\n")
    taken = edit(LONG, (b"line 1\n", b"1\n"), TEN, FIFTY)
    commit = world.commit({"pkg/long.py": taken}, "Take it (#9)\n")
    world.commit({"pkg/long.py": LONG.replace(b"line", b"LINE")}, "Change all (#10)\n")
    history = world.read()
    assert history.same_id["both"].id == commit
    told = history.of(world.patch)
    assert told.whole
    assert ids(told.taken) == [commit]
    assert told.taken[0].pull == 9
    assert len(told.touching) == 3


def test_taken_with_more_by_its_hunks(world: World) -> None:
    more = edit(LONG, TEN, FIFTY, (b"line 30\n", b"30\n"))
    commit = world.commit({"pkg/long.py": more, "test.py": b"assert True\n"}, "More (#9)\n")
    history = world.read()
    assert history.same_id == {}
    told = history.of(world.patch)
    assert told.whole
    assert ids(told.taken) == [commit]


def test_taken_in_two_commits_and_in_part(world: World) -> None:
    first = world.commit({"pkg/long.py": edit(LONG, TEN)}, "First (#8)\n")
    told = world.read().of(world.patch)
    assert (told.whole, told.hunks) == (False, (1, 2))
    second = world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, "Second (#9)\n")
    told = world.read().of(world.patch)
    assert (told.whole, ids(told.taken)) == (True, [second, first])


def test_same_pull_request_in_another_form(world: World) -> None:
    commit = world.commit({"pkg/long.py": edit(LONG, (b"line 10\n", b"10!\n"))}, "Other (#77)\n")
    world.commit({"pkg/long.py": edit(LONG, (b"line 11\n", b"11!\n"))}, "Mentions #77 (#78)\n")
    told = world.read().of(world.patch)
    assert ids(told.same_pull) == [commit]
    assert told.taken == ()


@pytest.mark.parametrize(
    "message",
    [
        'Revert "Take it (#9)" (#11)\n',
        'Revert "Take it" (#11)\n',
        "Undo\n\nThis reverts commit {id}.\n",
        "Undo\n\nThis reverts commit {short}, see there.\n",
        "revert(core): revert #9 on the release branch (#11)\n",
        "Revert PR 9 (#11)\n",
    ],
)
def test_taken_and_reverted(world: World, message: str) -> None:
    commit = world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, "Take it (#9)\n")
    text = message.format(id=commit, short=commit[:10])
    undo = world.commit({"pkg/long.py": LONG}, text)
    told = world.read().of(world.patch)
    assert (ids(told.taken), told.hunks, told.whole) == ([commit], (0, 2), False)
    assert told.undone is not None
    assert told.undone.id == undo
    # and taken once more
    world.commit(
        {"pkg/long.py": edit(LONG, TEN, FIFTY, (b"line 30\n", b"30\n"))},
        f"Again\n\nThis reverts commit {undo}.\n",
    )
    told = world.read().of(world.patch)
    assert (told.undone, told.whole) == (None, True)


def test_taken_in_two_commits_of_which_one_was_reverted(world: World) -> None:
    world.commit({"pkg/long.py": edit(LONG, TEN)}, "First (#8)\n")
    world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, "Second (#9)\n")
    world.commit({"pkg/long.py": edit(LONG, TEN)}, 'Revert "Second" (#10)\n')
    told = world.read().of(world.patch)
    assert (told.hunks, told.whole) == ((1, 2), False)
    assert told.undone is not None
    # another commit made it, too
    world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY), "x": b"x\n"}, "Third (#11)\n")
    assert world.read().of(world.patch).whole


def test_its_own_pull_request_was_reverted(world: World) -> None:
    world.commit({"pkg/long.py": edit(LONG, (b"line 10\n", b"10!\n"))}, "Other (#77)\n")
    undo = world.commit({"pkg/long.py": LONG}, 'Revert "Other (#77)" (#78)\n')
    told = world.read().of(world.patch)
    assert told.undone is not None
    assert told.undone.id == undo


def test_a_word_that_begins_like_revert_is_none(world: World) -> None:
    world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, "Take it (#9)\n")
    world.commit({"pkg/long.py": edit(LONG, TEN)}, "Reverted order, after #9 (#11)\n")
    world.commit({"pkg/long.py": edit(LONG, FIFTY)}, "Fix #99, as Revert did not (#12)\n")
    assert world.read().of(world.patch).undone is None


def test_renamed_and_changed_there(world: World) -> None:
    world.repo.git("mv", "pkg/long.py", "pkg/other.py")
    renamed = world.commit({}, "Move it (#3)\n")
    world.repo.git("mv", "pkg/other.py", "lib.py")
    again = world.commit({}, "Move it again (#4)\n")
    changed = world.commit({"lib.py": edit(LONG, TEN)}, "Ten (#5)\n")
    history = world.read()
    assert history.renamed(b"pkg/long.py") == b"lib.py"
    assert history.renamed(b"a.py") is None
    told = history.of(world.patch)
    assert ids(told.touching) == [changed, again, renamed]
    assert (told.hunks, ids(told.taken)) == ((1, 2), [changed])


def test_commits_of_a_conflict(world: World, store: Store) -> None:
    other = [(b"line 30\n", b"30!\n")]
    world.commit({"pkg/long.py": edit(LONG, *other)}, "Elsewhere (#3)\n")
    culprit = world.commit(
        {"pkg/long.py": edit(LONG, *other, (b"line 10\n", b"TENTH\n"))}, "Tenth (#4)\n"
    )
    new = world.commit(
        {"pkg/long.py": edit(LONG, *other, (b"line 10\n", b"TENTH\n"), (b"line 2\n", b"2\n"))},
        "Second (#5)\n",
    )
    history = world.read()
    (made,) = carry(world.repo, store.git, world.base, world.tip, new)
    (conflict,) = made.conflicts
    assert ids(history.changed(conflict)) == [culprit]


def test_commit_that_took_the_file_away(world: World, store: Store) -> None:
    world.commit({"pkg/long.py": edit(LONG, (b"line 30\n", b"30!\n"))}, "Elsewhere (#3)\n")
    culprit = new = world.commit({"pkg/long.py": None}, "Delete it (#4)\n")
    (made,) = carry(world.repo, store.git, world.base, world.tip, new)
    assert ids(world.read().changed(made.conflicts[0])) == [culprit]


def test_what_the_old_release_had_is_not_between_the_two(world: World) -> None:
    """A release branch picks commits of the main branch, which have another id there."""
    world.repo.git("checkout", "--quiet", "-b", "release")
    old = world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, "Take it (#9)\n\npicked\n")
    world.repo.git("checkout", "--quiet", "main")
    world.repo.reset(world.base)
    world.commit({"pkg/long.py": edit(LONG, TEN, FIFTY)}, "Take it (#9)\n")
    other = world.commit(
        {"pkg/long.py": edit(LONG, TEN, FIFTY, (b"line 30\n", b"30\n"))}, "Go on (#10)\n"
    )
    assert ids(world.read(old=old).commits) == [other]
    assert len(world.read().commits) == 2


def test_small_hunks_tell_nothing(world: World) -> None:
    world.repo.reset(world.base)
    tip = world.repo.commit({"pkg/long.py": edit(LONG, (b"line 10\n", b"x\nline 10\n"))}, "Small\n")
    world.patches = series(world.repo, world.base, tip)
    world.repo.reset(world.base)
    world.commit({"pkg/long.py": edit(LONG, (b"line 40\n", b"x\nline 40\ny\n"))}, "Other (#3)\n")
    told = world.read().of(world.patch)
    assert (told.taken, told.whole) == ((), False)


def test_messages_that_look_like_commits_and_diffs(world: World) -> None:
    fake = f"commit {'a' * 40}\nSubject (#5)\n\ndiff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n"
    commit = world.commit({"pkg/long.py": edit(LONG, TEN)}, f"Ten (#4)\n\n{fake}")
    (found,) = world.read().commits
    assert (found.id, found.subject) == (commit, "Ten (#4)")
    assert "aaaa" in found.body
    assert list(found.files) == [b"pkg/long.py"]


def test_patch_whose_message_looks_like_a_commit(world: World) -> None:
    world.repo.reset(world.base)
    message = f"Ten\n\nFrom {'a' * 40} on, and\ncommit {'b' * 40}\n"
    tip = world.repo.commit({"pkg/long.py": edit(LONG, TEN)}, message)
    world.patches = series(world.repo, world.base, tip)
    world.repo.reset(world.base)
    commit = world.commit({"pkg/long.py": edit(LONG, TEN)}, "Take it (#4)\n")
    assert {name: one.id for name, one in world.read().same_id.items()} == {"ten": commit}


def test_odd_paths(world: World) -> None:
    name = b'pkg/\xff "odd"\t.py'
    world.repo.reset(world.base)
    base = world.repo.commit({name: LONG}, "Odd\n")
    tip = world.repo.commit({name: edit(LONG, TEN)}, "Ten\n")
    world.patches = series(world.repo, base, tip)
    world.repo.reset(base)
    commit = world.commit({name: edit(LONG, TEN, FIFTY)}, "Take (#1)\n")
    told = world.read(old=base).of(world.patch)
    assert (told.whole, ids(told.taken)) == (True, [commit])


@pytest.mark.parametrize(
    ("trailer", "numbers"),
    [
        ("Upstream: vllm-project/vllm#5", {5}),
        ("Upstream: https://github.invalid/vllm-project/vllm/pull/5", {5}),
        ("Forwarded: #5, #6", {5, 6}),
        ("Upstream: other/vllm#5", set()),
        ("Upstream: flashinfer-ai/flashinfer#5", set()),
        ("Upstream-Status: Pending", set()),
        ("See-Also: vllm-project/vllm#5", set()),
    ],
)
def test_pull_requests_of_a_patch(upstream: Repo, trailer: str, numbers: set[int]) -> None:
    base = upstream.git("rev-parse", "HEAD").decode().strip()
    upstream.commit({"a.py": b"print(2)\n"}, f"Two\n\n{trailer}\n")
    (patch,) = series(upstream, base)
    assert forwarded(patch, "vllm-project/vllm") == numbers


# --- clones that can't tell ---------------------------------------------------------------------


def clone(world: World, folder: Path, *options: str) -> Path:
    world.repo.git("config", "uploadpack.allowFilter", "true")
    world.repo.git("clone", "--quiet", *options, world.repo.path.as_uri(), str(folder))
    return folder


def test_clones_that_tell(world: World, tmp_path: Path) -> None:
    world.commit({"pkg/long.py": edit(LONG, TEN)}, "Ten (#4)\n")
    bare = clone(world, tmp_path / "bare", "--bare")
    plain = clone(world, tmp_path / "plain")
    worktree = tmp_path / "worktree"
    world.repo.git("worktree", "add", "--quiet", "--detach", str(worktree))
    found = [world.read(clone=folder).commits for folder in (bare, plain, worktree)]
    assert found == [world.read().commits] * 3
    assert len(found[0]) == 1


@pytest.mark.parametrize("option", ["--depth=1", "--filter=blob:none"])
def test_clone_that_lacks_something(world: World, tmp_path: Path, option: str) -> None:
    for number in range(3):
        world.commit({"pkg/long.py": edit(LONG, (b"line 9\n", b"%d\n" % number))}, f"{number}\n")
    folder = clone(world, tmp_path / "clone", "--bare", option)
    with pytest.raises(UnavailableError) as refused:
        world.read(clone=folder)
    assert "does not hold" in refused.value.what


def test_no_clone(world: World, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="no git repository"):
        world.read(clone=tmp_path)
    with pytest.raises(UnavailableError, match="no git repository"):
        world.read(clone=tmp_path / "nowhere")


def test_unrelated_pins(world: World) -> None:
    world.repo.git("checkout", "--quiet", "--orphan", "else")
    new = world.repo.commit({"a.py": b"\n"}, "Else\n")
    with pytest.raises(UnavailableError, match="history"):
        world.read(new=new)


def test_clone_runs_nothing_and_stays_as_it_is(world: World, tmp_path: Path) -> None:
    world.commit({"pkg/long.py": edit(LONG, TEN)}, "Ten (#4)\n")
    folder = clone(world, tmp_path / "below" / "clone")
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch '{ran}'\n")
    program.chmod(0o755)
    config = folder / ".git" / "config"
    settings = {
        "core.fsmonitor": program, "diff.external": program, "diff.evil.textconv": program,
        "gpg.program": program, "log.showSignature": "true", "core.pager": program,
        "diff.noprefix": "true", "color.ui": "always", "diff.context": "0",
    }  # fmt: skip
    for key, value in settings.items():
        world.repo.git("config", "--file", str(config), key, str(value))
    (folder / ".git" / "info").mkdir(exist_ok=True)
    (folder / ".git" / "info" / "attributes").write_text("*.py diff=evil\n")
    before = listing(tmp_path)
    assert world.read(clone=folder).commits == world.read().commits
    assert not ran.exists()
    assert listing(tmp_path) == before


def listing(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_subjects() -> None:
    first = UpstreamCommit(id="1" * 40, subject="A (#2)")
    second = UpstreamCommit(id="2" * 40, subject='Revert "A (#2)" (#3)')
    assert second.reverts(first)
    assert not first.reverts(second)
    assert UpstreamCommit(id="3" * 40, subject="Merge pull request #8 from x/y").pull == 8
    assert UpstreamCommit(id="3" * 40, subject="A (#1) again (#9)").pull == 9
    assert UpstreamCommit(id="3" * 40, subject="See #9").pull is None
