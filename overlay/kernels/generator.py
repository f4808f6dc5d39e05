"""Asks a FlashInfer tree for the ninja file of its SM120 sparse-MLA module: ``ROOT``.

A script of its own, run by an interpreter that has apache-tvm-ffi, packaging and filelock. What
decides sources and flags is the tree's own code: its ``flashinfer.jit`` is imported, without the
package around it, which would import torch and half of the kernels.

torch isn't installed. What stands in its place answers the one question that reaches a flag, which
C++ ABI it is built with (the new one, as every CUDA 13 build is), and hands out names for dtypes.
The session ``kernels`` compares with what the installed package says beside a real torch.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import tvm_ffi  # noqa: F401 - before torch has its stand-in, which it would look into


class _Torch(types.ModuleType):
    _C = types.SimpleNamespace(_GLIBCXX_USE_CXX11_ABI=True)

    def __getattr__(self, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"torch.{name}"


def main(root: Path) -> None:
    """Write the ninja file below ``$FLASHINFER_WORKSPACE_BASE``, and its path to stdout."""
    sys.modules["torch"] = _Torch("torch")
    for name in ("flashinfer", "flashinfer.jit"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    spec = importlib.import_module("flashinfer.jit.mla").gen_sparse_mla_sm120_module()
    spec.write_ninja()
    sys.stdout.write(f"{spec.ninja_path}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
