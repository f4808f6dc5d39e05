"""Evaluates dispatch code of a C++ source: what does it do with one shape?

A strict reader of a small part of C++: functions and templates over integers, ``if``, ``switch``,
``for``, ``return``, checks. A function that starts a kernel isn't entered; that it was reached, and
with which template arguments, is the answer. Whatever isn't known raises ``NotUnderstoodError``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlay.kernels.cxx import Function, NotUnderstoodError, Unit, names_in, text_of
from overlay.kernels.cxxexpressions import CHECK, RefusedError
from overlay.kernels.cxxstatements import Flow, Jump, Statements
from overlay.kernels.cxxvalues import Frame, Kind, Opaque, copied

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tree_sitter import Node

    from overlay.kernels.cxxstatements import Statement

STEPS = 100_000  # statements that one question may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel that the code would start: the launcher, and its template's arguments by name."""

    name: str
    arguments: Mapping[str, Any]
    where: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a call did.

    Attributes:
        value: returned.
        launches: kernels that it would have started, in order.
        because, where: the test that led to the ``return`` of ``value``, and the line of that.
    """

    value: Any
    launches: list[Launch] = field(default_factory=list)
    because: str = ""
    where: str = ""


class Dispatch(Statements):
    """The functions of one source, to be asked again and again."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self._bodies: dict[int, Statement] = {}
        self._chosen: dict[tuple[str, int, bool], Function | None] = {}
        self._launches: list[Launch] = []

    def run(self, name: str, given: Mapping[str, Any]) -> Outcome:
        """Call a function with arguments by name; those that aren't given are opaque.

        Raises:
            NotUnderstoodError: the answer can't be told from this source.
            RefusedError: a check of it fails.
        """
        function = self.function(name)
        values = [given.get(p, Opaque(p)) for p, _, _ in function.parameters]
        self._launches, self.steps, self.last = [], STEPS, Flow(Jump.RETURN)
        try:
            value = self.enter(function, values, None, "")
        except RecursionError:
            raise NotUnderstoodError("is nested too deeply", self.unit.path) from None
        return Outcome(
            value=value,
            launches=self._launches,
            because=self.last.because,
            where=self.last.where,
        )

    def check(self, name: str, given: Mapping[str, Any]) -> None:
        """Make those checks of a function that are about nothing but ``given``.

        Raises:
            NotUnderstoodError: one can't be told, or fails where it stands under a condition.
            RefusedError: one fails.
        """
        self.steps = STEPS
        body = self.function(name).body
        for node in _checks(body):
            called = node.child_by_field_name("arguments")
            if called is None or not names_in(called) <= given.keys():
                continue
            try:
                self.expression(_with_words(node))(Frame(dict(given)))
            except RefusedError as error:
                if _statement_of(node).parent == body:
                    raise
                raise NotUnderstoodError(f"may refuse: {error.why}", error.where) from None

    def static(self, struct: str, argument: Any, name: str) -> Any:
        """A constant of a struct's specialisation; opaque where that isn't known."""
        try:
            return self.member(Kind(struct, (argument,)), name, f"{struct}::{name}")
        except NotUnderstoodError:
            return Opaque(f"{struct}::{name}")

    def function(self, name: str) -> Function:
        """The only function of a name. Raises ``NotUnderstoodError``."""
        found = self.unit.functions.get(name, [])
        if len(found) != 1:
            raise NotUnderstoodError(f"{len(found)} functions '{name}'", self.unit.path)
        return found[0]

    def call(
        self, name: str, given: Sequence[Any], template: Sequence[Any] | None, where: str
    ) -> Any:
        """Call the function of the unit that fits; a launcher is noted down instead."""
        key = (name, len(given), template is None)
        if key not in self._chosen:
            self._chosen[key] = self._choose(name, len(given), template is not None)
        chosen = self._chosen[key]
        if chosen is None:
            raise NotUnderstoodError(f"calls '{name}', which isn't known", where)
        return self.enter(chosen, given, template, where)

    def _choose(self, name: str, given: int, is_template: bool) -> Function | None:
        """The function that so many arguments fit; None unless there is just one."""
        fitting = [
            one
            for one in self.unit.functions.get(name, ())
            if len(one.parameters) == given or one.launches
        ]
        templates = [one for one in fitting if one.template is not None]
        plain = [one for one in fitting if one.template is None]
        chosen = templates if is_template else plain or templates
        special = any(other.startswith(f"{name}<") for other in self.unit.functions)
        return chosen[0] if len(chosen) == 1 and not special else None

    def enter(
        self, function: Function, given: Sequence[Any], template: Sequence[Any] | None, where: str,
        outer: Frame | None = None,
    ) -> Any:  # fmt: skip
        """Evaluate a function's body; a launcher's isn't, it is noted down."""
        frame = Frame({}, outer)
        for at, (name, default) in enumerate(function.template or ()):
            if template is not None and at < len(template):
                frame.names[name] = template[at]
            elif default is not None:
                frame.names[name] = self.expression(default)(frame)
        if function.launches:
            self._launches.append(
                Launch(name=function.name, arguments=dict(frame.names), where=where)
            )
            return self.fits(True, function.returns)
        if not function.sound:
            raise NotUnderstoodError(f"can't read '{function.name}'", where)
        if len(given) != len(function.parameters):
            raise NotUnderstoodError(f"calls '{function.name}' with other arguments", where)
        for (name, kind, is_reference), value in zip(function.parameters, given, strict=True):
            frame.names[name] = self.fits(value if is_reference else copied(value), kind)
        at = function.body.id
        if at not in self._bodies:
            self._bodies[at] = self.statement(function.body)
        return self._returned(self._bodies[at](frame), function.returns)

    def _returned(self, flow: Flow | None, kind: str) -> Any:
        if flow is None or flow.jump is not Jump.RETURN:
            return None
        self.last = flow
        return self.fits(flow.value, kind)


def _checks(node: Node) -> Iterator[Node]:
    """Calls of checks in a block, those in nested blocks too."""
    called = node.child_by_field_name("function") if node.type == "call_expression" else None
    if called is not None and CHECK.fullmatch(text_of(called)):
        yield node
    for child in node.named_children:
        yield from _checks(child)


def _with_words(node: Node) -> Node:
    """A check together with the words that are streamed into it."""
    while node.parent is not None and node.parent.type == "binary_expression":
        node = node.parent
    return node


def _statement_of(node: Node) -> Node:
    while node.parent is not None and node.type != "expression_statement":
        node = node.parent
    return node
