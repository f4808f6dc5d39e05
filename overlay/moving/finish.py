"""End a move: the whole new line is made beside the lines, proven, and put in place at once.

A line's folder is replaced as a whole. A kill between the two renames that this takes leaves no
line of that name for others to read, half or whole; ``recover`` puts the new one in its place, and
every run of ``move`` begins with that.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from packaging.requirements import InvalidRequirement, Requirement

from overlay.errors import MoveError, UnavailableError
from overlay.files import machine_errors, write_atomic
from overlay.lines.line import LINE_FILE, LOCK_FILE, SERIES_FILE, UPSTREAMS, Line, read_line
from overlay.lines.linefile import comments_on, set_pin
from overlay.lines.lock import Lock, make_lock, read_lock, write_lock
from overlay.moving import tombstones
from overlay.moving.journal import MOVE_FOLDER, end
from overlay.moving.move import commit_all, mails
from overlay.patches.rangediff import Change, compare
from overlay.patches.series import publish, series_text
from overlay.sources.releases import is_released
from overlay.trees.apply import refuse_bad
from overlay.trees.match import Verdict
from overlay.trees.pipeline import apply_line
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from overlay.moving.move import Move
    from overlay.sources.source import Sources

# Beside the lines, so that renames stay on one disk; two levels, so that nothing in it is a line
_STAGE = ".move"
# What vLLM's wheel for CUDA asks for
_REQUIREMENTS = b"requirements/cuda.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a move made.

    Attributes:
        line: as it is now.
        changes: the range-diff.
        dropped: names of patches that it left behind, each with the reason.
        look: what the maintainer must look at, since no move can decide it.
    """

    line: Line
    changes: tuple[Change, ...]
    dropped: Mapping[str, str]
    look: tuple[str, ...]


def finish(root: Path, move: Move, sources: Sources) -> Finished:
    """Write the new line, its lock and the tombstones, and end the move. Hold its lock.

    Raises:
        MoveError: something is undecided, or the new name is taken.
        ExportError: a patch file would not give what was carried. Nothing was written.
    """
    if move.waiting:
        raise MoveError(f"{len(move.waiting)} patches of {move.line.name} are not decided")
    name = move.journal.to or move.line.name
    stage = root / _STAGE / "new" / name
    with machine_errors(root, is_cache=False):
        shutil.rmtree(root / _STAGE, ignore_errors=True)
        try:
            look = tuple(_stage(move, stage, sources))
            staged = read_line(stage.parent, name)
            changes = compare(move.patches, staged.series[move.upstream])
            tombstones.add(root, *_stones(move))
            _place(root, stage, move)
        finally:
            recover(root)
        end(move.line.folder)
    return Finished(line=read_line(root, name), changes=changes, dropped=move.dropped, look=look)


def recover(root: Path) -> list[str]:
    """Complete replacements that were killed half-way; their lines. Hold the move's lock."""
    found = []
    for old in sorted((root / _STAGE / "old").glob("*")):
        if not (root / old.name).exists():
            new = root / _STAGE / "new" / old.name
            (new if new.exists() else old).rename(root / old.name)
            found.append(old.name)
    shutil.rmtree(root / _STAGE, ignore_errors=True)
    return found


def _stage(move: Move, stage: Path, sources: Sources) -> Iterator[str]:
    """Make the new line's folder; what there is to look at."""
    line, pin = move.line, move.journal.pin
    stage.parent.mkdir(parents=True)
    shutil.copytree(line.folder, stage, symlinks=True, ignore=_not_copied)
    asked = _asked(move)
    text = (stage / LINE_FILE).read_bytes().decode()
    made = set_pin(text, move.upstream, pin, asked)
    write_atomic(stage / LINE_FILE, made.encode())
    kept = move.kept
    commits = commit_all(move.store, move.new.commit, kept)
    names = [patch.name for patch, _ in kept]
    series = stage / move.upstream / SERIES_FILE
    before = series.read_bytes().decode() if series.exists() else ""
    listed = series_text(before, names, {})
    publish(
        stage / move.upstream, mails(move.store, commits, names), listed.encode(),
        list(move.dropped), known={patch.name: patch for patch in move.patches},
        store=move.store, base=move.new.commit, trees=[made.tree for made in commits[1:]],
    )  # fmt: skip
    _lock(read_line(stage.parent, stage.name), move, sources)
    yield from _look(move, made, listed, asked)


def _not_copied(folder: str, names: list[str]) -> set[str]:
    del folder
    # An upstream's folder may hold a patch of these names
    top = LINE_FILE in names
    return {MOVE_FOLDER, LOCK_FILE} & set(names) if top else set()


