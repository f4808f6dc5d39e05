"""Float64 attention over whole requests, and the packed ``fp8_ds_mla`` cache.

Nothing here imports vLLM: this is what the patched code is compared with.
"""

import math

import torch

LATENT = 512
ROPE = 64
TILE = 128
BYTES_PER_TOKEN = 656


def pack(kv: torch.Tensor) -> torch.Tensor:
    """Pack ``[n, 576]`` into ``[n, 656]`` bytes, the ``fp8_ds_mla`` layout.

    512 e4m3 values, one float32 scale for each 128 of them, 64 bf16 values.
    """
    nope = kv[:, :LATENT].float().view(-1, LATENT // TILE, TILE)
    scale = (nope.abs().amax(dim=-1) / 448.0).clamp_min(1e-8)
    quantized = (nope / scale[..., None]).to(torch.float8_e4m3fn)
    out = torch.empty(kv.shape[0], BYTES_PER_TOKEN, dtype=torch.uint8)
    out[:, :512] = quantized.view(torch.uint8).view(-1, LATENT)
    out[:, 512:528] = scale.contiguous().view(torch.uint8).view(-1, 16)
    out[:, 528:] = kv[:, LATENT:].bfloat16().contiguous().view(torch.uint8)
    return out


def unpack(packed: torch.Tensor, *, exponents_only: bool = False) -> torch.Tensor:
    """Undo :func:`pack`: ``[n, 656]`` bytes to float64 ``[n, 576]``.

    With ``exponents_only`` a scale counts as the power of two that its exponent says.
    """
    packed = packed.contiguous()
    nope = packed[:, :512].contiguous().view(torch.float8_e4m3fn).double()
    scale = packed[:, 512:528].contiguous().view(torch.float32)
    if exponents_only:
        scale = torch.ldexp(torch.ones_like(scale), torch.frexp(scale).exponent - 1)
    scale = scale.double()
    rope = packed[:, 528:].contiguous().view(torch.bfloat16).double()
    nope = nope.view(-1, LATENT // TILE, TILE) * scale[..., None]
    return torch.cat([nope.reshape(-1, LATENT), rope], dim=-1)


def attend(q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: ``q [heads, 576]`` over ``kv [n, 576]``, all float64.

    Returns ``out [heads, 512]`` and the base-2 LSE ``[heads]``; 0 and ``-inf``
    where ``n`` is 0.
    """
    if kv.shape[0] == 0:
        return (
            torch.zeros(q.shape[0], LATENT, dtype=torch.float64),
            torch.full((q.shape[0],), -math.inf, dtype=torch.float64),
        )
    scores = (q.double() @ kv.double().T) * scale
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.softmax(scores, dim=-1) @ kv.double()[:, :LATENT]
    return out, lse / math.log(2)


def owner(g: int, world: int, interleave: int = 1) -> int:
    """The rank that holds global position ``g`` (DOMAIN facts, section 2)."""
    return (g // interleave) % world


def local_length(length: int, world: int, rank: int, interleave: int) -> int:
    """How many of ``length`` positions lie on ``rank``."""
    base = length // interleave // world * interleave
    rest = length - base * world - rank * interleave
    return base + min(max(rest, 0), interleave)


def slot(g: int, blocks: list[int], block: int, world: int, interleave: int) -> int:
    """The owner's physical slot of global position ``g``."""
    b, off = divmod(g, block * world)
    inner = off // (world * interleave) * interleave + off % interleave
    return blocks[b] * block + inner
