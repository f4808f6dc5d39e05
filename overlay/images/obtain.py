"""Gets an image onto disk as an OCI layout, from where it is: a folder, an engine, a registry.

Copies only: skopeo for a registry, ``docker image save`` for the engine. Nothing of it is run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import EngineError, ImageError, MachineError, UnavailableError
from overlay.images.oci import read_layout
from overlay.images.reference import parse_reference
from overlay.images.tools import without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.images.oci import Image
    from overlay.images.reference import Reference

ENGINE = "docker-daemon:"
"""What stands before the name of an image that the engine has."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9./:@_-]{0,254}\Z")
_MEMBER = re.compile(r"(?:oci-layout|index\.json|blobs/sha256/[0-9a-f]{64})\Z")
_LAYOUT = "image"


@contextmanager
def obtained(name: str, *, scratch: Path, insecure: bool = False) -> Iterator[Image]:
    """An image by its name, for as long as the block runs.

    Args:
        name: folder of an OCI layout, ``docker-daemon:NAME``, or a reference to a registry.
        scratch: folder for what has to be copied.
        insecure: speak plain HTTP to the registry; on loopback that is so anyway.

    Raises:
        ImageError: it is no image that can be read.
        EngineError, UnavailableError: it can't be had.
    """
    if (Path(name) / "oci-layout").exists() or Path(name).is_dir():
        yield read_layout(Path(name))
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="image-", dir=scratch) as folder:
        layout = Path(folder, _LAYOUT)
        if name.startswith(ENGINE):
            _from_engine(name.removeprefix(ENGINE), layout)
        else:
            _from_registry(parse_reference(name, insecure=insecure), layout)
        yield read_layout(layout)


def _from_registry(reference: Reference, layout: Path) -> None:
    if shutil.which("skopeo") is None:
        raise MachineError(
            "skopeo is missing", fix="install it (apt install skopeo); it copies from registries"
        )
    secure = "false" if reference.repository.plain_http else "true"
    argv = (
        "skopeo", "--override-os=linux", "--override-arch=amd64", "copy", "--quiet",
        "--preserve-digests", f"--src-tls-verify={secure}", "--",
        f"docker://{reference}", f"oci:{layout}:{_LAYOUT}",
    )  # fmt: skip
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise UnavailableError(
            f"{reference} can't be had",
            why=without_secrets(done.stderr).strip()[-600:],
            fix="see whether it exists, and whether you are logged in ('skopeo login')",
        )


def _from_engine(name: str, layout: Path) -> None:
    if not _NAME.match(name):
        raise ImageError(f"{name!r} is no name of an image")
    if shutil.which("docker") is None:
        raise EngineError("there is no Docker client", why="no 'docker' on the PATH")
    saved = layout.with_suffix(".tar")
    argv = ("docker", "image", "save", "--output", str(saved), name)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise EngineError(
            f"the engine can't hand over {name}",
            why=done.stderr.decode(errors="replace").strip()[-600:],
            fix="see 'docker images' for what it has",
        )
    _unpack(saved, layout)
    saved.unlink()


def _unpack(saved: Path, layout: Path) -> None:
    """Take an OCI layout out of a tar; whatever else is in it stays there."""
    with tarfile.open(saved) as archive:
        for member in archive:
            if not member.isreg() or not _MEMBER.match(member.name):
                continue
            target = layout / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None  # noqa: S101 - it is a regular file
            with source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    if not (layout / "oci-layout").exists():
        raise EngineError(
            "the engine does not save images as OCI layouts", fix="use Docker 25 or newer"
        )
