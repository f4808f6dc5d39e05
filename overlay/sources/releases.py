"""Makes a pin of a release or a commit that no line stands on yet.

What releases there are, and their hashes, is the package index's word; what commit a release was
made of is its archive's own. Both are kept in the cache, so that asking again needs no network.
Nothing is ever written into a line.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from overlay.errors import LineError, OverlayError, SourceError, UnavailableError
from overlay.files import write_atomic
from overlay.lines.line import (
    LINE_FILE,
    PROJECTS,
    File,
    Line,
    Pin,
    Settings,
    Upstream,
    Wheel,
    find_lines,
    read_toml,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from unearth import Link

    from overlay.sources.archive import Member
    from overlay.sources.source import Sources

FRESH = 3600.0  # seconds for which a list of releases is believed without asking again
UNRELEASED = "0.dev0"  # version of a pin that no release stands for
_NO_FILE = File(file="unreleased", sha256="0" * 64)

# Where no line of the project says it
REPOSITORIES: dict[Upstream, str] = {
    "vllm": "https://github.com/vllm-project/vllm.git",
    "flashinfer": "https://github.com/flashinfer-ai/flashinfer.git",
}
GENERATED: dict[Upstream, tuple[str, ...]] = {
    "vllm": ("setup.cfg", "PKG-INFO", "vllm.egg-info/", "vllm/_version.py"),
    "flashinfer": (
        "setup.cfg", "PKG-INFO", "flashinfer_python.egg-info/", "flashinfer/_build_meta.py",
    ),
}  # fmt: skip
# The file of an archive that states its commit, and how
_STATED: dict[Upstream, tuple[bytes, re.Pattern[bytes]]] = {
    "vllm": (
        b"vllm/_version.py",
        re.compile(rb"^__commit_id__ = commit_id = 'g?([0-9a-f]{7,40})'", re.MULTILINE),
    ),
    "flashinfer": (
        b"flashinfer/_build_meta.py",
        re.compile(rb'^__git_(?:commit|version)__ = "([0-9a-f]{7,40})"', re.MULTILINE),
    ),
}


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """A version as the package index lists it.

    Attributes:
        version: as its sdist's or wheel's name spells it.
        sdist: the ``.tar.gz``; None where there is none with a hash.
        wheel: for Linux on x86-64, or for any machine; None where there is none with a hash.
        yanked: why upstream took it back; None where it didn't.
    """

    version: str
    sdist: File | None = None
    wheel: File | None = None
    yanked: str | None = None


class _Stated(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive says of itself: its commit, and which generated names it has."""

    commit: str
    generated: tuple[str, ...]


def released(sources: Sources, upstream: Upstream) -> tuple[str, ...]:
    """Versions on the configured index, oldest first, pre-releases and yanked ones too.

    Raises:
        UnavailableError: no index can be asked, and none was before.
    """
    return tuple(offered(sources, upstream))


def offered(sources: Sources, upstream: Upstream, *, max_age: float = FRESH) -> dict[str, Release]:
    """The releases on the configured index by version, oldest first.

    Args:
        sources: says where the cache is, and whether to stay offline.
        upstream: whose.
        max_age: seconds for which the kept list is believed; offline it always is.

    Raises:
        UnavailableError: no index can be asked, and none was before.
    """
    path = _folder(sources, upstream) / "index.json"
    kept: tuple[Release, ...] | None = _read(path, tuple[Release, ...])
    if kept is None or not (sources.offline or _age(path) < max_age):
        try:
            kept = _ask(sources, upstream)
            _keep(path, kept)
        except UnavailableError as error:
            if kept is None:
                raise
            hours = _age(path) / 3600
            sources.report.say(f"{error.what}; the list of {hours:.0f} h ago is used")
    return {release.version: release for release in kept}


