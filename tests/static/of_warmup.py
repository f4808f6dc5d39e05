"""Postconditions of the patch to the mixed warmup of the V2 model runner."""

from __future__ import annotations

import ast
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.static.fakes import Calls
from tests.static.postconditions import of
from tests.static.source import Missing, attributes_in, cut, find, neighbours

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.static.trees import Pair

WARMUP = "run_mixed_prefill_decode_warmup"


class AttentionSpec:
    """A fake of vLLM's, with what the warmup reads of it."""

    dcp_sharded = True
    num_speculative_blocks = 0
    mamba_cache_mode = "none"

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class MambaSpec(AttentionSpec):
    """A fake of vLLM's: state that every DCP rank holds whole."""

    dcp_sharded = False


class CrossAttentionSpec(AttentionSpec):
    """A fake of vLLM's; none is used."""


@of("warmup-guard")
def the_prompt_is_a_block_on_every_rank(pair: Pair) -> None:
    function = find(pair.vllm, WARMUP)
    named = [
        node.value.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "decode_prompt_len"
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
    ]
    if len(named) != 1:
        raise Missing("decode_prompt_len is no result of one function")
    length = cut(find(pair.vllm, named[0]), {})
    # DOMAIN.md section 3
    assert [length([64], world) for world in (2, 4, 8)] == [128, 256, 512]
    assert length([256], 8) == 2048
    assert length([64, 256, 16], 4) == 1024
    assert [length([size], 1) for size in (16, 64, 256)] == [2, 2, 2], "one rank keeps its 2"


@of("warmup-guard")
def blocks_are_counted_as_the_scheduler_does(pair: Pair) -> None:
    for world, tokens, blocks in ((1, 512, 8), (8, 512, 1), (8, 513, 2), (2, 129, 2)):
        count = _block_count(pair, world)
        assert count(tokens, AttentionSpec(64)) == blocks, (world, tokens)
        assert count(tokens, MambaSpec(64)) == -(-tokens // 64), "Mamba state is sharded"


def _block_count(pair: Pair, world: int) -> Callable[[int, AttentionSpec], int]:
    """The warmup's count of KV blocks for so many tokens, on one of ``world`` ranks."""
    runner = SimpleNamespace(
        max_model_len=8192, dcp_size=world, model_state=SimpleNamespace(max_encoder_len=0),
        vllm_config=SimpleNamespace(
            num_lookahead_tokens=0, num_speculative_tokens=0, speculative_config=None
        ),
    )  # fmt: skip
    given: dict[str, Any] = {
        "cdiv": lambda a, b: -(-a // b), "MambaSpec": MambaSpec,
        "CrossAttentionSpec": CrossAttentionSpec,
    }  # fmt: skip
    own = neighbours(pair.vllm, WARMUP)
    for name, node in own.items():
        if isinstance(node, ast.FunctionDef) and name != WARMUP:
            given[name] = cut(node, Calls().namespace(node, given))
    for function in given.values():  # they call one another
        getattr(function, "__globals__", {}).update(given)
    if "_warmup_block_counter" in own:
        counter: Callable[[int, AttentionSpec], int] = given["_warmup_block_counter"](runner)
        return counter
    if "_mixed_warmup_block_count" in own:
        return functools.partial(given["_mixed_warmup_block_count"], runner)
    raise Missing("no function of the warmup counts blocks")


@of("warmup-guard")
def ranks_agree_before_any_of_them_skips(pair: Pair) -> None:
    function = find(pair.vllm, WARMUP)
    own = neighbours(pair.vllm, WARMUP)
    collective = {
        name for name, node in own.items() if name != WARMUP and "all_reduce" in attributes_in(node)
    }
    at = None
    returns = []
    for index, node in enumerate(function.body):
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        if at is None and names & collective:
            at = index
            assert isinstance(node, ast.If), "the answer decides nothing"
            assert any(isinstance(one, ast.Return) for one in node.body)
        elif at is None and any(isinstance(one, ast.Return) for one in ast.walk(node)):
            returns.append(node)
    if at is None:
        raise Missing("no collective decides whether to skip")
    # Before it a rank may only leave for what configuration decides, alike on all
    read = {name for node in returns for name in attributes_in(node)}
    assert read <= {"is_pooling_model", "max_num_reqs"}, f"a rank leaves alone by {read}"
    (name,) = collective
    reduced = ast.unparse(own[name])
    assert "ReduceOp.MIN" in reduced
    assert "cpu_group" in reduced
