"""Runs of tests/patched in an environment under a defect, and what came of each."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HERE = Path(__file__).parent
TESTS = "tests/patched"
# Most of what a run takes, and the most that can be had without the code that defects are of
PRELOADED = ("torch", "flashinfer", "vllm.config")
# A run counts as hung that takes so many times what it takes without a defect, and so much more
_GRACE_S = 60.0
_TIMES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came of one run.

    Attributes:
        outcome: ``passed``; ``failed`` for a test that failed, or could not be collected; ``hung``
            past the limit; ``broken`` when pytest itself could not do it.
        killer: node id of the first test that failed, below tests/patched.
        seconds: of the whole process.
        durations: seconds by test file.
        output: of pytest.
    """

    outcome: Literal["passed", "failed", "hung", "broken"]
    seconds: float
    killer: str = ""
    durations: Mapping[str, float] = field(default_factory=dict)
    output: str = field(default="", repr=False)


def run_tests(
    python: Path,
    tests: Sequence[str],
    *,
    root: Path,
    shadow: Path | None,
    limit_s: float | None = None,
    warm: Warm | None = None,
) -> Run:
    """Run tests by ``python`` up to the first failure.

    Args:
        python: interpreter of the environment.
        tests: node ids below ``root``.
        root: of the repository; the process' folder.
        shadow: packages that go before the installed ones.
        limit_s: after which the run, with all its ranks, is ended; None for no limit.
        warm: forks the run, in place of a process of its own; of the same interpreter.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-mutant-") as scratch:
        report, log = Path(scratch, "report.xml"), Path(scratch, "log")
        argv = (
            "-p", "quick_ranks", "-p", "no:cacheprovider", "-x", "-q",
            "-o", "junit_family=xunit1", f"--junitxml={report}", *tests,
        )  # fmt: skip
        started = time.monotonic()
        if warm is None:
            env = _environment(shadow) | {"TMPDIR": scratch}
            code = _fresh((str(python), "-m", "pytest", *argv), root, env, log, limit_s)
        else:
            code = warm.run(argv, root=root, shadow=shadow, log=log, limit_s=limit_s)
        seconds = time.monotonic() - started
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        killer, durations = _read(report) if report.exists() else ("", {})
    if code is None:
        return Run(outcome="hung", seconds=seconds, output=output)
    if code == 0 and durations:
        return Run(outcome="passed", seconds=seconds, durations=durations, output=output)
    if code in (1, 2) and killer:  # 2: a test module can't be imported
        return Run(outcome="failed", seconds=seconds, killer=killer, output=output)
    return Run(outcome="broken", seconds=seconds, output=output)


def _fresh(
    argv: Sequence[str], root: Path, env: Mapping[str, str], log: Path, limit_s: float | None
) -> int | None:
    """Exit code of a process of its own, None where it was ended."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process.pid)
            process.wait()


class WarmEndedError(Exception):
    """The process that starts runs has ended, as of its own accord: say, for want of memory."""


class Warm:
    """A process of the environment that has imported ``modules``, to start one run at a time."""

    def __init__(self, python: Path, root: Path, modules: Sequence[str] = PRELOADED) -> None:
        argv = (str(python), str(HERE / "in_venv" / "warm.py"), str(root / TESTS), *modules)
        self._process = subprocess.Popen(
            argv, cwd=root, env=_environment(None), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True,
        )  # fmt: skip
        self._loaded: frozenset[str] | None = None

    def serves(self, files: Iterable[str]) -> bool:
        """Whether nothing of these files, by their path in the environment, is imported yet."""
        if self._loaded is None:  # not before it is asked for: several import at once
            self._loaded = frozenset(self._answer()["loaded"])
        named = {name.removesuffix(".py").removesuffix("/__init__") for name in files}
        return all(n.startswith("vllm/") for n in named) and self._loaded.isdisjoint(
            name.replace("/", ".") for name in named
        )

    def run(
        self,
        argv: Sequence[str],
        *,
        root: Path,
        shadow: Path | None,
        log: Path,
        limit_s: float | None,
    ) -> int | None:
        """Exit code of pytest with these words, None where it was ended."""
        request = {
            "argv": argv, "root": str(root), "log": str(log),
            "shadow": str(shadow) if shadow else "", "env": {"TMPDIR": str(log.parent)},
        }  # fmt: skip
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            raise WarmEndedError("before a run") from None
        leader = self._answer()["pid"]
        try:
            assert self._process.stdout is not None
            in_time, _, _ = select.select([self._process.stdout], [], [], limit_s)
        finally:
            _end_group(leader)  # or the ranks that are left of it
        code = self._answer()["code"]
        return int(code) if in_time else None

    def close(self) -> None:
        """End it."""
        _end_group(self._process.pid)
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WarmEndedError(f"exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def limit_for(tests: Sequence[str], baseline: Run) -> float:
    """Seconds after which a run of some tests counts as hung: far more than they take."""
    files = {test.partition("::")[0].rpartition("/")[2] for test in tests}
    own = sum(baseline.durations.values())
    mine = sum(s for name, s in baseline.durations.items() if name in files) or own
    return _GRACE_S + _TIMES * (baseline.seconds - own + mine)


def _environment(shadow: Path | None) -> dict[str, str]:
    first = (str(HERE / "in_venv"), *((str(shadow),) if shadow else ()))
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(first),
        "OVERLAY_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        # As tests/patched/conftest.py has them, before it is read
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HUMMING_DISABLE_PARALLEL_BUILD": "1",
    }
    for name in ("OVERLAY_RECEIPT", "PYTEST_ADDOPTS"):
        env.pop(name, None)
    return env


def _end_group(leader: int) -> None:
    """End what is left of a run, which has a session of its own: pytest and its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read(report: Path) -> tuple[str, dict[str, float]]:
    """The first test that failed, and seconds by file, of pytest's XML."""
    killer, durations = "", dict[str, float]()
    for case in ET.parse(report).getroot().iter("testcase"):  # noqa: S314 - pytest wrote it
        file = Path(case.get("file") or f"{case.get('classname', '')}.py").name
        durations[file] = durations.get(file, 0.0) + float(case.get("time", 0))
        if not killer and any(case.find(kind) is not None for kind in ("failure", "error")):
            name = case.get("name", "")
            killer = f"{file}::{name}" if case.get("classname") else file
    return killer, durations
