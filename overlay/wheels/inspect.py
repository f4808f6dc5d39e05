"""Asks a wheel, or what is installed of it, what it says it is, and checks the content.

Everything is checked against what the wheel itself carries: its ``RECORD`` and its provenance
record. That no unpatched file differs from the upstream's needs the upstream's wheel; there
the hashes of ``RECORD``, carried over from it, tell.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from packaging.metadata import parse_email
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from overlay.errors import MachineError, WheelError
from overlay.lines.upstreams import PROJECTS
from overlay.wheels import distinfo, kernelwheel, layout, rawzip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from overlay.lines.upstreams import Upstream

_FORMAT = 1
_DELETED = "000000"
_CHUNK = 1 << 20  # bytes
_UPSTREAMS: dict[str, Upstream] = {name: upstream for upstream, name in PROJECTS.items()}


@dataclass(frozen=True, slots=True)
class Problem:
    """One contradiction: a stable ``kind``, the ``path`` it is about or "", and a sentence."""

    kind: str
    path: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What one wheel or installed distribution is.

    ``record`` is None where there is no readable provenance record. ``files`` counts the files
    whose hash was checked, ``effects`` the patched paths whose content was.
    """

    where: Path
    name: str
    version: str
    record: Mapping[str, Any] | None
    files: int
    effects: int
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...] = ()

    def error(self) -> WheelError | None:
        """Return the problems as one error, or None where there are none."""
        if not self.problems:
            return None
        return WheelError(
            f"{self.name} {self.version} at {self.where} isn't what it says",
            why="\n".join(problem.what for problem in self.problems),
            fix="Build or install it anew.",
        )


class _Files(Protocol):
    """The files of one distribution: those of a wheel, or those below site-packages."""

    installed: bool

    def names(self) -> Collection[str]: ...

    def has(self, name: str) -> bool: ...

    def digest(self, name: str, algorithm: str) -> tuple[bytes, int]:
        """Hash and size in bytes; raises WheelError or OSError if the content can't be had."""

    def read(self, name: str) -> bytes: ...

    def executable(self, name: str) -> bool: ...


def inspect_wheel(path: Path) -> Inspection:
    """Check one wheel file.

    Raises:
        WheelError: not a wheel at all, or one whose zip can't be trusted.
        MachineError: the file can't be read.
    """
    try:
        name, version, *_ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise WheelError(f"{path.name} isn't the name of a wheel", why=str(error)) from error
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise WheelError(f"{path} is no file")
        with path.open("rb", buffering=0) as file:
            files = _WheelFiles(file.fileno(), path.name)
            info = _info_folder(files.names(), path.name)
            check = _Check(path, name, str(version), info, files)
            is_ours = files.has(f"{info}/{distinfo.RECORD_MEMBER}")
            if is_ours and not rawzip.is_canonical(file.fileno(), files.members.values()):
                check.say("form", "", "its zip structure isn't as it was built: edited or repacked")
            return check.run()
    except OSError as error:
        raise MachineError(f"{path} can't be read", why=str(error)) from error


def inspect_installed(python: Path | None = None) -> list[Inspection]:
    """Check vLLM, FlashInfer and its compiled kernels as installed for an interpreter.

    Nothing of them is imported.

    Args:
        python: the interpreter, by default the running one.

    Returns:
        One inspection a distribution found; none where neither is installed.

    Raises:
        MachineError: the interpreter can't be run.
    """
    projects = (*PROJECTS.values(), kernelwheel.PROJECT)
    argv = (str(python or sys.executable), "-I", "-c", _ASK, *projects)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
        found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise MachineError(
            f"{argv[0]} can't say what is installed for it",
            why=(getattr(error, "stderr", None) or str(error)).strip(),
            fix="Name a working Python interpreter.",
        ) from error
    inspections = []
    for project, name, version, root, info in found:
        files = _InstalledFiles(Path(root), info)
        check = _Check(Path(root), project, version, info, files)
        if not info:
            check.say("no-record", "", f"{name} is installed at {root} without a RECORD")
        twice = [other for other in found if other[0] == project and other[3] != root]
        if twice:
            check.say("twice", "", f"{name} is also installed at {twice[0][3]}")
        inspections.append(_without_shared(check.run(), info) if info else check.result())
    return [_beside_flashinfer(one, inspections) for one in inspections]


