"""What a maintainer's checkout holds, read so that nothing in it can run or change a byte.

Its configuration and attributes may name programs (filters, external diffs, fsmonitor). So git
works in a scratch repository of our own, which borrows the checkout's objects, a copy of its
index, and its files; of the checkout's repository only HEAD is asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import ExportError, GitError
from overlay.patches.checkout import ATTRIBUTES, BASE_TAG, Record, git_folders, read_record
from overlay.patches.patch import NAME_TRAILER
from overlay.trees.git import Git, ObjectReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlay.trees.store import Store

# The one form in which patches are written. The repository that git runs in has no
# configuration, so only what is not git's default, or might cease to be, is said.
_FORMAT = (
    "--zero-commit",  # an id would change with every rebase
    "--no-signature",  # git's version would change with every machine
    "--full-index",  # length of short ids depends on the repository; binary diffs need full ones
    "--binary",  # a diff that can be applied, not "files differ"
    "--no-stat",  # says nothing that the diff doesn't, and changes with the terminal
    "--no-numbered",  # order is the series file's alone
    "--subject-prefix=PATCH",
    "--find-renames",  # a moved file reads as one, and its history goes on
    "--no-ext-diff",  # never run a program that an attribute names
    "--no-textconv",
    "--diff-algorithm=myers",
    "--indent-heuristic",
    "--unified=3",
    "--inter-hunk-context=0",
    "--src-prefix=a/",  # what the parser and 'git am' expect
    "--dst-prefix=b/",
    "--no-relative",
    "--numbered-files",  # names without a subject in them
)

# Nor may an attribute choose how a file is compared or how its hunks are headed. Git 2.43 to 2.45
# read them from HEAD's tree even in a bare repository.
_ATTRIBUTES = ATTRIBUTES.rstrip(b"\n") + b" !diff !merge\n"

# A name wherever it stands in a message: squashing moves trailers into the middle
NAME_LINE = re.compile(rf"{NAME_TRAILER}:[ \t]*(.*?)[ \t\r]*\Z", re.IGNORECASE)

# In the checkout's git folder -> what is going on there
_UNDER_WAY = {
    "rebase-merge": "a rebase",
    "rebase-apply": "a rebase or 'git am'",
    "MERGE_HEAD": "a merge",
    "CHERRY_PICK_HEAD": "a cherry-pick",
    "REVERT_HEAD": "a revert",
    "sequencer": "a cherry-pick or revert of several commits",
    "BISECT_LOG": "a bisection",
}


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A commit of a checkout that is to become a patch."""

    commit: str
    parents: tuple[str, ...]
    tree: str
    raw_message: bytes
    encoding: str

    @cached_property
    def lines(self) -> list[str]:
        """The message as lines."""
        try:
            return self.raw_message.decode(self.encoding).replace("\r\n", "\n").split("\n")
        except (UnicodeDecodeError, LookupError):
            raise ExportError(
                f"the message of commit {self.commit[:12]} is not {self.encoding}",
                fix="reword the commit in UTF-8",
            ) from None

    @property
    def names(self) -> list[str]:
        """Names that the message gives, each once."""
        found = (NAME_LINE.match(line) for line in self.lines)
        return list(dict.fromkeys(match[1].removesuffix(".patch") for match in found if match))

    @property
    def message(self) -> tuple[str, str]:
        """Subject and body as git understands them, without the name."""
        lines = [line.rstrip() for line in _unnamed(self.lines)]
        head, _, body = "\n".join(lines).strip("\n").partition("\n\n")
        return head.replace("\n", " ").strip(), body.strip("\n")

    def __str__(self) -> str:
        """For messages: short id and subject."""
        return f"{self.commit[:12]} ({self.message[0][:60]!r})"


