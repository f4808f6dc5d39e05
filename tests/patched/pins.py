"""What differs between the pinned versions; everything else in this folder is the same.

A difference is found by looking at what is installed, never by the line's name, and each
says why it is one.
"""

import contextlib
import inspect
from collections.abc import Iterator
from unittest import mock

import device  # before Triton and vLLM, which read the environment
import flashinfer
import vllm.v1.attention.backend as vllm_backend
from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla as _entry
from packaging.version import Version
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backends.mla import indexer, sparse_utils

try:  # 0.33
    from vllm.model_executor.layers.attention import sparse_mla_attention as _sparse_layer
    from vllm.v1.attention.ops import dcp as dcp_merge
except ImportError:
    _sparse_layer = None
    try:  # 0.28
        from vllm.v1.attention.ops import dcp_utils as dcp_merge
    except ImportError:  # 0.26
        dcp_merge = None
"""Where MLADCPManager lives. In 0.26 there is none: the layer calls the merges itself."""

# FlashInfer

FLASHINFER = Version(flashinfer.__version__)

FLASHINFER_0_7 = FLASHINFER.release >= (0, 7)
"""Its SM120 kernels were rewritten, with other limits and other sources."""

EMPTY_LSE = float("-inf") if FLASHINFER_0_7 else -1e30
"""The LSE of a row of which no column counts."""

NO_ROWS_RAISE = not FLASHINFER_0_7
"""Whether a call without rows is an error."""

LSE_BASE_ARGUMENT = "return_lse_base" in inspect.signature(_entry).parameters
"""Whether the base of the LSE can be asked for."""

CHECKS_PAGES = FLASHINFER_0_7
"""Whether prefill looks at the page size by itself, and takes any."""

SCRATCH_HOLDS_LSE = FLASHINFER_0_7
"""Whether an LSE that isn't asked for is written to the scratch buffer."""

DSV4_PREFILL_HEADS = (8, 16, 32, 64, 128)
DSV4_PREFILL_TOPK = (
    (128, 192, 256, 512, 1024, 2048)
    if FLASHINFER.release >= (0, 6, 18)
    else (128, 256, 512, 1024, 2048)
)
"""What prefill has kernels for with DSV4. What FlashInfer's #4380 brought, patches bring
before: 8 heads, and of a draft's widths that which vLLM 0.26 asks for."""

# vLLM

MASKS_EMPTY_ROWS = hasattr(sparse_utils, "mask_empty_rows_")
"""Whether rows without entries are given their LSE by vLLM; else FlashInfer's is right."""

MERGE_MASKS_PADDING = "seq_lens=" in inspect.getsource(mla_attention.MLAAttention.forward_impl)
"""Whether the merge is told of the requests, and makes rows of none 0. In 0.26 they hold
what their stale ids attend to, as they do with one rank."""

REPLICATES_QUERIES = "dcp_q_replicate" in inspect.signature(mla_attention.MLAAttention).parameters
"""Whether each rank may project the queries of all heads, in place of gathering them. vLLM
0.33 does so by default for GLM, and merges by a2a."""

VIEWS_LARGE_BLOCKS = hasattr(sparse_utils, "flat_kv_row_view")
"""Whether the implementation gets larger blocks and views them as 64-row pages; else the
runner splits them before it is asked."""

INDEXER_TAKES_INTERLEAVE = "interleave > 1 is not yet validated" not in inspect.getsource(
    indexer.DeepseekV32IndexerMetadataBuilder
)
"""Whether the sparse indexer takes an interleave above 1, or refuses it."""

DRAFT_LEAVES_GROUP = "config is None or config.parallel_config" in inspect.getsource(
    vllm_backend.AttentionImplBase.__new__
)
"""Whether an implementation whose config says DCP 1 has size 1 inside a larger group."""


@contextlib.contextmanager
def built_without_groups() -> Iterator[None]:
    """Let an implementation be built where there are no groups.

    vLLM 0.33 asks for the tensor-parallel size then, which without a group is an error.
    """
    if _sparse_layer is None:
        yield
        return
    asked = _sparse_layer.get_tensor_model_parallel_world_size

    def size() -> int:
        from vllm.distributed.parallel_state import model_parallel_is_initialized

        return asked() if model_parallel_is_initialized() else 1

    with mock.patch.object(_sparse_layer, "get_tensor_model_parallel_world_size", size):
        yield


def _let_the_interpreter_merge() -> None:
    """vLLM 0.33 counts the arguments of its merge kernel by an attribute of compiled kernels."""
    from triton.runtime.interpreter import InterpretedFunction

    if not hasattr(InterpretedFunction, "constexprs"):
        InterpretedFunction.constexprs = property(
            lambda self: [
                index
                for index, p in enumerate(inspect.signature(self.fn).parameters.values())
                if "constexpr" in str(p.annotation)
            ]
        )


if not device.ON_CUDA:
    _let_the_interpreter_merge()
