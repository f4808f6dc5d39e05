"""A move that is killed at any moment, with SIGKILL, and run again: nothing lost, nothing half."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.lines.line import read_line
from overlay.moving.tombstones import read as tombstones
from tests.support.moves import KILLER, Work, add_series, files_of, make_later

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]

ROOT = Path(__file__).parents[1]


def killed(last: int, when: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        (sys.executable, "-c", KILLER, str(last), when, *arguments),
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def ready(tiny: Tiny, run: Run) -> Tiny:
    """A move of which one conflict waits, resolved in its folder."""
    add_series(tiny)
    assert run("lock", "tiny").code == 0
    make_later(tiny)
    assert run("move", "tiny", "vllm", "later").code == 15
    assert run("move", "--resolve", "first").code == 0
    Work(path=tiny.root / "work" / "tiny-first").resolve()
    return tiny


@pytest.mark.slow
def test_killed_anywhere_in_the_end_and_run_again(ready: Tiny, run: Run, tmp_path: Path) -> None:
    """Every step of ``--continue``: taking the resolution, and writing the line."""
    start = tmp_path / "start"
    shutil.copytree(ready.patches, start)
    old = files_of(ready.folder)
    assert run("move", "--continue").code == 0
    wanted = files_of(ready.patches)
    shutil.rmtree(ready.patches)
    shutil.copytree(start, ready.patches)
    # With the cache as it will be from now on
    code, out = killed(0, "after", "--patches", str(ready.patches), "move", "--continue")
    assert code == 0
    steps = int(out.split()[-1])
    # The line is put in place by the last ones
    chosen = [*range(1, steps - 16, 7), *range(steps - 16, steps + 1)]
    whole = 0
    for step in chosen:
        shutil.rmtree(ready.patches)
        shutil.copytree(start, ready.patches)
        when = "after" if step % 2 else "before"
        code, _ = killed(step, when, "--patches", str(ready.patches), "move", "--continue")
        assert code == -signal.SIGKILL, step
        there = ready.folder / "line.toml"
        if there.exists():  # whole: the old one or the new one
            made = {n: d for n, d in files_of(ready.folder).items() if not n.startswith("move/")}
            before = {n: d for n, d in old.items() if not n.startswith("move/")}
            after = {n.removeprefix("tiny/"): d for n, d in wanted.items() if n.startswith("tiny/")}
            assert made in (before, after), step
            whole += 1
        again = run("move", "--continue")
        assert again.code == 0 or "no move is under way" in again.err, (step, again.err)
        assert files_of(ready.patches) == wanted, step
    assert whole >= len(chosen) - 2


def test_killed_while_it_begins(tiny: Tiny, run: Run) -> None:
    make_later(tiny)
    old = files_of(tiny.folder)
    for step in range(1, 12):
        code, _ = killed(
            step, "before", "--patches", str(tiny.patches), "move", "tiny", "vllm", "later"
        )
        now = files_of(tiny.folder)
        assert {name: data for name, data in now.items() if not name.startswith("move/")} == old
        ran = run("move", "tiny", "vllm", "later", "--json")
        assert ran.code == 15
        assert run("move", "--abort").code == 0
        assert files_of(tiny.folder) == old
        if code != -signal.SIGKILL:
            break
    assert step > 3


def test_a_line_that_was_away_comes_back(ready: Tiny, run: Run) -> None:
    """The one moment in which a name has no folder."""
    stage = ready.patches / ".move"
    (stage / "new").mkdir(parents=True)
    (stage / "old").mkdir()
    ready.folder.rename(stage / "old" / "tiny")
    assert run("apply", "tiny").code == 3
    ran = run("move", "--status")
    assert "tiny: the move was done" in ran.err
    assert read_line(ready.patches, "tiny").name == "tiny"
    assert run("move", "--continue").code == 0
    assert tombstones(ready.patches)
