"""What vLLM itself asks of FlashInfer before it serves: at most the decode table, and of one model.

Found in the patched vLLM tree and answered from the patched FlashInfer tree; nothing is imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from overlay.kernels.capability import Answer, Model, Phase, Shape
from overlay.kernels.refusals import DSV4, MLA, SM120, Reader

if TYPE_CHECKING:
    from overlay.kernels.capability import Capability
    from overlay.kernels.recipe import Recipe
    from overlay.kernels.shapes import Shapes
    from overlay.trees.match import Tree

_TABLE = "_DECODE_DSV4_DISPATCH"
_STEPS = (
    (f"{MLA}/compressor_utils.py", r"^_DSPARK_SWA_INDEX_ALIGNMENT = (\d+)$"),
    (
        f"{MLA}/sparse_swa.py",
        r"cdiv\(self\.window_size \+ self\.num_speculative_tokens, (\d+)\) \* \1$",
    ),
)
_MODULE = "flashinfer/mla/_sparse_mla_sm120.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCheck:
    """vLLM's own check.

    Attributes:
        answer: ``passes``, ``refuses`` (vLLM raises while it starts), or ``unknown``.
        what: what it looks at, and what it finds.
        where: file and line of the check.
    """

    answer: Literal["passes", "refuses", "unknown"]
    what: str
    where: str


def own_check(
    vllm: Tree, flashinfer: Tree, recipe: Recipe, shapes: Shapes, capability: Capability
) -> OwnCheck:
    """What vLLM's own check says of a recipe.

    Args:
        vllm, flashinfer: the patched trees.
        recipe: what is served.
        shapes: derived from it.
        capability: of the FlashInfer tree; asked where its table is no plain set.
    """
    reader = Reader(vllm)
    is_dsv4 = recipe.attention.backend == "FLASHINFER_MLA_SPARSE_DSV4"
    path = DSV4 if is_dsv4 else SM120
    asks = reader.find(path, r"has_flashinfer_sparse_mla_sm120_config\(self\.padded_heads,")
    if asks is None:
        asks = reader.find(path, r"if not has_flashinfer_sparse_mla_sm120\(\):")
        if asks is None:
            return OwnCheck(answer="unknown", what="the check can't be found", where=path)
        what = "looks only whether FlashInfer has the functions"
        return OwnCheck(answer="passes", what=what, where=asks.where)
    pairs = _pairs(recipe, shapes)
    table = _table(Reader(flashinfer))
    lacks, unknown = [], []
    for heads, topk in pairs:
        if table is not None:
            lacks += [(heads, topk)] * ((heads, topk) not in table)
            continue
        shape = Shape(phase=Phase.DECODE, model=Model.DSV4, heads=heads, topk=topk, page=64)
        answer = capability.ask(shape).answer
        lacks += [(heads, topk)] * (answer is Answer.UNSUPPORTED)
        unknown += [(heads, topk)] * (answer is Answer.UNKNOWN)
    words = ", ".join(f"{heads} heads x {topk}" for heads, topk in lacks or unknown or pairs)
    what = f"looks at the decode table alone, for {words}"
    if lacks:
        return OwnCheck(answer="refuses", what=f"{what}: not there", where=asks.where)
    if unknown:
        return OwnCheck(answer="unknown", what=what, where=asks.where)
    return OwnCheck(answer="passes", what=what, where=asks.where)


def draft_step(vllm: Tree) -> int | None:
    """What this vLLM makes a ``dspark`` draft's width a multiple of; None where it doesn't say."""
    reader = Reader(vllm)
    for path, pattern in _STEPS:
        quote = reader.find(path, pattern)
        if quote is not None:
            return int(quote.group)
    return None


def _pairs(recipe: Recipe, shapes: Shapes) -> list[tuple[int, int]]:
    """Heads and ids that vLLM asks about: of the window, and of a draft that isn't causal."""
    window = recipe.model.sliding_window or 0
    wide = recipe.drafts.method == "dspark"
    pairs = [
        (asked.shape.heads, asked.shape.topk if wide and asked.who == "draft" else window)
        for asked in shapes.asked
    ]
    return list(dict.fromkeys(pairs))


def _table(flashinfer: Reader) -> frozenset[tuple[int, int]] | None:
    """The decode table, where it stands in the source as a set; None where it is computed."""
    module = flashinfer.parsed(_MODULE)
    for node in module.body if module else ():
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.targets[0]) == _TABLE
            and len(node.value.args) == 1
        ):
            try:
                return frozenset(ast.literal_eval(node.value.args[0]))
            except (ValueError, TypeError):
                return None
    return None
