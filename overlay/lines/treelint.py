"""Faults of a series that only applying it shows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from overlay.errors import UnavailableError
from overlay.lines.patchlint import EXPORT, Fault
from overlay.patches.patch import SUFFIX, Patch
from overlay.patches.paths import quote_path
from overlay.trees.match import Finding, Verdict, match_patch
from overlay.trees.objects import NO_BLOB
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlay.patches.diff import FileDiff, Hunk
    from overlay.trees.apply import Applied, Patched

# How many lines of context are left out, at most, at either end to see whether fuzz would do
_MAX_FUZZ = 2


def _fault(file: str, line: int, code: str, what: str, fix: str) -> Fault:
    return Fault(file=file, line=line, code=code, what=what, fix=fix)


def check_applied(patched: Patched, patches: Mapping[str, Patch], where: str) -> Iterator[Fault]:
    """Offsets, bad verdicts, needed fuzz, and ``index`` lines that applying contradicts.

    Args:
        patched: what applying one series gave.
        patches: the readable patches by name.
        where: folder of the series, for the faults.
    """
    tree = patched.base.commit.tree
    for applied in patched.tree.patches:
        patch = patches.get(applied.name)
        file = f"{where}/{applied.name}{SUFFIX}"
        if not applied.verdict.good:
            yield from _bad_verdict(patched, applied, patch, tree, file)
        elif applied.verdict is Verdict.OFFSET:
            for finding in applied.findings:
                if finding.verdict is Verdict.OFFSET:
                    yield _fault(file, finding.at, "offset", f"{finding.path}: {finding.why}",
                                 "write it again with 'export'")  # fmt: skip
        elif patch is not None:
            yield from index_lines(patch, applied, file)
        tree = applied.tree


def _bad_verdict(
    patched: Patched, applied: Applied, patch: Patch | None, tree: str, file: str
) -> Iterator[Fault]:
    for finding in applied.findings:
        if finding.verdict.good:
            continue
        path = f"{finding.path}: " if finding.path else ""
        what, code = f"{path}{finding.why or finding.verdict}", str(finding.verdict)
        if finding.verdict is Verdict.CONFLICT and patch is not None:
            fuzz = _fuzz(patched, patch, finding, tree)
            if fuzz:
                code, what = "fuzz", f"{path}applies only when {fuzz} of context are left out"
        fix = "drop what upstream has merged" if code == Verdict.MERGED else EXPORT
        yield _fault(file, finding.at, code, what, fix)


def _fuzz(patched: Patched, patch: Patch, finding: Finding, tree: str) -> str:
    """How much context of a hunk must be ignored for it to apply, or "" when that's no help."""
    places = [(d, h) for d in patch.files for h in d.hunks if h.at == finding.at]
    if not places:
        return ""
    diff, hunk = places[0]
    tries = sorted(
        {
            (min(lead, hunk.leading), min(trail, hunk.trailing))
            for lead in range(_MAX_FUZZ + 1)
            for trail in range(_MAX_FUZZ + 1)
        },
        key=sum,
    )
    stored = StoredTree(patched.store.reader, tree)
    for lead, trail in tries:
        if lead + trail and _fits(patch, diff, _trimmed(hunk, lead, trail), stored):
            return f"{lead} lines above and {trail} below"
    return ""


def _fits(patch: Patch, diff: FileDiff, hunk: Hunk, tree: StoredTree) -> bool:
    alone = replace(patch, files=(replace(diff, hunks=(hunk,)),))
    try:
        return match_patch(alone, tree).verdict.good
    except UnavailableError:
        return False  # a partial clone lacks the file; applying said so before


def _trimmed(hunk: Hunk, lead: int, trail: int) -> Hunk:
    lines = hunk.lines[lead : len(hunk.lines) - trail]
    return replace(
        hunk,
        lines=lines,
        old=b"".join(line[1:] for line in lines if line[:1] != b"+"),
        new=b"".join(line[1:] for line in lines if line[:1] != b"-"),
        # Left-out context must not tie the hunk to the start or the end of the file
        old_start=max(hunk.old_start + lead, 2) if lead else hunk.old_start,
        trailing=max(hunk.trailing - trail, 1) if trail else hunk.trailing,
    )


def index_lines(patch: Patch, applied: Applied, file: str) -> Iterator[Fault]:
    """The index lines of a patch that applies which say other blobs than there are."""
    effects = {effect.path: effect for effect in applied.effects}
    for diff in patch.files:
        sides = []
        # A copy leaves its source as it is, so that no effect tells the source's id
        if diff.old_path is not None and quote_path(diff.old_path) in effects:
            sides.append((diff.old_blob, effects[quote_path(diff.old_path)].before, "before"))
        if diff.new_path is not None and quote_path(diff.new_path) in effects:
            sides.append((diff.new_blob, effects[quote_path(diff.new_path)].blob, "after"))
        for stated, real, when in sides:
            if stated is None or real == NO_BLOB or real.startswith(stated.decode()):
                continue
            yield _fault(
                file, diff.at, "index-line",
                f"{quote_path(diff.path)}: the index line says {stated.decode()[:12]} {when} the "
                f"patch, applying gives {real[:12]}",
                "write it again with 'export'",
            )  # fmt: skip
