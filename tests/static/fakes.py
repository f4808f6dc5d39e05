"""Stand-ins with which functions cut out of a tree run without torch. All of them are fakes.

They know shapes and identity, no numbers: enough to see what a method hands to a kernel and
returns. That the numbers are right is for the cpu and gpu sessions to show.
"""

from __future__ import annotations

import builtins
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.static.source import names_in

if TYPE_CHECKING:
    import ast
    from collections.abc import Callable, Mapping


class Tensor:
    """A tensor's shape, and which tensor its memory is of (``root``)."""

    def __init__(self, *shape: int, root: Tensor | None = None, **given: Any) -> None:
        self.shape = shape
        self.dtype = given.get("dtype", "bfloat16")
        self.device = given.get("device", "cuda:0")
        self.root = root or self

    def __getitem__(self, index: Any) -> Tensor:
        assert isinstance(index, slice), "only the first dimension is ever sliced here"
        rows = len(range(*index.indices(self.shape[0])))
        return Tensor(rows, *self.shape[1:], root=self.root)

    def unsqueeze(self, at: int) -> Tensor:
        return Tensor(*self.shape[:at], 1, *self.shape[at:], root=self.root)

    def squeeze(self, at: int) -> Tensor:
        return Tensor(*self.shape[:at], *self.shape[at + 1 :], root=self.root)

    def view(self, *_: Any) -> Tensor:
        return Tensor(*self.shape, root=self.root)

    def new_empty(self, shape: tuple[int, ...], dtype: str = "bfloat16") -> Tensor:
        return Tensor(*shape, dtype=dtype)

    def numel(self) -> int:
        total = 1
        for one in self.shape:
            total *= one
        return total


class Device:
    """torch.device, as far as a buffer's key needs it."""

    def __init__(self, kind: str | Device, index: int | None = None) -> None:
        if isinstance(kind, Device):
            self.type, self.index = kind.type, kind.index
            return
        self.type, _, number = kind.partition(":")
        self.index = int(number) if number else index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and (self.type, self.index) == (other.type, other.index)

    def __hash__(self) -> int:
        return hash((self.type, self.index))


def torch(**more: Any) -> SimpleNamespace:
    """The module, as far as it is used."""
    return SimpleNamespace(
        Tensor=Tensor,
        device=Device,
        uint8="uint8",
        int8="int8",
        int32="int32",
        float32=SimpleNamespace(itemsize=4),
        bfloat16=SimpleNamespace(itemsize=2),
        accelerator=SimpleNamespace(current_device_index=lambda: 0),
        zeros=lambda *shape, **given: Tensor(*shape, **given),
        cat=lambda parts, dim=0: parts[0],
        **more,
    )


class Calls:
    """Stands in for whatever a function calls, and remembers the calls in order.

    ``results`` says what a name gives back; a fresh tensor otherwise.
    """

    def __init__(self, results: Mapping[str, Any] | None = None) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._results = dict(results or {})

    def stub(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            self.made.append((name, args, given))
            return self._results.get(name, Tensor(1))

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments of the calls to one name."""
        return [(args, given) for made, args, given in self.made if made == name]

    def namespace(self, function: ast.AST, given: Mapping[str, Any]) -> dict[str, Any]:
        """Globals for a function: what is given, and stand-ins for all else that it names.

        Imports inside the function give stand-ins too. A capitalised name becomes an empty class,
        so that ``isinstance`` is False for it.
        """

        def pretend(*_: Any, **__: Any) -> Any:
            return _Module(self)

        found: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": pretend}}
        for name in names_in(function):
            if not hasattr(builtins, name):
                found[name] = type(name, (), {}) if name[0].isupper() else self.stub(name)
        return found | dict(given)


class _Module:
    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return self._calls.stub(name)
