"""Time a warm ``frontier`` against ``git am -3`` of each patch in a worktree of each version.

    python benchmarks/frontier.py [LINE] [--rounds N] [--versions A,B,...]

8 patches by 10 versions of vLLM, unless asked otherwise. Sources that the cache lacks are fetched
first, and not timed. Each round runs, in turn:

- ``first``: the whole command, as a process of its own, with the sources in the store and nothing
  kept of earlier runs;
- ``again``: the same once more;
- ``git am -3``: in every worktree, patch after patch; one that fails is skipped. Making the
  worktrees is timed by itself, and setting them back between rounds is not.

Prints medians in seconds, of the clock and of the processors, milliseconds a cell, the ratios, and
on how many cells both agree that a patch goes along. On a busy machine only the processors' seconds
say anything.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from overlay.lines.line import read_line
from overlay.moving.frontier import choose_versions
from overlay.report import Reporter
from overlay.sources.releases import known_pins, pin_release, released, with_pin
from overlay.sources.source import Sources
from overlay.trees.store import cache_folder

ROOT = Path(__file__).resolve().parents[1]
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_COMMITTER_NAME": "Bench",
    "GIT_COMMITTER_EMAIL": "bench@example.invalid",
}


def call(*argv: str | Path, cwd: Path, ok: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess:
    done = subprocess.run(argv, cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    if done.returncode not in ok:
        sys.exit(f"{argv} failed: {done.stdout}{done.stderr}")
    return done


class Bench:
    def __init__(self, name: str, versions: str, scratch: Path) -> None:
        self.name, self.scratch = name, scratch
        root = ROOT / "patches"
        line = read_line(root, name)
        sources = Sources(cache=cache_folder(), report=Reporter())
        pins = known_pins(root, "vllm")
        listed = released(sources, "vllm")
        self.versions = choose_versions(
            line.settings.vllm.version, listed, named=versions.split(",")
        )
        self.mails = [line.folder / "vllm" / f"{patch.name}.patch" for patch in line.series["vllm"]]
        sources.base(line, "vllm", {})
        self.bases = {}
        for version in self.versions:
            pin = pin_release(sources, "vllm", version, known=pins)
            self.bases[version] = sources.base(
                with_pin(line, "vllm", pin), "vllm", {}
            ).commit.commit
        self.clone = scratch / "clone"
        store = sources.store("vllm").folder
        call("git", "clone", "-q", "--shared", "--no-checkout", store, self.clone, cwd=scratch)

    def frontier(self) -> dict[str, Any]:
        command = (
            "frontier", self.name, "--upstream", "vllm", "--versions", ",".join(self.versions),
            "--offline", "--quiet", "--json",
        )  # fmt: skip
        done = call(sys.executable, ROOT / "build.py", *command, cwd=ROOT)
        return dict(json.loads(done.stdout)["upstreams"]["vllm"])

    def worktrees(self) -> None:
        for version, base in self.bases.items():
            tree = self.scratch / version
            call("git", "worktree", "add", "-q", "--detach", tree, base, cwd=self.clone)

    def reset(self) -> None:
        for version, base in self.bases.items():
            call("git", "reset", "-q", "--hard", base, cwd=self.scratch / version)

    def git_am(self) -> dict[str, list[bool]]:
        """For each version: whether each patch went along."""
        return {
            version: [self._am(self.scratch / version, mail) for mail in self.mails]
            for version in self.versions
        }

    def _am(self, tree: Path, mail: Path) -> bool:
        if call("git", "am", "-q", "-3", mail, cwd=tree, ok=(0, 1, 128)).returncode == 0:
            return True
        call("git", "am", "-q", "--skip", cwd=tree)
        return False


def timed(work: Any) -> tuple[tuple[float, float], Any]:
    """Seconds of the clock, and of the processors in all processes below this one."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = work()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return (seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line", nargs="?", default="eldritch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--versions",
        default="0.25.0,0.25.1,0.26.0,0.27.0,0.27.1,0.28.0,0.29.0,0.30.0,0.31.0,0.32.0",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.line, options.versions, Path(scratch))
        cells = len(bench.mails) * len(bench.versions)
        print(f"{len(bench.mails)} patches by {len(bench.versions)} versions: {cells} cells")
        (made, _), _ = timed(bench.worktrees)
        first, again, peer = [], [], []
        for number in range(options.rounds):
            shutil.rmtree(cache_folder() / "frontier", ignore_errors=True)
            for times in (first, again):
                took, document = timed(bench.frontier)
                times.append(took)
            if number:
                bench.reset()
            took, went = timed(bench.git_am)
            peer.append(took)
    medians = {}
    for name, rounds in (("first", first), ("again", again), ("git am -3", peer)):
        medians[name] = [statistics.median(times) for times in zip(*rounds, strict=True)]
        wall, cpu = medians[name]
        low, high = min(rounds)[0], max(rounds)[0]
        print(
            f"{name:10} {wall:6.2f} s ({low:.2f} to {high:.2f}), {1000 * wall / cells:.1f} ms a "
            f"cell; processors {cpu:.2f} s, {1000 * cpu / cells:.1f} ms a cell"
        )
    for name in ("first", "again"):
        wall, cpu = (
            peers / own for peers, own in zip(medians["git am -3"], medians[name], strict=True)
        )
        print(f"git am -3 takes {wall:.1f} times as long as {name}, {cpu:.1f} times in processors")
    print(f"its worktrees took {made:.1f} s beforehand")
    agree = sum(
        cell["holds"] == git
        for column in document["versions"]
        for cell, git in zip(column["cells"], went[column["version"]], strict=True)
    )
    print(f"both agree on {agree} of {cells} cells")


if __name__ == "__main__":
    main()
