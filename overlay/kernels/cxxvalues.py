"""Values that dispatch code works on, and the operators that it applies to them.

Integers, booleans and enumerators are Python's integers. What isn't known is ``Opaque``: it may be
passed around and computed with, but nothing may be decided by it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlay.kernels.cxx import NotUnderstoodError

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE_MAX, INT_MAX = 2**64 - 1, 2**31 - 1
BUILTINS = {"SIZE_MAX": SIZE_MAX, "INT_MAX": INT_MAX, "cudaSuccess": 0}


@dataclass(frozen=True, slots=True)
class Opaque:
    """Something whose value isn't known."""

    name: str


class Pointer:
    """A pointer that isn't null; null is None."""


POINTER = Pointer()


@dataclass(slots=True)
class Object:
    """A struct's value."""

    kind: str
    fields: dict[str, Any]

    def copy(self) -> Object:
        """As C++ copies on assignment."""
        return Object(self.kind, {k: copied(v) for k, v in self.fields.items()})


@dataclass(frozen=True, slots=True)
class Braced:
    """``{a, b}`` before it is known what it makes."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type: a struct of the source with its template's arguments, or only a name."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(slots=True)
class Frame:
    """Names in reach; those of an enclosing function, for a lambda, in ``outer``."""

    names: dict[str, Any] = field(default_factory=dict)
    outer: Frame | None = None

    def holder(self, name: str) -> Frame | None:
        """The frame that has the name."""
        frame: Frame | None = self
        while frame is not None and name not in frame.names:
            frame = frame.outer
        return frame


def copied(value: Any) -> Any:
    """A value as an assignment stores it."""
    return value.copy() if isinstance(value, Object) else value


def truth(value: Any, where: str = "") -> bool:
    """What ``if`` makes of a value.

    Raises:
        NotUnderstoodError: that isn't known.
    """
    if isinstance(value, Opaque):
        raise NotUnderstoodError(f"depends on '{value.name}'", where)
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    if isinstance(value, Pointer):
        return True
    raise NotUnderstoodError(f"decides by a {type(value).__name__}", where)


def _divide(left: Any, right: Any) -> Any:
    if isinstance(left, float) or isinstance(right, float):
        return left / right
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - right * int(_divide(left, right))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _divide, "%": _remainder,
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
    "&": operator.and_, "|": operator.or_, "^": operator.xor,
}  # fmt: skip


def apply(sign: str, left: Any, right: Any, where: str) -> Any:
    """A binary operator other than ``&&`` and ``||``.

    Raises:
        NotUnderstoodError: such operands have no meaning here.
    """
    if sign == "<=" and right == SIZE_MAX:
        return True  # of whatever is on the left: no size is larger
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        unknown = left if isinstance(left, Opaque) else right
        return Opaque(unknown.name)
    if sign in ("==", "!="):
        if isinstance(left, (Object, Kind, Braced)) or isinstance(right, (Object, Kind, Braced)):
            raise NotUnderstoodError(f"compares with '{sign}' what isn't a number", where)
        equal = left is right or left == right
        return equal if sign == "==" else not equal
    numbers = (bool, int, float)
    if sign not in _OPERATORS or not (isinstance(left, numbers) and isinstance(right, numbers)):
        raise NotUnderstoodError(f"'{sign}' of what isn't a number", where)
    try:
        return _OPERATORS[sign](left, right)
    except (ArithmeticError, TypeError) as error:
        raise NotUnderstoodError(f"'{sign}': {error}", where) from None
