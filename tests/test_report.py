"""What a person gets to see on a terminal, and a program off it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

SCRIPT = """
from overlay.report import Reporter
report = Reporter()
report.table(("name", "verdict"), [("a [b] c", "applies"), ("cuda-toolkit[nvcc]", "conflict")])
with report.progress("work", 10) as advance:
    advance(10)
"""


def test_a_terminal_gets_tables_and_colours_and_loses_no_brackets() -> None:
    master, slave = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen((sys.executable, "-c", SCRIPT), stdout=slave, stderr=slave, env=env)
    os.close(slave)
    out = b""
    while True:
        try:
            chunk = os.read(master, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        out += chunk
    os.close(master)
    assert process.wait() == 0
    assert b"a [b] c" in out
    assert b"cuda-toolkit[nvcc]" in out
    assert b"\x1b[32m" in out  # green
    assert b"\x1b[1;31m" in out


def test_elsewhere_there_are_plain_lines() -> None:
    done = subprocess.run((sys.executable, "-c", SCRIPT), capture_output=True, check=True)
    assert done.stdout == b"a [b] c\tapplies\ncuda-toolkit[nvcc]\tconflict\n"
    assert done.stderr.splitlines()[0] == b"work ..."
    assert b"\x1b" not in done.stdout + done.stderr
