"""status and check on a tiny line: what counts, what doesn't, and what is run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.tiny import Tiny

ROOT = Path(__file__).parent.parent
PASSES, FAILS = "def test_a(): pass\n", "def test_a(): assert False\n"


@pytest.fixture
def proven(tiny: Tiny, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The line, locked, with one static test, which passed."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others would only cost time
    monkeypatch.delenv("OVERLAY_RECEIPT", raising=False)
    write_test(tiny, PASSES)
    assert run("lock", "tiny").code == 0
    assert run("check", "static", "tiny").code == 0
    return tiny


def write_test(tiny: Tiny, source: str) -> None:
    folder = tiny.root / "tests" / "static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(source)


def receipt_path(tiny: Tiny) -> Path:
    return tiny.root / "receipts" / "tiny" / "static-cpu.json"


def static_row(run: Callable[..., Any]) -> dict[str, Any]:
    """The row of the static session."""
    ran = run("status", "tiny", "--json")
    assert ran.code == 0
    (row,) = (row for row in ran.json["receipts"] if row["session"] == "static")
    found: dict[str, Any] = row
    return found


def test_each_session_has_a_row(proven: Tiny, run: Callable[..., Any]) -> None:
    del proven
    rows = run("status", "--json").json["receipts"]
    assert [(row["session"], row["state"]) for row in rows] == [
        ("static", "passed"), ("cpu", "none"), ("gpu", "none"), ("install", "none"),
        ("kernels", "none"), ("mutants", "none"),
    ]  # fmt: skip
    lines = run("status").out.splitlines()
    assert lines[0].split("\t")[2:6] == ["static", "cpu", "passed", "1"]
    assert "no receipt" in lines[1]


def test_a_receipt_of_another_digest_is_stale(proven: Tiny, run: Callable[..., Any]) -> None:
    assert static_row(run)["state"] == "passed"
    old = json.loads(receipt_path(proven).read_text())["digest"]
    proven.add_patch("vllm", "third", {"vllm/two.py": b"two = 22\n"})
    assert run("lock", "tiny").code == 0
    row = static_row(run)
    assert row["state"] == "stale"
    assert row["digest"] != old
    assert f"stale (of {old[:8]})" in run("status").out
    assert run("check", "static", "tiny", "--due").out.startswith("due:")


def test_other_tests_than_now_are_said(proven: Tiny, run: Callable[..., Any]) -> None:
    write_test(proven, PASSES + "# more\n")
    row = static_row(run)
    assert (row["state"], row["same_tests"]) == ("passed", False)
    assert "passed, with other tests than now" in run("status").out


@pytest.mark.parametrize("edit", ["patch", "pin", "unlocked"])
def test_nothing_counts_for_a_line_that_is_not_as_locked(
    proven: Tiny, run: Callable[..., Any], edit: str
) -> None:
    if edit == "patch":
        proven.edit("The reason.", "Another reason.", "vllm/first.patch")
    elif edit == "pin":
        proven.edit('line = "==4.5.6rc7"', 'line = "==4.5.6rc7"\n[requirements.torch]\n'
                    'upstream = "==2.13.0"\nline = "==2.14.0"')  # fmt: skip
    else:
        (proven.folder / "lock.toml").unlink()
    row = static_row(run)
    assert (row["state"], row["digest"]) == ("stale", None)
    assert row["problem"]


def test_an_unreadable_receipt_is_shown(proven: Tiny, run: Callable[..., Any]) -> None:
    receipt_path(proven).write_text("{")
    row = static_row(run)
    assert row["state"] == "unreadable"
    assert "static-cpu.json" in row["problem"]


def test_a_bad_line_does_not_hide_the_others(proven: Tiny, run: Callable[..., Any]) -> None:
    bad = proven.patches / "bad"
    bad.mkdir()
    (bad / "line.toml").write_text("format = 1\n")
    ran = run("status")
    assert ran.code == 3
    assert "static\tcpu\tpassed" in ran.out
    as_json = run("status", "--json")
    assert as_json.code == 3
    assert as_json.json["error"]["kind"] == "line"
    assert len(as_json.json["receipts"]) == 7
    assert run("status", "tiny").code == 0


def test_what_passed_is_not_run_again(proven: Tiny, run: Callable[..., Any]) -> None:
    before = receipt_path(proven).stat().st_ino
    ran = run("check", "static", "tiny")
    assert ran.code == 0
    assert ran.out.startswith("unchanged: static passed on tiny")
    assert run("check", "static", "tiny", "--due", "--json").json["state"] == "unchanged"
    assert receipt_path(proven).stat().st_ino == before
    assert run("check", "static", "tiny", "--force").code == 0
    assert receipt_path(proven).stat().st_ino != before


def test_rewording_a_reason_needs_no_new_run(proven: Tiny, run: Callable[..., Any]) -> None:
    proven.edit("The reason.", "Another reason.", "vllm/first.patch")
    assert run("check", "static", "tiny").code == 8
    assert run("lock", "tiny").code == 0
    assert run("check", "static", "tiny").out.startswith("unchanged")


def test_a_failure_is_an_exit_code_and_a_receipt(proven: Tiny, run: Callable[..., Any]) -> None:
    write_test(proven, FAILS)
    ran = run("check", "static", "tiny")
    assert ran.code == 14
    assert "static failed on tiny" in ran.err
    row = static_row(run)
    assert (row["state"], row["receipt"]["failures"]) == ("failed", ["test_it.py::test_a"])
    assert run("check", "static", "tiny", "--due").out.startswith("due:")


def test_words_for_pytest_make_a_run_of_their_own(proven: Tiny, run: Callable[..., Any]) -> None:
    before = receipt_path(proven).read_bytes()
    ran = run("check", "static", "tiny", "--", "-k", "no_such_test")
    assert "unchanged" not in ran.out
    assert "no receipt" in ran.out
    assert receipt_path(proven).read_bytes() == before


def test_a_changed_line_toml_is_another_input(proven: Tiny, run: Callable[..., Any]) -> None:
    """Which Pythons a line supports is not in its digest."""
    proven.edit('python = ["3.11", "3.12"]', 'python = ["3.11"]')
    assert run("check", "static", "tiny", "--due").out.startswith("due:")


def test_a_receipt_never_speaks_for_another_installed_build(
    proven: Tiny, run: Callable[..., Any], tmp_path: Path
) -> None:
    import venv

    del proven
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    ran = run("check", "cpu", "tiny", "--python", str(python))
    assert ran.code == 14
    assert "not installed for this interpreter" in ran.err


def test_an_unknown_session_is_refused(proven: Tiny, run: Callable[..., Any]) -> None:
    del proven
    ran = run("check", "statik", "tiny")
    assert ran.code == 14
    assert "known: static, cpu, gpu, install" in ran.err
