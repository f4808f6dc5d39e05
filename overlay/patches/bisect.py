"""Find the first patch of a series with which a command fails, by halving as ``git bisect`` does.

One checkout serves all states: it is switched, and cleaned, so that the command meets in it what
a fresh checkout of the state would hold. Exit codes mean what they mean to ``git bisect run``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import BisectError, GitError, LineError
from overlay.patches.checkout import BASE_TAG, checkout, git_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlay.lines.line import Line, Upstream
    from overlay.report import Reporter
    from overlay.trees.apply import Patched

SKIP, ABORT = 125, 128
# Of a git that called us: the command's git must find the checkout
_GIT_PLACES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")


class Result(StrEnum):
    """What the command says of one state."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"


class End(StrEnum):
    """How a bisection ended."""

    FOUND = "found"
    OPEN = "open"  # skipped states lie between: one of several patches
    GOOD_FAILS = "good fails"  # already where it should not; on the bare pin, say
    BAD_PASSES = "bad passes"  # not even where it should
    UNJUDGED = "unjudged"  # the command skips one of the two ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One run of the command. ``state`` is the patch after which it is, or ``overlay-base``."""

    state: str
    result: Result
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisected:
    """What a bisection found.

    Attributes:
        end: how it ended.
        suspects: the patch, if found; the patches that it is one of, if open; else none.
        tried: every run, in order.
    """

    end: End
    suspects: tuple[str, ...]
    tried: tuple[Tried, ...]


def bisect(
    line: Line,
    upstream: Upstream,
    patched: Patched,
    command: Sequence[str],
    report: Reporter,
    *,
    good: str | None = None,
    bad: str | None = None,
    offline: bool = False,
) -> Bisected:
    """Run ``command`` in states of one series until it is known which patch makes it fail.

    Args:
        line, upstream: whose series.
        patched: that series, applied; patches after ``bad`` may have bad verdicts.
        command: argv. Runs in the checkout, told by ``VLLM_OVERLAY_LINE``, ``…_UPSTREAM``,
            ``…_PATCH`` and ``…_FOLDER``; its output goes to standard error.
        report: for progress.
        good: last patch that is taken to pass (default: the bare pin).
        bad: first patch that is known to fail (default: the last one).
        offline: don't fetch what the store lacks.

    Raises:
        LineError: no such patch, no patch between, or an empty series.
        ApplyError: a patch up to ``bad`` is bad.
        BisectError: the command can't be run, or ended by a signal or a code from 128 on.
    """
    names = [BASE_TAG, *(patch.name for patch in line.series[upstream])]
    low = _index(line, upstream, names, good, default=0)
    high = _index(line, upstream, names, bad, default=len(names) - 1)
    if low >= high:
        raise LineError(
            f"no patch of {line.name} {upstream} lies after {names[low]} and up to {names[high]}",
            fix="--good must name an earlier patch than --bad",
        )
    commits = [patched.base.commit.commit, *(patch.commit for patch in patched.tree.patches)]
    program = _program(command)
    tried: list[Tried] = []
    with tempfile.TemporaryDirectory(
        prefix="vllm-overlay-bisect-", ignore_cleanup_errors=True
    ) as scratch:
        folder = Path(scratch).resolve() / line.name
        checkout(
            patched.store, patched.tree, line, upstream, folder, report,
            at=names[high], url=patched.base.url, offline=offline,
        )  # fmt: skip

        def judge(at: int) -> Result:
            _switch(patched, folder, commits[at])
            known = {"LINE": line.name, "UPSTREAM": upstream, "PATCH": names[at]}
            code = _run(program, folder, {**known, "FOLDER": str(folder)})
            result = _result(code, names[at])
            tried.append(Tried(state=names[at], result=result, exit_code=code))
            report.say(f"{names[at]}: {result} (exit code {code})")
            return result

        end, suspects = search(low, high, judge)
    return Bisected(end=end, suspects=tuple(names[at] for at in suspects), tried=tuple(tried))


def search(low: int, high: int, judge: Callable[[int], Result]) -> tuple[End, range]:
    """Halve between ``low``, which should be good, and ``high``, which should be bad.

    Both are judged first. The range holds what the first bad one is among.
    """
    nothing = range(0)
    for at, wrong, end in ((low, Result.BAD, End.GOOD_FAILS), (high, Result.GOOD, End.BAD_PASSES)):
        result = judge(at)
        if result is not (Result.GOOD if at == low else Result.BAD):
            return (end if result is wrong else End.UNJUDGED), nothing
    skipped: set[int] = set()
    while left := [at for at in range(low + 1, high) if at not in skipped]:
        at = min(left, key=lambda at: abs(2 * at - low - high))
        result = judge(at)
        if result is Result.SKIPPED:
            skipped.add(at)
        elif result is Result.BAD:
            high = at
        else:
            low = at
    return (End.FOUND if high - low == 1 else End.OPEN), range(low + 1, high + 1)


def _index(
    line: Line, upstream: Upstream, names: Sequence[str], name: str | None, *, default: int
) -> int:
    if name is None:
        return default
    if name == BASE_TAG:
        return 0
    of, patch = line.patch(name)
    if of != upstream:
        raise LineError(f"{name} is no patch of {line.name}'s {upstream} series")
    return names.index(patch.name)


def _program(command: Sequence[str]) -> list[str]:
    """The command with its program found from here, since it runs elsewhere."""
    program = Path(command[0])
    if os.sep in command[0] and program.exists():
        return [str(program.absolute()), *command[1:]]
    return list(command)


def _switch(patched: Patched, folder: Path, commit: str) -> None:
    """Make the checkout what one of this commit would be, whatever was done in it."""
    env = {"GIT_DIR": str(git_folders(folder)[0]), "GIT_WORK_TREE": str(folder)}
    run = patched.store.git.run
    try:
        # Leftovers too: a .pyc of the state before can pass for one of this state
        run("clean", "-ffdxq", env=env)
        run("-c", "checkout.workers=0", "read-tree", "--reset", "-u", commit, env=env)
        run("update-ref", "--no-deref", "HEAD", commit, env=env)
    except GitError as error:
        raise BisectError(
            f"the command left {folder} so that git can't switch it",
            why=error.why,
            fix="let it leave the git folder and its locks alone",
        ) from None


def _run(command: Sequence[str], folder: Path, known: Mapping[str, str]) -> int:
    clean = {key: value for key, value in os.environ.items() if key not in _GIT_PLACES}
    env = clean | {f"VLLM_OVERLAY_{key}": value for key, value in known.items()}
    try:
        return subprocess.run(
            command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(),
            check=False,
        ).returncode  # fmt: skip
    except (OSError, ValueError) as error:
        raise BisectError(
            f"can't run {command[0]!r}: {error}",
            fix="name a program on the PATH, or one by its path from here",
        ) from None


def _result(code: int, state: str) -> Result:
    if code < 0 or code >= ABORT:
        raise BisectError(
            f"the command ended with {f'signal {-code}' if code < 0 else f'exit code {code}'} "
            f"at {state}",
            why="neither passed nor failed",
            fix=f"let it end with 1 to {SKIP - 1} where it fails, and {SKIP} where it can't tell",
        )
    if code == SKIP:
        return Result.SKIPPED
    return Result.BAD if code else Result.GOOD
