"""The key under which compiled kernels are kept: of everything that can change one.

A cache that outlives the image it was filled by, as a mounted one does, hands out stale objects
unless all of that is in its path.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

CACHE = "/cache"
"""Where an image keeps what is made at run time; a volume is mounted there to keep it."""

_DIGITS = 16

# What each program that compiles or caches reads, and its folder below the key's
_FOLDERS = {
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "CUTE_DSL_CACHE_DIR": "cute-dsl",
    "TILELANG_CACHE_DIR": "tilelang",
    "DG_JIT_CACHE_DIR": "deep-gemm",
    "CUDA_CACHE_PATH": "driver",
    # Compiled Python too: times and sizes of sources, by which it is found stale, can agree
    # between two images
    "PYTHONPYCACHEPREFIX": "python",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What can change a kernel.

    Attributes:
        digest: of the line: pins and patches of both upstreams.
        requirements: SHA-256 of the dependency lock: Triton, the CUTLASS DSL and all others.
        torch: exact version, and the CUDA that it was built with.
        cuda: components of the toolchain, each with its exact version; nvcc among them.
        architectures: CUDA architectures.
        python: minor version.
        base: digest of the base image: the host compiler, its headers and the C library.
    """

    digest: str
    requirements: str
    torch: str
    torch_cuda: str
    cuda: tuple[tuple[str, str], ...]
    architectures: tuple[str, ...]
    python: str
    base: str


def kernel_key(of: Ingredients) -> str:
    """16 hex digits that name one set of ingredients."""
    text = json.dumps(asdict(of), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def cache_environment(key: str) -> dict[str, str]:
    """Variables that put every cache of compiled things below the key's folder."""
    return {name: f"{CACHE}/{key}/{folder}" for name, folder in _FOLDERS.items()}
