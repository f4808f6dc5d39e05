"""Makes an overlay wheel: an upstream's wheel with some files replaced, the rest copied raw.

Output depends on the arguments alone. Members keep the upstream's order, the metadata folder
goes last and ``RECORD`` at its end, added files stand before that folder, sorted; times are
1980-01-01; unchanged members keep their compressed bytes; what is written here is stored, not
compressed, since builds of zlib differ in what they make of the same input.

The base is hashed while it is copied, on another thread, and the result gets its name only if
the hash was right. Measured on 2 cores with the 314.5 MB wheel of vLLM 0.28.0, the disk idle:
``cp`` takes 0.08 s, the overlay 0.22 s with the hash (0.18 s of it by itself where the processor
has SHA instructions, 0.6 s elsewhere), 0.15 s without. So whoever has proof that the file still
is the verified download passes ``verified`` and comes out at twice ``cp``. What then goes
unnoticed here is a bit that has flipped in the cache since. It isn't carried on in silence:
members keep upstream's CRC and RECORD hash, so ``inspect`` and installers refuse that wheel.
``benchmarks/wheel_copy.py`` measures both.

A written wheel isn't flushed to the disk before it is renamed: after a loss of power it is
made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from overlay.errors import MachineError, SourceError, WheelError
from overlay.wheels import distinfo, rawzip
from overlay.wheels.distinfo import flashinfer_build_meta, vllm_version_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from overlay.report import Reporter
    from overlay.wheels.rawzip import Member

__all__ = ["Change", "flashinfer_build_meta", "overlay_wheel", "vllm_version_file"]

_MODES = {0o100644, 0o100755}
_CHUNK = 1 << 22  # bytes hashed at a time: many, for each time the other thread is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What becomes of one file of the wheel.

    ``path`` is the path inside the wheel, ``data`` its new content or None where it is
    deleted, ``mode`` git's file mode, 0o100644 or 0o100755.
    """

    path: str
    data: bytes | None
    mode: int = 0o100644


@dataclass(frozen=True, slots=True)
class _Kept:
    member: Member
    name: str
    row: distinfo.Row


@dataclass(frozen=True, slots=True)
class _Own:
    name: str
    data: bytes
    mode: int


def overlay_wheel(
    base: Path,
    sha256: str,
    out: Path,
    *,
    version: str,
    changes: Sequence[Change],
    requirements: Mapping[str, str],
    record: bytes,
    rewrites: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({}),
    verified: bool = False,
    report: Reporter,
) -> Path:
    """Write the overlay of an upstream's wheel into a folder and return its path.

    Args:
        base: the upstream's wheel, under its own file name.
        sha256: of that file, hexadecimal.
        out: folder for the result, made if need be; a file of the same name is replaced.
        version: the overlay's, as ``overlay.wheels.distinfo.overlay_version`` makes it.
        changes: files replaced, added and deleted.
        requirements: canonical project name to the requirement that replaces that project's.
        record: the provenance record, canonical JSON; stored as ``overlay.json`` in dist-info.
        rewrites: path inside the wheel to a function from its content to its new content;
            applied after ``changes``.
        verified: the caller has proof that ``base`` has this hash: don't hash it again.
        report: where progress goes.

    Raises:
        SourceError: the base can't be read, or hasn't the hash.
        WheelError: the base isn't a wheel that can be overlaid, or the changes don't fit it.
        MachineError: the result can't be written.
    """
    target = out / _file_name(base.name, version, record)
    try:
        file = base.open("rb", buffering=0)
    except OSError as error:
        raise SourceError(
            f"{base.name} can't be read", why=str(error), fix="Fetch it again."
        ) from error
    with file:
        fd = file.fileno()
        before = os.fstat(fd)
        with _hashing(fd, before, base.name, None if verified else sha256) as demand_hash:
            try:
                edit = _Edit(version, changes, requirements, record, rewrites)
                items = _plan(fd, base.name, edit)
            except (SourceError, WheelError):
                demand_hash()  # a file that isn't the pinned one has no other fault
                raise
            with (
                _beside(target) as part,
                report.progress(f"write {target.name}", total=before.st_size) as advance,
            ):
                writer = rawzip.Writer(part, advance)
                for item in items:
                    if isinstance(item, _Kept):
                        writer.copy(fd, item.member, item.name)
                    else:
                        writer.store(item.name, item.data, item.mode)
                writer.close()
                demand_hash()
    return target


