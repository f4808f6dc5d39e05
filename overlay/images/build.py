"""Builds an image into an OCI layout folder, and keeps a record of how that went.

The build is ``docker buildx bake`` of ``images/``. The layout is written beside its place and gets
its name when all went well; a build that fails or is stopped leaves what was there before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlay.errors import EngineError, ImageError, OverlayError
from overlay.files import machine_errors, write_atomic
from overlay.images.bakefile import EPOCH
from overlay.images.oci import read_layout
from overlay.images.proof import PREFIX_OF_PROBLEMS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from overlay.images.engine import Builder
    from overlay.images.oci import Image
    from overlay.report import Reporter

_STEP = re.compile(r"#(\d+) \[(?P<name>[^\]]+)\] ?(?P<what>.*)")
_DONE = re.compile(r"#(\d+) DONE (?P<seconds>[0-9.]+)s")
_SAID = re.compile(r"#\d+ (?:[0-9.]+ )?(?P<text>.*)")
_TAIL = 25  # lines


@dataclass(slots=True)
class _Log:
    """What BuildKit says, as far as it is needed later."""

    steps: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)

    def take(self, line: str) -> None:
        if step := _STEP.match(line):
            self.steps.setdefault(step[1], f"{step['name']}: {step['what'][:80]}".rstrip(": "))
        if done := _DONE.match(line):
            self.seconds[done[1]] = float(done["seconds"])
        said = _SAID.match(line)
        text = said["text"] if said else line
        if text.startswith(PREFIX_OF_PROBLEMS):
            problem = text.removeprefix(PREFIX_OF_PROBLEMS)
            if problem not in self.problems:
                self.problems.append(problem)
        self.tail = [*self.tail[1 - _TAIL :], line]

    def times(self) -> dict[str, float]:
        """Seconds by step, those that took any."""
        named = ((self.steps.get(number, ""), took) for number, took in self.seconds.items())
        return {name: took for name, took in named if name and took >= 0.1}


def bake_command(files: Sequence[Path], target: str, options: Sequence[str] = ()) -> list[str]:
    """The command that builds a target, as a person could type it."""
    named = [word for path in files for word in ("--file", str(path))]
    return ["docker", "buildx", "bake", *named, *options, target]


def build_image(
    files: Sequence[Path], out: Path, *, builder: Builder, no_cache: bool, report: Reporter
) -> Image:
    """Build the target ``image`` into the folder ``out``, and write ``<out>.json`` beside it.

    Args:
        files: bake files, later ones over earlier.
        out: folder of the layout; an earlier one is replaced.
        builder: that was found.
        no_cache: take no step over from earlier builds.
        report: hears of steps.

    Raises:
        ImageError: a step failed, such as the proof.
        EngineError: the engine went away, or has no room.
    """
    part = out.with_name(f".{out.name}.part")
    started = time.monotonic()
    with machine_errors(out, is_cache=False):
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)  # a killed build's
    try:
        output = f"type=oci,dest={part},tar=false,rewrite-timestamp=true"
        options = ["--progress=plain", "--provenance=false", "--sbom=false"]
        options += ["--set", f"image.output={output}", *(["--no-cache"] if no_cache else [])]
        log = _run(bake_command(files, "image", options), report)
        image = read_layout(part)
        _replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    record = _record(image, log, builder, time.monotonic() - started)
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    with machine_errors(out, is_cache=False):
        write_atomic(out.with_name(f"{out.name}.json"), text.encode())
    return read_layout(out)


def _run(argv: Sequence[str], report: Reporter) -> _Log:
    # Its own variables would change what is built, or write where nobody looks
    env = {name: value for name, value in os.environ.items() if not name.startswith("BUILDX_BAKE")}
    env |= {"SOURCE_DATE_EPOCH": str(EPOCH), "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    log = _Log()
    with subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            for line in process.stdout:
                seen = len(log.steps)
                log.take(line.rstrip("\n"))
                if len(log.steps) > seen:
                    report.say(list(log.steps.values())[-1])
            code = process.wait()
        finally:
            if process.poll() is None:  # stopped: the engine cancels what its client leaves
                process.terminate()
    if code:
        raise _refusal(log)
    return log


def _refusal(log: _Log) -> OverlayError:
    if log.problems:
        return ImageError(
            "the image isn't what it would claim to be",
            why="\n".join(log.problems[:20]),
            fix="correct the step that did it; nothing was kept of this build",
        )
    text = "\n".join(log.tail)
    if "no space left on device" in text:
        return EngineError(
            "the engine's disk or the one of --out is full",
            why=_error_line(log),
            fix="free some room ('docker builder prune' gives back what old builds left)",
        )
    if "failed to resolve source metadata" in text or "failed to do request" in text:
        return EngineError(
            "the base image can't be had",
            why=_error_line(log),
            fix="see whether its registry can be reached from the engine; --base REFERENCE names "
            "another one, by digest",
        )
    if "Cannot connect to the Docker daemon" in text or "error reading from server" in text:
        return EngineError(
            "the engine went away", why=_error_line(log), fix="start it, and build again"
        )
    return ImageError(
        "the image can't be built", why=text, fix="see what the failing step says; build again"
    )


def _error_line(log: _Log) -> str:
    found = [line for line in log.tail if "ERROR" in line or "error" in line]
    return "\n".join(found[-2:]) or "\n".join(log.tail[-2:])


def _replace(part: Path, out: Path) -> None:
    """Give the new layout its name; between two renames, for an instant, there is none."""
    old = out.with_name(f".{out.name}.old")
    with machine_errors(out, is_cache=False):
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.rename(old)
        part.rename(out)
        shutil.rmtree(old, ignore_errors=True)


def _record(image: Image, log: _Log, builder: Builder, seconds: float) -> dict[str, Any]:
    made_by = [one.get("created_by", "") for one in image.config.get("history", [])
               if not one.get("empty_layer")]  # fmt: skip
    layers = [
        {
            "digest": layer.digest,
            "diff_id": layer.diff_id,
            "size": layer.size,
            "step": made_by[at][:120] if at < len(made_by) else "",
        }
        for at, layer in enumerate(image.layers)
    ]
    return {
        "digest": image.digest,
        "size": sum(layer.size for layer in image.layers),
        "layers": layers,
        "seconds": round(seconds, 1),
        "steps": log.times(),
        "builder": {"driver": builder.driver, "version": builder.version, "buildx": builder.buildx},
        "labels": dict(image.labels),
    }
