"""Which calls of the sparse-MLA kernels a recipe can lead to, and why.

What vLLM does with a recipe is followed here: how many rows its steps have (warmup, each captured
graph, the most requests, prompts), which heads and ids a row brings, and so which of FlashInfer's
two tables is asked. ``docs/recipes.md`` names the sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from overlay.kernels.capability import Model, Phase, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.kernels.recipe import Call, Family, Recipe

DECODE_ROWS = 64  # FlashInfer's limit, where no tree is asked for its own
# vLLM's mixed warmup: rows of one decoding request and of a prompt, together
WARMUP_ROWS = 16
# vLLM's largest captured size on anything but a data-centre Blackwell
MAX_GRAPH = 512
# DeepSeek-V4's classes pad the query to the next of these
PADDED_HEADS = (8, 16, 32, 64, 128)
DRAFT_STEP = 64  # a draft's ids, where no tree is asked for its own
_ALIGN_C128 = 128

MODELS: dict[Family, Model] = {
    "glm": Model.GLM_NSA, "deepseek-v3.2": Model.DSV3_2, "deepseek-v4": Model.DSV4,
}  # fmt: skip
Who = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A number of rows that a call can have.

    Attributes:
        who: the model itself, or the one that drafts.
        when: the step: ``warmup``, ``graph``, ``decode`` or ``prompt``.
        rows: query tokens of the call.
        why: how that number comes about.
    """

    who: Who
    when: Literal["warmup", "graph", "decode", "prompt"]
    rows: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A kernel that a recipe asks for.

    Attributes:
        shape: the call with the most rows.
        call: kind of layer.
        who: who asks.
        rows: all that lead to it, fewest rows first.
    """

    shape: Shape
    call: str
    who: Who
    rows: tuple[Rows, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What a recipe asks for.

    Attributes:
        asked: the kernels, the model's own first.
        derivation: how heads, ids, pages and rows come about, a sentence each.
        decode_rows: most rows of the decode table.
    """

    asked: tuple[Asked, ...]
    derivation: tuple[str, ...]
    decode_rows: int


def derive(
    recipe: Recipe, *, decode_rows: int = DECODE_ROWS, draft_step: int = DRAFT_STEP
) -> Shapes:
    """Every kernel shape that a recipe can ask for.

    Args:
        recipe: what is served.
        decode_rows: up to so many rows the decode table is asked, above it the prefill table.
        draft_step: vLLM widens a ``dspark`` draft's window to a multiple of it.
    """
    heads, says = _heads(recipe)
    asked: list[Asked] = []
    steps = tuple(_steps(recipe, decode_rows))
    for who in ("target", "draft"):
        rows = [step for step in steps if step.who == who]
        for call in _calls(recipe, who, draft_step) if rows else ():
            says.append(call.why)
            for phase in Phase:
                of_phase = [r for r in rows if _phase(r.rows, decode_rows) is phase]
                if of_phase:
                    asked.append(_asked(recipe, who, call, phase, heads, of_phase))
        says += _most(rows, who, decode_rows)
    unique = tuple(dict.fromkeys(says))
    return Shapes(asked=tuple(asked), derivation=unique, decode_rows=decode_rows)


def _most(rows: list[Rows], who: Who, decode_rows: int) -> Iterator[str]:
    """The largest step of each kind, and the table that it asks."""
    for when in ("warmup", "decode", "prompt"):
        most = max((r for r in rows if r.when == when), key=lambda r: r.rows, default=None)
        if most is not None:
            sign = ">" if most.rows > decode_rows else "<="
            table = _phase(most.rows, decode_rows)
            yield f"{who}: {most.why} {sign} {decode_rows}: the {table} table"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ids:
    """What one kind of layer brings: ids a row and page, of both caches."""

    name: str
    topk: int
    page: int
    why: str
    extra_topk: int = 0
    extra_page: int = 0


def _phase(rows: int, decode_rows: int) -> Phase:
    return Phase.DECODE if rows <= decode_rows else Phase.PREFILL


