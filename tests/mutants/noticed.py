"""Which checks of the static session notice a defect, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

from tests.static import source
from tests.static.api import Absent, Api, Unresolved, misfit
from tests.static.calls import WRAPPERS, find_calls, lazy_wrappers
from tests.static.postconditions import POSTCONDITIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.mutants.defects import Mutant
    from tests.static.postconditions import Postcondition
    from tests.static.trees import Pair, Trees

PACKAGE = "flashinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """A check that fails under a defect, and how it came to: by code of the tree that it ran, by
    what it read in the tree's text, or by a call that doesn't fit."""

    patch: str
    check: str
    how: Literal["ran", "read", "call"]

    def __str__(self) -> str:
        return f"{self.patch}: {self.check} ({self.how})" if self.patch else self.check


def noticed(mutant: Mutant, trees: Trees) -> list[Noticed]:
    """Checks that fail under a defect, its own patch's first, and those that run code first."""
    patches = [patch.name for series in trees.line.series.values() for patch in series]
    found = [
        one
        for name in patches
        for condition in POSTCONDITIONS.get(name, ())
        if (one := _try(condition, mutant.pair)) is not None
    ]
    found.sort(key=lambda one: (one.patch != mutant.patch, one.how == "read"))
    return found + list(_calls(mutant))


def _try(condition: Postcondition, pair: Pair) -> Noticed | None:
    ran = False

    def counted(*words: Any) -> None:
        nonlocal ran
        ran = True
        exec(*words)  # noqa: S102 - as the module does

    # All code of a tree that a postcondition runs, it runs by way of this module
    with mock.patch.object(source, "exec", counted, create=True):
        why = condition.fails(pair)
    if why is None:
        return None
    how: Literal["ran", "read"] = "ran" if ran else "read"
    return Noticed(patch=condition.patch, check=condition.name, how=how)


def _calls(mutant: Mutant) -> Iterator[Noticed]:
    """Calls into FlashInfer in the files that the defect changes, as test_calls.py holds them."""
    view, api = mutant.pair.vllm, Api(mutant.pair.flashinfer, PACKAGE)
    wrappers = view.module(WRAPPERS.replace(".", "/") + ".py")
    names = lazy_wrappers(wrappers) if wrappers else {}
    for upstream, path in mutant.files:
        module = view.module(path) if upstream == "vllm" and path.endswith(".py") else None
        for call in find_calls(path, module, names, package=PACKAGE) if module else ():
            try:
                fits = not any(misfit(call.node, one) for one in api.signatures(call.target))
            except (Absent, Unresolved):
                fits = False
            if not fits:
                name = call.target.rpartition(".")[2]
                yield Noticed(patch="", check=f"calls into FlashInfer fit: {name}", how="call")
