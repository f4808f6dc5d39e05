"""Take patches out of a line's series, and leave a series that applies strictly, or no change.

What stands on a dropped patch is found by leaving it out (``overlay.patches.graph``). Patches that
met other files than before are written anew; all others keep their bytes.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import DropError, ExportError, LineError
from overlay.files import locked, machine_errors
from overlay.lines.line import SERIES_FILE, UPSTREAMS, Line, Upstream, read_series
from overlay.lines.treelint import index_lines
from overlay.moving import tombstones
from overlay.moving.tombstones import Tombstone
from overlay.patches.commits import format_mails
from overlay.patches.graph import Whole
from overlay.patches.patch import SUFFIX, parse_patch
from overlay.patches.series import publish, series_text
from overlay.trees.apply import apply_series, refuse_bad
from overlay.trees.match import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlay.patches.patch import Patch
    from overlay.trees.apply import Applied, Patched, PatchedTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """What a drop does to one series, by patch names.

    Attributes:
        dropped: what was asked for, in order.
        cascaded: what went with it -> why it could not stay.
        rewritten, kept: patch files that stay.
    """

    upstream: Upstream
    dropped: tuple[str, ...]
    cascaded: Mapping[str, str]
    rewritten: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One series as it will be."""

    done: Dropped
    files: dict[str, bytes]
    tree: PatchedTree
    stones: tuple[Tombstone, ...]


def drop(
    line: Line,
    names: Sequence[str],
    patched: Mapping[Upstream, Patched],
    *,
    reason: str = "",
    cascade: bool = False,
) -> tuple[Dropped, ...]:
    """Drop the patches ``names`` from ``line``; what was done, for each series that changed.

    Args:
        line: as its folder says it now.
        names: patches, ``UPSTREAM/NAME`` where both series have one. One that an earlier run
            dropped already, as its tombstone says, is passed over.
        patched: both series, applied.
        reason: for the tombstones.
        cascade: drop what stands on them too.

    Raises:
        LineError: there is no such patch, or the series changed meanwhile.
        ApplyError: the series has bad verdicts as it is.
        DropError: other patches stand on them, and ``cascade`` is False.
        ExportError: a patch could not be written anew as it is.
    """
    gone = _gone(line, names)
    plans = []
    for upstream, dropped in gone.items():
        refuse_bad(patched[upstream].tree, line.name, upstream)
        falls = _falls(line.series[upstream], dropped, patched[upstream])
        if falls and not cascade:
            raise DropError(
                f"other patches of {line.name} {upstream} stand on {', '.join(dropped)}",
                why="\n".join(f"{name}: {why}" for name, why in falls.items()),
                fix="say --cascade to drop them too, or rework them in a checkout first",
            )
        plans.append(_plan(line, upstream, patched[upstream], dropped, falls, reason))
    _write(line, patched, plans)
    return tuple(plan.done for plan in plans)


def _gone(line: Line, names: Sequence[str]) -> dict[Upstream, list[str]]:
    """Names by upstream, in the order of the series."""
    stones = {
        wanted
        for stone in tombstones.read(line.folder.parent)
        if stone.line == line.name
        for wanted in (stone.patch, f"{stone.upstream}/{stone.patch}")
    }
    found: set[tuple[Upstream, str]] = set()
    for name in names:
        try:
            upstream, patch = line.patch(name)
        except LineError:
            if name.removesuffix(SUFFIX) in stones:
                continue  # an earlier run did it, and was perhaps killed after that
            raise
        found.add((upstream, patch.name))
    ordered = {
        upstream: [p.name for p in line.series[upstream] if (upstream, p.name) in found]
        for upstream in UPSTREAMS
    }
    return {upstream: dropped for upstream, dropped in ordered.items() if dropped}


def _falls(patches: Sequence[Patch], dropped: Sequence[str], patched: Patched) -> dict[str, str]:
    """What can't stay, whether by its text or since it says so, with the reason."""
    whole = Whole(patched.store, patched.tree, patches)
    declared: dict[str, str] = {}
    while True:
        gone = {*dropped, *declared}
        falls = whole.falls(gone) | declared
        more = {
            patch.name: f"Requires: {required}"
            for patch in patches
            for required in patch.requires
            if required in gone | falls.keys() and patch.name not in gone | falls.keys()
        }
        if not more:
            return {p.name: falls[p.name] for p in patches if p.name in falls}
        declared |= more


