"""Global top-k ids to a DCP rank's slots: golden values and whole ranges."""

import numpy as np
import pytest
import reference
import torch
from device import DEVICE
from vllm.v1.attention.backends.mla.sparse_utils import (
    triton_filter_and_convert_dcp_index,
)


def convert(ids, blocks, world, rank, interleave=1, block=64):
    """``(slots, count)`` of one row, ids padded to a multiple of 128 by -1."""
    width = -(-len(ids) // 128) * 128
    row = torch.full((1, width), -1, dtype=torch.int32)
    row[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    slots, counts = triton_filter_and_convert_dcp_index(
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        torch.tensor([blocks], dtype=torch.int32, device=DEVICE),
        row.to(DEVICE),
        dcp_size=world,
        dcp_rank=rank,
        cp_kv_cache_interleave_size=interleave,
        BLOCK_SIZE=block,
        NUM_TOPK_TOKENS=width,
        return_valid_counts=True,
    )
    return slots[0].tolist(), int(counts[0])


@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_id_has_one_owner_and_its_own_slot(world, interleave):
    blocks = [5, 2]
    ids = np.random.default_rng(0).permutation(len(blocks) * 64 * world).tolist()
    seen = {}
    for rank in range(world):
        slots, count = convert(ids, blocks, world, rank, interleave)
        assert count == len(blocks) * 64
        assert slots[count:] == [-1] * (len(slots) - count)
        assert len(set(slots[:count])) == count
        mine = [g for g in ids if reference.owner(g, world, interleave) == rank]
        expected = {reference.slot(g, blocks, 64, world, interleave) for g in mine}
        assert set(slots[:count]) == expected
        seen[rank] = len(mine)
    assert sum(seen.values()) == len(ids)


@pytest.mark.parametrize(
    ("length", "world", "interleave", "per_rank"),
    [
        (10, 4, 1, [3, 3, 2, 2]),
        (10, 4, 4, [4, 4, 2, 0]),
        (130, 8, 16, [18] + [16] * 7),
        (448, 8, 64, [64] * 7 + [0]),
        (449, 8, 64, [64] * 7 + [1]),
        (1, 4, 1, [1, 0, 0, 0]),
    ],
)
def test_counts_are_the_local_lengths(length, world, interleave, per_rank):
    counts = [
        convert(list(range(length)), [3], world, rank, interleave)[1] for rank in range(world)
    ]
    assert counts == per_rank
    assert counts == [
        reference.local_length(length, world, rank, interleave) for rank in range(world)
    ]


def test_several_query_tokens_are_localised_one_by_one():
    # Global lengths 8, 9, 10 on rank 1 of 2; not 5 less the offsets.
    counts = [convert(list(range(n)), [3], 2, 1)[1] for n in (8, 9, 10)]
    assert counts == [4, 4, 5]


def test_gaps_are_packed_out():
    slots, count = convert([-1, 2, 1, -1, 0, 7], [3], 2, 0)
    assert count == 2
    assert set(slots[:2]) == {3 * 64 + 1, 3 * 64}
    assert set(slots[2:]) == {-1}


def test_id_beyond_the_table_is_nobodys():
    assert convert([64 * 2], [3], 2, 0)[1] == 0


def test_unallocated_block_is_not_counted():
    slots, count = convert([0, 2, 128, 130], [-1, 4], 2, 0)
    assert count == 2
    assert set(slots[:2]) == {4 * 64, 4 * 64 + 1}
    assert set(slots[2:]) == {-1}
