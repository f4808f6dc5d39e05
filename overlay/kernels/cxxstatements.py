"""Turns C++ statements into Python functions of a frame; a form that isn't known raises."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from overlay.kernels.cxx import NotUnderstoodError, Unit, parameter_of, text_of
from overlay.kernels.cxxexpressions import Expressions, RefusedError
from overlay.kernels.cxxvalues import Frame, Opaque, copied, truth

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tree_sitter import Node

    Statement = Callable[[Frame], "Flow | None"]
_INDIRECT = ("reference_declarator", "pointer_declarator")


class Jump(Enum):
    """How control leaves a statement."""

    RETURN = "return"
    BREAK = "break"
    CONTINUE = "continue"


@dataclass(slots=True)
class Flow:
    """Control that leaves a statement; ``because`` is the test that led there."""

    jump: Jump
    value: Any = None
    where: str = ""
    because: str = ""


class Statements(Expressions):
    """Compiles statements of one unit.

    Attributes:
        steps: statements that may be run still.
        last: the ``return`` that was run last, for what it says of why.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit)
        self.steps = 0
        self.last = Flow(Jump.RETURN)

    def statement(self, node: Node) -> Statement:
        """The meaning of a statement."""
        known = getattr(self, f"_do_{node.type}", None)
        where = self.unit.where(node)
        if known is None:
            return self._stuck(node)
        run: Statement = known(node)

        def counted(frame: Frame) -> Flow | None:
            self.steps -= 1
            if self.steps < 0:
                raise NotUnderstoodError("takes too many steps", where)
            return run(frame)

        return counted

    def _stuck(self, node: Node) -> Statement:
        fail = self.puzzle(f"can't read '{text_of(node)[:60]}'", node)

        def stuck(frame: Frame) -> None:
            fail(frame)

        return stuck

    def _do_compound_statement(self, node: Node) -> Statement:
        steps = self._sequence(node.named_children)
        return lambda frame: steps(Frame({}, frame))

    def _sequence(self, nodes: Sequence[Node]) -> Statement:
        # Asserts and aliases of the compiler's own time have no part in what happens
        skipped = ("comment", "static_assert_declaration")
        steps = [self.statement(node) for node in nodes if node.type not in skipped]

        def run(frame: Frame) -> Flow | None:
            for step in steps:
                flow = step(frame)
                if flow is not None:
                    return flow
            return None

        return run

    def _do_expression_statement(self, node: Node) -> Statement:
        if not node.named_children:
            return lambda _: None
        value = self.expression(node.named_children[0])

        def run(frame: Frame) -> None:
            value(frame)

        return run

    def _do_return_statement(self, node: Node) -> Statement:
        where = self.unit.where(node)
        if not node.named_children:
            return lambda _: Flow(Jump.RETURN, None, where)
        value = self.expression(node.named_children[0])
        is_call = node.named_children[0].type in ("call_expression", "conditional_expression")

        def run(frame: Frame) -> Flow:
            self.last = Flow(Jump.RETURN)
            returned = value(frame)
            # What another function decided is said where it did so
            inner = self.last if is_call and self.last.where else None
            if inner is not None:
                return Flow(Jump.RETURN, returned, inner.where, inner.because)
            return Flow(Jump.RETURN, returned, where)

        return run

    def _do_break_statement(self, _: Node) -> Statement:
        return lambda _: Flow(Jump.BREAK)

    def _do_continue_statement(self, _: Node) -> Statement:
        return lambda _: Flow(Jump.CONTINUE)

    def _do_throw_statement(self, node: Node) -> Statement:
        where, text = self.unit.where(node), text_of(node)

        def run(_: Frame) -> Flow | None:
            raise RefusedError(text, where)

        return run

    def _do_if_statement(self, node: Node) -> Statement:
        parts = [node.child_by_field_name(n) for n in ("condition", "consequence", "alternative")]
        if parts[0] is None or parts[1] is None or node.has_error:
            return self._stuck(node)
        asked, where = text_of(parts[0])[1:-1], self.unit.where(node)
        condition, yes = self.expression(parts[0]), self.statement(parts[1])
        no = self.statement(parts[2].named_children[-1]) if parts[2] is not None else None

        def run(frame: Frame) -> Flow | None:
            if truth(condition(frame), where):
                flow = yes(frame)
                if flow is not None and not flow.because:
                    flow.because = asked
                return flow
            return no(frame) if no is not None else None

        return run

    def _do_switch_statement(self, node: Node) -> Statement:
        condition, body = (node.child_by_field_name(n) for n in ("condition", "body"))
        if condition is None or body is None or node.has_error:
            return self._stuck(node)
        value, where = self.expression(condition), self.unit.where(node)
        asked = text_of(condition)[1:-1].strip()
        cases: list[tuple[Callable[[Frame], Any] | None, Statement]] = []
        for case in body.named_children:
            if case.type == "comment":
                continue
            if case.type != "case_statement":
                return self._stuck(node)
            stated = case.child_by_field_name("value")
            steps = [c for c in case.named_children if stated is None or c.id != stated.id]
            cases.append(
                (self.expression(stated) if stated is not None else None, self._sequence(steps))
            )

        def run(frame: Frame) -> Flow | None:
            asked_of = value(frame)
            if isinstance(asked_of, Opaque) or not isinstance(asked_of, int):
                truth(Opaque(asked), where)
            start = _matching(cases, asked_of, frame)
            for _, steps in cases[start:]:
                flow = steps(frame)
                if flow is not None:
                    if not flow.because and flow.jump is Jump.RETURN:
                        flow.because = f"{asked} is {asked_of}"
                    return None if flow.jump is Jump.BREAK else flow
            return None

        return run

    def _do_do_statement(self, node: Node) -> Statement:
        condition, body = (node.child_by_field_name(n) for n in ("condition", "body"))
        if condition is None or body is None or node.has_error:
            return self._stuck(node)
        return self._loop(self.expression(condition), self.statement(body), None, first=True)

    def _do_while_statement(self, node: Node) -> Statement:
        condition, body = (node.child_by_field_name(n) for n in ("condition", "body"))
        if condition is None or body is None or node.has_error:
            return self._stuck(node)
        return self._loop(self.expression(condition), self.statement(body), None)

    def _do_for_statement(self, node: Node) -> Statement:
        names = ("initializer", "condition", "update", "body")
        before, condition, update, body = (node.child_by_field_name(n) for n in names)
        if before is None or condition is None or body is None or node.has_error:
            return self._stuck(node)
        begin = self.statement(before)
        loop = self._loop(
            self.expression(condition),
            self.statement(body),
            self.expression(update) if update is not None else None,
        )

        def run(frame: Frame) -> Flow | None:
            inner = Frame({}, frame)
            begin(inner)
            return loop(inner)

        return run

    def _loop(
        self, condition: Callable[[Frame], Any], body: Statement,
        update: Callable[[Frame], Any] | None, *, first: bool = False,
    ) -> Statement:  # fmt: skip
        def run(frame: Frame) -> Flow | None:
            skip = first
            while skip or truth(condition(frame)):
                skip = False
                flow = body(frame)
                if flow is not None and flow.jump is Jump.BREAK:
                    return None
                if flow is not None and flow.jump is Jump.RETURN:
                    return flow
                if update is not None:
                    update(frame)
            return None

        return run

    def _do_try_statement(self, node: Node) -> Statement:
        body = node.child_by_field_name("body")
        caught = [c for c in node.named_children if c.type == "catch_clause"]
        handler = caught[0].child_by_field_name("body") if len(caught) == 1 else None
        if body is None or handler is None or node.has_error:
            return self._stuck(node)
        attempt, otherwise = self.statement(body), self.statement(handler)

        def run(frame: Frame) -> Flow | None:
            try:
                return attempt(frame)
            except RefusedError:
                return otherwise(frame)

        return run

    def _do_alias_declaration(self, node: Node) -> Statement:
        name, kind = (node.child_by_field_name(n) for n in ("name", "type"))
        if name is None or kind is None:
            return self._stuck(node)
        alias, made = text_of(name), self.kind(kind)

        def run(frame: Frame) -> None:
            frame.names[alias] = made(frame)

        return run

    def _do_declaration(self, node: Node) -> Statement:
        kind = node.child_by_field_name("type")
        if kind is None or node.has_error or "static" in text_of(node).split():
            return self._stuck(node)
        written = text_of(kind)
        steps = [self._declare(d, written) for d in node.children_by_field_name("declarator")]

        def run(frame: Frame) -> None:
            for step in steps:
                step(frame)

        return run

    def _declare(self, node: Node, kind: str) -> Callable[[Frame], None]:
        value = node.child_by_field_name("value")
        declared = node.child_by_field_name("declarator") if value is not None else node
        is_reference = declared is not None and declared.type == "reference_declarator"
        while declared is not None and declared.type in (
            "reference_declarator",
            "pointer_declarator",
        ):
            declared = declared.named_children[-1]
        if declared is None or declared.type != "identifier":
            fail = self.puzzle(f"can't read '{text_of(node)}'", node)
            return lambda frame: fail(frame)
        name = text_of(declared)
        initial = self.expression(value) if value is not None else None
        is_list = kind.split("<")[0].endswith("Array")

        def declare(frame: Frame) -> None:
            if initial is None:
                frame.names[name] = [] if is_list else Opaque(name)
                return
            made = initial(frame)
            frame.names[name] = self.fits(made if is_reference else copied(made), kind)

        return declare

    def _lambda_expression(self, node: Node) -> Callable[[Frame], Any]:
        declarator, body = (node.child_by_field_name(n) for n in ("declarator", "body"))
        if body is None:
            return self.puzzle(f"can't read '{text_of(node)[:60]}'", node)
        listed = declarator.child_by_field_name("parameters") if declarator is not None else None
        names = [parameter_of(p)[0] for p in (listed.named_children if listed else ())]
        steps, where = self.statement(body), self.unit.where(node)

        def close(frame: Frame) -> Any:
            def called(given: Sequence[Any]) -> Any:
                if len(given) != len(names):
                    raise NotUnderstoodError("a lambda gets other arguments", where)
                flow = steps(Frame(dict(zip(names, given, strict=True)), frame))
                return flow.value if flow is not None and flow.jump is Jump.RETURN else None

            return called

        return close


def _matching(
    cases: Sequence[tuple[Callable[[Frame], Any] | None, Statement]], value: int, frame: Frame
) -> int:
    """The case that is jumped to; behind the last where there is none."""
    default = len(cases)
    for at, (stated, _) in enumerate(cases):
        if stated is None:
            default = at
            continue
        known = stated(frame)
        if not isinstance(known, int):
            raise NotUnderstoodError("a case isn't a number")
        if known == value:
            return at
    return default
