"""Receipts: what the plugin writes of a run, what it leaves out, and what is read back."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from overlay.checks.receipt import Receipt, hash_inputs, judge, read_receipts
from overlay.errors import CheckError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parent.parent
# Other plugins of this environment would only cost time
QUICK = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
HEAD = {
    "line": "tiny",
    "digest": "d" * 64,
    "trees": {"vllm": {"base": "1" * 40, "patched": "2" * 40}},
    "session": "static",
    "inputs": "i" * 64,
    "command": "nox -s static -- tiny",
}

MIXED = """
import pytest

def test_good(record_property):
    record_property("topic", "said")
    record_property("topic", "said")

@pytest.mark.parametrize("n", [1, 2])
def test_skipped(n):
    pytest.skip("no card")

@pytest.mark.xfail(reason="upstream's fault")
def test_expected():
    assert False
"""


@pytest.fixture
def run_checks(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs pytest with the plugin on one test file, as a process of its own."""

    def run(source: str, *words: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "checks").mkdir(exist_ok=True)
        (tmp_path / "checks" / "test_it.py").write_text(source)
        head = tmp_path / "head.json"
        told = {**HEAD, "folder": str(tmp_path / "receipts" / "tiny"), "tests": ["checks"]}
        head.write_text(json.dumps(told))
        argv = (sys.executable, "-m", "pytest", "-p", "overlay.checks.receipt_plugin", "-p",
                "no:cacheprovider", *(words or ("checks",)))  # fmt: skip
        env = {**os.environ, **QUICK, "OVERLAY_RECEIPT": str(head)}
        return subprocess.run(
            argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )

    return run


def receipt_in(folder: Path) -> Receipt:
    (found,) = read_receipts(folder, "tiny")
    assert isinstance(found, Receipt), found
    return found


def test_a_run_is_recorded(tmp_path: Path, run_checks: Callable[..., Any]) -> None:
    done = run_checks(MIXED)
    assert done.returncode == 0, done.stdout
    receipt = receipt_in(tmp_path)
    assert (receipt.line, receipt.digest, receipt.session) == ("tiny", "d" * 64, "static")
    assert receipt.outcome == "passed"
    counts = receipt.counts
    assert (counts.passed, counts.failed, counts.skipped) == (1, 0, 3)
    assert [(skip.reason, skip.tests) for skip in receipt.skips] == [
        ("expected to fail: upstream's fault", ("checks/test_it.py::test_expected",)),
        ("no card", ("checks/test_it.py::test_skipped",)),
    ]
    assert receipt.notes == {"topic": ("said",)}
    assert receipt.card is None
    assert receipt.card_name == "cpu"
    assert receipt.machine.cores >= 1
    assert {"python", "pytest", "git"} <= set(receipt.versions)
    assert [path.name for path in (tmp_path / "receipts" / "tiny").iterdir()] == ["static-cpu.json"]
    assert "receipt: passed, tiny/static-cpu.json" in done.stdout


@pytest.mark.parametrize(
    ("source", "failures"),
    [
        ("def test_a(): assert False\ndef test_b(): pass\n", ("checks/test_it.py::test_a",)),
        (
            "import pytest\n@pytest.fixture\ndef f(): raise OSError\ndef test_a(f): pass\n",
            ("checks/test_it.py::test_a",),
        ),
        (
            "import pytest\n@pytest.fixture\ndef f():\n yield\n raise OSError\n"
            "def test_a(f): pass\n",
            ("checks/test_it.py::test_a",),
        ),
        ("import no_such_module\n", ("checks/test_it.py",)),
    ],
    ids=["test", "setup", "teardown", "collection"],
)
def test_a_failure_is_recorded(
    tmp_path: Path, run_checks: Callable[..., Any], source: str, failures: tuple[str, ...]
) -> None:
    assert run_checks(source).returncode != 0
    receipt = receipt_in(tmp_path)
    assert receipt.outcome == "failed"
    assert receipt.failures == failures
    assert receipt.counts.failed == 1


def test_a_run_without_any_test_has_not_passed(
    tmp_path: Path, run_checks: Callable[..., Any]
) -> None:
    run_checks("import pytest\ndef test_a(): pytest.skip('no card')\n")
    assert receipt_in(tmp_path).outcome == "skipped"
    run_checks("")
    assert receipt_in(tmp_path).outcome == "failed"


@pytest.mark.parametrize(
    "words",
    [
        ("checks", "-k", "good"),
        ("checks", "--collect-only"),
        ("checks/test_it.py::test_good",),
        ("checks", "--ignore=checks/other.py"),
        ("checks", "--deselect", "checks/test_it.py::test_skipped"),
    ],
)
def test_part_of_a_session_is_no_evidence(
    tmp_path: Path, run_checks: Callable[..., Any], words: tuple[str, ...]
) -> None:
    run_checks(MIXED)
    before = receipt_in(tmp_path)
    done = run_checks(MIXED.replace("said", "other"), *words)
    assert done.returncode == 0
    assert "no receipt: " in done.stdout
    assert receipt_in(tmp_path) == before


