"""Shared fixtures: tiny real git repositories, stores, and patches that plain git wrote.

What most tests need::

    def test_something(upstream, store, import_base):
        base = import_base(store, upstream)                       # overlay.trees.store.Commit
        upstream.commit({"a.py": b"print(2)\n"}, "Print two\n")
        patch = parse_patch(upstream.patch(), name="print-two")
        patched = apply_series(store, base, [patch])
        assert patched.tree == upstream.tree()

``make_repo`` and ``make_store`` make more of them, and may be used in hypothesis tests, since
they are of session scope. ``VLLM_OVERLAY_CACHE`` names an empty folder in every test that isn't
marked ``real``.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from overlay.cli import main
from overlay.sources.archive import Member
from overlay.trees.store import Store
from tests.support.tiny import FLASHINFER_FILES, VLLM_FILES, Tiny, make_tiny

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from overlay.lines.line import Upstream
    from overlay.trees.store import Commit

    # None deletes; a pair is (mode, content), with 0o120000 for a link to ``content``
    File = bytes | tuple[int, bytes] | None

# The same examples everywhere, and no deadline: a busy machine is no fault
settings.register_profile("project", deadline=None, derandomize=True)
settings.load_profile("project")

# Nothing of the user, nothing of the clock: the ids that plain git makes are the same everywhere.
GIT_ENV = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "Ada Author",
    "GIT_AUTHOR_EMAIL": "ada@example.invalid",
    "GIT_AUTHOR_DATE": "1700000000 +0130",
    "GIT_COMMITTER_NAME": "Carl Committer",
    "GIT_COMMITTER_EMAIL": "carl@example.invalid",
    "GIT_COMMITTER_DATE": "1700000001 +0000",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repo:
    """A git repository with a working tree at ``path``, driven by plain git."""

    path: Path

    def git(
        self,
        *arguments: str | bytes | Path,
        stdin: bytes = b"",
        ok: Sequence[int] = (0,),
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        """Standard output of a git command; the test fails when its exit code isn't in ``ok``."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        done = subprocess.run(
            ("git", *arguments),
            input=stdin,
            capture_output=True,
            check=False,
            cwd=self.path,
            env={**clean, **GIT_ENV, **(env or {})},
        )
        assert done.returncode in ok, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def write(self, files: Mapping[str | bytes, File]) -> None:
        """Change files of the working tree."""
        for name, file in files.items():
            path = os.path.join(os.fsencode(self.path), os.fsencode(name))  # noqa: PTH118 - bytes
            if os.path.lexists(path):
                os.unlink(path)  # noqa: PTH108
            if file is None:
                continue
            mode, data = file if isinstance(file, tuple) else (0o100644, file)
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
            if mode == 0o120000:
                os.symlink(data, path)  # noqa: PTH211
                continue
            with open(path, "wb") as out:  # noqa: PTH123
                out.write(data)
            os.chmod(path, mode & 0o777)  # noqa: PTH101

    def commit(
        self, files: Mapping[str | bytes, File], message: str | bytes = "Change something\n"
    ) -> str:
        """Change files and commit them (``message`` as it is); the commit's id."""
        self.write(files)
        self.git("add", "--all", "--force")
        text = message.encode() if isinstance(message, str) else message
        self.git("commit", "--quiet", "--allow-empty", "--cleanup=verbatim", "--file=-", stdin=text)
        return self.git("rev-parse", "HEAD").decode().strip()

    def patch(self, commit: str = "HEAD", *options: str) -> bytes:
        """One commit as ``git format-patch`` writes it, with full ids and binary content."""
        return self.git(
            "format-patch", "-1", "--stdout", "--full-index", "--binary", *options, commit
        )

    def tree(self, commit: str = "HEAD") -> str:
        """Tree id of a commit."""
        return self.git("rev-parse", f"{commit}^{{tree}}").decode().strip()

    def reset(self, commit: str) -> None:
        """Go back to a commit, working tree and all."""
        self.git("reset", "--quiet", "--hard", commit)
        self.git("clean", "--quiet", "-ffdx")

    def members(self, commit: str = "HEAD") -> list[Member]:
        """Every file of a commit."""
        found = []
        for entry in self.git("ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0")[:-1]:
            head, _, path = entry.partition(b"\t")
            mode, _, blob = head.decode().split()
            data = self.git("cat-file", "blob", blob)
            found.append(Member(path=path, mode=int(mode, 8), data=data))
        return found


def numbered(first: int, last: int) -> bytes:
    """Lines ``line <first>`` to ``line <last>``."""
    return b"".join(b"line %d\n" % number for number in range(first, last + 1))


@pytest.fixture(autouse=True)
def _own_cache(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("VLLM_OVERLAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def make_repo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Repo]:
    """Makes empty repositories."""

    def make() -> Repo:
        repo = Repo(path=tmp_path_factory.mktemp("repo"))
        repo.git("init", "--quiet", "--initial-branch=main", "--template=")
        return repo

    return make


@pytest.fixture
def upstream(make_repo: Callable[[], Repo]) -> Repo:
    """A repository with one commit: a package, a script, a link, a binary and a CRLF file."""
    repo = make_repo()
    repo.commit(
        {
            "pkg/__init__.py": b"",
            "pkg/long.py": numbered(1, 60),
            "pkg/short.py": b"one\ntwo\nthree\n",
            "a.py": b"print(1)\n",
            "bin/run": (0o100755, b"#!/bin/sh\nexit 0\n"),
            "link": (0o120000, b"pkg/short.py"),
            "data.bin": bytes(range(256)) * 4,
            "docs/crlf.txt": b"one\r\ntwo\r\nthree\r\n",
        },
        "Begin\n",
    )
    return repo


@pytest.fixture(scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Store]:
    """Makes stores, each in a cache folder of its own: ``make_store(upstream="vllm")``."""
    numbers = count()

    def make(upstream: Upstream = "vllm") -> Store:
        return Store(tmp_path_factory.mktemp(f"cache{next(numbers)}-"), upstream)

    return make


@pytest.fixture
def store(make_store: Callable[..., Store]) -> Store:
    """An empty store for vLLM."""
    return make_store()


@pytest.fixture(scope="session")
def import_base() -> Callable[..., Commit]:
    """``import_base(store, repo, commit="HEAD")`` puts a commit's tree into a store as a base."""

    def put(store: Store, repo: Repo, commit: str = "HEAD") -> Commit:
        tree = repo.tree(commit)
        return store.import_tree(
            repo.members(commit),
            ref=f"refs/overlay/base/{tree}",
            message="base\n",
            expect={tree: "the test's repository"},
        )

    return put


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The line ``tiny``, unlocked, with two vLLM patches and one FlashInfer patch."""
    made = make_tiny(tmp_path / "project", monkeypatch)
    one = VLLM_FILES["vllm/one.py"]
    made.add_patch("vllm", "first", {"vllm/one.py": one.replace(b"= 3\n", b"= 33\n")})
    made.add_patch("vllm", "second", {"vllm/new.py": b"new = 1\n", "vllm/old.py": None})
    source = FLASHINFER_FILES["csrc/prefill.cu"]
    made.add_patch("flashinfer", "check", {"csrc/prefill.cu": source.replace(b"e 7\n", b"e x\n")})
    return made


@dataclass(frozen=True, slots=True)
class Ran:
    """One invocation of the command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on standard output."""
        return json.loads(self.out)


@pytest.fixture
def run(tiny: Tiny, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a verb on ``tiny`` in this process: ``run("apply", "tiny", "--json")``."""

    def command(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(["--patches", str(tiny.patches), *arguments])
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return command