def inspect_files(where: Path, project: str, version: str, info: str, files: _Files) -> Inspection:
    """Check one distribution that is installed somewhere that isn't a folder, such as an image.

    Args:
        where: to name it by.
        project: canonical name.
        version: as METADATA states it.
        info: its dist-info folder.
        files: of it.
    """
    return _Check(where, project, version, info, files).run()


def _without_shared(found: Inspection, info: str) -> Inspection:
    """Turn problems that another distribution explains into notes.

    Upstream's FlashInfer and others install a top-level ``build_backend.py`` each, which nothing
    imports; whichever comes last wins. Below the packages themselves nothing is excused.
    """
    packages = tuple(f"{upstream}/" for upstream in PROJECTS)
    suspects = {
        problem.path: problem
        for problem in found.problems
        if problem.kind == "content" and not problem.path.startswith((*packages, info))
    }
    notes = []
    for record in sorted(found.where.glob("*.dist-info/RECORD")) if suspects else ():
        other = record.parent.name
        with suppress(WheelError, OSError):
            rows = {} if other == info else distinfo.read_record(record.read_bytes(), other)
            for path in suspects.keys() & rows.keys():
                data = (found.where / path).read_bytes()
                if rows[path].hash == distinfo.row(path, data).hash:
                    what = f"{path} is the one of {other.removesuffix('.dist-info')}"
                    notes.append(Problem("shared", path, what))
    excused = {note.path for note in notes}
    problems = tuple(p for p in found.problems if p.path not in excused or p.kind != "content")
    return replace(found, problems=problems, notes=tuple(notes))


def _beside_flashinfer(kernels: Inspection, found: list[Inspection]) -> Inspection:
    """Add to kernels that were compiled from other sources than those installed that they were."""
    if kernels.name != kernelwheel.PROJECT:
        return kernels
    problems = [
        Problem(
            "kernels", "", f"{kernels.name} {kernels.version} isn't of the installed {one.name} "
            f"{one.version}: FlashInfer doesn't use it"
        )
        for one in found
        if one.name == PROJECTS["flashinfer"] and one.version != kernels.version
    ]  # fmt: skip
    if kernels.record is not None:
        try:
            document = (kernels.where / kernelwheel.BUILT_MEMBER).read_bytes()
            problems += [
                Problem("kernels", name, f"{name} isn't what {kernels.name} was compiled from")
                for name in kernelwheel.differing_sources(document, kernels.where)
            ]
        except (WheelError, OSError) as error:
            problems.append(Problem("kernels", kernelwheel.BUILT_MEMBER, str(error)))
    return replace(kernels, problems=(*kernels.problems, *problems))


_ASK = """
import json, sys
from importlib.metadata import distributions
found = []
for project in sys.argv[1:]:
    for dist in distributions(name=project):
        info = [f for f in dist.files or () if f.name == "METADATA" and len(f.parts) == 2]
        entry = [project, dist.metadata["Name"], dist.version, str(dist.locate_file(""))]
        entry.append(info[0].parts[0] if info else "")
        if entry not in found:
            found.append(entry)
print(json.dumps(found))
"""


def _info_folder(names: Collection[str], label: str) -> str:
    found = {top for name in names if (top := name.partition("/")[0]).endswith(".dist-info")}
    if len(found) != 1:
        raise WheelError(f"{label} has {len(found)} dist-info folders, not one")
    return found.pop()


class _WheelFiles:
    installed = False

    def __init__(self, fd: int, label: str) -> None:
        self._fd, self._label = fd, label
        self.members = {member.name: member for member in rawzip.read_members(fd, label)}

    def names(self) -> Collection[str]:
        return self.members

    def has(self, name: str) -> bool:
        return name in self.members

    def read(self, name: str) -> bytes:
        return rawzip.read(self._fd, self.members[name], self._label)

    def digest(self, name: str, algorithm: str) -> tuple[bytes, int]:
        state, size = hashlib.new(algorithm, usedforsecurity=False), 0
        if algorithm == "sha1":  # a git blob id, which begins with the size
            state.update(b"blob %d\0" % self.members[name].size)
        for data in rawzip.chunks(self._fd, self.members[name], self._label):
            state.update(data)
            size += len(data)
        return state.digest(), size

    def executable(self, name: str) -> bool:
        return bool(self.members[name].mode & stat.S_IXUSR)


