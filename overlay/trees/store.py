"""The object store of one upstream: a bare repository in the user's cache.

It holds every base tree that was imported and every patched state that was made, shared by
all lines and pins. Base commits are made here and not taken from upstream, so that commit ids
depend on tree and pin alone, whichever source the tree came from.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from overlay.errors import GitError, MachineError, UnavailableError
from overlay.files import locked, machine_errors
from overlay.patches.paths import quote_path
from overlay.trees.git import Git, ObjectReader
from overlay.trees.match import Entry
from overlay.trees.objects import parse_tree

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from overlay.lines.line import Upstream
    from overlay.sources.archive import Member

CACHE_VARIABLE = "VLLM_OVERLAY_CACHE"
# Commits of the tool itself carry this identity at the epoch: ids depend on content alone.
IDENTITY = "vllm-overlay <vllm-overlay@invalid>"
EPOCH = "0 +0000"


def cache_folder() -> Path:
    """Where downloads and stores live: ``$VLLM_OVERLAY_CACHE``, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).absolute() if named else platformdirs.user_cache_path("vllm-overlay")


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A commit and its tree, both as hex ids."""

    commit: str
    tree: str


class Store:
    """One upstream's objects."""

    def __init__(self, cache: Path, upstream: Upstream) -> None:
        self.upstream = upstream
        self.folder = cache / "stores" / f"{upstream}.git"
        self.states = cache / "states" / upstream
        self.git = Git(self.folder)
        # One process for all reading, started when it is first needed; it ends with the store
        self.reader = ObjectReader(self.git)
        weakref.finalize(self, self.reader.close)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the store's write lock, with the repository there."""
        with locked(self.folder.with_suffix(".lock")), machine_errors(self.folder):
            if not (self.folder / "HEAD").exists():
                self._create()
            self._clear_locks()
            yield

    def _clear_locks(self) -> None:
        """Remove locks of git processes that were killed, or every later write would fail.

        They are of dead ones: whoever writes holds our own lock, which goes with its process.
        """
        for pattern in ("refs/overlay/**/*.lock", "packed-refs.lock", "shallow.lock"):
            for left in self.folder.glob(pattern):
                left.unlink(missing_ok=True)

    def exists(self) -> bool:
        """Whether anything was ever put here."""
        return (self.folder / "HEAD").exists()

    def find(self, ref: str) -> Commit | None:
        """The commit that a ref names, or None."""
        if not self.exists():
            return None
        found = self.reader.get(ref)
        if found is None or found[1] != "commit":
            return None
        return Commit(commit=found[0], tree=found[2][5:45].decode())

    def import_tree(
        self, members: Iterable[Member], *, ref: str, message: str, expect: Mapping[str, str]
    ) -> Commit:
        """Make a base commit of ``members`` and name it ``ref``.

        Args:
            members: every file of the tree.
            ref: full name; nothing of the import is seen by others until it is complete.
            message: of the commit.
            expect: tree id -> where it was promised; the tree must be one of them, if any.
        """
        with self.writing(), FastImport(self) as stream:
            stream.commit(ref, parent=None, identity=IDENTITY, date=EPOCH, message=message)
            for member in members:
                stream.put(member.path, member.mode, member.data)
            made = stream.made()
            if expect and made.tree not in expect:
                stream.abort()
                promised = ", ".join(f"{tree} ({where})" for tree, where in expect.items())
                raise WrongTreeError(made.tree, promised)
            return made

    def _create(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix=".new-") as scratch:
            new = Path(scratch) / self.folder.name
            new.mkdir()
            # No template: a user's may hold hooks, and git's own holds dead sample files
            Git(new).run(
                "init", "--quiet", "--bare", "--template=", "--object-format=sha1", str(new)
            )
            try:
                new.rename(self.folder)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise MachineError(
                    f"{self.folder} is there, and is no store",
                    why="it has no HEAD",
                    fix=f"delete {self.folder}: all in it can be made again",
                ) from None


class WrongTreeError(Exception):
    """An imported tree isn't the one promised; ``overlay.sources.source`` says it to the user."""

    def __init__(self, tree: str, promised: str) -> None:
        super().__init__(tree, promised)
        self.tree, self.promised = tree, promised


