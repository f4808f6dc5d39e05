"""FlashInfer's own device code for DSV4, made to run where there is no SM120.

On this machine: the sources stay as they are, but for what no host compiler takes. An ``asm``
statement becomes a call of what stands in for that instruction (``tests/device/include/ptx.h``),
``<<< >>>`` one that runs the kernel, and the array of shared memory a pointer. An instruction that
has no stand-in may be compiled, and stops the program when it is reached.

On a Hopper card: sm_90a has all of these instructions but one (``tests/device/hopper/ptx.h``).
``python -m tests.support.devicecode TREE OUT NVCC`` makes ``OUT/attention`` for it, and says how to
start it; TREE has FlashInfer's ``csrc`` and ``include``, as 'vllm-overlay checkout' writes them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

STANDINS = Path(__file__).parent.parent / "device"
HEADERS = "include/flashinfer/attention/sparse_mla_sm120"
SOURCES = ("sparse_mla_sm120_prefill", "sparse_mla_sm120_decode_dsv4")
HOST = ("-O0", "-w", "-fno-strict-aliasing", "-fno-pie", "-no-pie")
HOPPER = (
    "-O2", "-w", "-x", "cu", "-gencode=arch=compute_90a,code=sm_90a", "--expt-relaxed-constexpr",
    "-use_fast_math",
)  # fmt: skip
_SCALED = (
    "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32"
    ".row.col.f32.e4m3.e4m3.f32.ue8m0"
)
INSTRUCTIONS = {
    "barrier.cta.arrive": "barrier_arrive",
    "barrier.cta.sync": "barrier_sync",
    "mbarrier.init.shared::cta.b64": "mbarrier_init",
    "mbarrier.arrive.shared::cta.b64": "mbarrier_arrive",
    "mbarrier.arrive.expect_tx.shared::cta.b64": "mbarrier_expect",
    "mbarrier.try_wait.parity.shared::cta.b64": "mbarrier_wait",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes": "bulk_copy",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint": "bulk_copy",
    "createpolicy.fractional.L2::evict_first.b64": "policy",
    "setmaxnreg.dec.sync.aligned.u32": "nothing",
    "setmaxnreg.inc.sync.aligned.u32": "nothing",
    "prmt.b32": "select_bytes",
    "cvt.rn.f16x2.e4m3x2": "halves_of_e4m3",
    "cvt.rn.bf16x2.f32": "bfloats",
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16": "ldmatrix_x4",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16": "ldmatrix_x2",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32": "mma<32>",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "mma<16>",
    _SCALED: "mma_scaled",
}
# name, phase, top-k, secondary top-k and page, whether rows have lengths, and sinks
CASES = (
    "window prefill 128 0 0 0 1",
    "window-lengths prefill 128 0 0 1 0",
    "draft prefill 256 0 0 1 1",
    "sparse prefill 512 0 0 1 1",
    "c4 prefill 128 128 64 0 1",
    "c4-lengths prefill 128 128 64 1 1",
    "c128 prefill 128 64 2 0 0",
    "c128-lengths prefill 128 64 2 1 1",
    "window decode 128 0 0 0 1",
    "draft decode 256 0 0 1 1",
    "draft-whole decode 256 0 0 0 0",
    "sparse decode 512 0 0 1 0",
    "c128 decode 128 64 2 1 1",
)
_ASM = re.compile(r"\basm\s*(?:volatile\s*)?\(")
_TEXT = re.compile(r'"((?:[^"\\]|\\.)*)"\s*')
_OPERAND = re.compile(r'\s*,?\s*"[=+]?\w+"\s*\(')
_DECLARED = re.compile(r"\{|\.reg [^;]*;")
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+) (\w+)\[\];")
_LAUNCH = re.compile(r"\b(\w+)<<<([^;>]*)>>>\(")


def host_text(source: str) -> str:
    """C++ of a device source for the host's compiler."""
    text = _replaced(source, INSTRUCTIONS)
    text = _SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(block::shared);", text)
    return _LAUNCH.sub(r"block::Start(\2)(\1, ", text)


