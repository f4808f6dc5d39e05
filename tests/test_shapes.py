"""Shapes: which kernels a recipe asks for, held against what vLLM's own sources compute."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.app import App
from overlay.kernels.capability import Phase
from overlay.kernels.memory import local_tokens, memory
from overlay.kernels.recipe import Recipe, find_recipes, read_recipe
from overlay.kernels.shapes import captured, derive, graph_sizes
from overlay.report import Reporter
from overlay.trees.pipeline import apply_line
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from overlay.kernels.shapes import Shapes

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "images" / "recipes"
LINES = ["eldritch", "infernal", "next"]


def recipe(name: str, *settings: str) -> Recipe:
    return read_recipe(FOLDER, name, settings)


def phases(shapes: Shapes, who: str = "target") -> dict[Phase, list[int]]:
    return {a.shape.phase: [r.rows for r in a.rows] for a in shapes.asked if a.who == who}


def test_seed_000_asks_for_the_prefill_table_and_says_why() -> None:
    found = derive(recipe("dsv4-dspark-tp8"))
    assert "64 heads / TP 8 = 8 heads a rank" in found.derivation
    why = "target: 16 requests x (1 + 5 drafts) = 96 rows > 64: the prefill table"
    assert why in found.derivation
    asked = [a.shape for a in found.asked if a.shape.phase is Phase.PREFILL]
    assert {(s.model, s.heads, s.topk, s.page, s.extra_topk, s.rows) for s in asked} == {
        ("dsv4", 8, 512, 64, 0, 96)
    }


@pytest.mark.parametrize("settings", [["max_num_seqs=10"], ["method=none", "tokens=0", "topk="]])
def test_seed_000s_ways_out_stay_within_the_decode_table(settings: list[str]) -> None:
    found = derive(recipe("dsv4-dspark-tp8", *settings))
    assert {a.shape.phase for a in found.asked} == {Phase.DECODE}


def test_dcp_gathers_heads_and_its_warmup_asks_the_prefill_table() -> None:
    found = derive(recipe("glm-tp8-dcp8", "prompts=kernel"))
    assert "8 heads x DCP 8 = 64 heads, gathered before the call" in found.derivation
    assert {a.shape.heads for a in found.asked} == {64}
    warm = [r for a in found.asked for r in a.rows if r.when == "warmup"]
    assert sorted(r.rows for r in warm) == [16, 512]
    alone = derive(recipe("glm-tp8"))
    assert sorted(r.rows for a in alone.asked for r in a.rows if r.when == "warmup") == [2, 16]


def test_each_kind_of_layer_asks_for_a_shape_of_its_own() -> None:
    found = derive(recipe("dsv4-layers-tp8"))
    assert {
        (a.call, a.shape.topk, a.shape.extra_topk, a.shape.extra_page) for a in found.asked
    } == {
        ("window", 128, 0, 0),
        ("c4", 128, 512, 64),
        ("c128", 128, 2048, 2),
        ("draft", 192, 0, 0),
    }
    assert {a.shape.phase for a in found.asked if a.call == "c128"} == set(Phase)


@pytest.mark.parametrize(("tp", "heads"), [(8, 8), (4, 16), (16, 8), (32, 8)])
def test_few_heads_are_padded_where_the_class_pads(tp: int, heads: int) -> None:
    found = derive(recipe("dsv4-dspark-tp8", f"tp={tp}"))
    assert {a.shape.heads for a in found.asked} == {heads}


def test_an_anchored_draft_has_a_row_less_a_request() -> None:
    rows = phases(derive(recipe("dsv4-dspark-tp8", "anchor=true")), "draft")
    assert max(rows[Phase.PREFILL]) == 80
    assert max(phases(derive(recipe("dsv4-dspark-tp8")), "draft")[Phase.PREFILL]) == 96


def test_without_graphs_nothing_is_captured_and_the_same_tables_are_asked() -> None:
    eager = derive(recipe("dsv4-dspark-tp8", "mode=none"))
    assert not [r for a in eager.asked for r in a.rows if r.when == "graph"]
    both = derive(recipe("dsv4-dspark-tp8"))
    assert [a.shape for a in eager.asked] == [a.shape for a in both.asked]


def test_capping_graphs_alone_is_no_way_out() -> None:
    """A batch that no graph holds runs without one, and asks for the same kernels."""
    capped = recipe("dsv4-dspark-tp8", "max_size=64")
    assert max(captured(capped, 6)) == 60
    assert Phase.PREFILL in phases(derive(capped))


@given(
    seqs=st.integers(1, 200),
    tokens=st.integers(0, 8),
    tp=st.sampled_from([1, 2, 4, 8]),
    edge=st.integers(1, 128),
    mode=st.sampled_from(["none", "full", "full-decode"]),
)
def test_rows_are_on_the_side_of_their_table(
    seqs: int, tokens: int, tp: int, edge: int, mode: str
) -> None:
    settings = [f"max_num_seqs={seqs}", f"tp={tp}", f"mode={mode}", f"tokens={tokens}"]
    settings += [] if tokens else ["method=none", "topk="]
    found = derive(recipe("dsv4-dspark-tp8", *settings), decode_rows=edge)
    sides = phases(found)
    for phase, rows in sides.items():
        assert rows == sorted(rows)
        assert all((row > edge) == (phase is Phase.PREFILL) for row in rows)
    query, most = 1 + tokens, seqs * (1 + tokens)
    assert (Phase.PREFILL in sides) >= (most > edge)
    if edge >= query and most > edge:  # the last full decode batch, and the first prefill one
        assert edge // query * query in sides[Phase.DECODE]
        assert (edge // query + 1) * query in sides[Phase.PREFILL]
    assert all(a.shape.rows == a.rows[-1].rows for a in found.asked)


# --- memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "ranks", "interleave", "held"),
    [
        (10, 4, 1, [3, 3, 2, 2]),
        (10, 4, 4, [4, 4, 2, 0]),
        (130, 8, 16, [18] + [16] * 7),
        (448, 8, 64, [64] * 7 + [0]),
        (449, 8, 64, [64] * 7 + [1]),
        (1, 4, 1, [1, 0, 0, 0]),
    ],
)
def test_tokens_of_a_rank(length: int, ranks: int, interleave: int, held: list[int]) -> None:
    assert [local_tokens(length, ranks, rank, interleave) for rank in range(ranks)] == held


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 256))
def test_ranks_hold_every_token_once(length: int, ranks: int, interleave: int) -> None:
    held = [local_tokens(length, ranks, rank, interleave) for rank in range(ranks)]
    assert sum(held) == length
    assert max(held) == held[0]


def test_dcp_multiplies_buffers_and_divides_the_cache() -> None:
    one, eight = memory(recipe("glm-tp8")), memory(recipe("glm-tp8-dcp8"))
    for before, after in zip(one.parts[:-1], eight.parts[:-1], strict=True):
        assert after.size == 8 * before.size == 8 * after.alone
    assert eight.parts[-1].size == one.parts[-1].size // 8
    for part in (*one.parts, *eight.parts):  # the formula that is shown is the one computed
        text = re.sub(r" of \d+", "", part.formula).replace(" x ", "*")
        assert eval(re.sub(r"[A-Za-z]+", "", text)) == part.size  # noqa: S307 - our own text
    big, small = eight.cards[1], eight.cards[0]
    assert small.gib == 32
    assert small.left < 0  # the weights alone are larger
    assert big.tokens is not None
    # Seed 002 was told 1,357,696 tokens by vLLM at TP 8, DCP 2, which needs activations as well
    seed = memory(recipe("glm-tp8-dcp2")).cards[1].tokens
    assert seed is not None
    assert 1_357_696 < seed < 1.1 * 1_357_696


# --- vLLM's own functions, taken from the patched trees and run ----------------------------


def source(line: str, path: str) -> str:
    app = App(report=Reporter(quiet=True), patches=ROOT / "patches")
    state = apply_line(app.line(line), app.sources, upstreams=["vllm"])["vllm"]
    entry = StoredTree(state.store.reader, state.tree.tree).get(path.encode())
    assert entry is not None
    return entry.data.decode()


def function(text: str, name: str, **names: Any) -> Any:
    """One function of a module, run on its own with stand-ins for what it uses."""
    node = next(
        n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name
    )
    node.returns, node.decorator_list = None, []
    for argument in node.args.args:
        argument.annotation = None
    module = ast.Module(body=[node], type_ignores=[])
    exec(compile(ast.fix_missing_locations(module), "<vllm>", "exec"), names)  # noqa: S102
    return names[name]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class _Mode:
    NONE = "none"


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", find_recipes(FOLDER))
def test_captured_sizes_are_vllms(line: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        is_device_capability_family=lambda family: family == 120
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    text = source(line, "vllm/config/vllm.py")
    choose = function(text, "_set_cudagraph_sizes", CUDAGraphMode=_Mode, logger=None)
    read = recipe(name)
    compilation = SimpleNamespace(
        cudagraph_mode="full", max_cudagraph_capture_size=None, cudagraph_capture_sizes=None,
        pass_config=SimpleNamespace(enable_sp=False), post_init_cudagraph_sizes=lambda: None,
    )  # fmt: skip
    config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=False), compilation_config=compilation,
        num_speculative_tokens=read.drafts.tokens, uniform_decode_query_len=read.rows_a_request,
        scheduler_config=SimpleNamespace(
            max_num_seqs=read.limits.max_num_seqs,
            max_num_batched_tokens=read.limits.max_num_batched_tokens,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=8), performance_mode="balanced",
        speculative_config=SimpleNamespace(uses_dynamic_speculative_decoding=lambda: False),
    )  # fmt: skip
    choose(config)
    theirs = set(compilation.cudagraph_capture_sizes)
    ours = set(graph_sizes(read))
    if line == "next":  # which adds batches of whole requests, the largest of which we know
        assert ours <= theirs
        query = read.rows_a_request
        more = {size for size in theirs - ours if size <= read.limits.max_num_seqs * query}
        assert all(size % query == 0 for size in more)
        assert max(more | set(captured(read, query))) == max(captured(read, query))
    else:
        assert ours == theirs


@pytest.mark.real
@pytest.mark.parametrize("line", ["infernal", "next"])
def test_the_drafts_width_is_vllms(line: str) -> None:
    text = source(line, "vllm/v1/attention/backends/mla/compressor_utils.py")
    width = function(text, "get_dspark_swa_index_width", cdiv=cdiv, _DSPARK_SWA_INDEX_ALIGNMENT=64)
    assert "_DSPARK_SWA_INDEX_ALIGNMENT = 64" in text
    for tokens in (1, 5, 64, 65):
        found = derive(recipe("dsv4-layers-tp8", f"tokens={tokens}"))
        assert {a.shape.topk for a in found.asked if a.who == "draft"} == {width(128, tokens)}


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dcp", [1, 2, 4, 8])
def test_the_warmups_prompt_is_the_patchs(line: str, dcp: int) -> None:
    text = source(line, "vllm/v1/worker/gpu/warmup.py")
    prompt = function(text, "_mixed_warmup_decode_prompt_len")([64], dcp)
    found = derive(recipe("glm-tp8", f"dcp={dcp}"))
    assert prompt in {r.rows for a in found.asked for r in a.rows if r.when == "warmup"}


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_the_scratch_is_the_patchs(line: str, dcp: int) -> None:
    text = source(line, "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py")
    torch = SimpleNamespace(
        bfloat16=SimpleNamespace(itemsize=2), float32=SimpleNamespace(itemsize=4)
    )
    need = function(
        text, "_decode_scratch_bytes", cdiv=cdiv, torch=torch, _MAX_DECODE_ROWS=64, _SPLIT_SIZE=64
    )(8 * dcp, 512, 2048)
    scratch = memory(recipe("glm-tp8", f"dcp={dcp}")).parts[0].size
    # FlashInfer 0.7 takes the LSE from scratch too, where it is given no buffer
    assert need - scratch == (64 * 8 * dcp * 4 if line == "next" else 0)
