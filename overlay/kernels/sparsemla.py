"""Asks FlashInfer's sparse-MLA dispatch code for SM120, in the layouts that it has had.

``Tables`` is 0.6: tables or small functions in Python say what decode is for, and C++ launchers
take head counts, top-k and pages apart. 0.7.0 is the same with a planner in Python.
``Resolver`` is what followed: one resolver in C++, which the planner asks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from overlay.kernels.capability import Answer, Phase, Shape, Told
from overlay.kernels.cxx import NotUnderstoodError, read_text, read_unit
from overlay.kernels.cxxexpressions import RefusedError
from overlay.kernels.cxxvalues import POINTER, SIZE_MAX, Object, Opaque
from overlay.kernels.dispatch import Dispatch, Outcome
from overlay.kernels.pypolicy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlay.kernels.capability import Source
    from overlay.trees.match import Tree

RESOLVER = "csrc/sparse_mla_sm120/attention_resolve.cu"
RESOLVER_POLICY = "flashinfer/mla/_sparse_mla_sm120/_policy.py"
PREFILL = "csrc/sparse_mla_sm120_prefill.cu"
ENTRY = "csrc/sparse_mla_sm120.cu"
BINDING = "csrc/sparse_mla_sm120_jit_binding.cu"
TABLES = "flashinfer/mla/_sparse_mla_sm120.py"
PLANNER = "flashinfer/mla/_sparse_mla_sm120_plan.py"
_LIMIT = "_DECODE_MAX_TOKENS"
_DISPATCHABLE = re.compile(r"_decode_\w+_dispatchable")
# The launchers of decode: source, function, function of the binding that checks before it
_LAUNCHERS = (
    ("csrc/sparse_mla_sm120_decode_dsv4.cu", "launch_sparse_mla_decode_dsv4",
     "SparseMlaSm120DecodeDsv4"),
    ("csrc/sparse_mla_sm120_decode_dsv3_2.cu", "launch_sparse_mla_decode_dsv3_2",
     "SparseMlaSm120DecodeDsv3_2"),
)  # fmt: skip
_ROUND = 16  # bytes to which the resolver's own question rounds pages up


def open_source(tree: Tree) -> Source:
    """The reader for a tree's layout.

    Raises:
        NotUnderstoodError: it is none of those that are known, or says not the least of itself.
    """
    if read_text(tree, RESOLVER) is not None:
        return Resolver(tree)
    if read_text(tree, PREFILL) is not None:
        return Tables(tree)
    raise NotUnderstoodError(f"neither {RESOLVER} nor {PREFILL} is there")


class _Layout:
    """What both layouts share: sources read once, and answers instead of exceptions."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._dispatch: dict[str, Dispatch] = {}

    def dispatch(self, path: str) -> Dispatch:
        """The functions of one source. Raises ``NotUnderstoodError``."""
        if path not in self._dispatch:
            self._dispatch[path] = Dispatch(read_unit(self.tree, path))
        return self._dispatch[path]

    def policy_of(
        self, path: str, natives: Mapping[str, Callable[..., Any]] | None = None
    ) -> Policy:
        """The functions of one Python source. Raises ``NotUnderstoodError``."""
        text = read_text(self.tree, path)
        if text is None:
            raise NotUnderstoodError("no such file", path)
        return Policy(path, text, natives)

    def ask(self, shape: Shape) -> Told:
        """What the code does with one shape."""
        try:
            return self.decode(shape) if shape.phase == Phase.DECODE else self.prefill(shape)
        except NotUnderstoodError as error:
            return Told(answer=Answer.UNKNOWN, why=error.what, where=error.where)
        except RefusedError as error:
            return _refused(error.why, error.where)

    def decode(self, shape: Shape) -> Told:
        """What decode does with a shape."""
        raise NotImplementedError

    def prefill(self, shape: Shape) -> Told:
        """What prefill does with a shape."""
        raise NotImplementedError


