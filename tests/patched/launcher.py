"""A stand-in for FlashInfer's SM120 sparse-MLA kernels, by the name it replaces.

``trtllm_batch_decode_with_kv_cache_mla`` of the FlashInfer that is installed, 0.6 or
0.7, with a packed ``fp8_ds_mla`` cache (``backend="sparse"``), on any device, to the
letter of what its Python entry and its kernels do:

- The LSE is base 2. FlashInfer 0.7 returns base e when asked.
- ``seq_lens`` (int32, one a token) counts *leading* columns of a row. A row of
  count 0 gives out 0 and an LSE of ``-1e30``, or ``-inf`` in 0.7.
- An id of -1 among the counted columns is masked, but its score is ``-1e30`` and
  no less: a row of nothing else attends to slot 0.
- ``out`` and ``lse`` must have the query's shape and are written in place, by
  pointer: they must be contiguous, on the query's device.
- Pages have 64 rows; heads and top-k are those that kernels are built for. Above
  64 rows that is the prefill kernel's, which takes fewer top-k sizes, and pages
  that lie end to end only.
  In 0.7 decode takes any heads up to 128 and any top-k, and prefill those of whole
  64s; pages of other than 64 rows are taken too, but not looked for here.
- Unless the scale format is ``arbitrary_fp32``, only a scale's exponent is read.
- No rows at all is an error; 0.7 returns.
"""

import math

import pins
import torch
from reference import BYTES_PER_TOKEN, LATENT, unpack

HEADS = (8, 16, 32, 64, 128)
DECODE_TOPK = (128, 512, 1024, 2048)
PREFILL_TOPK = (2048,)
SCALE_FORMATS = ("auto", "pow2_fp32", "arbitrary_fp32")
MAX_DECODE_ROWS = 64
MASKED = -1e30

calls: list[dict] = []
"""The keyword arguments of every call, for tests to look at."""


def watched(kernel):
    """FlashInfer's own entry, called as it is, with its calls kept."""

    def call(**keywords):
        calls.append(keywords)
        return kernel(**keywords)

    return call


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_devices(query: torch.Tensor, *others: torch.Tensor | None) -> None:
    for tensor in others:
        _require(tensor is None or tensor.device == query.device, "on another device")


def _check_decode(workspace: torch.Tensor, rows: int, heads: int, topk: int) -> None:
    if not pins.FLASHINFER_0_7:
        _require(heads in HEADS, f"no kernel for {heads} heads")
        _require(topk in DECODE_TOPK, f"no decode kernel for topk {topk}")
    _require(workspace.is_contiguous(), "workspace must be contiguous")
    # FlashInfer would allocate its own, on every call.
    padded = heads if heads == 8 else math.ceil(heads / 16) * 16
    need = rows * padded * math.ceil(topk / 64) * (LATENT * 2 + 4)
    size = workspace.numel() * workspace.element_size()
    _require(size >= need, f"workspace needs {need} bytes")


