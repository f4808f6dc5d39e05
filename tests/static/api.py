"""Signatures of a package's functions and classes, as its tree says them."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.static.syntax import last_word, own_nodes

if TYPE_CHECKING:
    from tests.static.trees import View

# Decorators that leave a signature alone, and those that add keywords to it
_TRANSPARENT = {
    *("cache", "lru_cache", "contextmanager", "no_grad", "deprecated", "wraps"),
    *("flashinfer_api", "supported_compute_capability", "register_custom_op", "staticmethod"),
    *("classmethod", "override", "flashinfer_experimental_api"),
}
_ADDS = {"backend_requirement": ("skip_check",)}


class Unresolved(Exception):
    """A call whose signature can't be found by reading; the message is the reason."""


@dataclass(slots=True)
class Api:
    """The package that is called, as its tree says it."""

    view: View
    package: str
    _known: dict[str, list[inspect.Signature]] = field(default_factory=dict)
    _indexes: dict[str, tuple[dict[str, _Bound], list[str]]] = field(default_factory=dict)

    def signatures(self, target: str) -> list[inspect.Signature]:
        """Signatures of a dotted name: several where it is defined by case.

        Raises ``Unresolved``. An empty list never comes back.
        """
        if target not in self._known:
            self._known[target] = self._signatures(target)
        return self._known[target]

    def _signatures(self, target: str) -> list[inspect.Signature]:
        found = self._find(target, seen=())
        return [_signature(node, owner) for node, owner in found]

    def _find(self, target: str, seen: tuple[str, ...]) -> list[_Found]:
        if target in seen:
            raise Unresolved(f"{target} is imported in a circle")
        words = target.split(".")
        for at in range(len(words), 0, -1):
            module = self._module(words[:at])
            if module is not None:
                if at == len(words):
                    raise Unresolved(f"{target} is a module")
                return self._attribute(module, words[:at], words[at:], (*seen, target))
        raise Absent(f"there is no module {target.rpartition('.')[0]}")

    def _module(self, words: list[str]) -> tuple[ast.Module, bool] | None:
        """A module and whether it is a package's ``__init__``."""
        base = "/".join(words)
        for path, is_package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
            module = self.view.module(path)
            if module is not None:
                return module, is_package
        return None

    def _attribute(
        self,
        module: tuple[ast.Module, bool],
        where: list[str],
        rest: list[str],
        seen: tuple[str, ...],
    ) -> list[_Found]:
        name, *rest = rest
        tree, is_package = module
        here = ".".join(where)
        if here not in self._indexes:
            self._indexes[here] = _index(tree, where, is_package)
        names, stars = self._indexes[here]
        bound = names.get(name, _Bound())
        for target in bound.imports:
            if not target.startswith(f"{self.package}."):
                raise Unresolved(f"{here}.{name} comes from {target}")
            try:
                return self._find(".".join((target, *rest)), seen)
            except Absent:
                if not (bound.values or bound.definitions):
                    raise
        if bound.definitions:
            return [
                one for node in bound.definitions for one in self._inside(node, rest, here, seen)
            ]
        if bound.values:
            if len(bound.values) > 1 or not isinstance(bound.values[0], ast.Name):
                raise Unresolved(f"{here}.{name} is assigned, not defined")
            return self._find(".".join((here, bound.values[0].id, *rest)), seen)
        for star in stars:
            try:
                return self._find(".".join((star, name, *rest)), seen)
            except Absent:
                continue
        if "__getattr__" in names:
            raise Unresolved(f"{here}.{name} is left to the module's __getattr__")
        raise Absent(f"{here} has no {name}")

    def _inside(
        self, node: _Definition, rest: list[str], here: str, seen: tuple[str, ...]
    ) -> list[_Found]:
        if not isinstance(node, ast.ClassDef):
            if rest:
                raise Unresolved(f"{here}.{node.name}.{'.'.join(rest)} is a function's attribute")
            return [(node, None)]
        if not rest and "dataclass" in map(last_word, node.decorator_list) and not node.bases:
            return [(_dataclass_init(node), node)]
        if len(rest) > 1:
            raise Unresolved(f"{here}.{node.name}.{'.'.join(rest)} is too deep")
        wanted = rest[0] if rest else "__init__"
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name == wanted:
                return [(one, node)]
        for base in node.bases:
            if isinstance(base, ast.Name):
                found = self._find(".".join((here, base.id, *rest)), seen)
                if found:
                    return found
        raise Unresolved(f"class {here}.{node.name} has no {wanted} of its own")


