"""What the kernels of a compiled module take: registers, stack, spills, memory, instructions.

``ptxas -v`` says the first ones while it compiles (ccache repeats its words), ``cuobjdump`` the
last, and for which architecture, of the module that was linked.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import msgspec

from overlay.errors import KernelError
from overlay.lines.line import Strict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_NAMESPACES = re.compile(r"\b(?:flashinfer::|sparse_mla_sm120::|\(anonymous namespace\)::)+")
_LOCAL = re.compile(r"_GLOBAL__N__\w+::")
_WORDS = re.compile(
    r"Compiling entry function '(?P<entry>\S+)' for '(?P<arch>\w+)'"
    r"|Function properties for (?P<of>\S+)"
    r"|^ +(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r"|Used (?P<registers>\d+) registers(?P<rest>.*)",
    re.M,
)


class Kernel(Strict, frozen=True, order=True):
    """One kernel of a module.

    Attributes:
        registers: a thread.
        stack, spill_stores, spill_loads: bytes a thread. Spills are counted in the code, not by
            how often they run.
        shared: bytes of static shared memory a block; what a launch asks for comes on top.
        instructions: of its machine code.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    instructions: int


def read_kernels(log: str, module: Path, cuobjdump: Path, arch: str) -> dict[str, Kernel]:
    """All kernels of ``module`` by readable name; a name's second copy has ``(2)`` after it.

    Args:
        log: what compiling its sources said, with ``ptxas -v``.
        module: the shared object.
        cuobjdump: the program.
        arch: such as ``sm_120a``; all code must be for it.

    Raises ``KernelError`` where log and module disagree, or code is for something else.
    """
    told = read_ptxas(log, arch)
    counted = _disassembled(module, cuobjdump, arch)
    if {name: len(of) for name, of in told.items()} != {n: len(of) for n, of in counted.items()}:
        odd = sorted(set(told) ^ set(counted))
        raise KernelError(
            f"{module.name} hasn't the kernels that were compiled",
            why=f"ptxas named {len(told)}, cuobjdump found {len(counted)}: {', '.join(odd[:3])}",
            fix="compile without the cache: --no-cache",
        )
    names = readable(list(told))
    kernels: dict[str, Kernel] = {}
    for mangled, resources in told.items():
        copies = sorted(
            msgspec.structs.replace(one, instructions=count)
            for one, count in zip(resources, counted[mangled], strict=True)
        )
        for at, kernel in enumerate(copies, 1):
            kernels[names[mangled] + (f" ({at})" if at > 1 else "")] = kernel
    return dict(sorted(kernels.items()))


def read_ptxas(log: str, arch: str) -> dict[str, list[Kernel]]:
    """Kernels by mangled name as ``ptxas -v`` told them, without their instructions (0).

    Raises ``KernelError`` for words in another order than is known, or another architecture.
    """
    found: dict[str, list[Kernel]] = defaultdict(list)
    entry, frame = "", (0, 0, 0)
    for said in _WORDS.finditer(log):
        if said["entry"]:
            entry = said["entry"]
            if said["arch"] != arch:
                raise KernelError(f"{entry} was compiled for {said['arch']}, not {arch}")
        elif said["stack"] and entry:
            frame = (int(said["stack"]), int(said["stores"]), int(said["loads"]))
        elif said["registers"] and entry:
            shared = re.search(r"(\d+) bytes smem", said["rest"])
            found[entry].append(
                Kernel(int(said["registers"]), *frame, int(shared[1]) if shared else 0, 0)
            )
            entry, frame = "", (0, 0, 0)
    if entry or not found:
        raise KernelError(
            "what ptxas said of registers and spills can't be read",
            why=f"it breaks off at {entry}" if entry else "no kernel is named in it",
            fix="this needs the CUDA version that the line is pinned to",
        )
    return dict(found)


def read_sass(lines: Iterable[str]) -> tuple[set[str], dict[str, list[int]]]:
    """Architectures of the code that ``cuobjdump -sass`` prints; instructions by mangled name."""
    archs: set[str] = set()
    counted: dict[str, list[int]] = defaultdict(list)
    into: list[int] = [0]
    for line in lines:
        if line.startswith("\t\tFunction : "):
            into = counted[line.removeprefix("\t\tFunction : ").strip()]
            into.append(0)
        elif line.startswith("\tcode for "):
            archs.add(line.split()[2])
        elif line.startswith("        /*"):  # the rest of its encoding is on the next line
            into[-1] += 1
    return archs, dict(counted)


def _disassembled(module: Path, cuobjdump: Path, arch: str) -> dict[str, list[int]]:
    argv = (str(cuobjdump), "-sass", str(module))
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None  # noqa: S101 - both are pipes
        assert process.stderr is not None  # noqa: S101
        archs, counted = read_sass(process.stdout)
        why = process.stderr.read().strip()
    if process.returncode or archs != {arch}:
        raise KernelError(
            f"{module.name} holds code for {', '.join(sorted(archs)) or 'nothing'}, not {arch}",
            why=why,
            fix="compile without the cache: --no-cache",
        )
    return counted


def readable(mangled: Sequence[str]) -> dict[str, str]:
    """Names as a person reads them: demangled, without namespaces and parameters."""
    text = "\n".join(mangled)
    try:
        done = subprocess.run(
            ("c++filt", "-p"), input=text, capture_output=True, text=True, check=True
        )
        names = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        names = list(mangled)  # harder to read, and as good to compare
    plain = [_NAMESPACES.sub("", _LOCAL.sub("", name)).removeprefix("void ") for name in names]
    twice = {name for name, count in Counter(plain).items() if count > 1}
    return {
        raw: f"{name} [{raw}]" if name in twice else name
        for raw, name in zip(mangled, plain, strict=True)
    }
