"""Walks over syntax trees that more than one module needs."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All nodes of a scope, without what functions, lambdas and classes in it hold."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from own_nodes(ast.iter_child_nodes(node))


def last_word(node: ast.expr) -> str:
    """Last word of a dotted name, of what is called if it is a call."""
    if isinstance(node, ast.Call):
        return last_word(node.func)
    if isinstance(node, ast.Subscript):
        return last_word(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ast.dump(node)
