"""The line ``tiny`` and a line on a later vLLM, in which each way of meeting a patch occurs.

    later = make_later(tiny)           # the line 'later': vLLM 1.3.0
    run("move", "tiny", "vllm", "later")

Patch ``first`` of ``tiny`` meets a change of the same line, ``second`` applies; ``add_series`` adds
``third``, which upstream has taken, and ``fourth``, which requires it.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.lines.line import Settings, read_toml
from tests.support import tiny as small
from tests.support.tiny import TRAILERS, VLLM_FILES, Tiny, git

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LATER = "1.3.0"
ONE = VLLM_FILES["vllm/one.py"]
# Upstream's: another third line, two new ones before it, and what the patch 'third' does
LATER_FILES = {
    **VLLM_FILES,
    "vllm/one.py": b"# new\n# newer\n" + ONE.replace(b"= 3\n", b"= 3  # three\n"),
    "vllm/two.py": b"two = 22\n",
    "requirements/cuda.txt": b"# -r common.txt\ntorch==2.14.0\nflashinfer-python==4.6.0 # new\n",
}

# Runs a command and kills it at the n-th call of something that changes a file's name or place,
# just before or just after; prints how many there were if it ends first
KILLER = """
import os, pathlib, shutil, signal, sys
from overlay.cli import main

last, after = int(sys.argv[1]), sys.argv[2] == "after"
calls = 0

def mortal(function):
    def call(*arguments, **named):
        global calls
        calls += 1
        now = calls == last
        if now and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        made = function(*arguments, **named)
        if now:
            os.kill(os.getpid(), signal.SIGKILL)
        return made
    return call

for owner, name in ((os, "replace"), (os, "rename"), (os, "unlink"), (os, "mkdir"), (os, "rmdir")):
    setattr(owner, name, mortal(getattr(owner, name)))
for name in ("replace", "rename", "unlink", "mkdir"):
    setattr(pathlib.Path, name, mortal(getattr(pathlib.Path, name)))
code = main(sys.argv[3:])
print("calls", calls)
sys.exit(code)
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A folder of ``move --resolve``, driven by plain git."""

    path: Path

    def git(self, *arguments: str) -> bytes:
        return git(self.path, *arguments)

    def user_git(self, *arguments: str) -> bytes:
        """As a person runs it: their own name, and whatever author git finds."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_EDITOR": "true",
            "EMAIL": "mia@example.invalid",
        }
        return subprocess.run(
            ("git", "-c", "user.name=Mia", "-c", "user.email=mia@example.invalid", *arguments),
            cwd=self.path, env=env, capture_output=True, check=True,
        ).stdout  # fmt: skip

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def resolve(self, name: str = "vllm/one.py", line: bytes = b"one = 33  # three\n") -> None:
        """Put ``line`` in place of what stands between markers."""
        text = re.sub(rb"(?s)<<<<<<< .*?>>>>>>> patch\n", line, self.read(name))
        (self.path / name).write_bytes(text)
        self.git("add", name)

    def commit(self) -> None:
        self.user_git("commit", "--quiet", "--no-edit")


def add_series(tiny: Tiny) -> None:
    """Two more patches for ``tiny``."""
    tiny.add_patch("vllm", "third", {"vllm/two.py": b"two = 22\n"})
    one = (tiny.repos["vllm"] / "vllm/one.py").read_bytes()
    tiny.add_patch(
        "vllm", "fourth", {"vllm/one.py": one.replace(b"= 30\n", b"= 300\n")},
        trailers=f"Requires: third, second\n{TRAILERS}",
    )  # fmt: skip


def make_later(tiny: Tiny, files: Mapping[str, bytes] | None = None, name: str = "later") -> Path:
    """Release vLLM 1.3.0 with ``files``, and make a line on it, without patches; its folder."""
    repo = tiny.root / f"vllm-{name}"
    made = dict(LATER_FILES if files is None else files)
    was = small.VERSIONS["vllm"], small.VLLM_FILES
    small.VERSIONS["vllm"], small.VLLM_FILES = LATER, made
    try:
        tiny.repos["vllm"], before = small._repo(repo, made, LATER), tiny.repos["vllm"]
        pin = small._pin(tiny, "vllm")
        tiny.repos["vllm"] = before
    finally:
        small.VERSIONS["vllm"], small.VLLM_FILES = was
    folder = tiny.patches / name
    folder.mkdir()
    text = (tiny.folder / "line.toml").read_text()
    start, end = text.index("\n[vllm]"), text.index("\n[flashinfer]")
    (folder / "line.toml").write_text(text[:start] + pin + text[end:])
    read_toml(folder / "line.toml", Settings)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
