"""What a maintainer made of a patch in the repository that ``overlay.moving.resolving`` made.

Read as ``export`` reads a checkout: nothing in it can run or change a byte. Committed or staged is
all the same; what isn't finished is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import MoveError
from overlay.moving.move import Move, resolving_folder, target_id
from overlay.moving.resolutions import Resolutions, marker_lines
from overlay.moving.resolving import Met, Resolving, entry_id, read_resolving
from overlay.moving.threeway import Conflict
from overlay.patches.commits import Work, format_mails, opened
from overlay.patches.diff import REGULAR
from overlay.patches.export import Mail
from overlay.patches.patch import NAME_TRAILER, Patch
from overlay.patches.paths import quote_path, unquote_path
from overlay.trees.apply import named_message
from overlay.trees.match import Entry
from overlay.trees.store import Store, StoredTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a maintainer made of a meeting.

    Attributes:
        patch: in canonical form.
        contents: the conflicts that a text can resolve, with what was made of them.
        beyond: paths that were changed besides the conflicts; a text per conflict lacks those.
    """

    record: Resolving
    patch: Patch
    contents: tuple[tuple[Conflict, bytes], ...]
    beyond: tuple[str, ...]


def resolutions_in(
    root: Path, move: Move, folder: Path | None = None
) -> Iterator[tuple[Patch, Callable[[], Resolved]]]:
    """The patches of a move that were opened, each with a function that reads what came of it.

    Args:
        root: the ``patches`` folder.
        move: only what was opened for it counts.
        folder: one of them; else all that are at their usual places.

    Raises:
        MoveError: ``folder`` holds nothing of this move.
    """
    for patch in move.patches:
        if folder is None and move.decided.get(patch.name, patch) is None:
            continue  # skipped since
        at = folder or resolving_folder(root, move.line.name, patch.name)
        record = _record_of(at)
        if record is None or record.patch != patch.name:
            continue
        wrong = _not_of(move, patch, record)
        if not wrong:
            told = move.decided.get(patch.name) or patch
            yield patch, lambda at=at, told=told: read_back(at, move.store, told)  # type: ignore[misc]
        elif folder is not None:
            raise MoveError(
                f"{folder} resolves {record.patch}, but {wrong}",
                fix=f"resolve it again: move {move.line.name} --resolve {record.patch}",
            )
        if folder is not None:
            return
    if folder is not None:
        read_resolving(folder / ".git")  # which says what is wrong with it
        raise MoveError(f"{folder} resolves no patch of {move.line.name}'s {move.upstream} series")


def _record_of(folder: Path) -> Resolving | None:
    try:
        return read_resolving(folder / ".git")
    except MoveError:
        return None


def _not_of(move: Move, patch: Patch, record: Resolving) -> str:
    """Why a folder is of another move, or \"\"."""
    if (record.line, record.upstream) != (move.line.name, move.upstream):
        return f"of {record.line} {record.upstream}"
    if record.target != target_id(move.journal.pin):
        return "for another pin"
    return "the patch was changed since" if record.of != patch.sha256 else ""


def record(root: Path, move: Move, resolved: Resolved) -> tuple[tuple[str, ...], str]:
    """Record what was made of the conflicts; their keys, and why any wasn't recorded."""
    if not resolved.record.conflicts:
        return (), ""
    if resolved.beyond:
        return (), f"it changes {', '.join(resolved.beyond)} too, where there was no conflict"
    old, new = move.line.pin(move.upstream).version, move.journal.pin.version
    told = {
        "Patch": resolved.patch.name,
        "Line": move.line.name,
        "Move": f"{move.upstream} {old} to {new}",
    }
    about = "\n".join(f"{key}: {value}" for key, value in told.items())
    book = Resolutions(root)
    keys = [
        conflict.key
        for conflict, content in resolved.contents
        if book.record(move.store.git, conflict, content, about)
    ]
    missing = len(resolved.record.conflicts) - len(keys)
    return tuple(keys), f"{missing} of its conflicts are not of texts" if missing else ""


def read_back(folder: Path, store: Store, patch: Patch) -> Resolved:
    """The resolution in ``folder``, committed or staged.

    Raises:
        MoveError: it isn't finished, or can't become one patch.
    """
    with opened(folder, store, read=read_resolving) as work:
        record = work.record
        assert isinstance(record, Resolving)  # noqa: S101 - read_resolving made it
        commit = _committed(work, patch) if work.head != record.base else _staged(work, patch)
        changed = _changed(work, record.base, commit)
        if not changed:
            raise MoveError(
                f"the resolution of {patch.name} changes nothing",
                why=f"it is the new base with the patches before {patch.name}",
                fix=f"if the patch is to go: move {record.line} --skip {patch.name} --reason TEXT",
            )
        now = StoredTree(work.reader, f"{commit}^{{tree}}")
        conflicts = [_conflict(work, met) for met in record.conflicts]
        _refuse_markers(patch, changed, now, conflicts)
        (raw,) = format_mails(work.git, record.base, commit, 1, work.git.folder.parent)
        mail = Mail(patch.name, raw)
        faults = mail.faults(work.read(commit))
        if faults or mail.patch is None:
            raise MoveError(
                "git's mail format would not carry this commit as it is",
                why="\n".join(faults),
                fix="reword the commit (git commit --amend)",
            )
        contents = tuple(
            (conflict, entry.data)
            for conflict in conflicts
            if (entry := now.get(conflict.path)) is not None
        )
        return Resolved(
            record=record, patch=mail.patch, contents=contents,
            beyond=tuple(_beyond(record, changed, now)),
        )  # fmt: skip