def hopper_text(source: str) -> str:
    """A device source for sm_90a."""
    return _replaced(source, (_SCALED,))


def _replaced(source: str, mnemonics: Collection[str]) -> str:
    parts, at = [], 0
    for found in _ASM.finditer(source):
        end = _closed(source, found.end() - 1)
        call = _call(source[found.end() : end - 1], mnemonics)
        if call is not None:
            parts += [source[at : found.start()], call]
            at = end
    return "".join((*parts, source[at:]))


def _closed(text: str, at: int) -> int:
    """Behind the bracket that closes the one at ``at``."""
    depth = 0
    while True:
        if text[at] == '"':
            found = _TEXT.match(text, at)
            assert found is not None
            at = found.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
        if depth == 0:
            return at


def _call(statement: str, mnemonics: Collection[str]) -> str | None:
    """The call in place of an ``asm``; None where it stays, for one instruction alone is asked."""
    words, at = "", 0
    statement = statement.strip()
    while found := _TEXT.match(statement, at):
        words, at = words + found[1], found.end()
    mnemonic = _DECLARED.sub(" ", words.replace(r"\n", " "), count=2 * (words[0] == "{") or -1)
    mnemonic = mnemonic.split()[0].rstrip(";")
    if len(mnemonics) == 1 and mnemonic not in mnemonics:
        return None
    name = "select_halves" if "0x5410" in words else INSTRUCTIONS.get(mnemonic, "unknown")
    return f"ptx::{name}({', '.join(_operands(statement[at:]))})"


def _operands(text: str) -> list[str]:
    """What is written and read, in the order of the statement; clobbers are left out."""
    found, at = [], 0
    for _ in range(2):
        at += text[at:].startswith(":")
        while opened := _OPERAND.match(text, at):
            at = _closed(text, opened.end() - 1)
            found.append(text[opened.end() : at - 1])
        at += len(text[at:]) - len(text[at:].lstrip())
    return found


def build(tree: Path, out: Path, nvcc: str = "") -> Path:
    """Compile a tree's attention and what runs it, for this machine or for Hopper with ``nvcc``.

    ``tree`` is a folder with FlashInfer's ``csrc`` and ``include``, ``out`` one that isn't there.
    """
    if not nvcc and shutil.which("g++") is None:
        pytest.skip("g++ isn't installed")
    standins, translate = (
        (STANDINS / "hopper", hopper_text) if nvcc else (STANDINS / "include", host_text)
    )
    sources = [tree / f"csrc/{name}.cu" for name in SOURCES]
    for source in (*(tree / HEADERS).rglob("*.*h"), *sources):
        place = out / source.relative_to(tree)
        if source.suffix == ".cu":
            place = out / f"{source.stem}.cpp"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text('#include "ptx.h"\n' + translate(source.read_text()))
    command = (
        nvcc or "g++", "-std=c++17", *(HOPPER if nvcc else HOST), f"-I{standins}", f"-I{out}",
        f"-I{out / 'include'}", str(STANDINS / "attention.cpp"), "-o", str(out / "attention"),
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return out / "attention"


def run(binary: Path, cases: Iterable[str] = CASES, *, backwards: bool = False) -> list[str]:
    """What the program says of each case; ``backwards`` starts the last block first."""
    done = subprocess.run(
        (str(binary), *(("backwards",) if backwards else ())),
        input="".join(f"{case}\n" for case in cases), capture_output=True, text=True, check=False,
    )  # fmt: skip
    return [*done.stdout.splitlines(), *([] if done.returncode == 0 else [f"rc {done.returncode}"])]


if __name__ == "__main__":
    made = build(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    made.with_name("cases").write_text("".join(f"{case}\n" for case in CASES))
    print(f"on a machine with a Hopper card: {made} < {made.with_name('cases')}")  # noqa: T201
