"""The sessions that check patched trees: what each runs, whether it has to, and running it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from overlay.checks.receipt import FOLDER, Receipt, Standing, hash_inputs, judge, read_receipts
from overlay.checks.receipt_plugin import HEAD_VARIABLE
from overlay.errors import CheckError, LockError, SurvivorError
from overlay.lines.line import LINE_FILE, PROJECTS, UPSTREAMS, Line, Upstream
from overlay.lines.lock import read_lock
from overlay.lines.record import digest, make_record
from overlay.trees.apply import Applied, Patched, PatchedTree
from overlay.trees.match import Verdict
from overlay.trees.store import Commit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


# The line that tests look at; test_install.py has its own name for it
LINE_VARIABLES = ("OVERLAY_LINE", "OVERLAY_INSTALL_LINE")
# The interpreter of an environment with the line's wheels, for tests that start others in it
PATCHED_PYTHON_VARIABLE = "OVERLAY_PATCHED_PYTHON"
# pytest's exit code, by tests/mutants, for a defect that no check notices
SURVIVOR_CODE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One check.

    Attributes:
        name: of the nox session and of its receipts.
        tests: what pytest is given, below the repository's root.
        inputs: more files and folders that decide what the tests do.
        options: for pytest, always.
        device: that tests/patched runs on; it reads ``OVERLAY_DEVICE``.
        starts_others: whether the interpreter that is given is not to run the tests but for them
            to run others by, which they can't do without.
    """

    name: str
    tests: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    device: Literal["cpu", "cuda"] = "cpu"
    starts_others: bool = False


SESSIONS = {
    session.name: session
    for session in (
        Session(name="static", tests=("tests/static",)),
        Session(name="cpu", tests=("tests/patched",)),
        Session(name="gpu", tests=("tests/patched",), device="cuda"),
        Session(
            name="install",
            tests=("tests/test_install.py",),
            inputs=("tests/install", "tests/support/installers.py"),
            options=("--log-cli-level=INFO",),  # it takes minutes
        ),
        Session(
            name="kernels",
            tests=("tests/kernels",),
            inputs=(
                "overlay/kernels/aot.py",
                "overlay/kernels/compile.py",
                "overlay/kernels/generator.py",
                "overlay/kernels/shipped.py",
                "overlay/kernels/toolchain.py",
                "tests/support/installers.py",
            ),
            options=("--log-cli-level=INFO",),  # it takes minutes
        ),
        Session(
            name="mutants",
            tests=("tests/mutants",),
            inputs=("tests/static", "tests/patched"),
            options=("--verbosity=1",),  # it takes minutes
            starts_others=True,
        ),
    )
}


def find_session(name: str) -> Session:
    """The session of that name, or ``CheckError``."""
    if name not in SESSIONS:
        raise CheckError(f"there is no check {name!r}", fix=f"known: {', '.join(SESSIONS)}")
    return SESSIONS[name]


def root_of(line: Line) -> Path:
    """The folder above ``patches``."""
    return line.folder.absolute().parent.parent


def session_inputs(line: Line, session: Session) -> str:
    """Hash of what decides what a session does, beside the patched trees.

    ``line.toml`` is part of it: the Python versions that a line supports are not in its digest.
    """
    root = root_of(line)
    own = (line.folder.absolute() / LINE_FILE).relative_to(root).as_posix()
    return hash_inputs(root, (*session.tests, *session.inputs, own))


def locked_digest(line: Line) -> str:
    """The digest that the line's files name, by text alone.

    Raises ``LockError`` when series or pins are not those of the lock: which state they give
    can't be said without applying them.
    """
    lock = read_lock(line)
    if lock is None:
        raise LockError(f"line {line.name} has no lock", fix=f"run 'vllm-overlay lock {line.name}'")
    for upstream in UPSTREAMS:
        series = [(patch.name, patch.sha256) for patch in line.series[upstream]]
        if series != [(patch.name, patch.sha256) for patch in lock.upstream(upstream).patches]:
            raise LockError(
                f"the {upstream} series of {line.name} changed since it was locked",
                fix=f"run 'vllm-overlay lock {line.name}'",
            )
    trees = {
        upstream: PatchedTree(
            base=Commit(commit="", tree=""),
            patches=tuple(
                Applied(
                    name=patch.name, verdict=Verdict.APPLIES, commit="", tree="",
                    effects=patch.files,
                )
                for patch in lock.upstream(upstream).patches
            ),
        )
        for upstream in UPSTREAMS
    }  # fmt: skip
    if digest(make_record(line, trees)) != lock.digest:
        raise LockError(
            f"the pins of {line.name} changed since it was locked",
            fix=f"run 'vllm-overlay lock {line.name}'",
        )
    return lock.digest


