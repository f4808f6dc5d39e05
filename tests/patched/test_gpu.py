"""What only a CUDA device can show: graphs, no waiting for the host, no allocation, two cards."""

import contextlib
import importlib.util
from unittest import mock

import capturable
import device
import launcher
import layers
import pytest
import ranks
import torch
import vllm.utils.flashinfer as vllm_flashinfer
from device import DEVICE
from layers import TOPK, make_config, make_impl, patched_launcher
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse as backend_module
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseMetadata

pytestmark = pytest.mark.skipif(not device.ON_CUDA, reason="needs a CUDA device")

ROWS = 6
HEADS = 16
BLOCKS = 4


@contextlib.contextmanager
def capturable_launcher():
    """FlashInfer's kernel, on SM120; elsewhere the stand-in that a graph can hold."""
    if device.is_sm120():
        with patched_launcher():
            yield
        return
    with mock.patch.object(
        vllm_flashinfer,
        "flashinfer_trtllm_batch_decode_with_kv_cache_mla",
        capturable.trtllm_batch_decode_with_kv_cache_mla,
    ):
        yield


def metadata() -> FlashInferMLASparseMetadata:
    """Two requests of three rows each."""
    table = torch.tensor([[1, 3, 5, 7], [2, 4, 6, 8]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([600, 700], dtype=torch.int32, device=DEVICE)
    return FlashInferMLASparseMetadata(
        num_reqs=2,
        max_query_len=3,
        max_seq_len=700,
        num_actual_tokens=ROWS,
        query_start_loc=torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.full((ROWS,), -1, device=DEVICE),
        block_table=table,
        req_id_per_token=torch.tensor([0, 0, 0, 1, 1, 1], dtype=torch.int32, device=DEVICE),
        seq_lens=lengths,
        num_decodes=2,
        num_prefills=0,
        num_decode_tokens=ROWS,
        topk_tokens=TOPK,
    )


class Step:
    """Buffers of one step of one rank, refilled between steps as the model runner does."""

    def __init__(self, world: int, rank: int) -> None:
        self.impl = make_impl(num_heads=HEADS)
        # What a DCP group would have given.
        self.impl.dcp_world_size, self.impl.dcp_rank = world, rank
        self.impl.need_to_return_lse_for_decode = world > 1
        self.world, self.rank = world, rank
        self.metadata = metadata()
        self.q = torch.empty(ROWS, HEADS, 576, dtype=torch.bfloat16, device=DEVICE)
        self.cache = torch.empty(2 * BLOCKS + 1, 64, 656, dtype=torch.uint8, device=DEVICE)
        self.fill(0)

    def fill(self, seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.q.copy_(torch.randn(ROWS, HEADS, 576, generator=gen))
        kv = torch.randn((2 * BLOCKS + 1) * 64, 576, generator=gen)
        self.cache.copy_(layers.reference.pack(kv).view(self.cache.shape))
        ids = torch.randint(0, BLOCKS * 64 * self.world, (ROWS, TOPK), generator=gen)
        # One row with nothing on this rank, another with a rank's worth of gaps.
        other = (self.rank + 1) % self.world
        ids[seed % ROWS] = ids[seed % ROWS] // self.world * self.world + other
        ids[(seed + 2) % ROWS, ::3] = -1
        self.impl.topk_indices_buffer[:ROWS] = ids.int()

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.impl.forward_mqa(self.q, self.cache, self.metadata, None)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By the launcher whose contract is the pinned version's."""
        with patched_launcher():
            return self.run()


@pytest.fixture(params=[(2, 0), (4, 3), (8, 5)], ids=lambda p: f"dcp{p[0]}-rank{p[1]}")
def step(request, config):
    return Step(*request.param)


def check(got, expected) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0.02, rtol=0.01)


def captured(step: Step) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]:
    """A graph of one step, as vLLM captures: warmed up on a side stream first."""
    with capturable_launcher():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step.run()
    return graph, results


def test_kernels_are_compiled():
    import triton

    assert not triton.knobs.runtime.interpret
    assert torch.cuda.is_available()


def test_a_graph_replays_on_new_inputs(step):
    graph, results = captured(step)
    for seed in (1, 2, 3):
        step.fill(seed)
        graph.replay()
        torch.cuda.synchronize()
        check(results, step.expected())
        empty = seed % ROWS
        assert (results[0][empty] == 0).all()
        assert (results[1][empty] == float("-inf")).all()
        assert torch.isfinite(results[1]).any()


def test_one_rank_replays_too(config):
    step = Step(1, 0)
    step.impl.topk_indices_buffer.clamp_(0, 64 * BLOCKS - 1)
    graph, (out, lse) = captured(step)
    assert lse is None
    graph.replay()
    expected, _ = step.expected()
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0.01)


