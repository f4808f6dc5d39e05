from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from overlay.cli import main
from overlay.lines.line import read_line
from overlay.patches.graph import Graph, Whole, derive
from overlay.patches.graphpicture import dot, svg, text
from overlay.patches.patch import parse_patch
from overlay.report import Reporter
from overlay.sources.source import Sources
from overlay.trees.apply import apply_series
from overlay.trees.pipeline import apply_line
from overlay.trees.store import cache_folder
from tests.conftest import numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlay.patches.patch import Patch
    from overlay.trees.store import Commit, Store
    from tests.conftest import File, Ran, Repo
    from tests.support.tiny import Tiny


class Bench:
    """A series that plain git wrote, in a repository of its own and in a store."""

    def __init__(self, repo: Repo, store: Store, base: Commit, steps: Any) -> None:
        self.repo, self.store, self.base = repo, store, base
        self.begin = repo.git("rev-parse", "HEAD").decode().strip()
        self.patches: list[Patch] = []
        for name, files, requires in steps:
            trailers = f"\nRequires: {requires}\n" if requires else ""
            repo.commit(files, f"area: do {name}\n\nWhy.\n{trailers}")
            self.patches.append(parse_patch(repo.patch(), name=name))

    def graph(self) -> Graph:
        patched = apply_series(self.store, self.base, self.patches)
        assert not patched.bad
        return derive(self.store, patched, "vllm", self.patches)

    def falls(self, *gone: str) -> dict[str, str]:
        patched = apply_series(self.store, self.base, self.patches)
        return Whole(self.store, patched, self.patches).falls(gone)

    def falls_in_git(self, gone: str) -> list[str]:
        """What ``git am`` can't apply when one patch, and all that fell before, are left out."""
        self.repo.reset(self.begin)
        fell = []
        for patch in self.patches:
            if patch.name == gone:
                continue
            before = self.repo.git("rev-parse", "HEAD")
            self.repo.git("am", "--quiet", "--keep-non-patch", stdin=patch.raw, ok=(0, 128))
            if self.repo.git("rev-parse", "HEAD") == before:
                self.repo.git("am", "--abort")
                fell.append(patch.name)
        return fell


@pytest.fixture
def bench(
    make_repo: Callable[[], Repo],
    make_store: Callable[[], Store],
    import_base: Callable[..., Commit],
) -> Callable[..., Bench]:
    def make(begin: Mapping[str, File], *steps: Any) -> Bench:
        repo, store = make_repo(), make_store()
        repo.commit(begin, "Begin\n")
        base = import_base(store, repo)
        full = [(*step, "") if len(step) == 2 else step for step in steps]
        return Bench(repo, store, base, full)

    return make


LINES = numbered(1, 60)


def edit(text: bytes, *pairs: tuple[int, bytes]) -> bytes:
    for at, new in pairs:
        assert b"line %d\n" % at in text
        text = text.replace(b"line %d\n" % at, new)
    return text


def edges(graph: Graph) -> list[tuple[str, str, str, bool]]:
    return [(edge.patch, edge.needs, edge.kind, edge.direct) for edge in graph.edges]


def test_what_is_far_apart_stands_alone_and_what_meets_does_not(bench: Any) -> None:
    one = edit(LINES, (10, b"one\n"))
    two = edit(one, (40, b"two\n"))
    three = edit(two, (12, b"three\n"))  # 'one' is in its context
    made = bench({"f": LINES}, ("one", {"f": one}), ("two", {"f": two}), ("three", {"f": three}))
    graph = made.graph()
    assert edges(graph) == [("three", "one", "text only", True)]
    assert graph.edges[0].why == "f: the context at line 9 is not in the file"
    assert [made.falls_in_git(name) for name in ("one", "two", "three")] == [["three"], [], []]


