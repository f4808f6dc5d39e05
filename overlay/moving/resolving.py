"""One patch of a move as an ordinary git repository, in which its conflicts wait to be resolved.

It stands as git leaves a cherry-pick that met conflicts: HEAD is the new base with what was
carried so far, the index has the three sides of each conflict, the files have markers in diff3's
style, and ``git commit`` keeps the patch's author and message. ``CHERRY_PICK_HEAD`` is a commit
with the files that the patch touches and no others: enough for ``git show``, and it needs no old
tree, which a store from git may lack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from overlay.errors import MoveError
from overlay.files import write_atomic
from overlay.patches.checkout import (
    BASE_TAG,
    Record,
    Repository,
    copy_objects,
    decode_record,
    new_repository,
)
from overlay.patches.paths import quote_path
from overlay.trees.apply import named_message, write_commit
from overlay.trees.objects import blob_id, object_id
from overlay.trees.store import EPOCH, IDENTITY, Commit, FastImport, Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from overlay.lines.line import Line, Upstream
    from overlay.moving.threeway import Conflict
    from overlay.patches.patch import Patch
    from overlay.report import Reporter
    from overlay.trees.match import Entry, Tree

RECORD_FILE, DOSSIER_FILE = "overlay-move.json", "overlay-dossier.txt"
# Where the conflicts as they were met are kept, markers and all
_MET = "refs/overlay/met"


class Met(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conflict as it was met: where, of which kind, and the blobs of its sides ("": none)."""

    path: str
    kind: str
    base: str
    ours: str
    theirs: str
    marked: str


