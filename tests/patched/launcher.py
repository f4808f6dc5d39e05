"""A stand-in for FlashInfer's SM120 sparse-MLA kernels, by the name it replaces.

``trtllm_batch_decode_with_kv_cache_mla`` of FlashInfer 0.6 with a packed
``fp8_ds_mla`` cache (``backend="sparse"``), on any device, to the letter of what
its Python entry and its kernels do:

- The LSE is base 2.
- ``seq_lens`` (int32, one a token) counts *leading* columns of a row. A row of
  count 0 gives out 0 and an LSE of ``-1e30``.
- An id of -1 among the counted columns is masked, but its score is ``-1e30`` and
  no less: a row of nothing else attends to slot 0.
- ``out`` and ``lse`` must have the query's shape and are written in place.
- Pages have 64 rows; heads and top-k are those that kernels are built for.
- No rows at all is an error.
"""

import math

import torch
from reference import BYTES_PER_TOKEN, LATENT, unpack

HEADS = (8, 16, 32, 64, 128)
DECODE_TOPK = (128, 512, 1024, 2048)
MAX_DECODE_ROWS = 64
MASKED = -1e30

calls: list[dict] = []
"""The keyword arguments of every call, for tests to look at."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


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
):
    calls.append(dict(locals()))
    _require(query.ndim == 4 and query.dtype == torch.bfloat16, "query: bf16 4-D")
    batch, q_len, heads, dim = query.shape
    rows = batch * q_len
    _require(rows > 0, f"max_num_tokens must be > 0, got {rows}")
    _require(dim == 576 and kv_lora_rank == 512 and qk_rope_head_dim == 64, "dims")
    _require(float(bmm2_scale) == 1.0, "bmm2_scale is not supported")
    _require(heads in HEADS, f"no kernel for {heads} heads")
    _require(block_tables.dtype == torch.int32, "block_tables must be int32")
    expected = (batch, q_len, sparse_mla_top_k)
    _require(tuple(block_tables.shape) == expected, f"block_tables: {expected}")
    _require(kv_cache.dtype == torch.uint8, "kv_cache must be packed uint8")
    _require(
        kv_cache.ndim == 4 and kv_cache.shape[1] == 1 and kv_cache.shape[3] == BYTES_PER_TOKEN,
        f"kv_cache: [pages, 1, 64, 656], got {tuple(kv_cache.shape)}",
    )
    _require(kv_cache.shape[2] == 64, f"page size {kv_cache.shape[2]}")
    _require(workspace_buffer.device == query.device, "workspace on another device")
    topk = sparse_mla_top_k
    if rows <= MAX_DECODE_ROWS:
        _require(topk in DECODE_TOPK, f"no decode kernel for topk {topk}")
        splits = math.ceil(topk / 64)
        need = rows * heads * splits * (LATENT * 2 + 4)
        _require(workspace_buffer.numel() >= need, f"workspace needs {need} bytes")

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
    if return_lse:
        if lse is None:
            lse = query.new_empty((rows, heads), dtype=torch.float32)
        _require(
            tuple(lse.shape) in ((rows, heads), (batch, q_len, heads))
            and lse.dtype == torch.float32,
            f"lse: expected {(rows, heads)} float32, got {tuple(lse.shape)}",
        )

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
                flat_lse[row] = MASKED
            continue
        ids = flat_ids[row, :count].long()
        kv = unpack(flat_cache[ids.clamp_min(0).to(flat_cache.device)].cpu())
        scores = (flat_q[row] @ kv.T) * float(bmm1_scale) * math.log2(math.e)
        scores = scores.masked_fill(ids < 0, MASKED)
        top = scores.amax(dim=-1, keepdim=True)
        p = torch.exp2(scores - top)
        total = p.sum(dim=-1, keepdim=True)
        flat_out[row] = ((p / total) @ kv[:, :LATENT]).to(out)
        if flat_lse is not None:
            flat_lse[row] = (torch.log2(total) + top).squeeze(-1).to(flat_lse)
    return (out, lse) if return_lse else out
