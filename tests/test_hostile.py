"""Bad surroundings and bad input for whole invocations: each is refused by name, none is a defect.

Faults that belong to one module are tested beside it; here is what only the command shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]
    Done = subprocess.CompletedProcess[str]

ROOT = Path(__file__).parents[1]


def command(
    tiny: Tiny, *arguments: str, behind: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    """One invocation in a process of its own; ``behind`` stands after it, as redirections do."""
    script = f'"$@" {behind}'
    argv = (sys.executable, "-m", "overlay", "--patches", str(tiny.patches), *arguments)
    return subprocess.run(
        ("sh", "-c", script, "sh", *argv), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env}, cwd=tiny.root,
    )  # fmt: skip


# --- standard streams --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "behind", [">&-", "2>&-", "<&-", ">&- 2>&-", "2>/dev/full", "<&- >&- 2>&-"]
)
@pytest.mark.parametrize("verb", [("lint",), ("lock", "tiny"), ("lines", "--json")])
def test_closed_streams_and_unread_progress_change_nothing(
    tiny: Tiny, verb: tuple[str, ...], behind: str
) -> None:
    for unbuffered in ("", "1"):  # by which Python meets a full stream sooner or later
        done = command(tiny, *verb, behind=behind, PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, "rror" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(
    "verb", [("lines",), ("lines", "--json"), ("show", "tiny", "first", "--diff")]
)
def test_a_full_disk_behind_standard_output_is_said(tiny: Tiny, verb: tuple[str, ...]) -> None:
    done = command(tiny, *verb, behind=">/dev/full")
    assert done.returncode == 11
    assert "can't write to standard output: No space left" in done.stderr


def test_a_reader_that_goes_away_does_not_hide_the_verdict(tiny: Tiny) -> None:
    read, write = os.pipe()
    os.close(read)
    argv = (sys.executable, "-m", "overlay", "--patches", str(tiny.patches), "apply", "tiny")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, check=False, env=env)
    os.close(write)
    assert done.returncode == 8  # never locked
    assert b"Traceback" not in done.stderr


def test_text_that_the_locale_can_not_hold_is_escaped(tiny: Tiny) -> None:
    tiny.edit("a line in small", "a line in grün")
    done = command(tiny, "show", "tiny", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "gr\\xfcn" in done.stdout


def test_a_current_folder_that_is_gone(tiny: Tiny, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f'cd "{gone}" && rmdir "{gone}" && exec "{sys.executable}" -m overlay lines --json'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(("sh", "-c", script), capture_output=True, check=False, env=env)
    assert done.returncode == 11
    assert json.loads(done.stdout)["error"]["what"] == "the current folder is gone"


# --- values ------------------------------------------------------------------------------------


def test_lint_of_no_line_is_no_success(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert run("--patches", str(empty), "lint").code == 3
    refused = run("--patches", str(tmp_path / "nowhere"), "cache", "gc", "--everything")
    assert refused.code == 3  # else nothing would be known to be needed
    assert "no such folder" in refused.err
    assert run("lint", "").code == 3
    assert run("lint", ".").code == 3


def test_a_folder_of_archives_is_a_source_of_both_upstreams(
    run: Run, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert run("lock", "tiny", "--source", str(tiny.index), "--offline").code == 0
    (tiny.index / "vllm-1.2.3.tar.gz").write_bytes(b"another")
    assert run("verify", "tiny", "--source", str(tiny.index)).code == 5


def test_an_empty_source_is_not_the_current_folder(run: Run) -> None:
    assert run("apply", "tiny", "--source", "").code == 2
    refused = run("apply", "tiny", "--source", "/dev/null")
    assert refused.code == 5
    assert "neither a file nor a folder" in refused.err


@pytest.mark.parametrize("name", ["line.toml", "lock.toml", "vllm/series", "vllm/first.patch"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "endless"])
def test_what_is_no_file_is_not_read(run: Run, tiny: Tiny, name: str, kind: str) -> None:
    assert run("lock", "tiny").code == 0
    path = tiny.folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    for verb in (("apply", "tiny"), ("lint", "tiny")):
        refused = run(*verb, "--json")
        assert refused.code in (3, 10), refused.json
        assert refused.json["error"]["exit_code"] == refused.code


@pytest.mark.parametrize("entry", ["a\0.patch", "é.patch", "../x.patch", "a" * 300 + ".patch"])
def test_series_entries_that_are_no_file_names(run: Run, tiny: Tiny, entry: str) -> None:
    (tiny.folder / "vllm" / "series").write_text(f"{entry}\n")
    assert run("apply", "tiny").code == 3
    refused = run("lint", "tiny", "--json")
    assert refused.code == 10
    faults = refused.json["lines"]["tiny"]["faults"]
    assert ("name", 1) in {(fault["code"], fault["line"]) for fault in faults}


def test_lint_says_what_applying_finds_wrong(run: Run, tiny: Tiny) -> None:
    run("fetch", "tiny")
    tiny.edit('"PKG-INFO"', '"PKG-INFO", "nowhere"')
    refused = run("lint", "tiny", "--json")
    assert refused.code == 5
    assert "nowhere" in refused.json["error"]["why"]


def test_a_byte_order_mark_is_named(run: Run, tiny: Tiny) -> None:
    path = tiny.folder / "line.toml"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert "byte-order mark" in run("show", "tiny").err


def test_a_lock_with_conflict_marks_says_the_way_out(run: Run, tiny: Tiny) -> None:
    assert run("lock", "tiny").code == 0
    tiny.edit("format = 1\n", "<<<<<<< ours\nformat = 1\n", "lock.toml")
    refused = run("lock", "tiny")
    assert refused.code == 3
    assert "delete it and run 'vllm-overlay lock tiny'" in refused.err
    (tiny.folder / "lock.toml").unlink()
    assert run("lock", "tiny").code == 0


@pytest.mark.parametrize("subject", ["a\nFrom: eve <eve@example.invalid>", "a\x1b[2J"])
def test_a_subject_is_one_line(run: Run, tiny: Tiny, tmp_path: Path, subject: str) -> None:
    diff = tmp_path / "x.diff"
    diff.write_text(
        "diff --git a/vllm/two.py b/vllm/two.py\n--- a/vllm/two.py\n+++ b/vllm/two.py\n"
        "@@ -1 +1 @@\n-two = 2\n+two = 3\n"
    )
    new = ("new", "tiny", "vllm", "third", "--author", "A <a@example.invalid>", "--from", str(diff))
    assert run(*new, "--subject", subject).code == 4
    diff.write_bytes(diff.read_bytes().replace(b"\n", b"\r\n"))
    assert "CRLF" in run(*new).err
    assert tiny.series("vllm") == ["first.patch", "second.patch"]


# --- the cache ---------------------------------------------------------------------------------


def test_a_damaged_state_is_made_again(run: Run, tmp_path: Path) -> None:
    assert run("lock", "tiny").code == 0
    states = sorted((tmp_path / "cache" / "states" / "vllm").glob("*.json"))
    for path in states:
        state = json.loads(path.read_bytes())
        for effect in state["effects"]:
            effect["blob"] = "1" * 40
        path.write_text(json.dumps(state))
    assert len(states) == 2
    done = run("apply", "tiny", "--json")
    assert done.code == 0, done.json
    patches = done.json["upstreams"]["vllm"]["patches"]
    assert [patch["cached"] for patch in patches] == [False, False]


@pytest.mark.parametrize("damage", ["no HEAD", "config", "file"])
def test_a_damaged_store_says_the_way_out(run: Run, tmp_path: Path, damage: str) -> None:
    assert run("lock", "tiny").code == 0
    store = tmp_path / "cache" / "stores" / "vllm.git"
    if damage == "no HEAD":
        (store / "HEAD").unlink()
    elif damage == "config":
        (store / "config").write_text("[[[")
    else:
        store.rename(tmp_path / "elsewhere")
        store.write_text("")
    refused = run("apply", "tiny")
    assert refused.code in (11, 13)
    assert f"delete {store}" in refused.err


def test_a_cache_that_is_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_OVERLAY_CACHE", str(tmp_path / "file"))
    assert run("cache").code == 11
    assert run("apply", "tiny").code == 11


def test_a_git_that_answers_nonsense(run: Run, tmp_path: Path, tiny: Tiny) -> None:
    assert run("lock", "tiny").code == 0
    fake = tmp_path / "bin" / "git"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho git version 2.40.0\n")
    fake.chmod(0o755)
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    done = command(tiny, "apply", "tiny", "--json", PATH=path)
    assert done.returncode == 13
    assert json.loads(done.stdout)["error"]["kind"] == "git"


def test_an_internal_error_is_told_with_its_own_code(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("overlay.app.App.line", fail)
    told = run("show", "tiny", "--json")
    assert told.code == told.json["error"]["exit_code"] == 70
    monkeypatch.setattr("overlay.app.App.line", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    told = run("show", "tiny", "--json")
    assert told.code == told.json["error"]["exit_code"] == 130


def test_a_checkout_without_its_dependencies_says_how_to_get_them() -> None:
    # -S: without site-packages
    argv = (sys.executable, "-S", "-E", str(ROOT / "build.py"), "lines")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 11
    assert "pip install -e ." in done.stderr
    assert "Traceback" not in done.stderr
