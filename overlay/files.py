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

# What to do, and what else where it is the cache that can't be written to
_REMEDIES = {
    errno.ENOSPC: "free some room there",
    errno.EDQUOT: "free some room there",
    errno.EROFS: "make it a place that you may write to",
    errno.EACCES: "make it a place that you may write to",
    errno.EPERM: "make it a place that you may write to",
}
_CACHE_REMEDY = ", or set VLLM_OVERLAY_CACHE to a folder on another disk"


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644, sync: bool = True) -> None:
    """Replace ``path`` by a file with ``data``: written beside, synced, then renamed.

    Without ``sync`` a machine that stops at once may leave an empty file: for what is seen then,
    and made again.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, mode)  # noqa: PTH101 - a name, not a Path
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108
        raise


@contextlib.contextmanager
def machine_errors(path: Path, *, is_cache: bool = True) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a ``MachineError`` that names ``path``.

    Args:
        path: what is written to.
        is_cache: it lies in the cache, which may be put elsewhere.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        raise MachineError(
            f"can't write to {path}: {error.strerror}",
            fix=_REMEDIES[error.errno] + (_CACHE_REMEDY if is_cache else ""),
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
