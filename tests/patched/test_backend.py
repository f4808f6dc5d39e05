"""What the SM120 backend and implementation declare, allocate and refuse."""

import os
import sys

import launcher
import layers
import pins
import pytest
import ranks
import torch
from device import DEVICE
from layers import TOPK, make_config, make_impl, patched_launcher
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import (
    DeepseekV4FlashInferMLASparseBackend,
)
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse as backend_module
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm120 as sm120_module
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseMetadata,
    FlashInferMLASparseSM120Backend,
    _get_workspace_buffer,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import (
    FlashInferMLASparseSM120Impl,
)
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility
from vllm.v1.worker.utils import select_common_block_size


@pytest.fixture(autouse=True)
def on_device():
    with DEVICE:
        yield


def metadata(rows: int) -> FlashInferMLASparseMetadata:
    """One request of 64 tokens in block 1, ``rows`` decode rows."""
    starts = torch.tensor([0, rows], dtype=torch.int32)
    return FlashInferMLASparseMetadata(
        num_reqs=1,
        max_query_len=rows,
        max_seq_len=64,
        num_actual_tokens=rows,
        query_start_loc=starts,
        slot_mapping=torch.full((rows,), -1),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        req_id_per_token=torch.zeros(rows, dtype=torch.int32),
        seq_lens=torch.tensor([64], dtype=torch.int32),
        num_decodes=1,
        num_prefills=0,
        num_decode_tokens=rows,
        topk_tokens=TOPK,
    )


# Dense-prefill flag


def test_no_dense_prefill_is_declared():
    assert not FlashInferMLASparseSM120Impl.supports_dense_mha_prefill


# Kernel blocks