class Work:
    """An opened checkout. ``record`` says what it was made from, ``head`` is its commit."""

    def __init__(self, folder: Path, git_folder: Path, scratch: Path, record: Record) -> None:
        self.folder, self.record = folder, record
        self._git_folder, self._scratch = git_folder, scratch
        self.git = Git(scratch / "git")
        self.reader = ObjectReader(self.git)
        self.head = ""

    def prepare(self, store: Store, shared: Path) -> None:
        """Find HEAD, and make the scratch repository."""
        self.head = _head(store, self._git_folder)
        scratch = self.git.folder
        scratch.mkdir()
        self.git.run("init", "--quiet", "--bare", "--template=", "--object-format=sha1")
        objects = (shared / "objects", store.folder / "objects")
        (scratch / "objects" / "info" / "alternates").write_bytes(
            b"".join(os.fsencode(path) + b"\n" for path in objects)
        )
        (scratch / "info").mkdir(exist_ok=True)
        (scratch / "info" / "attributes").write_bytes(_ATTRIBUTES)
        (scratch / "HEAD").write_text(f"{self.head}\n")
        # A split index names its other half beside itself
        for index in (self._git_folder / "index", *self._git_folder.glob("sharedindex.*")):
            if index.is_file():
                shutil.copyfile(index, scratch / index.name)

    def check_idle(self) -> None:
        """Refuse a checkout in which git has left something open, or with loose changes."""
        for name, what in _UNDER_WAY.items():
            if (self._git_folder / name).exists():
                raise ExportError(
                    f"{what} is under way in {self.folder}",
                    fix="finish or abort it; 'git status' there says how",
                )
        changed = [path for state, path in self.status if state != "??"]
        if changed:
            raise ExportError(
                f"{self.folder} has changes that are in no commit",
                why="\n".join(changed[:20]) + (" ..." if len(changed) > 20 else ""),
                fix="commit them (git commit --fixup=<commit>, then git rebase -i --autosquash "
                f"{BASE_TAG}), or put them away with git stash",
            )

    @property
    def untracked(self) -> tuple[str, ...]:
        """Files that git was never told of; export leaves them out."""
        return tuple(path for state, path in self.status if state == "??")

    @cached_property
    def status(self) -> list[tuple[str, str]]:
        """Paths that differ, each after git's two letters for index and file."""
        out = self.git.run(
            "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=normal",
            "--ignore-submodules=all", env={"GIT_WORK_TREE": str(self.folder)},
        )  # fmt: skip
        entries = out.decode(errors="surrogateescape").split("\0")[:-1]
        return [(entry[:2], entry[3:]) for entry in entries]

    def drafts(self) -> list[Draft]:
        """The commits from base to HEAD, oldest first. Raises when they are no straight line."""
        found: list[Draft] = []
        at = self.head
        while at != self.record.base:
            draft = self.read(at)
            if len(draft.parents) > 1:
                raise ExportError(
                    f"commit {draft} is a merge",
                    why="a series is a straight line of patches",
                    fix=f"run 'git rebase -i {BASE_TAG}', which makes it one",
                )
            if not draft.parents:
                raise ExportError(
                    f"HEAD of {self.folder} does not stand on the base tree of the line",
                    why=f"its history ends at {draft} without passing {self.record.base[:12]}",
                    fix=f"check out the branch {self.record.line}, or rebase onto {BASE_TAG}",
                )
            found.append(draft)
            at = draft.parents[0]
        return found[::-1]

    def read(self, commit: str) -> Draft:
        """One commit."""
        got = self.reader.get(commit)
        if got is None or got[1] != "commit":
            raise ExportError(f"commit {commit} is missing from {self.folder}")
        head, _, message = got[2].partition(b"\n\n")
        fields = [line.split(b" ", 1) for line in head.split(b"\n") if b" " in line]
        values = {key: value.decode(errors="replace") for key, value in reversed(fields)}
        return Draft(
            commit=got[0],
            parents=tuple(value.decode() for key, value in fields if key == b"parent"),
            tree=values[b"tree"],
            raw_message=message,
            encoding=values.get(b"encoding", "UTF-8"),
        )

    def mails(self, drafts: Sequence[Draft]) -> list[bytes]:
        """The drafts as patch files, without names."""
        return format_mails(self.git, self.record.base, self.head, len(drafts), self._scratch)


@contextlib.contextmanager
def opened(
    folder: Path, store: Store, *, read: Callable[[Path], Record] = read_record
) -> Iterator[Work]:
    """Open the checkout at ``folder``; ``store`` holds the base tree.

    ``read`` finds the record in its git folder.
    """
    folder = folder.resolve()
    git_folder, shared = git_folders(folder)
    record = read(shared)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-export-") as scratch:
        work = Work(folder, git_folder, Path(scratch), record)
        work.prepare(store, shared)
        try:
            yield work
        finally:
            work.reader.close()


def format_mails(git: Git, base: str, head: str, count: int, scratch: Path) -> list[bytes]:
    """Commits after ``base`` up to ``head`` as patch files in canonical form, by one process."""
    out = scratch / "mails"
    git.run("format-patch", "--quiet", *_FORMAT, f"--output-directory={out}", f"{base}..{head}")
    # Files, and not one stream: a message may hold what looks like the start of a mail
    files = sorted(out.iterdir(), key=lambda path: int(path.name)) if count else []
    if len(files) != count:
        raise GitError(f"git format-patch wrote {len(files)} mails for {count} commits")
    return [_canonical(path.read_bytes()) for path in files]


def _canonical(mail: bytes) -> bytes:
    """One mail without the name trailer: as git would write it, had the commit none."""
    head, _, rest = mail.partition(b"\n\n")
    at = re.search(rb"^diff --git ", rest, re.MULTILINE)
    if at is None:
        return mail
    message, diff = rest[: at.start()], rest[at.start() :]
    # Latin 1 maps every byte to itself
    lines = _unnamed(message.decode("latin-1").split("\n"))
    body = "\n".join(lines).strip("\n").encode("latin-1")
    return head + b"\n\n" + body + (b"\n\n" if body else b"\n") + diff


def _unnamed(lines: Sequence[str]) -> list[str]:
    """Message lines without name trailers, nor the blank line that set one apart."""
    kept: list[str] = []
    was_name = False
    for line in lines:
        is_name = NAME_LINE.match(line) is not None
        if is_name:
            was_name = True
            continue
        if was_name and not line.strip() and (not kept or not kept[-1].strip()):
            continue
        was_name = False
        kept.append(line)
    return kept


def _head(store: Store, git_folder: Path) -> str:
    # Reading a ref runs no program, except that a hostile configuration could have a missing
    # object fetched; no protocol is allowed for that, whatever the configuration says.
    env = {"GIT_DIR": str(git_folder), "GIT_ALLOW_PROTOCOL": "none"}
    try:
        return (
            store.git.run("rev-parse", "--verify", "--quiet", "HEAD^{commit}", env=env)
            .decode()
            .strip()
        )
    except GitError as error:
        raise ExportError(
            f"{git_folder} has no HEAD commit", why=error.why, fix="check out a branch there"
        ) from None
