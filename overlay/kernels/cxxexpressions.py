"""Turns C++ expressions into Python functions of a frame; a form that isn't known raises.

The unit's functions, structs and constants are looked up when an expression is evaluated, so code
that no shape reaches may be of any form.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from overlay.kernels.cxx import NotUnderstoodError, text_of
from overlay.kernels.cxxnames import Names, last_two
from overlay.kernels.cxxvalues import Braced, Frame, Object, Opaque, apply, copied, truth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tree_sitter import Node

    Expression = Callable[[Frame], Any]

_INTEGERS = frozenset(
    f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)
) | {"int", "unsigned", "long", "size_t", "short", "char"}  # fmt: skip
_SIZES = {
    "bf16": 2, "__nv_bfloat16": 2, "float": 4, "int": 4, "uint8_t": 1, "uint16_t": 2,
    "uint32_t": 4, "int32_t": 4, "uint64_t": 8, "int64_t": 8,
}  # fmt: skip
_FLOATS = frozenset({"float", "double"})
_CHECKS = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
CHECK = re.compile(r"TVM_FFI_ICHECK(?:_(EQ|NE|LT|LE|GT|GE))?")
_CASTS = ("static_cast", "reinterpret_cast")
_ASSIGNS = ("=", "+=", "-=", "*=", "/=", "%=")


class RefusedError(Exception):
    """The evaluated code refuses: a check fails, or something is thrown."""

    def __init__(self, why: str, where: str) -> None:
        super().__init__(f"{why} ({where})")
        self.why, self.where = why, where


class Expressions(Names):
    """Compiles expressions of one unit; ``cxxstatements`` adds statements and functions."""

    def call(
        self, name: str, given: Sequence[Any], template: Sequence[Any] | None, where: str
    ) -> Any:
        """Call a function of the unit."""
        raise NotImplementedError

    def expression(self, node: Node) -> Expression:
        """The meaning of an expression."""
        known = getattr(self, f"_{node.type}", None)
        if node.has_error or known is None:
            return self.puzzle(f"can't read '{text_of(node)[:60]}'", node)
        made: Expression = known(node)
        return made

    def _identifier(self, node: Node) -> Expression:
        return self.identifier(node)

    def _qualified_identifier(self, node: Node) -> Expression:
        return self.qualified(node)

    def _number_literal(self, node: Node) -> Expression:
        text = text_of(node).replace("'", "").rstrip("uUlLzZ")
        try:
            number: int | float = int(text, 0)
        except ValueError:
            try:
                number = float(text.rstrip("fF"))
            except ValueError:
                return self.puzzle(f"can't read '{text}'", node)
        return lambda _: number

    def _true(self, _: Node) -> Expression:
        return lambda _: True

    def _false(self, _: Node) -> Expression:
        return lambda _: False

    def _null(self, _: Node) -> Expression:
        return lambda _: None

    def _string_literal(self, node: Node) -> Expression:
        text = strings(node)
        return lambda _: text

    _concatenated_string = _string_literal

    def _sizeof_expression(self, node: Node) -> Expression:
        text = text_of(node)
        size = _SIZES.get(text.removeprefix("sizeof").strip("() "))
        return lambda _: Opaque(text) if size is None else size

    def _parenthesized_expression(self, node: Node) -> Expression:
        return self.expression(node.named_children[0])

    def _condition_clause(self, node: Node) -> Expression:
        value = node.child_by_field_name("value")
        if value is None or node.child_by_field_name("initializer") is not None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        return self.expression(value)

    # Operators

    def _binary_expression(self, node: Node) -> Expression:
        left, right, sign = (node.child_by_field_name(n) for n in ("left", "right", "operator"))
        if left is None or right is None or sign is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        operator = text_of(sign)
        if operator == "<<":
            return self._message(node)
        one, two, where = self.expression(left), self.expression(right), self.unit.where(node)
        if operator in ("&&", "||"):
            return lambda frame: _both(one, two, frame, operator == "&&", where)
        return lambda frame: apply(operator, one(frame), two(frame), where)

    def _message(self, node: Node) -> Expression:
        """``CHECK(x) << "words"``: the words say why, should the check fail."""
        words = []
        while node.type == "binary_expression":
            right = node.child_by_field_name("right")
            words.append(strings(right) if right is not None else "")
            node = node.child_by_field_name("left") or node.named_children[0]
        function = node.child_by_field_name("function")
        if node.type != "call_expression" or function is None or node.has_error:
            return self.puzzle(f"can't read '{text_of(node)[:60]}'", node)
        return self._check(node, text_of(function), "".join(reversed(words)))

    def _check(self, node: Node, name: str, words: str) -> Expression:
        where, text = self.unit.where(node), text_of(node)
        arguments = [self.expression(a) for a in _arguments(node)]
        known = CHECK.fullmatch(name)
        said = " ".join(words.split()).rstrip(": ")
        why = f"{said}: {text}" if said else text
        if name == "TVM_FFI_THROW":
            return _thrower(why, where)
        if known is None or len(arguments) != (2 if known[1] else 1):
            return self.puzzle(f"can't read '{text[:60]}'", node)
        compare = _CHECKS.get(known[1] or "")

        def check(frame: Frame) -> None:
            values = [argument(frame) for argument in arguments]
            holds = apply(compare, values[0], values[1], where) if compare else values[0]
            if not truth(holds, where):
                raise RefusedError(why, where)

        return check

    def _unary_expression(self, node: Node) -> Expression:
        argument, sign = (node.child_by_field_name(n) for n in ("argument", "operator"))
        if argument is None or sign is None or text_of(sign) not in ("!", "-", "+"):
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        inner, operator, where = self.expression(argument), text_of(sign), self.unit.where(node)

        def unary(frame: Frame) -> Any:
            value = inner(frame)
            if isinstance(value, Opaque):
                return value
            return not truth(value, where) if operator == "!" else apply(operator, 0, value, where)

        return unary

    def _conditional_expression(self, node: Node) -> Expression:
        parts = [node.child_by_field_name(n) for n in ("condition", "consequence", "alternative")]
        condition, yes, no = (self.expression(p if p is not None else node) for p in parts)
        where = self.unit.where(node)

        def choose(frame: Frame) -> Any:
            asked = condition(frame)
            if isinstance(asked, Opaque):
                return asked
            return yes(frame) if truth(asked, where) else no(frame)

        return choose

    def _assignment_expression(self, node: Node) -> Expression:
        left, right, sign = (node.child_by_field_name(n) for n in ("left", "right", "operator"))
        if left is None or right is None or sign is None or text_of(sign) not in _ASSIGNS:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        return self._store(node, left, text_of(sign)[:-1], self.expression(right))

    def _update_expression(self, node: Node) -> Expression:
        argument, sign = (node.child_by_field_name(n) for n in ("argument", "operator"))
        if argument is None or sign is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        return self._store(node, argument, text_of(sign)[0], lambda _: 1)

    def _store(self, node: Node, target: Node, sign: str, value: Expression) -> Expression:
        where, old = self.unit.where(node), self.expression(target)

        def result(frame: Frame) -> Any:
            new = copied(value(frame))
            return apply(sign, old(frame), new, where) if sign else new

        if target.type == "identifier":
            name = text_of(target)

            def set_name(frame: Frame) -> None:
                holder = frame.holder(name)
                if holder is None:
                    raise NotUnderstoodError(f"sets '{name}', which is no local", where)
                holder.names[name] = result(frame)

            return set_name
        argument, field = (target.child_by_field_name(n) for n in ("argument", "field"))
        if target.type != "field_expression" or argument is None or field is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        owner, member = self.expression(argument), text_of(field)

        def set_field(frame: Frame) -> None:
            held = owner(frame)
            if not isinstance(held, Object):
                raise NotUnderstoodError(f"sets '{text_of(target)}'", where)
            held.fields[member] = result(frame)

        return set_field

    def _field_expression(self, node: Node) -> Expression:
        argument, field = (node.child_by_field_name(n) for n in ("argument", "field"))
        if argument is None or field is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        owner, member, text = self.expression(argument), text_of(field), text_of(node)
        where = self.unit.where(node)

        def get(frame: Frame) -> Any:
            held = owner(frame)
            if isinstance(held, Opaque):
                return Opaque(text)
            if not isinstance(held, Object):
                raise NotUnderstoodError(f"can't read '{text}'", where)
            return held.fields.get(member, Opaque(text))

        return get

    # Values made of others

    def _initializer_list(self, node: Node) -> Expression:
        values = [self.expression(v) for v in node.named_children if v.type != "comment"]
        return lambda frame: Braced(tuple(value(frame) for value in values))

    def _compound_literal_expression(self, node: Node) -> Expression:
        kind, value = (node.child_by_field_name(n) for n in ("type", "value"))
        if kind is None or value is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        made, braced = self.kind(kind), self.expression(value)

        def literal(frame: Frame) -> Any:
            named = made(frame)
            if named.name == "integral_constant" and len(named.arguments) == 2:
                return named.arguments[1]
            return self.fits(braced(frame), named.name)

        return literal

    def _cast_expression(self, node: Node) -> Expression:
        kind, value = (node.child_by_field_name(n) for n in ("type", "value"))
        if kind is None or value is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        return self._convert(text_of(kind), self.expression(value), node)

    def _convert(self, kind: str, value: Expression, node: Node) -> Expression:
        """A cast: to numbers and enumerations, and to pointers and void, which change nothing."""
        name = kind.split("::")[-1]
        if name == "bool":
            return lambda frame: v if isinstance(v := value(frame), Opaque) else truth(v)
        if name in _FLOATS:
            return lambda frame: float(v) if isinstance(v := value(frame), int) else v
        if name in _INTEGERS or name in self.unit.enums:
            return lambda frame: int(v) if isinstance(v := value(frame), (float, bool)) else v
        if name.endswith("*") or name == "void":
            return value
        return self.puzzle(f"can't read a cast to {kind}", node)

    def _call_expression(self, node: Node) -> Expression:
        function = node.child_by_field_name("function")
        if function is None:
            return self.puzzle(f"can't read '{text_of(node)}'", node)
        arguments = [self.expression(a) for a in _arguments(node)]
        if function.type == "qualified_identifier":
            scope, function = last_two(function)
            if scope is not None and function.type == "identifier":
                return self._scoped_call(node, scope, text_of(function), arguments)
        if function.type == "field_expression":
            return self._method(node, function, arguments)
        if function.type != "template_function":
            return self._plain_call(node, text_of(function), arguments)
        name = text_of(function.child_by_field_name("name") or function)
        if name in _CASTS and len(arguments) == 1:
            written = text_of(function)[len(name) + 1 : -1].strip()
            return self._convert(written, arguments[0], node)
        return self._run(node, name, arguments, self.template_arguments(function))

    def _plain_call(self, node: Node, name: str, arguments: list[Expression]) -> Expression:
        if CHECK.fullmatch(name) or name == "TVM_FFI_THROW":
            return self._check(node, name, "")
        if len(arguments) == 1 and self._is_number(name):
            return self._convert(name, arguments[0], node)
        return self._run(node, name, arguments, None)

    def _run(
        self, node: Node, name: str, arguments: list[Expression], template: list[Expression] | None
    ) -> Expression:
        where = self.unit.where(node)

        def run(frame: Frame) -> Any:
            given = [argument(frame) for argument in arguments]
            holder = frame.holder(name)
            if holder is not None:
                called = holder.names[name]
                if template is not None or not callable(called):
                    raise NotUnderstoodError(f"calls '{name}', which isn't known", where)
                return called(given)
            of = None if template is None else [argument(frame) for argument in template]
            return self.call(name, given, of, where)

        return run

    def _scoped_call(
        self, node: Node, scope: Node, name: str, arguments: list[Expression]
    ) -> Expression:
        """Of a struct's function, or of one in a namespace."""
        kind, free = self.kind(scope), self._plain_call(node, name, arguments)
        where, text = self.unit.where(node), text_of(node)

        def run(frame: Frame) -> Any:
            made = kind(frame)
            if made.name not in self.unit.structs:
                return free(frame)
            called = self.member(made, name, text)
            if not callable(called):
                raise NotUnderstoodError(f"calls '{name}', which isn't known", where)
            return called([argument(frame) for argument in arguments])

        return run

    def _is_number(self, name: str) -> bool:
        return name in _INTEGERS or name in _FLOATS or name == "bool" or name in self.unit.enums

    def _method(self, node: Node, function: Node, arguments: list[Expression]) -> Expression:
        """Only what a list can be told to do."""
        owner, field = (function.child_by_field_name(n) for n in ("argument", "field"))
        where = self.unit.where(node)
        if owner is None or field is None or text_of(field) != "push_back" or len(arguments) != 1:
            return self.puzzle(f"calls '{text_of(function)}', which isn't known", node)
        held = self.expression(owner)

        def append(frame: Frame) -> None:
            values = held(frame)
            if not isinstance(values, list):
                raise NotUnderstoodError(f"can't read '{text_of(node)}'", where)
            values.append(arguments[0](frame))

        return append


def _both(one: Expression, two: Expression, frame: Frame, is_and: bool, where: str) -> Any:
    """``&&`` or ``||``; one side that is known may settle it, whatever the other is."""
    left = one(frame)
    if not isinstance(left, Opaque) and truth(left, where) != is_and:
        return not is_and
    right = two(frame)
    if not isinstance(right, Opaque) and truth(right, where) != is_and:
        return not is_and
    return next((side for side in (left, right) if isinstance(side, Opaque)), is_and)


def _thrower(why: str, where: str) -> Expression:
    def throw(_: Frame) -> None:
        raise RefusedError(why, where)

    return throw


def _arguments(node: Node) -> list[Node]:
    arguments = node.child_by_field_name("arguments")
    children = arguments.named_children if arguments is not None else []
    return [child for child in children if child.type != "comment"]


def strings(node: Node) -> str:
    """The literal text in a node."""
    if node.type == "string_content":
        return (node.text or b"").decode()
    return "".join(strings(child) for child in node.named_children)
