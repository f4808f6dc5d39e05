"""The verb ``capability``: which kernels for SM120 the FlashInfer of a line has."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, verb
from overlay.errors import CapabilityError

if TYPE_CHECKING:
    from overlay.kernels.capability import Capability
    from overlay.kernels.shapegrid import Family


@verb(
    short="Which sparse-MLA kernels for SM120 a line's FlashInfer has",
    examples="""
    vllm-overlay capability infernal
    vllm-overlay capability eldritch --json
    vllm-overlay capability infernal --flashinfer 0.6.16.post3
    """,
)
@click.argument("line")
@click.option(
    "--flashinfer", "version", metavar="VERSION",
    help="A bare FlashInfer release in place of the line's patched one.",
)  # fmt: skip
@reaches_sources
def capability(app: App, line: str, version: str | None) -> None:
    """Ask the dispatch code of LINE's patched FlashInfer for a grid of shapes.

    No GPU, compiler or version number is asked: the sources are evaluated. What they don't say
    plainly is shown as unknown, which is not supported. Exit code 20 if there are no such kernels.
    """
    from overlay.kernels.shapegrid import EXTRAS, HEADS, PAGES, TOPK, ask_grid, listed

    found, patched = _read(app, line, version)
    if found.trouble:
        raise CapabilityError(
            f"the kernels of FlashInfer {found.version} can't be read",
            why=found.trouble,
            fix="its dispatch code is of a form that isn't known yet: see docs/capability.md",
        )
    with app.report.progress(f"asking FlashInfer {found.version}"):
        families = list(ask_grid(found))
    if app.report.as_json:
        asked = {"heads": HEADS, "topk": TOPK, "pages": PAGES, "extras": EXTRAS}
        app.report.json(_document(line, found, patched, families, asked))
        return
    app.report.table(
        ("phase", "model", "heads", "topk", "page", "secondary cache"),
        [row for family in families for row in _rows(family)],
    )
    app.report.say(
        f"FlashInfer {found.version}, {'patched' if patched else 'as released'}; decode up to "
        f"{found.decode_max_rows} rows; asked for heads {listed(HEADS)}; topk {listed(TOPK)}; "
        f"pages {listed(PAGES)}"
    )


def _read(app: App, line: str, version: str | None) -> tuple[Capability, bool]:
    """The capability, and whether it is of a patched tree."""
    from overlay.kernels.capability import read_capability
    from overlay.sources.releases import known_pins, pin_release, with_pin
    from overlay.trees.apply import refuse_bad
    from overlay.trees.pipeline import apply_line
    from overlay.trees.store import StoredTree

    read = app.line(line)
    if version is None:
        patched = apply_line(read, app.sources, upstreams=("flashinfer",))["flashinfer"]
        refuse_bad(patched.tree, line, "flashinfer")
        tree = StoredTree(patched.store.reader, patched.tree.tree)
        return read_capability(tree, version=read.pin("flashinfer").version), True
    known = known_pins(app.root, "flashinfer")
    pin = pin_release(app.sources, "flashinfer", version, known=known)
    base = app.sources.base(with_pin(read, "flashinfer", pin), "flashinfer", {})
    tree = StoredTree(app.sources.store("flashinfer").reader, base.commit.tree)
    return read_capability(tree, version=pin.version), False


def _rows(family: Family) -> list[tuple[str, ...]]:
    from overlay.kernels.shapegrid import listed

    head = (family.phase, family.model)
    rows: list[tuple[str, ...]] = [
        (
            *head, listed(block.heads), listed(block.topk), listed(block.pages),
            f"{block.extra_topk} of pages of {block.extra_page}" if block.extra_topk else "-",
        )
        for block in family.blocks
    ]  # fmt: skip
    if not rows and family.refusal is not None:
        rows.append((*head, "none", "", "", family.refusal.why))
    if family.puzzle is not None:
        why = f"{family.puzzle.why} ({family.puzzle.where})"
        rows.append((*head, "unknown", f"{family.unknown} shapes", "", why))
    return rows


def _document(
    line: str, found: Capability, patched: bool, families: list[Family], asked: dict[str, Any]
) -> dict[str, Any]:
    return {
        "verb": "capability",
        "line": line,
        "version": found.version,
        "patched": patched,
        "decode_max_rows": found.decode_max_rows,
        "models": found.models,
        "asked": asked,
        "families": [asdict(family) for family in families],
    }
