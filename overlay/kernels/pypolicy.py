"""Evaluates small pure functions of a Python source, without running it.

Constants, enumerations, ``return``, ``if``, comparisons and calls of one another: enough for the
code by which FlashInfer decides whether it has a kernel. All else raises ``NotUnderstoodError``.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlay.kernels.cxx import NotUnderstoodError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_STEPS = 50_000  # expressions that one question may take
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Mod: operator.mod, ast.FloorDiv: operator.floordiv, ast.BitOr: operator.or_,
}  # fmt: skip
_TYPES = {"int": int, "tuple": tuple, "bool": bool, "str": str}


@dataclass(frozen=True, slots=True)
class _Instance:
    """An object of a class of the source."""

    of: ast.ClassDef
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


class Policy:
    """The functions of one Python source.

    Args:
        path: in the tree.
        text: of the source.
        natives: functions of it whose answer comes from elsewhere, by name.

    Raises:
        NotUnderstoodError: it is no Python.
    """

    def __init__(
        self, path: str, text: str, natives: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        self.path = path
        self._natives = natives or {}
        try:
            module = ast.parse(text, path)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise NotUnderstoodError(f"no Python: {error}", path) from None
        self._functions: dict[str, ast.FunctionDef] = {}
        self._classes: dict[str, ast.ClassDef] = {}
        self._assigned: dict[str, ast.expr] = {}
        self._constants: dict[str, Any] = {}
        self._steps = 0
        for node in module.body:
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self._functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            self._classes[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            self._assigned[node.target.id] = node.value
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    self._assigned[target.id] = node.value

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the source's functions, in its order."""
        return tuple(self._functions)

    def where(self, name: str) -> str:
        """``file:line`` of a function or constant."""
        node = self._functions.get(name) or self._assigned.get(name)
        return f"{self.path}:{node.lineno}" if node is not None else self.path

    def constant(self, name: str) -> Any:
        """The value of a module's constant. Raises ``NotUnderstoodError``."""
        self._steps = _STEPS
        return self._name(ast.Name(id=name, lineno=0), {})

    def call(self, name: str, given: Mapping[str, Any]) -> Any:
        """What a function returns.

        Raises:
            NotUnderstoodError: it isn't there, wants other arguments, or can't be told.
        """
        if name not in self._functions:
            raise NotUnderstoodError(f"no function '{name}'", self.path)
        function = self._functions[name]
        wanted = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
        if missing := wanted - set(given):
            raise NotUnderstoodError(f"'{name}' wants {sorted(missing)}", self.where(name))
        self._steps = _STEPS
        try:
            return self._run(function, {n: v for n, v in given.items() if n in wanted})
        except RecursionError:
            raise NotUnderstoodError("is nested too deeply", self.where(name)) from None

    def _puzzle(self, what: str, node: ast.AST) -> NotUnderstoodError:
        return NotUnderstoodError(what, f"{self.path}:{getattr(node, 'lineno', 0)}")

    def _run(self, function: ast.FunctionDef, names: dict[str, Any]) -> Any:
        done = self._block(function.body, names)
        return done.value if done is not None else None

    def _block(self, body: Sequence[ast.stmt], names: dict[str, Any]) -> _Returned | None:
        for node in body:
            if isinstance(node, ast.Return):
                return _Returned(self._value(node.value, names) if node.value else None)
            if isinstance(node, ast.If):
                chosen = node.body if self._value(node.test, names) else node.orelse
                done = self._block(chosen, names)
                if done is not None:
                    return done
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                self._assign(node.targets[0], self._value(node.value, names), names)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign(node.target, self._value(node.value, names), names)
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                raise self._puzzle(f"can't read '{ast.unparse(node)[:60]}'", node)
        return None

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple) and isinstance(value, tuple):
            if len(target.elts) != len(value):
                raise self._puzzle("unpacks what is of another length", target)
            for one, part in zip(target.elts, value, strict=True):
                self._assign(one, part, names)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            held = names.get(target.value.id)
            if not isinstance(held, _Instance):
                raise self._puzzle(f"sets '{ast.unparse(target)}'", target)
            held.fields[target.attr] = value
        else:
            raise self._puzzle(f"sets '{ast.unparse(target)}'", target)

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        self._steps -= 1
        if self._steps < 0:
            raise self._puzzle("takes too many steps", node)
        known = getattr(self, f"_{type(node).__name__.lower()}", None)
        if known is None:
            raise self._puzzle(f"can't read '{ast.unparse(node)[:60]}'", node)
        try:
            return known(node, names)
        except (TypeError, ArithmeticError) as error:
            raise self._puzzle(str(error), node) from None

    def _constant(self, node: ast.Constant, _: dict[str, Any]) -> Any:
        return node.value

    def _name(self, node: ast.Name, names: dict[str, Any]) -> Any:
        if node.id in names:
            return names[node.id]
        if node.id in self._assigned:
            if node.id not in self._constants:
                value = self._assigned[node.id]
                if any(isinstance(n, ast.Name) and n.id == node.id for n in ast.walk(value)):
                    raise self._puzzle(f"'{node.id}' is made of itself", value)
                self._constants[node.id] = self._value(value, {})
            return self._constants[node.id]
        raise self._puzzle(f"'{node.id}' isn't known", node)

    def _attribute(self, node: ast.Attribute, names: dict[str, Any]) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in self._classes:
            for item in self._classes[node.value.id].body:
                if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) == node.attr:
                    return self._value(item.value, {})
        else:
            held = self._value(node.value, names)
            if isinstance(held, _Instance) and node.attr in held.fields:
                return held.fields[node.attr]
        raise self._puzzle(f"'{ast.unparse(node)}' isn't known", node)

    def _tuple(self, node: ast.Tuple, names: dict[str, Any]) -> Any:
        found: list[Any] = []
        for each in node.elts:
            if isinstance(each, ast.Starred):
                found += self._value(each.value, names)
            else:
                found.append(self._value(each, names))
        return tuple(found)

    def _generatorexp(self, node: ast.GeneratorExp, names: dict[str, Any]) -> Any:
        """All of it at once; only over what has an end."""
        found = []
        one = node.generators[0]
        held = self._value(one.iter, names)
        if len(node.generators) != 1 or not isinstance(held, (tuple, frozenset)):
            raise self._puzzle(f"can't read '{ast.unparse(node)[:60]}'", node)
        for value in held:
            inner = dict(names)
            self._assign(one.target, value, inner)
            if all(self._value(test, inner) for test in one.ifs):
                found.append(self._value(node.elt, inner))
        return tuple(found)

    def _set(self, node: ast.Set, names: dict[str, Any]) -> Any:
        return frozenset(self._value(e, names) for e in node.elts)

    def _boolop(self, node: ast.BoolOp, names: dict[str, Any]) -> Any:
        stop = isinstance(node.op, ast.Or)
        value: Any = None
        for part in node.values:
            value = self._value(part, names)
            if bool(value) is stop:
                break
        return value

    def _unaryop(self, node: ast.UnaryOp, names: dict[str, Any]) -> Any:
        value = self._value(node.operand, names)
        if isinstance(node.op, ast.Not):
            return not value
        if isinstance(node.op, ast.USub):
            return -value
        raise self._puzzle(f"can't read '{ast.unparse(node)}'", node)

    def _binop(self, node: ast.BinOp, names: dict[str, Any]) -> Any:
        known = _ARITHMETIC.get(type(node.op))
        if known is None:
            raise self._puzzle(f"can't read '{ast.unparse(node)}'", node)
        return known(self._value(node.left, names), self._value(node.right, names))

    def _ifexp(self, node: ast.IfExp, names: dict[str, Any]) -> Any:
        return self._value(node.body if self._value(node.test, names) else node.orelse, names)

    def _compare(self, node: ast.Compare, names: dict[str, Any]) -> bool:
        left = self._value(node.left, names)
        for sign, right_node in zip(node.ops, node.comparators, strict=True):
            right = self._value(right_node, names)
            if isinstance(sign, (ast.In, ast.NotIn)):
                holds = self._contains(right, left, node) is isinstance(sign, ast.In)
            else:
                holds = bool(_COMPARE[type(sign)](left, right))
            if not holds:
                return False
            left = right
        return True

    def _contains(self, held: Any, value: Any, node: ast.AST) -> bool:
        if isinstance(held, (frozenset, tuple)):
            return value in held
        if isinstance(held, _Instance):
            return bool(self._method(held, "__contains__", [value], node))
        raise self._puzzle("looks into what isn't known", node)

    def _method(self, held: _Instance, name: str, given: list[Any], node: ast.AST) -> Any:
        for item in held.of.body:
            if isinstance(item, ast.FunctionDef) and item.name == name:
                wanted = [a.arg for a in item.args.args]
                if len(wanted) == len(given) + 1:
                    return self._run(item, dict(zip(wanted, [held, *given], strict=True)))
        raise self._puzzle(f"'{held.of.name}.{name}' isn't known", node)

    def _call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if node.keywords or not name or name in names:
            raise self._puzzle(f"can't read '{ast.unparse(node)[:60]}'", node)
        if name == "isinstance" and len(node.args) == 2:
            kind = _TYPES.get(ast.unparse(node.args[1]))
            if kind is not None:
                return isinstance(self._value(node.args[0], names), kind)
        given = [self._value(a, names) for a in node.args]
        if name in self._natives:
            return self._natives[name](*given)
        if name in self._functions:
            function = self._functions[name]
            wanted = [a.arg for a in function.args.args]
            if len(wanted) == len(given):
                return self._run(function, dict(zip(wanted, given, strict=True)))
        if name in self._classes:
            made = _Instance(self._classes[name], {})
            self._method(made, "__init__", given, node)
            return made
        return self._builtin(name, given, node)

    def _builtin(self, name: str, given: list[Any], node: ast.Call) -> Any:
        match name, given:
            case "next", [tuple() as found, default]:
                return found[0] if found else default
            case "frozenset", [(frozenset() | tuple()) as held]:
                return frozenset(held)
            case "len", [(frozenset() | tuple()) as held]:
                return len(held)
            case "int", [int() as number]:
                return int(number)
        raise self._puzzle(f"calls '{name}', which isn't known", node)
