"""Postconditions of the patches to the SM120 sparse MLA implementation."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.static.api import Api
from tests.static.fakes import Calls, Device, Tensor, torch
from tests.static.postconditions import of
from tests.static.source import (
    Missing,
    attributes_in,
    calls_in,
    constant,
    cut,
    find,
    member,
    neighbours,
)

if TYPE_CHECKING:
    import inspect

    from tests.static.trees import Pair, View

IMPL = "FlashInferMLASparseSM120Impl"
BACKEND = "FlashInferMLASparseSM120Backend"
KERNEL = "flashinfer_trtllm_batch_decode_with_kv_cache_mla"
BY_RANK, WHOLE = "triton_filter_and_convert_dcp_index", "triton_convert_req_index_to_global_index"
MASK = "mask_empty_rows_"
ROWS, HEADS, TOPK, RANK_ID, INTERLEAVE = 3, 8, 2048, 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """What one ``forward_mqa`` did: its calls, the fakes that it was given, what it returned."""

    calls: Calls
    ids: Tensor
    slots: Tensor
    counts: Tensor
    out: Tensor
    lse: Tensor | None

    @property
    def kernel(self) -> dict[str, Any]:
        """Keywords of the one call to the decode kernel."""
        ((args, given),) = self.calls.of(KERNEL)
        assert not args
        return given


def drive(view: View, world: int, rows: int = ROWS) -> Driven:
    """Run the implementation's ``forward_mqa`` with fakes, as one of ``world`` ranks."""
    impl = find(view, IMPL)
    ids, slots, counts = Tensor(16, TOPK), Tensor(rows, TOPK), Tensor(rows, dtype="int32")
    calls = Calls(
        {
            BY_RANK: (slots, counts),
            WHOLE: slots,
            KERNEL: Tensor(rows, 1, HEADS * world, 512),
            "flat_kv_row_view": (Tensor(1024, 656), 64),
        }
    )
    given = {"torch": torch(), "cast": lambda _, value: value}
    self = SimpleNamespace(
        num_heads=HEADS, dcp_world_size=world, dcp_rank=RANK_ID if world > 1 else 0,
        need_to_return_lse_for_decode=world > 1, topk_indices_buffer=ids, index_group=None,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, scale=1.0,
        kv_scale_format="arbitrary_fp32", _workspace_buffer=Tensor(1 << 28),
    )  # fmt: skip
    for node in impl.body:
        if isinstance(node, ast.FunctionDef) and node.name not in ("__init__", "forward_mqa"):
            method = cut(node, calls.namespace(node, given))
            setattr(self, node.name, method.__get__(self))
    metadata = SimpleNamespace(
        req_id_per_token=Tensor(16), block_table=Tensor(2, 4), block_size=64, topk_tokens=TOPK,
        cp_kv_cache_interleave_size=INTERLEAVE, num_decode_tokens=rows,
    )  # fmt: skip
    forward = member(impl, "forward_mqa")
    run = cut(forward, calls.namespace(forward, given))
    query = Tensor(rows, HEADS * world, 576)
    out, lse = run(self, query, Tensor(16, 64, 656), metadata, SimpleNamespace())
    return Driven(calls=calls, ids=ids, slots=slots, counts=counts, out=out, lse=lse)


def launcher(pair: Pair) -> inspect.Signature:
    """Signature of FlashInfer's decode function."""
    api = Api(pair.flashinfer, "flashinfer")
    (found,) = api.signatures("flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla")
    return found


def is_flashinfer_0_7(pair: Pair) -> bool:
    """Whether the launcher lets its caller choose the LSE's base; from there on it answers a
    count of 0 with out 0 and lse -inf, and a call without rows with nothing."""
    return "return_lse_base" in launcher(pair).parameters


@of("dense-prefill-flag")
def no_dense_prefill_is_declared(pair: Pair) -> None:
    impl = find(pair.vllm, IMPL)
    assert constant(impl, "supports_dense_mha_prefill") is False


@of("kernel-block-size")
def only_64_row_pages_are_advertised(pair: Pair) -> None:
    sizes = member(find(pair.vllm, BACKEND), "get_supported_kernel_block_sizes")
    assert cut(sizes, {})() == [64]


@of("per-device-scratch")
def each_device_has_one_buffer_of_its_own(pair: Pair) -> None:
    function = find(pair.vllm, "_get_workspace_buffer")
    given = {"torch": torch(), "envs": SimpleNamespace(VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE=100)}
    buffers: dict[Device, Tensor] = {}
    given |= {"_fi_sparse_workspaces": buffers, "_fi_sparse_workspace": None}
    get = cut(function, given)
    first, second = get(Device("cuda:0")), get(Device("cuda:1"))
    assert first is not second, "two devices share a buffer"
    assert (first.device, second.device) == (Device("cuda:0"), Device("cuda:1"))
    assert get(Device("cuda:0")) is first, "a second layer gets another buffer"
    assert get(Device("cuda")) is first, "'cuda' is not the current device"
    assert first.numel() == 100
    larger = get(Device("cuda:0"), 1000)
    assert larger.numel() >= 1000
    assert get(Device("cuda:0")) is larger
    assert get(Device("cuda:1")) is second


