"""From a pin to a base tree: every kind of source, and every way in which one is refused.

The public forge is not reached from here: git sources are tested against a real git server on
loopback, whose repositories hold the same trees as the archives.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from overlay.lines.line import read_line
from overlay.report import Reporter
from overlay.sources.source import Sources, read_folder
from overlay.trees.store import Store, cache_folder
from tests.support.servers import GitServer, git_server
from tests.support.tiny import VERSIONS, VLLM_FILES, git, make_sdist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]


@pytest.fixture
def forge(tiny: Tiny) -> Iterator[GitServer]:
    """A git server that holds both upstreams; the line's pins name it."""
    served = tiny.root / "served"
    for upstream, repo in tiny.repos.items():
        git(tiny.root, "clone", "-q", "--bare", str(repo), str(served / f"{upstream}.git"))
    with git_server(served) as server:
        for upstream, repo in tiny.repos.items():
            tiny.edit(
                f'repository = "{repo.as_uri()}"', f'repository = "{server.url}/{upstream}.git"'
            )
        yield server


def _commit(tiny: Tiny) -> str:
    pin = read_line(tiny.patches, "tiny").settings.vllm
    assert pin.commit
    return pin.commit


@pytest.mark.usefixtures("forge")
def test_git_and_archive_give_the_same_base(run: Run) -> None:
    bases = {}
    for source in ("archive", "git"):
        found = run("fetch", "tiny", "--source", source, "--no-wheels", "--json").json
        assert found["upstreams"]["vllm"]["source"] == source
        bases[source] = found["upstreams"]["vllm"]["tree"]
    assert bases["archive"] == bases["git"]
    run("lock", "tiny", "--source", "archive")
    locked = run("verify", "tiny", "--source", "git", "--json").json
    again = run("verify", "tiny", "--source", "archive", "--json").json
    assert locked["digest"] == again["digest"]
    commits = [doc["upstreams"]["vllm"]["commit"] for doc in (locked, again)]
    assert commits[0] == commits[1]


@pytest.mark.usefixtures("forge")
def test_git_fetches_one_commit_and_the_patched_blobs_only(run: Run, tiny: Tiny) -> None:
    assert run("lock", "tiny", "--source", "git").code == 0
    folder = Store(cache_folder(), "vllm").folder
    assert git(folder, "rev-list", "--count", f"refs/overlay/fetched/{_commit(tiny)}") == b"1\n"
    present = git(
        folder, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype) %(objectname)"
    ).split(b"\n")
    blobs = {line.split()[1].decode() for line in present if line.startswith(b"blob")}
    touched = git(
        tiny.repos["vllm"], "rev-parse", "v1.2.3:vllm/one.py", "v1.2.3:vllm/old.py"
    ).split()
    untouched = git(tiny.repos["vllm"], "rev-parse", "v1.2.3:vllm/two.py").split()
    assert {blob.decode() for blob in touched} <= blobs
    assert untouched[0].decode() not in blobs


@pytest.mark.usefixtures("forge")
def test_a_filled_store_needs_no_server(run: Run, forge: GitServer, tiny: Tiny) -> None:
    run("lock", "tiny", "--source", "git")
    shutil.rmtree(tiny.root / "served")
    ran = run("verify", "tiny", "--source", "git", "--offline")
    assert ran.code == 0, ran.err
    del forge


def test_a_moved_tag_is_refused(run: Run, tiny: Tiny, forge: GitServer) -> None:
    repo = tiny.root / "served" / "vllm.git"
    old = _commit(tiny)
    tree = git(repo, "rev-parse", f"{old}^{{tree}}").decode().strip()
    new = git(repo, "commit-tree", "-m", "Another release", tree).decode().strip()
    git(repo, "tag", "-f", "v1.2.3", new)
    ran = run("fetch", "tiny", "--source", "git", "--no-wheels")
    assert ran.code == 5
    assert f"tag v1.2.3 of {forge.url}/vllm.git moved" in ran.err
    assert old in ran.err
    assert new in ran.err
    git(repo, "tag", "-d", "v1.2.3")
    ran = run("fetch", "tiny", "--source", "git", "--no-wheels")
    assert (ran.code, "is gone" in ran.err) == (5, True)


def test_a_missing_commit_is_refused(run: Run, tiny: Tiny, forge: GitServer) -> None:
    old = _commit(tiny)
    tiny.edit('tag = "v1.2.3"\n', "")
    tiny.edit(old, "1" * 40)
    ran = run("fetch", "tiny", "--source", "git", "--no-wheels")
    assert ran.code == 6
    assert f"{forge.url}/vllm.git does not give commit {'1' * 40}" in ran.err


def test_a_server_that_gives_no_filter_serves_all_the_same(
    run: Run, tiny: Tiny, forge: GitServer
) -> None:
    forge.allow_filter = False
    assert run("lock", "tiny", "--source", "git").code == 0
    assert tiny.folder.joinpath("lock.toml").exists()


def test_an_unreachable_server_is_told_apart(run: Run, tiny: Tiny) -> None:
    tiny.edit(tiny.repos["vllm"].as_uri(), "http://127.0.0.1:9/vllm.git")
    ran = run("fetch", "tiny", "--source", "git", "--no-wheels")
    assert ran.code == 6
    assert "http://127.0.0.1:9/vllm.git is out of reach" in ran.err