def _file_name(base: str, version: str, record: bytes) -> str:
    try:
        public = parse_wheel_filename(base)[1]
    except InvalidWheelFilename as error:
        raise WheelError(f"{base} isn't the name of a wheel", why=str(error)) from error
    expected = distinfo.overlay_version(str(public), record)
    if version != expected:
        raise WheelError(
            f"{version} isn't the version of this overlay",
            why=f"Base and record make it {expected}.",
        )
    name, _, rest = base.split("-", 2)
    return f"{name}-{version}-{rest}"


@contextmanager
def _hashing(
    fd: int, before: os.stat_result, label: str, sha256: str | None
) -> Iterator[Callable[[], None]]:
    """Hash a file on another thread; yields a function that waits and raises if it is wrong."""
    stop = Event()

    def digest() -> str:
        state, buffer, at = hashlib.sha256(), bytearray(_CHUNK), 0
        while not stop.is_set() and (step := os.preadv(fd, [buffer], at)):
            state.update(memoryview(buffer)[:step])
            at += step
        return state.hexdigest()

    def demand(result: Future[str] | None) -> None:
        found = result.result() if result else None
        if found != sha256:
            raise SourceError(
                f"{label} isn't the wheel that is pinned",
                why=f"Its SHA-256 is {found}; the pin says {sha256}.",
                fix="Fetch it again; if it stays so, the index serves another file.",
            )
        after = os.fstat(fd)
        if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise SourceError(f"{label} changed while it was read", fix="Build again.")

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(digest) if sha256 else None
        try:
            yield lambda: demand(result)
        finally:
            stop.set()


@contextmanager
def _beside(target: Path) -> Iterator[int]:
    """Yield a new file beside ``target`` that takes its place if all went well.

    The file is locked while it is written, so that those of dead runs can be told and cleared
    away, and two runs at once don't get in each other's way.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_dead(target)
        fd, part = _locked(target)
        try:
            yield fd
            part.replace(target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise MachineError(
            f"{target} can't be written",
            why=error.strerror or str(error),
            fix="Free some space, or name a folder that can be written to.",
        ) from error


def _clear_dead(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.*.part"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or not ours
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            continue  # its run is alive
        finally:
            os.close(fd)


def _locked(target: Path) -> tuple[int, Path]:
    while True:
        path = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(fd)):
                return fd, path
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        os.close(fd)  # another run took it for a dead one's before it was locked


@dataclass(frozen=True, slots=True)
class _Edit:
    version: str
    changes: Sequence[Change]
    requirements: Mapping[str, str]
    record: bytes
    rewrites: Mapping[str, Callable[[bytes], bytes]]


def _plan(fd: int, label: str, edit: _Edit) -> list[_Kept | _Own]:
    """Return the members of the result in order, RECORD included."""
    members = {member.name: member for member in rawzip.read_members(fd, label)}
    info = _info_folder(label, members)
    own = f"{info}/RECORD"
    rows = distinfo.read_record(rawzip.read(fd, members[own], label), label)
    distinfo.check_record(rows, {m.name: m.size for m in members.values()}, own, label)

    written = _changed(fd, label, members, edit)
    metadata = f"{info}/METADATA"
    written[metadata] = _Own(
        metadata,
        distinfo.rewrite_metadata(
            rawzip.read(fd, members[metadata], label),
            version=edit.version,
            requirements=edit.requirements,
        ),
        members[metadata].mode,
    )
    new_info = f"{info.partition('-')[0]}-{edit.version}.dist-info"
    code: list[_Kept | _Own] = []
    meta: list[_Kept | _Own] = []
    for name, member in members.items():
        inside = name.startswith(f"{info}/")
        new_name = new_info + name.removeprefix(info) if inside else name
        if name == own:
            continue
        if name not in written:
            entry = rows[name]
            kept = _Kept(member, new_name, distinfo.Row(new_name, entry.hash, entry.size))
            (meta if inside else code).append(kept)
        elif (item := written.pop(name)) is not None:
            (meta if inside else code).append(_Own(new_name, item.data, item.mode))
    code += [item for _, item in sorted(written.items()) if item is not None]
    meta.append(_Own(f"{new_info}/{distinfo.RECORD_MEMBER}", edit.record, 0o100644))
    items = code + meta
    last = f"{new_info}/RECORD"
    listed = [i.row if isinstance(i, _Kept) else distinfo.row(i.name, i.data) for i in items]
    text = distinfo.format_record([*listed, distinfo.Row(last, "", "")])
    return [*items, _Own(last, text, 0o100644)]


def _info_folder(label: str, members: Mapping[str, Member]) -> str:
    """Return the name of the dist-info folder, or say why this wheel can't be overlaid."""
    name, version, *_ = parse_wheel_filename(label)
    tops = dict.fromkeys(path.partition("/")[0] for path in members)
    data = [top for top in tops if top.endswith(".data")]
    if data:
        raise WheelError(
            f"{label} has a {data[0]} folder",
            why="Its files are installed elsewhere than they stand; no overlay is made of that.",
            fix="Build this wheel with the upstream's own build.",
        )
    found = [top for top in tops if top.endswith(".dist-info")]
    if len(found) != 1:
        raise WheelError(f"{label} has {len(found)} dist-info folders, not one")
    info = found[0]
    stem = info.removesuffix(".dist-info").split("-")
    if len(stem) != 2 or canonicalize_name(stem[0]) != name or stem[1] != str(version):
        raise WheelError(f"{label} has the dist-info folder of something else: {info}")
    for needed in ("METADATA", "WHEEL", "RECORD"):
        if f"{info}/{needed}" not in members:
            raise WheelError(f"{label} has no {info}/{needed}")
    if f"{info}/{distinfo.RECORD_MEMBER}" in members:
        raise WheelError(f"{label} is an overlay already", fix="Pin the upstream's wheel.")
    for signature in ("RECORD.jws", "RECORD.p7s"):
        if f"{info}/{signature}" in members:
            raise WheelError(f"{label} is signed ({signature}), which an overlay would break")
    return info


