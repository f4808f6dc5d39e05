"""A recipe: a named way to serve a model, as its file in ``images/recipes`` says it.

Nothing here looks at a source. A value of the file can be replaced from the command line, and is
then checked as if the file had said it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from overlay.errors import LineError, RecipeError
from overlay.lines.line import Strict, _suggest, read_toml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FOLDER, SUFFIX = "images/recipes", ".toml"
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}\Z")

# Bounds no launch comes near, so that a slip of the keyboard is an error and not hours of asking
_Positive = Annotated[int, Meta(ge=1, le=1 << 24)]
_Count = Annotated[int, Meta(ge=0, le=1024)]
_Captured = Annotated[int, Meta(ge=1, le=8192)]

# What a layer asks of the kernels: see docs/recipes.md
Call = Literal["sparse", "window", "c4", "c128"]
Family = Literal["glm", "deepseek-v3.2", "deepseek-v4"]
# The class that vLLM loads for a family
ARCHITECTURES: dict[Family, str] = {
    "glm": "GlmMoeDsaForCausalLM",
    "deepseek-v3.2": "DeepseekV32ForCausalLM",
    "deepseek-v4": "DeepseekV4ForCausalLM",
}


class Model(Strict, frozen=True):
    """The model, as far as attention goes.

    Attributes:
        name: for people.
        family: decides how FlashInfer packs a token of the KV cache.
        heads: query heads, over all ranks.
        index_topk: ids that the indexer gives a row; None for a model without one.
        sliding_window: tokens of the window cache (deepseek-v4).
        layers: with attention, drafts included; None where no public source says it.
        weights_gib: of the whole model; None where it isn't known.
    """

    name: str
    family: Family
    heads: _Positive
    index_topk: _Positive | None = None
    sliding_window: _Positive | None = None
    layers: _Positive | None = None
    weights_gib: Annotated[float, Meta(gt=0, le=1 << 24)] | None = None


class Attention(Strict, frozen=True):
    """How attention is served.

    Attributes:
        backend: vLLM's name of it.
        calls: what the layers ask of the kernels, one for each kind of layer.
        kv_cache_dtype: as vLLM's flag takes it.
        page: tokens a page of the cache that the kernel is given.
        block: tokens a KV block of vLLM, before any compression.
        prompts: who computes the rows of prompts: these kernels, or others of the backend.
    """

    backend: str
    calls: Annotated[tuple[Call, ...], Meta(min_length=1)]
    kv_cache_dtype: str = "fp8"
    page: _Positive = 64
    block: _Positive = 64
    prompts: Literal["kernel", "elsewhere"] = "kernel"


class Parallel(Strict, frozen=True):
    """Ranks: tensor parallel, decode context parallel, tokens a rank holds in a run."""

    tp: _Positive
    dcp: _Positive = 1
    interleave: _Positive = 1


class Drafts(Strict, frozen=True):
    """Speculative decoding.

    Attributes:
        method: ``mtp`` drafts one token after the other, ``dspark`` all in one pass.
        tokens: drafts a step.
        topk: ids a row of the draft's non-causal window; None as vLLM computes it.
        anchor: whether the first of the draft's query rows gives a draft itself, so that a
            request has ``tokens`` rows and not one more (``dspark``).
    """

    method: Literal["none", "mtp", "dspark"] = "none"
    tokens: _Count = 0
    topk: _Positive | None = None
    anchor: bool = False


class Limits(Strict, frozen=True):
    """What bounds a batch."""

    max_num_seqs: _Positive
    max_num_batched_tokens: _Positive
    max_model_len: _Positive
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.95


class Graphs(Strict, frozen=True):
    """Which batches become CUDA graphs.

    Attributes:
        mode: ``full-decode`` captures decode batches, ``full`` mixed ones too, ``none`` nothing.
        sizes: rows that are captured; None as vLLM chooses.
        max_size: the largest one that vLLM may choose.
    """

    mode: Literal["full-decode", "full", "none"] = "full-decode"
    sizes: Annotated[tuple[_Captured, ...], Meta(min_length=1, max_length=1024)] | None = None
    max_size: _Captured | None = None


class Serve(Strict, frozen=True):
    """Flags of ``vllm serve`` that nothing above says, and environment variables."""

    flags: tuple[str, ...] = ()
    environment: dict[str, str] = msgspec.field(default_factory=dict)


class Recipe(Strict, frozen=True):
    """``images/recipes/NAME.toml``.

    Attributes:
        format: of this file; 1.
        summary: one sentence.
        cards: GiB of memory of the cards that it is served on.
    """

    format: Literal[1]
    summary: str
    model: Model
    attention: Attention
    parallel: Parallel
    limits: Limits
    drafts: Drafts = Drafts()
    graphs: Graphs = Graphs()
    serve: Serve = Serve()
    cards: Annotated[tuple[_Positive, ...], Meta(min_length=1)] = (32, 96)

    def __post_init__(self) -> None:
        if self.model.heads % self.parallel.tp:
            raise ValueError(
                f"'model.heads' {self.model.heads} can't be shared by 'parallel.tp' "
                f"{self.parallel.tp} ranks"
            )
        if (self.drafts.method == "none") != (self.drafts.tokens == 0):
            raise ValueError("'drafts.method' is 'none' exactly where 'drafts.tokens' is 0")
        if self.drafts.topk is not None and self.drafts.method != "dspark":
            raise ValueError("'drafts.topk' is of 'dspark' alone: other drafts attend as the model")
        windows = {"window", "c4", "c128"} & set(self.attention.calls)
        if windows and self.model.sliding_window is None:
            raise ValueError(f"'attention.calls' {sorted(windows)} need 'model.sliding_window'")
        if self.graphs.mode == "none" and (self.graphs.sizes or self.graphs.max_size):
            raise ValueError("'graphs.mode' is 'none': there are no sizes to choose")

    @property
    def rows_a_request(self) -> int:
        """Rows that one decoding request has in a step of the model."""
        return 1 + self.drafts.tokens

    @property
    def heads(self) -> int:
        """Query heads of a decode call: a rank's own, those of its DCP group gathered."""
        return self.model.heads // self.parallel.tp * self.parallel.dcp


