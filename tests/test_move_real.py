"""A real move: ``infernal`` to the pin of ``next``, killed, shared, taken up, replayed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.cli import main
from overlay.lines.line import read_line
from overlay.lines.lock import read_lock
from overlay.trees.store import cache_folder
from tests.support.moves import KILLER, Work, files_of
from tests.support.tiny import git

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = Callable[..., Any]

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[1]
FILE = "vllm/v1/worker/gpu/warmup.py"
LEFT = (
    "dense-prefill-flag", "kernel-block-size", "per-device-scratch", "index-mapping",
    "dcp-prefill-rows", "lse-plumbing", "dcp-direct-workspace", "dcp-draft-lengths",
)  # fmt: skip


def project(folder: Path) -> Path:
    """The two lines in a git repository of their own."""
    for name in ("infernal", "next"):
        shutil.copytree(ROOT / "patches" / name, folder / "patches" / name)
    (folder / ".gitignore").write_text("work/\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Lines")
    return folder


def move(folder: Path, *arguments: str, code: int = 0) -> None:
    assert main(["--patches", str(folder / "patches"), "move", *arguments, "-q"]) == code


def killed(folder: Path, step: int, *arguments: str) -> None:
    """The same in a process that is killed at a step; it must have got there."""
    done = subprocess.run(
        (
            sys.executable, "-c", KILLER, str(step), "before",
            "--patches", str(folder / "patches"), "move", *arguments, "-q",
        ),
        cwd=ROOT, capture_output=True, check=False,
        env={**os.environ, "VLLM_OVERLAY_CACHE": str(cache_folder())},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr


def wanted() -> bytes:
    """The file as a maintainer made it for ``next``: the last blob that its patches give it."""
    lock = read_lock(read_line(ROOT / "patches", "next"))
    assert lock is not None
    blobs = [e.blob for p in lock.vllm.patches for e in p.files if e.path == FILE]
    store = cache_folder() / "stores" / "vllm.git"
    return git(store, "cat-file", "blob", blobs[-1])


def test_killed_shared_taken_up_and_replayed(tmp_path: Path) -> None:
    here = project(tmp_path / "here")
    assert main(["--patches", str(here / "patches"), "apply", "next", "-q"]) == 0
    old = files_of(here / "patches" / "infernal")
    move(here, "infernal", "vllm", "next", code=15)
    for name in LEFT:
        move(here, "--skip", name, "--reason", "not in this test", code=15)
    kept = {n: d for n, d in files_of(here / "patches/infernal").items() if n[:5] != "move/"}
    assert kept == old
    move(here, "--save")
    git(here, "add", "patches")
    git(here, "commit", "-q", "-m", "infernal, half-moved")

    there = tmp_path / "there"
    git(tmp_path, "clone", "-q", str(here), str(there))
    killed(there, 4, "--resolve", "warmup-guard")
    move(there, "--resolve", "warmup-guard")
    work = Work(path=there / "work" / "infernal-warmup-guard")
    assert work.git("status", "--porcelain", "--untracked-files=no").splitlines()[-1] == (
        f"UU {FILE}".encode()
    )
    assert b"<<<<<<< upstream\n" in work.read(FILE)
    move(there, "--continue", code=17)  # markers are left
    (work.path / FILE).write_bytes(wanted())
    work.git("add", FILE)
    work.commit()
    for step in (3, 30, 55):
        killed(there, step, "--continue")
    move(there, "--continue")

    made = read_line(there / "patches", "infernal")
    target = read_line(there / "patches", "next")
    assert made.settings.vllm == target.settings.vllm
    assert [patch.name for patch in made.series["vllm"]] == ["dcp-bookkeeping", "warmup-guard"]
    before = read_line(here / "patches", "infernal").series["vllm"]
    assert made.series["vllm"][-1].message == before[-2].message
    assert main(["--patches", str(there / "patches"), "verify", "infernal", "-q"]) == 0
    lock = read_lock(made)
    assert lock is not None
    (effect,) = [e for e in lock.vllm.patches[-1].files if e.path == FILE]
    assert git(cache_folder() / "stores/vllm.git", "cat-file", "blob", effect.blob) == wanted()

    # Another line with the same conflict
    shutil.copytree(here / "patches" / "infernal", there / "patches" / "copper")
    shutil.rmtree(there / "patches" / "copper" / "move")
    move(there, "copper", "vllm", "next", code=15)
    for name in LEFT[:-1]:
        move(there, "--skip", name, "--reason", "not in this test", code=15)
    move(there, "--skip", LEFT[-1], "--reason", "not in this test")
    again = read_line(there / "patches", "copper")
    assert [patch.raw for patch in again.series["vllm"]] == [p.raw for p in made.series["vllm"]]
