"""Verbs on the order of a series: graph, drop, bisect, range-diff."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlay.app import App, reaches_sources, told_with, verb
from overlay.errors import BisectError, LineError, LockError
from overlay.verbs.maintain import UPSTREAM

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlay.lines.line import Line, Upstream
    from overlay.patches.bisect import Bisected
    from overlay.patches.drop import Dropped
    from overlay.patches.graph import Graph
    from overlay.trees.apply import Patched


@verb(
    short="Which patches stand on which",
    examples="""
    vllm-overlay graph infernal
    vllm-overlay graph next --upstream vllm --out next.svg
    vllm-overlay graph infernal --json
    """,
)
@click.argument("line")
@click.option("--upstream", type=UPSTREAM, help="Only this series (default: both).")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Draw it: .svg, .png or .dot.",
)  # fmt: skip
@reaches_sources
def graph(app: App, line: str, upstream: Upstream | None, out: Path | None) -> None:
    """Find out which patches of LINE stand on which, by leaving each one out.

    Says where 'Requires:' trailers disagree: what a patch's text needs should be declared; what
    is only declared is needed for what it does, and no text can show that.
    """
    from overlay.lines.line import UPSTREAMS
    from overlay.patches.graph import derive
    from overlay.patches.graphpicture import text
    from overlay.trees.apply import refuse_bad
    from overlay.trees.pipeline import apply_line

    if out is not None and out.suffix not in (".svg", ".png", ".dot"):
        raise click.UsageError(f"--out {out}: the name must end with .svg, .png or .dot")
    read = app.line(line)
    asked = [upstream] if upstream else [each for each in UPSTREAMS if read.series[each]]
    graphs = []
    for each, state in apply_line(read, app.sources, upstreams=asked).items():
        refuse_bad(state.tree, line, each)
        graphs.append(derive(state.store, state.tree, each, read.series[each]))
    if out is not None:
        _draw(read, graphs, out)
        app.report.say(f"wrote {out}")
    if app.report.as_json:
        documents = {
            each.upstream: {
                "patches": each.patches,
                "edges": [{**asdict(edge), "kind": edge.kind} for edge in each.edges],
                "undeclared": [(edge.patch, edge.needs) for edge in each.undeclared],
            }
            for each in graphs
        }
        app.report.json({"verb": "graph", "line": line, "upstreams": documents})
        return
    for drawn in graphs:
        app.report.text(text(drawn))
        for edge in drawn.undeclared:
            app.report.say(f"{edge.patch} lacks 'Requires: {edge.needs}' ({edge.why})")


def _draw(line: Line, graphs: Sequence[Graph], out: Path) -> None:
    from overlay.files import machine_errors, write_atomic
    from overlay.patches.graphpicture import dot, svg

    title = f"{line.name}: " + ", ".join(
        f"{each.upstream} {line.pin(each.upstream).version}" for each in graphs
    )
    data = (dot if out.suffix == ".dot" else svg)(graphs, title).encode()
    if out.suffix == ".png":
        from overlay.moving.picture import draw_png

        data = draw_png(data)
    with machine_errors(out, is_cache=False):
        write_atomic(out, data)


@verb(
    short="Take patches out of a line",
    examples="""
    vllm-overlay drop infernal warmup-guard --reason 'upstream guards it since 0.29'
    vllm-overlay drop infernal vllm/index-mapping --cascade
    """,
)
@click.argument("line")
@click.argument("patches", nargs=-1, required=True, metavar="PATCH...")
@click.option("--reason", default="", help="Why; kept in patches/dropped.toml.")
@click.option("--cascade", is_flag=True, help="Drop what stands on them too.")
@reaches_sources
def drop(app: App, line: str, patches: tuple[str, ...], reason: str, cascade: bool) -> None:
    """Take PATCHes out of LINE's series; refused, with names, where others stand on them.

    Patches after them that met other lines or ids are written anew, the rest keep their bytes.
    A line that agreed with its lock gets a new one.
    """
    from overlay.lines.lock import check_lock, make_lock, read_lock, write_lock
    from overlay.patches.drop import drop as take_out
    from overlay.trees.pipeline import apply_line

    read = app.line(line)
    patched = apply_line(read, app.sources)
    old = read_lock(read)
    agreed = old is not None and _agrees(read, patched)
    done = take_out(read, patches, patched, reason=reason, cascade=cascade)
    after = app.line(line)
    patched = apply_line(after, app.sources)
    locked = bool(done) and agreed
    if locked:
        write_lock(after, make_lock(after, patched, old))
        check_lock(after, patched, read_lock(after))
    document = {"verb": "drop", "line": line, "locked": locked}
    if app.report.as_json:
        app.report.json({**document, "series": [asdict(each) for each in done]})
        return
    app.report.table(("", "upstream", "patch", "why"), [row for d in done for row in _rows(d)])
    if not done:
        app.report.say("dropped already: nothing to do")
    if not agreed:
        app.report.say(
            f"{line} has no lock that it agrees with: look at it, then 'vllm-overlay lock {line}'"
        )


def _agrees(line: Line, patched: Mapping[Upstream, Patched]) -> bool:
    from overlay.lines.lock import check_lock, read_lock

    try:
        check_lock(line, patched, read_lock(line))
    except LockError:
        return False
    return all(not state.tree.bad for state in patched.values())


def _rows(done: Dropped) -> list[tuple[str, str, str, str]]:
    rows = [("dropped", name, "") for name in done.dropped]
    rows += [("dropped", name, why) for name, why in done.cascaded.items()]
    rows += [("rewritten", name, "") for name in done.rewritten]
    rows += [("kept", name, "") for name in done.kept]
    return [(way, done.upstream, name, why) for way, name, why in rows]


@verb(
    short="The first patch with which a command fails",
    examples="""
    vllm-overlay bisect infernal -- python -m compileall -q vllm
    vllm-overlay bisect infernal --good index-mapping -- sh -c 'grep -q dcp vllm/config/*.py'
    vllm-overlay bisect infernal --upstream flashinfer -- "$PWD/check.sh"
    """,
)
@click.argument("line")
@click.option("--upstream", type=UPSTREAM, default="vllm", show_default=True, help="Whose series.")
@click.option("--good", metavar="PATCH", help="Passes still (default: the bare pin).")
@click.option("--bad", metavar="PATCH", help="Fails already (default: the last patch).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
@reaches_sources
def bisect(
    app: App,
    line: str,
    upstream: Upstream,
    good: str | None,
    bad: str | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in checkouts of LINE's states until the first patch that fails it is known.

    It runs in the folder of the checkout, with VLLM_OVERLAY_LINE, _UPSTREAM, _PATCH and _FOLDER
    set. Exit codes as for 'git bisect run': 0 passes, 125 can't tell, others up to 127 fail,
    more ends the bisection. Exit code 19 when no patch can be named.
    """
    from overlay.patches.bisect import End
    from overlay.patches.bisect import bisect as halve
    from overlay.trees.pipeline import apply_line

    read = app.line(line)
    state = apply_line(read, app.sources, upstreams=[upstream])[upstream]
    found = halve(
        read, upstream, state, command, app.report, good=good, bad=bad, offline=app.offline
    )
    document = {"verb": "bisect", "line": line, "upstream": upstream, **asdict(found)}
    if found.end is not End.FOUND:
        with told_with(app, document):
            raise _no_patch(found, shlex.join(command))
    if app.report.as_json:
        app.report.json(document)
        return
    (name,) = found.suspects
    app.report.text(name)
    app.report.say(f"{name} is the first patch of {line} {upstream} with which the command fails")