def pin_release(
    sources: Sources, upstream: Upstream, version: str, *, known: Sequence[Pin] = ()
) -> Pin:
    """The pin of one release; its archive is downloaded if need be.

    Args:
        sources: says where the cache is, and whether to stay offline.
        upstream: whose release.
        version: as it is listed, or another spelling of the same.
        known: pins of the project's lines. One of the very same archive is taken as it stands;
            else the first says which repository it is, and which files are generated.

    Raises:
        LineError: the index has no such version.
        SourceError: the archive is refused, or states no commit.
        UnavailableError: the release was taken back, has no archive or wheel, or can't be had now.
    """
    release = _release(sources, upstream, version)
    what = f"{upstream} {release.version}"
    if release.yanked is not None:
        raise UnavailableError(
            f"{what} was yanked", why=release.yanked, fix="choose another version"
        )
    if release.sdist is None or release.wheel is None:
        lacks = "sdist" if release.sdist is None else "wheel for x86-64"
        raise UnavailableError(
            f"{what} has no {lacks}",
            why=f"the index lists no {lacks} with a hash",
            fix="choose another version",
        )
    for pin in known:
        if pin.sdist == release.sdist:
            return pin
    stated = _stated(sources, upstream, release.sdist, known)
    is_full = len(stated.commit) == 40
    return Pin(
        version=release.version,
        repository=known[0].repository if known else REPOSITORIES[upstream],
        sdist=release.sdist,
        wheel=Wheel(file=release.wheel.file, sha256=release.wheel.sha256),
        commit=stated.commit if is_full else None,
        abbreviation=None if is_full else stated.commit,
        tag=f"v{release.version}",
        sources=("archive", "git") if is_full else ("archive",),
        generated=stated.generated,
    )


def pin_commit(upstream: Upstream, commit: str, *, known: Sequence[Pin] = ()) -> Pin:
    """The pin of a commit, to be had from git or from a path alone.

    A pin of a line that names this commit is taken as it stands. Any other commit has neither
    sdist nor wheel (``is_released``): it can be moved to and looked at, and no wheels can be built.

    Args:
        upstream: whose commit.
        commit: full id.
        known: pins of the project's lines; the first says which repository it is.

    Raises:
        LineError: ``commit`` is no full id.
    """
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise LineError(f"{commit!r} is no full commit id", fix="give all 40 hex digits")
    for pin in known:
        if commit.startswith(pin.commit_text):
            return pin
    return Pin(
        version=UNRELEASED,
        repository=known[0].repository if known else REPOSITORIES[upstream],
        sdist=_NO_FILE,
        wheel=Wheel(file=_NO_FILE.file, sha256=_NO_FILE.sha256),
        commit=commit,
        sources=("git",),
    )


def is_released(pin: Pin) -> bool:
    """Whether release files stand for the pin, so that wheels can be built."""
    return pin.sdist.sha256 != _NO_FILE.sha256


def known_pins(root: Path, upstream: Upstream) -> tuple[Pin, ...]:
    """Pins of all lines below ``root`` that can be read."""
    found = []
    for name in find_lines(root):
        with contextlib.suppress(OverlayError):  # another line's fault is not ours to tell
            settings = read_toml(root / name / LINE_FILE, Settings)
            found.append(settings.vllm if upstream == "vllm" else settings.flashinfer)
    return tuple(found)


def with_pin(line: Line, upstream: Upstream, pin: Pin) -> Line:
    """``line`` as it would be on another pin, in memory; what it requires goes along."""
    changes: dict[str, Any] = {upstream: pin}
    project = PROJECTS["flashinfer"]
    ours = line.settings.requirements.get(project)
    if upstream == "flashinfer" and ours is not None:
        moved = msgspec.structs.replace(ours, line=f"=={pin.version}")
        changes["requirements"] = {**line.settings.requirements, project: moved}
    return replace(line, settings=msgspec.structs.replace(line.settings, **changes))


