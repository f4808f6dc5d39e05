"""Postconditions of the patch to the draft steps of the V2 model runner."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from tests.static.fakes import Calls, Tensor
from tests.static.postconditions import of
from tests.static.source import attributes_in, cut, find, member

if TYPE_CHECKING:
    from tests.static.trees import Pair

DRAFTER, STEP = "DraftModelSpeculator", "_build_draft_attn_metadata"
LOCAL, BUILD = "prepare_dcp_local_seq_lens", "build_attn_metadata"
REQUESTS, PADDED, RANK_ID, INTERLEAVE = 3, 4, 1, 16


@of("dcp-draft-lengths")
def draft_steps_say_how_long_requests_are_on_this_rank(pair: Pair) -> None:
    calls, buffers = _draft_step(pair, world=4)
    assert [name for name, _, _ in calls.made if name in (LOCAL, BUILD)] == [LOCAL, BUILD]
    ((args, given),) = calls.of(LOCAL)
    bound = inspect.signature(cut(find(pair.vllm, LOCAL), {})).bind(*args, **given).arguments
    assert bound == {
        "dcp_local_seq_lens": buffers.dcp_local_seq_lens, "seq_lens": buffers.seq_lens,
        "num_reqs": REQUESTS, "dcp_size": 4, "dcp_rank": RANK_ID, "cp_interleave": INTERLEAVE,
    }  # fmt: skip
    ((_, told),) = calls.of(BUILD)
    local = told["dcp_local_seq_lens"]
    assert local is not None, "they leave it out"
    assert local.root is buffers.dcp_local_seq_lens
    assert local.shape == (PADDED,), "requests that pad a CUDA graph have no length"
    assert told["seq_lens"].root is buffers.seq_lens, "the whole lengths are gone"
    # One rank has nothing to tell
    alone, _ = _draft_step(pair, world=1)
    assert not alone.of(LOCAL)
    ((_, told),) = alone.of(BUILD)
    assert told["dcp_local_seq_lens"] is None


@of("dcp-draft-lengths")
def what_they_read_is_there(pair: Pair) -> None:
    read = attributes_in(member(find(pair.vllm, DRAFTER), STEP))
    of_group = {"cp_size", "cp_rank", "cp_interleave"}
    assert of_group <= read, "the step doesn't look at its group"
    assert of_group <= attributes_in(member(find(pair.vllm, "BlockTables"), "__init__"))
    assert "dcp_local_seq_lens" in read
    assert "dcp_local_seq_lens" in attributes_in(find(pair.vllm, "InputBuffers"))


def _draft_step(pair: Pair, world: int) -> tuple[Calls, Any]:
    """The calls of a draft step's metadata, on one of ``world`` ranks, and its buffers."""
    buffers = SimpleNamespace(
        seq_lens=Tensor(8), dcp_local_seq_lens=Tensor(8), query_start_loc=Tensor(9)
    )
    # Fakes: what has nothing to do with lengths on this rank takes any operation
    drafter = SimpleNamespace(
        arange=MagicMock(), attn_groups=[], draft_max_seq_len=8192, kv_cache_config=None,
        max_model_len=8192, input_buffers=buffers, block_tables=SimpleNamespace(
            input_block_tables=[Tensor(8, 4)], slot_mappings=MagicMock(), cp_size=world,
            cp_rank=RANK_ID if world > 1 else 0, cp_interleave=INTERLEAVE,
        ),
    )  # fmt: skip
    step = member(find(pair.vllm, DRAFTER), STEP)
    calls = Calls({LOCAL: buffers.dcp_local_seq_lens})
    run = cut(step, calls.namespace(step, {"torch": MagicMock()}))
    given = {
        "num_reqs": REQUESTS, "num_reqs_padded": PADDED, "num_tokens_padded": PADDED,
        "seq_lens_cpu_upper_bound": MagicMock(), "step": 1,
    }  # fmt: skip
    accepted = inspect.signature(run).parameters  # the pins differ
    run(drafter, **{name: value for name, value in given.items() if name in accepted})
    return calls, buffers
