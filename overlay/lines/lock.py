"""The lock: what applying a line must give, committed beside it.

Content decides: the hash of each patch file and the blob ids of every file it touches, before
and after. Tree ids stand beside it by kind of source, since FlashInfer's archive is another
tree than its commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from overlay.errors import LockError
from overlay.files import machine_errors, write_atomic
from overlay.lines.line import LOCK_FILE, UPSTREAMS, Strict, Upstream, read_toml
from overlay.lines.record import digest, make_record
from overlay.trees.apply import Effect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from overlay.lines.line import Line
    from overlay.trees.apply import Patched, PatchedTree

_HEAD = b"""\
# What applying this line must give. Written by 'lock', checked by 'verify'; don't edit.
"""


class LockedPatch(Strict, frozen=True):
    """One patch: its file's hash, and what it does."""

    name: str
    sha256: str
    files: tuple[Effect, ...]


class LockedTrees(Strict, frozen=True):
    """Tree ids before and after the series."""

    base: str
    patched: str


class LockedUpstream(Strict, frozen=True):
    """One upstream: trees by kind of source, and the patches in order."""

    trees: dict[str, LockedTrees]
    patches: tuple[LockedPatch, ...]


class Lock(Strict, frozen=True):
    """``lock.toml``."""

    format: Literal[1]
    digest: str
    vllm: LockedUpstream
    flashinfer: LockedUpstream

    def upstream(self, upstream: Upstream) -> LockedUpstream:
        """The part of one upstream."""
        return self.vllm if upstream == "vllm" else self.flashinfer

    def known_trees(self, upstream: Upstream) -> dict[str, str]:
        """Base tree ids that the lock promises, and where it does."""
        trees = self.upstream(upstream).trees
        return {tree.base: f"{LOCK_FILE}, {kind}" for kind, tree in trees.items()}


def read_lock(line: Line) -> Lock | None:
    """The line's lock, or None when it was never locked."""
    path = line.folder / LOCK_FILE
    return read_toml(path, Lock) if path.exists() else None


def make_lock(line: Line, patched: Mapping[Upstream, Patched], old: Lock | None) -> Lock:
    """The lock of what applying gave just now.

    Trees of other kinds of source are kept from ``old`` as long as the content is the same.
    """
    record = make_record(line, {upstream: patched[upstream].tree for upstream in UPSTREAMS})
    parts = {}
    for upstream in UPSTREAMS:
        now = patched[upstream]
        patches = _patches(line, upstream, now.tree)
        kept: dict[str, LockedTrees] = {}
        if old is not None and old.digest == digest(record):
            kept = dict(old.upstream(upstream).trees)
        if now.base.kind != "path":  # its tree is one of another kind's, or it was refused
            kept[now.base.kind] = LockedTrees(base=now.tree.base.tree, patched=now.tree.tree)
        parts[upstream] = LockedUpstream(trees=dict(sorted(kept.items())), patches=patches)
    return Lock(format=1, digest=digest(record), vllm=parts["vllm"], flashinfer=parts["flashinfer"])


def write_lock(line: Line, lock: Lock) -> Path:
    """Write ``lock.toml``."""
    import tomli_w

    path = line.folder / LOCK_FILE
    with machine_errors(path, is_cache=False):
        text = tomli_w.dumps(msgspec.to_builtins(lock))
        write_atomic(path, _HEAD + text.encode())
    return path


def check_lock(line: Line, patched: Mapping[Upstream, Patched], lock: Lock | None) -> Lock:
    """The lock, when it agrees with what applying gave; ``LockError`` naming each difference."""
    if lock is None:
        raise LockError(
            f"line {line.name} has no {LOCK_FILE}",
            fix=f"look at what 'vllm-overlay apply {line.name}' gives, then run "
            f"'vllm-overlay lock {line.name}'",
        )
    now = make_lock(line, patched, lock)
    differences = list(_differences(lock, now, patched))
    if differences:
        raise LockError(
            f"line {line.name} disagrees with its {LOCK_FILE}",
            why="\n".join(differences),
            fix="restore what changed; or, if it was meant, run "
            f"'vllm-overlay lock {line.name}' and commit",
        )
    return lock


def _patches(line: Line, upstream: Upstream, tree: PatchedTree) -> tuple[LockedPatch, ...]:
    return tuple(
        LockedPatch(name=patch.name, sha256=patch.sha256, files=applied.effects)
        for patch, applied in zip(line.series[upstream], tree.patches, strict=True)
    )


def _differences(lock: Lock, now: Lock, patched: Mapping[Upstream, Patched]) -> Iterator[str]:
    """Every difference, as text."""
    found = False
    for upstream in UPSTREAMS:
        then, current = lock.upstream(upstream), now.upstream(upstream)
        for text in _patch_differences(then.patches, current.patches):
            found = True
            yield f"{upstream}: {text}"
        tree = patched[upstream].tree
        locked = then.trees.get(patched[upstream].base.kind)
        if locked is not None and locked.base != tree.base.tree:
            found = True
            yield f"{upstream}: base tree is {tree.base.tree}, locked {locked.base}"
        elif locked is not None and not found and locked.patched != tree.tree:
            found = True
            yield f"{upstream}: patched tree is {tree.tree}, locked {locked.patched}"
    if not found and lock.digest != now.digest:
        yield f"pins or requirements changed: digest is {now.digest}, locked {lock.digest}"


def _patch_differences(
    locked: tuple[LockedPatch, ...], now: tuple[LockedPatch, ...]
) -> Iterator[str]:
    then = {patch.name: patch for patch in locked}
    current = {patch.name: patch for patch in now}
    for name in then.keys() - current.keys():
        yield f"patch {name} is locked but not in the series"
    for name, patch in current.items():
        if name not in then:
            yield f"patch {name} is not locked"
            continue
        if patch.sha256 != then[name].sha256:
            yield f"patch {name}: file is {patch.sha256[:16]}…, locked {then[name].sha256[:16]}…"
        yield from _file_differences(patch, then[name])
    if then.keys() == current.keys() and list(then) != list(current):
        yield f"the order is {', '.join(current)}; locked {', '.join(then)}"


def _file_differences(now: LockedPatch, then: LockedPatch) -> Iterator[str]:
    locked = {effect.path: effect for effect in then.files}
    for effect in now.files:
        before = locked.pop(effect.path, None)
        if before is None:
            yield f"patch {now.name}: {effect.path} is touched, but not locked"
        elif effect.before != before.before:
            yield (
                f"patch {now.name}: {effect.path} is {effect.before} before it, "
                f"locked {before.before}"
            )
        elif effect != before:
            yield f"patch {now.name}: {effect.path} becomes {effect.blob}, locked {before.blob}"
    for path in locked:
        yield f"patch {now.name}: {path} is locked, but not touched"