def _plan(
    line: Line,
    upstream: Upstream,
    patched: Patched,
    dropped: Sequence[str],
    falls: Mapping[str, str],
    reason: str,
) -> _Plan:
    old = line.series[upstream]
    rest = [patch for patch in old if patch.name not in dropped and patch.name not in falls]
    tree = apply_series(patched.store, patched.base.commit, rest)
    refuse_bad(tree, line.name, upstream)
    before = {applied.name: applied for applied in patched.tree.patches}
    stale = {
        patch.name
        for patch, applied in zip(rest, tree.patches, strict=True)
        if not _as_before(applied, before[patch.name]) and not _is_exact(patch, applied)
    }
    files = {patch.name: patch.raw for patch in rest}
    if stale:
        files |= _anew(rest, stale, tree, patched)
    version = line.pin(upstream).version
    along = f"went with {', '.join(dropped)}" + (f": {reason}" if reason else "")
    why = {**dict.fromkeys(dropped, reason), **dict.fromkeys(falls, along)}
    stones = tuple(
        Tombstone(
            patch=patch.name, upstream=upstream, line=line.name, from_version=version,
            at_version=version, why="dropped", sha256=patch.sha256, reason=why[patch.name],
            pull=next(iter(patch.trailer("Upstream")), ""),
        )
        for patch in old
        if patch.name in why
    )  # fmt: skip
    done = Dropped(
        upstream=upstream,
        dropped=tuple(dropped),
        cascaded=falls,
        rewritten=tuple(name for name in files if name in stale),
        kept=tuple(name for name in files if name not in stale),
    )
    return _Plan(done=done, files=files, tree=tree, stones=stones)


def _as_before(now: Applied, before: Applied) -> bool:
    """Whether a patch met what it met before: then its file says what it said, right or not."""
    return (now.effects, now.findings) == (before.effects, before.findings)


def _is_exact(patch: Patch, applied: Applied) -> bool:
    """Whether all that a patch file says of places and ids is so."""
    return applied.verdict is Verdict.APPLIES and not any(index_lines(patch, applied, ""))


def _anew(
    rest: Sequence[Patch], stale: set[str], tree: PatchedTree, patched: Patched
) -> dict[str, bytes]:
    """The stale patches in canonical form, from their new commits."""
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-drop-") as scratch:
        base, count = patched.base.commit.commit, len(rest)
        mails = format_mails(patched.store.git, base, tree.commit, count, Path(scratch))
    files = {}
    for patch, mail in zip(rest, mails, strict=True):
        if patch.name not in stale:
            continue
        after = parse_patch(mail, name=patch.name)
        one, other = ((p.author, p.email, p.date, p.subject, p.body) for p in (patch, after))
        if one != other:
            raise ExportError(
                f"git's mail format would not carry the message of {patch.name} as it is",
                fix="reword it in a checkout and export, then drop",
            )
        files[patch.name] = mail
    return files


def _write(line: Line, patched: Mapping[Upstream, Patched], plans: Sequence[_Plan]) -> None:
    """Write every plan, each with its tombstones."""
    with ExitStack() as stack:
        for plan in plans:
            store = patched[plan.done.upstream].store
            stack.enter_context(locked(store.folder.with_suffix(".export.lock")))
        for plan in plans:
            upstream = plan.done.upstream
            if read_series(line.folder / upstream) != line.series[upstream]:
                raise LineError(f"the {upstream} series was changed meanwhile", fix="run it again")
        stack.enter_context(machine_errors(line.folder, is_cache=False))
        for plan in plans:
            # First, since a killed run that left none would have lost the reason
            tombstones.add(line.folder.parent, *plan.stones)
            try:
                _publish(line, patched[plan.done.upstream], plan)
            except BaseException:
                tombstones.take_back(line.folder.parent, *plan.stones)
                raise


def _publish(line: Line, patched: Patched, plan: _Plan) -> None:
    target = line.folder / plan.done.upstream
    text = series_text((target / SERIES_FILE).read_bytes().decode(), list(plan.files), {})
    publish(
        target, plan.files, text.encode(), (*plan.done.dropped, *plan.done.cascaded),
        known={patch.name: patch for patch in line.series[plan.done.upstream]},
        store=patched.store, base=patched.base.commit,
        trees=[applied.tree for applied in plan.tree.patches],
    )  # fmt: skip
