"""The verb that takes in patches which other tools wrote: import."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlay.app import App, reaches_sources, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlay.lines.line import Line, Upstream
    from overlay.patches.importer import Read
    from overlay.sources.source import Base


@verb(
    name="import",
    short="Patches of quilt, Debian or git as a series",
    examples="""
    vllm-overlay import infernal vllm ../debian/patches --author 'Mia <mia@example.com>'
    vllm-overlay import infernal vllm ../outgoing --append
    vllm-overlay import infernal flashinfer topic.mbox --skip 0003-tests.patch
    """,
)
@click.argument("line")
@click.argument("upstream", type=click.Choice(["vllm", "flashinfer"]))
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--author", metavar="'NAME <MAIL>'", default="", help="Of patches that name none.")
@click.option("--append", is_flag=True, help="Put them behind the patches that are there.")
@click.option("--skip", multiple=True, metavar="FILE", help="Leave out; repeat for several.")
@click.option("--charset", default="utf-8", help="Of the text above diffs (default: utf-8).")
@reaches_sources
def import_patches(
    app: App,
    line: str,
    upstream: Upstream,
    path: Path,
    author: str,
    append: bool,
    skip: tuple[str, ...],
    charset: str,
) -> None:
    """Make the patches at PATH the series of LINE's UPSTREAM.

    PATH is a folder with a 'series' file (quilt, Debian), a folder of numbered patches
    (git format-patch), or a file with one mail or several. All of them must apply, strictly;
    else each that doesn't is named, and nothing is written.
    """
    from overlay.patches.foreign import Defaults, check_author
    from overlay.patches.importer import import_series, read_patches

    read = app.line(line)
    defaults = Defaults(
        author=check_author(author) if author else "",
        date=f"{int(time.time())} +0000",
        charset=charset,
    )
    found, skipped = read_patches(path, defaults, line=read, upstream=upstream, skip=skip)
    base = _base(app, read, upstream, found)
    store = app.sources.store(upstream)
    done = import_series(
        read, upstream, found, store, base.commit, skipped=skipped, append=append
    )  # fmt: skip
    if app.report.as_json:
        app.report.json({"verb": "import", "line": line, "upstream": upstream, **asdict(done)})
        return
    rows = [
        (name, "offset" if name in done.offsets else "applies", file)
        for name, file in done.files.items()
    ]
    rows += [("", "skipped", file) for file in done.skipped]
    app.report.table(("patch", "verdict", "from"), rows)
    app.report.say(
        f"{upstream}: {len(done.files)} patches imported; 'lint {line}' says what their messages "
        f"lack, then lock {line}"
    )


def _base(app: App, line: Line, upstream: Upstream, found: Sequence[Read]) -> Base:
    """The base tree, with the contents that the new patches touch too."""
    from overlay.lines.lock import read_lock

    lock = read_lock(line)
    patches = (*line.series[upstream], *(each.patch for each in found if each.patch is not None))
    asked = replace(line, series={**line.series, upstream: patches})
    return app.sources.base(asked, upstream, lock.known_trees(upstream) if lock else {})