class Tables(_Layout):
    """0.6.14 to 0.7.0: launchers in C++, what they are for also in Python."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._is_planned = read_text(tree, PLANNER) is not None
        self._policy = self.policy_of(PLANNER if self._is_planned else TABLES)
        self._types = _enumerators(self.dispatch(PREFILL), "ModelType")
        self.decode_max_rows = _positive(self._policy.constant(_LIMIT), self._policy, _LIMIT)

    @property
    def models(self) -> tuple[str, ...]:
        """Model types, in lower case."""
        return tuple(name.lower() for name in self._types)

    def decode(self, shape: Shape) -> Told:
        """The launcher that takes the model, after what Python says of the shape."""
        name, allows = self._allows_decode(shape)
        if not allows:
            return _refused(f"{name} has no decode for this shape", self._policy.where(_LIMIT))
        told = [self._launch_decode(shape, *launcher) for launcher in _LAUNCHERS]
        for answer in (Answer.SUPPORTED, Answer.UNKNOWN):
            for one in told:
                if one.answer is answer:
                    return one
        # Not what the launcher of other models says of this one
        return min(told, key=lambda one: "mt " in one.why or "d_qk" in one.why)

    def _launch_decode(self, shape: Shape, path: str, function: str, binding: str) -> Told:
        launcher = self.dispatch(path)
        parameters = {p for p, _, _ in launcher.function(function).parameters}
        if shape.extra_topk and not any("extra" in p for p in parameters):
            return _refused(f"{function}() takes no secondary cache", path)
        given = {
            **self._given(shape),
            "num_splits": _tiles(shape.topk) + _tiles(shape.extra_topk),
            "extra_topk": shape.extra_topk,
            "pbs_extra": shape.extra_page,
        }
        try:
            self.dispatch(BINDING).check(binding, self._checked(shape))
            return self._with_lengths(launcher, function, shape, given)
        except RefusedError as error:
            return _refused(error.why, error.where)

    def prefill(self, shape: Shape) -> Told:
        """The prefill dispatcher, after what the entry checks and the planner chooses."""
        given = self._given(shape)
        if self._is_planned:
            variant = self._policy.call("prefill_variant", self._planned(shape))
            if variant is None:
                where = self._policy.where("prefill_variant")
                return _refused("prefill_variant() has none for this shape", where)
            given["variant"] = variant
        self.dispatch(ENTRY).check("SparseMlaSm120PagedAttention", self._checked(shape))
        name = "sparse_mla_prefill_dispatch"
        return self._with_lengths(self.dispatch(PREFILL), name, shape, given)

    def _allows_decode(self, shape: Shape) -> tuple[str, bool]:
        """The function of the Python source that decides, and what it says."""
        names = ["decode_splitk_eligible"]
        if not self._is_planned:  # one a family, each for its own width of the query
            names = [n for n in self._policy.functions if _DISPATCHABLE.fullmatch(n)]
        if not names:
            raise NotUnderstoodError("no function says what decode is for", self._policy.path)
        for name in names:
            if self._policy.call(name, self._planned(shape)) is True:
                return name, True
        return " or ".join(names), False

    def _planned(self, shape: Shape) -> dict[str, Any]:
        """A shape in the words of the Python sources."""
        return {
            "model_type": self._types[shape.model.upper()],
            "num_tokens": shape.rows,
            "num_heads": shape.heads,
            "topk": shape.topk,
            "d_qk": self._width(shape),
            "page_block_size": shape.page,
            "has_extra": shape.extra_topk > 0,
            "extra_topk": shape.extra_topk,
            "prefill_impl_pref": 0,
        }

    def _width(self, shape: Shape) -> Any:
        return self.dispatch(PREFILL).static(
            "KVCacheTraits", self._types[shape.model.upper()], "D_QK"
        )

    def _checked(self, shape: Shape) -> dict[str, Any]:
        """A shape in the words of the checks before the launchers."""
        return {
            "mt": self._types[shape.model.upper()],
            "num_tokens": shape.rows,
            "num_heads": shape.heads,
            "topk": shape.topk,
            "d_qk": self._width(shape),
            "page_block_size": shape.page,
        }

    def _given(self, shape: Shape) -> dict[str, Any]:
        """A shape in the words of the launchers; what they are given beyond it stays opaque."""
        extra = POINTER if shape.extra_topk else None
        model = self._types[shape.model.upper()]
        size = self.dispatch(ENTRY).run("bytes_per_token", {"mt": model}).value
        given = {
            "mt": model,
            "num_heads": shape.heads,
            "topk": shape.topk,
            "page_block_size": shape.page,
            "topk_extra": shape.extra_topk,
            "extra_page_block_size": shape.extra_page,
            "extra_KV_cache": extra,
            "extra_indices": extra,
            "num_tokens": shape.rows,
        }
        if isinstance(size, int):  # pages that lie end to end
            given["stride_kv_block"] = shape.page * size
            given["stride_kv_block_extra"] = shape.extra_page * size
            given["stride_extra_kv_block"] = shape.extra_page * size
        return given

    def _with_lengths(
        self, dispatch: Dispatch, name: str, shape: Shape, given: Mapping[str, Any]
    ) -> Told:
        """Supported is what goes both without and with a length a row."""
        told = []
        for length in (None, POINTER):
            extra = length if shape.extra_topk else None
            lengths = {"topk_length": length, "extra_topk_length": extra}
            told.append(self._judge(name, shape, dispatch.run(name, {**given, **lengths})))
        return next((one for one in told if one.answer is not Answer.SUPPORTED), told[-1])

    def _judge(self, name: str, shape: Shape, outcome: Outcome) -> Told:
        if isinstance(outcome.value, Opaque) or not isinstance(outcome.value, bool):
            raise NotUnderstoodError(f"what {name}() returns isn't known", outcome.where)
        if not outcome.value:
            reason = f" because {outcome.because}" if outcome.because else ": no case is for it"
            return _refused(f"{name}() returns false{reason}", outcome.where)
        if not outcome.launches:
            raise NotUnderstoodError(f"{name}() returns true and starts nothing", outcome.where)
        launch = outcome.launches[-1]
        wants = {
            "MT": self._types[shape.model.upper()],
            "NUM_HEADS": shape.heads,
            "TOPK": shape.topk,
            "PAGE_BLOCK_SIZE": shape.page,
            "PAGE_BLOCK_SIZE_EXTRA": shape.extra_page,
        }
        for key, wanted in wants.items():
            has = launch.arguments.get(key, wanted)
            if isinstance(has, Opaque):
                raise NotUnderstoodError(f"{launch.name}: {key} isn't known", launch.where)
            # 0 is how the sources spell "given when it runs"; only 0.7 has it
            if has != wanted and (key == "MT" or has != 0):
                why = f"{launch.name} would start a kernel for {key} {has}, asked for {wanted}"
                return _refused(f"no check, but {why}", launch.where)
        return Told(answer=Answer.SUPPORTED, why=launch.name, where=launch.where)


class Resolver(_Layout):
    """0.7.1 and later: what the compiled module answers to ``candidates`` and its like."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._resolver = self.dispatch(RESOLVER)
        self._types = _enumerators(self._resolver, "ModelType")
        self._variants = _enumerators(self._resolver, "PrefillVariant")
        self._routes = _enumerators(self._resolver, "NumericRoute")
        self._asked: dict[tuple[Any, ...], frozenset[int]] = {}
        self._policy = self.policy_of(RESOLVER_POLICY, {"_candidates": self._candidates})
        self.decode_max_rows = _positive(self._policy.constant(_LIMIT), self._policy, _LIMIT)

    @property
    def models(self) -> tuple[str, ...]:
        """Model types, in lower case."""
        return tuple(name.lower() for name in self._types)

    def _candidates(
        self, model: int, heads: int, topk: int, page: int, dual: bool, extra_page: int = 64
    ) -> frozenset[int]:
        """What the compiled module's ``candidates`` would return; the default is the policy's."""
        key = (model, heads, topk, page, dual, extra_page)
        if key not in self._asked:
            given = {
                "model": model, "heads": heads, "topk": topk, "page": page, "dual": dual,
                "extra_page": extra_page, "precision": "default",
            }  # fmt: skip
            found = self._resolver.run("candidates", given).value
            if not isinstance(found, list) or not all(isinstance(v, int) for v in found):
                raise NotUnderstoodError("what candidates() returns isn't known", RESOLVER)
            self._asked[key] = frozenset(found)
        return self._asked[key]

    def decode(self, shape: Shape) -> Told:
        """Variant 0 of the resolver; what the policy refuses beyond it is said as it stands."""
        name = "decode_splitk_eligible"
        told = self._explain(shape, 0)
        if self._policy.call(name, self._planned(shape)) is True:
            return told
        if told.answer is not Answer.SUPPORTED:
            return told
        return _refused(f"{name}() refuses {shape.rows} rows", self._policy.where(name))

    def prefill(self, shape: Shape) -> Told:
        """The variant that the policy chooses, with the actual metadata."""
        variant = self._policy.call("prefill_variant", self._planned(shape))
        if variant is None:
            tried = [self._explain(shape, v) for v in self._variants.values()]
            refused = next((t for t in tried if t.answer is not Answer.SUPPORTED), tried[0])
            why = f"prefill_variant() has none for this shape; the last refusal: {refused.why}"
            return _refused(why, refused.where)
        page = shape.extra_page or 64
        actual = self._candidates(
            self._types[shape.model.upper()], shape.heads, shape.topk, shape.page,
            shape.extra_topk > 0, page,
        )  # fmt: skip
        if variant not in actual:
            return _refused(f"candidates() lacks variant {variant} for page {page}", RESOLVER)
        return self._explain(shape, variant)

    def _planned(self, shape: Shape) -> dict[str, Any]:
        return {
            "model_type": self._types[shape.model.upper()],
            "num_heads": shape.heads,
            "topk": shape.topk,
            "page_block_size": shape.page,
            "has_extra": shape.extra_topk > 0,
            "num_tokens": shape.rows,
            "prefill_impl_pref": 0,
        }

    def _explain(self, shape: Shape, variant: int) -> Told:
        """What the resolver itself makes of a variant, both with and without a length a row."""
        outcome = None
        for lengths in (False, True):
            given = {
                "m": self._metadata(shape, variant, lengths),
                "requested": self._routes.get("QkBF16PvFP8"),
                "requested_cpb": 1,
                "caps": Object("DeviceCaps", {"sm_count": 1, "max_shared_bytes": SIZE_MAX}),
            }
            try:
                outcome = self._resolver.run("resolve_attention", given)
            except RefusedError as error:
                return _refused(error.why, error.where)
        names = {v: n for n, v in self._variants.items()}
        where = outcome.where if outcome is not None else RESOLVER
        what = names.get(variant, "split-K decode")
        return Told(answer=Answer.SUPPORTED, why=f"resolve_attention: {what}", where=where)

    def _metadata(self, shape: Shape, variant: int, lengths: bool) -> Object:
        """The resolver's question, for a cache that is dense: no gaps between rows or pages."""
        model = self._types[shape.model.upper()]
        size = self._resolver.run("bytes_per_token", {"mt": model}).value
        if not isinstance(size, int):
            raise NotUnderstoodError("bytes a token aren't known", RESOLVER)
        dual = shape.extra_topk > 0
        return Object(
            "AttentionMetadata",
            {
                "model": model,
                "tokens": shape.rows,
                "heads": shape.heads,
                "topk": shape.topk,
                "extra_topk": shape.extra_topk,
                "page_size": shape.page,
                "extra_page_size": shape.extra_page,
                "page_stride_bytes": -(-shape.page * size // _ROUND) * _ROUND,
                "extra_page_stride_bytes": -(-shape.extra_page * size // _ROUND) * _ROUND,
                "row_stride_bytes": size,
                "extra_row_stride_bytes": size if dual else 0,
                "indices_stride": shape.topk,
                "extra_indices_stride": shape.extra_topk,
                "lse_stride": shape.heads,
                "has_lengths": lengths,
                "has_extra_lengths": lengths and dual,
                "has_sink": False,
                "extra_fp4": False,
                "variant": variant,
            },
        )


def _refused(why: str, where: str) -> Told:
    return Told(answer=Answer.UNSUPPORTED, why=why, where=where)


def _tiles(topk: int) -> int:
    return -(-topk // 64)


def _enumerators(dispatch: Dispatch, name: str) -> dict[str, int]:
    found = dispatch.unit.enums.get(name)
    if not found:
        raise NotUnderstoodError(f"no enum {name}", dispatch.unit.path)
    return found


def _positive(value: Any, policy: Policy, name: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise NotUnderstoodError(f"{name} is {value!r}", policy.where(name))
    return value
