"""Conflicts that somebody resolved once, in ``patches/resolutions``, to be resolved alike again.

A resolution is the diff from a file with conflict markers to what was made of it, under the key of
its conflicting regions. The key knows nothing of line, path or place, so it serves every line on
which upstream and a patch meet in the same way. It is replayed strictly or not at all.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import MoveError, PatchError
from overlay.files import machine_errors, write_atomic
from overlay.lines.line import read_file
from overlay.patches.diff import REGULAR, parse_diff
from overlay.patches.patch import Patch
from overlay.patches.paths import quote_path
from overlay.trees.match import Entry, match_patch
from overlay.trees.objects import blob_id

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from overlay.moving.threeway import Conflict
    from overlay.trees.git import Git

FOLDER, SUFFIX = "resolutions", ".diff"
# What can be resolved by a text. A file that is deleted, say, leaves nothing to write a diff of.
_KINDS = ("content", "added", "twice")
_KEY = re.compile(r"[0-9a-f]{64}\Z")
_NAME = b"conflict"  # of the file in the diff: where the conflict was is no part of it
# In place of a diff, where a clean merge was in doubt and is right
_AS_MERGED = b"The merge is right as it stands.\n"
_MARKER = re.compile(rb"(?:<{7,}|\|{7,}|>{7,})(?: .*)?\r?\Z")


@dataclass(frozen=True, slots=True)
class Resolutions:
    """The recorded resolutions of a project; ``root`` is its ``patches`` folder."""

    root: Path

    def path(self, key: str) -> Path:
        """The file of one key."""
        return self.root / FOLDER / f"{key}{SUFFIX}"

    def replay(self, conflict: Conflict) -> bytes | None:
        """What was made of the same conflict before; None if nothing fits.

        Raises:
            MoveError: the file of that key is damaged.
        """
        if conflict.kind not in _KINDS or not conflict.marked or not _KEY.match(conflict.key):
            return None
        path = self.path(conflict.key)
        try:
            raw = read_file(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _damaged(path, error.strerror or "") from None
        if conflict.kind == "twice" and raw.endswith(b"\n\n" + _AS_MERGED):
            return conflict.marked
        made = _apply(path, raw, conflict.marked)
        return None if made is None or list(marker_lines(made, _sides(conflict))) else made

    def record(self, git: Git, conflict: Conflict, resolved: bytes, about: str) -> bool:
        """Record what was made of a conflict; False if it is of a kind that can't be.

        Args:
            git: writes the diff; any store's will do.
            conflict: as it was met.
            resolved: the file without markers.
            about: lines for a person: which patch, from where to where.
        """
        if conflict.kind not in _KINDS or not conflict.marked:
            return False
        head = f"{about}\nPath: {quote_path(conflict.path)}\n\n".encode()
        path = self.path(conflict.key)
        with machine_errors(path, is_cache=False):
            path.parent.mkdir(exist_ok=True)
            same = resolved == conflict.marked  # else markers would have been found
            write_atomic(
                path, head + (_AS_MERGED if same else _diff(git, conflict.marked, resolved))
            )
        return True


def marker_lines(content: bytes, sides: Collection[bytes]) -> Iterator[int]:
    """Numbers of the lines that are conflict markers and stand in none of ``sides``."""
    known = {line for side in sides for line in side.split(b"\n") if _MARKER.match(line)}
    for at, line in enumerate(content.split(b"\n"), start=1):
        if _MARKER.match(line) and line not in known:
            yield at


def _sides(conflict: Conflict) -> list[bytes]:
    sides = (conflict.base, conflict.ours, conflict.theirs)
    return [side.data for side in sides if side is not None]


class _One:
    """A tree of one file."""

    def __init__(self, data: bytes) -> None:
        self._entry = Entry(mode=REGULAR, data=data)

    def get(self, path: bytes) -> Entry | None:
        return self._entry if path == _NAME else None

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        del path, without
        return False


def _apply(path: Path, raw: bytes, marked: bytes) -> bytes | None:
    start = re.search(rb"^diff --git ", raw, re.MULTILINE)
    if start is None:
        raise _damaged(path, "it holds no diff")
    try:
        files = parse_diff(
            raw[start.start() :],
            name=path.name,
            first_line=raw.count(b"\n", 0, start.start()) + 1,
        )
    except PatchError as error:
        raise _damaged(path, error.what) from None
    if [diff.paths for diff in files] != [(_NAME,)]:
        raise _damaged(path, f"it must change one file, {_NAME.decode()}")
    patch = Patch(
        name=path.stem, raw=raw, author="", email="", date="", subject="", body="", files=files
    )
    outcome = match_patch(patch, _One(marked))
    made = outcome.changes.get(_NAME) if outcome.verdict.good else None
    return made.data if made is not None else None


def _diff(git: Git, marked: bytes, resolved: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-move-") as scratch:
        before, after = Path(scratch) / "before", Path(scratch) / "after"
        before.write_bytes(marked)
        after.write_bytes(resolved)
        out = git.run(
            "diff", "--no-index", "--text", "--no-ext-diff", "--no-textconv", "--no-color",
            "--diff-algorithm=myers", "--indent-heuristic", "--unified=3",
            "--inter-hunk-context=0", "--", str(before), str(after), ok=(1,),
        )  # fmt: skip
    hunks = re.search(rb"^@@ ", out, re.MULTILINE)
    assert hunks is not None  # noqa: S101 - the contents differ, and are taken for text
    head = (
        b"diff --git a/%(name)s b/%(name)s\nindex %(old)s..%(new)s 100644\n"
        b"--- a/%(name)s\n+++ b/%(name)s\n"
    ) % {
        b"name": _NAME,
        b"old": blob_id(marked).encode(),
        b"new": blob_id(resolved).encode(),
    }
    return head + out[hunks.start() :]


def _damaged(path: Path, why: str) -> MoveError:
    return MoveError(
        f"{FOLDER}/{path.name} can't be replayed", why=why, fix="restore it, or delete it"
    )
