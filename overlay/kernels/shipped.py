"""SM120 sparse-MLA kernels of a patched FlashInfer, compiled ahead of time.

This file is ``flashinfer_jit_cache/__init__.py`` of the wheel that ``vllm-overlay kernels``
builds. FlashInfer asks that package for modules before it compiles one. It compares versions, which
can be told not to; here sources are compared as well, by content: a module that was compiled from
others than those installed must not be used in their place, and that can't be turned off.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

_HERE = Path(__file__).resolve().parent
_BUILT = json.loads((_HERE / "built.json").read_bytes())
__version__: str = _BUILT["version"]


def get_jit_cache_dir() -> str:
    """FlashInfer 0.6: the folder of modules; an empty one beside a GPU that they don't serve."""
    _refuse_other_sources()
    from flashinfer.compilation_context import (  # type: ignore[import-not-found]
        CompilationContext,
    )

    asked = {f"{major}{minor[0]}" for major, minor in CompilationContext().TARGET_CUDA_ARCHS}
    served = {f"{arch.removeprefix('sm')[:3]}" for arch in _BUILT["architectures"]}
    others = {arch for arch in asked if arch.startswith("12")} - served
    return str(_HERE / ("none" if others else "modules"))


def get_jit_cache_providers() -> tuple[SimpleNamespace, ...]:
    """FlashInfer 0.7: the modules, and what they serve."""
    _refuse_other_sources()
    return (
        SimpleNamespace(
            provider_id="vllm-overlay",
            distribution="flashinfer-jit-cache",
            version=__version__,
            jit_cache_dir=str(_HERE / "modules"),
            cuda_architectures=tuple(_BUILT["architectures"]),
            modules=tuple(_BUILT["modules"]),
        ),
    )


def _refuse_other_sources() -> None:
    """Raise ``RuntimeError`` unless FlashInfer's sources are those that were compiled."""
    package = Path(sys.modules["flashinfer"].__path__[0])
    for name, expected in _BUILT["sources"].items():
        path = package.parent / name
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != expected:
            from flashinfer.version import (  # type: ignore[import-not-found]
                __version__ as installed,
            )

            raise RuntimeError(
                f"flashinfer-jit-cache {__version__} was compiled from other sources than those "
                f"of the installed flashinfer {installed}: {name} differs. Its kernels are not "
                "used. Uninstall flashinfer-jit-cache, or install the one that was built with "
                "this FlashInfer."
            )
