"""An ordinary git repository with one commit a patch, which a maintainer changes with any tool.

It owns its objects. A linked worktree of the store would leave its metadata there when the
folder is deleted, keep the maintainer's commits in a cache that may be cleared, and refuse a
second checkout of one line; a clone that borrows objects breaks when the store is collected.
A copy of 42 MB in 0.3 s buys a folder that depends on nothing and that nothing depends on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec

from overlay.errors import ExportError, GitError, LineError, MachineError, UnavailableError
from overlay.files import machine_errors, write_atomic
from overlay.lines.line import Upstream
from overlay.sources.source import fetch_objects
from overlay.trees.apply import refuse_bad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from overlay.lines.line import Line
    from overlay.report import Reporter
    from overlay.trees.apply import PatchedTree
    from overlay.trees.git import Git
    from overlay.trees.store import Store

# The tag that names the base tree's commit: 'git rebase -i overlay-base' says what is meant.
BASE_TAG = "overlay-base"
RECORD_FILE = "overlay.json"
_R = TypeVar("_R")

# Rank above every .gitattributes of the tree and above core.autocrlf of the user, so that files
# and blobs hold the same bytes, and no filter (git-lfs, say) runs. Unset 'filter' and the others
# with '!', since '-filter' would still count as a value.
ATTRIBUTES = b"* -text !eol !ident !filter !working-tree-encoding\n"

# All else is the user's own configuration, on purpose.
_CONFIG = b"""\
[core]
\tautocrlf = false
\tsafecrlf = false
[apply]
\twhitespace = nowarn
[i18n]
\tcommitEncoding = UTF-8
"""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``export`` must know about a checkout; a file in its git folder.

    Attributes:
        line, upstream: what was checked out.
        base: id of the base tree's commit.
        patches: names of the series, each with the SHA-256 of its file, when the checkout was
            made or last exported. A file that differs was changed by somebody else since.
        format: of this file.
    """

    line: str
    upstream: Upstream
    base: str
    patches: dict[str, str]
    format: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    """A checkout that was made: where, on which branch, and the commit that HEAD names."""

    folder: Path
    branch: str
    base: str
    commit: str


def checkout(
    store: Store,
    patched: PatchedTree,
    line: Line,
    upstream: Upstream,
    folder: Path,
    report: Reporter,
    *,
    at: str | None = None,
    url: str = "",
    offline: bool = False,
) -> Checkout:
    """Make ``folder`` a git repository with the patches of one series as commits.

    Args:
        store: holds the objects.
        patched: the series, applied.
        line: that it belongs to; names the branch.
        upstream: whose series it is.
        folder: must not exist, or be empty. It appears complete or not at all.
        report: for progress.
        at: stop after this patch; ``overlay-base`` stops before the first.
        url: the repository that the base came from, if it did (``Base.url``): a store from
            git holds trees, and only the files that were asked for.
        offline: don't fetch what the store lacks.

    Raises:
        MachineError: the folder is in use, or can't be written.
        LineError: ``at`` names no patch of the series.
        ApplyError: a patch up to there is bad.
        UnavailableError: the store lacks files and they can't be fetched.
    """
    folder = folder.resolve()
    commit = _commit_at(patched, line, upstream, at)
    with new_repository(store, folder, line.name) as made:
        with report.progress(f"copying the objects of {line.name} {upstream}"):
            copy_objects(store, [commit], made.git_folder, report, url=url, offline=offline)
        made.refs({f"refs/tags/{BASE_TAG}": patched.base.commit, f"refs/heads/{line.name}": commit})
        with report.progress(f"writing {folder}"):
            made.write(commit)
        patches = {patch.name: patch.sha256 for patch in line.series[upstream]}
        write_record(
            made.git_folder,
            Record(line=line.name, upstream=upstream, base=patched.base.commit, patches=patches),
        )
    return Checkout(folder=folder, branch=line.name, base=patched.base.commit, commit=commit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository that is being made; it is no one's yet.

    Attributes:
        folder, git_folder: where it is now, not where it will be.
        git: of a store; ``run`` has it work here.
    """

    folder: Path
    git_folder: Path
    git: Git

    def run(
        self, *arguments: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> bytes:
        """Standard output of one sealed git command in this repository."""
        own = {"GIT_DIR": str(self.git_folder), "GIT_WORK_TREE": str(self.folder)}
        return self.git.run(*arguments, stdin=stdin, env={**own, **(env or {})})

    def refs(self, refs: Mapping[str, str]) -> None:
        """Create refs, by full name."""
        lines = "".join(f"create {name} {commit}\n" for name, commit in refs.items())
        self.run("update-ref", "--stdin", stdin=lines.encode())

    def write(self, tree: str) -> None:
        """Fill the empty index and the folder with a commit's or tree's files."""
        # One writer a core: 6600 files are bound by the system, not by git
        self.run("-c", "checkout.workers=0", "read-tree", "-m", "-u", tree)


@contextlib.contextmanager
def new_repository(store: Store, folder: Path, branch: str) -> Iterator[Repository]:
    """A repository that is at ``folder`` when the block ends, complete, or not at all.

    Args:
        store: whose git makes it.
        folder: must not exist, or be empty; resolved.
        branch: that HEAD names.

    Raises:
        MachineError: the folder is in use, or can't be written.
    """
    _check_free(folder)
    with machine_errors(folder, is_cache=False), _beside(folder) as new:
        made = Repository(folder=new, git_folder=new / ".git", git=store.git)
        made.git_folder.mkdir()
        made.run(
            "init", "--quiet", "--template=", "--object-format=sha1", f"--initial-branch={branch}"
        )
        with (made.git_folder / "config").open("ab") as file:
            file.write(_CONFIG)
        (made.git_folder / "info").mkdir(exist_ok=True)
        (made.git_folder / "info" / "attributes").write_bytes(ATTRIBUTES)
        yield made
        try:
            new.rename(folder)  # replaces an empty folder; fails on any other
        except OSError as error:
            raise _in_use(folder, error.strerror or "") from None


def git_folders(folder: Path) -> tuple[Path, Path]:
    """Git folder of a checkout, and the one that it shares with ``git worktree`` siblings."""
    at = folder / ".git"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if at.is_file():
            at = folder / at.read_text().removeprefix("gitdir:").strip()
        common = at / "commondir"
        shared = at / common.read_text().strip() if common.is_file() else at
        if (shared / "objects").is_dir():
            return at.resolve(), shared.resolve()
    raise ExportError(
        f"{folder} is no git checkout", fix="name the folder that 'checkout' made, or make one"
    )


def read_record(git_folder: Path) -> Record:
    """The record of a checkout. Raises ``ExportError`` when there is none that can be read."""
    try:
        return decode_record(git_folder / RECORD_FILE, Record, maker="checkout")
    except ValueError as error:
        raise ExportError(
            f"{git_folder.parent} does not say which line it belongs to",
            why=str(error),
            fix="make a new checkout, and carry commits over with 'git fetch' and "
            "'git cherry-pick'",
        ) from None


def decode_record(path: Path, kind: type[_R], *, maker: str) -> _R:
    """What a verb left in the git folder that it made. Raises ``ValueError`` that says why not."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError:
        raise ValueError(f"it was not made by '{maker}'") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} in its git folder is damaged: {error}") from None


