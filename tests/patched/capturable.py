"""The stand-in launcher once more, as tensor operations alone, so that a CUDA graph holds it.

``launcher`` is the contract; it works row by row on the host, which no graph can capture.
This one neither allocates outside a graph's pool nor waits for the device. ``test_gpu``
compares the two.
"""

import math
from typing import Any

import launcher
import torch
from pins import EMPTY_LSE
from reference import BYTES_PER_TOKEN, LATENT, TILE


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """``[..., 656]`` bytes to float32 ``[..., 576]``; scales as they are."""
    nope = packed[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    scale = packed[..., 512:528].contiguous().view(torch.float32)
    rope = packed[..., 528:].contiguous().view(torch.bfloat16).float()
    shape = nope.shape
    nope = nope.unflatten(-1, (LATENT // TILE, TILE)) * scale[..., None]
    return torch.cat([nope.reshape(shape), rope], dim=-1)


def trtllm_batch_decode_with_kv_cache_mla(**call: Any) -> Any:
    """As ``launcher`` has it, for ``arbitrary_fp32`` scales; writes into ``out`` and ``lse``."""
    assert call["kv_scale_format"] == "arbitrary_fp32"
    query, ids = call["query"].squeeze(1).float(), call["block_tables"].squeeze(1)
    rows, topk = ids.shape
    if call["seq_lens"] is None:
        counts = torch.full((rows,), topk, dtype=torch.int32, device=ids.device)
    else:
        counts = call["seq_lens"].clamp(0, topk)
    counted = torch.arange(topk, device=ids.device) < counts[:, None]
    cache = call["kv_cache"].reshape(-1, BYTES_PER_TOKEN)
    kv = _unpack(cache[ids.clamp_min(0).long()])
    kv = kv.masked_fill(~counted[..., None], 0.0)  # rows that nobody asked for may hold NaN
    scores = torch.einsum("rhd,rtd->rht", query, kv) * (call["bmm1_scale"] * math.log2(math.e))
    scores = scores.masked_fill((ids < 0)[:, None], launcher.MASKED)
    scores = scores.masked_fill(~counted[:, None], float("-inf"))
    empty = (counts == 0)[:, None]
    top = scores.amax(dim=-1).masked_fill(empty, 0.0)
    p = torch.exp2(scores - top[..., None])
    total = p.sum(dim=-1)
    out = torch.einsum("rht,rtd->rhd", p / total.clamp_min(1e-30)[..., None], kv[..., :LATENT])
    call["out"].squeeze(1).copy_(out.masked_fill(empty[..., None], 0.0))
    if call["return_lse"]:
        lse = (torch.log2(total) + top).masked_fill(empty, EMPTY_LSE)
        call["lse"].view(rows, -1).copy_(lse)
    return call["out"]
