"""No rank enters a collective that another skips: TP 8, DCP 8, two drafts, GLM's shape.

Eight processes with vLLM's groups. The warmup is vLLM's own around a model of one
collective a step; the step with drafts is vLLM's MLA attention layer (see ``layers``).
"""

import contextlib
import functools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import flashinfer
import pins
import pytest
import ranks
import torch
from collectives import Collective, Trace, disagreement, follow
from device import DEVICE
from layers import FlashInferMLASparseSM120Backend, Problem, make_config, random_batch, run_layer
from test_warmup import runner
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.warmup import flashinfer_sparse_mla_warmup as autotuning
from vllm.v1.worker.gpu import warmup

WORLD = 8
DRAFTS = 2
TOPK = 2048
MANAGED = hasattr(autotuning, "use_flashinfer_autotune_v2")
"""Whether this vLLM has a second way to autotune, with other collectives."""

# What ranks may differ in, for the engines of one world profile their own memory. Alone,
# the ranks that are short would skip.
LIMITS = {
    "fits": [{"num_blocks": 1000 + rank} for rank in range(WORLD)],
    "blocks": [{"num_blocks": 3 if rank == 5 else 1000} for rank in range(WORLD)],
    "length": [{"max_model_len": 512 if rank == 0 else 131072} for rank in range(WORLD)],
    "budget": [{"max_tokens": 512 if rank == 2 else 511} for rank in range(WORLD)],
}

# Kept small: what is compared is the way through the code, and the interpreter needs a third
# of a second a row and rank. The last ranks own no token of any request.
BATCHES = {
    "decode": random_batch((4,), (3,), decode_threshold=3),
    "mixed": random_batch((1, 5), (1, 4), decode_threshold=3),
}


def warm(rank: int, folder: Path, limits: str, managed: bool = False) -> bool:
    """vLLM's warmup of the sparse MLA backend, on one rank. Gives whether steps were run."""
    steps = []

    def execute(output) -> None:
        """In place of a model: one collective a step, as large as the step."""
        steps.append(output)
        if tokens := output.total_num_scheduled_tokens:
            get_tp_group().all_reduce(torch.zeros(tokens, 8, device=DEVICE))

    model_runner = runner(64, WORLD, lookahead=DRAFTS, **LIMITS[limits][rank])
    model_runner.num_speculative_steps = DRAFTS
    model_runner.vllm_config.use_v2_model_runner = True
    model_runner.attn_groups = [[SimpleNamespace(backend=FlashInferMLASparseSM120Backend)]]
    worker = SimpleNamespace(
        model_runner=model_runner,
        scheduler_config=model_runner.scheduler_config,
        vllm_config=SimpleNamespace(kernel_config=SimpleNamespace(enable_flashinfer_autotune=True)),
        execute_model=execute,
        sample_tokens=lambda grammar: None,
    )
    replaced = {
        "current_platform": SimpleNamespace(is_device_capability_family=lambda f: f == 120),
        "has_flashinfer": lambda: True,
        "flashinfer_autotune": lambda *_, **__: contextlib.nullcontext(),
        "resolve_flashinfer_autotune_file": lambda _: folder / "none",
    }
    if MANAGED:
        replaced["use_flashinfer_autotune_v2"] = lambda _: managed
        replaced["resolve_flashinfer_autotune_v2_root"] = lambda: None
    with (
        mock.patch.multiple(autotuning, **replaced),
        mock.patch.multiple(
            flashinfer,
            create=True,
            autotune_v2=lambda **_: contextlib.nullcontext(),
            autotune_v2_reload=lambda: None,
        ),
    ):
        autotuning.flashinfer_sparse_mla_decode_autotune_warmup(worker)
    return bool(steps)


def step(rank: int, folder: Path, batch: str, comm: str, replicated: bool = False) -> list[int]:
    """One step through the layer, on one rank. Gives the heads of its kernel calls."""
    problem = Problem(BATCHES[batch], heads=64, topk=TOPK, replicated=replicated)
    config = make_config(WORLD, WORLD, comm, topk=TOPK)
    with set_current_vllm_config(config):
        _, calls = run_layer(problem, config, rank, WORLD)
    return [call["query"].shape[2] for call in calls]


WARMUPS = {f"warmup-{limits}": (warm, limits) for limits in LIMITS}
if MANAGED:
    WARMUPS |= {f"warmup-{limits}-managed": (warm, limits, True) for limits in LIMITS}
