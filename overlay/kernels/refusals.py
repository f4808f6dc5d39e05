"""What vLLM refuses of a recipe whatever kernels there are: its own checks, quoted.

Each check is looked for in the patched tree. One that can't be found says nothing: the answer is
then ``unknown``, never that all is well.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from overlay.errors import UnavailableError
from overlay.kernels.recipe import ARCHITECTURES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.kernels.recipe import Recipe
    from overlay.trees.match import Tree

MLA = "vllm/v1/attention/backends/mla"
REGISTRY = "vllm/v1/attention/backends/registry.py"
SM120, SM120_IMPL = f"{MLA}/flashinfer_mla_sparse.py", f"{MLA}/flashinfer_mla_sparse_sm120.py"
DSV4 = "vllm/models/deepseek_v4/nvidia/flashinfer_sparse.py"
INDEXER, CONFIG = f"{MLA}/indexer.py", "vllm/config/vllm.py"
PARALLEL, CP = "vllm/config/parallel.py", "vllm/v1/worker/cp_utils.py"
WARMUP = "vllm/model_executor/warmup/flashinfer_sparse_mla_warmup.py"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

_CLASSES = {
    "FLASHINFER_MLA_SPARSE_SM120": (SM120, "FlashInferMLASparseSM120Backend"),
    "FLASHINFER_MLA_SPARSE_DSV4": (DSV4, "DeepseekV4FlashInferMLASparseBackend"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One check that a recipe does not pass, or that could not be found.

    Attributes:
        answer: ``refused``, or ``unknown`` where the sources could not be read so far.
        what: the recipe's value and what is expected.
        where: file and line; the file alone where the check wasn't found.
        quote: the line of source.
    """

    answer: Literal["refused", "unknown"]
    what: str
    where: str
    quote: str = ""


@dataclass(frozen=True, slots=True)
class Quote:
    """A place in a file: its path, line number, text, and what a pattern's first group caught."""

    path: str
    line: int
    text: str
    group: str = ""

    @property
    def where(self) -> str:
        """``path:line``."""
        return f"{self.path}:{self.line}"


class Reader:
    """Finds text in files of a tree; each file is read once."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._texts: dict[str, str | None] = {}

    def text(self, path: str) -> str | None:
        """A file's text; None where the tree has no such file, or not its content."""
        if path not in self._texts:
            try:
                entry = self._tree.get(path.encode())
            except UnavailableError:  # filled from git, blobs on demand
                entry = None
            self._texts[path] = entry.data.decode("utf-8", "replace") if entry else None
        return self._texts[path]

    def find(self, path: str, pattern: str) -> Quote | None:
        """The first place that a pattern matches, ``^`` being the start of a line."""
        text = self.text(path)
        found = re.search(pattern, text, re.MULTILINE) if text is not None else None
        return self.quote(path, text, found) if text is not None and found else None

    @staticmethod
    def quote(path: str, text: str, found: re.Match[str]) -> Quote:
        """The line in which a match starts, blanks at its start left out."""
        start = found.start() + len(found[0]) - len(found[0].lstrip())
        line = text.count("\n", 0, start)
        group = found[1] if found.re.groups and found[1] is not None else ""
        return Quote(path, line + 1, text.splitlines()[line].strip(), group)

    def parsed(self, path: str) -> ast.Module | None:
        """A file's syntax tree; None where there is none that can be parsed."""
        try:
            return ast.parse(self.text(path) or "") if self.text(path) is not None else None
        except SyntaxError:
            return None


def refusals(tree: Tree, recipe: Recipe) -> tuple[Refusal, ...]:
    """All checks of a patched vLLM tree that refuse a recipe, or can't be found.

    Args:
        tree: the patched vLLM tree.
        recipe: what is to be served.
    """
    reader = Reader(tree)
    return tuple(refusal for rule in _RULES for refusal in rule(reader, recipe))


def _refused(quote: Quote, what: str) -> Refusal:
    return Refusal(answer="refused", what=what, where=quote.where, quote=quote.text)


