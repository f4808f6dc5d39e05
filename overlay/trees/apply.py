"""Apply a series to a base tree: every patch gets a verdict, every good one a commit.

No working tree: blobs come from one ``git cat-file``, commits go to one ``git fast-import``.
Each intermediate state is kept under a key made of the base commit and the patches so far, so
a change to patch k costs the patches from k on, and an unchanged series costs a look-up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from overlay.errors import ApplyError
from overlay.files import machine_errors, write_atomic
from overlay.patches.patch import NAME_TRAILER
from overlay.patches.paths import quote_path
from overlay.trees.match import Entry, Finding, Verdict, match_patch
from overlay.trees.objects import NO_BLOB, blob_id
from overlay.trees.store import Commit, FastImport, Store, StoredTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlay.patches.patch import Patch
    from overlay.sources.source import Base
    from overlay.trees.git import ObjectReader

# Changes whenever a state could come out differently from the same patches.
STATE_FORMAT = 2


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """What one patch did to one path.

    Attributes:
        path: as text (``overlay.patches.paths.quote_path``).
        mode_before, mode: six octal digits; ``000000`` where there is no file.
        before, blob: git blob ids; 40 zeros where there is no file.
    """

    path: str
    mode_before: str
    mode: str
    before: str
    blob: str


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one patch, and the state after it (of the last good one, if it is bad)."""

    name: str
    verdict: Verdict
    commit: str
    tree: str
    effects: tuple[Effect, ...] = ()
    findings: tuple[Finding, ...] = ()
    cached: bool = False


class PatchedTree(msgspec.Struct, frozen=True, kw_only=True):
    """A base tree with a series applied."""

    base: Commit
    patches: tuple[Applied, ...]

    @property
    def tree(self) -> str:
        """Id of the patched tree."""
        return self.patches[-1].tree if self.patches else self.base.tree

    @property
    def commit(self) -> str:
        """Id of the last patch's commit."""
        return self.patches[-1].commit if self.patches else self.base.commit

    @property
    def bad(self) -> tuple[Applied, ...]:
        """The patches that are no part of the tree."""
        return tuple(patch for patch in self.patches if not patch.verdict.good)

    def final(self) -> dict[str, Effect]:
        """The last effect on each path over the whole series."""
        return {effect.path: effect for patch in self.patches for effect in patch.effects}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patched:
    """One upstream of a line: where it stands and what the series made of it."""

    base: Base
    tree: PatchedTree
    store: Store


def apply_series(
    store: Store, base: Commit, patches: Sequence[Patch], *, use_states: bool = True
) -> PatchedTree:
    """Apply ``patches`` in order to ``base``.

    Args:
        store: holds the base commit and gets the new ones.
        base: to stand on.
        patches: the series.
        use_states: False recomputes everything, as ``verify`` does.
    """
    keys = _state_keys(base, patches)
    done = _known(store, keys) if use_states else []
    if len(done) == len(patches):
        return PatchedTree(base=base, patches=tuple(done))
    with store.writing(), FastImport(store) as stream:
        made = _make(store.reader, stream, base, patches, done, tip_ref(base, patches))
    with machine_errors(store.states):
        store.states.mkdir(parents=True, exist_ok=True)
        for key, state in zip(keys[len(done) :], made, strict=True):
            data = msgspec.json.encode(_keep(key, state))
            write_atomic(store.states / f"{key}.json", data, sync=False)
    return PatchedTree(base=base, patches=(*done, *made))


def refuse_bad(patched: PatchedTree, line: str, upstream: str) -> None:
    """Raise ``ApplyError`` that names every patch with a bad verdict, with its evidence."""
    if not patched.bad:
        return
    rows = []
    for patch in patched.bad:
        rows.append(f"{patch.name}: {patch.verdict}")
        rows += [
            f"  {finding.path} (patch line {finding.at}): {finding.why or finding.verdict}"
            for finding in patch.findings
            if not finding.verdict.good
        ]
    raise ApplyError(
        f"{len(patched.bad)} of {len(patched.patches)} {upstream} patches of {line} don't apply",
        why="\n".join(rows),
        fix="drop what upstream has merged; repair the rest in a checkout and export",
    )


def tip_ref(base: Commit, patches: Sequence[Patch]) -> str:
    """The ref that keeps all states of one series on one base from being collected."""
    keys = _state_keys(base, patches)
    return f"refs/overlay/tip/{keys[-1] if keys else base.commit}"


