"""Finding definitions in a tree, and cutting functions out of it to run them."""

from __future__ import annotations
import __future__

import ast
import copy
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.static.trees import View

Function = ast.FunctionDef | ast.AsyncFunctionDef

_MLA = "vllm/v1/attention/backends/mla"
# Where the upstreams of all lines have kept what the patches are about; a definition is looked
# for in all of them, since it moves between releases
PLACES = (
    f"{_MLA}/flashinfer_mla_sparse.py",
    f"{_MLA}/flashinfer_mla_sparse_sm120.py",
    f"{_MLA}/sparse_utils.py",
    "vllm/model_executor/layers/attention/mla_attention.py",
    "vllm/model_executor/layers/attention/sparse_mla_attention.py",
    "vllm/v1/attention/ops/common.py",
    "vllm/v1/attention/ops/dcp.py",
    "vllm/v1/attention/ops/dcp_alltoall.py",
    "vllm/v1/attention/ops/dcp_utils.py",
    "vllm/v1/worker/gpu/block_table.py",
    "vllm/v1/worker/gpu/cp_utils.py",
    "vllm/v1/worker/gpu/input_batch.py",
    "vllm/v1/worker/gpu/spec_decode/speculator.py",
    "vllm/v1/worker/gpu/warmup.py",
    "flashinfer/jit/env.py",
    "flashinfer/mla/_core.py",
    "flashinfer/mla.py",
)


class Missing(Exception):
    """What is looked for is not in the tree."""


def find(view: View, name: str) -> Any:
    """The module-level function or class of that name. Raises ``Missing``."""
    for path in PLACES:
        module = view.module(path)
        for node in module.body if module else ():
            if isinstance(node, Function | ast.ClassDef) and node.name == name:
                return node
    raise Missing(f"no {name}")


def neighbours(view: View, name: str) -> dict[str, ast.AST]:
    """Functions and classes of the module that defines ``name``."""
    for path in PLACES:
        module = view.module(path)
        named = {
            node.name: node
            for node in (module.body if module else ())
            if isinstance(node, Function | ast.ClassDef)
        }
        if name in named:
            return named
    raise Missing(f"no {name}")


def member(owner: ast.ClassDef, name: str) -> Any:
    """A method of a class. Raises ``Missing``."""
    for node in owner.body:
        if isinstance(node, Function) and node.name == name:
            return node
    raise Missing(f"{owner.name} has no {name}")


def constant(owner: ast.ClassDef, name: str) -> Any:
    """The literal that a class binds to a name, the last one. Raises ``Missing``."""
    found = None
    for node in owner.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found = node.value
    if not isinstance(found, ast.Constant):
        raise Missing(f"{owner.name}.{name} is no literal")
    return found.value


def names_in(node: ast.AST) -> set[str]:
    """Names that are read anywhere in a node."""
    return {
        one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)
    }


def calls_in(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls by that name, or of an attribute by that name, in order of the text."""
    for one in ast.walk(node):
        if isinstance(one, ast.Call):
            func = one.func
            if (isinstance(func, ast.Name) and func.id == name) or (
                isinstance(func, ast.Attribute) and func.attr == name
            ):
                yield one


def attributes_in(node: ast.AST) -> set[str]:
    """Attribute names that are read anywhere in a node."""
    return {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


def cut(function: Function, namespace: Mapping[str, Any]) -> Callable[..., Any]:
    """The function as Python runs it, with ``namespace`` for globals; decorators left out."""
    alone = copy.deepcopy(function)
    alone.decorator_list = []
    return cut_body([alone], function.name, dict(namespace))[function.name]


def cut_body(body: list[ast.stmt], name: str, namespace: dict[str, Any]) -> dict[str, Any]:
    """Run statements with ``namespace`` for globals, which is returned with what they bind."""
    module = ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))
    # Annotations name types that aren't there
    flags = __future__.annotations.compiler_flag
    exec(compile(module, f"<{name}>", "exec", flags, dont_inherit=True), namespace)  # noqa: S102
    return namespace


_CPP_NOISE = re.compile(r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" """, re.DOTALL | re.VERBOSE)


def cpp_code(text: str) -> str:
    """C++ without comments and the contents of strings; white space made one blank."""
    kept = _CPP_NOISE.sub(lambda found: '""' if found[0].startswith('"') else " ", text)
    return re.sub(r"\s+", " ", kept)


def cpp_function(code: str, name: str) -> str:
    """Body of the definition of a C++ function in ``cpp_code``. Raises ``Missing``."""
    for found in re.finditer(rf"\b{re.escape(name)}\s*\(", code):
        opened = _closing(code, found.end() - 1, "()") + 1
        rest = re.match(r"\s*(?:const\s*)?(?:noexcept\s*)?\{", code[opened:])
        if rest:
            start = opened + rest.end() - 1
            return code[start : _closing(code, start, "{}") + 1]
    raise Missing(f"no definition of {name}()")


def _closing(code: str, at: int, pair: str) -> int:
    depth = 0
    for index in range(at, len(code)):
        depth += {pair[0]: 1, pair[1]: -1}.get(code[index], 0)
        if depth == 0:
            return index
    raise Missing(f"unbalanced {pair}")