STEPS = {
    "decode-ag_rs": (step, "decode", "ag_rs"),
    "decode-a2a": (step, "decode", "a2a"),
    "mixed-ag_rs": (step, "mixed", "ag_rs"),
}
if pins.REPLICATES_QUERIES:
    STEPS["decode-a2a-replicated"] = (step, "decode", "a2a", True)
WORK = WARMUPS | STEPS


def skip_alone(rank: int):
    """The defect that the warmup guard must not have: each rank decides for itself."""
    return mock.patch.object(warmup, "_fits_on_every_rank", lambda fits: fits)


def short_cut(rank: int):
    """A rank without a token of the batch has nothing to send for the merge."""
    if rank < 4:
        return contextlib.nullcontext()
    return mock.patch.object(torch.distributed, "all_to_all_single", mock.MagicMock())


def faulty(fault, function, rank: int, *arguments):
    with fault(rank):
        return function(rank, *arguments)


def on_rank(
    rank: int, world: int, rendezvous: str, names: list[str], quiet_s: float, fault=None
) -> list[Trace]:
    """Each piece of work in turn, in one set of groups."""
    work = {}
    for name in names:
        function, *arguments = WORK[name]
        if fault is not None:
            function = functools.partial(faulty, fault, function)
        work[name] = functools.partial(function, rank, Path(f"{rendezvous}-{name}"), *arguments)
    groups = ranks.model_parallel(rank, world, world, rendezvous, make_config(world, world))
    return list(follow(work, groups, quiet_s).values())


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trace]]:
    """Of each piece of work, what each rank did."""
    answers = ranks.run(on_rank, WORLD, list(WORK), 200.0)
    return dict(zip(WORK, zip(*answers, strict=True), strict=True))


@pytest.mark.parametrize("name", WARMUPS)
def test_all_warm_up_or_all_skip(name, traces):
    assert disagreement(traces[name]) == ""
    runs = WARMUPS[name][1] == "fits"
    for trace in traces[name]:
        assert trace.answer is runs
        assert trace.entered[0].op == "all_reduce"  # what they decide by
        assert ("barrier" in trace.ops()) is runs  # what a rank alone would wait in


@pytest.mark.parametrize("name", STEPS)
def test_a_step_takes_every_rank_the_same_way(name, traces):
    assert disagreement(traces[name]) == ""
    rows = BATCHES[STEPS[name][1]].rows
    for trace in traces[name]:
        assert trace.answer == [64]
        assert {one.group for one in trace.entered} == {"dcp:0"}
        assert any(rows in one.shape or one.op == "all_to_all_single" for one in trace.entered)


def test_a_rank_that_skips_alone_is_named():
    answers = ranks.run(on_rank, WORLD, ["warmup-blocks"], 60.0, skip_alone)
    told = disagreement([trace for (trace,) in answers])
    model = "all_reduce of torch.float32 [512, 8] in tp:0"
    assert f"step 0: rank 0 enters {model}, rank 5 enters nothing" in told
    assert f"rank 0 waits in {model}" in told
    assert "rank 5 waits" not in told


def test_a_rank_that_takes_a_short_cut_is_named():
    answers = ranks.run(on_rank, WORLD, ["decode-a2a"], 60.0, short_cut)
    told = disagreement([trace for (trace,) in answers])
    merge = "all_to_all_single of torch.bfloat16"
    assert f"rank 0 enters {merge}" in told
    assert "rank 4 enters nothing" in told
    assert f"rank 0 waits in {merge}" in told
    assert "rank 4 waits" not in told


def entering(*ops: str, group: str = "tp:0", members=(0, 1), shape=(1,), **state) -> Trace:
    entered = [Collective(op, group, members, shape, "torch.int32") for op in ops]
    return Trace(entered=entered, **{"done": True} | state)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (entering("barrier"), entering("barrier"), ""),
        (entering("barrier"), entering(), "rank 1 enters nothing"),
        (entering("a", "b"), entering("b", "a"), "step 0: rank 0 enters a"),
        (entering("a"), entering("a", shape=(2,)), "enters a of torch.int32 [2] in tp:0"),
        (entering("a"), entering("a", group="dcp:0"), "enters a of torch.int32 [1] in dcp:0"),
        # Of a group that the other isn't in
        (entering("a", members=(0, 2)), entering(), ""),
        (entering("a"), entering("a", done=False), "rank 1: did not end"),
        (
            entering("a"),
            entering("a", inside=entering("a").entered, error="closed"),
            "rank 1 waits in a of torch.int32 [1] in tp:0\nrank 1: closed",
        ),
    ],
)  # fmt: skip
def test_disagreements_are_seen(first, second, told):
    found = disagreement([first, second])
    assert told in found
    assert bool(found) is bool(told)