def _state_keys(base: Commit, patches: Sequence[Patch]) -> list[str]:
    keys = []
    key = f"{STATE_FORMAT} {base.commit}"
    for patch in patches:
        key = hashlib.sha256(f"{key} {patch.name} {patch.sha256}".encode()).hexdigest()
        keys.append(key)
    return keys


class _Kept(Applied, frozen=True, kw_only=True):
    """A state in its file. One that was damaged since would pass for a change of the line."""

    check: str


def _keep(key: str, state: Applied) -> _Kept:
    check = hashlib.sha256(key.encode() + msgspec.json.encode(state)).hexdigest()
    fields = {name: getattr(state, name) for name in Applied.__struct_fields__}
    return _Kept(**fields, check=check)


def _known(store: Store, keys: list[str]) -> list[Applied]:
    """States that were made before, from the first patch on without a gap."""
    found: list[Applied] = []
    for key in keys:
        path = store.states / f"{key}.json"
        try:
            kept = msgspec.json.decode(path.read_bytes(), type=_Kept, strict=True)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):
            break
        state = Applied(**{name: getattr(kept, name) for name in Applied.__struct_fields__})
        if kept != _keep(key, state):
            break
        with contextlib.suppress(OSError):  # a cache that is read-only still answers
            os.utime(path)  # 'cache gc' goes by last use
        found.append(msgspec.structs.replace(state, cached=True))
    # The objects may have gone with the store; ask for the newest, which holds all older ones
    while found and store.find(found[-1].commit) != Commit(
        commit=found[-1].commit, tree=found[-1].tree
    ):
        found.pop()
    return found


def _make(
    reader: ObjectReader,
    stream: FastImport,
    base: Commit,
    patches: Sequence[Patch],
    done: Sequence[Applied],
    ref: str,
) -> list[Applied]:
    """Apply the patches after ``done``."""
    at = Commit(commit=done[-1].commit, tree=done[-1].tree) if done else base
    parent: str | None = at.commit
    tree = StoredTree(reader, at.tree)
    bad = {patch.name for patch in done if not _holds(patch.verdict)}
    made: list[Applied] = []
    for patch in patches[len(done) :]:
        outcome = match_patch(patch, tree)
        verdict, findings = outcome.verdict, outcome.findings
        effects: tuple[Effect, ...] = ()
        blockers = [name for name in patch.requires if name in bad]
        if blockers:
            verdict = Verdict.BLOCKED
            why = (
                f"requires {', '.join(blockers)}, which {'is' if len(blockers) == 1 else 'are'} bad"
            )
            findings = (Finding(verdict=verdict, path="", at=1, why=why), *findings)
        if verdict.good:
            effects = tuple(
                _effect(path, tree.get(path), entry)
                for path, entry in sorted(outcome.changes.items())
            )
            write_commit(stream, patch, outcome.changes, parent, ref)
            parent = None
            at = stream.made()
            tree.changes |= outcome.changes
        if not _holds(verdict):
            bad.add(patch.name)
        made.append(
            Applied(
                name=patch.name, verdict=verdict, commit=at.commit, tree=at.tree,
                effects=effects, findings=findings,
            )
        )  # fmt: skip
    return made


def _holds(verdict: Verdict) -> bool:
    """Whether the tree has a patch's change, so that patches which require it may apply."""
    return verdict.good or verdict is Verdict.MERGED


def write_commit(
    stream: FastImport,
    patch: Patch,
    changes: Mapping[bytes, Entry | None],
    parent: str | None,
    ref: str,
) -> None:
    """Begin and fill the commit of one patch; ``parent`` None continues the last one."""
    stream.commit(
        ref,
        parent=parent,
        identity=f"{patch.author} <{patch.email}>",
        date=patch.date,
        message=named_message(patch),
    )
    # Deletions first: a new file may stand where a folder was
    for path, entry in sorted(changes.items(), key=lambda item: item[1] is not None):
        if entry is None:
            stream.delete(path)
        else:
            stream.put(path, entry.mode, entry.data)


def named_message(patch: Patch) -> str:
    """The patch's commit message with its name as one more trailer."""
    gap = "" if patch.trailers else "\n"
    return f"{patch.message}{gap}{NAME_TRAILER}: {patch.name}\n"


def _effect(path: bytes, before: Entry | None, after: Entry | None) -> Effect:
    return Effect(
        path=quote_path(path),
        mode_before=f"{before.mode if before else 0:06o}",
        mode=f"{after.mode if after else 0:06o}",
        before=blob_id(before.data) if before else NO_BLOB,
        blob=blob_id(after.data) if after else NO_BLOB,
    )
