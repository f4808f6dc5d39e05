"""The patched backend inside vLLM's own MLA attention layer, over DCP groups."""

import functools
from unittest import mock

import numpy as np
import pins
import pytest
import ranks
from layers import PREFILL_TOPK, TOPK, Batch, Problem, layers_on_rank, random_batch, run_layer
from vllm.model_executor.layers.attention import mla_attention

# bf16 output of bf16 inputs; the values are about 3 at most.
TOLERANCE = 0.03


BATCHES = {
    # Lengths 1, a block's edge, and one past it; ranks without a token of a request.
    "decode": random_batch((1, 64, 65, 130, 3), (1, 1, 1, 1, 1)),
    # Several query tokens a request, as MTP verifies them.
    "mtp": random_batch((8, 70, 131), (3, 3, 3), decode_threshold=3),
    # Decodes, then prefills, which take the same path.
    "mixed": random_batch((40, 129, 6, 150), (1, 1, 6, 5)),
    "prefill": random_batch((7, 133), (7, 4)),
    # Rows whose top-k lies on rank 0 alone, and rows without any.
    "empty-rows": Batch(
        lengths=(12, 40, 9),
        queries=(1, 1, 2),
        topk=((0, 4, 8), (), (0, 1, 2, 3), ()),
    ),
    # CUDA graphs pad a batch with rows that belong to no request, and for full
    # graphs with requests that have no rows. The top-k of such rows is stale.
    "padded": random_batch((33, 5), (1, 1), padded_rows=3),
    "padded-requests": random_batch((33, 5, 0, 0), (1, 1, 0, 0), padded_rows=2),
    # More rows than FlashInfer's decode kernels take.
    "many-rows": random_batch((80,), (70,), most=8),
}

# Requests whose query tokens end on both sides of a group's edge and of a round's, and
# that leave ranks without a token.
VERIFIED = random_batch((8, 66, 130, 300), (3, 3, 4, 3), decode_threshold=4)
WITH_PREFILLS = random_batch((65, 129, 18, 260), (2, 1, 6, 5), decode_threshold=2)

LAYOUTS = {
    f"{name}-interleave-{interleave}": (batch, {"interleave": interleave})
    for interleave in (16, 64)
    for name, batch in (("mtp", VERIFIED), ("mixed", WITH_PREFILLS))
}
if pins.VIEWS_LARGE_BLOCKS:
    LAYOUTS["large-blocks"] = (VERIFIED, {"block": 256})
    LAYOUTS["large-blocks-interleave-64"] = (WITH_PREFILLS, {"block": 256, "interleave": 64})
    LAYOUTS["gaps-between-blocks"] = (WITH_PREFILLS, {"gap": 128})

if pins.REPLICATES_QUERIES:
    LAYOUTS["replicated-query-mtp"] = (VERIFIED, {"replicated": True})
    LAYOUTS["replicated-query-mixed"] = (WITH_PREFILLS, {"replicated": True, "interleave": 16})

CASES = {name: (batch, {}) for name, batch in BATCHES.items()} | LAYOUTS
PROBLEMS = {
    world: {
        name: Problem(
            batch,
            heads=8 * world // 2,
            topk=TOPK if batch.rows <= 64 else PREFILL_TOPK,
            **layout,
        )
        for name, (batch, layout) in CASES.items()
    }
    for world in (2, 4)
}


@functools.cache
def answers(world: int, comm: str) -> list[dict]:
    """One group for all batches: starting the processes is what takes time."""
    return ranks.run(layers_on_rank, world, PROBLEMS[world], comm)


def over_ranks(name: str, world: int, comm: str) -> tuple[np.ndarray, list]:
    """The ranks' outputs side by side, and the kernel calls of each."""
    mine = [answer[name] for answer in answers(world, comm)]
    for answer in mine:
        assert not isinstance(answer, str), answer
    return np.concatenate([out for out, _ in mine], axis=1), [c for _, c in mine]


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_dcp_equals_attention_over_the_whole_context(name, world, comm):
    problem = PROBLEMS[world][name]
    batch = problem.batch
    out, calls = over_ranks(name, world, comm)
    assert not np.isnan(out[: batch.rows]).any()
    np.testing.assert_allclose(out[: batch.rows], problem.expected(), atol=TOLERANCE, rtol=0)
    if pins.MERGE_MASKS_PADDING:
        assert (out[batch.rows :] == 0).all()
    rows = batch.rows + batch.padded_rows
    assert calls == [[(problem.heads, rows, True)]] * world


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_row_empty_on_every_rank_is_zero(comm):
    out, _ = over_ranks("empty-rows", 2, comm)
    assert (out[1] == 0).all()
    assert (out[3] == 0).all()
    assert (out[0] != 0).any()


@pytest.mark.parametrize("name", ["decode", "mixed", "prefill", "mtp"])
def test_one_rank_is_as_it_was(config, name):
    """No counts, no LSE, and the batch with prefills runs at all."""
    problem = Problem(BATCHES[name], heads=8)
    out, calls = run_layer(problem, config, 0, 1)
    np.testing.assert_allclose(out, problem.expected(), atol=TOLERANCE, rtol=0)
    (call,) = calls
    assert call["seq_lens"] is None
    assert call["lse"] is None
    assert call["return_lse"] is False


def test_a_dense_prefill_backend_is_not_asked_for(config):
    """Where one can be had, the layer must still take the top-k path."""
    dense = mock.MagicMock(name="dense prefill backend")
    # No prefill has context here, whose dense metadata needs a CUDA device.
    problem = Problem(random_batch((40, 6, 5), (1, 6, 5)), heads=8)
    with mock.patch.object(mla_attention, "get_mla_prefill_backend", return_value=dense):
        out, calls = run_layer(problem, config, 0, 1)
    np.testing.assert_allclose(out, problem.expected(), atol=TOLERANCE, rtol=0)
    assert not dense.called
    assert len(calls) == 1
