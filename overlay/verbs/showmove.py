"""What a maintainer gets to see of a move: each patch, and the range-diff at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlay.moving.dossier import evidence as known
from overlay.moving.journal import is_saved, moving, stale
from overlay.patches.paths import quote_path
from overlay.patches.rangediff import Way, difference

if TYPE_CHECKING:
    from overlay.app import App
    from overlay.moving.evidence import Dossier
    from overlay.moving.finish import Finished
    from overlay.moving.move import Move


def tell(app: App, move: Move, done: Finished | None = None) -> None:
    """How far a move is; or what it made, if it is done."""
    if app.report.as_json:
        app.report.json(document(app, move, done))
        return
    if done is not None:
        _tell_done(app, move, done)
        return
    table(app, move, evidence=True)
    app.report.say(
        f"{len(move.waiting)} of {len(move.patches)} patches need a person"
        if move.waiting
        else "nothing waits: move --continue ends it"
    )


def _tell_done(app: App, move: Move, done: Finished) -> None:
    """What differs where the content does, then all in short, then what is left to do."""
    for change in done.changes:
        if change.way is Way.CONTENT:
            app.report.text("\n".join([f"{change.name}:", *difference(change), ""]))
    app.report.table(
        ("difference", "patch", ""),
        [
            (str(change.way), change.name, done.dropped.get(change.name, ", ".join(change.notes)))
            for change in done.changes
        ],
    )
    if done.look:
        app.report.text("")
        app.report.table(("look at",), [(text,) for text in done.look])
    count = len(done.line.series[move.upstream])
    app.report.say(
        f"{done.line.name}: {move.upstream} {move.journal.pin.version}, "
        f"{count} patch{'' if count == 1 else 'es'}, locked"
    )


def table(app: App, move: Move, *, evidence: bool = False) -> None:
    """What became of each patch, and the evidence for those that wait."""
    app.report.table(
        ("patch", "verdict", "", ""),
        [
            (weighed.name, str(weighed.verdict), _state(move, weighed), _summary(move, weighed))
            for weighed in move.examined.dossiers
        ],
    )
    waiting = [f"{w.name}: {line}" for w in move.waiting for line in _evidence(w)]
    if evidence and waiting:
        app.report.text("\n".join(["", *waiting]))
        for text in (move.examined.history, move.examined.postconditions):
            if text:
                app.report.say(text)
    for name in stale(move.journal, {patch.name: patch for patch in move.patches}):
        app.report.say(f"{name}: was changed since; what was decided about it doesn't hold")


def _state(move: Move, weighed: Dossier) -> str:
    if weighed.name in move.dropped:
        return weighed.carried.decided or "dropped"
    if weighed in move.waiting:
        return "waits"
    return weighed.carried.decided or ("replayed" if weighed.carried.replayed else "carried")


def _summary(move: Move, weighed: Dossier) -> str:
    if weighed.name in move.dropped:
        return move.dropped[weighed.name]
    if weighed.carried.needs:
        return f"stands on {', '.join(weighed.carried.needs)}"
    if weighed in move.waiting and weighed.carried.decided:
        return "was resolved, but does not fit what is before it now: resolve it again"
    return weighed.hunks if weighed in move.waiting else ""


def _evidence(weighed: Dossier) -> list[str]:
    """Where the patch meets what upstream did, a line each, and what is known of it."""
    carried = weighed.carried
    found = []
    for conflict in carried.conflicts:
        path = quote_path(conflict.path)
        places = [f"{path}:{region.line}" for region in conflict.regions] or [path]
        found += [f"{place}: {conflict.why}" for place in places]
    if not carried.conflicts:
        found += [
            f"{finding.path}: {finding.why}"
            for finding in carried.findings
            if finding.path and not finding.verdict.carried
        ]
    return [*found, *known(weighed, most=2)]


def document(app: App, move: Move, done: Finished | None = None) -> dict[str, Any]:
    """The same for a program."""
    folder = move.line.folder
    told: dict[str, Any] = {
        "verb": "move",
        "line": move.line.name,
        "to": move.journal.to,
        "upstream": move.upstream,
        "from_version": move.line.pin(move.upstream).version,
        "version": move.journal.pin.version,
        "state": "done" if done else "waiting" if move.waiting else "ready",
        "saved": moving(folder) and is_saved(folder),
        "stale": stale(move.journal, {patch.name: patch for patch in move.patches}),
        "patches": [
            {
                **weighed.json(),
                "state": _state(move, weighed),
                "replayed": list(weighed.carried.replayed),
                "reason": move.dropped.get(weighed.name, ""),
            }
            for weighed in move.examined.dossiers
        ],
        "no_history": move.examined.history or None,
        "no_postconditions": move.examined.postconditions or None,
    }
    if done is not None:
        told["made"] = done.line.name
        told["changes"] = [
            {"name": change.name, "way": str(change.way), "notes": list(change.notes)}
            for change in done.changes
        ]
        told["look"] = list(done.look)
    return told
