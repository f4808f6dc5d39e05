"""All faults of a line at once: settings, series, patches, and what applying them shows.

Works on a folder that ``read_line`` refuses: what can't be read is a fault, and the rest is
looked at all the same. Text is checked offline; only what needs trees asks for applied ones.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from overlay.errors import OverlayError
from overlay.images import linelint
from overlay.lines.line import (
    CODENAME,
    LINE_FILE,
    LOCK_FILE,
    PROJECTS,
    REQUIREMENTS_FILE,
    SERIES_FILE,
    UPSTREAMS,
    Pin,
    Settings,
    Upstream,
    read_file,
    read_line,
    read_toml,
)
from overlay.lines.patchlint import Checked, Fault, Severity, check_patch
from overlay.lines.treelint import check_applied
from overlay.moving import tombstones
from overlay.moving.journal import MOVE_FOLDER
from overlay.patches.patch import NAME, SUFFIX, Patch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from overlay.trees.apply import Patched

__all__ = ["Fault", "Linted", "lint_line"]

_PROSE = ("README.md", ".gitattributes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """What lint saw.

    Attributes:
        faults: sorted by file and line.
        applied: upstreams whose series was checked against applied trees as well.
    """

    faults: tuple[Fault, ...]
    applied: tuple[Upstream, ...]

    @property
    def errors(self) -> tuple[Fault, ...]:
        """The faults that make the line refused."""
        return tuple(fault for fault in self.faults if fault.severity == "error")


def lint_line(root: Path, name: str, *, trees: Mapping[Upstream, Patched] | None = None) -> Linted:
    """Look for faults in one line.

    Args:
        root: folder of all lines.
        name: of the line.
        trees: what applying the line gave, for the upstreams whose base is in the store.
            Without it, offset, fuzz, verdicts and ``index`` lines are not checked.

    Raises:
        LineError: there is no such folder.
    """
    folder = root / name
    if name not in {path.name for path in root.iterdir() if path.is_dir()}:
        read_line(root, name)  # which refuses, and says what there is
    faults = list(_settings(folder))
    faults += _folder(folder)
    if not CODENAME.match(name):
        faults.append(_fault(name, 0, "line-name", f"{name!r} is no codename of a line",
                             "use lower-case letters and digits only"))  # fmt: skip
    applied = []
    for upstream in UPSTREAMS:
        found, checked = _series(folder, upstream)
        faults += found
        if trees and upstream in trees:
            applied.append(upstream)
            faults += check_applied(trees[upstream], checked, f"{name}/{upstream}")
        faults += _merged(root, name, upstream, checked)
    if not any(fault.severity == "error" for fault in faults):
        faults += _refusal(root, name)
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: (fault.file, fault.line))
    return Linted(faults=tuple(ordered), applied=tuple(applied))


def _fault(
    file: str, line: int, code: str, what: str, fix: str = "", severity: Severity = "error"
) -> Fault:
    return Fault(file=file, line=line, code=code, what=what, fix=fix, severity=severity)


def _refusal(root: Path, name: str) -> Iterator[Fault]:
    """Whatever ``read_line`` refuses is a fault, also where no check here knows it."""
    try:
        read_line(root, name)
    except OverlayError as error:
        yield _fault(name, 0, "refused", error.what, error.fix)


def _merged(
    root: Path, name: str, upstream: Upstream, patches: Mapping[str, Patch]
) -> Iterator[Fault]:
    """Patches that another line dropped, since upstream has them by this line's version."""
    try:
        stones = tombstones.read(root)
        version = read_line(root, name).pin(upstream).version if stones else ""
    except OverlayError as error:
        if error.what.startswith(f"{root.name}/{tombstones.FILE}"):
            yield _fault(tombstones.FILE, 0, "dropped-file", error.what, error.fix)
        return  # what is wrong with the line is said elsewhere
    for patch in patches.values():
        stone = tombstones.merged(stones, patch, upstream, version)
        if stone is not None:
            where = f" ({stone.pull})" if stone.pull else ""
            yield _fault(
                f"{name}/{upstream}/{patch.name}{SUFFIX}", 0, "merged-elsewhere",
                f"{stone.line} dropped it: {upstream} {stone.at_version} has it{where}",
                "see whether this line needs it still", "hint",
            )  # fmt: skip


# --- line.toml -------------------------------------------------------------------------------


