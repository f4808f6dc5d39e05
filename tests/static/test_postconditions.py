"""Each patch does what it is for; without it, that isn't so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlay.trees.match import Verdict
from tests.static.postconditions import POSTCONDITIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.static.trees import Pair, Trees

_HOLD = (Verdict.APPLIES, Verdict.OFFSET, Verdict.MERGED)


def _faults(name: str, pair: Pair) -> dict[str, str]:
    """Postconditions of a patch that don't hold, and why."""
    found = {one.name: one.fails(pair) for one in POSTCONDITIONS.get(name, ())}
    return {key: why for key, why in found.items() if why is not None}


def _expected_to_fail(name: str, line: str) -> set[str]:
    return {one.name for one in POSTCONDITIONS[name] if line not in one.on_pin}


def test_every_patch_has_postconditions(patch_name: str) -> None:
    assert POSTCONDITIONS.get(patch_name.partition("/")[2]), (
        "a patch without postconditions can be lost without anybody noticing: write them, in "
        "tests/static/of_*.py"
    )


def test_they_hold_on_the_patched_trees(patch_name: str, trees: Trees) -> None:
    name = patch_name.partition("/")[2]
    assert not _faults(name, trees.final())


def test_they_fail_on_the_bare_pins(
    patch_name: str, trees: Trees, record_property: Callable[[str, object], None]
) -> None:
    name = patch_name.partition("/")[2]
    faults = _faults(name, trees.base())
    assert set(faults) == _expected_to_fail(name, trees.line.name)
    for one in POSTCONDITIONS[name]:
        if why := one.on_pin.get(trees.line.name):
            record_property("holds on the bare pin", f"{name}: {one.name}: {why}")


def test_they_fail_when_only_that_patch_is_left_out(
    patch_name: str, trees: Trees, record_property: Callable[[str, object], None]
) -> None:
    """Its own fail, and those of all patches that still apply hold."""
    name = patch_name.partition("/")[2]
    pair, verdicts = trees.without(patch_name)
    assert set(_faults(name, pair)) == _expected_to_fail(name, trees.line.name)
    lost = {other: verdict for other, verdict in verdicts.items() if verdict not in _HOLD}
    others = set(verdicts) - set(lost)
    assert {other: faults for other in others if (faults := _faults(other, pair))} == {}
    gone = ", ".join(f"{other} {verdict}" for other, verdict in lost.items())
    record_property("without a patch", f"{patch_name}: {gone or 'all others apply'}")


@pytest.mark.parametrize("upstream", ["vllm", "flashinfer"])
def test_a_series_that_lost_everything_is_noticed(upstream: str, trees: Trees) -> None:
    """The rebase that lost the changes: no patch's postconditions survive on the bare pin."""
    bare = trees.base()
    for patch in trees.line.series[upstream]:  # type: ignore[index]
        assert _faults(patch.name, bare), patch.name
