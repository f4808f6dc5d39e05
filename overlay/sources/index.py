"""Fetches one file of a project, known by its hash, from whatever index pip is configured for."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)

from overlay.errors import LineError, MachineError, SourceError, UnavailableError
from overlay.sources.pipconfig import Place, read_pip_config, redacted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from unearth import Link

    from overlay.report import Reporter
    from overlay.sources.web import Web

# unearth logs what it passes over; what matters of it is in the error, so not on the terminal too
logging.getLogger("unearth").addHandler(logging.NullHandler())


def fetch_release(
    project: str, file: str, sha256: str, *, cache: Path, offline: bool, report: Reporter
) -> Path:
    """Return the path of a release file in the cache, fetched and verified if need be.

    Args:
        project: its name on the index, in any spelling.
        file: the sdist's or wheel's file name.
        sha256: 64 hex digits, lower case.
        cache: the tool's cache folder; the file lies in ``downloads/<sha256>/``.
        offline: use no network. Folders and ``file://`` indexes are read all the same.
        report: is told the progress.

    Raises:
        LineError: the names or the hash make no sense.
        SourceError: a place has the file with other content, and none has the right one.
        UnavailableError: no place has it, or none that can be asked now.
        MachineError: the cache can't be used, or pip can't be asked.
    """
    _check_names(project, file, sha256)
    home = cache / "downloads" / sha256
    target = home / file
    if _is_stamped(target, sha256):
        return target
    with _cache_faults(home):
        if not os.access(home, os.W_OK) and target.is_file() and _sha256(target) == sha256:
            return target  # a cache that is shared read-only
        home.mkdir(parents=True, exist_ok=True)
        with _alone(home, file, report):
            if _is_stamped(target, sha256):
                return target
            if target.is_file():
                if _sha256(target) == sha256:
                    _stamp(target, sha256)
                    return target
                report.say(f"{file} in the cache was changed since it was verified: fetched anew")
            _Search(project=project, file=file, sha256=sha256, target=target, report=report).run(
                offline=offline
            )
    return target


def _check_names(project: str, file: str, sha256: str) -> None:
    fix = "correct the pin in line.toml"
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise LineError(
            f"the hash of {file!r} is no SHA-256", why=f"{sha256!r}: 64 hex digits", fix=fix
        )
    # No separator may come through: the name becomes a path in the cache.
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", file):
        raise LineError(f"{file!r} is no plain file name", fix=fix)
    try:
        name = (
            parse_wheel_filename(file)[0]
            if file.endswith(".whl")
            else parse_sdist_filename(file)[0]
        )
    except (InvalidWheelFilename, InvalidSdistFilename) as fault:
        raise LineError(
            f"{file!r} is the name of neither an sdist nor a wheel", why=str(fault), fix=fix
        ) from fault
    if name != canonicalize_name(project):
        raise LineError(f"{file!r} is no file of the project {project}", why=f"of {name}", fix=fix)


# --- the cache -----------------------------------------------------------------------------


def _stamp_path(target: Path) -> Path:
    return target.with_name(target.name + ".ok")


def _identity(target: Path, sha256: str) -> dict[str, int | str]:
    found = target.stat()
    return {
        "size": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "inode": found.st_ino,
        "sha256": sha256,
    }


def _is_stamped(target: Path, sha256: str) -> bool:
    """Whether this very file was verified before: then it isn't read again."""
    try:
        stamp = json.loads(_stamp_path(target).read_bytes())
        return bool(stamp == _identity(target, sha256))
    except (OSError, ValueError):
        return False


def _stamp(target: Path, sha256: str) -> None:
    path = _stamp_path(target)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(_identity(target, sha256)), encoding="ascii")
    beside.replace(path)


def _sha256(path: Path) -> str:
    from overlay.sources.download import file_sha256

    return file_sha256(path)