def write_record(git_folder: Path, record: Record) -> None:
    """Put the record of a checkout where ``read_record`` finds it."""
    write_atomic(git_folder / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record)))


def _commit_at(patched: PatchedTree, line: Line, upstream: Upstream, at: str | None) -> str:
    wanted = patched.patches
    if at == BASE_TAG:
        return patched.base.commit
    if at is not None:
        names = [patch.name for patch in patched.patches]
        of, patch = line.patch(at)
        if of != upstream or patch.name not in names:
            raise LineError(f"{at} is no patch of {line.name}'s {upstream} series")
        wanted = wanted[: names.index(patch.name) + 1]
    reached = msgspec.structs.replace(patched, patches=wanted)
    refuse_bad(reached, line.name, upstream)
    return reached.commit


def _check_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _in_use(folder, "a checkout never writes over anything")


def _in_use(folder: Path, why: str) -> MachineError:
    return MachineError(
        f"{folder} exists and is not an empty folder", why=why, fix="name another folder"
    )


@contextlib.contextmanager
def _beside(folder: Path) -> Iterator[Path]:
    """A new folder beside ``folder``; what a killed run left there goes first."""
    prefix = f".{folder.name}.checkout-"
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f"{prefix}*"):
        if not _runs(left.name.removeprefix(prefix)):
            shutil.rmtree(left, ignore_errors=True)
    new = folder.parent / f"{prefix}{os.getpid()}"
    new.mkdir()
    try:
        yield new
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return int(pid) != os.getpid()


def copy_objects(
    store: Store,
    commits: Sequence[str],
    git_folder: Path,
    report: Reporter,
    *,
    url: str,
    offline: bool,
) -> None:
    """Pack everything that ``commits`` need into the checkout.

    Git runs in the checkout and borrows from the store for this one process, so no temporary
    file lands in the store, and a store that lacks objects is an error and never asks a server.
    """
    packs = git_folder / "objects" / "pack"
    packs.mkdir(parents=True, exist_ok=True)
    quoted = str(store.folder / "objects").replace("\\", "\\\\").replace('"', '\\"')
    env = {"GIT_DIR": str(git_folder), "GIT_ALTERNATE_OBJECT_DIRECTORIES": f'"{quoted}"'}

    def pack() -> None:
        store.git.run(
            "pack-objects", "--quiet", "--revs", "--delta-base-offset", str(packs / "pack"),
            env=env, stdin=b"".join(commit.encode() + b"\n" for commit in commits),
        )  # fmt: skip

    try:
        pack()
    except GitError:
        missing = _missing(store, commits)
        if not missing:
            raise
        _fetch(store, missing, report, url=url, offline=offline)
        pack()


def _missing(store: Store, commits: Sequence[str]) -> list[str]:
    listed = store.git.run(
        "rev-list", "--objects", "--no-object-names", "--missing=print", *commits
    ).decode()
    return [line[1:] for line in listed.splitlines() if line.startswith("?")]


def _fetch(store: Store, missing: list[str], report: Reporter, *, url: str, offline: bool) -> None:
    """Get files that a partial store lacks from the repository that promised them."""
    why = "--offline forbids to fetch them" if offline else "no repository promised them"
    if url and not offline:
        try:
            with store.writing():
                fetch_objects(store, url, missing, report)
            return
        except GitError as error:
            why = error.why
    raise UnavailableError(
        f"the store lacks the contents of {len(missing)} files of this tree",
        why=why,
        fix="check out while online, or use --source archive",
    )