def _asked(
    recipe: Recipe, who: Who, call: _Ids, phase: Phase, heads: int, rows: list[Rows]
) -> Asked:
    rows = sorted(dict.fromkeys(rows), key=lambda each: each.rows)
    shape = Shape(
        phase=phase, model=MODELS[recipe.model.family], heads=heads, topk=call.topk,
        page=call.page, extra_topk=call.extra_topk, extra_page=call.extra_page,
        rows=rows[-1].rows,
    )  # fmt: skip
    return Asked(shape=shape, call=call.name, who=who, rows=tuple(rows))


def _heads(recipe: Recipe) -> tuple[int, list[str]]:
    parallel = recipe.parallel
    own = recipe.model.heads // parallel.tp
    says = [f"{recipe.model.heads} heads / TP {parallel.tp} = {own} heads a rank"]
    heads = recipe.heads
    if parallel.dcp > 1:
        says.append(f"{own} heads x DCP {parallel.dcp} = {heads} heads, gathered before the call")
    if recipe.model.family == "deepseek-v4":
        padded = next((known for known in PADDED_HEADS if heads <= known), heads)
        if padded != heads:
            says.append(f"{heads} heads are padded to {padded}")
        heads = padded
    return heads, says


def _calls(recipe: Recipe, who: Who, draft_step: int) -> Iterator[_Ids]:
    if who == "draft" and recipe.drafts.method == "dspark":
        yield _draft_call(recipe, draft_step)
        return
    for name in recipe.attention.calls:
        yield _call(recipe, name)


