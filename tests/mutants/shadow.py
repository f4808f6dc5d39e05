"""Some files of installed packages replaced for one process and its children.

The environment stays as it is. A folder that goes on ``PYTHONPATH`` shadows a package: links to
all that the package has, save the folders on the way to a replaced file, which are made anew.
Python takes the path by which it finds a module for its file, so what reads its own source, as
Triton's kernels do, reads the replaced one.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from overlay.errors import CheckError
from overlay.wheels.layout import Shipped, wheel_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.lines.line import Upstream

# Files by whose own path, links resolved, a package finds its data
_ANCHORS = {"flashinfer": ("flashinfer/jit/env.py",)}
_BY_PRODUCT = "__pycache__"  # must not be written through a link, and is of other sources

_ASK = """
import json, sysconfig
from importlib import metadata
versions = {}
for name in ("torch", "triton", "numpy", "pytest", "vllm", "flashinfer-python"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps({"site": sysconfig.get_path("purelib"), "versions": versions}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment: its interpreter, where its packages are, and versions that may matter."""

    python: Path
    site: Path
    versions: Mapping[str, str]


def read_environment(python: Path) -> Environment:
    """Ask an interpreter. Raises ``CheckError`` where it can't be run."""
    argv = (str(python), "-I", "-c", _ASK)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(f"{python.name} can't be run", why=done.stderr.strip())
    told = json.loads(done.stdout)
    return Environment(python=python, site=Path(told["site"]), versions=told["versions"])


def installed_files(
    files: Mapping[tuple[Upstream, str], bytes | None],
) -> dict[str, bytes | None]:
    """The same files by where they lie in an environment, without those that don't ship."""
    return {
        ship.name: data
        for (upstream, path), data in files.items()
        if isinstance(ship := wheel_path(upstream, path, ()), Shipped)
    }


def make_shadow(site: Path, folder: Path, files: Mapping[str, bytes | None]) -> None:
    """Make ``folder`` shadow the packages below ``site`` that ``files`` are of.

    Args:
        site: where the packages are installed.
        folder: to make; its parent exists.
        files: content by path below ``site``; None leaves a file out.
    """
    folder.mkdir()
    wanted = dict(files)
    for package in {name.partition("/")[0] for name in files}:
        for anchor in _ANCHORS.get(package, ()):
            wanted.setdefault(anchor, (site / anchor).read_bytes())
    own = {parent.as_posix() for name in wanted for parent in PurePosixPath(name).parents}
    for inside in sorted(own - {"."}):
        (folder / inside).mkdir()
        for entry in (site / inside).iterdir() if (site / inside).is_dir() else ():
            name = f"{inside}/{entry.name}"
            if name not in own and name not in wanted and entry.name != _BY_PRODUCT:
                (folder / name).symlink_to(entry, target_is_directory=entry.is_dir())
    for name, data in wanted.items():
        if data is not None:
            (folder / name).write_bytes(data)
