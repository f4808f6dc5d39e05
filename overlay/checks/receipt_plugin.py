"""A pytest plugin that writes the receipt of a check run, whatever comes of the run.

One file of the standard library and pytest alone, since the checks run in environments without
this project: ``python -m pytest -p overlay.checks.receipt_plugin`` from a checkout.
``OVERLAY_RECEIPT`` names a JSON file with the head of the receipt (``overlay.checks.sessions``
writes it): what is checked.
The plugin adds what ran, where, and what came of it. Nothing in a receipt names the machine or a
path of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

HEAD_VARIABLE = "OVERLAY_RECEIPT"
# Their versions can change what a check says
_TOOLS = ("torch", "triton", "numpy", "pytest", "ruff", "vllm", "flashinfer-python")


def pytest_configure(config: pytest.Config) -> None:
    """Start collecting, where a head is given; in the process that sees all reports."""
    head = os.environ.get(HEAD_VARIABLE)
    if head and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(config, json.loads(Path(head).read_text())))


class Collector:
    """Counts outcomes and writes the receipt at the end of the session.

    ``head`` is the head of the receipt, with ``folder`` (where receipts of the line go) and
    ``tests`` (what a whole run hands to pytest), which are not part of it.
    """

    def __init__(self, config: pytest.Config, head: dict[str, Any]) -> None:
        self._config = config
        self._folder, self._tests = Path(head.pop("folder")), list(head.pop("tests"))
        self._head = head
        self._when, self._started = datetime.now(UTC), time.monotonic()
        self._outcomes: dict[str, str] = {}
        self._skips: dict[str, set[str]] = {}
        self._notes: dict[str, list[str]] = {}
        self._deselected = self._interrupted = False
        self._said = ""

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Remember that something was left out."""
        self._deselected |= bool(items)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Tell a user's interrupt from the one that pytest makes of collection errors."""
        self._interrupted |= excinfo.type is KeyboardInterrupt

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Modules that can't be imported, or skip themselves."""
        self._add(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One phase of one test."""
        self._add(report)
        if report.when == "teardown":
            for name, value in report.user_properties:
                kept = self._notes.setdefault(name, [])
                if str(value) not in kept:
                    kept.append(str(value))

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        name = report.nodeid
        if report.failed:
            self._outcomes[name] = "failed"
        elif report.skipped:
            self._outcomes.setdefault(name, "skipped")
            self._skips.setdefault(_reason(report), set()).add(name.partition("[")[0])
        elif getattr(report, "when", "") == "call":
            self._outcomes.setdefault(name, "passed")

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Write the receipt, unless the run says nothing about the whole session."""
        part = self._why_part()
        if part:
            self._said = f"no receipt: {part}"
            return
        document = _scrubbed(self._document(int(exitstatus)))
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._head['session']}-{_slug(document['card'])}.json"
        text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        _write_atomic(path, text.encode())
        self._said = f"receipt: {document['outcome']}, {self._folder.name}/{path.name}"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where it is."""
        terminalreporter.write_line(self._said)

    def _why_part(self) -> str:
        option = self._config.option
        if self._interrupted:
            return "interrupted"
        if self._deselected or option.ignore or option.ignore_glob or option.collectonly:
            return "only part of the session was asked for"
        if sorted(self._config.args) != sorted(self._tests):
            return "other tests were named than the session's"
        return ""

    def _document(self, exitstatus: int) -> dict[str, Any]:
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        for outcome in self._outcomes.values():
            counts[outcome] += 1
        done = "passed" if counts["passed"] else "skipped"
        return {
            "format": 1,
            **self._head,
            "outcome": "failed" if exitstatus or counts["failed"] else done,
            "counts": counts,
            "failures": sorted(n for n, outcome in self._outcomes.items() if outcome == "failed"),
            "skips": [
                {"reason": reason, "tests": sorted(names)}
                for reason, names in sorted(self._skips.items())
            ],
            "notes": dict(sorted(self._notes.items())),
            "duration_s": round(time.monotonic() - self._started, 1),
            "when": self._when.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "machine": _machine(),
            "card": _card(),
            "versions": _versions(),
        }


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail or 'no reason given'}"
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return text.removeprefix("Skipped: ")


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        cpu = found[1].strip() if found else cpu
    system = platform.system()
    with contextlib.suppress(OSError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    with contextlib.suppress(AttributeError):  # not on every system
        return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "os": system}
    return {"cpu": cpu, "cores": os.cpu_count() or 1, "os": system}


def _card() -> dict[str, Any] | None:
    """The CUDA device that the tests could use; a test that uses one has imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    first = torch.cuda.get_device_properties(0)
    return {
        "name": first.name,
        "count": torch.cuda.device_count(),
        "capability": f"{first.major}.{first.minor}",
        "memory_gib": round(first.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    git = _output("git", "version").removeprefix("git version ")
    return found | ({"git": git} if git else {})


def _output(*argv: str) -> str:
    """First line that a program says; nothing where it can't be run."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _slug(card: dict[str, Any] | None) -> str:
    return re.sub(r"[^a-z0-9]+", "-", card["name"].lower()).strip("-") if card else "cpu"


def _scrubbed(document: dict[str, Any]) -> dict[str, Any]:
    """The document without paths of this machine; without its name where text is free."""
    paths = {
        str(Path.cwd()): ".",
        sys.prefix: "$PREFIX",
        tempfile.gettempdir(): "$TMP",
        str(Path.home()): "~",
    }
    # A short host name may be a word of a receipt, such as a session's
    free = {**paths, socket.gethostname(): "$HOST"}
    return {
        key: _clean(value, free if key in ("failures", "skips", "notes") else paths)
        for key, value in document.items()
    }


def _clean(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name in sorted((name for name in names if len(name) > 1), key=len, reverse=True):
            value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name], value)
        return value
    if isinstance(value, list):
        return [_clean(one, names) for one in value]
    if isinstance(value, dict):
        return {key: _clean(one, names) for key, one in value.items()}
    return value


def _write_atomic(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # noqa: PTH101 - a name, not a Path
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise
