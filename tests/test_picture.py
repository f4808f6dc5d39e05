import builtins
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from overlay.errors import MachineError
from overlay.moving.cells import Cell
from overlay.moving.frontier import Column, Frontier, sentence
from overlay.moving.picture import draw_png, draw_svg
from overlay.trees.match import Verdict
from tests.support.tiny import Tiny

SVG = "{http://www.w3.org/2000/svg}"
PIN = "1.0"


def column(version: str, *verdicts: Verdict, reason: str = "") -> Column:
    cells = []
    for number, verdict in enumerate(verdicts):
        ok = verdict.carried or verdict is Verdict.MERGED
        cells.append(Cell(name=f"p{number}", verdict=verdict, ok=ok, goes=ok))
    return Column(version=version, reason=reason, cells=tuple(cells))


def frontier(*columns: Column, patches: int = 2, pin: str = PIN) -> Frontier:
    return Frontier(
        line="copper", upstream="vllm", pin=pin, columns=columns,
        patches=tuple(f"p{n}" for n in range(patches)),
    )  # fmt: skip


GOOD = (Verdict.APPLIES, Verdict.MERGED)
SOME = (Verdict.OFFSET, Verdict.CONFLICT)


def words(drawn: bytes) -> list[str]:
    return ["".join(text.itertext()) for text in ET.fromstring(drawn).iter(f"{SVG}text")]  # noqa: S314


def test_each_verdict_is_a_word_and_a_shape_of_its_own() -> None:
    every = tuple(Verdict)
    drawn = draw_svg(frontier(column("1.0", *every), patches=len(every)))
    found = {}
    for cell in ET.fromstring(drawn).iter(f"{SVG}g"):  # noqa: S314
        says, word = cell.findtext(f"{SVG}title"), cell.findtext(f"{SVG}text")
        shape = cell.find(f"{SVG}path")
        assert says is not None
        assert word is not None
        assert shape is not None
        assert f"on 1.0: {word}" in says
        found[word] = (shape.get("d"), shape.get("class"))
    assert len(found) == len(set(found.values())) == len(every)
    assert found.keys() >= {verdict.value for verdict in every} - {"partly-merged"}


def test_it_says_what_a_reader_looks_for() -> None:
    drawn = draw_svg(
        frontier(
            column("0.9", *SOME), column("1.0", *GOOD), column("1.1", *GOOD),
            column("1.2", reason="vllm 1.2 has no sdist"), column("1.3", *SOME),
        )
    )  # fmt: skip
    text = words(drawn)
    assert text[0] == "copper on vLLM: 2 patches, 5 versions"
    assert text[1] == (
        "Stands on 1.0. The whole series reaches 1.1. On 1.3 1 of 2 patches needs a person. "
        "It goes back to no older version."
    )
    assert [word for word in text if word in ("✓ yes", "✓ reaches", "1 to do")] == [
        "1 to do", "✓ yes", "✓ reaches", "1 to do",
    ]  # fmt: skip
    assert "vllm 1.2 has no sdist" in drawn.decode()
    root = ET.fromstring(drawn)  # noqa: S314
    kinds = [rect.get("class") for rect in root.iter(f"{SVG}rect")]
    assert kinds.count("pin") == kinds.count("first") == 1


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ([column("1.0", *GOOD)], "Stands on 1.0."),
        ([column("1.1", *SOME)], "reaches no newer version. On 1.1 1 of 2"),
        ([column("1.1", *GOOD), column("1.2", *SOME)], "reaches 1.1. On 1.2"),
        ([column("1.1", *SOME), column("1.2", *GOOD)], "reaches 1.2."),
        ([column("0.8", *GOOD), column("0.9", *GOOD), column("1.0", *GOOD)], "back to 0.8."),
        ([column("0.8", *GOOD), column("0.9", *SOME), column("1.0", *GOOD)], "no older version."),
    ],
)
def test_the_sentence(columns: Sequence[Column], says: str) -> None:
    assert says in sentence(frontier(*columns))
    assert len(re.findall(r"newer version", sentence(frontier(*columns)))) <= 1


def test_nothing_lies_outside_of_the_picture() -> None:
    many = [f"0.{n}.0.post{n}" for n in range(18)]
    for columns in (
        [column(version, *GOOD) for version in many],
        [column("1.0", *GOOD)],
    ):
        root = ET.fromstring(draw_svg(frontier(*columns)))  # noqa: S314
        width, height = float(root.get("width", "0")), float(root.get("height", "0"))
        for rect in root.iter(f"{SVG}rect"):
            x, y, w, h = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
            assert 0 <= x < x + w <= width
            assert 0 <= y < y + h <= height
        for text in root.iter(f"{SVG}text"):
            assert 0 < float(text.get("x", "nan")) < width
            assert 0 < float(text.get("y", "nan")) < height


def test_markup_in_a_name_is_text() -> None:
    evil = Frontier(
        line="a<b>&", upstream="vllm", pin="1.0", patches=("</svg><script>",),
        columns=(column("1.0", Verdict.APPLIES),),
    )  # fmt: skip
    drawn = draw_svg(evil)
    assert b"<script>" not in drawn
    assert "</svg><script>" in words(drawn)


def test_the_same_frontier_gives_the_same_bytes() -> None:
    first, second = (draw_svg(frontier(column("1.0", *SOME))) for _ in range(2))
    assert first == second


def test_a_series_without_patches_is_drawn() -> None:
    drawn = draw_svg(frontier(column("1.0"), patches=0))
    assert "copper on vLLM: 0 patches, 1 version" in words(drawn)


def test_both_schemes_set_the_same_colours() -> None:
    """A class that is only given a colour for light pages would be unreadable on a dark one."""
    style = ET.fromstring(draw_svg(frontier(column("1.0", *GOOD)))).findtext(f"{SVG}style") or ""  # noqa: S314
    light, _, dark = style.partition("@media")
    coloured = re.compile(r"\.([\w-]+)(?:, \.[\w-]+)* \{[^}]*(?:fill|stroke): #")

    def classes(text: str) -> set[str]:
        return {
            name
            for rule in coloured.finditer(text)
            for name in re.findall(r"\.([a-z][\w-]*)", rule[0])
        }

    assert classes(light) == classes(dark)


def test_a_png_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name == "resvg_py":
            raise ImportError("No module named 'resvg_py'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match="needs resvg-py") as caught:
        draw_png(b"<svg/>")
    assert "vllm-overlay[picture]" in caught.value.fix


def test_a_machine_without_fonts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library draws no text then, and says nothing. A fake of it does the same."""
    blind = ModuleType("resvg_py")
    blind.svg_to_bytes = lambda svg_string, zoom: b"a picture"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "resvg_py", blind)
    with pytest.raises(MachineError, match="no font"):
        draw_png(b"<svg/>")


def test_a_missing_library_is_told_before_the_work(
    tiny: Tiny, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    ran = run("frontier", "tiny", "--upstream", "vllm", "--out", str(tiny.root / "f.png"))
    assert ran.code == 11
    assert "importing" not in ran.err


def test_a_png_is_drawn() -> None:
    pytest.importorskip("resvg_py")
    small, large = (
        draw_png(draw_svg(frontier(column("1.0", *SOME))), zoom=zoom) for zoom in (1, 2)
    )
    assert small[:8] == large[:8] == b"\x89PNG\r\n\x1a\n"
    assert _size(large) == {side: 2 * pixels for side, pixels in _size(small).items()}


def _size(png: bytes) -> Mapping[str, int]:
    return {
        "width": int.from_bytes(png[16:20], "big"),
        "height": int.from_bytes(png[20:24], "big"),
    }
