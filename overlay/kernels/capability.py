"""Says which sparse-MLA shapes a FlashInfer tree has kernels for on SM120, from its sources.

No version number and no table of ours is asked: what the tree's own dispatch code does with a
shape is the answer. Code that isn't understood answers ``unknown``, never ``supported``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from overlay.errors import CapabilityError

if TYPE_CHECKING:
    from overlay.trees.match import Tree

# Where FlashInfer has had these kernels so far
KERNEL_PATHS = (
    "csrc/sparse_mla_sm120",
    "csrc/sparse_mla_sm120.cu",
    "include/flashinfer/attention/sparse_mla_sm120",
    "flashinfer/mla/_sparse_mla_sm120",
    "flashinfer/mla/_sparse_mla_sm120.py",
)


class Phase(StrEnum):
    """Which of FlashInfer's two tables a call of so many rows asks."""

    DECODE = "decode"
    PREFILL = "prefill"


class Model(StrEnum):
    """Those of FlashInfer's model types that recipes use: how the KV cache of a token is packed.

    A tree may have others; ``Capability.models`` has all.
    """

    DSV3_2 = "dsv3_2"
    GLM_NSA = "glm_nsa"
    DSV4 = "dsv4"


class Answer(StrEnum):
    """What the sources say of one shape."""

    SUPPORTED = "supported"
    UNSUPPORTED = "unsupported"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One call of the kernels.

    Attributes:
        phase: which table is asked; up to ``Capability.decode_max_rows`` rows it is decode.
        model: how the KV cache is packed: one of FlashInfer's model types, in lower case.
        heads: query heads in the call (under DCP the gathered ones).
        topk: indices a row.
        page: tokens a page of the KV cache.
        extra_topk: indices a row into the secondary cache; 0 for none.
        extra_page: tokens a page of the secondary cache; 0 for none.
        rows: query tokens in the call.
    """

    phase: Phase
    model: str
    heads: int
    topk: int
    page: int
    extra_topk: int = 0
    extra_page: int = 0
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An answer, its reason, and where the sources say so (``csrc/file.cu:LINE``)."""

    answer: Answer
    why: str
    where: str


class Source(Protocol):
    """One way in which FlashInfer lays its dispatch code out."""

    @property
    def models(self) -> tuple[str, ...]:
        """Model types, in lower case."""

    @property
    def decode_max_rows(self) -> int:
        """Most rows of a call that the decode kernels are asked for."""

    def ask(self, shape: Shape) -> Told:
        """What the code does with one shape."""


class Capability:
    """What one tree supports. Made by ``read_capability``.

    Attributes:
        version: as the caller calls the tree; nothing is concluded from it.
        models: FlashInfer's model types, in lower case; none where the sources aren't understood.
        decode_max_rows: most rows of a call that the decode kernels are asked for.
        trouble: why nothing can be told, where the sources aren't understood at all.
    """

    def __init__(self, source: Source | None, *, version: str, trouble: str = "") -> None:
        self._source, self.version, self.trouble = source, version, trouble
        self.models: tuple[str, ...] = source.models if source is not None else ()
        self.decode_max_rows = source.decode_max_rows if source is not None else 0
        self._told: dict[Shape, Told] = {}

    def ask(self, shape: Shape) -> Told:
        """What the tree's dispatch does with one shape."""
        if shape not in self._told:
            self._told[shape] = self._ask(shape)
        return self._told[shape]

    def _ask(self, shape: Shape) -> Told:
        if self._source is None:
            return Told(answer=Answer.UNKNOWN, why=self.trouble, where="")
        if shape.model not in self.models:
            why = f"FlashInfer has no model type {shape.model} here, only {', '.join(self.models)}"
            return Told(answer=Answer.UNSUPPORTED, why=why, where="")
        if not _is_call(shape):
            return Told(answer=Answer.UNSUPPORTED, why="no call has such sizes", where="")
        return self._source.ask(shape)


def _is_call(shape: Shape) -> bool:
    """Whether tensors can have the sizes, which the dispatch code takes for granted."""
    sizes = (shape.heads, shape.topk, shape.page, shape.rows)
    extra = (shape.extra_topk, shape.extra_page)
    fit = all(0 < size < 2**31 for size in sizes) and all(0 <= size < 2**31 for size in extra)
    return fit and all(extra) == any(extra)


def read_capability(tree: Tree, *, version: str = "") -> Capability:
    """Read a FlashInfer tree. One that isn't understood answers ``unknown`` to everything.

    Args:
        tree: base or patched.
        version: what to call it.

    Raises:
        CapabilityError: it has no sparse-MLA kernels for SM120 at all.
    """
    from overlay.kernels.cxx import NotUnderstoodError
    from overlay.kernels.sparsemla import open_source

    if not any(
        tree.is_folder(p.encode()) or tree.get(p.encode()) is not None for p in KERNEL_PATHS
    ):
        raise CapabilityError(
            f"FlashInfer {version} has no sparse-MLA kernels for SM120".replace("  ", " "),
            why=f"its tree has none of {', '.join(KERNEL_PATHS)}",
            fix="they came with 0.6.14: choose a line or version that stands on a later release",
        )
    try:
        return Capability(open_source(tree), version=version)
    except NotUnderstoodError as error:
        return Capability(None, version=version, trouble=str(error))