@contextmanager
def _alone(home: Path, file: str, report: Reporter) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however that ends."""
    lock = FileLock(home / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report.say(f"{file}: waiting for another process that fetches it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _cache_faults(home: Path) -> Iterator[None]:
    """Name the folder and the remedy when the cache is what fails."""
    try:
        yield
    except NotImplementedError as fault:  # filelock, where a file system has no locks
        raise _unfit(home, "can't be locked", str(fault)) from fault
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"the disk of the cache is full: {home}",
                why=str(fault),
                fix="free some space, or set VLLM_OVERLAY_CACHE to a folder on another disk; "
                "what came is kept and resumed",
            ) from fault
        raise _unfit(home, "can't be used", str(fault)) from fault


def _unfit(home: Path, what: str, why: str) -> MachineError:
    return MachineError(
        f"the cache folder {what}: {home}",
        why=why,
        fix="make it a folder that you may write, or set VLLM_OVERLAY_CACHE to another one",
    )


# --- the search ----------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Search:
    """Asks place after place until one gives the content that the pin names."""

    project: str
    file: str
    sha256: str
    target: Path
    report: Reporter

    def run(self, *, offline: bool) -> None:
        from overlay.sources.download import Trouble
        from overlay.sources.web import Web, default_index

        config = read_pip_config()
        places = config.places(default_index())
        asked = [place for place in places if place.is_local or not offline]
        troubles: list[str] = []
        refused: SourceError | None = None
        with Web(config, places, offline=offline) as web:
            for place in asked:
                try:
                    if self._ask(web, place):
                        return
                    troubles.append(f"{place}: doesn't list the file")
                except Trouble as trouble:
                    troubles.append(f"{place}: {trouble}")
                except SourceError as error:  # another place may have the right content
                    refused = refused or error
        if refused:
            raise refused
        raise self._unavailable(places, troubles, offline=offline)

    def _ask(self, web: Web, place: Place) -> bool:
        """Whether the place had the file; raises Trouble or SourceError if that was no use."""
        from overlay.sources.download import Trouble

        fault: Exception | None = None
        for link in web.links(place, self.project, self.file):
            try:
                self._take(web, place, link)
            except (Trouble, SourceError) as error:
                fault = fault or error
            else:
                return True
        if fault:
            raise fault
        return False

    def _take(self, web: Web, place: Place, link: Link) -> None:
        from overlay.sources.download import Part, Trouble, download, wrong_hash

        stated = (link.hash_option or {}).get("sha256", [self.sha256])[0].lower()
        if stated != self.sha256:
            raise wrong_hash(self.file, f"what {place} states", self.sha256, stated)
        beside = self.target.with_name(self.file + ".part")
        if link.is_file:
            if not place.is_local:
                raise Trouble("a page of a web site points to a file on this machine")
            self._copy(link.file_path, beside)
        else:
            if web.client is None:
                raise Trouble(f"the file lies at {redacted(link.url)}, and offline holds")
            with Part(beside) as part:
                download(
                    web.client, link.url_without_fragment, part, self.sha256,
                    retries=web.retries, report=self.report,
                )  # fmt: skip
        beside.replace(self.target)
        _stamp(self.target, self.sha256)

    def _copy(self, source: Path, beside: Path) -> None:
        from overlay.sources.download import Part, Trouble, wrong_hash

        try:
            # Looked at before the copy, so that a part worth resuming isn't lost to a wrong file.
            got = _sha256(source)
            file = source.open("rb")
        except OSError as fault:
            raise Trouble(f"the file can't be read: {fault.strerror}") from fault
        with file, Part(beside) as part:
            size = os.fstat(file.fileno()).st_size
            if got == self.sha256:
                part.restart()
                with self.report.progress(f"copy {self.file}", size) as advance:
                    while data := file.read(1 << 20):
                        part.write(data)
                        advance(len(data))
                part.finish()
                got = part.sha256
        if got != self.sha256:
            raise wrong_hash(self.file, str(source), self.sha256, got)

    def _unavailable(
        self, places: tuple[Place, ...], troubles: list[str], *, offline: bool
    ) -> UnavailableError:
        unasked = sum(not place.is_local for place in places) if offline else 0
        why = [f"sha256 {self.sha256}", f"asked: {_counted(places, offline=offline)}", *troubles]
        if offline:
            why.append(f"not asked, since offline: {unasked}")
            return UnavailableError(
                f"{self.file} of {self.project} isn't in the cache, and offline holds",
                why="\n".join(why),
                fix="run the verb `fetch` while online, or put the file in a find-links folder "
                "of pip's (PIP_FIND_LINKS)",
            )
        return UnavailableError(
            f"{self.file} of {self.project} can't be had now",
            why="\n".join(why),
            fix="check the network and `python -m pip config list`, or put the file in a "
            "find-links folder of pip's (PIP_FIND_LINKS)",
        )


def _counted(places: tuple[Place, ...], *, offline: bool) -> str:
    kinds = ("index", "find-links")
    asked = [place.kind for place in places if place.is_local or not offline]
    counts = [f"{asked.count(kind)} {kind}" for kind in kinds if kind in asked]
    return ", ".join(counts) or "no place, none is configured"