@of("per-device-scratch")
def scratch_is_sized_for_the_gathered_heads(pair: Pair) -> None:
    formula = find(pair.vllm, "_decode_scratch_bytes")
    size = cut(formula, {
        "torch": torch(), "cdiv": lambda a, b: -(-a // b), "_MAX_DECODE_ROWS": 64,
        "_SPLIT_SIZE": 64,
    })  # fmt: skip
    # Rows, heads, splits of 64 ids, 512 bf16 values and a float32 LSE; 0.7 adds the merged LSE
    merged = 4 if is_flashinfer_0_7(pair) else 0
    for heads, top_k, splits in ((8, 2048, 32), (64, 2048, 32), (128, 2048, 32), (16, 512, 8),
                                 (8, 65, 2)):  # fmt: skip
        assert size(heads, 512, top_k) == 64 * heads * (splits * 1028 + merged), (heads, top_k)
    constants = {
        node.targets[0].id: node.value.value
        for node in _module_of(pair.vllm, "_decode_scratch_bytes").body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    assert (constants["_MAX_DECODE_ROWS"], constants["_SPLIT_SIZE"]) == (64, 64)
    (call,) = calls_in(member(find(pair.vllm, IMPL), "__init__"), "_decode_scratch_bytes")
    assert {"num_heads", "dcp_world_size"} <= attributes_in(call.args[0])


@of("per-device-scratch")
def scratch_is_taken_while_the_backend_is_built(pair: Pair) -> None:
    impl = find(pair.vllm, IMPL)
    for method in impl.body:
        taken = list(calls_in(method, "_get_workspace_buffer"))
        built = isinstance(method, ast.FunctionDef) and method.name == "__init__"
        assert bool(taken) == built, f"{getattr(method, 'name', method)} takes it, or doesn't"
    top_level = [node for node in member(impl, "__init__").body if isinstance(node, ast.Assign)]
    assert any(list(calls_in(node, "_get_workspace_buffer")) for node in top_level)


@of("dcp-bookkeeping")
def what_cannot_be_served_is_refused(pair: Pair) -> None:
    function = find(pair.vllm, "_check_dcp")
    heads = _constant_tuple(_module_of(pair.vllm, "_check_dcp"), "_SUPPORTED_NUM_HEADS")
    run = cut(function, {"_SUPPORTED_NUM_HEADS": heads})
    takes = {arg.arg for arg in function.args.args}

    def verdict(num_heads: int, group: int, asked: int, prefill: int = 1) -> str:
        config = SimpleNamespace(decode_context_parallel_size=asked)
        words = {"pcp_world_size": prefill} if "pcp_world_size" in takes else {}
        try:
            run(num_heads=num_heads, dcp_world_size=group, parallel_config=config, **words)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return str(error)
        return ""

    for world in (1, 2, 4, 8):
        assert not verdict(8, world, world), world
    assert "8" in verdict(8, 1, 8), "a config of 8 ranks without a group passes"
    assert verdict(8, 2, 8)
    assert verdict(8, 4, 2)
    assert not verdict(8, 8, 1), "a draft at DCP 1 inside a larger group is refused"
    assert "24" in verdict(8, 3, 3), "24 gathered heads pass, and no kernel has them"
    assert not verdict(6, 1, 1), "one rank is held to what only DCP needs"
    if "pcp_world_size" in takes:
        assert verdict(8, 2, 2, prefill=2)


@of("dcp-bookkeeping")
def it_is_refused_while_the_backend_is_built(pair: Pair) -> None:
    built = member(find(pair.vllm, IMPL), "__init__")
    (call,) = calls_in(built, "_check_dcp")
    assert any(isinstance(node, ast.Expr) and node.value is call for node in built.body), (
        "only under a condition"
    )
    assert {"num_heads", "dcp_world_size", "parallel_config"} <= attributes_in(call)


@of("index-mapping")
def ids_are_mapped_to_the_slots_of_this_rank(pair: Pair) -> None:
    driven = drive(pair.vllm, world=4)
    ((args, given),) = driven.calls.of(BY_RANK)
    assert not driven.calls.of(WHOLE)
    assert args[2].root is driven.ids
    assert (given["dcp_size"], given["dcp_rank"]) == (4, RANK_ID)
    assert given["cp_kv_cache_interleave_size"] == INTERLEAVE
    assert (given["BLOCK_SIZE"], given["NUM_TOPK_TOKENS"]) == (64, TOPK)
    assert given["return_valid_counts"] is True
    assert driven.kernel["block_tables"].root is driven.slots
    # One rank goes the old way, and counts nothing
    alone = drive(pair.vllm, world=1)
    assert len(alone.calls.of(WHOLE)) == 1
    assert not alone.calls.of(BY_RANK)


@of("index-mapping")
def unallocated_blocks_own_nothing(pair: Pair) -> None:
    for node in ast.walk(_module_of(pair.vllm, BY_RANK)):
        if isinstance(node, ast.If) and "DCP_SIZE" in ast.unparse(node.test):
            for one in node.body:
                if (
                    isinstance(one, ast.AugAssign)
                    and ast.unparse(one) == "is_invalid_tok |= base < 0"
                ):
                    return
    raise Missing("no kernel takes a negative block-table entry for one that it doesn't own")


@of("lse-plumbing")
def dcp_is_declared(pair: Pair) -> None:
    impl = find(pair.vllm, IMPL)
    assert constant(impl, "supports_dcp") is True
    assert constant(impl, "can_return_lse_for_decode") is True


@of("lse-plumbing")
def the_lse_is_said_to_be_base_2(pair: Pair) -> None:
    assert constant(find(pair.vllm, IMPL), "lse_base_on_e") is False
    if is_flashinfer_0_7(pair):
        assert drive(pair.vllm, world=4).kernel["return_lse_base"] == "base2"


@of("lse-plumbing")
def the_lse_is_asked_for_and_returned(pair: Pair) -> None:
    driven = drive(pair.vllm, world=4)
    kernel = driven.kernel
    assert kernel["seq_lens"].root is driven.counts, "the kernel isn't told how many ids count"
    assert kernel["return_lse"] is True
    assert kernel["lse"].shape == (ROWS, 4 * HEADS), "lse has not the query's heads"
    assert kernel["out"].shape == (ROWS, 1, 4 * HEADS, 512), "out has not the query's heads"
    assert driven.lse is not None
    assert driven.lse.root is kernel["lse"].root
    assert driven.out.root is kernel["out"].root
    assert driven.out.shape == (ROWS, 4 * HEADS, 512)
    alone = drive(pair.vllm, world=1)
    assert alone.kernel["seq_lens"] is None
    assert not alone.kernel["return_lse"]
    assert alone.lse is None


@of("lse-plumbing")
def rows_without_ids_weigh_nothing(pair: Pair) -> None:
    driven = drive(pair.vllm, world=4)
    if is_flashinfer_0_7(pair):  # an empty row is told by its count alone
        assert driven.kernel["seq_lens"].root is driven.counts
        return
    order = [name for name, _, _ in driven.calls.made]
    assert order.index(MASK) > order.index(KERNEL)
    ((args, _),) = driven.calls.of(MASK)
    assert [one.root for one in args] == [driven.out.root, driven.kernel["lse"].root, driven.counts]
    mask = find(pair.vllm, MASK)
    launched = [
        node.func.value.id
        for node in ast.walk(mask)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    ]
    (kernel,) = (find(pair.vllm, name) for name in launched)
    stored = [ast.unparse(one.args[1]) for one in calls_in(kernel, "store")]
    assert any("float('-inf')" in one for one in stored)
    assert any("zeros" in one for one in stored)
    (test,) = (node.test for node in ast.walk(kernel) if isinstance(node, ast.If))
    assert "valid_count" in ast.unparse(test)
    assert ast.unparse(test).endswith("== 0")


@of("lse-plumbing", next="FlashInfer 0.7 returns from a call without rows")
def a_call_without_rows_reaches_no_kernel_that_raises(pair: Pair) -> None:
    if is_flashinfer_0_7(pair):
        return
    driven = drive(pair.vllm, world=4, rows=0)
    assert not driven.calls.of(KERNEL)
    assert driven.out.shape == (0, 4 * HEADS, 512)
    assert driven.lse is not None
    assert driven.lse.shape == (0, 4 * HEADS)


@of("mtp-interleave")
def drafts_with_an_interleave_are_declared(pair: Pair) -> None:
    impl = find(pair.vllm, IMPL)
    assert constant(impl, "supports_mtp_with_cp_non_trivial_interleave_size") is True


def _module_of(view: View, name: str) -> ast.Module:
    """The definitions and constants of the module that defines ``name``."""
    from tests.static.source import PLACES

    wanted = neighbours(view, name)[name]
    for path in PLACES:
        module = view.module(path)
        if module is not None and wanted in module.body:
            return module
    raise Missing(f"no module of {name}")


def _constant_tuple(module: ast.Module, name: str) -> tuple[int, ...]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return tuple(ast.literal_eval(node.value))
    raise Missing(f"no {name}")