class Resolving(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``move --continue`` must know about the repository; a file in its git folder.

    Attributes:
        patch: that it resolves.
        of: SHA-256 of the patch's file.
        target: what tells the pin that is moved to from others.
        conflicts: as they were met.
        clean: what the merge could settle: path to blob id (\"\": deleted).
    """

    patch: str
    of: str
    target: str
    conflicts: tuple[Met, ...]
    clean: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A patch where it meets the new base.

    Attributes:
        patch: of the old line, or as it was resolved before.
        of: SHA-256 of the old line's patch file.
        before, after: the old tree before and after it.
        start: the new base with what was carried so far.
        target: what tells the pin that is moved to from others.
        conflicts: that wait.
        changes: all that the merge makes, with markers where there are conflicts.
    """

    patch: Patch
    of: str
    before: Tree
    after: Tree
    start: Commit
    target: str
    conflicts: tuple[Conflict, ...]
    changes: Mapping[bytes, Entry | None]


def open_meeting(
    store: Store,
    line: Line,
    upstream: Upstream,
    base: Commit,
    meeting: Meeting,
    folder: Path,
    report: Reporter,
    *,
    dossier: str,
    url: str = "",
    offline: bool = False,
) -> None:
    """Make ``folder`` a repository in which ``meeting`` waits to be resolved.

    Args:
        store: holds ``base`` and ``meeting.start``.
        line, upstream: whose patch.
        base: the new base tree.
        meeting: the patch.
        folder: must not exist, or be empty. It appears complete or not at all.
        report: for progress.
        dossier: what there is to know, for a person; kept in the git folder.
        url, offline: as for ``overlay.patches.checkout.checkout``.

    Raises:
        MachineError: the folder is in use, or can't be written.
        UnavailableError: the store lacks files and they can't be fetched.
    """
    patch = meeting.patch
    picked = _picked(store, meeting)
    with new_repository(store, folder.resolve(), f"move-{patch.name}") as made:
        with report.progress(f"copying the objects of {line.name} {upstream}"):
            commits = (meeting.start.commit, picked)
            copy_objects(store, commits, made.git_folder, report, url=url, offline=offline)
        _stage(made, meeting.changes, meeting.start.tree)
        met = made.run("write-tree").decode().strip()
        made.refs(
            {
                f"refs/tags/{BASE_TAG}": base.commit,
                f"refs/heads/move-{patch.name}": meeting.start.commit,
                _MET: met,
            }
        )
        (made.git_folder / "index").unlink()
        with report.progress(f"writing {folder}"):
            made.write(met)
        _stage_sides(made, meeting.conflicts)
        # Files that the conflicts cover have been written, and git must not take them for stale
        made.git.run(
            "update-index", "-q", "--unmerged", "--refresh", ok=(0, 1),
            env={"GIT_DIR": str(made.git_folder), "GIT_WORK_TREE": str(made.folder)},
        )  # fmt: skip
        (made.git_folder / "CHERRY_PICK_HEAD").write_text(f"{picked}\n")
        (made.git_folder / "MERGE_MSG").write_bytes(named_message(patch).encode())
        (made.git_folder / DOSSIER_FILE).write_bytes(dossier.encode(errors="backslashreplace"))
        record = _record(line, upstream, meeting)
        write_atomic(
            made.git_folder / RECORD_FILE, msgspec.json.format(msgspec.json.encode(record))
        )


def read_resolving(git_folder: Path) -> Resolving:
    """The record of such a repository. Raises ``MoveError`` when there is none to be read."""
    try:
        return decode_record(git_folder / RECORD_FILE, Resolving, maker="move --resolve")
    except ValueError as error:
        raise MoveError(
            f"{git_folder.parent} does not say which patch it resolves",
            why=str(error),
            fix="name the folder that 'move --resolve' made, or make one",
        ) from None


def _picked(store: Store, meeting: Meeting) -> str:
    """A commit that makes the patch's change on the files that it touches, alone."""
    patch = meeting.patch
    paths = sorted(
        {path for diff in patch.files for path in (diff.old_path, diff.new_path) if path}
    )
    before = {path: meeting.before.get(path) for path in paths}
    after = {path: meeting.after.get(path) for path in paths}
    key = object_id("picked", patch.raw + meeting.start.commit.encode())
    ref = f"refs/overlay/tip/{key}"  # 'cache gc' drops what no line needs
    with store.writing(), FastImport(store) as stream:
        text = f"The files of {patch.name} on the pin that it was written for\n"
        stream.commit(ref, parent=None, identity=IDENTITY, date=EPOCH, message=text)
        for path, entry in before.items():
            if entry is not None:
                stream.put(path, entry.mode, entry.data)
        changes = {path: after[path] for path in paths if before[path] != after[path]}
        write_commit(stream, patch, changes, None, ref)
        return stream.made().commit


def _stage(made: Repository, changes: Mapping[bytes, Entry | None], tree: str) -> None:
    """An index of ``tree`` with ``changes``; no file is written."""
    made.run("read-tree", tree)
    lines = [
        b"0 %s\t%s\0" % (b"0" * 40, path)
        if entry is None
        else b"%06o %s\t%s\0" % (entry.mode, _put(made, entry.data), path)
        for path, entry in sorted(changes.items(), key=lambda item: item[1] is not None)
    ]
    made.run("update-index", "-z", "--index-info", stdin=b"".join(lines))


def _stage_sides(made: Repository, conflicts: Sequence[Conflict]) -> None:
    lines = []
    for conflict in conflicts:
        lines.append(b"0 %s\t%s\0" % (b"0" * 40, conflict.path))
        sides = (conflict.base, conflict.ours, conflict.theirs)
        lines += [
            b"%06o %s %d\t%s\0" % (side.mode, _put(made, side.data), stage, conflict.path)
            for stage, side in enumerate(sides, start=1)
            if side is not None
        ]
    made.run("update-index", "-z", "--index-info", stdin=b"".join(lines))


def _put(made: Repository, data: bytes) -> bytes:
    return made.run("hash-object", "-w", "--no-filters", "--stdin", stdin=data).strip()


def _record(line: Line, upstream: Upstream, meeting: Meeting) -> Resolving:
    waiting = {conflict.path for conflict in meeting.conflicts}
    return Resolving(
        line=line.name,
        upstream=upstream,
        base=meeting.start.commit,
        patches={},
        patch=meeting.patch.name,
        of=meeting.of,
        target=meeting.target,
        conflicts=tuple(
            Met(
                path=quote_path(conflict.path),
                kind=conflict.kind,
                base=entry_id(conflict.base),
                ours=entry_id(conflict.ours),
                theirs=entry_id(conflict.theirs),
                marked=blob_id(conflict.marked) if conflict.marked else "",
            )
            for conflict in meeting.conflicts
        ),
        clean={
            quote_path(path): entry_id(entry)
            for path, entry in meeting.changes.items()
            if path not in waiting
        },
    )


def entry_id(entry: Entry | None) -> str:
    """Blob id of a file, "" of none."""
    return blob_id(entry.data) if entry is not None else ""
