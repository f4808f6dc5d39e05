"""The mixed prefill+decode warmup under DCP: prompt, blocks, and who skips."""

import logging
from types import SimpleNamespace

import pytest
import ranks
import torch
from layers import make_config
from vllm import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.request import Request
from vllm.v1.worker.gpu import warmup


def spec(block: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.uint8)


def mamba_spec(mode: str) -> MambaSpec:
    return MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


def runner(
    block: int = 64,
    dcp: int = 1,
    *,
    num_blocks: int = 1000,
    max_tokens: int = 8192,
    max_model_len: int = 131072,
    lookahead: int = 0,
) -> SimpleNamespace:
    """What the warmup reads of the V2 model runner."""
    return SimpleNamespace(
        is_pooling_model=False,
        max_num_reqs=32,
        max_model_len=max_model_len,
        dcp_size=dcp,
        num_speculative_steps=0,
        model_state=SimpleNamespace(max_encoder_len=0),
        scheduler_config=SimpleNamespace(max_num_seqs=32, max_num_batched_tokens=max_tokens),
        vllm_config=SimpleNamespace(
            num_lookahead_tokens=lookahead,
            # 0.26 has no such property, and makes it of these.
            num_speculative_tokens=lookahead,
            speculative_config=SimpleNamespace(use_dflash=lambda: False) if lookahead else None,
            parallel_config=SimpleNamespace(decode_context_parallel_size=dcp),
        ),
        kv_cache_config=SimpleNamespace(
            num_blocks=num_blocks,
            kv_cache_groups=[KVCacheGroupSpec(["mla", "indexer"], spec(block))],
        ),
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
    )


def steps(model_runner: SimpleNamespace, num_tokens: int = 16) -> list:
    """The scheduler outputs that the warmup executed; none if it skipped."""
    outputs = []
    ran = warmup.run_mixed_prefill_decode_warmup(
        model_runner, outputs.append, lambda grammar: None, num_tokens
    )
    assert ran == bool(outputs)
    return outputs


def decode_prompt(output) -> int:
    (new,) = output.scheduled_new_reqs
    assert output.num_scheduled_tokens == {new.req_id: len(new.prompt_token_ids)}
    assert output.total_num_scheduled_tokens == len(new.prompt_token_ids)
    return len(new.prompt_token_ids)


@pytest.mark.parametrize(
    ("block", "dcp", "tokens"),
    [
        (64, 1, 2),
        (64, 2, 128),
        (64, 4, 256),
        (64, 8, 512),
        (256, 1, 2),
        (256, 8, 2048),
    ],
)
def test_prompt_spans_a_block_on_every_rank(block, dcp, tokens):
    first, mixed, _ = steps(runner(block, dcp))
    assert decode_prompt(first) == tokens
    assert mixed.scheduled_cached_reqs.num_computed_tokens == [tokens]
    assert mixed.total_num_scheduled_tokens == 16


def test_the_largest_group_decides():
    model_runner = runner(64, 4)
    model_runner.kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec(128)))
    assert decode_prompt(steps(model_runner)[0]) == 512


@pytest.mark.parametrize("lookahead", [0, 3, 70])
@pytest.mark.parametrize("dcp", [1, 2, 8])
def test_blocks_are_those_the_scheduler_would_hold(dcp, lookahead):
    first, mixed, _ = steps(runner(64, dcp, lookahead=lookahead))
    manager = KVCacheManager(
        KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], spec(64))]),
        max_model_len=131072,
        scheduler_block_size=64 * dcp,
        hash_block_size=64 * dcp,
        enable_caching=False,
        dcp_world_size=dcp,
    )
    (new,) = first.scheduled_new_reqs
    request = Request(new.req_id, new.prompt_token_ids, SamplingParams(max_tokens=2), None)
    held = 0
    for scheduled, ids in [
        (decode_prompt(first), new.block_ids),
        (1, mixed.scheduled_cached_reqs.new_block_ids[0] or ([],)),
    ]:
        held += len(ids[0])
        assert manager.allocate_slots(request, scheduled, num_lookahead_tokens=lookahead)
        assert held == len(manager.get_block_ids(new.req_id)[0])
        request.num_computed_tokens += scheduled


@pytest.mark.parametrize("mode", ["all", "align"])
@pytest.mark.parametrize("dcp", [1, 4])
def test_mamba_state_is_whole_on_every_rank(dcp, mode):
    """A group of its own takes as many blocks as its manager does, whatever the ranks."""
    model_runner = runner(64, dcp)
    groups = model_runner.kv_cache_config.kv_cache_groups
    groups.append(KVCacheGroupSpec(["mamba"], mamba_spec(mode)))
    manager = KVCacheManager(
        KVCacheConfig(1000, [], groups),
        max_model_len=131072,
        scheduler_block_size=64 * dcp,
        hash_block_size=64,
        enable_caching=False,
        dcp_world_size=dcp,
    )
    _, mamba = manager.coordinator.single_type_managers
    first, _, _ = steps(model_runner)
    (new,) = first.scheduled_new_reqs
    assert len(new.block_ids[1]) == -(-decode_prompt(first) // mamba.block_size)


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        ({"max_tokens": 511}, ["512 tokens", "8 DCP ranks", "511"]),
        ({"max_model_len": 512}, ["513 tokens", "8 DCP ranks", "512"]),
        ({"num_blocks": 3}, ["3 KV blocks", "3 required"]),
    ],
)
def test_what_does_not_fit_is_skipped_with_the_numbers(limits, numbers, caplog):
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING):
        assert steps(runner(64, 8, **limits)) == []
    for number in numbers:
        assert number in caplog.text


def test_what_just_fits_runs():
    assert steps(runner(64, 8, max_tokens=512, max_model_len=513, num_blocks=4))


def warm_on_rank(rank, world, rendezvous, dcp, limits):
    with ranks.model_parallel(rank, world, dcp, rendezvous, make_config(world, dcp)):
        return bool(steps(runner(64, dcp, **limits[rank])))


# What data-parallel engines may differ in, for each profiles its own memory. With
# ``ran`` False some ranks by themselves would run.
@pytest.mark.parametrize(
    ("dcp", "limits", "ran"),
    [
        (4, [{"num_blocks": 4}] * 4, True),
        (4, [{"num_blocks": n} for n in (4, 1000, 3, 1000)], False),
        (4, [{"max_model_len": n} for n in (257, 257, 256, 131072)], False),
        (4, [{"max_tokens": n} for n in (256, 255, 256, 256)], False),
        (1, [{"num_blocks": n} for n in (1000, 1000, 2, 1000)], False),
    ],
)
def test_ranks_that_would_differ_decide_alike(dcp, limits, ran):
    assert ranks.run(warm_on_rank, 4, dcp, limits) == [ran] * 4
