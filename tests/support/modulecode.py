"""FlashInfer's resolver, compiled by CUDA's own compiler for sm_120a and asked: no GPU is needed.

The compiler comes with the wheels of ``cuda-toolkit[nvcc,cccl]``, and what loads the module with
``apache-tvm-ffi``. Where they aren't installed there is nothing to ask.
"""

from __future__ import annotations

import importlib.util
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.hostcode import MODELS, real_functions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlay.kernels.capability import Shape

# What an SM120 has: multiprocessors, and bytes of shared memory a block
DEVICE = (188, 101376)


def toolkit() -> Path | None:
    """The folder of CUDA's wheels, if they are installed and can be used."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for found in sorted(Path(folder).glob("cu*/bin/nvcc")):
            if importlib.util.find_spec("tvm_ffi") is not None:
                return found.parent.parent
    return None


@dataclass
class ModuleResolver:
    """0.7.1 and later: ``candidates`` and ``metadata_candidates`` of the compiled module."""

    folder: Path
    cuda: Path
    module: Any = field(init=False)

    def __post_init__(self) -> None:
        import tvm_ffi

        out = self.folder / "resolve.so"
        headers = Path(tvm_ffi.__file__).parent / "include"
        includes = (
            self.folder / "include", self.folder / "csrc", headers,
            self.cuda / "include", self.cuda / "include" / "cccl",
        )  # fmt: skip
        command = (
            str(self.cuda / "bin/nvcc"), "-arch=sm_120a", "-std=c++17", "-O0", "-w", "-shared",
            "--expt-relaxed-constexpr", "-cudart", "static", f"-L{self.cuda / 'lib'}",
            "-Xcompiler", "-fPIC",
            *(f"-I{folder}" for folder in includes),
            str(self.folder / "csrc/sparse_mla_sm120/attention_resolve.cu"), "-o", str(out),
        )  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        self.module = tvm_ffi.load_module(str(out))
        self._said: frozenset[int] = frozenset()
        policy = self.folder / "flashinfer/mla/_sparse_mla_sm120/_policy.py"
        self.python = real_functions(policy, _candidates=lambda *_: self._said)
        descriptor = self.folder / "csrc/sparse_mla_sm120/attention_descriptor.h"
        self.has_extra_row = "d[i + 18]" in descriptor.read_text()

    def ask(self, shapes: Sequence[Shape]) -> list[bool]:
        """Whether each shape is served, with and without lengths."""
        return [all([self._one(s, False), self._one(s, True)]) for s in shapes]

    def _one(self, shape: Shape, lengths: bool) -> bool:
        model, extra = MODELS[shape.model][0], shape.extra_topk > 0
        asked = (model, shape.heads, shape.topk, shape.page, extra)
        self._said = frozenset(self.module.candidates(*asked, 64, "default"))
        actual = frozenset(self.module.candidates(*asked, shape.extra_page or 64, "default"))
        taken = frozenset(
            self.module.metadata_candidates(self._metadata(shape, lengths), 1, *DEVICE)
        )
        if shape.phase == "decode":
            return self.python["decode_splitk_eligible"](*asked, shape.rows) and 0 in taken
        variant = self.python["prefill_variant"](*asked, 0)
        return variant is not None and int(variant) in actual & taken

    def _metadata(self, shape: Shape, lengths: bool) -> list[int]:
        model, _, size = MODELS[shape.model]
        extra = shape.extra_topk > 0
        values = [
            model, shape.rows, shape.heads, shape.topk, shape.extra_topk, shape.page,
            shape.extra_page, (shape.page * size + 15) // 16 * 16,
            (shape.extra_page * size + 15) // 16 * 16, size, shape.topk, shape.extra_topk,
            shape.heads, int(lengths), int(lengths and extra), 0, 0, 0,
        ]  # fmt: skip
        return values + [size if extra else 0] * self.has_extra_row