def _lock(staged: Line, move: Move, sources: Sources) -> None:
    patched = apply_line(staged, sources, upstreams=[move.upstream])
    others = [upstream for upstream in UPSTREAMS if upstream != move.upstream]
    # By the line's own lock, which says what a plain folder must hold
    patched |= apply_line(move.line, sources, upstreams=others)
    for upstream in UPSTREAMS:
        refuse_bad(patched[upstream].tree, staged.name, upstream)
    lock = make_lock(staged, patched, None)
    old = read_lock(move.line)
    write_lock(staged, lock if old is None else _with_trees(lock, old, move))


def _with_trees(lock: Lock, old: Lock, move: Move) -> Lock:
    """Trees of other kinds of source, of the upstream that stays as it is."""
    if move.upstream == "vllm":
        stays, was = lock.flashinfer, old.flashinfer
    else:
        stays, was = lock.vllm, old.vllm
    if stays.patches != was.patches:
        return lock
    trees = dict(sorted({**was.trees, **stays.trees}.items()))
    kept = msgspec.structs.replace(stays, trees=trees)
    if move.upstream == "vllm":
        return msgspec.structs.replace(lock, flashinfer=kept)
    return msgspec.structs.replace(lock, vllm=kept)


def _place(root: Path, stage: Path, move: Move) -> None:
    target = root / stage.name
    if move.journal.to is None:
        old = root / _STAGE / "old" / stage.name
        old.parent.mkdir()
        target.rename(old)
    elif target.exists():
        if _same(stage, target):  # an earlier run was killed just after this
            return
        raise MoveError(
            f"{root.name}/{stage.name} exists already",
            fix=f"remove it, or give the move up and begin one with another --to: "
            f"move {move.line.name} --abort",
        )
    stage.rename(target)


def _same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files."""

    def files(folder: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    return files(one) == files(other)


def _stones(move: Move) -> Iterator[tombstones.Tombstone]:
    by_name = {patch.name: patch for patch in move.patches}
    for name, reason in move.dropped.items():
        skipped = name in move.decided and move.decided[name] is None
        pulls = by_name[name].trailer("Upstream")
        yield tombstones.Tombstone(
            patch=name,
            upstream=move.upstream,
            line=move.line.name,
            from_version=move.line.pin(move.upstream).version,
            at_version=move.journal.pin.version,
            why="skipped" if skipped else "merged",
            sha256=by_name[name].sha256,
            reason=reason if skipped else "",
            pull=pulls[0] if pulls else "",
        )


def _asked(move: Move) -> dict[str, str]:
    """What the new vLLM asks for, by project, as far as its tree says it."""
    if move.upstream != "vllm":
        return {}
    try:
        entry = StoredTree(move.store.reader, move.new.commit.tree).get(_REQUIREMENTS)
    except UnavailableError:
        entry = None
    found = {}
    for line in entry.data.decode(errors="replace").splitlines() if entry else ():
        try:
            asked = Requirement(re.sub(r"(^|\s)#.*", "", line))
        except InvalidRequirement:
            continue
        found[asked.name] = str(asked.specifier)
    return found


def _look(move: Move, text: str, series: str, asked: Mapping[str, str]) -> Iterator[str]:
    """What no move can decide."""
    yield from _pins(move, asked)
    version = move.line.pin(move.upstream).version
    for file, content in ((LINE_FILE, text), (f"{move.upstream}/{SERIES_FILE}", series)):
        for at, words in comments_on(content, (version,)):
            yield f"{file}:{at} speaks of {version}: {words}"
    for carried in move.carried:
        if carried.replayed:
            yield f"{carried.name}: resolved as recorded; read what came of it"
        elif carried.verdict in (Verdict.CONTEXT, Verdict.MOVED, Verdict.PARTLY_MERGED):
            yield f"{carried.name}: {carried.verdict}, merged by itself; read what came of it"


def _pins(move: Move, asked: Mapping[str, str]) -> Iterator[str]:
    settings, pin = move.line.settings, move.journal.pin
    if not is_released(pin):
        yield f"{move.upstream}: no release stands for commit {pin.commit}; no wheel can be built"
    elif pin.tree is None and move.line.pin(move.upstream).tree is not None:
        yield f"{LINE_FILE}: [{move.upstream}] had a 'tree', which is not known for the new pin"
    if move.upstream != "vllm":
        return
    torch = asked.get("torch", "")
    if torch and torch != f"=={settings.torch}":
        yield f"{LINE_FILE}: torch is {settings.torch}; vllm {pin.version} asks {torch}"
    for project, ours in settings.requirements.items():
        theirs = asked.get(project)
        if theirs is None:
            yield f"{LINE_FILE}: requirements.{project}.upstream: what vllm asks is not known"
        elif theirs != ours.line:
            yield f"{LINE_FILE}: vllm {pin.version} asks {project}{theirs}; we give {ours.line}"


__all__ = ["Finished", "finish", "recover"]
