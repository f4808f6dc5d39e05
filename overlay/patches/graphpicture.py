"""The graph of a series for people: a tree of text, an SVG of our own layout, graphviz's DOT.

In the SVG a patch stands to the right of all that it needs. The layout is the usual one in
layers: long edges pass through the layers between on points of their own, and each layer is
sorted by where its neighbours stand.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlay.patches.graph import Edge, Graph

# Pixels. A letter of a monospaced font is 0.6 as wide as it is high.
_FONT, _BOX, _ROW, _GAP, _EDGE = 13, 30, 44, 90, 24
_LETTER = _FONT * 0.6
_ALONE_PER_ROW = 3
# Stroke, and words for the legend
_STYLES = {
    "text and declared": (
        'stroke="#1f4e79" stroke-width="1.8"', "stands on its text, and declares it",
    ),
    "text only": ('stroke="#c0392b" stroke-width="2.4"', "stands on its text, not declared"),
    "declared only": (
        'stroke="#7f8c8d" stroke-width="1.6" stroke-dasharray="6 4"', "declared, for what it does",
    ),
}  # fmt: skip

_Item = str | tuple[str, str, int]  # a patch, or a point of an edge that passes a layer


def text(graph: Graph) -> str:
    """Every patch once, below the nearest one that it stands on; further ones beside it."""
    order = {name: at for at, name in enumerate(graph.patches)}
    needs = _needs(graph)
    below: dict[str, list[str]] = {}
    for name in graph.patches:
        nearest = max(needs[name], key=lambda e: (e.text, order[e.needs]), default=None)
        below.setdefault(nearest.needs if nearest else "", []).append(name)
    lines: list[str] = [graph.upstream]

    def grow(name: str, indent: str) -> None:
        for child in below.get(name, ()):
            last = child == below[name][-1]
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{child}{_beside(needs[child], name)}")
            grow(child, indent + ("   " if last else "│  "))

    grow("", "")
    return "\n".join(lines)


def _beside(needs: Sequence[Edge], above: str) -> str:
    told = {
        "also on": [e.needs for e in needs if e.kind == "text and declared" and e.needs != above],
        "not declared": [e.needs for e in needs if e.kind == "text only"],
        "declared only": [e.needs for e in needs if e.kind == "declared only"],
    }
    notes = [f"{words}: {', '.join(names)}" for words, names in told.items() if names]
    return f"  ({'; '.join(notes)})" if notes else ""


def dot(graphs: Sequence[Graph], title: str) -> str:
    """A document for graphviz."""
    lines = ["digraph {", f"  label = {_quoted(title)};", "  rankdir = RL; node [shape = box];"]
    styles = {"text only": ' [color = "#c0392b"]', "declared only": " [style = dashed]"}
    for graph in graphs:
        lines += [f"  subgraph cluster_{graph.upstream} {{", f"    label = {graph.upstream};"]
        lines += [f"    {_quoted(f'{graph.upstream}/{n}')} [label = {_quoted(n)}];"
                  for n in graph.patches]  # fmt: skip
        for edge in graph.drawn:
            ends = (_quoted(f"{graph.upstream}/{name}") for name in (edge.patch, edge.needs))
            lines.append(f"    {' -> '.join(ends)}{styles.get(edge.kind, '')};")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def svg(graphs: Sequence[Graph], title: str) -> str:
    """A picture of all graphs, one below the other."""
    parts: list[str] = []
    y, width = 58.0, 0.0
    for graph in graphs:
        parts.append(_label(24, y, graph.upstream, "font-weight='bold'"))
        made, right, y = _drawn(graph, y + 18)
        parts += made
        width, y = max(width, right), y + 26
    kinds = [kind for kind in _STYLES if any(e.kind == kind for g in graphs for e in g.drawn)]
    for kind in kinds:
        style, words = _STYLES[kind]
        parts.append(f'<path d="M24 {y - 4:.0f}h36" fill="none" {style}/>')
        parts.append(_label(70, y, words, "fill='#444'"))
        width, y = max(width, 70 + len(words) * _LETTER), y + 20
    width = max(width, 24 + len(title) * _LETTER * 1.2) + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
            f'viewBox="0 0 {width:.0f} {y:.0f}" font-family="DejaVu Sans Mono, monospace" '
            f'font-size="{_FONT}">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            _label(24, 30, title, f"font-size='{_FONT * 1.2:.1f}' font-weight='bold'"),
            *parts,
            "</svg>",
            "",
        ]
    )


def _label(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def _drawn(graph: Graph, top: float) -> tuple[list[str], float, float]:
    """Elements, and their right and bottom ends."""
    tied = {name for edge in graph.drawn for name in (edge.patch, edge.needs)}
    layers = _layers(graph, tied)
    at: dict[_Item, tuple[float, float]] = {}
    wide: dict[_Item, float] = {}
    x = 24.0
    height = max((len(layer) for layer in layers), default=0) * _ROW
    width = 0.0
    for layer in layers:
        width = max((_width(item) for item in layer if isinstance(item, str)), default=0.0)
        for row, item in enumerate(layer):
            # An edge keeps to its own row until it has passed the boxes of a layer
            wide[item] = _width(item) if isinstance(item, str) else width
            at[item] = x, top + (height - len(layer) * _ROW) / 2 + row * _ROW + _BOX / 2
        x += width + _GAP
    right = x - _GAP if layers else 24.0
    parts = [part for edge in graph.drawn for part in _edge(edge, at, wide)]
    alone = [name for name in graph.patches if name not in tied]
    column = max((_width(name) for name in alone), default=0.0) + 18
    for number, name in enumerate(alone):
        row, place = divmod(number, _ALONE_PER_ROW)
        at[name] = 24 + place * column, top + height + row * _ROW + _BOX / 2
        right = max(right, at[name][0] + _width(name))
    parts += [part for item in at if isinstance(item, str) for part in _box(item, *at[item])]
    rows = -(-len(alone) // _ALONE_PER_ROW)
    return parts, right, top + height + rows * _ROW


def _width(name: str) -> float:
    return len(name) * _LETTER + 20


def _box(name: str, x: float, y: float) -> Iterator[str]:
    yield (
        f'<rect x="{x:.1f}" y="{y - _BOX / 2:.1f}" width="{_width(name):.1f}" height="{_BOX}" '
        'rx="5" fill="#eef3f8" stroke="#1f4e79"/>'
    )
    yield _label(x + 10, y + _FONT * 0.35, name)


def _edge(
    edge: Edge, at: Mapping[_Item, tuple[float, float]], wide: Mapping[_Item, float]
) -> Iterator[str]:
    """From the patch leftwards to what it needs, with the arrow's head there."""
    style = _STYLES[edge.kind][0]
    passed = [item for item in at if item[:2] == (edge.patch, edge.needs)]
    x, y = at[edge.patch]
    path = f"M{x:.1f} {y:.1f}"
    for item in (*reversed(passed), edge.needs):
        to_x, to_y = at[item][0] + wide[item], at[item][1]
        end = to_x + 8 if item == edge.needs else to_x
        path += f"C{x - _EDGE:.1f} {y:.1f} {end + _EDGE:.1f} {to_y:.1f} {end:.1f} {to_y:.1f}"
        if item != edge.needs:
            path += f"H{at[item][0]:.1f}"
        x, y = (to_x if item == edge.needs else at[item][0]), to_y
    yield f'<path d="{path}" fill="none" {style}/>'
    color = style.split('"')[1]
    yield f'<path d="M{x:.1f} {y:.1f}l9 -4.5v9z" fill="{color}"/>'


