from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from overlay.errors import (
    ApplyError,
    ExportError,
    GitError,
    LineError,
    MachineError,
    UnavailableError,
)
from overlay.patches.checkout import BASE_TAG, checkout, read_record
from overlay.report import Reporter
from overlay.sources.source import REMOTE, promisor
from overlay.trees.store import EPOCH, IDENTITY, FastImport
from tests.support.desk import FILES, make_desk
from tests.support.servers import git_server

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.desk import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path)


def content(file: bytes | tuple[int, bytes]) -> bytes:
    return file[1] if isinstance(file, tuple) else file


def test_a_commit_a_patch_on_a_branch_over_the_tagged_base(desk: Desk) -> None:
    made = desk.make(desk.folder / "deep" / "work")
    work = desk.work(made.folder)
    assert work.git("symbolic-ref", "HEAD") == b"refs/heads/demo\n"
    assert work.git("rev-parse", BASE_TAG).decode().strip() == desk.base.commit == made.base
    assert work.git("rev-parse", "HEAD").decode().strip() == desk.apply().commit == made.commit
    names = work.git("log", "--reverse", "--format=%(trailers:key=Patch-Name,valueonly)", "HEAD")
    assert names.split() == [b"first", b"second", b"third"]
    assert work.git("status", "--porcelain", "--ignored") == b""
    work.git("fsck", "--strict", "--full")


def test_files_have_the_bytes_of_the_tree_whatever_attributes_and_user_say(desk: Desk) -> None:
    home = desk.folder / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(
        f"[core]\n autocrlf = true\n eol = crlf\n hooksPath = {home}/hooks\n"
        f'[filter "evil"]\n clean = touch {home}/ran; cat\n smudge = touch {home}/ran; cat\n'
        " required = true\n"
    )
    work = desk.checkout(at=BASE_TAG)
    for name, file in FILES.items():
        path = work.path / name
        got = os.fsencode(path.readlink()) if path.is_symlink() else path.read_bytes()
        assert got == content(file), name
    assert os.access(work.path / "run.sh", os.X_OK)
    # The same from then on, by the user's own git: all files written again, none changed
    for name in FILES:
        (work.path / name).unlink()
    work.git("checkout", "-q", "--", ".")
    assert (work.path / "crlf.txt").read_bytes() == content(FILES["crlf.txt"])
    (work.path / "a.py").touch()
    assert work.git("status", "--porcelain") == b""
    assert not (home / "ran").exists()


