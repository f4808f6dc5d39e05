"""Carry a line's series to another pin: worked out anew by every run, written once all is decided.

What a run needs to remember is in the journal (``overlay.moving.journal``); bases, verdicts and
merges follow from it. So a move can be killed at any moment, and taken up on another machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import LineError, MoveError
from overlay.lines.line import CODENAME, find_lines, read_line
from overlay.lines.lock import read_lock
from overlay.moving.carry import Carried, Conflict, carry_series, old_states, renames_between
from overlay.moving.examine import Examiner
from overlay.moving.journal import decided
from overlay.moving.resolutions import Resolutions
from overlay.moving.resolving import Meeting, open_meeting
from overlay.patches.commits import format_mails
from overlay.patches.diff import REGULAR, Kind
from overlay.patches.patch import SUFFIX, Patch, parse_trailers, split_trailers
from overlay.sources.releases import known_pins, pin_commit, pin_release, with_pin
from overlay.trees.apply import write_commit
from overlay.trees.match import Entry, Verdict, match_patch
from overlay.trees.store import Commit, FastImport, Store, StoredTree

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from overlay.lines.line import Line, Pin, Upstream
    from overlay.moving.evidence import Dossier
    from overlay.moving.examine import Examined
    from overlay.moving.journal import Journal
    from overlay.sources.source import Base, Sources
    from overlay.trees.match import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move as far as it goes now.

    Attributes:
        line: as it is.
        journal: what was decided.
        store: of the upstream.
        old, new: the base trees.
        before, after: the old base before and after each patch.
        decided: what holds of the decisions.
        carried: what became of each patch, in order.
        examined: the same in the light of all evidence.
    """

    line: Line
    journal: Journal
    store: Store
    old: Base
    new: Base
    before: Sequence[Tree]
    after: Sequence[Tree]
    decided: Mapping[str, Patch | None]
    carried: tuple[Carried, ...]
    examined: Examined

    @property
    def upstream(self) -> Upstream:
        """Whose series it is."""
        return self.journal.upstream

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The series as it is."""
        return self.line.series[self.upstream]

    def patch(self, name: str) -> Patch:
        """The patch of that name. Raises ``MoveError``."""
        wanted = name.removesuffix(SUFFIX).removeprefix(f"{self.upstream}/")
        for patch in self.patches:
            if patch.name == wanted:
                return patch
        raise MoveError(
            f"{self.line.name}'s {self.upstream} series has no patch {name!r}",
            fix=f"known: {', '.join(patch.name for patch in self.patches)}",
        )

    @property
    def waiting(self) -> tuple[Dossier, ...]:
        """The patches that need a person."""
        return tuple(
            dossier
            for dossier in self.examined.dossiers
            if not (dossier.carried.ok if dossier.carried.decided else dossier.ok)
        )

    @property
    def kept(self) -> tuple[tuple[Patch, Carried], ...]:
        """What the new series is made of, in order: each patch as it is to be told, and carried."""
        gone = self.dropped
        return tuple(
            (without_requirements(self.decided.get(patch.name) or patch, gone), carried)
            for patch, carried in zip(self.patches, self.carried, strict=True)
            if carried.changes and patch.name not in gone
        )

    @property
    def dropped(self) -> dict[str, str]:
        """Names that the new series lacks, each with the reason."""
        found = {}
        for dossier in self.examined.dossiers:
            name = dossier.name
            if dossier.carried.decided == "skipped":
                found[name] = self.journal.decisions[name].skip or ""
            elif (
                dossier.carried.verdict if dossier.carried.decided else dossier.verdict
            ) is Verdict.MERGED:
                found[name] = f"upstream has it in {self.journal.pin.version}"
        return found


def target_pin(root: Path, sources: Sources, line: Line, upstream: Upstream, target: str) -> Pin:
    """The pin that a user names: a version, a full commit id, or a line that stands on it.

    Raises:
        MoveError: the line stands there already.
        LineError: no such version or commit.
        UnavailableError: the release can't be had now.
    """
    if CODENAME.match(target) and target in find_lines(root):
        pin = read_line(root, target).pin(upstream)
    else:
        known = (line.pin(upstream), *known_pins(root, upstream))
        version = target.removeprefix("v")
        # One that a line stands on needs no index
        pinned = next((pin for pin in known if pin.version == version), None)
        if pinned is not None:
            pin = pinned
        elif re.fullmatch(r"[0-9a-f]{40}", target):
            pin = pin_commit(upstream, target, known=known)
        elif version[:1].isdigit():
            pin = pin_release(sources, upstream, version, known=known)
        else:
            raise LineError(
                f"{target!r} is no version, no full commit id and no line",
                fix=f"lines: {', '.join(find_lines(root))}",
            )
    if pin == line.pin(upstream):
        raise MoveError(f"{line.name} stands on {upstream} {pin.version} already")
    return pin


def target_id(pin: Pin) -> str:
    """What tells two targets apart, whatever else a pin says."""
    return f"{pin.version} {pin.commit_text} {pin.sdist.sha256}"


def work_out(
    root: Path,
    line: Line,
    journal: Journal,
    sources: Sources,
    clones: Mapping[Upstream, Path] | None = None,
) -> Move:
    """What becomes of each patch, with what was decided so far.

    Args:
        root: the ``patches`` folder.
        line: the line.
        journal: of the move.
        sources: give the base trees.
        clones: of upstreams, for their history.

    Raises:
        ApplyError: the series doesn't apply where it is; that has to be mended first.
        SourceError, UnavailableError: a base tree can't be had.
    """
    upstream = journal.upstream
    lock = read_lock(line)
    store = sources.store(upstream)
    old = sources.base(line, upstream, lock.known_trees(upstream) if lock else {})
    new = sources.base(with_pin(line, upstream, journal.pin), upstream, {})
    patches = line.series[upstream]
    before, after = old_states(patches, StoredTree(store.reader, old.commit.tree))
    holds = decided(line.folder, journal, {patch.name: patch for patch in patches})
    skipped = {name: "" for name, said in holds.items() if said is None}
    holds = {name: said and without_requirements(said, skipped) for name, said in holds.items()}
    carried = tuple(
        carry_series(
            patches, before, after, StoredTree(store.reader, new.commit.tree),
            git=store.git, decided=holds, replay=Resolutions(root).replay,
            renames=renames_between(store.git, old.commit.tree, new.commit.tree),
            ground=lambda patch: _ground(store, patch),
        )
    )  # fmt: skip
    pins = {upstream: journal.pin}
    examiner = Examiner(root=root, line=line, pins=pins, sources=sources, clones=clones or {})
    return Move(
        line=line, journal=journal, store=store, old=old, new=new, before=before, after=after,
        decided=holds, carried=carried, examined=examiner.weigh(upstream, carried),
    )  # fmt: skip


def meet(root: Path, move: Move, name: str) -> Meeting:
    """One patch where it meets the new base, with whatever was decided about it left out.

    Raises:
        MoveError: a patch that it stands on isn't decided.
    """
    at = [patch.name for patch in move.patches].index(name)
    patch = move.patches[at]
    patches, before, after = list(move.patches), list(move.before), list(move.after)
    resolved = move.decided.get(name)
    if (
        resolved is not None
        and not move.carried[at].ok
        and (sides := _ground(move.store, resolved))
    ):
        # What was resolved already counts, though the ground has changed since
        patches[at], (before[at], after[at]) = resolved, sides
    needs = [other for other in move.carried[at].needs if not _is_decided(move, other)]
    if needs:
        raise MoveError(
            f"{name} stands on {', '.join(needs)}, of which nothing is decided",
            fix=f"resolve or skip {needs[0]} first",
        )
    armed = False

    def answer(conflict: Conflict) -> bytes | None:
        return None if armed else Resolutions(root).replay(conflict)

    others = {other: said for other, said in move.decided.items() if other != name}
    series = carry_series(
        patches, before, after, StoredTree(move.store.reader, move.new.commit.tree),
        git=move.store.git, decided=others, replay=answer, ground=lambda p: _ground(move.store, p),
        renames=renames_between(move.store.git, move.old.commit.tree, move.new.commit.tree),
    )  # fmt: skip
    done = [next(series) for _ in range(at)]
    armed = True
    met = next(series)
    return Meeting(
        patch=patches[at], of=patch.sha256, before=before[at], after=after[at],
        start=commit_all(move.store, move.new.commit, _told(move, done))[-1],
        target=target_id(move.journal.pin), conflicts=met.conflicts,
        changes=_all_changes(patch, met),
    )  # fmt: skip


class _Files:
    """A tree of a few files (``overlay.trees.match.Tree``)."""

    def __init__(self, files: Mapping[bytes, Entry | None]) -> None:
        self._files = files

    def get(self, path: bytes) -> Entry | None:
        """The file at ``path``, or None."""
        return self._files.get(path)

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        """Whether any file lies below ``path``."""
        below = path + b"/"
        return any(p.startswith(below) and p not in without for p in self._files)


def _ground(store: Store, patch: Patch) -> tuple[Tree, Tree] | None:
    """The files of a patch before and after it, by its blob ids; None if the store lacks any.

    As 'git am -3' does it. Another clone of the project may not have them.
    """
    files: dict[bytes, Entry | None] = {}
    for diff in patch.files:
        if diff.old_path is None:
            continue
        blob = diff.old_blob.decode() if diff.old_blob else ""
        found = store.reader.get(blob) if len(blob) == 40 else None
        if found is None:
            return None
        files[diff.old_path] = Entry(mode=diff.old_mode or REGULAR, data=found[2])
    outcome = match_patch(patch, _Files(files))
    if not outcome.verdict.good:
        return None
    return _Files(files), _Files({**files, **outcome.changes})


def _all_changes(patch: Patch, met: Carried) -> dict[bytes, Entry | None]:
    """What the merge settled, and markers (or the patch's side) where it couldn't."""
    changes = dict(met.settled)
    for conflict in met.conflicts:
        side = conflict.theirs or conflict.ours
        if side is None:
            continue
        for diff in patch.files:
            if diff.kind is Kind.RENAME and diff.new_path == conflict.path and diff.old_path:
                changes[diff.old_path] = None
        changes[conflict.path] = Entry(mode=side.mode, data=conflict.marked or side.data)
    return changes


def _is_decided(move: Move, name: str) -> bool:
    return name in move.decided or name not in (waiting.name for waiting in move.waiting)


def _told(move: Move, done: Sequence[Carried]) -> list[tuple[Patch, Carried]]:
    """What was carried of the first patches."""
    return [
        (move.decided.get(carried.name) or patch, carried)
        for patch, carried in zip(move.patches, done, strict=False)
        if carried.changes
    ]


def commit_all(store: Store, base: Commit, kept: Sequence[tuple[Patch, Carried]]) -> list[Commit]:
    """The base and a commit for each patch that is carried, in order."""
    made = [base]
    if not kept:
        return made
    text = "\n".join(f"{patch.sha256} {patch.message}" for patch, _ in kept)
    key = hashlib.sha256(f"{base.commit}\n{text}".encode()).hexdigest()
    ref = f"refs/overlay/tip/{key}"  # 'cache gc' drops what no line needs
    with store.writing(), FastImport(store) as stream:
        parent: str | None = base.commit
        for patch, carried in kept:
            write_commit(stream, patch, carried.changes, parent, ref)
            parent = None
            made.append(stream.made())
    return made


def mails(store: Store, commits: Sequence[Commit], names: Sequence[str]) -> dict[str, bytes]:
    """Patch files in canonical form for the commits after the first."""
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-move-") as scratch:
        raw = format_mails(
            store.git, commits[0].commit, commits[-1].commit, len(names), Path(scratch)
        )
    return dict(zip(names, raw, strict=True))


def without_requirements(patch: Patch, gone: Mapping[str, str]) -> Patch:
    """``patch`` as it is told when the patches of these names are no more: not requiring them."""
    if not any(name in gone for name in patch.requires):
        return patch
    reason, block = split_trailers(patch.body)
    kept = []
    for key, value in parse_trailers(patch.body):
        if key.lower() == "requires":
            names = [name.strip() for name in value.split(",")]
            value = ", ".join(name for name in names if name and name not in gone)
            if not value:
                continue
        kept.append(f"{key}: {value}")
    del block
    body = f"{reason}\n\n" + "\n".join(kept) if kept and reason else reason or "\n".join(kept)
    return dataclasses.replace(patch, body=body)


def check_new_name(root: Path, name: str) -> None:
    """Refuse a name that no new line can have. Raises ``LineError``."""
    if not CODENAME.match(name):
        raise LineError(
            f"{name!r} is no codename", fix="use lower-case letters and digits, a letter first"
        )
    if (root / name).exists():
        raise LineError(f"{root.name}/{name} exists already", fix="choose another name")


def resolving_folder(root: Path, line: str, patch: str) -> Path:
    """Where a patch is resolved unless another folder is named."""
    folder = root.resolve().parent / "work" / f"{line}-{patch}"
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def open_patch(root: Path, move: Move, name: str, folder: Path, sources: Sources) -> str:
    """Make ``folder`` a repository with the conflicts of one patch; the dossier.

    Raises:
        MoveError: a patch that it stands on isn't decided.
        MachineError: the folder is in use.
        UnavailableError: the store lacks files and they can't be fetched.
    """
    from overlay.moving.dossier import dossier

    meeting = meet(root, move, name)
    text = dossier(move, meeting)
    open_meeting(
        move.store, move.line, move.upstream, move.new.commit, meeting, folder, sources.report,
        dossier=text, url=move.new.url, offline=sources.offline,
    )  # fmt: skip
    return text
