"""Draws a frontier: SVG for a page in light or dark, PNG where a page takes no SVG.

A verdict is a shape and a word as well as a colour; the colours are told apart with any kind of
colour blindness. The same frontier gives the same bytes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import MachineError
from overlay.moving.frontier import breaker, sentence
from overlay.trees.match import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from overlay.moving.frontier import Break, Column, Frontier

CELL_WIDTH, CELL_HEIGHT, GAP = 62, 36, 3
HEAD = 92  # above the grid: title, sentence, versions
FOOT = 36  # below it: the footnote; the legend adds its lines
LEGEND_LINE = 19
MARGIN = 18
_LETTER = 6.9  # of a patch's name, at 12 px: wide enough for any font
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class _Look:
    """How a verdict looks: class of its colours, path of its shape in a box of 12, word, meaning.

    A path that starts with ``F`` is filled, another is stroked.
    """

    colour: str
    shape: str
    word: str
    meaning: str


_CIRCLE = "M11 6A5 5 0 1 1 1 6A5 5 0 1 1 11 6Z"
_LOOKS = {
    Verdict.APPLIES: _Look("same", "M1.5 6.5L4.8 10L10.5 2.5", "applies", "as it stands"),
    Verdict.OFFSET: _Look(
        "near", "M3.5 3.5L6 1L8.5 3.5M6 1V11M3.5 8.5L6 11L8.5 8.5", "offset", "at other lines"
    ),
    Verdict.CONTEXT: _Look(
        "near", "M1 4.3Q3.5 1.3 6 4.3T11 4.3M1 8.8Q3.5 5.8 6 8.8T11 8.8", "context",
        "other lines around it",
    ),
    Verdict.MOVED: _Look("near", "M1 6H11M7 2L11 6L7 10", "moved", "in a renamed file"),
    Verdict.MERGED: _Look("theirs", "F" + _CIRCLE, "merged", "upstream has it"),
    Verdict.PARTLY_MERGED: _Look(
        "theirs", "F" + _CIRCLE + "M6 2.2A3.8 3.8 0 0 1 6 9.8Z", "partly", "partly merged"
    ),
    Verdict.REWORKED: _Look(
        "theirs", "M10 3.5A4.6 4.6 0 1 0 10.6 7M10.4 .8V3.9H7.3", "reworked",
        "upstream does it otherwise",
    ),
    Verdict.CONFLICT: _Look("bad", "M2 2L10 10M10 2L2 10", "conflict", "needs a person"),
    Verdict.BLOCKED: _Look(
        "stuck", _CIRCLE + "M2.6 2.6L9.4 9.4", "blocked", "needs one that is bad"
    ),
}  # fmt: skip
_ABSENT = _Look("none", "M2 6H10", "none", "no source")

# Blue, purple and orange stay apart for all; lightness says more within each
_STYLE = f"""
text {{ font-family: {_FONT}; fill: #1f2328; }}
.card {{ fill: #ffffff; stroke: #d0d7de; }}
.title {{ font-size: 16px; font-weight: 600; }}
.say, .foot, .soft {{ font-size: 12px; fill: #59636e; }}
.foot {{ font-size: 11px; }}
.name {{ font-size: 12px; }}
.head {{ font-size: 11.5px; text-anchor: middle; }}
.strong {{ font-weight: 700; fill: #1f2328; }}
.word {{ font-size: 10.5px; text-anchor: middle; }}
.mark {{ fill: none; stroke-width: 1.8; stroke-linecap: round; stroke-linejoin: round; }}
.same {{ fill: #b6dbf7; }} .near {{ fill: #e3f1fc; }} .theirs {{ fill: #e6dcf5; }}
.bad {{ fill: #ffbf80; }} .stuck {{ fill: #ffe6cc; }} .none {{ fill: #eff1f3; }}
.on-same, .on-near {{ stroke: #0a4a80; }} .on-theirs {{ stroke: #553098; }}
.on-bad, .on-stuck {{ stroke: #8a2f00; }} .on-none {{ stroke: #6e7781; }}
.fill-theirs {{ fill: #553098; fill-rule: evenodd; }}
.pin {{ fill: none; stroke: #1f2328; stroke-width: 1.6; stroke-dasharray: 4 3; }}
.first {{ fill: none; stroke: #8a2f00; stroke-width: 2.4; }}
@media (prefers-color-scheme: dark) {{
text, .strong {{ fill: #f0f6fc; }}
.card {{ fill: #0d1117; stroke: #3d444d; }}
.say, .foot, .soft {{ fill: #a2abb6; }}
.same {{ fill: #0f4d85; }} .near {{ fill: #12304d; }} .theirs {{ fill: #3f2d66; }}
.bad {{ fill: #9a4a00; }} .stuck {{ fill: #4d2b0d; }} .none {{ fill: #22272e; }}
.on-same, .on-near {{ stroke: #b6dbf7; }} .on-theirs {{ stroke: #d9c8f7; }}
.on-bad, .on-stuck {{ stroke: #ffcf9e; }} .on-none {{ stroke: #9198a1; }}
.fill-theirs {{ fill: #d9c8f7; }}
.pin {{ stroke: #f0f6fc; }} .first {{ stroke: #ffb066; }}
}}
"""


def draw_svg(frontier: Frontier) -> bytes:
    """The picture as one SVG file, UTF-8, with its own colours for light and dark pages."""
    left = MARGIN + max([len(name) for name in (*frontier.patches, "whole series")]) * _LETTER + 12
    rows = len(frontier.patches) + 1
    right = left + len(frontier.columns) * (CELL_WIDTH + GAP)
    width = round(max(right, left + 420, len(sentence(frontier)) * 6.4) + MARGIN)
    seen = [look for look in _LOOKS.values() if look in _seen(frontier)]
    legend = list(_legend_places(seen, MARGIN, width))
    grid = HEAD + rows * (CELL_HEIGHT + GAP) + 6
    last = legend[-1][1] if legend else 0
    height = grid + last + LEGEND_LINE + FOOT
    root = ET.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", role="img", viewBox=f"0 0 {width} {height}",
        width=str(width), height=str(height),
    )  # fmt: skip
    ET.SubElement(root, "title").text = _title(frontier)
    ET.SubElement(root, "desc").text = sentence(frontier)
    ET.SubElement(root, "style").text = _STYLE
    _rect(root, "card", 0.5, 0.5, width - 1, height - 1, radius=8)
    _text(root, "title", MARGIN, 30, _title(frontier))
    _text(root, "say", MARGIN, 50, sentence(frontier))
    for row, name in enumerate((*frontier.patches, "whole series")):
        y = _top(row, rows) + CELL_HEIGHT / 2 + 4
        _text(root, "name" if row < rows - 1 else "name strong", MARGIN, y, name)
    firsts = {name: found for name in frontier.patches if (found := frontier.breaks(name))}
    for number, column in enumerate(frontier.columns):
        x = left + number * (CELL_WIDTH + GAP)
        _draw_column(root, frontier, column, x, rows, firsts)
    for look, (x, y) in zip(seen, legend, strict=True):
        _draw_shape(root, look, x, grid + y + 12)
        _text(root, "foot", x + 17, grid + y + 22, _legend_word(look))
    _text(root, "foot", MARGIN, height - 14, _FOOTNOTE)
    ET.indent(root, " ")
    drawn: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=False)
    return drawn + b"\n"


_FOOTNOTE = (
    "Dashed: the version that the line stands on. Framed: the first version after it on which "
    "the patch needs a person."
)


def draw_png(svg: bytes, *, zoom: float = 2) -> bytes:
    """The picture as PNG, in its colours for light pages.

    Raises:
        MachineError: the optional library is missing, or the machine has no font.
    """
    render = renderer()
    page = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = f'<text font-family="{_FONT}" x="2" y="16">M</text>'
    if render(page.format(letter), 1) == render(page.format(""), 1):
        raise MachineError(
            "this machine has no font: the picture would have no text",
            fix="install one, such as DejaVu Sans, or write an .svg",
        )
    return render(svg.decode(), zoom)


def renderer() -> Callable[[str, float], bytes]:
    """Makes PNG of SVG, at a zoom. Raises ``MachineError`` where the library is missing."""
    try:
        import resvg_py
    except ImportError as error:
        raise MachineError(
            "a PNG needs resvg-py, which is not installed",
            why=str(error),
            fix="run `pip install 'vllm-overlay[picture]'`, or write an .svg",
        ) from None
    return lambda text, zoom: bytes(resvg_py.svg_to_bytes(svg_string=text, zoom=zoom))


def _title(frontier: Frontier) -> str:
    upstream = {"vllm": "vLLM", "flashinfer": "FlashInfer"}[frontier.upstream]
    patches, versions = len(frontier.patches), len(frontier.columns)
    return (
        f"{frontier.line} on {upstream}: {patches} patch{'es' * (patches != 1)}, "
        f"{versions} version{'s' * (versions != 1)}"
    )


def _draw_column(
    root: ET.Element, frontier: Frontier, column: Column, x: float, rows: int,
    firsts: dict[str, Break],
) -> None:  # fmt: skip
    pinned = column.version == frontier.pin
    reached = column.version == frontier.reaches
    head = "head strong" if pinned or reached else "head"
    middle = x + CELL_WIDTH / 2
    for row, part in enumerate(_split(column.version)):
        _text(root, head, middle, HEAD - 22 + 13 * row, part)
    for row, name in enumerate(frontier.patches):
        y = _top(row, rows)
        look = _LOOKS[column.cells[row].verdict] if column.cells else _ABSENT
        broken = firsts.get(name)
        is_first = broken is not None and broken.version == column.version
        says = column.reason or column.cells[row].why
        if broken is not None and is_first:
            says = breaker(broken)
        _draw_cell(root, look, x, y, f"{name} on {column.version}: {look.word}. {says}".strip())
        if is_first:
            _rect(root, "first", x + 1.2, y + 1.2, CELL_WIDTH - 2.4, CELL_HEIGHT - 2.4)
    y = _top(rows - 1, rows) + CELL_HEIGHT / 2 + 4
    if column.reason:
        _text(root, "word soft", middle, y, "no source", says=column.reason)
    elif column.bad == 0:
        word = "reaches" if reached else "yes"
        _text(root, "word strong" if reached else "word", middle, y, f"✓ {word}")
    else:
        _text(root, "word", middle, y, f"{column.bad} to do")
    if pinned:
        height = rows * (CELL_HEIGHT + GAP) + 36
        _rect(root, "pin", x - 1.5, HEAD - 36, CELL_WIDTH + 3, height, radius=6)


def _draw_cell(root: ET.Element, look: _Look, x: float, y: float, says: str) -> None:
    cell = ET.SubElement(root, "g")
    ET.SubElement(cell, "title").text = says
    _rect(cell, look.colour, x, y, CELL_WIDTH, CELL_HEIGHT)
    _draw_shape(cell, look, x + CELL_WIDTH / 2 - 6, y + 5)
    _text(cell, "word", x + CELL_WIDTH / 2, y + CELL_HEIGHT - 6, look.word)


def _draw_shape(root: ET.Element, look: _Look, x: float, y: float) -> None:
    filled = look.shape.startswith("F")
    ET.SubElement(
        root, "path", {
            "class": f"fill-{look.colour}" if filled else f"mark on-{look.colour}",
            "d": look.shape.removeprefix("F"), "transform": f"translate({x:g} {y:g})",
        },
    )  # fmt: skip


def _seen(frontier: Frontier) -> set[_Look]:
    return {_LOOKS[cell.verdict] for column in frontier.columns for cell in column.cells}


def _legend_word(look: _Look) -> str:
    return f"{look.word}: {look.meaning}"


def _legend_places(
    looks: Sequence[_Look], left: float, width: float
) -> Iterator[tuple[float, float]]:
    """Where each entry starts, in as many lines as they need."""
    x, y = left, 0.0
    for look in looks:
        needs = 17 + len(_legend_word(look)) * 5.9
        if x > left and x + needs > width - left:
            x, y = left, y + LEGEND_LINE
        yield x, y
        x += needs + 14


def _split(version: str) -> tuple[str, ...]:
    """A long version in two lines."""
    for mark in (".post", "rc", ".dev"):
        head, found, tail = version.partition(mark)
        if found and len(version) > 8:
            return head, found + tail
    return ("", version)


def _top(row: int, rows: int) -> float:
    return HEAD + row * (CELL_HEIGHT + GAP) + (6 if row == rows - 1 else 0)


def _rect(
    root: ET.Element, kind: str, x: float, y: float, width: float, height: float, radius: float = 4
) -> None:
    numbers = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
    ET.SubElement(root, "rect", {"class": kind} | {k: f"{v:g}" for k, v in numbers.items()})


def _text(root: ET.Element, kind: str, x: float, y: float, text: str, says: str = "") -> None:
    element = ET.SubElement(root, "text", {"class": kind, "x": f"{x:g}", "y": f"{y:g}"})
    if says:
        ET.SubElement(element, "title").text = says
        element[0].tail = text
    else:
        element.text = text
