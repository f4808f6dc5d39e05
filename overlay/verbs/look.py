"""Verbs that only look: lines, show, inspect, doctor, cache."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, told_with, verb
from overlay.errors import MachineError, OverlayError, WheelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.lines.line import Line, Pin, Upstream
    from overlay.patches.patch import Patch
    from overlay.sources.cache import Keep
    from overlay.wheels.distinfo import Row
    from overlay.wheels.inspect import Inspection


@verb(
    short="List the lines",
    examples="""
    vllm-overlay lines
    vllm-overlay lines --json
    """,
)
def lines(app: App) -> None:
    """List the lines: pins, number of patches, digest."""
    from overlay.lines.line import UPSTREAMS, find_lines
    from overlay.lines.lock import read_lock

    found: list[dict[str, Any]] = []
    row: dict[str, Any]
    faults: list[OverlayError] = []
    for name in find_lines(app.root):
        try:
            line = app.line(name)
            lock = read_lock(line)
        except OverlayError as error:  # one bad line must not hide the others
            faults.append(error)
            found.append({"line": name, "error": error.what})
            continue
        row = {"line": name, "summary": line.settings.summary}
        for upstream in UPSTREAMS:
            row[upstream] = line.pin(upstream).version
            row[f"{upstream}_patches"] = len(line.series[upstream])
        found.append({**row, "torch": line.settings.torch, "digest": lock.digest if lock else None})
    document = {"verb": "lines", "lines": found}
    if app.report.as_json and not faults:
        app.report.json(document)
    elif not app.report.as_json:
        app.report.table(
            ("line", "vLLM", "FlashInfer", "torch", "patches", "digest"),
            [_line_row(row) for row in found],
        )
    with told_with(app, document):
        if faults:
            raise faults[0]


def _line_row(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return (row["line"], "?", "?", "?", "?", row["error"])
    patches = f"{row['vllm_patches']} + {row['flashinfer_patches']}"
    digest = (row["digest"] or "not locked")[:12]
    return (row["line"], row["vllm"], row["flashinfer"], row["torch"], patches, digest)


@verb(
    short="Show a line or a patch",
    examples="""
    vllm-overlay show infernal
    vllm-overlay show infernal lse-plumbing
    vllm-overlay show infernal lse-plumbing --diff
    """,
)
@click.argument("line")
@click.argument("patch", required=False)
@click.option("--diff", is_flag=True, help="Print the patch file as it is.")
def show(app: App, line: str, patch: str | None, diff: bool) -> None:
    """Show LINE, or one PATCH of it: pins and series, or reason, trailers and files."""
    read = app.line(line)
    if patch is None:
        _show_line(app, read)
        return
    upstream, found = read.patch(patch)
    if app.report.as_json:
        app.report.json({"verb": "show", "line": line, **_patch_document(upstream, found)})
    elif diff:
        app.report.bytes(found.raw)
    else:
        _show_patch(app, upstream, found)


def _show_line(app: App, line: Line) -> None:
    from overlay.lines.line import UPSTREAMS

    settings = line.settings
    if app.report.as_json:
        app.report.json(
            {
                "verb": "show",
                "line": line.name,
                "summary": settings.summary,
                "torch": settings.torch,
                "cuda": settings.cuda,
                "python": settings.python,
                "architectures": settings.architectures,
                "upstreams": {
                    upstream: {
                        **_pin_document(line.pin(upstream)),
                        "patches": [_patch_document(upstream, p) for p in line.series[upstream]],
                    }
                    for upstream in UPSTREAMS
                },
            }
        )
        return
    app.report.text(
        f"{line.name}: {settings.summary}\n"
        f"torch {settings.torch}, CUDA {settings.cuda}, Python {', '.join(settings.python)}, "
        f"for {', '.join(settings.architectures)}"
    )
    for upstream in UPSTREAMS:
        pin = line.pin(upstream)
        app.report.text(f"\n{upstream} {pin.version} at {pin.commit_text}")
        app.report.table(
            ("patch", "subject", "requires"),
            [(p.name, p.subject, ", ".join(p.requires)) for p in line.series[upstream]],
        )


def _show_patch(app: App, upstream: Upstream, patch: Patch) -> None:
    from overlay.patches.paths import quote_path

    files = "\n".join(f"  {d.kind}: {quote_path(d.path)}" for d in patch.files)
    app.report.text(
        f"{upstream}/{patch.name}\n{patch.author} <{patch.email}>\n\n"
        f"{patch.subject}\n\n{patch.body}\n\nFiles:\n{files}"
    )


def _pin_document(pin: Pin) -> dict[str, Any]:
    import msgspec

    document: dict[str, Any] = msgspec.to_builtins(pin)
    return document


def _patch_document(upstream: Upstream, patch: Patch) -> dict[str, Any]:
    from overlay.patches.paths import quote_path

    return {
        "upstream": upstream,
        "patch": patch.name,
        "subject": patch.subject,
        "author": f"{patch.author} <{patch.email}>",
        "reason": patch.reason,
        "trailers": [list(pair) for pair in patch.trailers],
        "requires": list(patch.requires),
        "sha256": patch.sha256,
        "files": [{"path": quote_path(d.path), "kind": str(d.kind)} for d in patch.files],
    }


@verb(
    short="Check wheels, or what is installed",
    examples="""
    vllm-overlay inspect dist/infernal/*.whl
    vllm-overlay inspect --installed
    vllm-overlay inspect --installed --python venv/bin/python
    vllm-overlay inspect --image dist/images/infernal
    vllm-overlay inspect --image ghcr.io/owner/vllm:TAG
    """,
)
@click.argument("wheels", nargs=-1, type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--installed", is_flag=True, help="What is installed instead of wheel files.")
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Interpreter whose packages are looked at (default: this one).",
)
@click.option(
    "--image",
    metavar="FOLDER|REFERENCE",
    help="An image: OCI layout, docker-daemon:NAME, or REGISTRY/REPOSITORY:TAG.",
)
@click.option("--insecure", is_flag=True, help="Speak plain HTTP to the image's registry.")
def inspect(
    app: App,
    wheels: tuple[Path, ...],
    installed: bool,
    python: Path | None,
    image: str | None,
    insecure: bool,
) -> None:
    """Say what WHEELS are, and check every file against their record.

    Patched files are held against the record, all others against upstream's own wheel if the
    cache has it (see fetch), else against the wheel's RECORD. An image is held against its labels
    as well; nothing of it is run.
    """
    from overlay.wheels.inspect import inspect_installed, inspect_wheel

    if bool(wheels) + installed + (image is not None) != 1:
        raise click.UsageError("name wheel files, or say --installed, or --image")
    if image is not None:
        from overlay.verbs.image import inspect_image

        inspect_image(app, image, insecure=insecure)
        return
    if installed:
        found = inspect_installed(python)
        if not found:
            raise WheelError(
                "neither vLLM nor FlashInfer is installed",
                why=f"looked at {python or 'this interpreter'}",
                fix="install a line's wheels, or name the interpreter with --python",
            )
    else:
        found = [inspect_wheel(path) for path in wheels]
    found = [against_upstream(app, one) for one in found]
    errors = [error for one in found if (error := one.error()) is not None]
    document = {"verb": "inspect", "found": [_inspection_document(one) for one in found]}
    if app.report.as_json and not errors:
        app.report.json(document)
    elif not app.report.as_json:
        app.report.table(
            ("name", "version", "line", "patches", "checked", "result"),
            [_inspection_row(one) for one in found],
        )
        for note in (note for one in found for note in one.notes):
            app.report.say(f"note: {note.what}")
    with told_with(app, document):
        if errors:
            raise errors[0]


def against_upstream(app: App, one: Inspection, own: Mapping[str, Row] | None = None) -> Inspection:
    """Hold unpatched files against upstream's wheel too, where the cache has it."""
    from overlay.lines.line import PROJECTS
    from overlay.sources.index import fetch_release
    from overlay.wheels.baseline import check_baseline, upstream_of
    from overlay.wheels.inspect import Problem

    upstream = upstream_of(one)
    if upstream is None or one.record is None:
        return one
    sha256 = one.record["pins"][upstream]["wheel_sha256"]
    try:
        file = next((app.cache / "downloads" / sha256).glob("*.whl"))
        base = fetch_release(
            PROJECTS[upstream], file.name, sha256,
            cache=app.cache, offline=True, report=app.report,
        )  # fmt: skip
    except (StopIteration, OverlayError):
        what = f"{one.name}: unpatched files were checked against RECORD alone: upstream's wheel "
        note = Problem("no-baseline", "", what + "is not in the cache ('fetch' gets it)")
        return replace(one, notes=(*one.notes, note))
    return check_baseline(one, base, own)


def _inspection_row(one: Inspection) -> tuple[str, ...]:
    from overlay.lines.line import PROJECTS

    record = one.record or {}
    series = record.get("series", {})
    upstream = next((u for u, project in PROJECTS.items() if project == one.name), "")
    patches = ", ".join(patch["name"] for patch in series.get(upstream, ()))
    return (
        one.name,
        one.version,
        str(record.get("line", "no record")),
        patches,
        f"{one.files} files, {one.effects} patched",
        "as recorded" if not one.problems else f"{len(one.problems)} problems",
    )


def _inspection_document(one: Inspection) -> dict[str, Any]:
    return {
        "where": str(one.where),
        "name": one.name,
        "version": one.version,
        "record": dict(one.record) if one.record is not None else None,
        "files": one.files,
        "effects": one.effects,
        "problems": [asdict(problem) for problem in one.problems],
        "notes": [asdict(note) for note in one.notes],
    }


@verb(
    short="Say what this machine lacks",
    examples="""
    vllm-overlay doctor
    vllm-overlay doctor --online
    """,
)
@click.option("--online", is_flag=True, help="Also ask whether the package indexes answer.")
def doctor(app: App, online: bool) -> None:
    """Say what this machine lacks, and the remedy."""
    from overlay.doctor import examine, is_fit

    found = examine(app.cache, online=online)
    document = {"verb": "doctor", "findings": [asdict(one) for one in found]}
    fit = is_fit(found)
    if app.report.as_json and fit:
        app.report.json(document)
    elif not app.report.as_json:
        app.report.table(
            ("what", "status", "found", "remedy", "for"),
            [(one.name, one.status, one.what, one.fix, one.purpose) for one in found],
        )
    with told_with(app, document):
        if not fit:
            missing = [one for one in found if one.status == "missing"]
            raise MachineError(
                f"this machine lacks {', '.join(one.name for one in missing)}",
                fix="; ".join(one.fix for one in missing if one.fix),
            )


@verb(
    short="List the cache, or tidy it (gc)",
    examples="""
    vllm-overlay cache
    vllm-overlay cache gc --dry-run
    vllm-overlay cache gc --days 7
    """,
)
@click.argument("action", type=click.Choice(["list", "gc"]), default="list")
@click.option("--dry-run", is_flag=True, help="gc: only say what would go.")
@click.option("--days", type=float, default=30, show_default=True, help="gc: keep what is younger.")
@click.option(
    "--everything", is_flag=True, help="gc: drop all that no line here stands on, whatever its age."
)
def cache(app: App, action: str, dry_run: bool, days: float, everything: bool) -> None:
    """List what is in the cache, or collect (gc) what no line needs."""
    if app.cache.exists() and not app.cache.is_dir():
        raise MachineError(
            f"the cache {app.cache} is no folder", fix="set VLLM_OVERLAY_CACHE to a folder"
        )
    if action == "list":
        _list_cache(app)
        return
    from overlay.sources.cache import collect

    done = collect(
        app.cache, keep=_keep(app), days=days, everything=everything, dry_run=dry_run
    )  # fmt: skip
    if app.report.as_json:
        document = asdict(done)
        document["removed"] = [str(item.path) for item in done.removed]
        app.report.json({"verb": "cache gc", "dry_run": dry_run, **document})
        return
    word = "would free" if dry_run else "freed"
    app.report.table(
        ("kind", "name", "bytes"),
        [(item.kind, item.name, str(item.size or "")) for item in done.removed]
        + [("ref", name, "") for name in done.dropped],
    )
    for name in done.busy:
        app.report.say(f"left alone, another process holds it: {name}")
    app.report.say(f"{word} {done.freed / 1e6:.1f} MB")


def _list_cache(app: App) -> None:
    from overlay.sources.cache import describe

    items = describe(app.cache)
    if app.report.as_json:
        rows = [{**asdict(item), "path": str(item.path)} for item in items]
        app.report.json({"verb": "cache", "folder": str(app.cache), "items": rows})
        return
    app.report.table(
        ("kind", "name", "MB", "detail"),
        [
            (i.kind, i.name, "" if i.size is None else f"{i.size / 1e6:.1f}", i.detail)
            for i in items
        ],
    )
    total = sum(item.size or 0 for item in items)
    app.report.say(f"{app.cache}: {total / 1e6:.1f} MB")


def _keep(app: App) -> Keep:
    """What the lines at hand stand on; a line that can't be read stops the collection."""
    from overlay.lines.line import UPSTREAMS, find_lines
    from overlay.sources.cache import Keep
    from overlay.trees.apply import tip_ref

    refs: dict[Upstream, set[str]] = {upstream: set() for upstream in UPSTREAMS}
    downloads = set()
    for name in find_lines(app.root):
        line = app.line(name)
        for upstream in UPSTREAMS:
            store = app.sources.store(upstream)
            for ref in app.sources.refs(line, upstream):
                refs[upstream].add(ref)
                if base := store.find(ref):
                    refs[upstream].add(tip_ref(base, line.series[upstream]))
            pin = line.pin(upstream)
            downloads |= {pin.sdist.sha256, pin.wheel.sha256}
    return Keep(refs=refs, downloads=downloads)
