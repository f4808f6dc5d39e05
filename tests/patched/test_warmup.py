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


# Sizes other than these come of a TP size that they divide.
GOLDEN = {
    (64, 1): 2,  # upstream's
    (64, 2): 128,
    (64, 4): 256,
    (64, 8): 512,
    (256, 1): 2,
    (256, 8): 2048,
}
SIZES = [(block, dcp) for block in (64, 256) for dcp in range(1, 9)]


def prompt(block: int, dcp: int) -> int:
    return 2 if dcp == 1 else block * dcp


def blocks(block: int, dcp: int) -> int:
    """Of both requests: the decode's prompt and one more token, and the prefill."""
    return 2 if dcp == 1 else 3


@pytest.mark.parametrize(("block", "dcp"), SIZES)
def test_prompt_spans_a_block_on_every_rank(block, dcp):
    first, mixed, last = steps(runner(block, dcp))
    tokens = decode_prompt(first)
    assert tokens == GOLDEN.get((block, dcp), block * dcp)
    assert mixed.scheduled_cached_reqs.num_computed_tokens == [tokens]
    assert mixed.total_num_scheduled_tokens == 16
    assert last.total_num_scheduled_tokens == 0
    (decode,), (prefill,) = first.scheduled_new_reqs, mixed.scheduled_new_reqs
    assert last.finished_req_ids == {decode.req_id, prefill.req_id}
    ids = [*decode.block_ids[0], *(mixed.scheduled_cached_reqs.new_block_ids[0] or ([],))[0]]
    assert sorted(ids + prefill.block_ids[0]) == list(range(1, blocks(block, dcp) + 1))


def skips_said(caplog) -> set[str]:
    said = {record.getMessage() for record in caplog.records}
    return {message for message in said if message.startswith("Skipping V2 mixed")}


def test_the_largest_group_decides():
    model_runner = runner(64, 4)
    model_runner.kv_cache_config.kv_cache_groups.append(KVCacheGroupSpec(["other"], spec(128)))
    assert decode_prompt(steps(model_runner)[0]) == 512


@pytest.mark.parametrize("lookahead", [0, 3, 70])
@pytest.mark.parametrize(("block", "dcp"), SIZES)
def test_blocks_are_those_the_scheduler_would_hold(block, dcp, lookahead):
    first, mixed, _ = steps(runner(block, dcp, lookahead=lookahead))
    manager = KVCacheManager(
        KVCacheConfig(1000, [], [KVCacheGroupSpec(["layer"], spec(block))]),
        max_model_len=131072,
        scheduler_block_size=block * dcp,
        hash_block_size=block * dcp,
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


def limits(block: int, dcp: int, missing: int) -> dict[str, dict[str, int]]:
    """What just suffices, less ``missing``; by the word with which the message says it."""
    tokens = prompt(block, dcp)
    return {
        f"max_num_batched_tokens={tokens - missing}": {"max_tokens": tokens - missing},
        f"max_model_len={tokens + 1 - missing}": {"max_model_len": tokens + 1 - missing},
        "KV blocks": {"num_blocks": blocks(block, dcp) + 1 - missing},
    }


@pytest.mark.parametrize(("block", "dcp"), SIZES)
def test_what_does_not_fit_is_skipped_with_the_numbers(block, dcp, caplog):
    logging.getLogger("vllm").propagate = True
    tokens, required = prompt(block, dcp), blocks(block, dcp)
    ranks_said = f"one KV block on each of {dcp} DCP ranks"
    (budget, length, free) = limits(block, dcp, 1)
    for limit, numbers in [
        (budget, [f"prompt of {tokens} tokens", ranks_said, budget]),
        (length, [f"request of {tokens + 1} tokens", ranks_said, length]),
        (free, [f"only {required} KV blocks", f"for {required} required"]),
    ]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert steps(runner(block, dcp, **limits(block, dcp, 1)[limit])) == []
        (said,) = skips_said(caplog)
        for number in numbers:
            assert number in said


@pytest.mark.parametrize(("block", "dcp"), SIZES)
def test_what_just_fits_runs(block, dcp, caplog):
    logging.getLogger("vllm").propagate = True
    together: dict[str, int] = {}
    for limit in limits(block, dcp, 0).values():
        together |= limit
    with caplog.at_level(logging.WARNING):
        assert len(steps(runner(block, dcp, **together))) == 3
    assert skips_said(caplog) == set()


# What data-parallel engines may differ in, for each profiles its own memory. Where not all
# run, some ranks by themselves would.
DIFFERING = {
    4: [
        ([{"num_blocks": 4}] * 4, True),
        ([{"num_blocks": n} for n in (4, 1000, 3, 1000)], False),
        ([{"max_model_len": n} for n in (257, 257, 256, 131072)], False),
        ([{"max_tokens": n} for n in (256, 255, 256, 256)], False),
    ],
    1: [([{"num_blocks": n} for n in (1000, 1000, 2, 1000)], False)],
}


def warm_on_rank(rank, world, rendezvous, dcp):
    with ranks.model_parallel(rank, world, dcp, rendezvous, make_config(world, dcp)):
        return [bool(steps(runner(64, dcp, **mine[rank]))) for mine, _ in DIFFERING[dcp]]


@pytest.mark.parametrize("dcp", DIFFERING)
def test_ranks_that_would_differ_decide_alike(dcp):
    expected = [ran for _, ran in DIFFERING[dcp]]
    assert ranks.run(warm_on_rank, 4, dcp) == [expected] * 4
