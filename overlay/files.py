"""Writing files so that a killed process leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from overlay.errors import MachineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_REMEDIES = {
    errno.ENOSPC: "free some room, or set VLLM_OVERLAY_CACHE to a folder on another disk",
    errno.EDQUOT: "free some room, or set VLLM_OVERLAY_CACHE to a folder on another disk",
    errno.EROFS: "set VLLM_OVERLAY_CACHE to a folder that can be written to",
    errno.EACCES: "set VLLM_OVERLAY_CACHE to a folder that can be written to",
    errno.EPERM: "set VLLM_OVERLAY_CACHE to a folder that can be written to",
}


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace ``path`` by a file with ``data``: written beside, synced, then renamed."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)  # noqa: PTH101 - a name, not a Path
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise


@contextlib.contextmanager
def machine_errors(path: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a ``MachineError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        raise MachineError(
            f"can't write to {path}: {error.strerror}", fix=_REMEDIES[error.errno]
        ) from None


@contextlib.contextmanager
def locked(path: Path, *, timeout: float = 600) -> Iterator[None]:
    """Hold the lock file ``path``. Other processes wait; a killed holder releases it."""
    with machine_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, timeout=timeout)
        try:
            lock.acquire()
        except Timeout:
            raise MachineError(
                f"waited {timeout:.0f} s for another process that holds {path}",
                fix="wait for it to end, or stop it",
            ) from None
    try:
        yield
    finally:
        lock.release()