def _needs(graph: Graph) -> dict[str, list[Edge]]:
    return {name: [e for e in graph.drawn if e.patch == name] for name in graph.patches}


def _layers(graph: Graph, tied: set[str]) -> list[list[_Item]]:
    needs = _needs(graph)
    depth: dict[str, int] = {}
    for name in graph.patches:  # what a patch needs comes before it
        depth[name] = max((depth[edge.needs] + 1 for edge in needs[name]), default=0)
    layers: list[list[_Item]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    links: dict[_Item, list[_Item]] = {}  # neighbours, one layer to the left
    for name in graph.patches:
        if name in tied:
            layers[depth[name]].append(name)
        for edge in needs[name]:
            before: _Item = edge.needs
            for level in range(depth[edge.needs] + 1, depth[name]):
                point = (edge.patch, edge.needs, level)
                layers[level].append(point)
                links[point] = [before]
                before = point
            links.setdefault(name, []).append(before)
    for left, layer in pairwise(layers):
        place = {item: row for row, item in enumerate(left)}
        layer.sort(key=lambda item: _mean([place[n] for n in links[item]]))
    for layer, after in reversed(list(pairwise(layers))):
        rows: dict[_Item, list[int]] = {}
        for row, item in enumerate(after):
            for neighbour in links[item]:
                rows.setdefault(neighbour, []).append(row)
        layer.sort(key=lambda item: _mean(rows.get(item, [])))
    return [layer for layer in layers if layer]


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