def _no_patch(found: Bisected, command: str) -> BisectError:
    from overlay.patches.bisect import End
    from overlay.patches.checkout import BASE_TAG

    last = found.tried[-1].state
    if found.end is End.GOOD_FAILS:
        where = "on the bare pin too" if last == BASE_TAG else f"at {last} already"
        fix = "no patch did it" if last == BASE_TAG else "name an earlier patch with --good"
        return BisectError(f"the command fails {where}", why=command, fix=fix)
    if found.end is End.BAD_PASSES:
        return BisectError(
            f"the command passes at {last}: no patch makes it fail", why=command,
            fix="run it by hand in a checkout, to see that it fails at all",
        )  # fmt: skip
    if found.end is End.UNJUDGED:
        return BisectError(
            f"the command can't tell at {last}", why=command,
            fix="name other ends with --good and --bad",
        )  # fmt: skip
    return BisectError(
        f"it is one of {len(found.suspects)} patches, and the command can't tell between them",
        why="\n".join(found.suspects),
        fix="let it answer at more of them",
    )


@verb(
    short="What changed in a line between two revisions",
    examples="""
    vllm-overlay range-diff infernal origin/main
    vllm-overlay range-diff infernal HEAD~3 HEAD
    vllm-overlay range-diff infernal origin/main HEAD --markdown >> "$GITHUB_STEP_SUMMARY"
    """,
)
@click.argument("line")
@click.argument("old")
@click.argument("new", required=False)
@click.option("--markdown", is_flag=True, help="For a pull request or a job's summary.")
def range_diff(app: App, line: str, old: str, new: str | None, markdown: bool) -> None:
    """What changed in LINE from revision OLD of the project to NEW (default: the files here).

    Patches are sorted by what differs: index-only (ids and line numbers), context-only (the lines
    around), content, new, dropped. Only differences in lines and messages are printed.
    """
    from overlay.lines.line import LINE_FILE
    from overlay.lines.revision import line_at
    from overlay.patches.review import as_markdown, as_text, document, review

    before = line_at(app.root, line, old)
    if new is not None:
        after = line_at(app.root, line, new)
    else:
        after = app.line(line) if (app.root / line / LINE_FILE).is_file() else None
    if before is None and after is None:
        raise LineError(f"there is no line {line!r} at {old}, nor {f'at {new}' if new else 'here'}")
    found = review(line, before, after)
    if app.report.as_json:
        revisions = {"old": old, "new": new}
        app.report.json({"verb": "range-diff", "line": line, **revisions, **document(found)})
    elif markdown:
        app.report.text(as_markdown(found, old, new))
    else:
        _show_review(app, as_text(found))


def _show_review(app: App, parts: tuple[Sequence[tuple[str, ...]], str]) -> None:
    rows, differences = parts
    app.report.table(("what", "upstream", "name", "notes"), rows)
    if differences:
        app.report.text("\n" + differences)
    if not rows:
        app.report.say("nothing changed")
