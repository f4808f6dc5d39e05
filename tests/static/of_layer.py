"""Postconditions of the patches to the MLA attention layer and to the merge."""

from __future__ import annotations

import ast
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.static.fakes import Calls, Tensor, torch
from tests.static.postconditions import of
from tests.static.source import Missing, attributes_in, calls_in, cut, cut_body, find, member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.static.trees import Pair


@of(
    "dense-prefill-flag",
    infernal="vLLM 0.28.0's layer heeds the flag",
)
def the_layer_builds_no_dense_prefill_without_one(pair: Pair) -> None:
    layer = find(pair.vllm, "MLAAttention")
    for node in ast.walk(member(layer, "__init__")):
        if isinstance(node, ast.If) and "supports_dense_mha_prefill" in attributes_in(node.test):
            built = [*calls_in(ast.Module(node.body, []), "get_mla_prefill_backend")]
            assert not built, "it is built where the implementation has no dense path"
            assert list(calls_in(ast.Module(node.orelse, []), "get_mla_prefill_backend"))
            return
    raise Missing("MLAAttention builds a dense prefill backend whatever the implementation says")


def merged_rows(pair: Pair, *, mha_tokens: int, decode: Any = None) -> tuple[Any, Any]:
    """Lengths and boundaries that the layer hands to the merge, for 2 decodes and 2 prefills.

    ``decode`` is the decode part of non-sparse metadata; sparse metadata has no such attribute.
    """
    layer = find(pair.vllm, "MLAAttention")
    for node in ast.walk(layer):
        if isinstance(node, ast.If) and list(calls_in(node, "combine")):
            innermost = node
    given: dict[str, Any] = {}

    def combine(out: Any, lse: Any, **words: Any) -> Any:
        given.update(words)
        return out

    metadata = SimpleNamespace(
        num_decodes=2, num_prefills=2, num_reqs=4, num_decode_tokens=2, num_actual_tokens=9,
        seq_lens=[10, 20, 30, 40], query_start_loc=[0, 1, 2, 5, 9],
    )  # fmt: skip
    if decode is not None:
        metadata.decode = decode
    self = SimpleNamespace(
        impl=SimpleNamespace(dcp_world_size=4), use_pcp=False, num_heads=8,
        dcp_manager=SimpleNamespace(combine=combine),
    )  # fmt: skip
    namespace = {
        "torch": torch(), "cast": lambda _, value: value, "self": self, "lse": Tensor(9, 8),
        "attn_metadata": metadata, "attn_out": Tensor(9, 8, 512), "num_mha_tokens": mha_tokens,
        "num_mqa_tokens": 9 - mha_tokens,
    }  # fmt: skip
    cut_body(innermost.body, "merge", namespace)
    return given["seq_lens"], given["query_start_loc"]


@of("dcp-prefill-rows")
def every_row_that_took_the_mqa_path_is_merged(pair: Pair) -> None:
    rows = merged_rows(pair, mha_tokens=0)
    assert rows == ([10, 20, 30, 40], [0, 1, 2, 5, 9]), f"prefill rows are left out: {rows}"
    assert merged_rows(pair, mha_tokens=7) == ([10, 20], [0, 1, 2])
    # Dense metadata is handed over as it was: this rank's own lengths
    local = SimpleNamespace(seq_lens=[3, 5])
    assert merged_rows(pair, mha_tokens=7, decode=local) == ([3, 5], [0, 1, 2])


CAPACITY = 32


def _manager(pair: Pair) -> tuple[SimpleNamespace, dict[str, Callable[..., Any]]]:
    """A manager whose direct buffers hold ``CAPACITY`` rows, and its two choosers."""
    direct = SimpleNamespace(lse_reduce=lambda *_, **__: "direct", gather=lambda *_, **__: "direct")
    calls = Calls(
        {
            "get_direct_dcp_a2a_workspace": direct,
            "get_direct_dcp_q_gather_workspace": direct,
            **dict.fromkeys(
                ("dcp_a2a_lse_reduce", "cp_lse_ag_out_rs", "cp_lse_ag_out_ar"), "group"
            ),
        }
    )
    given = {
        "torch": torch(),
        "functools": functools,
        "logger": SimpleNamespace(info_once=lambda *_: None),
    }
    owner = find(pair.vllm, "MLADCPManager")
    choosers = {}
    for name in ("_init_combine", "_init_query_gather"):
        function = member(owner, name)
        choosers[name] = cut(function, calls.namespace(function, given))
    self = SimpleNamespace(
        group="group", device="cuda:0", max_num_tokens=CAPACITY, num_ubatches=1, use_a2a=True,
        padded_num_heads=None, _gather_query=lambda *_: "group",
    )  # fmt: skip
    return self, choosers


@of("dcp-direct-workspace")
def merges_that_do_not_fit_take_the_group(pair: Pair) -> None:
    self, choosers = _manager(pair)
    combine = choosers["_init_combine"](self, 8, 512, "bfloat16", False, False)
    for rows, way in ((1, "direct"), (CAPACITY, "direct"), (CAPACITY + 1, "group")):
        got = combine(Tensor(rows, 8, 512), Tensor(rows, 8), seq_lens=None, query_start_loc=None)
        assert got == way, (rows, got)


@of("dcp-direct-workspace")
def gathers_that_do_not_fit_take_the_group(pair: Pair) -> None:
    self, choosers = _manager(pair)
    gather = choosers["_init_query_gather"](self, 8, 576, "bfloat16")
    for rows, way in ((1, "direct"), (CAPACITY, "direct"), (CAPACITY + 1, "group")):
        assert gather(Tensor(rows, 8, 576)) == way, rows