def test_flashinfer_is_given_64_row_pages(config):
    backend = FlashInferMLASparseSM120Backend
    assert select_common_block_size(64, [backend]) == 64
    block = select_common_block_size(256, [backend])
    assert block == (256 if pins.VIEWS_LARGE_BLOCKS else 64)
    impl = make_impl()
    impl.topk_indices_buffer[0, :2] = torch.tensor([0, block - 1])
    launcher.calls.clear()
    with patched_launcher():
        cache = torch.zeros(2, block, 656, dtype=torch.uint8)
        attn_metadata = metadata(1)
        attn_metadata.block_size = block
        impl.forward_mqa(torch.zeros(1, 8, 576).bfloat16(), cache, attn_metadata, None)
    (call,) = launcher.calls
    assert call["kv_cache"].shape == (2 * block // 64, 1, 64, 656)
    assert call["block_tables"][0, 0].tolist()[:3] == [block, 2 * block - 1, -1]
    assert backend.supports_block_size(256)
    assert not backend.supports_block_size(32)


def test_dsv4_pages_are_those_flashinfer_has():
    """64 rows in the primary cache; 64 and 2 in the compressed ones."""
    assert select_common_block_size(64, [DeepseekSparseSWABackend]) == 64
    (block,) = DeepseekV4FlashInferMLASparseBackend.get_supported_kernel_block_sizes()
    assert (block // 4, block // 128) == (64, 2)


# Scratch


def test_scratch_is_taken_when_built_and_keyed_by_device(config):
    impl = make_impl()
    assert impl._workspace_buffer is not None
    assert impl._workspace_buffer is _get_workspace_buffer(DEVICE)
    other = _get_workspace_buffer(torch.device("meta"))
    assert other.device.type == "meta"
    assert _get_workspace_buffer(DEVICE).device.type == DEVICE.type
    assert make_impl()._workspace_buffer is impl._workspace_buffer


def test_scratch_covers_the_largest_decode_call(config, monkeypatch):
    monkeypatch.setattr(backend_module, "_fi_sparse_workspaces", {})
    monkeypatch.setenv("VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE", "1024")
    impl = make_impl(num_heads=16)
    splits = TOPK // 64
    assert impl._workspace_buffer.numel() >= 64 * 16 * splits * (512 * 2 + 4)


def scratch_on_rank(rank, world, rendezvous):
    backend_module._fi_sparse_workspaces.clear()
    os.environ["VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE"] = "1024"
    with ranks.model_parallel(rank, world, world, rendezvous, make_config(world, world)):
        return make_impl(num_heads=8)._workspace_buffer.numel()


def test_scratch_counts_the_heads_of_all_ranks():
    """Under DCP a decode query carries them."""
    splits = TOPK // 64 * (512 * 2 + 4)
    lse = 4 if pins.SCRATCH_HOLDS_LSE else 0
    assert ranks.run(scratch_on_rank, 2) == [64 * 16 * (splits + lse)] * 2


# Forward, one rank


def test_one_rank_asks_for_no_counts_and_no_lse(config):
    impl = make_impl()
    assert (impl.dcp_world_size, impl.dcp_rank) == (1, 0)
    impl.topk_indices_buffer[:2, :3] = torch.tensor([0, 5, 9])
    cache = torch.zeros(2, 64, 656, dtype=torch.uint8)
    launcher.calls.clear()
    with patched_launcher():
        q = torch.randn(2, 8, 576).bfloat16()
        out, lse = impl.forward_mqa(q, cache, metadata(2), None)
    assert out.shape == (2, 8, 512)
    assert lse is None
    (call,) = launcher.calls
    assert call["seq_lens"] is None
    assert call["block_tables"][0, 0].tolist()[:4] == [64, 69, 73, -1]


def test_one_rank_launches_nothing_more(config, monkeypatch):
    """Of what DCP needs, nothing runs."""

    def fail(*args, **kwargs):
        raise AssertionError("for DCP only")

    if pins.MASKS_EMPTY_ROWS:
        monkeypatch.setattr(sm120_module, "mask_empty_rows_", fail)
    monkeypatch.setattr(sm120_module, "triton_filter_and_convert_dcp_index", fail)
    impl = make_impl()
    allocated = []
    new_empty = torch.Tensor.new_empty

    def record(self, shape, **kwargs):
        # Not the stand-in's, nor Triton's.
        if sys._getframe(1).f_code.co_filename == sm120_module.__file__:
            allocated.append(shape)
        return new_empty(self, shape, **kwargs)

    monkeypatch.setattr(torch.Tensor, "new_empty", record)
    with patched_launcher():
        q = torch.randn(2, 8, 576).bfloat16()
        impl.forward_mqa(q, torch.zeros(2, 64, 656, dtype=torch.uint8), metadata(2), None)
    assert allocated == [(2, 8, 512)]


def test_the_models_scale_format_reaches_flashinfer():
    """A DeepSeek cache has scales of powers of two, a GLM cache any."""
    formats = []
    for model_type in ("deepseek_v32", "glm_moe_dsa"):
        launcher.calls.clear()
        with set_current_vllm_config(make_config(model_type=model_type)), patched_launcher():
            q = torch.zeros(1, 8, 576).bfloat16()
            cache = torch.zeros(2, 64, 656, dtype=torch.uint8)
            make_impl().forward_mqa(q, cache, metadata(1), None)
        formats += [call["kv_scale_format"] for call in launcher.calls]
    assert formats == ["pow2_fp32", "arbitrary_fp32"]


def test_no_rows_do_not_fail(config):
    """They reach FlashInfer only where it takes them."""
    impl = make_impl()
    launcher.calls.clear()
    with patched_launcher():
        out, lse = impl.forward_mqa(
            torch.empty(0, 8, 576, dtype=torch.bfloat16),
            torch.zeros(2, 64, 656, dtype=torch.uint8),
            metadata(0),
            None,
        )
    assert out.shape == (0, 8, 512)
    assert lse is None
    assert not launcher.calls or not pins.NO_ROWS_RAISE


# DCP


def test_lse_is_declared_base_2():
    assert FlashInferMLASparseSM120Impl.can_return_lse_for_decode
    assert FlashInferMLASparseSM120Impl.lse_base_on_e is False
    assert FlashInferMLASparseSM120Impl.supports_dcp


def test_dcp_without_a_group_is_refused():
    with (
        set_current_vllm_config(make_config(tp=4, dcp=4)),
        pytest.raises(RuntimeError, match=r"decode_context_parallel_size=4.*1 rank"),
    ):
        make_impl()


def build_on_rank(rank, world, rendezvous, dcp, config_dcp, num_heads):
    """``(dcp_world_size, dcp_rank)``, or the error's text."""
    with (
        ranks.model_parallel(rank, world, dcp, rendezvous, make_config(world, dcp)),
        set_current_vllm_config(make_config(world, config_dcp)),
    ):
        try:
            impl = make_impl(num_heads)
        except (RuntimeError, NotImplementedError) as error:
            return str(error)
        return impl.dcp_world_size, impl.dcp_rank


def test_dcp_rank_and_size_are_the_groups():
    assert ranks.run(build_on_rank, 4, 2, 2, 8) == [(2, 0), (2, 1), (2, 0), (2, 1)]


def test_another_size_than_the_groups_is_refused():
    for error in ranks.run(build_on_rank, 4, 2, 4, 8):
        assert "decode_context_parallel_size=4" in error
        assert "2 rank" in error


def test_a_draft_at_dcp_1_inside_a_group_is_built():
    alone = [(1, 0), (1, 0)]
    member = [(2, 0), (2, 1)]
    expected = alone if pins.DRAFT_LEAVES_GROUP else member
    assert ranks.run(build_on_rank, 2, 2, 1, 8) == expected


def test_gathered_heads_without_a_kernel_are_refused():
    for error in ranks.run(build_on_rank, 2, 2, 2, 12):
        assert "24 heads" in error
        assert "128" in error


class FakeLayer(AttentionLayerBase):
    """What the check at startup looks at: a layer with an implementation."""

    def __init__(self, impl):
        self.impl = impl

    def get_attn_backend(self):
        return FlashInferMLASparseSM120Backend

    def get_kv_cache_spec(self, vllm_config):
        return None


def start_with_drafts_on_rank(rank, world, rendezvous, interleave):
    """The objection to drafts, of vLLM's own check of every layer; none if it starts."""
    config = make_config(world, world, interleave=interleave)
    with ranks.model_parallel(rank, world, world, rendezvous, config):
        layer = FakeLayer(make_impl(num_heads=8))
    config.compilation_config.static_forward_context["layer"] = layer
    config.speculative_config = object()
    try:
        check_attention_cp_compatibility(config)
    except AssertionError as error:
        return str(error)
    return None


def test_drafts_start_with_dcp():
    assert ranks.run(start_with_drafts_on_rank, 2, 1) == [None] * 2


def test_drafts_with_an_interleave_start_where_the_indexer_takes_one():
    for objection in ranks.run(start_with_drafts_on_rank, 2, 16):
        if pins.INDEXER_TAKES_INTERLEAVE:
            assert objection is None
        else:
            assert "MTP with cp_kv_cache_interleave_size > 1" in objection


def forward_on_rank(rank, world, rendezvous):
    """Two rows; rank 0 alone owns entries, of the first. Out, LSE and the call."""
    config = make_config(world, world)
    with ranks.model_parallel(rank, world, world, rendezvous, config), DEVICE:
        impl = make_impl(num_heads=8)
        impl.topk_indices_buffer[0, :2] = torch.tensor([0, 4], dtype=torch.int32)
        with patched_launcher():
            out, lse = impl.forward_mqa(
                torch.ones(2, 8 * world, 576).bfloat16(),
                torch.full((2, 64, 656), 56, dtype=torch.uint8),
                metadata(2),
                None,
            )
    (call,) = launcher.calls
    return {
        "out": out.float().cpu().numpy(),
        "lse": lse.cpu().numpy(),
        "counts": call["seq_lens"].tolist(),
        "ids": call["block_tables"][:, 0, :3].tolist(),
    }


def test_empty_rows_give_zero_and_minus_infinity():
    first, second = ranks.run(forward_on_rank, 2)
    assert first["counts"] == [2, 0]
    assert second["counts"] == [0, 0]
    assert sorted(first["ids"][0][:2]) == [64, 66]
    assert first["ids"][0][2] == -1
    assert first["out"].shape == (2, 16, 512)
    assert first["lse"].shape == (2, 16)
    assert first["lse"].dtype == "float32"
    assert (first["out"][0] != 0).all()
    assert (first["lse"][0] > -1000).all()
    for out, lse in [
        (first["out"][1], first["lse"][1]),
        (second["out"], second["lse"]),
    ]:
        assert (out == 0).all()
        assert (lse == float("-inf")).all()


@pytest.mark.skipif(not pins.MASKS_EMPTY_ROWS, reason="FlashInfer's answer needs no masking")
def test_masking_leaves_other_rows_and_repairs_garbage():
    from vllm.v1.attention.backends.mla.sparse_utils import mask_empty_rows_

    out = torch.full((3, 12, 512), float("nan")).bfloat16()
    lse = torch.full((3, 12), -1e30)
    out[1], lse[1] = 1, 7
    mask_empty_rows_(out, lse, torch.tensor([0, 5, 0], dtype=torch.int32))
    assert (out[[0, 2]] == 0).all()
    assert (lse[[0, 2]] == float("-inf")).all()
    assert (out[1] == 1).all()
    assert (lse[1] == 7).all()


def test_layers_module_is_vllms_own_layer():
    assert layers.MLAAttention.__module__.startswith("vllm.")
