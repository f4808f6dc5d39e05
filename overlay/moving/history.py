"""Upstream's history between two pins, read from a clone that the user has at hand.

What it tells: which commits touch a patch's files and the lines that conflict, which of them
make the patch's change, wholly or in part, whether that was reverted, and whether the pull
request that the patch names has landed. The clone is only read, by plumbing commands that heed
no configuration of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import ExportError, GitError, UnavailableError
from overlay.patches.checkout import git_folders
from overlay.patches.paths import unquote_path
from overlay.trees.git import Git

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlay.lines.line import Pin
    from overlay.moving.threeway import Conflict
    from overlay.patches.diff import Hunk
    from overlay.patches.patch import Patch

# Trailers that say where a patch has been put forward
_FORWARDED = ("Upstream", "Forwarded", "Origin", "Bug")
_PULL = re.compile(r"\(#(\d+)\)|^Merge pull request #(\d+)")
_REVERTED_COMMIT = re.compile(r"[Tt]his reverts commit ([0-9a-f]{7,40})")
_REVERTED_SUBJECT = re.compile(r'Revert "(.*)"')
_FORMAT = "--pretty=format:commit %H%n%w(0,1,1)%B%w(0,0,0)"
_READ = ("diff-tree", "--stdin", "-r", "-p", "-M", "--no-ext-diff", "--no-textconv", _FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """What a commit did to one file: lines without white space at either end, and its new name."""

    added: Counter[bytes]
    removed: Counter[bytes]
    deleted: bool = False
    renamed: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class UpstreamCommit:
    """One commit of upstream.

    Attributes:
        id: full.
        subject, body: of its message.
        files: by the path that it had before.
    """

    id: str
    subject: str
    body: str = field(repr=False, default="")
    files: dict[bytes, FileChange] = field(repr=False, default_factory=dict)

    @property
    def pull(self) -> int | None:
        """Number of its pull request, as the subject states it."""
        found = _PULL.findall(self.subject)
        return int(found[-1][0] or found[-1][1]) if found else None

    @property
    def text(self) -> str:
        """Abbreviated id and subject."""
        return f"{self.id[:10]} {self.subject}"

    def reverts(self, other: UpstreamCommit) -> bool:
        """Whether its message says that it takes ``other`` back."""
        if any(other.id.startswith(named) for named in _REVERTED_COMMIT.findall(self.body)):
            return True
        quoted = _REVERTED_SUBJECT.search(self.subject)
        if quoted is not None:
            return quoted[1] == other.subject or _bare(quoted[1]) == _bare(other.subject)
        says = re.match(r"revert\b", self.subject, re.IGNORECASE)
        return bool(says and other.pull and re.search(rf"(?:#|PR ){other.pull}\b", self.subject))


def _bare(subject: str) -> str:
    return re.sub(r"\s*\(#\d+\)", "", subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What history says of one patch.

    Attributes:
        touching: commits that touch its files, newest first.
        taken: commits that make its hunks, newest first.
        hunks: how many of its hunks they make and none took back since, and of how many. Hunks
            that are too small to tell anything don't count.
        undone: a commit that took hunks or the pull request back, and is not itself taken back.
        same_pull: commits of the pull request that the patch names.
    """

    touching: tuple[UpstreamCommit, ...] = ()
    taken: tuple[UpstreamCommit, ...] = ()
    hunks: tuple[int, int] = (0, 0)
    undone: UpstreamCommit | None = None
    same_pull: tuple[UpstreamCommit, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether upstream has made every hunk, and taken none back."""
        return 0 < self.hunks[0] == self.hunks[1]


@dataclass(frozen=True, kw_only=True)
class History:
    """Commits between two pins that touch the files of a series, newest first.

    Attributes:
        commits: with the files that the series touches, by whatever name.
        same_id: patch names, each with the commit that has the same patch id.
        repository: ``owner/name`` of upstream.
    """

    commits: tuple[UpstreamCommit, ...]
    same_id: dict[str, UpstreamCommit] = field(default_factory=dict)
    repository: str = ""

    def renamed(self, path: bytes) -> bytes | None:
        """Where upstream has a file now that it had at ``path``; None where it wasn't renamed."""
        now = path
        for commit in reversed(self.commits):
            change = commit.files.get(now)
            if change is not None and change.renamed is not None:
                now = change.renamed
        return now if now != path else None

    def of(self, patch: Patch) -> Told:
        """What the commits say of one patch."""
        paths = {path for diff in patch.files for path in diff.paths}
        names = paths | {new for path in paths if (new := self.renamed(path)) is not None}
        touching = tuple(c for c in self.commits if not names.isdisjoint(c.files))
        makers = self._makers(patch)
        pulls = forwarded(patch, self.repository)
        same_pull = tuple(c for c in self.commits if c.pull in pulls)
        undone = [by for some in (*makers, same_pull) if (by := self._all_undone(some))]
        ids = {commit.id for some in makers for commit in some}
        made = sum(bool(some) and not self._all_undone(some) for some in makers)
        return Told(
            touching=touching,
            taken=tuple(c for c in self.commits if c.id in ids),
            hunks=(made, len(makers)),
            undone=undone[0] if undone else None,
            same_pull=same_pull,
        )

    def changed(self, conflict: Conflict) -> tuple[UpstreamCommit, ...]:
        """Commits that changed the lines of a conflict, or took its file away; newest first."""
        names = {conflict.path} | {
            path
            for commit in self.commits
            for path in commit.files
            if self.renamed(path) == conflict.path
        }
        gone, new = Counter[bytes](), Counter[bytes]()
        for region in conflict.regions:
            base, ours = _lines(region.base), _lines(region.ours)
            gone += base - ours
            new += ours - base
        found = []
        for commit in self.commits:
            for change in (commit.files[name] for name in names & commit.files.keys()):
                whole = conflict.kind == "deleted" and (change.deleted or change.renamed)
                if whole or change.removed & gone or change.added & new:
                    found.append(commit)
                    break
        return tuple(found)

    def _makers(self, patch: Patch) -> list[tuple[UpstreamCommit, ...]]:
        """For each hunk of a patch that tells anything: the commits that make it."""
        hunks = [
            (path, *lines)
            for path, hunk in ((diff.path, hunk) for diff in patch.files for hunk in diff.hunks)
            if (lines := _telling(hunk))
        ]
        if patch.name in self.same_id:
            return [(self.same_id[patch.name],)] * max(len(hunks), 1)
        return [
            tuple(
                commit
                for commit in self.commits
                if any(
                    added <= change.added and removed <= change.removed
                    for name, change in commit.files.items()
                    if name in (path, self.renamed(path))
                )
            )
            for path, added, removed in hunks
        ]

    def _all_undone(self, commits: Sequence[UpstreamCommit]) -> UpstreamCommit | None:
        """The commit that took back the newest of these, if none of them stands."""
        undone = [self._undone(commit) for commit in commits]
        return undone[0] if all(undone) and undone else None

    def _undone(self, commit: UpstreamCommit) -> UpstreamCommit | None:
        """A later commit that takes this one back, unless it was taken back in its turn."""
        later = self.commits[: self.commits.index(commit)]
        return next((r for r in later if r.reverts(commit) and not self._undone(r)), None)


def forwarded(patch: Patch, repository: str) -> set[int]:
    """Pull requests of a repository that a patch's trailers name."""
    found = set()
    for key in _FORWARDED:
        for value in patch.trailer(key):
            owner = re.escape(repository)
            for match in re.finditer(
                rf"(?:^|\s){owner}#(\d+)|/{owner}/pull/(\d+)|(?:^|[\s(])#(\d+)", value
            ):
                found.add(int(match[1] or match[2] or match[3]))
    return found


def read_history(clone: Path, old: Pin, new: Pin, patches: Sequence[Patch]) -> History:
    """Read what a clone says of ``patches`` between two pins.

    Raises ``UnavailableError`` with the reason where it can't say it.
    """
    try:
        with borrowed(clone) as git:
            ends = [_commit(git, clone, pin) for pin in (old, new)]
            return _read(git, ends[0], ends[1], patches, _repository(new))
    except GitError as error:
        raise UnavailableError(
            f"{clone} does not hold the history from {old.version} to {new.version}",
            why=error.why,
            fix="use a full clone: neither shallow nor without blobs",
        ) from None


def _read(git: Git, old: str, new: str, patches: Sequence[Patch], repository: str) -> History:
    if not git.run("merge-base", old, new, ok=(0, 1)):
        raise GitError("no merge base", why="the two pins have no common commit in it")
    paths = {path for patch in patches for diff in patch.files for path in diff.paths}
    # What the old side has too, under another id, is not between the two
    between = ("rev-list", "--topo-order", "--no-merges", "--right-only", "--cherry-pick")
    while True:
        specs = (f":(top,literal){os.fsdecode(path)}" for path in sorted(paths))
        listed = git.run(*between, f"{old}...{new}", "--", *specs)
        shown = git.run(*_READ, stdin=listed)
        commits = tuple(_parse(shown))
        more = {
            change.renamed
            for commit in commits
            for path, change in commit.files.items()
            if path in paths and change.renamed is not None
        } - paths
        if not more:
            break
        paths |= more
    kept = tuple(
        UpstreamCommit(
            id=one.id,
            subject=one.subject,
            body=one.body,
            files={path: change for path, change in one.files.items() if path in paths},
        )
        for one in commits
    )
    return History(
        commits=kept, same_id=_same_ids(git, patches, shown, kept), repository=repository
    )


def _same_ids(
    git: Git, patches: Sequence[Patch], shown: bytes, commits: Sequence[UpstreamCommit]
) -> dict[str, UpstreamCommit]:
    """Patches whose patch id a commit has, each with that commit."""
    mails = b"".join(
        # A message may hold what git would take for the next commit
        b"commit %040x\n" % number + patch.raw.split(b"\n", patch.files[0].at - 1)[-1]
        for number, patch in enumerate(patches, start=1)
    )
    ours = git.run("patch-id", "--stable", stdin=mails).decode().split("\n")[:-1]
    theirs = git.run("patch-id", "--stable", stdin=shown).decode().split("\n")[:-1]
    by_commit = {commit.id: commit for commit in commits}
    known = {line.split()[0]: by_commit.get(line.split()[1]) for line in theirs}
    found = {}
    for line in ours:
        patch_id, number = line.split()
        commit = known.get(patch_id)
        if commit is not None:
            found[patches[int(number, 16) - 1].name] = commit
    return found


def _parse(shown: bytes) -> Iterator[UpstreamCommit]:
    """Commits as ``_READ`` shows them. Only our own lines and a diff's start at the margin."""
    for part in re.split(rb"^commit (?=[0-9a-f]{40}$)", shown, flags=re.MULTILINE)[1:]:
        head, *diffs = re.split(rb"^diff --git ", part, flags=re.MULTILINE)
        oid, _, message = head.decode(errors="replace").partition("\n")
        lines = [line[1:] for line in message.split("\n")]
        files: dict[bytes, FileChange] = {}
        for diff in diffs:
            files |= dict(_parse_file(diff))
        yield UpstreamCommit(id=oid, subject=lines[0], body="\n".join(lines[1:]), files=files)


def _parse_file(diff: bytes) -> Iterator[tuple[bytes, FileChange]]:
    header, *hunks = re.split(rb"^@@ ", diff, flags=re.MULTILINE)
    said = dict(re.findall(rb"^(--- |\+\+\+ |rename from |rename to |deleted )(.*)$", header, re.M))
    sides = []
    for sign, rename in ((b"--- ", b"rename from "), (b"+++ ", b"rename to ")):
        side = said.get(sign, b"/dev/null").removesuffix(b"\t")
        name = unquote_path(said[rename]) if rename in said else unquote_path(side)[2:]
        sides.append(None if side == b"/dev/null" and rename not in said else name)
    old, new = sides
    path = old if old is not None else new
    if path is None:  # only a mode, or binary content
        return
    added, removed = Counter[bytes](), Counter[bytes]()
    for line in (line for hunk in hunks for line in hunk.split(b"\n")[1:]):
        if line[:1] in (b"+", b"-"):
            (added if line[:1] == b"+" else removed)[line[1:].strip()] += 1
    renamed = new if b"rename to " in said else None
    yield path, FileChange(added=added, removed=removed, deleted=new is None, renamed=renamed)
    if renamed is not None:  # whoever asks for it by its new name
        yield renamed, FileChange(added=added, removed=removed)


def _lines(text: bytes) -> Counter[bytes]:
    return Counter(line.strip() for line in text.split(b"\n") if re.search(rb"\w", line))


def _telling(hunk: Hunk) -> tuple[Counter[bytes], Counter[bytes]] | None:
    """The lines that a hunk adds and removes, unless they are too few to tell anything."""
    lines = {
        sign: _lines(b"\n".join(t[1:] for t in hunk.lines if t[:1] == sign))
        for sign in (b"+", b"-")
    }
    added, removed = lines[b"+"] - lines[b"-"], lines[b"-"] - lines[b"+"]
    count, size = (added + removed).total(), sum(map(len, (added + removed)))
    return (added, removed) if count > 1 or size >= 12 else None


@contextlib.contextmanager
def borrowed(clone: Path) -> Iterator[Git]:
    """A scratch repository with the objects of a clone, bare or not."""
    try:
        shared = clone.resolve() if (clone / "objects").is_dir() else git_folders(clone)[1]
    except ExportError:
        raise UnavailableError(f"{clone} is no git repository", fix="name a clone") from None
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-") as scratch:
        git = Git(Path(scratch) / "git")
        git.folder.mkdir()
        git.run("init", "--quiet", "--bare", "--template=", "--object-format=sha1")
        alternates = git.folder / "objects" / "info" / "alternates"
        alternates.write_bytes(os.fsencode(shared / "objects") + b"\n")
        if (shared / "shallow").is_file():
            shutil.copyfile(shared / "shallow", git.folder / "shallow")
        yield git


def _commit(git: Git, clone: Path, pin: Pin) -> str:
    """Full id of a pin's commit in a clone."""
    named = f"{pin.commit_text}^{{commit}}"
    found = git.run("rev-parse", "--verify", "--quiet", named, ok=(0, 1, 128)).decode().strip()
    if not re.fullmatch(r"[0-9a-f]{40}", found):
        raise UnavailableError(
            f"{clone} does not hold commit {pin.commit_text} of {pin.version}",
            fix="fetch upstream's commits and tags into it",
        )
    return found


def _repository(pin: Pin) -> str:
    """``owner/name`` of a pin's repository."""
    return "/".join(pin.repository.removesuffix(".git").rstrip("/").split("/")[-2:])


__all__ = ["FileChange", "History", "Told", "UpstreamCommit", "forwarded", "read_history"]
