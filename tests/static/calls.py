"""Calls that a file makes into a package, by the dotted name that each goes to.

Both sides are read as syntax trees: nothing is imported, so neither torch nor a GPU is needed.
A call is followed from the name it is made by, through imports and vLLM's lazy wrappers;
``tests.static.api`` has the signature that stands at the other end. What can't be followed there
is said, with the reason, and never taken for a fit.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.static.syntax import last_word, own_nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

# vLLM's module of wrappers that import FlashInfer when they are first called
WRAPPERS = "vllm.utils.flashinfer"
WRAPPER_MAKER = "_lazy_import_wrapper"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call into the package: where it is made, and the dotted name that it goes to."""

    path: str
    line: int
    target: str
    node: ast.Call

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.target}()"


def lazy_wrappers(module: ast.Module) -> dict[str, str]:
    """Names that a module binds to lazy wrappers, with what each stands for."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and (target := _wrapped(node.value)):
            found |= {name.id: target for name in node.targets if isinstance(name, ast.Name)}
    return found


def _wrapped(value: ast.expr) -> str | None:
    if not isinstance(value, ast.Call) or last_word(value.func) != WRAPPER_MAKER:
        return None
    words = [a.value for a in value.args[:2] if isinstance(a, ast.Constant)]
    return ".".join(map(str, words)) if len(words) == 2 else None


def find_calls(
    path: str, module: ast.Module, wrappers: dict[str, str], *, package: str
) -> Iterator[Call]:
    """Calls that a file makes into ``package``, in its functions and classes too.

    Args:
        path: of the file, for messages.
        module: the file.
        wrappers: of ``WRAPPERS``, by name.
        package: top-level name, such as ``flashinfer``.
    """
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    finder = _Finder(path, dotted, wrappers, package)
    finder.visit(module)
    yield from finder.found


@dataclass(slots=True)
class _Scope:
    """Names of one scope: where an import leads, None for what is bound otherwise."""

    names: dict[str, str | None]
    is_class: bool = False


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, dotted: str, wrappers: dict[str, str], package: str) -> None:
        self._path, self._dotted, self._package = path, dotted, package
        self._wrappers = wrappers
        self._scopes: list[_Scope] = []
        self.found: list[Call] = []

    def visit_Module(self, node: ast.Module) -> None:
        self._enter(node, _bindings(node.body, self._dotted))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outer in (*node.decorator_list, *node.args.defaults, *node.args.kw_defaults):
            if outer is not None:
                self.visit(outer)
        names = dict.fromkeys(_parameters(node.args)) | _bindings(node.body, self._dotted)
        self._scopes.append(_Scope(names))
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._enter(node, dict.fromkeys(_parameters(node.args)))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._enter(node, _bindings(node.body, self._dotted), is_class=True)

    def visit_Call(self, node: ast.Call) -> None:
        target = self._follow(node.func)
        if target is not None:
            self.found.append(Call(path=self._path, line=node.lineno, target=target, node=node))
        self.generic_visit(node)

    def _enter(
        self, node: ast.AST, names: dict[str, str | None], *, is_class: bool = False
    ) -> None:
        self._scopes.append(_Scope(names, is_class))
        self.generic_visit(node)
        self._scopes.pop()

    def _follow(self, func: ast.expr) -> str | None:
        """The dotted name below the package that an expression means, or None."""
        words: list[str] = []
        while isinstance(func, ast.Attribute):
            words.insert(0, func.attr)
            func = func.value
        if not isinstance(func, ast.Name):
            return None
        for at, scope in enumerate(reversed(self._scopes)):
            if func.id in scope.names and not (scope.is_class and at):
                root = scope.names[func.id]
                return self._below(".".join((root, *words))) if root else None
        return None

    def _below(self, target: str) -> str | None:
        prefix, _, name = target.rpartition(".")
        if prefix == WRAPPERS and name in self._wrappers:
            target = self._wrappers[name]
        return target if target.startswith(f"{self._package}.") else None


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    for one in (*every, arguments.vararg, arguments.kwarg):
        if one is not None:
            yield one.arg


def _bindings(body: list[ast.stmt], dotted: str) -> dict[str, str | None]:
    """Names that statements bind in their own scope. An import wins: what else is bound to its
    name is what stands in for it where it can't be imported."""
    imports: dict[str, str | None] = {}
    others: dict[str, str | None] = {}
    for node in own_nodes(body):
        if isinstance(node, ast.Import):
            for one in node.names:
                name = one.asname or one.name.partition(".")[0]
                imports[name] = one.name if one.asname else name
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for one in node.names:
                imports[one.asname or one.name] = f"{node.module}.{one.name}"
        elif isinstance(node, ast.Assign) and (target := _wrapped(node.value)):
            imports |= {name.id: target for name in node.targets if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            others[node.id] = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            others[node.name] = f"{dotted}.{node.name}"
    return others | imports
