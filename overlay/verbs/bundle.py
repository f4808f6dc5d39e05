"""The verb that packs a line's checks for a machine without a network."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from overlay.app import App, reaches_sources, verb


@verb(
    short="Pack a line's checks for a GPU machine",
    examples="""
    vllm-overlay bundle infernal
    vllm-overlay bundle infernal --out /tmp/bundle.tar.gz --python 3.12
    """,
)
@click.argument("line")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write (default: dist/bundle-LINE.tar.gz beside the patches folder).",
)
@click.option("--python", default="3.12", show_default=True, help="The machine's Python version.")
@reaches_sources
def bundle(app: App, line: str, out: Path | None, python: str) -> None:
    """Pack LINE's checks for a machine that has torch and a GPU, but no network.

    There: unpack it and run 'bash run.sh OUT'. Packages come from pip, so the network is needed
    here, unless a find-links folder has them.
    """
    from overlay.checks.bundle import make_bundle
    from overlay.checks.sessions import find_session, receipt_head, root_of
    from overlay.lines.lock import check_lock, read_lock
    from overlay.trees.apply import refuse_bad
    from overlay.trees.pipeline import apply_line
    from overlay.wheels.linewheels import build_wheels

    read = app.line(line)
    patched = apply_line(read, app.sources)
    for upstream, one in patched.items():
        refuse_bad(one.tree, line, upstream)
    digest = check_lock(read, patched, read_lock(read)).digest
    # Paths of this machine stay here: run.sh says where its receipt goes
    head = receipt_head(read, find_session("gpu"), patched, digest=digest)
    head |= {"folder": "", "command": "bash run.sh OUT"}
    root = root_of(read)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-bundle-") as scratch:
        built = build_wheels(read, patched, app.sources, Path(scratch), app.report)
        made = make_bundle(
            read, [one.path for one in built], head,
            out or root / "dist" / f"bundle-{line}.tar.gz",
            root=root, python=python, report=app.report,
        )  # fmt: skip
    if app.report.as_json:
        document = {**asdict(made), "path": str(made.path)}
        app.report.json({"verb": "bundle", "line": line, "digest": digest, **document})
        return
    app.report.table(
        ("bundle", "MB", "files", "packages", "sha256"),
        [(
            str(made.path), f"{made.size / 1e6:.1f}", str(made.files), str(len(made.wheels)),
            made.sha256,
        )],
    )  # fmt: skip
