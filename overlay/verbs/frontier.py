"""The verb ``frontier``: how far upstream each patch of a line still goes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, verb
from overlay.verbs.maintain import UPSTREAM
from overlay.verbs.verdicts import clones_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlay.lines.line import Line, Upstream
    from overlay.moving.frontier import Column, Frontier

SUFFIXES = (".svg", ".png", ".md")


@verb(
    short="How far upstream each patch goes",
    examples="""
    vllm-overlay frontier infernal
    vllm-overlay frontier infernal --upstream vllm --range 0.26.0..0.33.0 --out infernal.svg
    vllm-overlay frontier next --upstream flashinfer --versions 0.7.2,0.7.4 --json
    vllm-overlay frontier infernal --history vllm=../vllm
    """,
)
@click.argument("line")
@click.option("--upstream", type=UPSTREAM, help="Only this one (default: both that have patches).")
@click.option("--versions", metavar="A,B,...", help="Exactly these versions of --upstream.")
@click.option(
    "--range", "bounds", metavar="A..B",
    help="From A to B, both included (default: from the line's pin to the newest release).",
)  # fmt: skip
@click.option("--pre", is_flag=True, help="Pre-releases as well.")
@click.option(
    "--history", "histories", metavar="UPSTREAM=CLONE", multiple=True,
    help="A clone of upstream: name the commits that break patches.",
)  # fmt: skip
@click.option(
    "--out", "outs", metavar="FILE", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Write a picture (.svg, .png) or tables (.md); repeat for several.",
)  # fmt: skip
@reaches_sources
def frontier(
    app: App,
    line: str,
    upstream: Upstream | None,
    versions: str | None,
    bounds: str | None,
    pre: bool,
    histories: tuple[str, ...],
    outs: tuple[Path, ...],
) -> None:
    """Carry LINE's patches to many upstream versions and show a verdict for each.

    Nothing of the line changes. Versions that the cache lacks are downloaded and imported.
    """
    from overlay.lines.line import UPSTREAMS

    if (versions or bounds) and upstream is None:
        raise click.UsageError("--versions and --range need --upstream")
    if versions and (bounds or pre):
        raise click.UsageError("--versions names all: give no --range and no --pre with it")
    named = tuple(filter(None, (part.strip() for part in (versions or "").split(","))))
    if versions is not None and not named:
        raise click.UsageError("--versions names none")
    limits, clones = _limits(bounds), clones_of(histories)
    read = app.line(line)
    asked = [upstream] if upstream else [name for name in UPSTREAMS if read.series[name]]
    _check_outs(outs, len(asked))
    found = [_find(app, read, each, named, limits, pre, clones.get(each)) for each in asked]
    for out in outs:
        _write(out, found)
        app.report.say(f"wrote {out}")
    if app.report.as_json:
        documents = {each.upstream: _document(each) for each in found}
        app.report.json({"verb": "frontier", "line": line, "upstreams": documents})
        return
    for each in found:
        _show(app, each)


def _limits(bounds: str | None) -> tuple[str, str]:
    first, dots, last = (bounds or "..").partition("..")
    if not dots:
        raise click.UsageError(f"--range {bounds}: say A..B")
    return first.strip(), last.strip()


def _find(
    app: App, line: Line, upstream: Upstream, named: tuple[str, ...], bounds: tuple[str, str],
    pre: bool, clone: Path | None,
) -> Frontier:  # fmt: skip
    from overlay.moving.frontier import choose_versions, find_frontier
    from overlay.sources.releases import known_pins, released

    pin = line.pin(upstream).version
    listed: Sequence[str] = [known.version for known in known_pins(app.root, upstream)]
    if not named or not set(named) <= {pin, *listed}:  # what lines stand on needs no index
        listed = released(app.sources, upstream)
    versions = choose_versions(pin, listed, named=named, bounds=bounds, pre=pre)
    found = find_frontier(line, upstream, app.sources, versions, root=app.root, clone=clone)
    if clone is None:
        return found
    from overlay.moving.culprit import find_culprits

    return find_culprits(line, found, app.sources, clone)


def _check_outs(outs: Sequence[Path], upstreams: int) -> None:
    """Say what can't be written before minutes are spent."""
    for out in outs:
        if out.suffix not in SUFFIXES:
            raise click.UsageError(f"--out {out}: ends in none of {', '.join(SUFFIXES)}")
        if not out.parent.is_dir():
            raise click.UsageError(f"--out {out}: no folder {out.parent}")
        if out.suffix != ".md" and upstreams > 1:
            raise click.UsageError(f"--out {out}: a picture shows one series: say --upstream")
        if out.suffix == ".png":
            from overlay.moving.picture import renderer

            renderer()