class _InstalledFiles:
    installed = True

    def __init__(self, root: Path, info: str) -> None:
        self._root, self._info = root, info

    def names(self) -> Collection[str]:
        """Only what RECORD lists: the folder is shared with all other distributions."""
        record = f"{self._info}/RECORD"
        return distinfo.read_record(self.read(record), record)

    def has(self, name: str) -> bool:
        return os.path.lexists(self._root / name)

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def digest(self, name: str, algorithm: str) -> tuple[bytes, int]:
        state, size = hashlib.new(algorithm, usedforsecurity=False), 0
        with (self._root / name).open("rb") as file:
            if algorithm == "sha1":
                state.update(b"blob %d\0" % os.fstat(file.fileno()).st_size)
            while data := file.read(_CHUNK):
                state.update(data)
                size += len(data)
        return state.digest(), size

    def executable(self, name: str) -> bool:
        return os.access(self._root / name, os.X_OK)


@dataclass(slots=True)
class _Check:
    where: Path
    name: str
    version: str
    info: str
    files: _Files
    problems: list[Problem] = field(default_factory=list)
    record: Mapping[str, Any] | None = None
    hashed: int = 0
    effects: int = 0

    def say(self, kind: str, path: str, what: str) -> None:
        self.problems.append(Problem(kind, path, what))

    def result(self) -> Inspection:
        return Inspection(
            where=self.where,
            name=self.name,
            version=self.version,
            record=self.record,
            files=self.hashed,
            effects=self.effects,
            problems=tuple(self.problems),
        )

    def run(self) -> Inspection:
        names: frozenset[str] = frozenset()
        with self._noting("record", f"{self.info}/RECORD"):
            names = frozenset(self.files.names())
            self._check_files(names)
        metadata = b""
        with self._noting("metadata", f"{self.info}/METADATA"):
            metadata = self.files.read(f"{self.info}/METADATA")
            self._check_metadata(metadata)
        path = f"{self.info}/{distinfo.RECORD_MEMBER}"
        known = {*_UPSTREAMS, kernelwheel.PROJECT}
        if path not in names or self.name not in known:
            self.say("no-provenance", path, f"{self.name} carries no provenance record of ours")
            return self.result()
        with self._noting("provenance", path):
            data = self.files.read(path)
            self.record = _provenance(data)
            self._check_version(data)
            upstream = _UPSTREAMS.get(self.name)
            if upstream is None:  # kernels hold no file of the trees
                self._check_required(metadata, PROJECTS["flashinfer"], f"=={self.version}")
            else:
                self._check_requirements(upstream, metadata)
                self._check_effects(upstream, names)
        return self.result()

    @contextmanager
    def _noting(self, kind: str, path: str) -> Iterator[None]:
        """Turn what stops a check into a problem, so that the next check still runs."""
        try:
            yield
        except (KeyError, FileNotFoundError):
            self.say("missing", path, f"{path} is missing")
        except (WheelError, OSError) as error:
            self.say(kind, path, str(error))

    def _check_files(self, names: Collection[str]) -> None:
        own = f"{self.info}/RECORD"
        rows = distinfo.read_record(self.files.read(own), own)
        for name in sorted(set(names) - set(rows)):
            self.say("unlisted", name, f"{name} isn't listed in RECORD")
        for name, entry in rows.items():
            if not entry.hash:
                # installers list what they compile, and sign nothing they write later
                if name != own and not (self.files.installed and name.endswith(".pyc")):
                    self.say("no-hash", name, f"RECORD has no hash for {name}")
            elif not self.files.installed and name not in names:
                self.say("missing", name, f"{name} is listed in RECORD and missing")
            else:
                with self._noting("content", name):
                    self._check_row(entry)

    def _check_row(self, entry: distinfo.Row) -> None:
        algorithm, _, value = entry.hash.partition("=")
        digest, size = self.files.digest(entry.path, algorithm)
        self.hashed += 1
        if distinfo.unpadded(digest) != value or entry.size not in ("", str(size)):
            self.say("content", entry.path, f"{entry.path} differs from its hash in RECORD")

    def _check_metadata(self, data: bytes) -> None:
        raw, _ = parse_email(data)
        name, version = raw.get("name", ""), raw.get("version", "")
        if canonicalize_name(name) != self.name:
            self.say("metadata", "", f"METADATA names {name}, not {self.name}")
        if version != self.version or not self.info.endswith(f"-{version}.dist-info"):
            self.say("metadata", "", f"METADATA, {self.info} and the version {self.version} differ")

    def _check_version(self, data: bytes) -> None:
        try:
            expected = distinfo.overlay_version(Version(self.version).public, data)
        except InvalidVersion as error:
            raise WheelError(str(error)) from error
        if self.version != expected:
            self.say("digest", "", f"the version is {self.version}; its record makes it {expected}")

    def _check_requirements(self, upstream: Upstream, metadata: bytes) -> None:
        """What the record says of vLLM's requirements, FlashInfer's with the local version.

        The record can't hold that local version: its digest is made of the record.
        """
        if upstream != "vllm" or self.record is None:
            return
        for project, specifier in self.record["requirements"].items():
            local = f"+{Version(self.version).local}" if project == PROJECTS["flashinfer"] else ""
            self._check_required(metadata, project, f"{specifier}{local}")

    def _check_required(self, metadata: bytes, project: str, specifier: str) -> None:
        stated = distinfo.requirements_of(metadata).get(project, ["nothing"])
        if stated != [f"{project}{specifier}"]:
            found = " and ".join(stated)
            self.say("requirement", project, f"METADATA requires {found}, not {project}{specifier}")

    def _check_effects(self, upstream: Upstream, names: Collection[str]) -> None:
        assert self.record is not None  # noqa: S101 - for the type checker
        final: dict[str, tuple[str, str]] = {}
        for patch in self.record["series"][upstream]:
            for effect in patch["effect"]:
                final[effect["path"]] = (effect["mode"], effect["blob"])
        for path, (mode, blob) in final.items():
            ship = layout.wheel_path(upstream, path, names)
            if isinstance(ship, layout.BuildInput):
                self.say("build-input", path, f"{path} can't be in an overlay: {ship.reason}")
            elif isinstance(ship, layout.Shipped):
                with self._noting("effect", ship.name):
                    self._check_effect(ship.name, mode, blob)

    def _check_effect(self, name: str, mode: str, blob: str) -> None:
        self.effects += 1
        if mode == _DELETED:
            if self.files.has(name):
                self.say("undeleted", name, f"{name} is deleted by a patch and still there")
        elif not self.files.has(name):
            self.say("missing", name, f"{name} is written by a patch and missing")
        elif self.files.digest(name, "sha1")[0].hex() != blob:
            self.say("effect", name, f"{name} isn't what the last patch on it makes (blob {blob})")
        elif self.files.executable(name) != (mode == "100755"):
            self.say("mode", name, f"{name} hasn't the mode {mode} that the last patch gives it")


def _provenance(data: bytes) -> dict[str, Any]:
    """Parse a provenance record, and check its form as far as it is used here."""
    try:
        record = json.loads(data)
        if record["format"] != _FORMAT:
            raise WheelError(
                f"the provenance record has format {record['format']}; this tool knows {_FORMAT}"
            )
        canonical = json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        for upstream in PROJECTS:
            for patch in record["series"][upstream]:
                for effect in patch["effect"]:
                    _ = effect["path"] + effect["mode"] + effect["blob"]
                _ = patch["name"] + ""
        _ = record["requirements"].items()
        encoded = canonical.encode("utf-8")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WheelError(f"the provenance record is malformed: {error!r}") from error
    if encoded != data:
        raise WheelError("the provenance record isn't in canonical form")
    result: dict[str, Any] = record
    return result
