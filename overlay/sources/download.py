"""Brings one file from a web address into a partial file: resumed, verified, never half-trusted."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

import httpx

from overlay.errors import MachineError, SourceError

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.report import Advance, Reporter

BACKOFF = 0.25  # seconds before the second attempt; doubled for each further one, up to 8
_PROGRESS = 1 << 20  # a connection that brought this much earns a fresh count of retries
_CHUNK = 1 << 20
LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class Trouble(Exception):  # noqa: N818 - not an error of the tool's, the next place is asked
    """A place can't give the file now. The text is for the user: no credentials in it."""


class _Dropped(Exception):  # noqa: N818 - as above
    """This attempt failed, another may not."""


class Part:
    """A file in the making, with the hash of what it holds so far. Holds the file open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.etag: str | None = None
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        self._hash = hashlib.sha256()
        self.size = 0
        left = os.fstat(self._file.fileno()).st_size
        while left and (data := self._file.read(min(left, _CHUNK))):
            self._hash.update(data)
            self.size += len(data)
            left -= len(data)
        # Bytes of an earlier answer: when the hash is wrong they may be to blame.
        self.is_carried = self.size > 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """Of all bytes so far, in hex."""
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Append. Raises OSError; a full disk leaves what fitted."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._hash.update(data)
        self.size += len(data)

    def restart(self) -> None:
        """Forget all bytes."""
        if self.size:
            self._file.seek(0)
            self._file.truncate(0)
        self._hash, self.size, self.etag, self.is_carried = hashlib.sha256(), 0, None, False

    def finish(self) -> None:
        """Force the bytes to disk, so that a stamp made later vouches for what is there."""
        os.fsync(self._file.fileno())


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wrong_hash(file: str, shown: str, expected: str, got: str) -> SourceError:
    """The refusal for content that isn't what the pin says."""
    return SourceError(
        f"{file} isn't the file that the pin names",
        why=f"expected sha256 {expected}\ngot sha256      {got}\nfrom {shown}",
        fix="check the hash in the pin, and what stands between this machine and the index",
    )


def download(
    client: httpx.Client, url: str, part: Part, sha256: str, *, retries: int, report: Reporter
) -> None:
    """Make ``part`` hold the content with this hash, going on from what it already holds.

    Connections that drop are taken up again where they broke, ``retries`` times in a row.
    A wrong hash of something resumed is answered by one restart from zero.

    Raises:
        Trouble: the address doesn't give the file now; ``part`` keeps what came.
        SourceError: it gives other content; ``part`` is deleted.
        MachineError: the disk has too little room.
        OSError: the disk's own faults.
    """
    name, shown = (
        part.path.name.removesuffix(".part"),
        httpx.URL(url).copy_with(userinfo=b"", query=None),
    )
    failed, best, second_chance = 0, part.size, True
    with ExitStack() as stack:
        attempt = _Attempt(client, url, part, _Progress(stack, report, f"fetch {name}"))
        while part.sha256 != sha256 or not part.size:
            try:
                is_whole = attempt.run()
            except _Dropped as drop:
                failed = 0 if part.size >= best + _PROGRESS else failed + 1
                best = max(best, part.size)
                if failed > retries:
                    raise Trouble(f"{drop} ({failed} attempts in a row)") from drop
                time.sleep(min(BACKOFF * 2**failed, 8))
                continue
            if part.sha256 == sha256:
                break
            if not second_chance or (is_whole and not part.is_carried):
                part.path.unlink(missing_ok=True)
                raise wrong_hash(name, str(shown), sha256, part.sha256)
            second_chance = False
            if part.is_carried:
                part.restart()
    part.finish()


class _Progress:
    """A progress display that starts with the first byte, when the total is known."""

    def __init__(self, stack: ExitStack, report: Reporter, label: str) -> None:
        self._stack, self._report, self._label = stack, report, label
        self._advance: Advance | None = None
        self._at = 0

    def to(self, at: int, total: int | None = None) -> None:
        if self._advance is None:
            self._advance = self._stack.enter_context(self._report.progress(self._label, total))
        self._advance(at - self._at)
        self._at = at


class _Attempt:
    """One request at a time for what is still missing."""

    def __init__(self, client: httpx.Client, url: str, part: Part, progress: _Progress) -> None:
        self._client, self._url, self._part, self._progress = client, url, part, progress

    def run(self) -> bool:
        """Ask and append. True if the answer had a stated end, so that it can't be cut short."""
        part = self._part
        # identity: the hash is of the file as it is, not of what a server made of it
        headers = {"Accept-Encoding": "identity"}
        if part.size:
            part.is_carried = True
            headers["Range"] = f"bytes={part.size}-"
            if part.etag:
                headers["If-Range"] = part.etag
        try:
            with self._client.stream("GET", self._url, headers=headers) as answer:
                return self._take(answer)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as fault:
            raise Trouble(f"it can't be followed: {fault}") from fault
        except httpx.HTTPError as fault:
            raise _Dropped(f"{type(fault).__name__}: {fault}".rstrip(": ")) from fault

    def _take(self, answer: httpx.Response) -> bool:
        part = self._part
        self._check(answer)
        if answer.status_code != 206:
            part.restart()  # the server ignored Range, or the file changed since
        etag = answer.headers.get("ETag", "")
        part.etag = etag if etag and not etag.startswith("W/") else None
        length = (
            int(stated) if (stated := answer.headers.get("Content-Length", "")).isdigit() else None
        )
        _check_room(part.path, length or 0)
        self._progress.to(part.size, None if length is None else part.size + length)
        for data in answer.iter_raw():
            part.write(data)
            self._progress.to(part.size)
        return length is not None or "chunked" in answer.headers.get("Transfer-Encoding", "")

    def _check(self, answer: httpx.Response) -> None:
        status, part = answer.status_code, self._part
        if status == 416 or (status == 206 and not _starts_at(answer, part.size)):
            part.restart()
            raise _Dropped(f"HTTP {status} to a request to resume")
        if status in LATER:
            raise _Dropped(f"HTTP {status}")
        if status in (401, 403, 407):
            raise Trouble(f"HTTP {status}: credentials are missing or not accepted")
        if status not in (200, 206):
            raise Trouble(f"HTTP {status}")
        if answer.headers.get("Content-Type", "").lower().startswith("text/html"):
            raise Trouble("an HTML page came instead of the file (a login page or a portal?)")


def _starts_at(answer: httpx.Response, start: int) -> bool:
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    return match is not None and int(match[1]) == start


def _check_room(part: Path, needed: int) -> None:
    """Refuse before a disk is full rather than after."""
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise MachineError(
            f"the disk of the cache has too little room: {part.parent}",
            why=f"{needed} bytes are still to come, {free} are free",
            fix=f"free {needed - free} bytes, or set VLLM_OVERLAY_CACHE to a folder on another "
            "disk; what came is kept and resumed",
        )