def _release(sources: Sources, upstream: Upstream, version: str) -> Release:
    """The release of that version, from the kept list if that has it."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise LineError(f"{version!r} is no version", fix="say one such as 0.28.0") from None
    for max_age in (float("inf"), FRESH):
        found = offered(sources, upstream, max_age=max_age)
        for release in found.values():
            if Version(release.version) == wanted:
                return release
    newest = [text for text in found if not Version(text).is_prerelease]
    raise LineError(
        f"there is no {upstream} {version} on the index",
        why=f"newest: {', '.join(newest[-5:])}" if newest else "",
        fix="check the version, or pip's configuration",
    )


def _ask(sources: Sources, upstream: Upstream) -> tuple[Release, ...]:
    from overlay.sources.download import Trouble
    from overlay.sources.pipconfig import read_pip_config
    from overlay.sources.web import Web, default_index

    project = PROJECTS[upstream]
    config = read_pip_config()
    places = [
        place for place in config.places(default_index()) if place.is_local or not sources.offline
    ]
    troubles: list[str] = []
    links: dict[str, Link] = {}
    with Web(config, places, offline=sources.offline) as web:
        for place in places:
            try:
                for link in web.links(place, project):
                    links.setdefault(link.filename, link)
            except Trouble as trouble:
                troubles.append(f"{place}: {trouble}")
    if not links:
        raise UnavailableError(
            f"no place lists a release of {project}",
            why="\n".join(troubles or [f"asked: {len(places)} places"])
            + "\noffline: only folders were asked" * sources.offline,
            fix="check the network and `python -m pip config list`",
        )
    for text in troubles:
        sources.report.say(f"{project}: {text}")
    return tuple(_releases(upstream, links.values()))


def _releases(upstream: Upstream, links: Iterable[Link]) -> list[Release]:
    """Put the files of one version together."""
    found: dict[Version, Release] = {}
    builds: dict[Version, tuple[Any, ...]] = {}
    for link in links:
        parsed = _parse(link.filename)
        if parsed is None:
            continue
        version, build = parsed
        release = found.setdefault(version, Release(version=str(version)))
        file = _file(link)
        if build is None:  # the sdist
            reason = (link.yank_reason or "no reason given") if link.is_yanked else None
            release = msgspec.structs.replace(release, sdist=file, yanked=reason)
        elif file is not None and (release.wheel is None or build > builds[version]):  # as pip
            builds[version] = build
            release = msgspec.structs.replace(release, wheel=file)
        found[version] = release
    return [found[version] for version in sorted(found)]


def _parse(name: str) -> tuple[Version, tuple[Any, ...] | None] | None:
    """Version and a wheel's build tag; None for a file that is no use here."""
    build: tuple[Any, ...] | None = None
    try:
        if name.endswith(".tar.gz"):
            version = parse_sdist_filename(name)[1]
        else:
            _, version, build, tags = parse_wheel_filename(name)
            if not any(_fits(tag.platform) for tag in tags):
                return None
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return None
    return None if version.local else (version, build)


def _fits(platform: str) -> bool:
    return platform == "any" or (platform.startswith("manylinux") and platform.endswith("x86_64"))


def _file(link: Link) -> File | None:
    """The file with its hash. A folder states none: there it is read."""
    stated = (link.hash_option or {}).get("sha256")
    try:
        if stated is None and link.is_file:
            from overlay.sources.download import file_sha256

            stated = [file_sha256(link.file_path)]
        if stated:
            return msgspec.convert({"file": link.filename, "sha256": stated[0].lower()}, File)
    except (OSError, msgspec.ValidationError):
        pass
    return None


def _stated(sources: Sources, upstream: Upstream, sdist: File, known: Sequence[Pin]) -> _Stated:
    names = known[0].generated if known else GENERATED[upstream]
    path = _folder(sources, upstream) / f"{sdist.sha256}.json"
    kept: _Stated | None = _read(path, _Stated)
    if kept is not None and set(kept.generated) <= set(names):
        return kept
    from overlay.sources.archive import read_archive

    archive = sources.fetch(upstream, sdist)
    with sources.report.progress(f"reading {sdist.file}"):
        stated = _look(read_archive(archive), upstream, sdist.file, names)
    _keep(path, stated)
    return stated


def _look(
    members: Iterable[Member], upstream: Upstream, file: str, names: Sequence[str]
) -> _Stated:
    """The commit that the archive states, and which of ``names`` it has. Reads all of it."""
    where, pattern = _STATED[upstream]
    commit: re.Match[bytes] | None = None
    there = set()
    for member in members:
        if member.path == where:
            commit = pattern.search(member.data)
        path = member.path.decode("utf-8", "surrogateescape")
        there |= {n for n in names if path == n or (n.endswith("/") and path.startswith(n))}
    if commit is None:
        raise SourceError(
            f"{file} does not state its commit",
            why=f"{where.decode()} is missing, or says none",
            fix="choose another version",
        )
    return _Stated(commit=commit[1].decode(), generated=tuple(n for n in names if n in there))


def _folder(sources: Sources, upstream: Upstream) -> Path:
    return sources.cache / "releases" / upstream


def _read(path: Path, kind: Any) -> Any:
    """What was kept, or None; one that is damaged is made again."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def _keep(path: Path, kept: tuple[Release, ...] | _Stated) -> None:
    with contextlib.suppress(OSError):  # it costs the next run time, and this one nothing
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, msgspec.json.encode(kept))


def _age(path: Path) -> float:
    return time.time() - path.stat().st_mtime