def standings(line: Line, session: Session, digest: str) -> list[Standing | CheckError]:
    """What each receipt of a session counts for; an unreadable file as its error."""
    inputs = session_inputs(line, session)
    found: list[Standing | CheckError] = []
    for receipt in read_receipts(root_of(line), line.name):
        if isinstance(receipt, CheckError):
            if f"/{session.name}-" in receipt.what:
                found.append(receipt)
        elif receipt.session == session.name:
            found.append(judge(receipt, digest=digest, inputs=inputs))
    return found


def settled(line: Line, session: Session, digest: str) -> Receipt | None:
    """A receipt for which the session needn't run again."""
    for one in standings(line, session, digest):
        if isinstance(one, Standing) and one.settled:
            return one.receipt
    return None


def receipt_head(
    line: Line,
    session: Session,
    patched: Mapping[Upstream, Patched],
    *,
    digest: str,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """What the plugin is told: the receipt's head, and where and for which tests to write it."""
    return {
        "line": line.name,
        "digest": digest,
        "trees": {
            upstream: {"base": one.tree.base.tree, "patched": one.tree.tree}
            for upstream, one in patched.items()
        },
        "session": session.name,
        "inputs": session_inputs(line, session),
        "command": " ".join(("nox -s", session.name, "--", line.name, *words)),
        # For the plugin alone
        "folder": str(root_of(line) / FOLDER / line.name),
        "tests": session.tests,
    }


def run_session(
    line: Line,
    session: Session,
    patched: Mapping[Upstream, Patched],
    *,
    digest: str,
    python: Path | None = None,
    words: Sequence[str] = (),
) -> None:
    """Run a session's tests, which leaves a receipt.

    Raises ``CheckError`` when they fail, ``SurvivorError`` when a defect went unnoticed.

    Args:
        line: in agreement with its lock.
        session: to run.
        patched: the line's trees, by upstream.
        digest: of the line.
        python: interpreter of the environment to run in (default: this one).
        words: for pytest.
    """
    root = root_of(line)
    head = receipt_head(line, session, patched, digest=digest, words=words)
    if python is not None:
        _refuse_other_builds(line, python, digest)
    elif session.starts_others:
        raise CheckError(
            f"{session.name} needs an environment with the wheels of {line.name}",
            fix=f"name its Python with --python, or run 'nox -s {session.name} -- {line.name}'",
        )
    interpreter = str(python if python and not session.starts_others else sys.executable)
    options = ("-p", "overlay.checks.receipt_plugin", *session.options)
    argv = (interpreter, "-m", "pytest", *options, *session.tests, *words)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-check-") as scratch:
        path = Path(scratch, "head.json")
        path.write_text(json.dumps(head), encoding="utf-8")
        env = {**os.environ, HEAD_VARIABLE: str(path)}
        env |= dict.fromkeys(LINE_VARIABLES, line.name)
        env["OVERLAY_DEVICE"] = session.device
        if python is not None:
            env[PATCHED_PYTHON_VARIABLE] = str(python.absolute())
        code = subprocess.run(argv, cwd=root, env=env, check=False).returncode
    if code == SURVIVOR_CODE and session.starts_others:
        raise SurvivorError(
            f"a defect of {line.name} goes unnoticed",
            why="no check fails while it is in the patched tree; see the names above",
            fix="write the test that would notice, in tests/patched or tests/static",
        )
    if code:
        raise CheckError(
            f"{session.name} failed on {line.name}",
            why=f"pytest ended with exit code {code}",
            fix="see what it said above; for one test alone, name it after '--' with -k",
        )


def _refuse_other_builds(line: Line, python: Path, wanted: str) -> None:
    """A receipt must not speak for a digest that isn't the one that is installed."""
    from overlay.lines.record import canonical
    from overlay.wheels.inspect import inspect_installed

    found = inspect_installed(python)
    for one in found:
        if (error := one.error()) is not None:
            raise error
        if one.record is None or digest(canonical(one.record)) != wanted:
            raise CheckError(
                f"what is installed is another build: {one.name} {one.version}",
                why=f"line {line.name} has digest {wanted}",
                fix=f"build the wheels of {line.name} and install them first",
            )
    if not set(PROJECTS.values()) <= {one.name for one in found}:
        raise CheckError(
            f"the wheels of {line.name} are not installed for this interpreter",
            why=f"found {', '.join(one.name for one in found) or 'none of them'}",
            fix=f"build the wheels of {line.name} and install them first",
        )
