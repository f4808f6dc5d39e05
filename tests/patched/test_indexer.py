"""The sparse indexer's lengths under DCP: of each query token, on this rank.

Its kernels run on CUDA only; what they are told is made here. Under DCP every query token
sees its rank's share of the tokens up to itself.
"""

from types import SimpleNamespace
from unittest import mock

import layers
import numpy as np
import pins
import pytest
import ranks
import reference
import torch
from device import DEVICE
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder
from vllm.v1.kv_cache_interface import MLAAttentionSpec

pytestmark = pytest.mark.skipif(
    not pins.INDEXER_TAKES_INTERLEAVE, reason="this vLLM's indexer refuses an interleave"
)

BATCHES = {
    # By drafts, since the indexer lays out what it makes differently: for one as a
    # table, for more as a list. Lengths and query tokens; decodes come first.
    1: ((8, 65, 130), (2, 2, 2)),
    2: ((8, 65, 130), (3, 3, 3)),
    3: ((8, 65, 130, 67, 7, 200), (4, 3, 4, 1, 7, 70)),
}


def lengths_on_rank(rank, world, rendezvous, interleave, drafts):
    """Local lengths of the decode tokens and of the prefill tokens, as the indexer has them."""
    config = layers.make_config(world, world, interleave=interleave)
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.speculative_config = SimpleNamespace(
        num_speculative_tokens=drafts, enable_adaptive_verification=False
    )
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=132, dtype=torch.uint8)
    lengths, queries = BATCHES[drafts]
    starts = torch.tensor([0, *np.cumsum(queries)], dtype=torch.int32)
    global_lengths = torch.tensor(lengths, dtype=torch.int32)
    local = [reference.local_length(n, world, rank, interleave) for n in lengths]
    with (
        ranks.model_parallel(rank, world, world, rendezvous, config),
        mock.patch.object(indexer, "num_compute_units", return_value=1),
    ):
        builder = DeepseekV32IndexerMetadataBuilder(
            spec, ["indexer"], config, DEVICE, block_table_width=8
        )
        metadata = builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(DEVICE),
                query_start_loc_cpu=starts,
                seq_lens=global_lengths.to(DEVICE),
                seq_lens_cpu_upper_bound=global_lengths,
                num_reqs=len(lengths),
                num_actual_tokens=sum(queries),
                max_query_len=max(queries),
                max_seq_len=max(lengths),
                block_table_tensor=torch.ones(len(lengths), 8, dtype=torch.int32, device=DEVICE),
                slot_mapping=torch.zeros(sum(queries), dtype=torch.int64, device=DEVICE),
                dcp_local_seq_lens=torch.tensor(local, dtype=torch.int32, device=DEVICE),
            ),
        )
    prefill = []
    for chunk in metadata.prefill.chunks if metadata.prefill else ():
        prefill += (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).tolist()
    return metadata.decode.seq_lens.flatten().tolist(), prefill


@pytest.mark.parametrize("drafts", BATCHES)
@pytest.mark.parametrize("interleave", [1, 16, 64])
@pytest.mark.parametrize("world", [2, 4])
def test_lengths_are_each_tokens_own(world, interleave, drafts):
    lengths, queries = BATCHES[drafts]
    decodes = sum(query for query in queries if query <= drafts + 1)
    expected = [
        [
            reference.local_length(length - query + i + 1, world, rank, interleave)
            for length, query in zip(lengths, queries, strict=True)
            for i in range(query)
        ]
        for rank in range(world)
    ]
    answers = ranks.run(lengths_on_rank, world, interleave, drafts)
    for mine, (decode, prefill) in zip(expected, answers, strict=True):
        assert decode == mine[:decodes]
        assert prefill == mine[decodes:]
