"""Time an overlay wheel against a plain copy of the wheel it stands on.

    python benchmarks/wheel_copy.py UPSTREAM_WHEEL [--rounds N]

Alternates ``cp``, a bare start of the interpreter with the overlay's modules, and the overlay
(one file replaced) with the base hashed and with it known as verified; each in a process of
its own, each writing a new file, with what was written before flushed to the disk first.
Prints medians in seconds, the ratio of the overlay to ``cp`` with and without that start, and
peak memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[1]


def child(base: Path, sha256: str, path: str, out: Path, verified: bool) -> None:
    """Make one overlay; print how long the call itself took, in seconds."""
    from overlay.report import Reporter
    from overlay.wheels.distinfo import overlay_version
    from overlay.wheels.wheel import Change, overlay_wheel

    record = b'{"format":1,"line":"bench"}'
    started = time.perf_counter()
    overlay_wheel(
        base,
        sha256,
        out,
        version=overlay_version(str(parse_wheel_filename(base.name)[1]), record),
        changes=[Change(path=path, data=b"# replaced\n")],
        requirements={},
        record=record,
        verified=verified,
        report=Reporter(quiet=True),
    )
    print(time.perf_counter() - started)


def timed(argv: tuple[str, ...]) -> tuple[float, float, str]:
    """Wall time in seconds, peak resident memory in MB, standard output."""
    started = time.perf_counter()
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, argv
    return time.perf_counter() - started, usage.ru_maxrss / 1024, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write (default: temporary)")
    parser.add_argument("--child", choices=["hashed", "verified"], help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--sha256", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.wheel, args.sha256, args.path, args.out, args.child == "verified")
        return
    wheel = args.wheel.resolve()
    with wheel.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in archive.namelist() if name.endswith("/__init__.py"))
    me = (sys.executable, __file__, str(wheel), "--sha256", sha256, "--path", path)
    argvs: dict[str, tuple[str, ...]] = {
        "cp": ("cp", str(wheel)),
        "start": (sys.executable, "-c", "import overlay.wheels.wheel, overlay.report"),
        "hashed": (*me, "--child", "hashed", "--out"),
        "verified": (*me, "--child", "verified", "--out"),
    }
    walls: dict[str, list[float]] = {kind: [] for kind in argvs}
    calls: dict[str, list[float]] = {"hashed": [], "verified": []}
    peak = 0.0
    for _ in range(args.rounds):
        for kind, argv in argvs.items():
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                os.sync()
                wall, memory, output = timed((*argv, folder))
            walls[kind].append(wall)
            if kind in calls:
                calls[kind].append(float(output))
                peak = max(peak, memory)
    copy, start = (statistics.median(walls[kind]) for kind in ("cp", "start"))
    result: dict[str, object] = {
        "wheel": wheel.name,
        "megabytes": round(wheel.stat().st_size / 1e6, 1),
        "rounds": args.rounds,
        "peak_memory_mb": round(peak, 1),
        "cp_s": round(copy, 3),
        "start_s": round(start, 3),
    }
    for kind, times in calls.items():
        process = statistics.median(walls[kind])
        result[kind] = {
            "process_s": round(process, 3),
            "call_s": round(statistics.median(times), 3),
            "ratio": round(process / copy, 2),
            "ratio_without_start": round((process - start) / copy, 2),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
