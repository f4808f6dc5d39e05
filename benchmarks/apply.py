"""Time a warm ``apply`` of a line against ``git am`` and ``quilt push -a`` on the same series.

    python benchmarks/apply.py [LINE] [--rounds N]

Needs the line's sources in the cache (``fetch LINE``) and quilt. Each round runs, in turn:

- ``edited``: ``apply`` when the first patch of the vLLM series has just changed, so that every
  state of vLLM is made anew (the work that the peers do);
- ``warm``: ``apply`` when nothing changed;
- ``git am``: the vLLM series in a worktree of the base tree, reset before and not timed;
- ``quilt``: ``quilt push -a`` in a plain copy of the base tree, popped before and not timed.

Prints medians in seconds, ratios to the peers, and the processes that each one starts
(counted with strace, where it is installed).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.lines.line import series_names
from overlay.trees.store import cache_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROOT = Path(__file__).resolve().parents[1]
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_COMMITTER_NAME": "Bench",
    "GIT_COMMITTER_EMAIL": "bench@example.invalid",
}


def call(argv: Sequence[str | Path], cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        argv, cwd=cwd, env={**CLEAN, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{argv} failed: {done.stdout}{done.stderr}")
    return done.stdout


class Bench:
    def __init__(self, line: str, scratch: Path) -> None:
        self.line = line
        self.patches = scratch / "patches"
        shutil.copytree(ROOT / "patches" / line, self.patches / line)
        self.series = self.patches / line / "vllm"
        names = series_names(self.series / "series")
        self.mails = [self.series / f"{name}.patch" for name, _ in names]
        document = json.loads(self._apply("--relock", "--json"))
        base = document["upstreams"]["vllm"]["base"]["commit"]
        store = cache_folder() / "stores" / "vllm.git"
        self.tree, self.quilt = scratch / "tree", scratch / "quilt"
        call(("git", "clone", "-q", "--shared", "--no-checkout", store, self.tree), scratch)
        call(("git", "checkout", "-q", "--detach", base), self.tree)
        call(("git", "worktree", "add", "-q", "--detach", self.quilt, base), self.tree)
        (self.quilt / ".git").unlink()
        self.base = base

    def _apply(self, *options: str) -> str:
        command = (sys.executable, ROOT / "build.py", "--patches", self.patches, "apply", self.line)
        return call((*command, "--quiet", *options), ROOT)

    def edited(self) -> Callable[[], object]:
        first = self.mails[0]
        text = first.read_bytes()
        head, _, rest = text.partition(b"\n\n")
        first.write_bytes(head + b"\n\n" + f"Edited at {time.time_ns()}.\n".encode() + rest)
        return lambda: self._apply("--relock")

    def warm(self) -> Callable[[], object]:
        return self._apply

    def git_am(self) -> Callable[[], object]:
        call(("git", "reset", "-q", "--hard", self.base), self.tree)
        return lambda: call(("git", "am", "-q", *self.mails), self.tree)

    def quilt_push(self) -> Callable[[], object]:
        env = {"QUILT_PATCHES": str(self.series)}
        if (self.quilt / ".pc" / "applied-patches").exists():
            call(("quilt", "pop", "-a", "-q"), self.quilt, env)
        return lambda: call(("quilt", "push", "-a", "-q"), self.quilt, env)


def processes(work: Callable[[], object], scratch: Path) -> str:
    """Program starts below ``work``, git's own included."""
    if shutil.which("strace") is None:
        return "?"
    log = scratch / "strace"
    trace = subprocess.Popen(
        ("strace", "-f", "-qq", "-e", "trace=execve", "-e", "status=successful",
         "-o", log, "-p", str(os.getpid()))
    )  # fmt: skip
    time.sleep(0.5)
    work()
    trace.terminate()
    trace.wait()
    return str(log.read_text().count("execve("))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line", nargs="?", default="infernal")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.line, Path(scratch))
        ways = {
            "edited": bench.edited, "warm": bench.warm,
            "git am": bench.git_am, "quilt": bench.quilt_push,
        }  # fmt: skip
        counts = {name: processes(prepare(), Path(scratch)) for name, prepare in ways.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, prepare in ways.items():
                work = prepare()
                started = time.perf_counter()
                work()
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            low, high = min(seconds[name]), max(seconds[name])
            print(f"{name:8} {median:6.3f} s ({low:.3f} to {high:.3f}), {counts[name]} programs")
        for name in ("edited", "warm"):
            for peer in ("git am", "quilt"):
                print(f"{peer} takes {medians[peer] / medians[name]:.1f} times as long as {name}")


if __name__ == "__main__":
    main()
