"""Verbs of a maintainer: checkout, export, new, lint."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from overlay.app import App, reaches_sources, told_with, verb
from overlay.errors import LineError, LintError, OverlayError, PatchError, SourceError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.lines.line import Line, Upstream
    from overlay.sources.source import Base
    from overlay.trees.apply import Patched

UPSTREAM = click.Choice(["vllm", "flashinfer"])


@verb(
    short="A git worktree with one commit a patch",
    examples="""
    vllm-overlay checkout infernal vllm work
    vllm-overlay checkout infernal vllm work --at lse-plumbing
    cd work && git rebase -i overlay-base
    """,
)
@click.argument("line")
@click.argument("upstream", type=UPSTREAM)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--at", metavar="PATCH", help="Stop after this patch ('overlay-base': before all).")
@reaches_sources
def checkout(app: App, line: str, upstream: Upstream, folder: Path, at: str | None) -> None:
    """Make FOLDER a git worktree of LINE's patched UPSTREAM, one commit a patch."""
    from overlay.patches.checkout import BASE_TAG
    from overlay.patches.checkout import checkout as make
    from overlay.trees.pipeline import apply_line

    read = app.line(line)
    state = apply_line(read, app.sources, upstreams=[upstream])[upstream]
    made = make(
        state.store, state.tree, read, upstream, folder, app.report,
        at=at, url=state.base.url, offline=app.offline,
    )  # fmt: skip
    if app.report.as_json:
        document = {**asdict(made), "folder": str(made.folder)}
        app.report.json({"verb": "checkout", "line": line, "upstream": upstream, **document})
        return
    app.report.say(
        f"{folder}: branch {made.branch}, {len(state.tree.patches)} patches on {BASE_TAG}; "
        f"write changes back with: export {line} {upstream} {folder}"
    )


@verb(
    short="Commits of a checkout back to patch files",
    examples="""
    vllm-overlay export infernal vllm work
    cd work && vllm-overlay --patches ../patches export infernal vllm
    vllm-overlay export infernal vllm work --drop warmup-guard
    """,
)
@click.argument("line")
@click.argument("upstream", type=UPSTREAM)
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
@click.option("--drop", multiple=True, metavar="PATCH", help="May vanish; repeat for several.")
@click.option("--reformat", is_flag=True, help="Rewrite unchanged patches in canonical form too.")
@reaches_sources
def export(
    app: App,
    line: str,
    upstream: Upstream,
    folder: Path,
    drop: tuple[str, ...],
    reformat: bool,
) -> None:
    """Write the commits in FOLDER (default: here) back to LINE's patch files.

    Unchanged patches keep their bytes. Nothing is written when something would be lost.
    """
    from overlay.patches.export import export as write

    read = app.line(line)
    base = _base(app, read, upstream)
    store = app.sources.store(upstream)
    done = write(read, upstream, folder, store, base.commit, drop=drop, reformat=reformat)
    if app.report.as_json:
        app.report.json({"verb": "export", "line": line, "upstream": upstream, **asdict(done)})
        return
    ways = ("rewritten", "added", "dropped", "kept")
    rows = [(way, name, done.renamed.get(name, "")) for way in ways for name in getattr(done, way)]
    app.report.table(("", "patch", "was named"), rows)
    for name in done.unnamed:
        app.report.say(
            f"{name}: named after its subject; a 'Patch-Name:' trailer names it otherwise"
        )
    for path in done.untracked:
        app.report.say(f"{path} is in the checkout but in no commit")
    changed = len(rows) - len(done.kept) or done.series_changed
    app.report.say(
        f"{upstream}: " + (f"now run 'vllm-overlay lock {line}'" if changed else "nothing changed")
    )


