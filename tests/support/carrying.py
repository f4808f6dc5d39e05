"""Trees in memory, and the carrying of a repository's commits to another of its commits."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING

from overlay.moving.carry import Carried, carry_series, old_states
from overlay.patches.diff import EXECUTABLE, REGULAR, SYMLINK
from overlay.patches.patch import Patch, parse_patch
from overlay.trees.match import Entry

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from typing import Any

    from overlay.trees.git import Git
    from tests.conftest import Repo


class Memory:
    """A tree in memory, in the place of a store's."""

    def __init__(self, files: dict[bytes, Entry]) -> None:
        self.files = files

    def get(self, path: bytes) -> Entry | None:
        return self.files.get(path)

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        return any(p.startswith(path + b"/") and p not in without for p in self.files)

    def with_changes(self, made: Sequence[Carried]) -> dict[bytes, Entry]:
        """All files after what was carried."""
        files: dict[bytes, Entry | None] = dict(self.files)
        for carried in made:
            files |= carried.changes
        return {path: entry for path, entry in files.items() if entry is not None}


def memory(repo: Repo, commit: str = "HEAD") -> Memory:
    """A commit's tree."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(repo.git("archive", "--format=tar", commit))) as tar:
        for member in tar:
            path, content = os.fsencode(member.name), tar.extractfile(member)
            if member.issym():
                files[path] = Entry(mode=SYMLINK, data=os.fsencode(member.linkname))
            elif member.isfile() and content is not None:
                mode = EXECUTABLE if member.mode & 0o100 else REGULAR
                files[path] = Entry(mode=mode, data=content.read())
    return Memory(files)


def text(**files: bytes) -> Memory:
    """A tree of plain files: ``text(a=b"...")`` has the file ``a``."""
    return Memory({n.encode(): Entry(mode=REGULAR, data=data) for n, data in files.items()})


def series(repo: Repo, base: str, tip: str = "HEAD") -> list[Patch]:
    """The commits after ``base`` as patches, each named after its subject."""
    patches = []
    for commit in repo.git("rev-list", "--reverse", f"{base}..{tip}").decode().split():
        subject = repo.git("show", "-s", "--format=%s", commit).decode().strip()
        name = subject.lower().replace(" ", "-")
        patches.append(parse_patch(repo.patch(commit), name=name))
    return patches


def carry(repo: Repo, git: Git, base: str, tip: str, new: str, **how: Any) -> list[Carried]:
    """Carry the commits after ``base`` up to ``tip`` to ``new``."""
    patches = series(repo, base, tip)
    before, after = old_states(patches, memory(repo, base))
    return list(carry_series(patches, before, after, memory(repo, new), git=git, **how))
