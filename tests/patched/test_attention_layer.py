"""The patched backend inside vLLM's own MLA attention layer, over DCP groups.

``TABLE`` says which combinations are run. It covers, and isn't the whole product: each of the
four kinds of batch meets each DCP size, each number of heads and each communication, and each
DCP size each number of heads. What concerns the index map alone has few heads, and one
communication at each size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import device
import launcher
import numpy as np
import pins
import pytest
import ranks
from layers import PREFILL_TOPK, TOPK, Batch, Problem, layers_on_rank, random_batch, run_layer
from vllm.model_executor.layers.attention import mla_attention

# bf16 output of bf16 inputs; the values are about 3 at most.
TOLERANCE = 0.03

# Batches, for ``world`` ranks whose share of a request changes every ``interleave`` tokens and
# whose blocks hold ``block``: a request's first block is full at ``edge = block * world``.


def decode(world: int, interleave: int, edge: int) -> Batch:
    """No token, one, one a rank, and each side of a block's edge, on one rank and on all."""
    lengths = (0, 1, world, 63, 64, 65, edge - 1, edge, edge + 1)
    return random_batch(lengths, (1,) * len(lengths))


def verify(world: int, interleave: int, edge: int) -> Batch:
    """Several query tokens a request, as MTP verifies them, that end on both sides of an edge."""
    group = 64 if interleave == 1 else interleave
    return random_batch((2, group + 1, edge + 1), (2, 3, 4), decode_threshold=4)


def mixed(world: int, interleave: int, edge: int) -> Batch:
    """Decodes, then prefills, which take the same path: a first chunk, and one across an edge."""
    return random_batch((edge + 1, 63, 6, edge + 2), (2, 1, 6, 4), decode_threshold=2)


def prefill(world: int, interleave: int, edge: int) -> Batch:
    """Prefills alone."""
    return random_batch((7, edge + 2), (7, 4))