@verb(
    short="Add a diff as a patch, or make a line",
    examples="""
    git diff | vllm-overlay new infernal vllm faster-merge --subject 'attention: merge faster'
    vllm-overlay new infernal flashinfer page-check --from 0001-check.patch
    vllm-overlay new copper --like infernal
    """,
)
@click.argument("line")
@click.argument("upstream", type=UPSTREAM, required=False)
@click.argument("name", required=False)
@click.option("--like", metavar="LINE", help="Make a line with this one's line.toml, no patches.")
@click.option(
    "--from", "file", type=click.File("rb"), default="-", help="A diff or a mail (default: stdin)."
)
@click.option("--subject", default="", help="Subject, when a plain diff is given.")
@click.option("--author", metavar="'NAME <MAIL>'", help="Of a plain diff (default: git's user).")
@reaches_sources
def new(
    app: App,
    line: str,
    upstream: Upstream | None,
    name: str | None,
    like: str | None,
    file: BinaryIO,
    subject: str,
    author: str | None,
) -> None:
    """Append a diff or mail to LINE's UPSTREAM series as patch NAME; or make a line (--like)."""
    from overlay.lines.new import new_line, new_patch

    if like is not None:
        if upstream or name:
            raise click.UsageError("--like makes a line: give no upstream and no name with it")
        folder = new_line(app.root, line, like=like)
        _say_new(app, line, folder, f"made {folder}: set its pins, then add patches")
        return
    if upstream is None or name is None:
        raise click.UsageError("give LINE UPSTREAM NAME, or LINE --like OTHER")
    if file.isatty():
        raise click.UsageError("give a diff or a mail: --from FILE, or on standard input")
    read = app.line(line)
    base = _base(app, read, upstream)
    store = app.sources.store(upstream)
    identity = f"{author} {int(time.time())} +0000" if author else ""
    made = new_patch(
        read, upstream, name, file.read(), store, base.commit, subject=subject, identity=identity
    )  # fmt: skip
    hint = "complete its message in a checkout, " if made.is_template else ""
    _say_new(app, line, made.path, f"{made.path}: {made.applied.verdict}; {hint}then lock {line}")


def _say_new(app: App, line: str, path: Path, text: str) -> None:
    if app.report.as_json:
        app.report.json({"verb": "new", "line": line, "path": str(path)})
    else:
        app.report.say(text)


def _base(app: App, line: Line, upstream: Upstream) -> Base:
    from overlay.lines.lock import read_lock

    lock = read_lock(line)
    return app.sources.base(line, upstream, lock.known_trees(upstream) if lock else {})


@verb(
    short="Look for faults that git lets through",
    examples="""
    vllm-overlay lint
    vllm-overlay lint infernal
    vllm-overlay lint infernal --json
    """,
)
@click.argument("lines", nargs=-1)
def lint(app: App, lines: tuple[str, ...]) -> None:
    """Look for faults in LINES (default: all) that git would let through.

    Text is checked always; offsets, fuzz and index lines only where the line's sources are in
    the cache (see fetch). Never touches the network.
    """
    from overlay.lines.line import find_lines
    from overlay.lines.lint import lint_line

    names = lines or find_lines(app.root)
    if not names:  # a success would say that something was looked at
        raise LineError(f"no line in {app.root}", fix="name another folder with --patches")
    trees = {name: _trees(app, name) for name in names}
    found = {
        name: lint_line(app.root, name, trees=None if isinstance(got, OverlayError) else got)
        for name, got in trees.items()
    }
    unapplied = {name: got for name, got in trees.items() if isinstance(got, OverlayError)}
    document = {
        "verb": "lint",
        "lines": {
            name: {
                "applied": linted.applied,
                "not_applied": unapplied[name].what if name in unapplied else None,
                "faults": [asdict(fault) for fault in linted.faults],
            }
            for name, linted in found.items()
        },
    }
    errors = [fault for linted in found.values() for fault in linted.errors]
    # Nothing to compare with is no fault; what contradicts the line is, and lint's lists lack it
    wrong = [e for e in unapplied.values() if isinstance(e, SourceError | LineError | PatchError)]
    if app.report.as_json and not errors and not wrong:
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
            what = f"nothing: {unapplied[name].what}" if name in unapplied else "both series"
            app.report.say(f"{name}: {len(linted.faults)} faults; applied {what}")
    with told_with(app, document):
        if errors:
            raise LintError(
                f"{len(errors)} faults in {', '.join(found)}",
                fix="see the list; each names its remedy",
            )
        if wrong:
            raise wrong[0]


def _trees(app: App, name: str) -> Mapping[Upstream, Patched] | OverlayError:
    """What applying gives with what is in the cache; or why it gives nothing."""
    from overlay.sources.source import Sources
    from overlay.trees.pipeline import apply_line

    try:
        sources = Sources(cache=app.cache, report=app.report, offline=True)
        return apply_line(app.line(name), sources)
    except OverlayError as error:
        return error