def test_files_that_come_go_and_move(bench: Any) -> None:
    made = bench(
        {"f": LINES, "g": b"g\n"},
        ("add", {"new": LINES}),
        ("change", {"new": edit(LINES, (5, b"x\n"))}),
        ("rename", {"f": None, "h": LINES}),
        ("inside", {"h": edit(LINES, (9, b"y\n"))}),
        ("delete", {"g": None}),
        ("folder", {"g/x": b"x\n"}),
    )
    found = {(patch, needs) for patch, needs, _, _ in edges(made.graph())}
    assert found == {("change", "add"), ("inside", "rename"), ("folder", "delete")}
    for name in ("add", "rename", "delete"):
        assert list(made.falls(name)) == made.falls_in_git(name)


def test_only_what_no_other_edges_say_is_drawn_and_declared_ones_are_told_apart(
    bench: Any,
) -> None:
    one = edit(LINES, (10, b"one\n"))
    two = one.replace(b"one\n", b"two\n")
    three = two.replace(b"two\n", b"three\n")
    far = edit(three, (50, b"far\n"))
    made = bench(
        {"f": LINES},
        ("one", {"f": one}),
        ("two", {"f": two}, "one"),
        ("three", {"f": three}),
        ("far", {"f": far}, "two, three"),
    )
    graph = made.graph()
    assert edges(graph) == [
        ("two", "one", "text and declared", True),
        ("three", "one", "text only", False),
        ("three", "two", "text only", True),
        ("far", "two", "declared only", False),
        ("far", "three", "declared only", True),
    ]
    assert [(edge.patch, edge.needs) for edge in graph.undeclared] == [("three", "two")]
    assert text(graph).splitlines() == [
        "vllm",
        "└─ one",
        "   └─ two",
        "      └─ three  (not declared: two)",
        "         └─ far  (declared only: three)",
    ]


def test_one_that_takes_another_back_frees_those_after_it(bench: Any) -> None:
    one = edit(LINES, (10, b"one\n"))
    after = edit(LINES, (11, b"after\n"))
    made = bench({"f": LINES}, ("one", {"f": one}), ("undo", {"f": LINES}), ("after", {"f": after}))
    # Without 'one' there is nothing to undo, and 'after' finds the lines that it knows
    assert list(made.falls("one")) == made.falls_in_git("one") == ["undo"]
    assert list(made.falls("undo")) == made.falls_in_git("undo") == ["after"]
    assert list(made.falls("one", "undo")) == []


def test_other_lines_of_the_same_text_are_no_place_for_a_patch(bench: Any) -> None:
    block = b"".join(b"same %d\n" % at for at in range(9))
    begin = block * 4
    longer = b"".join(b"new %d\n" % at for at in range(9)) + begin
    cut = 9 * 3  # the third block of four, behind the new lines
    lines = longer.splitlines(keepends=True)
    changed = b"".join([*lines[: cut + 4], b"changed\n", *lines[cut + 5 :]])
    made = bench({"f": begin}, ("above", {"f": longer}), ("change", {"f": changed}))
    assert made.falls("above") == {"change": "f: other lines of the same text would be changed"}
    # git takes the line that is stated, and changes another block than was meant
    assert made.falls_in_git("above") == []
    got = (made.repo.path / "f").read_bytes()
    assert got != changed.removeprefix(longer[: -len(begin)])
    # Unique lines leave no doubt
    unique = edit(b"above\n" * 9 + LINES, (30, b"x\n"))
    made = bench({"f": LINES}, ("above", {"f": b"above\n" * 9 + LINES}), ("change", {"f": unique}))
    assert made.falls("above") == {}


def test_repeated_lines_far_from_what_is_left_out_keep_their_place(bench: Any) -> None:
    block = b"".join(b"same %d\n" % at for at in range(9))
    begin = LINES + block * 4
    lines = begin.splitlines(keepends=True)
    changed = b"".join([*lines[:82], b"changed\n", *lines[83:]])
    again = edit(changed, (10, b"ten\n"))
    made = bench(
        {"f": begin}, ("ten", {"f": edit(begin, (10, b"ten\n"))}), ("change", {"f": again})
    )
    assert made.falls("ten") == {}