def test_the_default_takes_the_next_kind_only_when_one_is_out_of_reach(
    run: Run, tiny: Tiny, forge: GitServer
) -> None:
    sdist = tiny.index / "vllm-1.2.3.tar.gz"
    content = sdist.read_bytes()
    sdist.unlink()
    found = run("fetch", "tiny", "--no-wheels", "--json").json
    assert found["upstreams"]["vllm"]["source"] == "git"
    assert found["upstreams"]["flashinfer"]["source"] == "archive"
    # A wrong archive is not out of reach: it is refused, and git does not paper over it
    shutil.rmtree(cache_folder())
    sdist.write_bytes(content + b"x")
    assert run("fetch", "tiny", "--no-wheels").code == 5
    del forge


def test_when_no_kind_can_be_had_all_are_named(run: Run, tiny: Tiny) -> None:
    (tiny.index / "vllm-1.2.3.tar.gz").unlink()
    ran = run("fetch", "tiny", "--offline", "--no-wheels")
    assert ran.code == 6
    assert "archive:" in ran.err
    assert "vllm-1.2.3.tar.gz" in ran.err
    assert "git: commit" in ran.err


def test_an_abbreviated_commit_offers_no_git(run: Run, tiny: Tiny) -> None:
    commit = _commit(tiny)
    tiny.edit(f'commit = "{commit}"', f'abbreviation = "{commit[:9]}"')
    ran = run("lines")
    assert ran.code == 3
    assert "without a full 'commit' git is no source" in ran.err
    text = (tiny.folder / "line.toml").read_text()
    text = text.replace('sources = ["archive", "git"]', 'sources = ["archive"]', 1)
    (tiny.folder / "line.toml").write_text(text)
    assert run("lock", "tiny").code == 0
    ran = run("apply", "tiny", "--source", "git")
    assert ran.code == 5
    assert "the archive's hash is its identity" in ran.err


def test_paths_as_sources(run: Run, tiny: Tiny) -> None:
    """A git repository, an archive, and a plain folder; each is checked like any source."""
    for upstream in ("vllm", "flashinfer"):
        line = read_line(tiny.patches, "tiny")
        repo = tiny.repos[upstream]
        plain = tiny.root / f"plain-{upstream}"
        git(repo, "worktree", "add", "-q", "--detach", str(plain), f"v{VERSIONS[upstream]}")
        (plain / ".git").unlink()
        trees = set()
        for path in (repo, tiny.index / line.pin(upstream).sdist.file, plain):  # type: ignore[arg-type]
            sources = Sources(
                cache=tiny.root / f"cache-{upstream}-{path.name}",
                report=Reporter(quiet=True),
                choices={upstream: str(path)},  # type: ignore[dict-item]
            )
            base = sources.base(line, upstream, {})  # type: ignore[arg-type]
            trees.add(base.commit.commit)
        assert len(trees) == 1
    (tiny.root / "plain-vllm" / "vllm" / "two.py").write_bytes(b"two = 3\n")
    ran = run("fetch", "tiny", "--source", str(tiny.root / "plain-vllm"), "--no-wheels")
    assert ran.code == 5
    assert "another tree than promised" in ran.err
    ran = run("fetch", "tiny", "--source", str(tiny.root / "nowhere"))
    assert ran.code == 5
    assert "no such file or folder" in ran.err


def test_each_upstream_may_come_from_a_path_of_its_own(run: Run, tiny: Tiny) -> None:
    sources = [f"--source={upstream}={repo}" for upstream, repo in tiny.repos.items()]
    made = run("fetch", "tiny", *sources, "--no-wheels", "--json").json["upstreams"]
    assert {row["source"] for row in made.values()} == {"git"}
    mixed = ("--source", "archive", "--source", f"vllm={tiny.repos['vllm']}")
    made = run("fetch", "tiny", *mixed, "--no-wheels", "--json").json["upstreams"]
    assert [row["source"] for row in made.values()] == ["git", "archive"]
    assert run("fetch", "tiny", "--source", "vllm=").code == 2


def test_an_archive_path_with_another_hash_is_refused(run: Run, tiny: Tiny) -> None:
    other = make_sdist(tiny.root / "other.tar.gz", "vllm-1.2.3", VLLM_FILES)
    ran = run("fetch", "tiny", "--source", str(other), "--no-wheels")
    assert ran.code == 5
    assert "is not the pinned archive" in ran.err


def test_an_archive_with_another_tree_than_the_pin_is_refused(run: Run, tiny: Tiny) -> None:
    tree = git(tiny.repos["vllm"], "rev-parse", "v1.2.3^{tree}").decode().strip()
    tiny.edit(tree, "2" * 40)
    ran = run("apply", "tiny", "--source", "archive")
    assert ran.code == 5
    assert f"its tree is {tree}; expected {'2' * 40}" in ran.err
    # and nothing of it stays behind under a name
    store = Store(cache_folder(), "vllm")
    assert git(store.folder, "for-each-ref", "refs/overlay/base") == b""
    ran = run("apply", "tiny", "--source", "git")
    assert ran.code == 5


@pytest.mark.parametrize("source", ["archive", "git"])
def test_the_pins_tree_holds_on_a_warm_cache_too(run: Run, tiny: Tiny, source: str) -> None:
    assert run("lock", "tiny", "--source", source).code == 0
    tree = git(tiny.repos["vllm"], "rev-parse", "v1.2.3^{tree}").decode().strip()
    tiny.edit(tree, "3" * 40)
    for verb in ("lock", "apply", "verify", "fetch", "wheel"):
        ran = run(verb, "tiny", "--source", source)
        assert ran.code == 5, verb
        assert f"its tree is {tree}; expected {'3' * 40}" in ran.err


def test_read_folder_refuses_what_git_cannot_hold(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    subprocess.run(("mkfifo", str(tmp_path / "pipe")), check=True)
    with pytest.raises(Exception, match="neither file nor folder nor link"):
        list(read_folder(tmp_path))