def _call(recipe: Recipe, name: Call) -> _Ids:
    model, attention = recipe.model, recipe.attention
    topk, window = model.index_topk or 0, model.sliding_window or 0
    page = attention.page
    if name == "sparse":
        why = f"sparse: index_topk {topk} ids a row into pages of {page}"
        return _Ids(name=name, topk=topk, page=page, why=why)
    main = f"{name}: {window} ids of the window into pages of {page}"
    if name == "window":
        return _Ids(name=name, topk=window, page=page, why=main)
    if name == "c4":
        extra, extra_page = topk, max(1, attention.block // 4)
        why = f"index_topk {topk} ids into pages of {attention.block} / 4 = {extra_page}"
    else:
        states = -(-recipe.limits.max_model_len // 128)
        extra, extra_page = _up(states, _ALIGN_C128), max(1, attention.block // 128)
        why = (
            f"max_model_len {recipe.limits.max_model_len} / 128 = {states}, in steps of "
            f"{_ALIGN_C128}: {extra} ids into pages of {attention.block} / 128 = {extra_page}"
        )
    return _Ids(
        name=name, topk=window, page=page, why=f"{main}, and {why}",
        extra_topk=extra, extra_page=extra_page,
    )  # fmt: skip


def _draft_call(recipe: Recipe, step: int) -> _Ids:
    window, tokens, page = recipe.model.sliding_window, recipe.drafts.tokens, recipe.attention.page
    topk = recipe.drafts.topk
    if topk is not None or window is None:
        topk = topk or recipe.model.index_topk or 0
        why = f"draft: {topk} ids a row, as the recipe says"
    else:
        topk = _up(window + tokens, step)
        why = (
            f"draft: window {window} + {tokens} drafts = {window + tokens}, in steps of "
            f"{step}: {topk} ids a row"
        )
    return _Ids(name="draft", topk=topk, page=page, why=f"{why} into pages of {page}")


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _steps(recipe: Recipe, edge: int) -> Iterator[Rows]:
    """All steps that reach the kernels, and their rows; ``edge``: the decode table's last."""
    drafts, tokens = recipe.drafts, recipe.drafts.tokens
    yield from _warmup(recipe)
    yield from _batches(
        recipe, "target", recipe.rows_a_request, edge, f"(1 + {tokens} drafts)" if tokens else ""
    )
    yield from _prompts(recipe, "target")
    if drafts.method == "mtp":
        # A drafting model first takes the step's tokens, then drafts one by one
        yield from _batches(recipe, "draft", 1 + tokens, edge, f"(1 + {tokens} drafts)")
        yield from _batches(recipe, "draft", 1, edge, "")
        yield from _prompts(recipe, "draft")
    elif drafts.method == "dspark":
        rows = tokens if drafts.anchor else 1 + tokens
        words = f"{tokens} drafts" if drafts.anchor else f"(1 + {tokens} drafts)"
        yield from _batches(recipe, "draft", rows, edge, words)


def _batches(recipe: Recipe, who: Who, query: int, edge: int, words: str) -> Iterator[Rows]:
    """Batches of decoding requests: each captured one, the fewest, the most, and those between
    which the table changes.
    """
    seqs = recipe.limits.max_num_seqs

    def why(requests: int) -> str:
        plural = "s" * (requests != 1)
        rows = f" x {words}" if words else ""
        return f"{requests} request{plural}{rows} = {requests * query} rows"

    for rows in captured(recipe, query):
        requests = rows // query
        padded = "" if rows % query == 0 else f", as a graph of {rows} rows"
        yield Rows(who=who, when="graph", rows=rows, why=why(requests) + padded)
    last = edge // query
    for requests in sorted({1, seqs, *(n for n in (last, last + 1) if 1 <= n <= seqs)}):
        yield Rows(who=who, when="decode", rows=requests * query, why=why(requests))


def captured(recipe: Recipe, query: int) -> tuple[int, ...]:
    """Rows of the CUDA graphs of batches with ``query`` rows a request, fewest first.

    As vLLM chooses them: its sizes, each rounded up to whole requests, up to the most requests.
    Graphs of mixed batches are not rounded.
    """
    graphs, limits = recipe.graphs, recipe.limits
    if graphs.mode == "none":
        return ()
    most = limits.max_num_seqs * query
    sizes = graph_sizes(recipe)
    decode = {_up(size, query) for size in sizes}
    found = {size for size in decode if size <= min(most, sizes[-1])} if sizes else set()
    return tuple(sorted(found | set(sizes if graphs.mode == "full" else ())))


def graph_sizes(recipe: Recipe) -> tuple[int, ...]:
    """The sizes that vLLM captures, in tokens: the recipe's own, or vLLM's choice."""
    graphs, limits = recipe.graphs, recipe.limits
    tokens = limits.max_num_batched_tokens
    if graphs.sizes is not None:
        return tuple(sorted({size for size in graphs.sizes if size <= tokens}))
    chosen = min(limits.max_num_seqs * recipe.rows_a_request * 2, MAX_GRAPH)
    most = min(graphs.max_size or chosen, tokens)
    sizes = {1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)}
    return tuple(sorted(size for size in sizes | {tokens} if size <= most))


def _warmup(recipe: Recipe) -> Iterator[Rows]:
    """The mixed step that tunes the kernels, and the prompt that comes before it."""
    parallel, attention = recipe.parallel, recipe.attention
    rows = min(WARMUP_ROWS, recipe.limits.max_num_batched_tokens)
    if attention.prompts == "elsewhere":
        yield Rows(who="target", when="warmup", rows=1, why="warmup: 1 decoding request = 1 row")
        return
    prompt, words = 2, "2 tokens"
    if parallel.dcp > 1:
        prompt = max(2, attention.block * parallel.dcp)
        words = f"a KV block of {attention.block} on each of {parallel.dcp} DCP ranks"
    if prompt <= recipe.limits.max_num_batched_tokens:
        why = f"warmup: a prompt of {words} = {prompt} rows"
        yield Rows(who="target", when="warmup", rows=prompt, why=why)
    why = f"warmup: 1 decoding request and a prompt of {rows - 1} tokens = {rows} rows"
    yield Rows(who="target", when="warmup", rows=rows, why=why)


def _prompts(recipe: Recipe, who: Who) -> Iterator[Rows]:
    """Prompts, beside decoding requests or alone, from the shortest to a full batch."""
    if recipe.attention.prompts == "elsewhere":
        return
    tokens = recipe.limits.max_num_batched_tokens
    yield Rows(who=who, when="prompt", rows=1, why="a prompt of 1 token = 1 row")
    why = f"prompts and decoding requests up to max_num_batched_tokens = {tokens} rows"
    yield Rows(who=who, when="prompt", rows=tokens, why=why)