@pytest.mark.parametrize("gone", [(), ("one",), ("one", "two")])
def test_bytes_of_any_kind(bench: Any, gone: tuple[str, ...]) -> None:
    latin = b"caf\xe9\r\n" * 3 + b"no end"
    made = bench(
        {"a b": latin, "bin": bytes(range(256))},
        ("one", {"a b": latin + b" yet"}),
        ("two", {"bin": bytes(range(255, -1, -1))}),
        ("three", {"bin": b"\0" * 300}),
    )
    assert list(made.falls(*gone)) == (["three"] if "two" in gone else [])


# Edits of two files of unique lines: (file, line, how, length); what stands there decides
_EDITS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from("fg"), st.integers(0, 39), st.sampled_from("+-~"), st.integers(1, 3)
        ),
        min_size=1,
        max_size=2,
    ),
    min_size=2,
    max_size=5,
)


@given(edits=_EDITS)
@settings(
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_agrees_with_git_am_of_every_series_with_one_patch_left_out(
    edits: list[list[tuple[str, int, str, int]]], bench: Any
) -> None:
    files = {name: [b"%s %d\n" % (name.encode(), at) for at in range(25)] for name in "fg"}
    begin = {name: b"".join(lines) for name, lines in files.items()}
    steps = []
    for number, changes in enumerate(edits):
        for name, at, how, length in changes:
            lines = files[name]
            at = min(at, len(lines))
            fresh = [b"new %d %d %d\n" % (number, at, i) for i in range(length)]
            lines[at : at if how == "+" else at + length] = [] if how == "-" else fresh
            if not lines:  # the file would go; that has a test of its own
                lines.append(b"last %d\n" % number)
        now = {name: b"".join(lines) for name, lines in files.items()}
        if now != (steps[-1][1] if steps else begin):
            steps.append((f"p{number}", now))
    made = bench(begin, *steps)
    found = {patch.name: list(made.falls(patch.name)) for patch in made.patches}
    event(f"{sum(map(len, found.values()))} fall")
    for name, fell in found.items():
        assert fell == made.falls_in_git(name), name


def _tangle() -> Graph:
    """Long edges, several kinds, a patch alone."""
    from overlay.patches.graph import Edge

    names = ("base", "alone", "left-with-a-long-name", "right-with-a-long-name", "top-of-all")
    pairs = [
        ("left-with-a-long-name", "base", 1, 1),
        ("right-with-a-long-name", "base", 1, 0),
        ("top-of-all", "left-with-a-long-name", 0, 1),
    ]
    pairs += [("top-of-all", "right-with-a-long-name", 1, 1), ("top-of-all", "base", 1, 0)]
    return Graph(
        upstream="vllm",
        patches=names,
        edges=tuple(
            Edge(patch=p, needs=n, text=bool(t), declared=bool(d), direct=True, why="x")
            for p, n, t, d in pairs
        ),
    )


def test_the_picture_shows_every_patch_once_and_every_edge() -> None:
    graph = _tangle()
    drawn = ET.fromstring(svg([graph, graph], "a <title> & more"))  # noqa: S314 - our own
    space = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in drawn.iter(f"{space}text")]
    assert all(words.count(name) == 2 for name in graph.patches)
    assert words[0] == "a <title> & more"
    arrows = [path for path in drawn.iter(f"{space}path") if "l9" in path.get("d", "")]
    assert len(arrows) == 2 * len(graph.drawn)
    boxes = [
        tuple(float(rect.get(key, "0")) for key in ("x", "y", "width", "height"))
        for rect in drawn.iter(f"{space}rect")
        if rect.get("rx")
    ]
    assert len(boxes) == 2 * len(graph.patches)
    right, bottom = float(drawn.get("width", "0")), float(drawn.get("height", "0"))
    for at, (x, y, width, height) in enumerate(boxes):
        assert 0 < x < x + width <= right
        assert 0 < y < y + height <= bottom
        for x2, y2, width2, height2 in boxes[:at]:
            apart = x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y
            assert apart


def test_the_same_graph_gives_the_same_bytes_and_dot_names_all() -> None:
    graph = _tangle()
    assert svg([graph], "t") == svg([_tangle()], "t")
    written = dot([graph], 'a "quoted" title')
    assert 'label = "a \\"quoted\\" title"' in written
    assert written.count(" -> ") == len(graph.drawn)
    assert written.count("style = dashed") == 1