def _write(out: Path, found: Sequence[Frontier]) -> None:
    from overlay.files import machine_errors, write_atomic

    if out.suffix == ".md":
        data = "\n".join(_markdown(each) for each in found).encode()
    else:
        from overlay.moving.picture import draw_png, draw_svg

        data = draw_svg(found[0])
        if out.suffix == ".png":
            data = draw_png(data)
    with machine_errors(out, is_cache=False):
        write_atomic(out, data)


def _show(app: App, found: Frontier) -> None:
    """A grid on a terminal; elsewhere a line a cell, which needs no heading to be understood."""
    from overlay.moving.frontier import sentence

    if sys.stdout.isatty():
        heads = [f"{c.version}{' (pin)' if c.version == found.pin else ''}" for c in found.columns]
        rows = _grid(found)
        for start, end in _blocks([("patch", *heads), *rows], shutil.get_terminal_size().columns):
            app.report.table(
                ("patch", *heads[start - 1 : end - 1]),
                [(row[0], *row[start:end]) for row in rows],
            )
        app.report.table(("patch", "breaks at", "verdict", "by"), _breaks(found))
    else:
        app.report.table(
            (),
            [
                (found.upstream, row[0], column.version, cell)
                for row in _grid(found)
                for column, cell in zip(found.columns, row[1:], strict=True)
            ],
        )
    for column in found.columns:
        if column.reason:
            app.report.say(f"{column.version}: {column.reason}")
    app.report.say(f"{found.line} on {found.upstream}: {sentence(found)}")


def _blocks(rows: Sequence[Sequence[str]], width: int) -> Iterator[tuple[int, int]]:
    """Runs of columns, each with the first one beside it, that a terminal has room for."""
    needs = [max(map(len, cells)) + 3 for cells in zip(*rows, strict=True)]
    start, used = 1, needs[0] + 1
    for at, need in enumerate(needs[1:], start=1):
        if used + need > width and at > start:
            yield start, at
            start, used = at, needs[0] + 1
        used += need
    yield start, len(needs)


def _grid(found: Frontier) -> list[tuple[str, ...]]:
    """A row a patch: its name, and its verdict on each version."""
    return [
        (name, *(str(c.cells[at].verdict) if c.cells else "no source" for c in found.columns))
        for at, name in enumerate(found.patches)
    ]


def _breaks(found: Frontier) -> list[tuple[str, ...]]:
    """A row a patch: where it stops going along, and why."""
    from overlay.moving.frontier import breaker

    rows: list[tuple[str, ...]] = []
    for name in found.patches:
        at = found.breaks(name)
        rows.append(
            (name, at.version, str(at.cell.verdict), breaker(at)) if at else (name,) + 3 * ("",)
        )
    return rows


def _markdown(found: Frontier) -> str:
    from overlay.moving.frontier import sentence

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"

    heads = [f"**{c.version}**" if c.version == found.pin else c.version for c in found.columns]
    totals = ["no source" if c.bad is None else str(c.bad) for c in found.columns]
    text = f"{sentence(found)}\n\n" + row(("patch", *heads)) + "|---" * (len(heads) + 1) + "|\n"
    text += "".join(row(cells) for cells in _grid(found)) + row(("*need a person*", *totals))
    broken = [cells for cells in _breaks(found) if cells[1]]
    if broken:
        text += "\n" + row(("patch", "breaks at", "verdict", "by")) + "|---" * 4 + "|\n"
        text += "".join(map(row, broken))
    for column in found.columns:
        text += f"\n{column.version}: {column.reason}\n" if column.reason else ""
    return text


def _document(found: Frontier) -> dict[str, Any]:
    from overlay.moving.frontier import breaker

    patches = []
    for name in found.patches:
        at = found.breaks(name)
        broken = at and {
            "version": at.version,
            "after": at.after,
            "verdict": at.cell.verdict,
            "merged": at.merged or None,
            "commit": at.commit or None,
            "why": breaker(at),
        }
        patches.append({"name": name, "breaks": broken})
    return {
        "pin": found.pin,
        "reaches": found.reaches or None,
        "patches": patches,
        "versions": [_version_document(column) for column in found.columns],
    }


def _version_document(column: Column) -> dict[str, Any]:
    if column.reason:
        return {"version": column.version, "reason": column.reason}
    cells = [
        {"patch": cell.name, "verdict": cell.verdict, "holds": cell.ok, "why": cell.why}
        for cell in column.cells
    ]
    head = {"version": column.version, "commit": column.pin and column.pin.commit_text}
    return {**head, "reaches": column.bad == 0, "cells": cells}