def _check_prefill(kv_cache: torch.Tensor, heads: int, topk: int) -> None:
    _require(heads in HEADS, f"no kernel for {heads} heads")
    served = topk % 64 == 0 if pins.FLASHINFER_0_7 else topk in PREFILL_TOPK
    _require(served, f"no prefill kernel for topk {topk}")
    stride = kv_cache.stride(0)
    _require(stride == 64 * BYTES_PER_TOKEN, f"pages of stride {stride}, not end to end")


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    kv_scale_format: str = "auto",
    return_lse_base: str | None = None,
):
    _require(
        pins.LSE_BASE_ARGUMENT or return_lse_base is None,
        "no such argument: return_lse_base",
    )
    _require(return_lse_base in (None, "basee", "base2"), f"base {return_lse_base!r}")
    calls.append(dict(locals()))
    _require(query.ndim == 4 and query.dtype == torch.bfloat16, "query: bf16 4-D")
    batch, q_len, heads, dim = query.shape
    rows = batch * q_len
    _require(rows > 0 or not pins.NO_ROWS_RAISE, f"max_num_tokens must be > 0, got {rows}")
    _require(dim == 576 and kv_lora_rank == 512 and qk_rope_head_dim == 64, "dims")
    _require(float(bmm2_scale) == 1.0, "bmm2_scale is not supported")
    _require(heads <= max(HEADS), f"no kernel for {heads} heads")
    _require(block_tables.dtype == torch.int32, "block_tables must be int32")
    _require(sparse_mla_top_k > 0, "sparse_mla_top_k must be > 0")
    expected = (batch, q_len, sparse_mla_top_k)
    _require(tuple(block_tables.shape) == expected, f"block_tables: {expected}")
    _require(block_tables.is_contiguous(), "block_tables must be dense row-major")
    _require(kv_scale_format in SCALE_FORMATS, f"kv_scale_format {kv_scale_format!r}")
    _check_devices(query, kv_cache, workspace_buffer, block_tables, seq_lens, out, lse)
    _require(kv_cache.dtype == torch.uint8, "kv_cache must be packed uint8")
    _require(
        kv_cache.ndim == 4 and kv_cache.shape[1] == 1 and kv_cache.shape[3] == BYTES_PER_TOKEN,
        f"kv_cache: [pages, 1, 64, 656], got {tuple(kv_cache.shape)}",
    )
    _require(kv_cache.shape[2] == 64, f"page size {kv_cache.shape[2]}")
    topk = sparse_mla_top_k
    if rows <= MAX_DECODE_ROWS:
        _check_decode(workspace_buffer, rows, heads, topk)
    else:
        _check_prefill(kv_cache, heads, topk)

    if seq_lens is None:
        counts = None
    else:
        _require(seq_lens.dtype == torch.int32, "seq_lens must be int32")
        _require(seq_lens.numel() == rows, "seq_lens must hold one count a token")
        counts = seq_lens.reshape(rows)

    if out is None:
        out = query.new_empty((batch, q_len, heads, LATENT))
    expected = (batch, q_len, heads, LATENT)
    _require(
        tuple(out.shape) == expected and out.dtype == torch.bfloat16,
        f"out: expected {expected}, got {tuple(out.shape)}",
    )
    _require(out.is_contiguous(), "out must be contiguous")
    if return_lse:
        if lse is None:
            lse = query.new_empty((rows, heads), dtype=torch.float32)
        _require(
            tuple(lse.shape) in ((rows, heads), (batch, q_len, heads))
            and lse.dtype == torch.float32,
            f"lse: expected {(rows, heads)} float32, got {tuple(lse.shape)}",
        )
        _require(lse.is_contiguous(), "lse must be contiguous")

    flat_cache = kv_cache.reshape(-1, BYTES_PER_TOKEN)
    flat_q = query.reshape(rows, heads, dim).double().cpu()
    flat_ids = block_tables.reshape(rows, topk).cpu()
    flat_out = out.view(rows, heads, LATENT)
    flat_lse = lse.view(rows, heads) if return_lse else None
    for row in range(rows):
        count = topk if counts is None else max(0, min(int(counts[row]), topk))
        if count == 0:
            flat_out[row] = 0
            if flat_lse is not None:
                flat_lse[row] = pins.EMPTY_LSE
            continue
        ids = flat_ids[row, :count].long()
        packed = flat_cache[ids.clamp_min(0).to(flat_cache.device)].cpu()
        kv = unpack(packed, exponents_only=kv_scale_format != "arbitrary_fp32")
        scores = (flat_q[row] @ kv.T) * float(bmm1_scale) * math.log2(math.e)
        scores = scores.masked_fill(ids < 0, MASKED)
        top = scores.amax(dim=-1, keepdim=True)
        p = torch.exp2(scores - top)
        total = p.sum(dim=-1, keepdim=True)
        flat_out[row] = ((p / total) @ kv[:, :LATENT]).to(out)
        if flat_lse is not None:
            base_2 = (torch.log2(total) + top).squeeze(-1)
            scale = math.log(2) if return_lse_base == "basee" else 1.0
            flat_lse[row] = (base_2 * scale).to(flat_lse)
    return (out, lse) if return_lse else out
