"""FlashInfer's own dispatch code, compiled for this machine and run: what it really does.

Kernels are never started. A launch is written down instead, by headers of ours that stand in for
CUDA's and TVM's (``tests/dispatch``); two forms that no host compiler takes are replaced in the
text, the address of a kernel and ``<<< >>>``. All that decides stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from overlay.kernels.capability import Shape
    from overlay.trees.store import Store

STANDINS = Path(__file__).parent.parent / "dispatch"
PARTS = ("include/flashinfer", "flashinfer/mla")
# Of our own knowledge, as the reader must find it out: enumerator, query width, bytes a token
MODELS = {"dsv3_2": (0, 576, 656), "dsv4": (1, 512, 584), "glm_nsa": (2, 576, 656)}
FLAGS = ("-O0", "-fpermissive", "-w", f"-I{STANDINS / 'include'}")
_KERNEL = re.compile(r"=\s*sparse_mla_\w*kernel<[^;]*>;")
_LAUNCH = re.compile(r"\w+<<<[^;]*?>>>\([^;]*\);")
_ARGUMENT = re.compile(r"int (\w+) = (\d+)[;\]]")


def unpack(store: Store, tree: str, folder: Path) -> None:
    """Write those files of a tree that the dispatch code is made of."""
    wanted = ("csrc/*sparse_mla_sm120*", "csrc/tvm_ffi_utils.h", "csrc/sparse_mla_sm120", *PARTS)
    listed = store.git.run("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0")[:-1]
    for entry in listed:
        head, _, name = entry.partition(b"\t")
        path = name.decode()
        if not any(Path(path).match(w) or path.startswith(f"{w}/") for w in wanted):
            continue
        if not path.endswith((".cu", ".cuh", ".h", ".py")):
            continue
        found = store.reader.get(head.decode().split()[2])
        assert found is not None
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(found[2])


def compile_host(folder: Path, out: Path, *sources: Path, standard: str) -> None:
    """Compile and link with the host's compiler; the test is skipped where there is none."""
    if shutil.which("g++") is None:
        pytest.skip("g++ isn't installed")
    command = (
        "g++", f"-std={standard}", *FLAGS, f"-I{folder / 'include'}", f"-I{out.parent}",
        *map(str, sources), "-o", str(out),
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


def real_functions(path: Path, **given: Any) -> dict[str, Any]:
    """What a Python source of upstream defines, as far as that goes without its imports."""
    import dataclasses
    import enum
    import typing

    names: dict[str, Any] = {"enum": enum, "dataclass": dataclasses.dataclass, **given}
    names |= {name: getattr(typing, name) for name in ("Optional", "TypeVar", "List")}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        header = ast.parse("from __future__ import annotations")
        header.body.append(node)
        with contextlib.suppress(Exception):  # what needs torch has no part in this
            exec(compile(header, str(path), "exec"), names)  # noqa: S102 - of the pinned source
        names |= given
    return names


@dataclass
class HostTables:
    """0.6.14 to 0.7.0: the launchers compiled, the Python beside them run."""

    folder: Path
    binary: Path = field(init=False)

    def __post_init__(self) -> None:
        csrc, made = self.folder / "csrc", self.folder / "host"
        made.mkdir()
        names = [f"sparse_mla_sm120{end}" for end in
                 ("", "_prefill", "_decode_dsv4", "_decode_dsv3_2", "_jit_binding")]  # fmt: skip
        for name in names:
            text = (csrc / f"{name}.cu").read_text()
            text = _KERNEL.sub("= &recorder::kernel;", text)
            text = _LAUNCH.sub("recorder::note(__PRETTY_FUNCTION__);", text)
            (made / f"{name}.cpp").write_text(text)
        (made / "tables.cpp").write_bytes((STANDINS / "tables.cpp").read_bytes())
        self.binary = made / "ask"
        sources = [made / f"{name}.cpp" for name in names[:-1]] + [made / "tables.cpp"]
        compile_host(self.folder, self.binary, *sources, standard="c++17")
        planner = self.folder / "flashinfer/mla/_sparse_mla_sm120_plan.py"
        self.is_planned = planner.exists()
        tables = self.folder / "flashinfer/mla/_sparse_mla_sm120.py"
        self.python = real_functions(planner if self.is_planned else tables)

    def ask(self, shapes: Sequence[Shape]) -> list[bool]:
        """Whether each shape is served, with and without lengths, by a kernel that is for it."""
        lines, asked = [], []
        for at, shape in enumerate(shapes):
            variant = self._python(shape)
            if variant is None:
                continue
            model, width, size = MODELS[shape.model]
            for lengths in (0, 1):
                asked.append(at)
                lines.append(
                    f"{int(shape.phase == 'prefill')} {model} {width} {size} {shape.heads} "
                    f"{shape.topk} {shape.page} {shape.extra_topk} {shape.extra_page} "
                    f"{shape.rows} {variant} {lengths}"
                )
        answers = [at in set(asked) for at in range(len(shapes))]
        for at, said in zip(asked, _run(self.binary, lines), strict=True):
            answers[at] &= said.startswith("1 ") and _fits(said, shapes[at])
        return answers

    def _python(self, shape: Shape) -> int | None:
        """The variant of prefill, 0 for decode and where there are none; None for a refusal."""
        model, width, _ = MODELS[shape.model]
        extra = shape.extra_topk > 0
        if shape.phase == "decode":
            if self.is_planned:
                ok = self.python["decode_splitk_eligible"](
                    model, shape.heads, shape.topk, shape.page, extra, shape.rows
                )
            elif shape.model == "dsv4":
                ok = self.python["_decode_dsv4_dispatchable"](
                    shape.rows, shape.heads, shape.topk, width, shape.page, shape.extra_topk
                )
            else:  # it passes no secondary cache on, nor says so: that is no support
                ok = not extra and self.python["_decode_dsv3_2_dispatchable"](
                    shape.rows, shape.heads, shape.topk, width, shape.page
                )
            return 0 if ok else None
        if not self.is_planned:
            return 0
        found = self.python["prefill_variant"](model, shape.heads, shape.topk, shape.page, extra, 0)
        return None if found is None else int(found)


@dataclass
class HostResolver:
    """0.7.1 and later: the resolver compiled, and the planner's choice among its candidates."""

    folder: Path
    binary: Path = field(init=False)

    def __post_init__(self) -> None:
        made = self.folder / "host"
        (made / "sparse_mla_sm120").mkdir(parents=True)
        for name in ("attention_descriptor.h", "attention_resolve.cu"):
            text = (self.folder / "csrc/sparse_mla_sm120" / name).read_bytes()
            (made / "sparse_mla_sm120" / name.replace(".cu", ".cpp")).write_bytes(text)
        (made / "tvm_ffi_utils.h").write_text("#pragma once\n#include <tvm_ffi_utils.h>\n")
        (made / "resolver.cpp").write_bytes((STANDINS / "resolver.cpp").read_bytes())
        self.binary = made / "ask"
        compile_host(self.folder, self.binary, made / "resolver.cpp", standard="c++20")
        self._said: frozenset[int] = frozenset()
        policy = self.folder / "flashinfer/mla/_sparse_mla_sm120/_policy.py"
        self.python = real_functions(policy, _candidates=lambda *_: self._said)

    def ask(self, shapes: Sequence[Shape]) -> list[bool]:
        """Whether each shape is served, with and without lengths."""
        lines = [
            f"{MODELS[s.model][0]} {s.heads} {s.topk} {s.page} {s.extra_topk} {s.extra_page} "
            f"{s.rows} {lengths}"
            for s in shapes
            for lengths in (0, 1)
        ]
        said = iter(_run(self.binary, lines))
        return [all([self._one(s, next(said)), self._one(s, next(said))]) for s in shapes]

    def _one(self, shape: Shape, said: str) -> bool:
        usual, actual, taken = (frozenset(map(int, part.replace("-", ""))) for part in said.split())
        self._said = usual
        model, extra = MODELS[shape.model][0], shape.extra_topk > 0
        asked = (model, shape.heads, shape.topk, shape.page, extra)
        if shape.phase == "decode":
            return self.python["decode_splitk_eligible"](*asked, shape.rows) and 0 in taken
        variant = self.python["prefill_variant"](*asked, 0)
        return variant is not None and int(variant) in actual & taken


def _run(binary: Path, lines: Iterable[str]) -> list[str]:
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run((str(binary),), input=text, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _fits(said: str, shape: Shape) -> bool:
    """Whether every launcher that was reached is for the sizes that were asked."""
    wants = {
        "NUM_HEADS": shape.heads, "TOPK": shape.topk, "PAGE_BLOCK_SIZE": shape.page,
        "PAGE_BLOCK_SIZE_EXTRA": shape.extra_page,
    }  # fmt: skip
    launches = [part for part in said[2:].split(";void ") if part.strip("; ")]
    if not launches:
        return False
    found = [(name, int(value)) for part in launches for name, value in _ARGUMENT.findall(part)]
    return all(value in (0, wants.get(name, value)) for name, value in found)
