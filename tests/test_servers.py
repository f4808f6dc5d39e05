import os
import subprocess
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.servers import GitServer, git_server

ENVIRONMENT = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@b", "GIT_TERMINAL_PROMPT": "0",
}  # fmt: skip


def git(*argv: str | Path, at: Path, ok: bool = True) -> str:
    done = subprocess.run(
        ("git", *argv), cwd=at, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout.strip()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[GitServer]:
    """Serves ``demo.git``: two commits, the first one not a tip of anything."""
    work, served = tmp_path / "work", tmp_path / "served"
    work.mkdir()
    git("init", "-q", "-b", "main", at=work)
    for text in ("one", "two"):
        (work / "file").write_text(text)
        (work / "large").write_bytes(os.urandom(100_000))
        git("add", ".", at=work)
        git("commit", "-qm", text, at=work)
    git("clone", "-q", "--bare", work, served / "demo.git", at=tmp_path)
    with git_server(served) as server:
        yield server


@pytest.fixture
def bare(tmp_path: Path, server: GitServer) -> Path:
    bare = tmp_path / "bare"
    git("init", "-q", "--bare", bare, at=tmp_path)
    git("remote", "add", "origin", f"{server.url}/demo.git", at=bare)
    return bare


def first_commit(server: GitServer) -> str:
    return git("rev-parse", "main~", at=server.root / "demo.git")


def test_clone(server: GitServer, tmp_path: Path) -> None:
    git("clone", "-q", f"{server.url}/demo.git", "copy", at=tmp_path)
    assert (tmp_path / "copy" / "file").read_text() == "two"
    assert {method for method, _ in server.seen} == {"GET", "POST"}


def test_a_request_in_chunks(server: GitServer) -> None:
    """As git sends one that is larger than http.postBuffer."""
    connection = HTTPConnection(server.url.removeprefix("http://"), timeout=10)
    connection.request(
        "POST",
        "/demo.git/git-upload-pack",
        body=iter([b"0014command=", b"ls-refs\n", b"0000"]),
        headers={"Content-Type": "application/x-git-upload-pack-request",
                 "Git-Protocol": "version=2"},
        encode_chunked=True,
    )  # fmt: skip
    answer = connection.getresponse().read()
    connection.close()
    assert b"refs/heads/main" in answer


@pytest.mark.parametrize("protocol", ["0", "2"])
def test_a_commit_by_its_id(server: GitServer, bare: Path, protocol: str) -> None:
    wanted = first_commit(server)
    argv = ("-c", f"protocol.version={protocol}", "fetch", "-q", "--depth=1", "origin", wanted)
    if protocol == "0":  # version 2 lets any id through, whatever the switches say
        server.allow_reachable = server.allow_any = False
        git(*argv, at=bare, ok=False)
        server.allow_reachable = True
    git(*argv, at=bare)
    assert git("cat-file", "-t", wanted, at=bare) == "commit"


@pytest.mark.parametrize("is_allowed", [False, True])
def test_blobs_on_demand(server: GitServer, bare: Path, is_allowed: bool) -> None:
    server.allow_filter = is_allowed
    wanted = first_commit(server)
    git("fetch", "-q", "--depth=1", "--filter=blob:none", "origin", wanted, at=bare)
    counted = git("count-objects", "-v", at=bare)
    missing = git("rev-list", "--objects", "--missing=print", wanted, at=bare)
    assert ("\n?" in missing) == is_allowed, counted
    assert git("cat-file", "-p", f"{wanted}:file", at=bare) == "one"  # fetched if it must be


def test_what_is_not_served(server: GitServer, tmp_path: Path) -> None:
    git("ls-remote", f"{server.url}/none.git", at=tmp_path, ok=False)
    git("ls-remote", f"{server.url}/../work", at=tmp_path, ok=False)
    server.is_down = True
    git("ls-remote", f"{server.url}/demo.git", at=tmp_path, ok=False)
