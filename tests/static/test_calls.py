"""Calls that patched vLLM makes into FlashInfer fit FlashInfer's signatures.

All of vLLM's files that name FlashInfer are read, not those alone that a patch touches: a line may
pair vLLM with another FlashInfer than the one that it was released with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.static.api import Absent, Api, Unresolved, misfit
from tests.static.calls import WRAPPERS, find_calls, lazy_wrappers

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.static.calls import Call
    from tests.static.trees import Trees, View

PACKAGE = "flashinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Calls by what came of holding them against the signatures."""

    fit: list[Call]
    faults: list[str]
    unresolved: list[tuple[Call, str]]


@pytest.fixture(scope="module")
def calls(trees: Trees) -> list[Call]:
    """All calls of patched vLLM into FlashInfer."""
    one, view = trees.patched["vllm"], trees.final().vllm
    argv = ("grep", "-l", "-z", "-F", "-e", PACKAGE, one.tree.tree, "--", "vllm/*.py")
    named = one.store.git.run(*argv).decode().split("\0")[:-1]
    wrappers = view.module(WRAPPERS.replace(".", "/") + ".py")
    assert wrappers is not None
    names = lazy_wrappers(wrappers)
    found = []
    for path in (name.partition(":")[2] for name in named):
        module = view.module(path)
        assert module is not None
        found += find_calls(path, module, names, package=PACKAGE)
    return found


def _hold(calls: list[Call], view: View) -> Held:
    api = Api(view, PACKAGE)
    held = Held(fit=[], faults=[], unresolved=[])
    for call in calls:
        try:
            signatures = api.signatures(call.target)
        except Unresolved as error:
            held.unresolved.append((call, str(error)))
            continue
        except Absent as error:
            held.faults.append(f"{call}: {error}")
            continue
        faults = [f"{call}: {why}" for one in signatures if (why := misfit(call.node, one))]
        held.faults.extend(faults)
        if not faults:
            held.fit.append(call)
    return held


@pytest.fixture(scope="module", params=["pinned", "patched"])
def held(request: pytest.FixtureRequest, calls: list[Call], trees: Trees) -> Held:
    pair = trees.base() if request.param == "pinned" else trees.final()
    return _hold(calls, pair.flashinfer)


def test_they_fit(held: Held, record_property: Callable[[str, object], None]) -> None:
    assert held.faults == []
    files = len({call.path for call in held.fit})
    record_property("calls into FlashInfer", f"{len(held.fit)} fit, in {files} files")


def test_every_call_of_a_touched_file_is_held(held: Held, trees: Trees) -> None:
    """Where a patch works nothing may go unchecked, and something must be checked."""
    touched = trees.touched("vllm")
    assert [f"{call}: {why}" for call, why in held.unresolved if call.path in touched] == []
    assert {call.path for call in held.fit} & touched


def test_calls_that_cannot_be_followed(held: Held) -> None:
    """Skipped, by name: nothing is known of them."""
    if held.unresolved:
        pytest.skip("; ".join(sorted(f"{call}: {why}" for call, why in held.unresolved)))
