"""The verb ``verdicts``: how a line's patches fare on other pins, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, told_with, verb
from overlay.errors import MoveError, VerdictError
from overlay.lines.line import UPSTREAMS, Line, Pin, Upstream, find_lines

if TYPE_CHECKING:
    from overlay.moving.evidence import Dossier
    from overlay.moving.examine import Examined


@verb(
    short="How each patch fares on another pin, with evidence",
    examples="""
    vllm-overlay verdicts infernal
    vllm-overlay verdicts infernal --at next
    vllm-overlay verdicts infernal --upstream vllm --at 0.33.0
    vllm-overlay verdicts eldritch --at infernal --history flashinfer=../flashinfer --json
    """,
)
@click.argument("line")
@click.option("--upstream", type=click.Choice(UPSTREAMS), help="Only this one (default: both).")
@click.option(
    "--at", metavar="VERSION|COMMIT|LINE", help="Where to (default: the line's own pins)."
)
@click.option(
    "--history", metavar="UPSTREAM=CLONE", multiple=True,
    help="A clone of upstream, which is only read; may be given for each.",
)  # fmt: skip
@reaches_sources
def verdicts(
    app: App, line: str, upstream: Upstream | None, at: str | None, history: tuple[str, ...]
) -> None:
    """Carry LINE's patches to other pins in memory, and say what becomes of each and why.

    Nothing is written. Exit code 15 if any patch needs a person.
    """
    from overlay.moving.examine import Examiner

    read = app.line(line)
    wanted: tuple[Upstream, ...] = (upstream,) if upstream else UPSTREAMS
    clones = clones_of(history)
    examiner = Examiner(
        root=app.root, line=read, pins=_pins(app, read, upstream, at), sources=app.sources,
        clones=clones,
    )  # fmt: skip
    examined = [examiner.examine(one) for one in wanted]
    document = {
        "verb": "verdicts",
        "line": line,
        "upstreams": {one.upstream: _json(one) for one in examined},
    }
    bad = [dossier for one in examined for dossier in one.bad]
    if not app.report.as_json:
        _tell(app, examined)
    elif not bad:
        app.report.json(document)
    with told_with(app, document):
        if bad:
            raise VerdictError(
                f"{len(bad)} patches of {line} need a person",
                why="\n".join(line for dossier in bad for line in _paragraph(dossier)),
                fix="'move' carries the rest and opens a worktree for each of these",
            )


def _tell(app: App, examined: list[Examined]) -> None:
    app.report.table(
        ("upstream", "patch", "verdict", "hunks", "to do"),
        [
            (one.upstream, dossier.name, str(dossier.verdict), dossier.hunks, dossier.todo)
            for one in examined
            for dossier in one.dossiers
        ],
    )
    for one in examined:
        app.report.say(f"{one.upstream}: {one.old.version} carried to {one.new.version}")
        for why in (one.history, one.postconditions):
            if why:
                app.report.say(f"{one.upstream}: {why}")
        for dossier in one.dossiers:
            if dossier.ok and (dossier.notes or not dossier.verdict.good):
                app.report.say("\n".join(_paragraph(dossier)))


def _paragraph(dossier: Dossier) -> list[str]:
    return [f"{dossier.name}: {dossier.verdict}", *(f"  {line}" for line in dossier.lines())]


def _json(examined: Examined) -> dict[str, Any]:
    return {
        "from": examined.old.version,
        "at": examined.new.version,
        "commit": examined.new.commit_text,
        "no_history": examined.history or None,
        "no_postconditions": examined.postconditions or None,
        "patches": [dossier.json() for dossier in examined.dossiers],
    }


def clones_of(history: tuple[str, ...]) -> dict[Upstream, Path]:
    """What ``--history`` names. Raises ``UsageError``."""
    clones: dict[Upstream, Path] = {}
    for value in history:
        name, _, folder = value.partition("=")
        upstream = next((one for one in UPSTREAMS if one == name), None)
        if upstream is None or not folder:
            raise click.UsageError(
                f"--history {value}: say UPSTREAM=CLONE, of {' or '.join(UPSTREAMS)}"
            )
        clones[upstream] = Path(folder)
    return clones


def _pins(app: App, line: Line, upstream: Upstream | None, at: str | None) -> dict[Upstream, Pin]:
    """The pins to look at, for those upstreams whose pin isn't the line's own."""
    from overlay.moving.move import target_pin

    if at is None:
        return {}
    names_line = at in find_lines(app.root)
    if upstream is None and not names_line:
        raise click.UsageError(f"--at {at} is a pin of one upstream: say which with --upstream")
    pins: dict[Upstream, Pin] = {}
    for one in (upstream,) if upstream else UPSTREAMS:
        try:
            pins[one] = target_pin(app.root, app.sources, line, one, at)
        except MoveError:  # it stands there already, which is no reason not to look
            continue
    return pins
