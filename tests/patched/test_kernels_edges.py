"""Small cases at the edges: rows whose ids lie where a mistake of one would show.

Each is one group of two or three ranks and a handful of rows, so that a defect put back into the
tree is noticed in seconds; the whole range of shapes is in the other files.
"""

import dataclasses
from unittest import mock

import launcher
import layers
import numpy as np
import pytest
import ranks
import reference
import test_backend
import test_indexer
import torch
from device import DEVICE
from layers import Problem, make_config, make_impl, patched_launcher, random_batch

BLOCK = 5  # of the one request
# No two neighbours on one rank, by whatever interleave: packing has something to do
IDS = ((63, 0, 64, 127, 1, 126, 17, 15, 16), (2, 65, 33), (127,), ())
DECODES_AND_PREFILL = random_batch((9, 65, 4), (2, 2, 4), most=40, decode_threshold=2)
MIXED = Problem(
    dataclasses.replace(
        DECODES_AND_PREFILL,
        topk=((0, 2, 4), (), *DECODES_AND_PREFILL.topk[2:]),  # one rank's alone, and nobody's
    ),
    heads=16,
)


def kernel_call_on_rank(rank, world, rendezvous, interleave):
    """Counts and ids that FlashInfer is given for ``IDS``, and the shapes of its buffers."""
    config = make_config(world, world, interleave=interleave)
    with ranks.model_parallel(rank, world, world, rendezvous, config), DEVICE:
        impl = make_impl(num_heads=8)
        for row, ids in enumerate(IDS):
            impl.topk_indices_buffer[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        metadata = test_backend.metadata(len(IDS))
        metadata.block_table[0, 0] = BLOCK
        metadata.cp_kv_cache_interleave_size = interleave
        launcher.calls.clear()
        with patched_launcher():
            impl.forward_mqa(
                torch.ones(len(IDS), 8 * world, 576).bfloat16(),
                torch.full((BLOCK + 1, 64, 656), 56, dtype=torch.uint8),
                metadata,
                None,
            )
    (call,) = launcher.calls
    return {
        "counts": call["seq_lens"].tolist(),
        "ids": call["block_tables"][:, 0].tolist(),
        "shapes": [tuple(call[name].shape) for name in ("query", "out", "lse")],
        "asked": call["return_lse"],
    }


@pytest.mark.parametrize("interleave", [1, 16])
def test_the_kernel_is_given_this_ranks_slots_packed_and_counted(interleave):
    world = 2
    for rank, call in enumerate(ranks.run(kernel_call_on_rank, world, interleave)):
        owned = [[g for g in row if reference.owner(g, world, interleave) == rank] for row in IDS]
        assert call["counts"] == [len(row) for row in owned]
        for mine, given in zip(owned, call["ids"], strict=True):
            slots = {reference.slot(g, [BLOCK], 64, world, interleave) for g in mine}
            assert set(given[: len(mine)]) == slots
            assert set(given[len(mine) :]) == {-1}
        rows = len(IDS)
        assert call["shapes"] == [(rows, 1, 16, 576), (rows, 1, 16, 512), (rows, 16)]
        assert call["asked"] is True


def layer_on_rank(rank, world, rendezvous, comm):
    """The layer's output for decodes of two tokens, then a prefill."""
    problems = {"edges": MIXED}
    answer = layers.layers_on_rank(rank, world, rendezvous, problems, comm)["edges"]
    assert not isinstance(answer, str), answer
    return answer[0]


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_a_small_mixed_batch_equals_the_whole_context(comm):
    out = np.concatenate(ranks.run(layer_on_rank, 2, comm), axis=1)
    np.testing.assert_allclose(out, MIXED.expected(), atol=0.03, rtol=0)
    assert (out[1] == 0).all()


def test_a_larger_group_than_asked_for_is_refused():
    """The config says 2 ranks, and the group has 4."""
    for error in ranks.run(test_backend.build_on_rank, 4, 4, 2, 8):
        assert "decode_context_parallel_size=2" in error
        assert "4 rank" in error


def test_gathered_heads_count_not_local_ones():
    """8 heads a rank have a kernel, the 24 of three ranks have none."""
    for error in ranks.run(test_backend.build_on_rank, 3, 3, 3, 8):
        assert "24 heads" in error


def indexer_lengths_on_rank(rank, world, rendezvous, drafts):
    """As test_indexer.py has them, for an interleave that every pin's indexer takes."""
    built = test_indexer.DeepseekV32IndexerMetadataBuilder
    takes_width = getattr(built, "requires_block_table_width", False)

    def build(*arguments, block_table_width):
        # vLLM 0.26 has the table's width from elsewhere
        return built(*arguments, **{"block_table_width": block_table_width} if takes_width else {})

    with mock.patch.object(test_indexer, built.__name__, build):
        return test_indexer.lengths_on_rank(rank, world, rendezvous, 1, drafts)[0]


@pytest.mark.parametrize("drafts", [1, 2])
def test_the_indexer_localises_each_query_token(drafts):
    """Global lengths 8, 9, 10 are 4, 4, 5 on rank 1 of 2; localising first gives 3, 4, 5."""
    lengths, queries = test_indexer.BATCHES[drafts]
    for rank, local in enumerate(ranks.run(indexer_lengths_on_rank, 2, drafts)):
        assert local == [
            reference.local_length(length - query + i + 1, 2, rank, 1)
            for length, query in zip(lengths, queries, strict=True)
            for i in range(query)
        ]