def _committed(work: Work, patch: Patch) -> str:
    """The one commit of the resolution."""
    work.check_idle()
    drafts = work.drafts()
    if len(drafts) != 1:
        raise MoveError(
            f"the resolution has {len(drafts)} commits over the patches before {patch.name}",
            why="a patch is one commit",
            fix=f"make them one: git rebase -i {work.record.base[:12]}",
        )
    if drafts[0].names not in ([], [patch.name]):
        raise MoveError(
            f"the commit is named {', '.join(drafts[0].names)}, not {patch.name}",
            fix=f"amend its '{NAME_TRAILER}:'; rename a patch after the move, with 'export'",
        )
    return drafts[0].commit


def _staged(work: Work, patch: Patch) -> str:
    """A commit of the index, with the patch's own author and message."""
    unmerged = [path for state, path in work.status if "U" in state or state in ("AA", "DD")]
    if unmerged:
        raise _unmerged(work, patch, unmerged)
    loose = [path for state, path in work.status if state[1] not in " ?"]
    if loose:
        raise MoveError(
            f"the resolution of {patch.name} has changes that are not staged",
            why="\n".join(loose[:20]) + (" ..." if len(loose) > 20 else ""),
            fix="git add them, or commit",
        )
    tree = work.git.run("write-tree").decode().strip()
    # "@": git would read a small number as a year
    who = {"NAME": patch.author, "EMAIL": patch.email, "DATE": f"@{patch.date}"}
    made = work.git.run(
        "commit-tree", "-p", work.record.base, tree, stdin=named_message(patch).encode(),
        env={f"GIT_{role}_{k}": v for role in ("AUTHOR", "COMMITTER") for k, v in who.items()},
    )  # fmt: skip
    return made.decode().strip()


def _unmerged(work: Work, patch: Patch, paths: Sequence[str]) -> MoveError:
    found = []
    for path in paths:
        at = work.folder / path
        if at.is_file() and not at.is_symlink():
            found += [f"{path}:{line}" for line in marker_lines(at.read_bytes(), ())]
    return MoveError(
        f"the resolution of {patch.name} still has conflict markers"
        if found
        else f"{len(paths)} files of the resolution of {patch.name} are unmerged",
        why="\n".join(found[:40] or paths),
        fix="resolve them, then git add the files (or git rm), or commit",
    )


def _refuse_markers(
    patch: Patch, changed: Sequence[bytes], now: StoredTree, conflicts: Sequence[Conflict]
) -> None:
    """Refuse a resolution in which markers were left, also in a file that was no conflict."""
    sides = [
        side.data
        for conflict in conflicts
        for side in (conflict.base, conflict.ours, conflict.theirs)
        if side is not None
    ]
    found = [
        f"{quote_path(path)}:{line}"
        for path in changed
        if (entry := now.get(path)) is not None
        for line in marker_lines(entry.data, sides)
    ]
    if found:
        raise MoveError(
            f"the resolution of {patch.name} still has conflict markers",
            why="\n".join(found[:40]),
            fix="resolve them, and commit again (git commit --amend)",
        )


def _changed(work: Work, start: str, commit: str) -> list[bytes]:
    """Paths in which two commits differ."""
    out = work.git.run("diff-tree", "-r", "--name-only", "-z", "--no-renames", start, commit)
    return out.split(b"\0")[:-1]


def _conflict(work: Work, met: Met) -> Conflict:
    """A conflict as it was met. Modes are of no interest any more."""

    def side(blob: str) -> Entry | None:
        got = work.reader.get(blob) if blob else None
        return Entry(mode=REGULAR, data=got[2]) if got is not None else None

    marked = side(met.marked)
    return Conflict(
        path=unquote_path(met.path.encode()), kind=met.kind,
        base=side(met.base), ours=side(met.ours), theirs=side(met.theirs),
        marked=marked.data if marked is not None else b"",
    )  # fmt: skip


def _beyond(record: Resolving, changed: Sequence[bytes], now: StoredTree) -> Iterator[str]:
    """Paths that differ from what the merge settled by itself."""
    waiting = {met.path for met in record.conflicts}
    for path in sorted({*map(quote_path, changed), *record.clean} - waiting):
        entry = now.get(unquote_path(path.encode()))
        if path not in record.clean or record.clean[path] != entry_id(entry):
            yield path
