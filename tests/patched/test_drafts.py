"""Draft steps of the V2 model runner tell the indexer how long requests are on their rank."""

import inspect
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import reference
import torch
from device import DEVICE
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBuffers
from vllm.v1.worker.gpu.spec_decode import speculator

# The last request pads a CUDA graph.
LENGTHS, PADDED = (1, 64, 131), 4


def metadata_arguments(world: int, rank: int, interleave: int) -> dict:
    """What a draft step gives vLLM's metadata builders."""
    buffers = InputBuffers(PADDED, PADDED, DEVICE)
    buffers.seq_lens[: len(LENGTHS)] = torch.tensor(LENGTHS, dtype=torch.int32)
    table = torch.zeros(PADDED, 4, dtype=torch.int32, device=DEVICE)
    drafter = SimpleNamespace(
        arange=torch.arange(PADDED + 1, dtype=torch.int32),
        attn_groups=[],
        block_tables=SimpleNamespace(
            input_block_tables=[table],
            slot_mappings=torch.zeros(1, PADDED, dtype=torch.int64, device=DEVICE),
            cp_size=world,
            cp_rank=rank,
            cp_interleave=interleave,
        ),
        dcp_size=world,
        draft_is_prefilling=torch.zeros(PADDED, dtype=torch.bool),
        draft_max_seq_len=8192,
        input_buffers=buffers,
        kv_cache_config=None,
        max_model_len=8192,
    )
    names = ("_build_draft_attn_metadata", "_build_attn_metadata")  # 0.33 has the latter
    (step,) = (f for n in names if (f := getattr(speculator.DraftModelSpeculator, n, None)))
    arguments = {
        "num_reqs": len(LENGTHS),
        "num_reqs_padded": PADDED,
        "num_tokens_padded": PADDED,
        "batch_desc": SimpleNamespace(
            num_reqs=PADDED, num_tokens=PADDED, cg_mode=CUDAGraphMode.FULL
        ),
        "query_start_loc_np": np.arange(len(LENGTHS) + 1, dtype=np.int32),
        "seq_lens_cpu_upper_bound": torch.tensor(LENGTHS, dtype=torch.int32),
        "step": 1,
    }
    accepted = inspect.signature(step).parameters  # the pins differ
    with mock.patch.object(speculator, "build_attn_metadata") as build:
        step(drafter, **{name: value for name, value in arguments.items() if name in accepted})
    (call,) = build.call_args_list
    return call.kwargs


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("world", [2, 8])
def test_lengths_are_this_ranks(world, interleave):
    for rank in range(world):
        given = metadata_arguments(world, rank, interleave)
        local = [reference.local_length(n, world, rank, interleave) for n in LENGTHS]
        assert given["dcp_local_seq_lens"].tolist() == [*local, 0]
        assert given["seq_lens"].tolist() == [*LENGTHS, 0]


def test_one_rank_has_no_lengths_of_its_own():
    assert metadata_arguments(1, 0, 1).get("dcp_local_seq_lens") is None