def _changed(
    fd: int, label: str, members: Mapping[str, Member], edit: _Edit
) -> dict[str, _Own | None]:
    """Return what is written anew by its path; None where it is deleted."""
    written: dict[str, _Own | None] = {}
    for change in edit.changes:
        path = change.path
        _check_change(change, label, members)
        if path in written:
            raise WheelError(f"{path} is changed twice")
        written[path] = None if change.data is None else _Own(path, change.data, change.mode)
    for path, rewrite in edit.rewrites.items():
        if path in written:
            item = written[path]
            if item is None:
                raise WheelError(f"{path} is deleted, but its content has to be kept up")
        elif path in members:
            item = _Own(path, rawzip.read(fd, members[path], label), members[path].mode)
        else:
            raise WheelError(f"{label} has no {path}, whose content has to be kept up")
        written[path] = _Own(path, rewrite(item.data), item.mode)
    names = {name for name in members if name not in written}
    names |= {name for name, item in written.items() if item is not None}
    for name in names:
        parent = name.rpartition("/")[0]
        while parent:
            if parent in names:
                raise WheelError(f"{parent} would be a file and a folder in one wheel")
            parent = parent.rpartition("/")[0]
    return written


def _check_change(change: Change, label: str, members: Mapping[str, Member]) -> None:
    path = change.path
    parts = path.split("/")
    if {"", ".", ".."} & set(parts) or "\\" in path or not path.isprintable():
        raise WheelError(f"{path!r} is no path inside a wheel")
    if parts[0].endswith((".dist-info", ".data")):
        raise WheelError(f"{path} belongs to the wheel's metadata, which no patch may change")
    if change.data is None:
        if path not in members:
            raise WheelError(f"{path} is to be deleted, but {label} has no such file")
    elif change.mode not in _MODES or not stat.S_ISREG(change.mode):
        raise WheelError(
            f"{path} has the mode {change.mode:06o}",
            why="A wheel holds regular files (100644) and executables (100755).",
        )
