"""Verbs on the way from a line to its wheels: fetch, apply, lock, verify, wheel."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from overlay.app import App, reaches_sources, told_with, verb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.lines.line import Line, Upstream
    from overlay.lines.lock import Lock
    from overlay.trees.apply import Patched


@verb(
    short="Download all that LINE needs into the cache",
    examples="""
    vllm-overlay fetch infernal
    vllm-overlay fetch infernal --source git
    vllm-overlay fetch infernal --no-wheels
    """,
)
@click.argument("line")
@click.option("--wheels/--no-wheels", default=True, help="Also upstream's wheels (the default).")
@reaches_sources
def fetch(app: App, line: str, wheels: bool) -> None:
    """Get everything that LINE needs into the cache, so that the rest works offline."""
    from overlay.lines.line import UPSTREAMS
    from overlay.lines.lock import read_lock

    read, sources = app.line(line), app.sources
    lock = read_lock(read)
    found: dict[str, Any] = {}
    for upstream in UPSTREAMS:
        known = lock.known_trees(upstream) if lock else {}
        base = sources.base(read, upstream, known)
        found[upstream] = {"source": base.kind, "origin": base.origin, "tree": base.commit.tree}
        if wheels:
            found[upstream]["wheel"] = str(sources.release(read, upstream))
    if app.report.as_json:
        app.report.json({"verb": "fetch", "line": line, "upstreams": found})
        return
    app.report.table(
        ("upstream", "source", "origin", "base tree"),
        [
            (name, *(str(row[k]) for k in ("source", "origin", "tree")))
            for name, row in found.items()
        ],
    )


@verb(
    short="Apply both series; check them against the lock",
    examples="""
    vllm-overlay apply infernal
    vllm-overlay apply infernal --json
    vllm-overlay apply infernal --relock
    """,
)
@click.argument("line")
@click.option("--relock", is_flag=True, help="Write the lock anew instead of checking it.")
@reaches_sources
def apply(app: App, line: str, relock: bool) -> None:
    """Apply both series of LINE: a verdict for every patch, then the check against the lock."""
    started = time.monotonic()
    read = app.line(line)
    patched = _apply(app, read)
    if not app.report.as_json:
        _show(app, read, patched)
    document = {"verb": "apply", **_patched_document(read, patched, None)}
    with told_with(app, document):
        agreed = _settle(app, read, patched, relock=relock)
    seconds = round(time.monotonic() - started, 3)
    if app.report.as_json:
        app.report.json({**document, "digest": agreed.digest, "seconds": seconds})
    else:
        app.report.say(f"{line}: digest {agreed.digest}")


@verb(
    short="Write LINE's lock.toml",
    examples="""
    vllm-overlay lock infernal
    """,
)
@click.argument("line")
@reaches_sources
def lock(app: App, line: str) -> None:
    """Write what applying LINE gives to its lock.toml; commit that file."""
    read = app.line(line)
    patched = _apply(app, read)
    made = _settle(app, read, patched, relock=True)
    if app.report.as_json:
        app.report.json({"verb": "lock", **_patched_document(read, patched, made)})
    else:
        app.report.say(f"{line}: locked, digest {made.digest}")


@verb(
    short="Recompute what the lock promises",
    examples="""
    vllm-overlay verify infernal
    vllm-overlay verify infernal --source git
    """,
)
@click.argument("line")
@reaches_sources
def verify(app: App, line: str) -> None:
    """Recompute everything that LINE's lock promises, from the source, and compare."""
    read = app.line(line)
    patched = _apply(app, read, use_states=False)
    agreed = _settle(app, read, patched, relock=False)
    if app.report.as_json:
        app.report.json({"verb": "verify", **_patched_document(read, patched, agreed)})
        return
    for upstream, state in patched.items():
        known = state.base.kind in agreed.upstream(upstream).trees
        what = (
            "trees and contents agree"
            if known
            else (f"contents agree; tree ids from {state.base.kind} are not in the lock")
        )
        app.report.say(f"{line}: {upstream} from {state.base.origin}: {what}")
    app.report.say(f"{line}: digest {agreed.digest}")


