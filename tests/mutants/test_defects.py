"""Each defect, put back alone, is noticed by a check. A survivor has an exit code of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.mutants.bench import Bench
    from tests.mutants.defects import Defect


def test_without_a_defect_they_pass(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    """The bench has seen to that; what runs under defects runs in the environment told here."""
    for name, version in bench.environment.versions.items():
        record_property("environment", f"{name} {version}")
    assert bench.baseline is None or bench.baseline.outcome == "passed"


def test_defect_is_noticed(
    defect: Defect, bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    result = bench.result(defect)
    if isinstance(result, str):
        record_property(defect.name, f"absent: {result}")
        pytest.skip(f"{defect.name} is absent: {result}")
    for note in result.notes():
        record_property(defect.name, note)
    result.refuse_survivor()