def find_recipes(folder: Path) -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}") if path.is_file())


def read_recipe(folder: Path, name: str, settings: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        folder: of the recipes.
        name: without suffix.
        settings: ``KEY=VALUE``, each in place of the file's value. ``KEY`` is a table and a key
            (``parallel.tp``), or the key alone; ``VALUE`` is TOML, or else a string; none at all
            takes the file's value away.

    Raises:
        RecipeError: there is none of that name; a key or a value is wrong.
    """
    path = folder / f"{name}{SUFFIX}"
    if not NAME.match(name) or not path.is_file():
        raise RecipeError(
            f"there is no recipe {name!r}",
            why=f"no file {FOLDER}/{name}{SUFFIX}",
            fix=_suggest(name, find_recipes(folder)),
        )
    try:
        recipe = read_toml(path, Recipe)
    except LineError as error:
        raise RecipeError(error.what, why=error.why, fix=error.fix) from None
    return override(recipe, settings) if settings else recipe


def override(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """``recipe`` with some values replaced; see ``read_recipe``."""
    raw: dict[str, Any] = msgspec.to_builtins(recipe)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: no '='", fix="say KEY=VALUE, such as tp=4")
        table, leaf = _place(raw, key.strip())
        if not text.strip():
            table.pop(leaf, None)
        else:
            is_text = table is raw["serve"]["environment"]
            table[leaf] = text.strip() if is_text else _value(text.strip())
    # A combination is wrong or right as a whole: --set tokens=0 --set method=none
    try:
        return msgspec.convert(raw, Recipe)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        where = at.strip("`.")
        raise RecipeError(
            f"--set {' '.join(settings)}: {f'{where}: ' if where else ''}"
            f"{message[:1].lower()}{message[1:]}",
            fix="see docs/recipes.md for what a value may be",
        ) from None


def _place(raw: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The table that a key is in. A table's name and the key, or the key alone."""
    table, _, leaf = key.rpartition(".")
    if not table and key in raw and not isinstance(raw[key], dict):
        return raw, key
    if table == "serve.environment":
        return raw["serve"]["environment"], leaf
    known = {
        f"{name}.{field.name}": raw[name]
        for name, kind in _TABLES.items()
        for field in msgspec.structs.fields(kind)
    }
    found = [name for name in known if name == key or name.endswith(f".{key}")]
    if len(found) != 1:
        leaves = [name.partition(".")[2] for name in known] if not table else list(known)
        raise RecipeError(
            f"--set {key}: no such key in a recipe"
            if not found
            else f"--set {key}: several keys end so: {', '.join(found)}",
            fix=_suggest(key, leaves) if not found else f"say {found[0]} or another",
        )
    return known[found[0]], found[0].partition(".")[2]


_TABLES: dict[str, type[Strict]] = {
    "model": Model,
    "attention": Attention,
    "parallel": Parallel,
    "drafts": Drafts,
    "limits": Limits,
    "graphs": Graphs,
    "serve": Serve,
}


def _value(text: str) -> Any:
    """A TOML value, or the text itself: shells eat quotes."""
    try:
        return msgspec.toml.decode(f"value = {text}".encode())["value"]
    except msgspec.DecodeError:
        return text