def _unknown(path: str, what: str) -> Refusal:
    return Refusal(answer="unknown", what=f"{what}: the check can't be found", where=path)


def _is_sm120(recipe: Recipe) -> bool:
    return recipe.attention.backend == "FLASHINFER_MLA_SPARSE_SM120"


def _backend(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    name = recipe.attention.backend
    listed = reader.find(REGISTRY, r"^class AttentionBackendEnum\b.*")
    if listed is None:
        yield _unknown(REGISTRY, "which backends there are")
    elif reader.find(REGISTRY, rf"^\s+{re.escape(name)} = ") is None:
        yield _refused(listed, f"this vLLM has no backend {name}")
    elif name not in _CLASSES:
        yield _unknown(REGISTRY, f"what {name} asks of a recipe")


def _index_topk(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    if not _is_sm120(recipe):
        return
    topk = recipe.model.index_topk
    if topk is None:
        quote = reader.find(SM120, r"if index_topk is None:")
        what = "the model has no top-k indexer (index_topk)"
        yield _refused(quote, what) if quote else _unknown(SM120, what)
        return
    quote = reader.find(SM120, r"if int\(index_topk\) != (\d+):")
    if quote is None:
        yield _unknown(SM120, f"index_topk {topk}")
    elif int(quote.group) != topk:
        yield _refused(quote, f"index_topk is {topk}, and must be {quote.group}")


def _kv_type(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    where = _CLASSES.get(recipe.attention.backend)
    if where is None:
        return
    given = recipe.attention.kv_cache_dtype
    found = _kv_types(reader, *where)
    if found is None:
        yield _unknown(where[0], f"kv_cache_dtype {given}")
    elif given not in found[1]:
        known = ", ".join(str(kind) for kind in found[1] if kind)
        yield _refused(found[0], f"kv_cache_dtype {given} is none of {known}")


def _kv_types(reader: Reader, path: str, name: str) -> tuple[Quote, tuple[object, ...]] | None:
    """KV types that a backend's ``supports_combination`` takes on SM120, and where it says so."""
    module = reader.parsed(path)
    for node in ast.walk(module) if module else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            method = next(
                (n for n in node.body if isinstance(n, ast.FunctionDef)
                 and n.name == "supports_combination"), None,
            )  # fmt: skip
            if method is None:
                return None
            # A backend for several cards has a branch for each
            branches = [n for n in ast.walk(method) if isinstance(n, ast.If) and _is_major_12(n)]
            for part in ast.walk(branches[0]) if branches else ast.walk(method):
                kinds = _not_in(part)
                if kinds is not None:
                    line = part.lineno  # type: ignore[attr-defined]
                    text = (reader.text(path) or "").splitlines()[line - 1].strip()
                    return Quote(path, line, text), kinds
    return None


def _is_major_12(node: ast.If) -> bool:
    return ast.unparse(node.test) == "device_capability.major == 12"


def _not_in(node: ast.AST) -> tuple[object, ...] | None:
    """The constants of ``kv_cache_dtype not in (...)``."""
    if (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.NotIn)
        and isinstance(node.left, ast.Name)
        and node.left.id == "kv_cache_dtype"
    ):
        try:
            return tuple(ast.literal_eval(node.comparators[0]))
        except (ValueError, TypeError):
            return None
    return None


def _compressed(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    """DeepSeek-V4 under DCP."""
    dcp = recipe.parallel.dcp
    if recipe.model.family != "deepseek-v4" or dcp == 1:
        return
    what = f"DeepSeek-V4 with DCP {dcp}"
    quote = reader.find(
        INDEXER,
        r'"DCP is not supported with sparse indexer KV compression|"DeepSeek-V4 is not supported',
    )
    yield _refused(quote, what) if quote else _unknown(INDEXER, what)


def _context(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    """DCP as such: ranks that divide, an LSE to merge by, kernels for the gathered heads."""
    parallel, heads = recipe.parallel, recipe.heads
    if parallel.dcp == 1:
        return
    quote = reader.find(PARALLEL, r"if tp % dcp != 0:")
    if quote is None:
        yield _unknown(PARALLEL, "which DCP sizes there are")
    elif parallel.tp % parallel.dcp:
        yield _refused(quote, f"TP {parallel.tp} is no multiple of DCP {parallel.dcp}")
    if not _is_sm120(recipe):
        return
    if reader.find(SM120_IMPL, r"^\s+can_return_lse_for_decode(?:: bool)? = True") is None:
        quote = reader.find(CP, r"assert layer_impl\.need_to_return_lse_for_decode")
        what = f"DCP {parallel.dcp} needs an LSE, and this backend returns none"
        yield _refused(quote, what) if quote else _unknown(CP, what)
        return
    quote = reader.find(SM120_IMPL, r"^_SUPPORTED_NUM_HEADS = \(([\d, ]+)\)")
    if quote is None:
        yield _unknown(SM120_IMPL, f"{heads} gathered heads")
    elif heads not in {int(number) for number in re.findall(r"\d+", quote.group)}:
        yield _refused(quote, f"{heads} gathered heads are none of {quote.group}")


def _interleave(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    parallel = recipe.parallel
    if parallel.dcp == 1 or parallel.interleave == 1:
        return
    what = f"cp_kv_cache_interleave_size {parallel.interleave} with DCP {parallel.dcp}"
    quote = reader.find(INDEXER, r'"DCP sparse indexer currently supports only')
    # Newer vLLM asks only that a compressed state lies on one rank
    lifted = reader.find(INDEXER, r"cp_kv_cache_interleave_size % self\.compress_ratio")
    if quote is not None:
        yield _refused(quote, what)
    elif lifted is None:
        yield _unknown(INDEXER, what)
    if recipe.drafts.method == "none" or not _is_sm120(recipe):
        return
    flag = "supports_mtp_with_cp_non_trivial_interleave_size"
    if reader.find(SM120_IMPL, rf"^\s+{flag}(?:: bool)? = True") is None:
        quote = reader.find(CP, rf"assert layer_impl\.{flag}")
        what += f" and {recipe.drafts.tokens} drafts"
        yield _refused(quote, what) if quote else _unknown(CP, what)


def _runner(reader: Reader, recipe: Recipe) -> Iterator[Refusal]:
    """Under DCP the warmup must be the one that gives each rank KV; one runner alone has it."""
    if recipe.parallel.dcp == 1 or not _is_sm120(recipe):
        return
    is_second = uses_second_runner(reader, recipe)
    if is_second is None:
        yield _unknown(CONFIG, "which model runner is taken")
    elif not is_second:
        what = f"the first model runner never runs the warmup that DCP needs: set {RUNNER}=1"
        quote = reader.find(WARMUP, r"if _uses_v2_model_runner\(runner\) and")
        yield _refused(quote, what) if quote else _unknown(WARMUP, what)


def uses_second_runner(reader: Reader, recipe: Recipe) -> bool | None:
    """Whether vLLM takes its second model runner; None where the sources don't say."""
    body = reader.find(CONFIG, r"def use_v2_model_runner\(self\) -> bool:\n((?:.*\n)+?)\n    def ")
    if body is None or f"envs.{RUNNER}" not in body.group:
        return None
    given = recipe.serve.environment.get(RUNNER)
    if given is not None:
        return given not in ("0", "")
    if recipe.drafts.method == "dspark" and '.method == "dspark"' in body.group:
        return True
    if "_is_default_v2_model_runner_model()" in body.group:
        names = reader.find(
            CONFIG, r"^DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset\(\s*\{([^}]*)\}"
        )
        return f'"{ARCHITECTURES[recipe.model.family]}"' in names.group if names else None
    return True if body.group.rstrip().endswith("return True") else None


_RULES = (_backend, _index_topk, _kv_type, _compressed, _context, _interleave, _runner)