@verb(
    short="Build LINE's two wheels",
    examples="""
    vllm-overlay wheel infernal
    vllm-overlay wheel infernal --out /tmp/wheels
    pip install dist/infernal/*.whl
    """,
)
@click.argument("line")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the wheels (default: dist/LINE beside the patches folder).",
)
@click.option("--relock", is_flag=True, help="Write the lock anew instead of checking it.")
@reaches_sources
def wheel(app: App, line: str, out: Path | None, relock: bool) -> None:
    """Build LINE's two wheels: patched vLLM and patched FlashInfer."""
    from overlay.wheels.linewheels import build_wheels

    read, sources = app.line(line), app.sources
    patched = _apply(app, read)
    agreed = _settle(app, read, patched, relock=relock)
    folder = out or app.root.absolute().parent / "dist" / line
    built = build_wheels(read, patched, sources, folder, app.report)
    if out is None:
        _remove_earlier(app, folder, {one.path for one in built})
    if app.report.as_json:
        rows = [{**asdict(one), "path": str(one.path)} for one in built]
        app.report.json({"verb": "wheel", "line": line, "digest": agreed.digest, "wheels": rows})
        return
    app.report.table(
        ("upstream", "version", "changed", "wheel"),
        [(one.upstream, one.version, f"{one.changes} files", str(one.path)) for one in built],
    )


def _remove_earlier(app: App, folder: Path, built: set[Path]) -> None:
    """Keep the default folder installable by ``*.whl``: one pair of wheels, the newest."""
    for path in sorted(folder.glob(f"*+{folder.name}.o*.whl")):
        if path not in built:
            path.unlink()
            app.report.say(f"removed {path.name}, an earlier build")


def _apply(app: App, line: Line, *, use_states: bool = True) -> dict[Upstream, Patched]:
    from overlay.trees.pipeline import apply_line

    return apply_line(line, app.sources, use_states=use_states)


def _settle(app: App, line: Line, patched: Mapping[Upstream, Patched], *, relock: bool) -> Lock:
    """The lock that ``patched`` agrees with: written now, or read and checked."""
    from overlay.lines.lock import check_lock, make_lock, read_lock, write_lock
    from overlay.trees.apply import refuse_bad

    for upstream, state in patched.items():
        refuse_bad(state.tree, line.name, upstream)
    old = read_lock(line)
    if not relock:
        return check_lock(line, patched, old)
    made = make_lock(line, patched, old)
    if made != old:
        app.report.say(f"wrote {write_lock(line, made)}")
    return made


def _patched_document(
    line: Line, patched: Mapping[Upstream, Patched], lock: Lock | None
) -> dict[str, Any]:
    return {
        "line": line.name,
        "digest": lock.digest if lock else None,
        "processes": sum(state.store.git.processes for state in patched.values()),
        "upstreams": {
            upstream: {
                "version": line.pin(upstream).version,
                "source": state.base.kind,
                "origin": state.base.origin,
                "base": msgspec.to_builtins(state.tree.base),
                "commit": state.tree.commit,
                "tree": state.tree.tree,
                "patches": msgspec.to_builtins(state.tree.patches),
            }
            for upstream, state in patched.items()
        },
    }


def _show(app: App, line: Line, patched: Mapping[Upstream, Patched]) -> None:
    rows = []
    for upstream, state in patched.items():
        app.report.say(f"{upstream} {line.pin(upstream).version} from {state.base.origin}")
        for patch in state.tree.patches:
            notes = [f"{f.path}: {f.why}" for f in patch.findings if f.why]
            rows.append(
                (upstream, patch.name, str(patch.verdict), patch.tree[:12], "; ".join(notes))
            )
    app.report.table(("upstream", "patch", "verdict", "tree", "evidence"), rows)
