"""Asks a FlashInfer tree for a grid of shapes, and sums the answers up in few rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from overlay.kernels.capability import Answer, Phase, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from overlay.kernels.capability import Capability, Told

    # Head counts, and the top-k that each of them has
    _Table = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

# What is asked. Head counts that models have at usual tensor-parallel sizes, and some between.
HEADS = (1, 8, 16, 24, 32, 64, 128)
TOPK = (64, 128, 192, 256, 512, 1024, 2048, 4096)
PAGES = (16, 32, 64, 256)
# Indices and page of the secondary cache, asked with primary pages of 64
EXTRAS = ((512, 64), (512, 32), (512, 2))
_PAGE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Shapes that are all supported: each head count with each top-k on each page size.

    ``extra_topk`` and ``extra_page`` are of the secondary cache, 0 for none.
    """

    phase: str
    model: str
    heads: tuple[int, ...]
    topk: tuple[int, ...]
    pages: tuple[int, ...]
    extra_topk: int
    extra_page: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All answers for one model type in one phase.

    Attributes:
        blocks: what is supported.
        refused: how many shapes aren't; ``refusal`` is what is said of the most usual one.
        unknown: how many can't be told; ``puzzle`` is what is said of the first.
    """

    phase: str
    model: str
    blocks: tuple[Block, ...]
    refused: int
    refusal: Told | None
    unknown: int
    puzzle: Told | None


def ask_grid(capability: Capability) -> Iterator[Family]:
    """Ask for every model type in both phases: decode up to its limit of rows, prefill above."""
    limit = capability.decode_max_rows
    for model, phase in product(capability.models, Phase):
        rows = limit if phase is Phase.DECODE else limit + 1
        yield _ask_family(capability, model, phase, rows)


def _ask_family(capability: Capability, model: str, phase: Phase, rows: int) -> Family:
    supported: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    refused: list[Told] = []
    unknown: list[Told] = []
    caches = [(page, 0, 0) for page in PAGES] + [(_PAGE, *extra) for extra in EXTRAS]
    for cache, heads, topk in product(caches, HEADS, TOPK):
        page, extra_topk, extra_page = cache
        told = capability.ask(
            Shape(
                phase=phase, model=model, heads=heads, topk=topk, page=page,
                extra_topk=extra_topk, extra_page=extra_page, rows=rows,
            )
        )  # fmt: skip
        if told.answer is Answer.SUPPORTED:
            supported.setdefault(cache, {}).setdefault(heads, []).append(topk)
        else:
            (refused if told.answer is Answer.UNSUPPORTED else unknown).append(told)
    return Family(
        phase=phase,
        model=model,
        blocks=tuple(_blocks(phase, model, supported)),
        refused=len(refused),
        refusal=max(refused, key=refused.count) if refused else None,
        unknown=len(unknown),
        puzzle=unknown[0] if unknown else None,
    )


def _blocks(
    phase: Phase, model: str, supported: dict[tuple[int, int, int], dict[int, list[int]]]
) -> Iterator[Block]:
    """Head counts with the same top-k side by side, then pages with the same of those."""
    pages: dict[tuple[int, int, _Table], list[int]] = {}
    for (page, extra_topk, extra_page), by_heads in supported.items():
        together: dict[tuple[int, ...], list[int]] = {}
        for count, topk in by_heads.items():
            together.setdefault(tuple(topk), []).append(count)
        table = tuple((tuple(counts), topk) for topk, counts in together.items())
        pages.setdefault((extra_topk, extra_page, table), []).append(page)
    for (extra_topk, extra_page, table), found in pages.items():
        for heads, widths in table:
            yield Block(
                phase=phase, model=model, heads=heads, topk=widths,
                pages=tuple(found), extra_topk=extra_topk, extra_page=extra_page,
            )  # fmt: skip


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a table shows them."""
    return " ".join(map(str, numbers))