class FastImport:
    """Writes commits through one ``git fast-import``; all of them appear at the end, or none."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._process: subprocess.Popen[bytes] | None = None
        self._marks = 0

    def __enter__(self) -> FastImport:
        self._process = self._store.git.open(
            "fast-import", "--quiet", "--done", "--force", "--date-format=raw-permissive"
        )
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        process = self._process
        if process is None:
            return
        if kind is not None:
            self.abort()
            return
        err = process.communicate(b"done\n")[1]
        if process.returncode:
            raise self._failure(err)

    def abort(self) -> None:
        """Stop without keeping anything."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
            for left in self._store.folder.glob("objects/pack/tmp_*"):
                left.unlink(missing_ok=True)  # we hold the write lock: nobody else's

    def commit(
        self, ref: str, *, parent: str | None, identity: str, date: str, message: str
    ) -> None:
        """Begin a commit on ``ref``; ``parent`` None continues the last one of this stream."""
        self._marks += 1
        text = message.encode()
        lines = [b"commit " + ref.encode(), b"mark :%d" % self._marks]
        for role in ("author", "committer"):
            lines.append(f"{role} {identity} {date}".encode())
        lines.append(b"data %d" % len(text))
        self._write(b"\n".join(lines) + b"\n" + text + b"\n")
        if parent is not None:
            self._write(b"from " + parent.encode() + b"\n")

    def put(self, path: bytes, mode: int, data: bytes) -> None:
        """Set a file in the commit that was begun."""
        self._write(b"M %o inline %s\ndata %d\n" % (mode, _quoted(path), len(data)) + data + b"\n")

    def root(self, tree: str) -> None:
        """Make a stored tree the whole tree of the commit that was begun."""
        self._write(f'M 040000 {tree} ""\n'.encode())

    def delete(self, path: bytes) -> None:
        """Remove a file in the commit that was begun."""
        self._write(b"D " + _quoted(path) + b"\n")

    def made(self) -> Commit:
        """Ids of the commit that was begun last, which is complete now."""
        assert self._process is not None  # noqa: S101 - made() follows commit()
        assert self._process.stdout is not None  # noqa: S101
        self._write(b'\nget-mark :%d\nls :%d ""\n' % (self._marks, self._marks), flush=True)
        commit = self._process.stdout.readline().decode().strip()
        listed = self._process.stdout.readline().decode().split()
        if len(listed) < 3:
            raise self._failure(self._process.communicate()[1])
        return Commit(commit=commit, tree=listed[2])

    def _write(self, data: bytes, *, flush: bool = False) -> None:
        assert self._process is not None  # noqa: S101
        assert self._process.stdin is not None  # noqa: S101
        try:
            self._process.stdin.write(data)
            if flush:
                self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure(self._process.communicate()[1]) from None

    def _failure(self, err: bytes) -> GitError | MachineError:
        why = err.decode(errors="replace").strip()
        # "Out of diskspace" is what git says of a write that was cut short
        signs = ("No space left", "Out of diskspace", "Read-only", "Permission denied")
        if any(sign in why for sign in signs):
            return MachineError(
                f"can't write to {self._store.folder}",
                why=why.splitlines()[0],
                fix="free some room, or set VLLM_OVERLAY_CACHE to a folder that can be written to",
            )
        return GitError(
            "git fast-import failed",
            why=why,
            fix=f"if it stays so, delete {self._store.folder}: all in it can be made again",
        )


class StoredTree:
    """A tree of the store, read as far as it is asked for (``overlay.trees.match.Tree``).

    ``changes`` lie on top: files that were changed since, None for deleted ones.
    """

    def __init__(self, reader: ObjectReader, tree: str) -> None:
        self._reader = reader
        self._folders: dict[bytes, dict[bytes, tuple[int, str]]] = {}
        self._root = tree
        self.changes: dict[bytes, Entry | None] = {}

    def get(self, path: bytes) -> Entry | None:
        """The file at ``path``, or None."""
        if path in self.changes:
            return self.changes[path]
        found = self.locate(path)
        if found is None or found[0] == 0o40000:
            return None
        data = self._reader.get(found[1])
        if data is None:
            raise UnavailableError(
                f"the content of {quote_path(path)} (blob {found[1]}) is not in the store",
                why="the store was filled from git, blobs on demand",
                fix="run 'vllm-overlay fetch LINE' while online",
            )
        return Entry(mode=found[0], data=data[2])

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        """Whether any file lies below ``path``, those of ``without`` left out."""
        below = path + b"/"
        gone = {p for p, entry in self.changes.items() if entry is None} | set(without)
        if any(p.startswith(below) and p not in gone for p in self.changes):
            return True
        found = self.locate(path)
        return found is not None and found[0] == 0o40000 and self._has_files(below, gone)

    def locate(self, path: bytes) -> tuple[int, str] | None:
        """Mode and id of what the stored tree has at ``path``, regardless of changes."""
        folder, _, name = path.rpartition(b"/")
        return self._names(folder).get(name)

    def _names(self, folder: bytes) -> dict[bytes, tuple[int, str]]:
        if folder not in self._folders:
            self._folders[folder] = {}
            found = (0o40000, self._root) if not folder else self.locate(folder)
            if found is not None and found[0] == 0o40000:
                tree = self._reader.get(found[1])
                if tree is None:
                    raise GitError(
                        f"tree {found[1]} is missing from the store",
                        fix="delete the store ('cache' says where): all in it can be made again",
                    )
                self._folders[folder] = parse_tree(tree[2])
        return self._folders[folder]

    def _has_files(self, below: bytes, gone: set[bytes]) -> bool:
        return not any(p.startswith(below) for p in gone) or any(
            self._has_files(below + name + b"/", gone)
            if mode == 0o40000
            else below + name not in gone
            for name, (mode, _) in self._names(below[:-1]).items()
        )


def _quoted(path: bytes) -> bytes:
    return b'"' + b"".join(
        bytes((byte,)) if 0x20 <= byte < 0x7F and byte not in b'"\\' else b"\\%03o" % byte
        for byte in path
    ) + b'"'  # fmt: skip