def test_hostile_user_configuration_and_variables_do_not_reach_the_making(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = desk.folder / "hostile"
    (home / "template" / "hooks").mkdir(parents=True)
    hook = home / "template" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {home}/ran\n")
    hook.chmod(0o755)
    (home / ".gitconfig").write_text(
        f"[init]\n templateDir = {home}/template\n defaultBranch = evil\n"
        f"[core]\n fsmonitor = touch {home}/ran\n bare = true\n"
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_TEMPLATE_DIR", str(home / "template"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(home / "index"))
    monkeypatch.setenv("GIT_WORK_TREE", str(home))
    made = desk.make(desk.folder / "work")
    assert not (made.folder / ".git" / "hooks").exists()
    assert sorted(path.name for path in home.iterdir()) == [".gitconfig", "template"]
    config = (made.folder / ".git" / "config").read_text()
    assert "bare = false" in config
    assert "evil" not in config
    assert "/" not in config  # no path of this machine: the folder may be moved


def test_the_checkout_stands_alone(desk: Desk) -> None:
    """Neither collecting nor deleting the store breaks it, and it leaves nothing there."""
    desk.apply()
    before = {path for path in desk.store.folder.rglob("*") if path.is_file()}
    work = desk.checkout()
    assert {path for path in desk.store.folder.rglob("*") if path.is_file()} == before
    assert not (work.path / ".git" / "objects" / "info" / "alternates").exists()
    shutil.rmtree(desk.store.folder)
    moved = desk.work(work.path.rename(work.path.with_name("moved")))
    moved.git("fsck", "--full")
    moved.git("rebase", "-q", "--force-rebase", BASE_TAG)
    assert moved.git("status", "--porcelain") == b""


def test_two_checkouts_of_one_line(desk: Desk) -> None:
    one, two = desk.checkout(), desk.checkout()
    one.commit("one\n", {"b.py": b"1\n"})
    assert two.git("status", "--porcelain") == b""
    assert two.git("log", "--oneline", "--all").count(b"\n") == 4


def test_at_a_patch(desk: Desk) -> None:
    work = desk.checkout(at="second")
    assert work.git("log", "--format=%s").splitlines() == [
        b"area: do the second", b"area: do the first", b"vllm 1.0",
    ]  # fmt: skip
    with pytest.raises(LineError, match="fourth"):
        desk.checkout(at="fourth")


def test_a_used_folder_is_refused_and_untouched(desk: Desk) -> None:
    used = desk.folder / "used"
    used.mkdir()
    (used / "mine").write_text("mine")
    for folder in (used, used / "mine"):
        with pytest.raises(MachineError, match="not an empty folder"):
            desk.make(folder)
    assert [path.name for path in used.iterdir()] == ["mine"]
    empty = desk.folder / "empty"
    empty.mkdir()
    assert (desk.make(empty).folder / "a.py").exists()


def test_a_failure_leaves_nothing(desk: Desk) -> None:
    patched = desk.apply()
    shutil.rmtree(desk.store.folder / "objects")
    (desk.store.folder / "objects").mkdir()
    before = sorted(path.name for path in desk.folder.iterdir())
    with pytest.raises(GitError):
        checkout(
            desk.store, patched, desk.line(), "vllm", desk.folder / "new", Reporter(quiet=True)
        )
    assert sorted(path.name for path in desk.folder.iterdir()) == before


def test_what_a_killed_run_left_goes(desk: Desk) -> None:
    gone = subprocess.Popen((sys.executable, "-c", ""))
    gone.wait()
    left = desk.folder / f".work.checkout-{gone.pid}"
    running = desk.folder / ".work.checkout-1"
    for folder in (left, running):
        folder.mkdir()
        (folder / "half").write_text("half")
    desk.make(desk.folder / "work")
    assert not left.exists()
    assert running.exists()


def test_bad_patches_are_refused_unless_after_the_wanted_state(desk: Desk) -> None:
    path = desk.series / "third.patch"
    path.write_bytes(path.read_bytes().replace(b"-line 45", b"-line 99"))
    with pytest.raises(ApplyError) as caught:
        desk.checkout()
    assert "third" in caught.value.why
    assert (desk.checkout(at="second").path / "a.py").exists()


def make_partial(desk: Desk, url: str) -> None:
    """Make the desk's store hold trees only, as a source from git does."""
    desk.store.reader.close()
    desk.store.folder.rename(desk.store.folder.with_name("full.git"))
    (desk.series / "series").write_text("")
    ref = "refs/overlay/base/demo"
    with desk.store.writing():
        desk.store.git.run(
            *promisor(url), "fetch", "--quiet", "--filter=blob:none", REMOTE, f"{ref}:{ref}",
            network=True,
        )  # fmt: skip


def test_a_partial_store_fetches_what_is_missing_or_says_so(desk: Desk) -> None:
    with git_server(desk.store.folder.parent) as server:
        url = f"{server.url}/full.git"
        make_partial(desk, url)
        for options, why in (
            ({"url": url, "offline": True}, "--offline"),
            ({}, "no repository promised them"),
            ({"url": f"{server.url}/none.git"}, "none.git"),
        ):
            with pytest.raises(UnavailableError, match=rf"of {len(FILES)} files") as caught:
                desk.checkout(**options)
            assert why in caught.value.why
        work = desk.checkout(url=url)
        assert (work.path / "data.bin").read_bytes() == content(FILES["data.bin"])
        work.git("fsck", "--full")
        assert b"promisor" not in (work.path / ".git" / "config").read_bytes()


def test_submodules_of_the_base_are_empty_folders(desk: Desk) -> None:
    """A tree from git may name commits of other repositories; nobody has them."""
    git = desk.store.git
    listed = git.run("ls-tree", desk.base.tree) + b"160000 commit " + b"1" * 40 + b"\t3rdparty\n"
    tree = git.run("mktree", "--missing", stdin=listed).decode().strip()
    with desk.store.writing(), FastImport(desk.store) as stream:
        stream.commit("refs/x", parent=None, identity=IDENTITY, date=EPOCH, message="base\n")
        stream.root(tree)
        desk.base = stream.made()
    assert desk.base.tree == tree
    work = desk.checkout()
    assert list((work.path / "3rdparty").iterdir()) == []
    assert work.git("status", "--porcelain") == b""
    assert desk.export(work).kept == ("first", "second", "third")
    work.git("rebase", "-q", "--force-rebase", BASE_TAG)
    assert desk.export(work, reformat=True).tree == desk.apply().tree


def test_record_that_is_no_record(desk: Desk) -> None:
    work = desk.checkout()
    record = work.path / ".git" / "overlay.json"
    for text, why in (("{}", "damaged"), ("\xff", "damaged"), (None, "not made by")):
        if text is None:
            record.unlink()
        else:
            record.write_bytes(text.encode("latin-1"))
        with pytest.raises(ExportError) as caught:
            read_record(work.path / ".git")
        assert why in caught.value.why