def _settings(folder: Path) -> Iterator[Fault]:
    path = folder / LINE_FILE
    file = f"{folder.name}/{LINE_FILE}"
    try:
        text = read_file(path).decode()
        table = tomllib.loads(text)
    except OSError as error:
        yield _fault(file, 0, "line-file", f"can't be read: {error.strerror}",
                     "write it; another line's is a pattern")  # fmt: skip
        return
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        at = re.search(r"line (\d+)", str(error))
        yield _fault(file, int(at[1]) if at else 0, "line-file", f"is no TOML: {error}")
        return
    keys = [
        _fault(file, _key_line(text, key), "line-file", f"{key}: {what}")
        for key, what in _key_faults(table, Settings, "")
    ]
    if keys:
        yield from keys
        return
    try:
        settings = read_toml(path, Settings)
    except OverlayError as error:
        what = error.what.removeprefix(f"{file}: ")
        yield _fault(file, _key_line(text, what.partition(":")[0]), "line-file", what, error.fix)
        return
    for key, what in (*_consistency(settings), *linelint.settings_faults(text, settings)):
        yield _fault(file, _key_line(text, key), "line-file", f"{key}: {what}")
    for is_hint, what, fix in linelint.lock_faults(folder, settings):
        lock = f"{folder.name}/{REQUIREMENTS_FILE}"
        yield _fault(lock, 0, "image-lock", what, fix, "hint" if is_hint else "error")