def test_a_series_without_patches(bench: Any) -> None:
    graph = bench({"f": b"f\n"}).graph()
    assert (graph.edges, text(graph)) == ((), "vllm")
    ET.fromstring(svg([graph], "t"))  # noqa: S314


# --- the verb --------------------------------------------------------------------------------


def test_the_verb_tells_draws_and_answers_in_json(
    tiny: Tiny, run: Callable[..., Ran], tmp_path: Path
) -> None:
    tiny.add_patch("vllm", "third", {"vllm/new.py": b"new = 2\n"})
    ran = run("graph", "tiny")
    assert ran.code == 0
    assert ran.out.splitlines() == [
        "vllm", "├─ first", "└─ second", "   └─ third  (not declared: second)",
        "flashinfer", "└─ check",
    ]  # fmt: skip
    assert "third lacks 'Requires: second'" in ran.err
    document = run("graph", "tiny", "--json", "--upstream", "vllm").json
    assert list(document["upstreams"]) == ["vllm"]
    assert document["upstreams"]["vllm"]["undeclared"] == [["third", "second"]]
    for suffix in ("svg", "dot"):
        out = tmp_path / f"picture.{suffix}"
        assert run("graph", "tiny", "--out", str(out)).code == 0
        assert b"third" in out.read_bytes()


def test_a_png_is_drawn_or_refused_whole(tiny: Tiny, run: Callable[..., Ran]) -> None:
    out = tiny.root / "picture.png"
    ran = run("graph", "tiny", "--out", str(out))
    if importlib.util.find_spec("resvg_py"):
        assert (ran.code, out.read_bytes()[:8]) == (0, b"\x89PNG\r\n\x1a\n")
    else:
        assert (ran.code, out.exists()) == (11, False)
        assert "resvg-py" in ran.err


def test_the_verb_refuses_what_it_cannot_draw_or_apply(
    tiny: Tiny, run: Callable[..., Ran], tmp_path: Path
) -> None:
    assert run("graph", "tiny", "--out", "picture.jpeg").code == 2
    gone = tmp_path / "gone" / "picture.svg"
    ran = run("graph", "tiny", "--out", str(gone))
    assert ran.code == 11
    assert "internal error" not in ran.err
    tiny.edit("-one = 3\n", "-one = 3 \n", "vllm/first.patch")
    assert run("graph", "tiny").code == 7


# --- the real lines --------------------------------------------------------------------------

ROOT = Path(__file__).parent.parent
LSE = "lse-plumbing"
EXPECTED = {
    "infernal": {
        (LSE, "dense-prefill-flag", "text and declared"),
        (LSE, "index-mapping", "text and declared"),
        (LSE, "dcp-prefill-rows", "declared only"),
    },
    "eldritch": {
        (LSE, "dense-prefill-flag", "text and declared"),
        (LSE, "index-mapping", "text and declared"),
    },
    "next": {
        (LSE, "index-mapping", "text and declared"),
        ("mtp-interleave", LSE, "text and declared"),
    },
}


@pytest.mark.real
@pytest.mark.parametrize("name", EXPECTED)
def test_the_pictures_of_the_docs_are_those_of_the_lines(name: str, tmp_path: Path) -> None:
    out = tmp_path / "graph.svg"
    assert main(["--patches", str(ROOT / "patches"), "graph", name, "-q", "--out", str(out)]) == 0
    assert out.read_bytes() == (ROOT / "docs" / "graph" / f"{name}.svg").read_bytes()
    line = read_line(ROOT / "patches", name)
    patched = apply_line(line, Sources(cache=cache_folder(), report=Reporter(quiet=True)))
    found = derive(patched["vllm"].store, patched["vllm"].tree, "vllm", line.series["vllm"])
    assert {(edge.patch, edge.needs, edge.kind) for edge in found.drawn} == EXPECTED[name]
    assert not found.undeclared
