"""What there is to know about a patch that waits to be resolved, for the person who does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlay.patches.paths import quote_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.moving.evidence import Dossier
    from overlay.moving.move import Move
    from overlay.moving.resolving import Meeting
    from overlay.moving.threeway import Conflict


def dossier(move: Move, meeting: Meeting) -> str:
    """The dossier of one patch of a move, as text."""
    return "\n".join(_lines(move, meeting)) + "\n"


def evidence(weighed: Dossier, *, most: int = 6) -> Iterator[str]:
    """What is known besides what the merge shows, in lines; ``most`` commits of a kind."""
    yield from weighed.notes
    for what, commits in weighed.commits.items():
        yield from (f"upstream {what}: {commit.text}" for commit in commits[:most])
        if len(commits) > most:
            yield f"upstream {what}: and {len(commits) - most} commits more"


def _lines(move: Move, meeting: Meeting) -> Iterator[str]:
    patch, old, new = meeting.patch, move.line.pin(move.upstream), move.journal.pin
    yield f"{patch.name} of {move.line.name}: {move.upstream} {old.version} to {new.version}"
    yield ""
    yield f"    {patch.subject}"
    yield from (f"    {line}".rstrip() for line in ("", *patch.body.split("\n")))
    yield ""
    if not meeting.conflicts:
        yield "The merge is clean. It is staged; look at it with 'git diff --cached'."
    for conflict in meeting.conflicts:
        yield from _conflict(move, meeting, conflict)
    yield "the patch as it was: git show CHERRY_PICK_HEAD"
    yield ""
    for weighed in move.examined.dossiers:
        if weighed.name == patch.name:
            yield from evidence(weighed)
    yield from (why for why in (move.examined.history, move.examined.postconditions) if why)


def _conflict(move: Move, meeting: Meeting, conflict: Conflict) -> Iterator[str]:
    path = quote_path(conflict.path)
    lines = ", ".join(str(region.line) for region in conflict.regions)
    yield f"{path}: {conflict.why}" + (f", at line {lines}" if lines else "")
    sides = (("base", conflict.base), ("upstream", conflict.ours), ("patch", conflict.theirs))
    for stage, (label, side) in enumerate(sides, start=1):
        yield f"    {label:9} " + (f"git show :{stage}:{path}" if side else "has no such file")
    others = [
        other.name
        for other in move.patches
        if other.name != meeting.patch.name
        and any(conflict.path in (diff.old_path, diff.new_path) for diff in other.files)
    ]
    if others:
        yield f"    other patches on it: {', '.join(others)}"
