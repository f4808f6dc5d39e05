"""Verbs about serving: shapes, preflight."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, told_with, verb

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlay.kernels.memory import Memory
    from overlay.kernels.preflight import Preflight
    from overlay.kernels.recipe import Recipe
    from overlay.lines.line import Line

SUFFIXES = (".svg", ".png", ".md")


def _takes_recipes(function: Callable[..., Any]) -> Callable[..., Any]:
    function = click.option(
        "--recipes", "folder", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False),
        help="Folder of the recipes (default: images/recipes beside 'patches').",
    )(function)  # fmt: skip
    return click.option(
        "--set", "settings", metavar="KEY=VALUE", multiple=True,
        help="Another value for a key of the recipe, such as tp=4; repeat for several.",
    )(function)  # fmt: skip


@verb(
    short="The kernel shapes that a recipe asks for, and why",
    examples="""
    vllm-overlay shapes dsv4-dspark-tp8
    vllm-overlay shapes dsv4-dspark-tp8 --set max_num_seqs=10
    vllm-overlay shapes glm-tp8-dcp4 --set tp=4 --json
    """,
)
@click.argument("recipe")
@_takes_recipes
def shapes(app: App, recipe: str, settings: tuple[str, ...], folder: Path | None) -> None:
    """Derive every call of the sparse-MLA kernels that RECIPE can lead to. Asks no source."""
    from overlay.kernels.memory import memory
    from overlay.kernels.recipe import read_recipe
    from overlay.kernels.shapes import derive

    read = read_recipe(_folder(app, folder), recipe, settings)
    found = derive(read)
    if app.report.as_json:
        document = {**asdict(found), "memory": asdict(memory(read))}
        app.report.json({"verb": "shapes", "recipe": recipe, "set": settings, **document})
        return
    app.report.text("\n".join(found.derivation))
    app.report.table(
        ("who", "layer", "table", "model", "heads", "topk", "page", "secondary", "rows"),
        [
            (
                asked.who, asked.call, asked.shape.phase, asked.shape.model,
                str(asked.shape.heads), str(asked.shape.topk), str(asked.shape.page),
                f"{asked.shape.extra_topk}/{asked.shape.extra_page}"
                if asked.shape.extra_topk else "-",
                " ".join(map(str, sorted({rows.rows for rows in asked.rows}))),
            )
            for asked in found.asked
        ],
    )  # fmt: skip
    _show_memory(app, memory(read))


@verb(
    short="Whether a line can serve recipes, before anything is built",
    examples="""
    vllm-overlay preflight infernal dsv4-dspark-tp8
    vllm-overlay preflight infernal dsv4-dspark-tp8 --flashinfer 0.6.16.post3
    vllm-overlay preflight next glm-tp8-dcp4 --set interleave=64 --set tokens=3 --set method=mtp
    vllm-overlay preflight all --all --out preflight.svg --out preflight.md
    """,
)
@click.argument("line")
@click.argument("recipes", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every recipe.")
@click.option("--flashinfer", metavar="VERSION", help="This bare release in place of the line's.")
@_takes_recipes
@click.option(
    "--out", "outs", metavar="FILE", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
    help="Write the matrix as a picture (.svg, .png) or a table (.md); repeat for several.",
)  # fmt: skip
@reaches_sources
def preflight(
    app: App,
    line: str,
    recipes: tuple[str, ...],
    every: bool,
    flashinfer: str | None,
    settings: tuple[str, ...],
    folder: Path | None,
    outs: tuple[Path, ...],
) -> None:
    """Ask LINE's patched sources about every kernel that the RECIPES can ask for.

    LINE is a line, LINE@VERSION with a bare FlashInfer release in place of the line's own, several
    with commas between them, or 'all'. Exit codes: 0 all can be served, 22 one can't (a kernel is
    missing, or vLLM refuses it), 23 the sources don't say.
    """
    from overlay.kernels.bringers import Bringers
    from overlay.kernels.preflight import Trees, complain
    from overlay.kernels.preflight import preflight as judge
    from overlay.kernels.recipe import find_recipes, read_recipe

    if bool(recipes) == every:
        raise click.UsageError("name recipes, or say --all")
    place = _folder(app, folder)
    read = {
        name: read_recipe(place, name, settings)
        for name in (find_recipes(place) if every else recipes)
    }
    _check_outs(outs)
    found: list[Preflight] = []
    bringers = Bringers(app.sources, app.root)
    for each in _lines(app, line, flashinfer):
        trees = Trees(each, app.sources, bringers)
        found += [judge(trees, name, recipe) for name, recipe in read.items()]
    for out in outs:
        _write(out, found, read)
        app.report.say(f"wrote {out}")
    document = {"verb": "preflight", "set": settings, "found": [_document(each) for each in found]}
    complaint = complain(found)
    if not app.report.as_json:
        _show(app, found)
    elif complaint is None:
        app.report.json(document)
    with told_with(app, document):
        if complaint is not None:
            raise complaint


def _folder(app: App, folder: Path | None) -> Path:
    from overlay.errors import RecipeError
    from overlay.kernels.recipe import FOLDER

    found = folder or app.root.resolve().parent / FOLDER
    if not found.is_dir():
        raise RecipeError(f"no folder {folder or FOLDER}", fix="name it with --recipes")
    return found


def _lines(app: App, text: str, flashinfer: str | None) -> list[Line]:
    """Lines as the user named them, on the FlashInfer that was asked for."""
    from overlay.kernels.bringers import bare
    from overlay.lines.line import find_lines
    from overlay.sources.releases import known_pins, pin_release, with_pin

    found = []
    words = [word.strip() for word in text.split(",")]
    if "all" in words:
        at = words.index("all")
        words[at : at + 1] = find_lines(app.root)
    for word in words:
        name, _, version = word.partition("@")
        line, version = app.line(name), version or flashinfer or ""
        if version:
            pin = pin_release(
                app.sources, "flashinfer", version, known=known_pins(app.root, "flashinfer")
            )
            line = replace(with_pin(bare(line), "flashinfer", pin), name=f"{name}@{pin.version}")
        found.append(line)
    return found


def _show(app: App, found: Sequence[Preflight]) -> None:
    if len(found) == 1:
        _show_one(app, found[0])
        return
    app.report.table(
        ("line", "FlashInfer", "recipe", "outcome", "why", "brought by", "way out"),
        [
            (f.line, f.flashinfer, f.recipe, str(f.outcome), f.reason, f.brought,
             "; ".join(f.ways_out))
            for f in found
        ],
    )  # fmt: skip


def _show_one(app: App, found: Preflight) -> None:
    """Everything that was asked, and answered."""
    from overlay.kernels.preflight import describe

    says = [f"{found.recipe} on {found.line} (FlashInfer {found.flashinfer}): {found.outcome}"]
    says += [f"  {step}" for step in found.shapes.derivation]
    for judged in found.judged:
        told = judged.told
        says.append(f"  {told.answer}: {describe(judged.asked)}")
        says.append(f"    {told.where or 'FlashInfer'}: {told.why}")
        says += [f"    {judged.brought}"] if judged.brought else []
    says.append(f"  vLLM's own check {found.own.answer}: {found.own.what} ({found.own.where})")
    for refusal in found.refused:
        says.append(f"  {refusal.answer}: {refusal.what}")
        says.append(f"    {refusal.where}: {refusal.quote}" if refusal.quote else
                    f"    looked for in {refusal.where}")  # fmt: skip
    says += [f"  way out: {way}" for way in found.ways_out]
    app.report.text("\n".join(says))
    _show_memory(app, found.memory)


def _show_memory(app: App, memory: Memory) -> None:
    from overlay.kernels.memory import size_text

    rows = [
        (part.name, size_text(part.size), size_text(part.alone), part.formula)
        for part in memory.parts
    ]
    app.report.table(("memory of a rank", "size", "with DCP 1", "formula"), rows)
    cards = [
        (
            f"{card.gib} GiB",
            f"{size_text(card.left)} for KV" if card.left > 0 else "too small",
            "-" if card.tokens is None else f"{card.tokens} tokens in the DCP group",
            card.formula,
        )
        for card in memory.cards
    ]
    app.report.table(("card", "left", "holds", "formula"), cards)


def _check_outs(outs: Sequence[Path]) -> None:
    """Say what can't be written before anything is asked."""
    for out in outs:
        if out.suffix not in SUFFIXES:
            raise click.UsageError(f"--out {out}: ends in none of {', '.join(SUFFIXES)}")
        if not out.parent.is_dir():
            raise click.UsageError(f"--out {out}: no folder {out.parent}")
        if out.suffix == ".png":
            from overlay.moving.picture import renderer

            renderer()


def _write(out: Path, found: Sequence[Preflight], recipes: dict[str, Recipe]) -> None:
    from overlay.files import machine_errors, write_atomic
    from overlay.kernels.preflightpicture import draw_svg, markdown

    if out.suffix == ".md":
        before = out.read_text(encoding="utf-8") if out.exists() else ""
        data = markdown(found, recipes, before).encode()
    else:
        from overlay.moving.picture import draw_png

        data = draw_svg(found)
        if out.suffix == ".png":
            data = draw_png(data)
    with machine_errors(out, is_cache=False):
        write_atomic(out, data)


def _document(found: Preflight) -> dict[str, Any]:
    return {**asdict(found), "reason": found.reason}
