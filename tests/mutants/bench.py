"""Tries defects one by one: which static check notices, and which test of the patched tree."""

from __future__ import annotations

import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from overlay.errors import CheckError
from tests.mutants.defects import Mutant, make_mutant
from tests.mutants.noticed import Noticed, noticed
from tests.mutants.runs import TESTS, Run, Warm, WarmEndedError, limit_for, run_tests
from tests.mutants.shadow import Environment, installed_files, make_shadow

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from tests.mutants.defects import Defect
    from tests.static.trees import Trees

UNTOUCHED = "vllm/v1/attention/backends/mla/flashinfer_mla_sparse_sm120.py"


class Survivor(AssertionError):
    """A defect that no check notices, or that tests on a CPU don't and nobody said why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one defect; ``cpu`` is None where tests on a CPU can't see it."""

    mutant: Mutant
    static: Sequence[Noticed]
    cpu: Run | None

    @property
    def cpu_killer(self) -> str:
        """The test that noticed, or nothing."""
        if self.cpu is None or self.cpu.outcome == "passed":
            return ""
        return self.cpu.killer or f"hangs, ended after {self.cpu.seconds:.0f} s"

    def notes(self) -> list[str]:
        """For the receipt, from which the table in the docs is made."""
        more = f", {len(self.static) - 1} more" if len(self.static) > 1 else ""
        found = [f"static: {self.static[0]}{more}" if self.static else "static: nothing"]
        found.append(f"cpu: {self.cpu_killer or 'nothing'}")
        if self.mutant.also:
            found.append(f"also: {self.mutant.also}")
        return found

    def refuse_survivor(self) -> None:
        """Raise ``Survivor`` unless it was noticed as it should be."""
        one = self.mutant
        if not self.static and not self.cpu_killer:
            raise Survivor(f"{one.name} survives, no check notices: {one.what}")
        if not self.cpu_killer and not one.unseen:
            raise Survivor(
                f"{one.name} survives on a CPU, where the whole of {TESTS} passes: {one.what}. "
                "Write the test, or say under 'unseen' why there can be none"
            )


@dataclass(slots=True, kw_only=True)
class Bench:
    """Runs CPU tests of defects by a pool, and static checks where it is asked for a result.

    Attributes:
        environment: with the line's wheels.
        root: of the repository.
        trees: of the line.
        pool: for runs of CPU tests.
        scratch: an empty folder.
        warm: processes of the environment to start runs by; without one a run takes longer.
    """

    environment: Environment
    root: Path
    trees: Trees
    pool: Executor
    scratch: Path
    warm: Sequence[Warm] = ()
    baseline: Run | None = None
    _made: dict[str, Mutant | str | CheckError] = field(default_factory=dict)
    _runs: dict[str, Future[Run]] = field(default_factory=dict)
    _whole: Run | None = None
    _idle: SimpleQueue[Warm] = field(default_factory=SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, defects: Sequence[Defect]) -> None:
        """Start on defects, after the tests that should notice them pass without any.

        Raises ``CheckError`` when they don't.
        """
        for one_warm in self.warm:
            self._idle.put(one_warm)
        for defect in defects:  # here: the store is read by one thread alone
            try:
                self._made[defect.name] = make_mutant(defect, self.trees)
            except CheckError as error:
                self._made[defect.name] = error
        ours = [one for one in self._made.values() if isinstance(one, Mutant) and not one.unseen]
        first = dict.fromkeys(test for one in ours for test in one.tests)
        if first:
            self.baseline = self._without_defect(tuple(first))
        for one in ours:
            self._runs[one.name] = self.pool.submit(self._try, one)

    def result(self, defect: Defect) -> Result | str:
        """What became of a defect, or why it is absent on the line. Raises ``CheckError``."""
        made = self._made[defect.name]
        if isinstance(made, CheckError):
            raise made
        if isinstance(made, str):
            return made
        run = self._runs.get(made.name)
        return Result(
            mutant=made,
            static=noticed(made, self.trees),
            cpu=run.result() if run else None,
        )

    def _try(self, one: Mutant) -> Run:
        """The tests that should notice, and if they don't, all."""
        files = installed_files(one.files)
        if one.tests and self.baseline is not None:
            run = self._run(one.name, one.tests, files, limit_for(one.tests, self.baseline))
            if run.outcome != "passed":
                return run
        with self._lock:
            if self._whole is None:
                self._whole = self._without_defect(())
        return self._run(one.name, (), files, limit_for((), self._whole))

    def _without_defect(self, tests: tuple[str, ...]) -> Run:
        """The tests with a file replaced by itself: a kill must be the defect's own."""
        files = {UNTOUCHED: (self.environment.site / UNTOUCHED).read_bytes()}
        run = self._run("no defect", tests, files, None)
        if run.outcome != "passed":
            raise CheckError(
                f"tests fail without any defect: {run.killer or run.outcome}",
                why="\n".join(run.output.splitlines()[-30:]),
                fix=f"make 'nox -s cpu -- {self.trees.line.name}' pass first",
            )
        return run

    def _run(
        self,
        name: str,
        tests: tuple[str, ...],
        files: Mapping[str, bytes | None],
        limit_s: float | None,
    ) -> Run:
        """Run tests with these files in place of the installed ones."""
        ids = tuple(f"{TESTS}/{test}" for test in tests) or (TESTS,)
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder, self._borrowed() as warm:
            shadow = Path(folder, "site")
            make_shadow(self.environment.site, shadow, files)
            given: dict[str, Any] = {"root": self.root, "shadow": shadow, "limit_s": limit_s}
            python = self.environment.python
            try:
                served = warm if warm and warm.serves(files) else None
                run = run_tests(python, ids, **given, warm=served)
            except WarmEndedError:  # what it began says nothing
                run = run_tests(python, ids, **given)
        if run.outcome == "broken":
            raise CheckError(
                f"tests can't be run under {name}", why="\n".join(run.output.splitlines()[-30:])
            )
        return run

    @contextmanager
    def _borrowed(self) -> Iterator[Warm | None]:
        """One of the processes that start runs, for one run."""
        if not self.warm:
            yield None
            return
        one = self._idle.get()
        try:
            yield one
        finally:
            self._idle.put(one)
