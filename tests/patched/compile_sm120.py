"""Compile the patched path's Triton kernels for sm_120a; no GPU, no interpreter.

Run as a script in a process of its own, since here Triton must not interpret. vLLM
takes its Triton for absent on a machine without a device, so the kernels are taken
from the source text of the installed module.
"""

import ast
import importlib.util
import linecache
import sys
import textwrap
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CONVERT = ("_convert_req_index_to_global_index_kernel", "sparse_mla_index_remap_kernel")
MASK = "_mask_empty_rows_kernel"


def load(path: Path) -> dict:
    source = path.read_text()
    nodes = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name in (*CONVERT, MASK)
    ]
    bodies = (ast.get_source_segment(source, node, padded=True) for node in nodes)
    text = "\n".join("@triton.jit\n" + textwrap.dedent(body) for body in bodies)
    name = "<kernels>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    scope = {"triton": triton, "tl": tl, "__name__": "kernels"}
    exec(compile(text, name, "exec"), scope)  # noqa: S102
    return scope


def build(kernel, pointers: dict, constants: dict) -> str:
    signature = {
        name: pointers.get(name, "constexpr" if name in constants else "i32")
        for name in kernel.arg_names
    }
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 120, 32))
    return compiled.asm["ptx"]


def main() -> None:
    # Not imported: the package around it is vLLM.
    package = Path(importlib.util.find_spec("vllm").origin).parent
    path = package / "v1/attention/backends/mla/sparse_utils.py"
    scope = load(path)
    convert, mask = next(scope[name] for name in CONVERT if name in scope), scope.get(MASK)
    # 0.26 tiles the row always, and counts by atomics.
    width = 2048 if "SINGLE_TILE" in convert.arg_names else 128
    for dcp in (2, 4, 8):
        for interleave in (1, 64):
            ptx = build(
                convert,
                {
                    "req_id_ptr": "*i32",
                    "block_table_ptr": "*i32",
                    "token_indices_ptr": "*i32",
                    "out_ptr": "*i32",
                    "valid_count_ptr": "*i32",
                },
                {
                    "idx_mapping_ptr": None,
                    "prefill_request_id_ptr": None,
                    "workspace_starts_ptr": None,
                    "max_num_blocks_per_req": 2048,
                    "BLOCK_SIZE": 64,
                    "BLOCK_STRIDE_ROWS": 64,
                    "NUM_TOPK_TOKENS": 2048,
                    "HAS_IDX_MAPPING": False,
                    "BLOCK_N": width,
                    "HAS_PREFILL": False,
                    "COUNT_VALID": True,
                    "SINGLE_TILE": True,
                    "COMPACT_TO_FRONT": True,
                    "DCP_SIZE": dcp,
                    "DCP_RANK": dcp - 1,
                    "DCP_INTERLEAVE": interleave,
                },
            )
            assert "sm_120a" in ptx, ptx[:400]
    for heads in (8, 16, 32, 64, 128) if mask else ():
        ptx = build(
            mask,
            {"out_ptr": "*bf16", "lse_ptr": "*fp32", "valid_count_ptr": "*i32"},
            {"NUM_HEADS": heads, "HEAD_DIM": 512, "BLOCK_H": heads, "BLOCK_N": 1024},
        )
        assert "sm_120a" in ptx, ptx[:400]
    sys.stdout.write("compiled\n")


if __name__ == "__main__":
    main()