@contextlib.contextmanager
def no_waiting():
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_for_nothing(step):
    with capturable_launcher():
        step.run()  # compiles
        with no_waiting():
            step.run()
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        step.q.sum().item()  # it would have shown


def test_a_replay_allocates_nothing(step):
    scratch = step.impl._workspace_buffer
    graph, _ = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "reserved_bytes.all.current"):
        assert after[name] == before[name], name
    assert step.impl._workspace_buffer is scratch
    assert backend_module._get_workspace_buffer(DEVICE) is scratch


def test_a_step_keeps_nothing_but_its_results(step):
    """The scratch is taken before; a graph's pool gets nothing that outlives the step."""
    with capturable_launcher():
        step.run()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        results = step.run()
        size = sum(-(-t.numel() * t.element_size() // 512) * 512 for t in results)
        assert torch.cuda.memory_allocated() == held + size


def test_two_devices_have_scratch_of_their_own(config):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices; here is one")
    first = backend_module._get_workspace_buffer(torch.device("cuda:0"), 1 << 20)
    second = backend_module._get_workspace_buffer(torch.device("cuda:1"), 1 << 20)
    assert (first.device.index, second.device.index) == (0, 1)
    with torch.cuda.device(1):
        assert backend_module._get_workspace_buffer(torch.device("cuda")) is second
    assert backend_module._get_workspace_buffer(torch.device("cuda:0")) is first


def test_flashinfers_own_kernel_is_used(config):
    if not device.is_sm120():
        pytest.skip("needs an SM120 card: elsewhere FlashInfer's kernel has a stand-in")
    step = Step(4, 1)
    launcher.calls.clear()
    got = step.run()
    assert not launcher.calls
    with mock.patch.object(
        vllm_flashinfer,
        "flashinfer_trtllm_batch_decode_with_kv_cache_mla",
        launcher.trtllm_batch_decode_with_kv_cache_mla,
    ):
        check(got, step.run())


def merge_topk_on_rank(rank, world, rendezvous, topk, lengths):
    """The indexer's own merge of per-rank top-k, from scores that all ranks share."""
    from vllm.model_executor.layers.sparse_attn_indexer import _merge_dcp_topk_global

    config = make_config(world, world, topk=topk)
    with ranks.model_parallel(rank, world, world, rendezvous, config):
        gen = torch.Generator().manual_seed(0)
        longest = max(lengths)
        scores = torch.randn(len(lengths), longest, generator=gen)
        mine = torch.full((len(lengths), topk), -1, dtype=torch.int32)
        local = torch.full((len(lengths), -(-longest // world)), float("-inf"))
        for row, length in enumerate(lengths):
            shard = scores[row, :length][rank::world]
            local[row, : len(shard)] = shard
            order = shard.argsort(descending=True)[:topk]
            mine[row, : len(order)] = order.int()
        mine = mine.to(DEVICE)
        _merge_dcp_topk_global(local.to(DEVICE), mine, topk, rank, world, 1)
        wanted = [
            set(scores[row, :length].argsort(descending=True)[:topk].tolist())
            for row, length in enumerate(lengths)
        ]
        return [set(r.tolist()) - {-1} == w for r, w in zip(mine, wanted, strict=True)]


@pytest.mark.parametrize("world", [2, 4])
def test_the_indexers_own_merge_gives_the_global_topk(world):
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs the CUTLASS DSL, which the top-k merge is written in")
    for answer in ranks.run(merge_topk_on_rank, world, 512, (3000, 100, 1, 513)):
        assert all(answer)