def _key_faults(table: dict[str, Any], kind: type, prefix: str) -> Iterator[tuple[str, str]]:
    """Key and fault for each bad key: msgspec by itself stops at the first."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for key in table.keys() - fields.keys():
        yield prefix + key, f"there is no such key; known: {', '.join(fields)}"
    for key, field in fields.items():
        if key not in table:
            if field.required:
                yield prefix + key, "is missing"
            continue
        value = table[key]
        is_table = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        if is_table and isinstance(value, dict):
            inner = list(_key_faults(value, field.type, f"{prefix}{key}."))
            yield from inner
            if inner:
                continue
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError as error:
            yield prefix + key, str(error)[:1].lower() + str(error)[1:].partition(" - at ")[0]


def _key_line(text: str, key: str) -> int:
    """Line of a dotted key in a TOML text, of its nearest table if it has none, else 0."""
    wanted = key.split(".")
    table: list[str] = []
    best, depth = 0, 0
    for at, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.\"-]+)\]", line):
            table = header[1].replace('"', "").split(".")
            here = table
        elif pair := re.match(r"\s*\"?([\w-]+)\"?\s*=", line):
            here = [*table, pair[1]]
        else:
            continue
        if here == wanted[: len(here)] and len(here) > depth:
            best, depth = at, len(here)
    return best


def _consistency(settings: Settings) -> Iterator[tuple[str, str]]:
    if not settings.summary.strip() or "\n" in settings.summary.strip():
        yield "summary", "must be one sentence"
    minors = [int(version.partition(".")[2]) for version in settings.python]
    if not minors or minors != sorted(set(minors)):
        yield "python", "list each minor version once, oldest first"
    if not settings.architectures or len(set(settings.architectures)) < len(settings.architectures):
        yield "architectures", "list each architecture once, and at least one"
    for upstream in UPSTREAMS:
        pin = settings.vllm if upstream == "vllm" else settings.flashinfer
        for key, what in _pin_faults(pin, upstream):
            yield f"{upstream}.{key}", what


def _pin_faults(pin: Pin, upstream: Upstream) -> Iterator[tuple[str, str]]:
    try:
        version = Version(pin.version)
    except InvalidVersion:
        yield "version", f"{pin.version!r} is no version"
        return
    for key, file in (("sdist.file", pin.sdist.file), ("wheel.file", pin.wheel.file)):
        for what in _file_faults(file, key == "wheel.file", PROJECTS[upstream], version):
            yield key, what
    if pin.sdist.sha256 == pin.wheel.sha256:
        yield "wheel.sha256", "is the sdist's"
    if pin.tag is not None and pin.version not in pin.tag:
        yield "tag", f"{pin.tag} does not name version {pin.version}"
    for path in pin.generated:
        if path.startswith("/") or ".." in path.split("/") or not path.strip("/"):
            yield "generated", f"{path!r} is no path inside the archive"


def _file_faults(file: str, is_wheel: bool, wanted: str, version: Version) -> Iterator[str]:
    try:
        if is_wheel:
            project, stated = parse_wheel_filename(file)[:2]
        else:
            project, stated = parse_sdist_filename(file)
    except (InvalidSdistFilename, InvalidWheelFilename) as error:
        yield f"is no file name of a release: {error}"
        return
    if project != canonicalize_name(wanted):
        yield f"{file} is a file of {project}, not of {wanted}"
    if stated != version:
        yield f"{file} is of version {stated}, the pin says {version}"


# --- folder and series -----------------------------------------------------------------------


def _folder(folder: Path) -> Iterator[Fault]:
    """What lies beside the known files; a misspelt series folder would be an empty series."""
    known = (LINE_FILE, LOCK_FILE, REQUIREMENTS_FILE, MOVE_FOLDER, *UPSTREAMS, *_PROSE)
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in known:
            continue
        file = f"{folder.name}/{path.name}"
        is_series = path.is_dir() and any(
            child.name == SERIES_FILE or child.suffix == SUFFIX for child in path.iterdir()
        )
        if is_series or path.suffix == SUFFIX:
            yield _fault(file, 0, "unlisted", "patches are read from no such place",
                         f"move them to one of: {', '.join(UPSTREAMS)}")  # fmt: skip
        else:
            yield _fault(file, 0, "unlisted", "is no part of a line", severity="hint")


def _series(folder: Path, upstream: Upstream) -> tuple[list[Fault], dict[str, Patch]]:
    """Faults of one series, and its readable patches by name, in order."""
    where = f"{folder.name}/{upstream}"
    home = folder / upstream
    faults: list[Fault] = []
    listed: dict[str, int] = {}
    for entry, at in _entries(home / SERIES_FILE, f"{where}/{SERIES_FILE}", faults):
        faults += _entry_faults(entry, at, listed, home, where)
        listed.setdefault(entry.removesuffix(SUFFIX), at)
    faults += _unlisted(home, where, listed)
    checked: dict[str, Checked] = {}
    names = [*listed, *sorted(_patch_names(home) - listed.keys())]
    for name in names:
        try:
            raw = read_file(home / f"{name}{SUFFIX}")
        except (OSError, ValueError):  # no such file, or no such name: a NUL in it
            continue  # said already
        file = f"{where}/{name}{SUFFIX}"
        checked[name] = check_patch(raw, name=name, file=file, upstream=upstream)
        faults += checked[name].faults
    faults += _requires(listed, checked, where)
    return faults, {n: c.patch for n, c in checked.items() if c.patch is not None and n in listed}


def _entries(path: Path, file: str, faults: list[Fault]) -> list[tuple[str, int]]:
    try:
        text = read_file(path).decode()
    except FileNotFoundError:
        return []
    except OSError as error:
        faults.append(_fault(file, 0, "series", f"can't be read: {error.strerror}"))
        return []
    except UnicodeDecodeError as error:
        faults.append(_fault(file, 0, "series", f"is not UTF-8 (byte {error.start})"))
        return []
    lines = ((re.sub(r"(^|\s)#.*", "", line).strip(), at)
             for at, line in enumerate(text.split("\n"), start=1))  # fmt: skip
    return [(entry, at) for entry, at in lines if entry]


def _entry_faults(
    entry: str, at: int, listed: dict[str, int], home: Path, where: str
) -> Iterator[Fault]:
    file = f"{where}/{SERIES_FILE}"
    name = entry.removesuffix(SUFFIX)
    if not entry.endswith(SUFFIX) or not NAME.match(name):
        yield _fault(file, at, "name", f"{entry!r} is no file name of a patch",
                     "use lower-case letters, digits, '-', '_' or '.', then '.patch'; "
                     "no options after it")  # fmt: skip
    elif name in listed:
        yield _fault(file, at, "listed-twice", f"{entry} is listed already, at line {listed[name]}",
                     "take one of the lines out")  # fmt: skip
    elif entry not in {path.name for path in home.iterdir() if path.is_file()}:
        yield _fault(file, at, "missing", f"{entry} is listed, but there is no such file",
                     "restore the file, or take the line out")  # fmt: skip


def _patch_names(home: Path) -> set[str]:
    return {path.stem for path in home.glob(f"*{SUFFIX}") if path.is_file()}


def _unlisted(home: Path, where: str, listed: dict[str, int]) -> Iterator[Fault]:
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        if path.name in (SERIES_FILE, *_PROSE) or path.name.removesuffix(SUFFIX) in listed:
            continue
        file = f"{where}/{path.name}"
        if path.suffix != SUFFIX:
            yield _fault(file, 0, "unlisted", "is no part of a series", severity="hint")
            continue
        yield _fault(file, 0, "unlisted", "the series file does not list this patch",
                     f"list it in {where}/{SERIES_FILE}, or delete it")  # fmt: skip
        if not NAME.match(path.stem):
            yield _fault(file, 0, "name", f"{path.name!r} is no file name of a patch",
                         "use lower-case letters, digits, '-', '_' or '.'")  # fmt: skip


def _requires(listed: dict[str, int], checked: dict[str, Checked], where: str) -> Iterator[Fault]:
    before: set[str] = set()
    for name in listed:
        for required in checked[name].requires if name in checked else ():
            if required in before:
                continue
            file = f"{where}/{name}{SUFFIX}"
            if required in listed:
                what = f"'Requires: {required}' does not come before it in the series"
                yield _fault(file, 0, "requires", what, "put it before")
            else:
                what = f"'Requires: {required}' names no patch of the series"
                yield _fault(file, 0, "requires", what, "correct the name, or take it out")
        before.add(name)
