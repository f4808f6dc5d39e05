"""The dependency lock of an image: exactly one wheel a project, by name and hash.

``requirements.lock`` is a requirements file that pip takes as it is (``--require-hashes
--no-deps``). Each line ends with the wheel's file name, so that it is fetched as any other pinned
file. Its first lines say what it was resolved from; lint holds them against ``line.toml``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from overlay.errors import LineError
from overlay.lines.line import REQUIREMENTS_FILE, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from overlay.lines.line import Line, Settings

_ENTRY = re.compile(
    r"(?P<name>[a-z0-9]+(?:-[a-z0-9]+)*)==(?P<version>[^\s;]+)"
    r" --hash=sha256:(?P<sha256>[0-9a-f]{64})  # (?P<file>[A-Za-z0-9][A-Za-z0-9._+!-]*\.whl)\Z"
)
_INPUT = re.compile(r"# (?P<key>[a-z][a-z ]*): (?P<value>.+)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """One wheel of a lock."""

    name: str
    version: str
    file: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """A lock that was read.

    Attributes:
        inputs: what it was resolved from, in words.
        wheels: by canonical project name.
        sha256: of the lines that name wheels.
    """

    inputs: Mapping[str, str]
    wheels: Mapping[str, Locked]

    @property
    def sha256(self) -> str:
        """SHA-256 over what is installed; comments don't count."""
        return hashlib.sha256(self.pip_text().encode()).hexdigest()

    def pip_text(self) -> str:
        """The lines that pip is given."""
        return "".join(f"{one}\n" for one in self.wheels.values())


def lock_inputs(settings: Settings, toolkit: Requirements) -> dict[str, str]:
    """What of a line its lock depends on; all of it text."""
    assert settings.image is not None  # noqa: S101 - callers look first
    packages = settings.image.packages
    found = {
        "python": settings.image.python,
        "torch": settings.torch,
        "vllm": settings.vllm.wheel.sha256,
        "flashinfer": settings.flashinfer.wheel.sha256,
        "cuda": f"{settings.cuda}, {toolkit.sha256}",
    }
    extra = " ".join(f"{name}=={packages[name].version}" for name in sorted(packages))
    return found | ({"packages": extra} if extra else {})


def lock_path(line: Line) -> Path:
    """Where a line's lock lies."""
    return line.folder / REQUIREMENTS_FILE


def read_requirements(path: Path) -> Requirements:
    """Read a lock.

    Raises:
        LineError: it isn't there, or a line of it has another form.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        text = read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LineError(
            f"can't read {where}: {getattr(error, 'strerror', None) or 'it is not UTF-8'}",
            fix="write it with 'vllm-overlay image-lock'",
        ) from None
    inputs: dict[str, str] = {}
    wheels: dict[str, Locked] = {}
    for at, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            if (found := _INPUT.match(line)) and not wheels:
                inputs[found["key"]] = found["value"]
            continue
        one = _entry(line, f"{where}:{at}")
        if one.name in wheels:
            raise LineError(f"{where}:{at}: {one.name} is there twice")
        wheels[one.name] = one
    return Requirements(inputs=inputs, wheels=wheels)


def format_requirements(heading: str, inputs: Mapping[str, str], wheels: Sequence[Locked]) -> bytes:
    """The text of a lock, projects in order of their names."""
    lines = [f"# {heading}", "# Written by 'vllm-overlay image-lock'; don't edit. Made from:"]
    lines += [f"# {key}: {value}" for key, value in inputs.items()]
    lines += [str(one) for one in sorted(wheels, key=lambda one: one.name)]
    return "".join(f"{line}\n" for line in lines).encode()


def stale_inputs(read: Requirements, now: Mapping[str, str]) -> Iterator[str]:
    """What has changed since a lock was made, a sentence each."""
    for key in sorted(read.inputs.keys() | now.keys()):
        was, is_now = read.inputs.get(key, "nothing"), now.get(key, "nothing")
        if was != is_now:
            yield f"{key}: it was made from {was}; line.toml says {is_now}"


def torch_cuda(read: Requirements) -> str:
    """The CUDA that the locked torch was built with: the toolkit whose libraries it asks for."""
    if "cuda-toolkit" not in read.wheels:
        raise LineError(
            f"the torch of {REQUIREMENTS_FILE} asks for no cuda-toolkit",
            why="what CUDA it was built with is read from that",
            fix="lock a CUDA build of torch",
        )
    return ".".join(read.wheels["cuda-toolkit"].version.split(".")[:3])


def _entry(line: str, where: str) -> Locked:
    match = _ENTRY.match(line)
    if match is None:
        raise LineError(
            f"{where}: {line[:60]!r} is no entry of a lock",
            why="expected: name==version --hash=sha256:<64 hex digits>  # <file of the wheel>",
            fix="write it again with 'vllm-overlay image-lock'",
        )
    one = Locked(**match.groupdict())
    try:
        name, version, *_ = parse_wheel_filename(one.file)
        agrees = name == canonicalize_name(one.name) and version == Version(one.version)
    except (InvalidWheelFilename, InvalidVersion):
        agrees = False
    if not agrees:
        raise LineError(f"{where}: {one.file} is no wheel of {one.name} {one.version}")
    return one
