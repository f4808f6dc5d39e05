"""Memory that decode context parallelism changes: what each rank holds, with the formula.

Sizes are of one rank. Weights and activations that don't depend on DCP are not counted, but for
the weights where a recipe says them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.kernels.capability import Phase
from overlay.kernels.shapes import DECODE_ROWS, WARMUP_ROWS, derive

if TYPE_CHECKING:
    from overlay.kernels.recipe import Family, Recipe

GIB = 1 << 30
_BF16, _FLOAT = 2, 4
_SPLIT = 64  # ids that one part of a decode call takes
_D_V = 512  # values of an output head
_D_QK: dict[Family, int] = {"glm": 576, "deepseek-v3.2": 576, "deepseek-v4": 512}
# Packed bytes of a token in one layer's cache
_PACKED: dict[Family, int] = {"glm": 656, "deepseek-v3.2": 656, "deepseek-v4": 584}
# And in the indexer's: 128 of FP8 and a scale
_INDEX = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One buffer of a rank.

    Attributes:
        name: of the buffer.
        formula: with this recipe's numbers in it.
        size: bytes.
        alone: bytes that it would have with DCP 1.
    """

    name: str
    formula: str
    size: int
    alone: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a card of some size has room for.

    Attributes:
        gib: size of the card.
        left: bytes for the KV cache; negative where the weights don't fit.
        tokens: that the whole DCP group then holds; None where layers or weights aren't known.
        formula: how ``left`` comes about.
    """

    gib: int
    left: int
    tokens: int | None
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Buffers of a rank, and what is left on each card."""

    parts: tuple[Part, ...]
    cards: tuple[Card, ...]


def memory(recipe: Recipe) -> Memory:
    """What DCP changes in a rank's memory."""
    parts = (*_calls(recipe), _cache(recipe))
    # The cache takes what is left, so it is not taken off
    taken = sum(part.size for part in parts[:-1])
    return Memory(parts=parts, cards=tuple(_card(recipe, gib, taken) for gib in recipe.cards))


def size_text(size: int) -> str:
    """Bytes for people: in the largest unit of which there is one."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


def local_tokens(length: int, ranks: int, rank: int, interleave: int) -> int:
    """Tokens of a request of ``length`` that one rank of a DCP group holds."""
    whole = length // interleave // ranks
    rest = length - whole * interleave * ranks
    return whole * interleave + min(max(rest - rank * interleave, 0), interleave)


def cache_bytes(recipe: Recipe) -> int:
    """Bytes of a token in one layer's KV cache, the indexer's included."""
    # DeepSeek-V4's indexer keeps compressed states, far fewer than tokens
    indexed = recipe.model.index_topk is not None and recipe.model.family != "deepseek-v4"
    return _PACKED[recipe.model.family] + _INDEX * indexed


def _calls(recipe: Recipe) -> list[Part]:
    """Buffers of an attention call: they grow with the heads that DCP gathers."""
    heads, own = recipe.heads, recipe.model.heads // recipe.parallel.tp
    rows = _most_rows(recipe)
    decode = [a.shape for a in derive(recipe).asked if a.shape.phase is Phase.DECODE]
    splits = max(-(-s.topk // _SPLIT) + -(-s.extra_topk // _SPLIT) for s in decode)
    width = _D_QK[recipe.model.family]

    def part(name: str, formula: str, a_head: int) -> Part:
        return Part(name=name, formula=formula, size=heads * a_head, alone=own * a_head)

    return [
        part(
            "decode scratch",
            f"{DECODE_ROWS} rows x {heads} heads x {splits} splits "
            f"x ({_D_V} x {_BF16} + {_FLOAT}) B",
            DECODE_ROWS * splits * (_D_V * _BF16 + _FLOAT),
        ),
        part("gathered query", f"{rows} rows x {heads} heads x {width} x {_BF16} B",
             rows * width * _BF16),
        part("gathered output", f"{rows} rows x {heads} heads x {_D_V} x {_BF16} B",
             rows * _D_V * _BF16),
        part("LSE", f"{rows} rows x {heads} heads x {_FLOAT} B", rows * _FLOAT),
    ]  # fmt: skip


def _most_rows(recipe: Recipe) -> int:
    limits = recipe.limits
    if recipe.attention.prompts == "kernel":
        return limits.max_num_batched_tokens
    decode = limits.max_num_seqs * recipe.rows_a_request
    return min(max(decode, WARMUP_ROWS), limits.max_num_batched_tokens)


def _cache(recipe: Recipe) -> Part:
    """KV of one request as long as can be, on the rank that holds most of it."""
    parallel, length = recipe.parallel, recipe.limits.max_model_len
    held = local_tokens(length, parallel.dcp, 0, parallel.interleave)
    layers, a_token = recipe.model.layers or 1, cache_bytes(recipe)
    words = f"{layers} layers" if recipe.model.layers else "1 layer (how many isn't known)"
    share = f"{held} of {length} tokens" if parallel.dcp > 1 else f"{length} tokens"
    if recipe.model.family == "deepseek-v4":
        share += " before compression"
    return Part(
        name="KV of the longest request", formula=f"{share} x {words} x {a_token} B",
        size=held * layers * a_token, alone=length * layers * a_token,
    )  # fmt: skip


def _card(recipe: Recipe, gib: int, taken: int) -> Card:
    use, model = recipe.limits.gpu_memory_utilization, recipe.model
    weights = round((model.weights_gib or 0) * GIB) // recipe.parallel.tp
    left = round(gib * GIB * use) - taken - weights
    formula = f"{gib} GiB x {use} - {taken / GIB:.2f} GiB of buffers"
    formula += (
        f" - {model.weights_gib} GiB of weights / TP {recipe.parallel.tp}"
        if model.weights_gib
        else ", before weights"
    )
    tokens = None
    if model.layers and model.weights_gib:
        tokens = max(0, left // (model.layers * cache_bytes(recipe))) * recipe.parallel.dcp
    return Card(gib=gib, left=left, tokens=tokens, formula=formula)