def one_sided(world: int, interleave: int, edge: int) -> Batch:
    """Rows whose top-k lies on one rank, on all but one, and nowhere."""
    held = [
        tuple(turn * world * interleave + rank * interleave for turn in range(3))
        for rank in range(world)
    ]
    length = 3 * world * interleave
    others = tuple(g for rank in held[1:] for g in rank)
    return Batch(
        lengths=(length, length, length, 1, length),
        queries=(1, 1, 1, 1, 3),
        topk=(held[0], (), held[-1], (0,), others, (), held[world // 2]),
    )


def padded_rows(world: int, interleave: int, edge: int) -> Batch:
    """CUDA graphs pad a batch with rows that belong to no request; their top-k is stale."""
    return random_batch((33, 5), (1, 1), padded_rows=3)


def padded_requests(world: int, interleave: int, edge: int) -> Batch:
    """Full CUDA graphs pad it with requests of no rows too."""
    return random_batch((33, 5, 0, 0), (1, 1, 0, 0), padded_rows=2)


def many_rows(world: int, interleave: int, edge: int) -> Batch:
    """More rows than FlashInfer's decode kernels take."""
    return random_batch((80,), (65,), most=8)


@dataclass(frozen=True)
class Row:
    """A batch for DCP 1, 2, 4 and 8: the heads gathered, the communications, the layout."""

    name: str
    batch: Callable[[int, int, int], Batch]
    heads: tuple[int, int, int, int]
    comms: tuple[str, str, str]
    layout: dict[str, Any] = field(default_factory=dict)


WORLDS = (1, 2, 4, 8)
FEW = (8, 8, 8, 8)
BOTH = ("ag_rs a2a", "ag_rs a2a", "ag_rs a2a")
A, B = ("ag_rs", "a2a", "ag_rs"), ("a2a", "ag_rs", "a2a")

# fmt: off
TABLE = [
    #    batch                             heads at DCP 1, 2, 4, 8; communications at 2, 4, 8
    Row("decode",          decode,          (8, 16, 32, 64), BOTH),
    Row("verify",          verify,          (16, 8, 64, 32), BOTH),
    Row("mixed",           mixed,           (64, 32, 16, 8), BOTH),
    Row("prefill",         prefill,         (32, 64, 8, 16), BOTH),
    Row("one-sided",       one_sided,       FEW,             BOTH),
    Row("padded-rows",     padded_rows,     FEW,             BOTH),
    Row("padded-requests", padded_requests, FEW,             BOTH),
    Row("many-rows",       many_rows,       FEW,             ("ag_rs", "a2a", "")),
    Row("verify-16",       verify,          FEW,             A, {"interleave": 16}),
    Row("verify-64",       verify,          FEW,             B, {"interleave": 64}),
    Row("mixed-16",        mixed,           FEW,             B, {"interleave": 16}),
    Row("mixed-64",        mixed,           FEW,             A, {"interleave": 64}),
    Row("one-sided-16",    one_sided,       FEW,             A, {"interleave": 16}),
    Row("one-sided-64",    one_sided,       FEW,             B, {"interleave": 64}),
]
if pins.VIEWS_LARGE_BLOCKS:
    TABLE += [
        Row("verify-blocks",   verify,      FEW,             A, {"block": 256}),
        Row("mixed-blocks-64", mixed,       FEW,             B, {"block": 256, "interleave": 64}),
        Row("mixed-gaps",      mixed,       FEW,             A, {"gap": 128}),
    ]
if pins.REPLICATES_QUERIES:
    TABLE += [
        Row("verify-replicated",   verify,  FEW,             B, {"replicated": True}),
        Row("mixed-replicated-16", mixed,   FEW,             A,
            {"replicated": True, "interleave": 16}),
    ]
# fmt: on


def problem_of(row: Row, world: int) -> Problem:
    """The row's data for one DCP size."""
    interleave, block = row.layout.get("interleave", 1), row.layout.get("block", 64)
    batch = row.batch(world, interleave, block * world)
    return Problem(
        batch,
        heads=row.heads[WORLDS.index(world)],
        topk=TOPK if batch.rows <= 64 else PREFILL_TOPK,
        **row.layout,
    )


def rows_with(world: int, comm: str) -> list[Row]:
    return [row for row in TABLE if comm in row.comms[WORLDS.index(world) - 1].split()]


def table_on_rank(rank: int, world: int, rendezvous: str, comm: str) -> dict[str, Any]:
    """The table's answers for one DCP size and communication."""
    problems = {row.name: problem_of(row, world) for row in rows_with(world, comm)}
    return layers_on_rank(rank, world, rendezvous, problems, comm)


@functools.cache
def answers(world: int, comm: str) -> list[dict]:
    """One group of processes for all rows: starting them takes longer than most rows do."""
    return ranks.run(table_on_rank, world, comm)


def over_ranks(row: Row, world: int, comm: str) -> tuple[np.ndarray, list]:
    """The ranks' outputs side by side, and the kernel calls of each."""
    mine = [answer[row.name] for answer in answers(world, comm)]
    for answer in mine:
        assert not isinstance(answer, str), answer
    return np.concatenate([out for out, _ in mine], axis=1), [c for _, c in mine]


@pytest.mark.parametrize(
    ("row", "world", "comm"),
    [
        pytest.param(row, world, comm, id=f"{row.name}-dcp{world}-heads{heads}-{comm}")
        for index, world in enumerate(WORLDS[1:], 1)
        for comm in ("ag_rs", "a2a")
        for row in rows_with(world, comm)
        for heads in row.heads[index : index + 1]
    ],
)
def test_dcp_equals_attention_over_the_whole_context(row, world, comm):
    problem = problem_of(row, world)
    batch = problem.batch
    out, calls = over_ranks(row, world, comm)
    assert not np.isnan(out[: batch.rows]).any()
    np.testing.assert_allclose(out[: batch.rows], problem.expected(), atol=TOLERANCE, rtol=0)
    # A row that is empty on every rank is 0, to the bit.
    for attended, values in zip(batch.topk, out, strict=False):
        assert (values != 0).any() == bool(attended)
    if pins.MERGE_MASKS_PADDING:
        assert (out[batch.rows :] == 0).all()
    rows = batch.rows + batch.padded_rows
    assert calls == [[(problem.heads, rows, True)]] * world


def test_the_table_covers_what_it_says():
    kinds = TABLE[:4]
    assert all(row.comms == BOTH and not row.layout for row in kinds)
    assert all(sorted(row.heads) == [8, 16, 32, 64] for row in kinds)
    assert all(
        sorted(heads) == [8, 16, 32, 64] for heads in zip(*(r.heads for r in kinds), strict=True)
    )
    for interleave in (16, 64):
        rows = [row for row in TABLE if row.layout == {"interleave": interleave}]
        assert {row.batch for row in rows} == {verify, mixed, one_sided}
        assert all({*row.comms} == {"ag_rs", "a2a"} for row in rows)


@pytest.mark.parametrize("row", TABLE[:4], ids=lambda row: row.name)
def test_one_rank_is_as_it_was(config, row):
    """No counts, no LSE, and the batch with prefills runs at all."""
    problem = problem_of(row, 1)
    out, calls = run_layer(problem, config, 0, 1)
    # A row without a top-k attends to slot 0: so does the bare pin.
    attended = [bool(ids) for ids in problem.batch.topk]
    np.testing.assert_allclose(out[attended], problem.expected()[attended], atol=TOLERANCE, rtol=0)
    (call,) = calls
    assert call["query"].shape[2] == problem.heads
    assert call["seq_lens"] is None
    assert call["lse"] is None
    assert call["return_lse"] is False


# What a backend that counts its own heads, or requests in place of tokens, would give.
WRONG = {
    "out": lambda given, heads, requests: given[:, :, :heads].contiguous(),
    "lse": lambda given, heads, requests: given[..., :heads].contiguous(),
    "seq_lens": lambda given, heads, requests: given[:requests].contiguous(),
    "block_tables": lambda given, heads, requests: given[..., :64].contiguous(),
}


def spoiled_on_rank(
    rank: int, world: int, rendezvous: str, spoilt: tuple[int, ...]
) -> dict[str, Any]:
    """The layer's answer when FlashInfer is given a wrong buffer by ``spoilt`` ranks."""
    ranks.MEET_S = 2 if len(spoilt) < world else ranks.MEET_S
    problem = Problem(verify(world, 1, 64 * world), heads=8 * world)
    kernel = launcher.trtllm_batch_decode_with_kv_cache_mla
    found = {}
    for name, spoil in WRONG.items():

        def spoiled(name=name, spoil=spoil, **given):
            if rank in spoilt:
                given[name] = spoil(given[name], 8, len(problem.batch.lengths))
            return kernel(**given)

        with mock.patch.object(launcher, kernel.__name__, spoiled):
            answer = layers_on_rank(rank, world, f"{rendezvous}-{name}", {name: problem}, "ag_rs")
        found |= answer
    return found


stand_in = pytest.mark.skipif(device.is_sm120(), reason="not for FlashInfer's own kernel")


@stand_in
def test_wrongly_shaped_buffers_fail_the_layer():
    """On every rank, rather than be merged."""
    for answer in ranks.run(spoiled_on_rank, 4, (0, 1, 2, 3)):
        assert "out: expected (9, 1, 32, 512), got (9, 1, 8, 512)" in answer["out"]
        assert "lse: expected (9, 32) float32, got (9, 8)" in answer["lse"]
        assert "seq_lens must hold one count a token" in answer["seq_lens"]
        assert "block_tables: (9, 1, 128)" in answer["block_tables"]


@stand_in
def test_a_rank_that_fails_alone_ends_the_run():
    """The others wait for it in the merge: by itself that ends at a timeout, without a reason."""
    with pytest.raises(RuntimeError, match=r"rank 1:[^$]*out: expected \(9, 1, 16, 512\)"):
        ranks.run(spoiled_on_rank, 2, (1,))


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
