"""Time ``wheel`` after a one-line edit of a patch against a plain copy of the same two files.

    python benchmarks/wheel.py [LINE] [--rounds N] [--precompiled]

Needs the line's sources and wheels in the cache (``fetch LINE``). Rounds alternate ``cp`` of
upstream's two wheels, a bare ``lines`` (start of the command), and ``wheel --relock`` after an
edit; what was written before is flushed to the disk first. ``--precompiled`` also makes vLLM's
own precompiled build of the pinned tree once, which takes minutes and needs the dependency
groups ``test`` and ``wheel-peers``. Prints medians, ratios, peak memory of one process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overlay.lines.line import UPSTREAMS, read_line, series_names
from overlay.report import Reporter
from overlay.sources.source import Sources
from overlay.trees.store import cache_folder

ROOT = Path(__file__).resolve().parents[1]


def timed(*argv: str | Path) -> tuple[float, float]:
    """Wall seconds and peak resident memory in MB of one command."""
    os.sync()
    started = time.perf_counter()
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    error = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{argv} failed: {error.decode()}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def edit(patches: list[Path]) -> None:
    """Change one added comment in the last patch that has one."""
    for patch in reversed(patches):
        lines = patch.read_bytes().split(b"\n")
        at = next((i for i, line in enumerate(lines) if line.startswith(b"+    #")), None)
        if at is not None:
            lines[at] = lines[at].split(b" @", 1)[0] + b" @%d" % time.time_ns()
            patch.write_bytes(b"\n".join(lines))
            return
    sys.exit("no patch adds a comment that could be edited")


def precompiled(line_name: str, scratch: Path) -> float:
    """Seconds that vLLM's own precompiled build of the pinned tree takes."""
    sys.path.insert(0, str(ROOT))
    from tests.test_wheel_real import build_vllm, unpack

    line = read_line(ROOT / "patches", line_name)
    sources = Sources(cache=cache_folder(), report=Reporter(quiet=True))
    pin = line.settings.vllm
    root = unpack(sources.fetch("vllm", pin.sdist), scratch / "tree")
    started = time.perf_counter()
    wheel = sources.release(line, "vllm")
    build_vllm(root, scratch / "peer", wheel, f"{pin.version}+bench.o0", pin.commit_text)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("line", nargs="?", default="infernal")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precompiled", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        shutil.copytree(ROOT / "patches" / options.line, scratch / "patches" / options.line)
        line = read_line(scratch / "patches", options.line)
        sources = Sources(cache=cache_folder(), report=Reporter(quiet=True))
        bases = [sources.release(line, upstream) for upstream in UPSTREAMS]
        folder = line.folder / "vllm"
        patches = [folder / f"{name}.patch" for name, _ in series_names(folder / "series")]
        command = (sys.executable, ROOT / "build.py", "--patches", scratch / "patches")
        seconds: dict[str, list[float]] = {"cp": [], "start": [], "wheel": []}
        peak = 0.0
        for number in range(options.rounds):
            edit(patches)
            out = scratch / f"out{number}"
            out.mkdir()
            seconds["cp"].append(timed("cp", *bases, out)[0])
            seconds["start"].append(timed(*command, "lines")[0])
            wall, memory = timed(*command, "wheel", line.name, "--relock", "-q", "--out", out)
            seconds["wheel"].append(wall)
            peak = max(peak, memory)
            shutil.rmtree(out)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(
                f"{name:6} {median:6.3f} s ({min(seconds[name]):.3f} to {max(seconds[name]):.3f})"
            )
        copies = (medians["wheel"] - medians["start"]) / medians["cp"]
        print(f"wheel takes {copies:.1f} copies plus the start; peak memory {peak:.0f} MB")
        if options.precompiled:
            peer = precompiled(options.line, scratch)
            ratio = peer / medians["wheel"]
            print(f"precompiled build of vLLM alone: {peer:.0f} s, {ratio:.0f} times as long")


if __name__ == "__main__":
    main()
