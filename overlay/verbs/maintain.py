"""Verbs of a maintainer: checkout, export, new, lint."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from overlay.app import App, told_with, verb
from overlay.errors import LintError, OverlayError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.line import Upstream
    from overlay.pipeline import Patched


@verb(
    examples="""
    vllm-overlay lint
    vllm-overlay lint infernal
    vllm-overlay lint infernal --json
    """
)
@click.argument("lines", nargs=-1)
def lint(app: App, lines: tuple[str, ...]) -> None:
    """Look for faults in LINES (default: all) that git would let through.

    Text is checked always; offsets, fuzz and index lines only where the line's sources are in
    the cache (see fetch). Never touches the network.
    """
    from overlay.line import find_lines
    from overlay.lint import lint_line

    found = {
        name: lint_line(app.root, name, trees=_trees(app, name))
        for name in lines or find_lines(app.root)
    }
    document = {
        "verb": "lint",
        "lines": {
            name: {
                "applied": linted.applied,
                "faults": [asdict(fault) for fault in linted.faults],
            }
            for name, linted in found.items()
        },
    }
    errors = [fault for linted in found.values() for fault in linted.errors]
    if app.report.as_json and not errors:
        app.report.json(document)
    elif not app.report.as_json:
        app.report.table(
            ("where", "severity", "code", "fault", "remedy"),
            [
                (f"{fault.file}:{fault.line}", fault.severity, fault.code, fault.what, fault.fix)
                for linted in found.values()
                for fault in linted.faults
            ],
        )
        for name, linted in found.items():
            what = ", ".join(linted.applied) or "nothing: sources not in the cache"
            app.report.say(f"{name}: {len(linted.faults)} faults; applied {what}")
    with told_with(app, document):
        if errors:
            raise LintError(
                f"{len(errors)} faults in {', '.join(found)}",
                fix="see the list; each names its remedy",
            )


def _trees(app: App, name: str) -> Mapping[Upstream, Patched] | None:
    """What applying gives, when that needs nothing that isn't in the cache."""
    from overlay.pipeline import apply_line
    from overlay.source import Sources

    try:
        sources = Sources(cache=app.cache, report=app.report, offline=True)
        return apply_line(app.line(name), sources)
    except OverlayError:
        return None  # lint itself says what is wrong with the line