class Absent(Exception):
    """The package has no such name: the call fails wherever it is reached."""


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Found = tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]


@dataclass(slots=True)
class _Bound:
    """How a module binds one name."""

    definitions: list[_Definition] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)
    values: list[ast.expr | None] = field(default_factory=list)


def _index(
    tree: ast.Module, where: list[str], is_package: bool
) -> tuple[dict[str, _Bound], list[str]]:
    """Names that a module binds, and the modules that it imports everything from."""
    names: dict[str, _Bound] = defaultdict(_Bound)
    stars = []
    for node in own_nodes(tree.body):
        if isinstance(node, _Definition):
            if "overload" not in map(last_word, node.decorator_list):
                names[node.name].definitions.append(node)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(node, where, is_package)
            for one in node.names:
                if one.name == "*":
                    stars.append(source)
                else:
                    names[one.asname or one.name].imports.append(f"{source}.{one.name}")
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name):
                        whole = one is target
                        names[one.id].values.append(node.value if whole else None)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
            names[node.target.id].values.append(None)
    return names, stars


def _dataclass_init(node: ast.ClassDef) -> ast.FunctionDef:
    """The ``__init__`` that ``dataclass`` makes of a class without bases."""
    lines = ["def __init__(self"]
    for one in node.body:
        if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name):
            continue
        if last_word(one.annotation) in ("ClassVar", "InitVar", "KW_ONLY"):
            raise Unresolved(f"dataclass {node.name} has fields of its own kind")
        is_field = one.value is not None and last_word(one.value) == "field"
        given = [word.arg for word in one.value.keywords] if is_field else []
        if "init" in given or "kw_only" in given:
            raise Unresolved(f"dataclass {node.name} has fields of its own kind")
        has_default = one.value is not None and (
            not is_field or {"default", "default_factory"} & {*given}
        )
        lines.append(f"{one.target.id}=None" if has_default else one.target.id)
    made = ast.parse(", ".join(lines) + "): ...").body[0]
    assert isinstance(made, ast.FunctionDef)
    return made


def _absolute(node: ast.ImportFrom, where: list[str], is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    up = node.level - (1 if is_package else 0)
    start = where[: len(where) - up] if up else where
    return ".".join((*start, *((node.module,) if node.module else ())))


def _signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef, owner: ast.ClassDef | None
) -> inspect.Signature:
    added: list[str] = []
    decorators = [last_word(one) for one in node.decorator_list]
    for name in decorators:
        if name in _ADDS:
            added += _ADDS[name]
        elif name not in _TRANSPARENT:
            raise Unresolved(f"{node.name} is decorated by {name}")
    kinds = inspect.Parameter
    a = node.args
    positional = [(one, kinds.POSITIONAL_ONLY) for one in a.posonlyargs]
    positional += [(one, kinds.POSITIONAL_OR_KEYWORD) for one in a.args]
    if owner is not None and "staticmethod" not in decorators:
        positional = positional[1:]
    required = len(positional) - len(a.defaults)
    parameters = [
        kinds(one.arg, kind, default=kinds.empty if at < required else None)
        for at, (one, kind) in enumerate(positional)
    ]
    if a.vararg:
        parameters.append(kinds(a.vararg.arg, kinds.VAR_POSITIONAL))
    parameters += [
        kinds(one.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
        for one, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    parameters += [kinds(name, kinds.KEYWORD_ONLY, default=None) for name in added]
    if a.kwarg:
        parameters.append(kinds(a.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def misfit(call: ast.Call, signature: inspect.Signature) -> str | None:
    """Why a call can't be bound to a signature, or None.

    With ``*`` or ``**`` in the call, only what it names is bound.
    """
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    double = any(one.arg is None for one in call.keywords)
    positional = [one for one in call.args if not isinstance(one, ast.Starred)]
    named = {one.arg: None for one in call.keywords if one.arg is not None}
    bind = signature.bind_partial if starred or double else signature.bind
    try:
        bind(*positional, **named)
    except TypeError as error:
        return str(error)
    return None
