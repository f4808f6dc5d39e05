"""The matrix of recipes and lines: as SVG in the manner of the frontier's, and as Markdown."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from overlay.kernels.memory import memory, size_text
from overlay.kernels.preflight import Outcome
from overlay.moving.picture import _STYLE, MARGIN, _draw_shape, _Look, _rect, _text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlay.kernels.preflight import Preflight
    from overlay.kernels.recipe import Recipe

_WIDTH, _HEIGHT, _GAP, _HEAD = 118, 36, 3, 92
_LETTER = 6.9  # of a name, at 12 px: wide enough for any font
_TITLE = "Which recipes the lines can serve"
_SAYS = "Each kernel shape that a recipe asks for, put to a line's patched FlashInfer sources."
_CIRCLE = "M11 6A5 5 0 1 1 1 6A5 5 0 1 1 11 6Z"
_LOOKS = {
    Outcome.FINE: _Look("same", "M1.5 6.5L4.8 10L10.5 2.5", "fine", "all kernels are there"),
    Outcome.UNKNOWN: _Look("none", "M2 6H10", "unknown", "the sources don't say"),
    Outcome.UNSUPPORTED: _Look("bad", "M2 2L10 10M10 2L2 10", "no kernel", "one is missing"),
    Outcome.REFUSED: _Look(
        "theirs", _CIRCLE + "M2.6 2.6L9.4 9.4", "refused", "vLLM says no while it starts"
    ),
}  # fmt: skip
START, END = "<!-- matrix -->", "<!-- end of matrix -->"


def draw_svg(found: Sequence[Preflight]) -> bytes:
    """The matrix as one SVG file: a row a recipe, a column a line."""
    lines, recipes = _axes(found)
    left = MARGIN + max(map(len, recipes)) * _LETTER + 12
    width = round(max(left + len(lines) * (_WIDTH + _GAP), len(_SAYS) * 6.4) + MARGIN)
    grid = _HEAD + len(recipes) * (_HEIGHT + _GAP) + 8
    seen = [outcome for outcome in Outcome if any(f.outcome is outcome for f in found)]
    height = grid + 19 * len(seen) + 8
    root = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", role="img", viewBox=f"0 0 {width} {height}",
        width=str(width), height=str(height),
    )  # fmt: skip
    ET.SubElement(root, "title").text = _TITLE
    ET.SubElement(root, "desc").text = _SAYS
    ET.SubElement(root, "style").text = _STYLE
    _rect(root, "card", 0.5, 0.5, width - 1, height - 1, radius=8)
    _text(root, "title", MARGIN, 30, _TITLE)
    _text(root, "say", MARGIN, 50, _SAYS)
    for row, recipe in enumerate(recipes):
        _text(root, "name", MARGIN, _HEAD + row * (_HEIGHT + _GAP) + _HEIGHT / 2 + 4, recipe)
    for number, line in enumerate(lines):
        middle = left + number * (_WIDTH + _GAP) + _WIDTH / 2
        _text(root, "head strong", middle, _HEAD - 22, line.partition("@")[0])
        version = next(f.flashinfer for f in found if f.line == line)
        bare = ", bare" if "@" in line else ""
        _text(root, "head", middle, _HEAD - 8, f"{version}{bare}")
    for each in found:
        x = left + lines.index(each.line) * (_WIDTH + _GAP)
        _draw_cell(root, each, x, _HEAD + recipes.index(each.recipe) * (_HEIGHT + _GAP))
    for number, outcome in enumerate(seen):
        look, y = _LOOKS[outcome], grid + 19 * number
        _draw_shape(root, look, MARGIN, y)
        _text(root, "foot", MARGIN + 17, y + 10, f"{look.word}: {look.meaning}")
    ET.indent(root, " ")
    drawn: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=False)
    return drawn + b"\n"


def _draw_cell(root: ET.Element, found: Preflight, x: float, y: float) -> None:
    look = _LOOKS[found.outcome]
    cell = ET.SubElement(root, "g")
    says = f"{found.recipe} on {found.line}: {look.word}. {found.reason}"
    ET.SubElement(cell, "title").text = says.strip()
    _rect(cell, look.colour, x, y, _WIDTH, _HEIGHT)
    _draw_shape(cell, look, x + _WIDTH / 2 - 6, y + 5)
    _text(cell, "word", x + _WIDTH / 2, y + _HEIGHT - 6, look.word)


def markdown(found: Sequence[Preflight], recipes: Mapping[str, Recipe], before: str = "") -> str:
    """The matrix as a table, then what is wrong with each cell that isn't fine.

    ``before`` is a page that has the marks of a matrix: it is kept around it.
    """
    lines, names = _axes(found)
    cells = {(f.recipe, f.line): f for f in found}
    text = _row(("recipe", *lines)) + "|---" * (len(lines) + 1) + "|\n"
    text += "".join(
        _row((f"{name}: {recipes[name].summary}", *(str(cells[name, line].outcome)
                                                    for line in lines)))
        for name in names
    )  # fmt: skip
    wrong = [f for f in found if f.outcome is not Outcome.FINE]
    if wrong:
        text += "\n" + _row(("recipe", "line", "why", "brought by", "ways out"))
        text += "|---" * 5 + "|\n"
        text += "".join(
            _row((f.recipe, f.line, f.reason, f.brought, "; ".join(f.ways_out) or "none found"))
            for f in wrong
        )
    heads = ("recipe", *(part.name for part in memory(next(iter(recipes.values()))).parts), "cards")
    rows = list(_memory_rows(recipes))
    if rows:
        text += "\n" + _row(heads) + "|---" * len(heads) + "|\n" + "".join(map(_row, rows))
    if START in before and END in before:
        head, tail = before.partition(START)[0], before.partition(END)[2]
        return f"{head}{START}\n\n{text}\n{END}{tail}"
    return text


def _memory_rows(recipes: Mapping[str, Recipe]) -> Iterator[tuple[str, ...]]:
    """What DCP changes in a rank's memory, a row a recipe that uses it or could."""
    for name, recipe in recipes.items():
        if recipe.model.family == "deepseek-v4":  # no DCP there
            continue
        found = memory(recipe)
        cards = (
            f"{card.gib} GiB: "
            + ("too small" if card.left <= 0 else f"{size_text(card.left)} for KV"
               + (f", {card.tokens} tokens" if card.tokens is not None else ", before weights"))
            for card in found.cards
        )  # fmt: skip
        sizes = (f"{size_text(p.size)} ({size_text(p.alone)})" for p in found.parts)
        yield (name, *sizes, "; ".join(cards))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _axes(found: Sequence[Preflight]) -> tuple[list[str], list[str]]:
    """Lines and recipes, in the order in which they were asked."""
    return list(dict.fromkeys(f.line for f in found)), list(dict.fromkeys(f.recipe for f in found))
