"""Which torch an environment for CPU checks gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from packaging.tags import sys_tags

from tests.support.installers import cpu_torch

if TYPE_CHECKING:
    from pathlib import Path

TAG = str(next(iter(sys_tags())))


@pytest.mark.parametrize(
    ("files", "torch"),
    [
        ((), "2.14.0"),
        ((f"torch-2.14.0+cpu-{TAG}.whl", f"torch-2.15.0+cpu-{TAG}.whl"), "2.14.0"),
        ((f"torch-2.9.0+cpu-{TAG}.whl", f"torch-2.13.0+cpu-{TAG}.whl"), "2.13.0+cpu"),
        ((f"torch-2.13.0+cu130-{TAG}.whl", f"torch-2.13.0-{TAG}.whl"), "2.14.0"),
        (("torch-2.13.0+cpu-cp27-cp27m-win32.whl",), "2.14.0"),
    ],
    ids=["none", "the line's", "the newest at hand", "no CPU build", "for another machine"],
)
def test_the_lines_torch_or_the_cpu_build_at_hand(
    files: tuple[str, ...], torch: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert cpu_torch("2.14.0", [str(tmp_path / "absent"), str(tmp_path)]) == torch