def test_an_interrupted_run_leaves_the_last_receipt(
    tmp_path: Path, run_checks: Callable[..., Any]
) -> None:
    run_checks(MIXED)
    before = receipt_in(tmp_path)
    done = run_checks("def test_a(): raise KeyboardInterrupt\n")
    assert "no receipt: interrupted" in done.stdout
    assert receipt_in(tmp_path) == before


def test_nothing_names_the_machine(tmp_path: Path, run_checks: Callable[..., Any]) -> None:
    run_checks(
        "import pytest, socket, sys, pathlib\n"
        "def test_a(record_property):\n"
        "    record_property('where', f'{pathlib.Path.cwd()}/x on {socket.gethostname()}')\n"
        "    pytest.skip(f'{sys.prefix}/bin and {pathlib.Path.home()}')\n"
    )
    text = (tmp_path / "receipts" / "tiny" / "static-cpu.json").read_text()
    for name in (str(tmp_path), sys.prefix, str(Path.home()), f'"{socket.gethostname()}'):
        assert name not in text, name
    assert receipt_in(tmp_path).notes == {"where": ("./x on $HOST",)}


def test_without_a_head_the_plugin_does_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_a(): pass\n")
    env = {k: v for k, v in os.environ.items() if k != "OVERLAY_RECEIPT"}
    argv = (
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "overlay.checks.receipt_plugin",
        "-p",
        "no:cacheprovider",
    )
    done = subprocess.run(
        argv, cwd=tmp_path, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] not in "._") == [
        "test_it.py"
    ]


def test_the_plugin_needs_nothing_but_pytest() -> None:
    """It runs in environments without this project's dependencies."""
    tree = ast.parse((ROOT / "overlay" / "checks" / "receipt_plugin.py").read_bytes())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert names - {"pytest"} <= sys.stdlib_module_names
    for package in ("__init__.py", "checks/__init__.py"):
        imported = ast.walk(ast.parse((ROOT / "overlay" / package).read_bytes()))
        assert not [node for node in imported if isinstance(node, ast.Import | ast.ImportFrom)]


def test_a_card_is_recorded_and_names_the_file(
    tmp_path: Path, run_checks: Callable[..., Any]
) -> None:
    """With a fake torch: a CUDA device can't be had here."""
    run_checks(
        "import sys\nfrom types import SimpleNamespace as N\n"
        "card = N(name='NVIDIA H200', major=9, minor=0, total_memory=150 * 2**30)\n"
        "cuda = N(is_available=lambda: True, device_count=lambda: 2,"
        " get_device_properties=lambda n: card)\n"
        "sys.modules['torch'] = N(cuda=cuda, version=N(cuda='13.0'))\n"
        "def test_a(): pass\n"
    )
    (path,) = (tmp_path / "receipts" / "tiny").iterdir()
    assert path.name == "static-nvidia-h200.json"
    card = receipt_in(tmp_path).card
    assert card is not None
    assert (card.name, card.count, card.capability, card.memory_gib) == (
        "NVIDIA H200",
        2,
        "9.0",
        150,
    )


def test_only_its_own_digest_counts(tmp_path: Path, run_checks: Callable[..., Any]) -> None:
    run_checks(MIXED)
    receipt = receipt_in(tmp_path)
    same = judge(receipt, digest="d" * 64, inputs="i" * 64)
    assert (same.state, same.settled) == ("passed", True)
    other_tests = judge(receipt, digest="d" * 64, inputs="j" * 64)
    assert (other_tests.state, other_tests.settled) == ("passed", False)
    stale = judge(receipt, digest="e" * 64, inputs="i" * 64)
    assert (stale.state, stale.settled) == ("stale", False)
    failed = judge(
        msgspec.structs.replace(receipt, outcome="failed"), digest="d" * 64, inputs="i" * 64
    )
    assert not failed.settled


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:100],
        lambda text: text.replace('"line": "tiny"', '"line": "other"'),
        lambda text: text.replace('"session": "static"', '"session": "gpu"'),
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: text.replace('"outcome": "passed"', '"outcome": "fine"'),
        lambda text: text.replace('"format": 1', '"format": 1, "extra": 1'),
    ],
    ids=["cut", "line", "session", "format", "outcome", "unknown key"],
)
def test_what_is_no_receipt_is_said(
    tmp_path: Path, run_checks: Callable[..., Any], change: Callable[[str], str]
) -> None:
    run_checks(MIXED)
    path = tmp_path / "receipts" / "tiny" / "static-cpu.json"
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    (found,) = read_receipts(tmp_path, "tiny")
    assert isinstance(found, CheckError)
    assert "receipts/tiny/static-cpu.json" in found.what


def test_inputs_are_names_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "a" / "one.py").write_text("1")
    first = hash_inputs(tmp_path, ["tests"])
    assert first == hash_inputs(tmp_path, ["tests", "tests/a", "tests/a/one.py"])
    (tmp_path / "tests" / "__pycache__").mkdir()
    (tmp_path / "tests" / "__pycache__" / "one.pyc").write_text("x")
    assert hash_inputs(tmp_path, ["tests"]) == first
    (tmp_path / "tests" / "a" / "one.py").write_text("2")
    changed = hash_inputs(tmp_path, ["tests"])
    (tmp_path / "tests" / "a" / "one.py").rename(tmp_path / "tests" / "a" / "two.py")
    assert len({first, changed, hash_inputs(tmp_path, ["tests"])}) == 3
