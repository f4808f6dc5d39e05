"""A release line as its folder says it: pins, build settings, series, patches.

Reads ``patches/<line>/line.toml``, ``<upstream>/series`` and the patch files. Nothing here
looks at a source or a store.
"""

from __future__ import annotations

import codecs
import difflib
import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from overlay.errors import LineError
from overlay.lines.upstreams import PROJECTS as PROJECTS
from overlay.lines.upstreams import UPSTREAMS as UPSTREAMS
from overlay.lines.upstreams import Upstream as Upstream
from overlay.patches.patch import NAME, SUFFIX, Patch, parse_patch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SourceKind = Literal["archive", "git"]

LINE_FILE, LOCK_FILE, SERIES_FILE = "line.toml", "lock.toml", "series"
REQUIREMENTS_FILE = "requirements.lock"
_T = TypeVar("_T")
CODENAME = re.compile(r"[a-z][a-z0-9]{0,31}\Z")

# What each pattern means, for people
_PATTERNS = {
    r"^[0-9a-f]{64}\Z": "a SHA-256: 64 hex digits",
    r"^[0-9a-f]{40}\Z": "a full git id: 40 hex digits",
    r"^[0-9a-f]{7,39}\Z": "an abbreviated git id: 7 to 39 hex digits",
    r"^[0-9][0-9A-Za-z.!]*\Z": "a version, such as 0.28.0",
    r"^(==|>=|<=|!=|~=|<|>)[0-9][0-9A-Za-z.,<>=!~*]*\Z": "a specifier, such as ==0.28.0",
    r"^[0-9]{1,2}\.[0-9][af]?\Z": "an architecture, such as 12.0a",
    r"^3\.[0-9]{1,2}\Z": "a Python version, such as 3.11",
    r"^[A-Za-z0-9][A-Za-z0-9._+-]*\Z": "the name of a file, without folders",
    r"^(https?|ssh|git|file)://[^\s-][^\s]*\Z": "a URL: http(s), ssh, git or file",
    r"^[A-Za-z0-9][A-Za-z0-9._/-]*\Z": "the name of a tag",
    r"^[a-z0-9][a-z0-9./:_-]*@sha256:[0-9a-f]{64}\Z": "an image by its digest: "
    "name:tag@sha256:<64 hex digits>",
}
(
    _SHA256, _ID, _ABBREVIATION, _VERSION, _SPECIFIER, _ARCH, _PYTHON, _FILE, _URL, _TAG, _BASE,
) = _PATTERNS  # fmt: skip
_Sha256 = Annotated[str, Meta(pattern=_SHA256)]
_Id = Annotated[str, Meta(pattern=_ID)]
_Version = Annotated[str, Meta(pattern=_VERSION)]
_Specifier = Annotated[str, Meta(pattern=_SPECIFIER)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a TOML file in which a misspelt key is an error."""


class File(Strict, frozen=True):
    """A release file on a package index: its name and the SHA-256 of its bytes."""

    file: Annotated[str, Meta(pattern=_FILE)]
    sha256: _Sha256


class Wheel(File, frozen=True):
    """Upstream's wheel.

    Attributes:
        commit: abbreviation that the wheel states, where it was built from another commit than
            the pin's. Its files must be the pin's all the same.
    """

    commit: Annotated[str, Meta(pattern=_ABBREVIATION)] | None = None


class Pin(Strict, frozen=True):
    """The exact upstream that a series stands on.

    Attributes:
        version: of the release, without a local part.
        repository: URL that git can fetch from.
        commit: full id; absent where only ``abbreviation`` is known, and then the
            archive's hash is the identity and git is not offered.
        abbreviation: of the commit, as the archive states it.
        tag: for people; git sources check that it still names ``commit``.
        tree: git tree id of the commit, where known. An archive without its ``generated``
            files must give the same id, if the archive holds the whole tree.
        sdist, wheel: release files.
        sources: kinds of source, in the order in which they are tried.
        generated: files of the archive that are no part of the commit.
    """

    version: _Version
    repository: Annotated[str, Meta(pattern=_URL)]
    sdist: File
    wheel: Wheel
    commit: _Id | None = None
    abbreviation: Annotated[str, Meta(pattern=_ABBREVIATION)] | None = None
    tag: Annotated[str, Meta(pattern=_TAG)] | None = None
    tree: _Id | None = None
    sources: tuple[SourceKind, ...] = ("archive", "git")
    generated: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.commit is None) == (self.abbreviation is None):
            raise ValueError("say either 'commit' (full) or 'abbreviation', not both")
        if not self.sources or len(set(self.sources)) < len(self.sources):
            raise ValueError("'sources' must name each kind at most once, and at least one")
        if self.commit is None and "git" in self.sources:
            raise ValueError("'sources' offers git, but without a full 'commit' git is no source")

    @property
    def commit_text(self) -> str:
        """The commit as far as it is known."""
        return self.commit or self.abbreviation or ""


class Requirement(Strict, frozen=True):
    """A requirement of upstream's vLLM wheel that ours replaces.

    Attributes:
        upstream: specifier in upstream's wheel; another one there is an error.
        line: specifier in its place. For a project that the line builds itself the wheel
            adds the local version, so that no resolver can prefer upstream's build.
    """

    upstream: _Specifier
    line: _Specifier


class Package(File, frozen=True):
    """A package that the line's image has beside vLLM and FlashInfer, as a wheel."""

    version: _Version


class ImageSettings(Strict, frozen=True):
    """What a line's image is made of, beside what the line is; no check depends on it.

    Attributes:
        base: image that it is built on, by digest.
        python: minor version of the base's Python.
        needs: requirements without which the line doesn't run, though nothing that is installed
            states them; looked for when the image is built.
        packages: extra ones, by project; the image's tag and labels name them.
    """

    base: Annotated[str, Meta(pattern=_BASE)]
    python: Annotated[str, Meta(pattern=_PYTHON)]
    needs: tuple[str, ...] = ()
    packages: dict[str, Package] = {}


class Settings(Strict, frozen=True):
    """``line.toml``.

    Attributes:
        format: of this file; 1.
        summary: one sentence for ``lines``.
        torch, cuda: exact versions that the line is built and run with.
        python: minor versions on which the patched trees must compile, oldest first.
        architectures: CUDA architectures that the line serves, as FlashInfer spells them.
        vllm, flashinfer: the pins.
        requirements: replaced in vLLM's wheel, by project name.
        image: the last table of the file; a line without it has no image.
    """

    format: Literal[1]
    summary: str
    python: tuple[Annotated[str, Meta(pattern=_PYTHON)], ...]
    torch: _Version
    cuda: _Version
    architectures: tuple[Annotated[str, Meta(pattern=_ARCH)], ...]
    vllm: Pin
    flashinfer: Pin
    requirements: dict[str, Requirement]
    image: ImageSettings | None = None

    def __post_init__(self) -> None:
        ours = self.requirements.get(PROJECTS["flashinfer"])
        if ours is None or ours.line != f"=={self.flashinfer.version}":
            raise ValueError(
                f"'requirements.{PROJECTS['flashinfer']}.line' must be "
                f"'=={self.flashinfer.version}', the version that the line builds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line and its patches, read and checked as far as text can be."""

    name: str
    folder: Path
    settings: Settings
    series: dict[Upstream, tuple[Patch, ...]]

    def pin(self, upstream: Upstream) -> Pin:
        """The pin of one upstream."""
        return self.settings.vllm if upstream == "vllm" else self.settings.flashinfer

    def patch(self, name: str) -> tuple[Upstream, Patch]:
        """The patch of that name, in whichever series; ``vllm/NAME`` says which."""
        wanted = name.removesuffix(SUFFIX)
        found = [
            (upstream, patch)
            for upstream in UPSTREAMS
            for patch in self.series[upstream]
            if wanted in (patch.name, f"{upstream}/{patch.name}")
        ]
        if len(found) == 1:
            return found[0]
        known = [patch.name for upstream in UPSTREAMS for patch in self.series[upstream]]
        raise LineError(
            f"line {self.name} has no patch {name!r}"
            if not found
            else f"{name!r} is in both series",
            fix=f"say vllm/{wanted} or flashinfer/{wanted}" if found else _suggest(wanted, known),
        )


def find_lines(root: Path) -> list[str]:
    """Names of all lines below ``root`` (the ``patches`` folder), sorted."""
    return sorted(path.parent.name for path in root.glob(f"*/{LINE_FILE}") if path.is_file())


def read_line(root: Path, name: str) -> Line:
    """Read one line. Raises ``LineError`` or ``PatchError``, naming file and key or line."""
    folder = root / name
    if not CODENAME.match(name) or not (folder / LINE_FILE).is_file():
        raise LineError(
            f"there is no line {name!r}",
            why=f"no file {root.name}/{name}/{LINE_FILE}",
            fix=_suggest(name, find_lines(root)),
        )
    settings = read_toml(folder / LINE_FILE, Settings)
    return Line(
        name=name,
        folder=folder,
        settings=settings,
        series={upstream: read_series(folder / upstream) for upstream in UPSTREAMS},
    )


def read_series(folder: Path) -> tuple[Patch, ...]:
    """The patches of one series in order; no folder or no file means none."""
    patches = []
    for name, at in series_names(folder / SERIES_FILE):
        path = folder / f"{name}{SUFFIX}"
        try:
            raw = read_file(path)
        except OSError as error:
            raise LineError(
                f"{folder.name}/{SERIES_FILE}:{at}: can't read {path.name}: {error.strerror}",
                fix="restore the file, or take the line out of the series",
            ) from None
        patches.append(parse_patch(raw, name=name))
    _check_names(patches, folder)
    return tuple(patches)


def series_names(path: Path) -> Iterator[tuple[str, int]]:
    """Patch names of a ``series`` file, each with its line number; ``#`` starts a comment."""
    where = f"{path.parent.name}/{path.name}"
    try:
        text = read_file(path).decode("utf-8")
    except FileNotFoundError:
        return
    except OSError as error:
        raise LineError(f"can't read {where}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LineError(f"{where} is not UTF-8 (byte {error.start})") from None
    seen: dict[str, int] = {}
    for at, line in enumerate(text.split("\n"), start=1):
        entry = re.sub(r"(^|\s)#.*", "", line).strip()
        if not entry:
            continue
        name = entry.removesuffix(SUFFIX)
        if not entry.endswith(SUFFIX) or not NAME.match(name):
            raise LineError(
                f"{where}:{at}: {entry!r} is no file name of a patch",
                why="expected lower-case letters, digits, '-', '_' or '.', then '.patch'; "
                "quilt's options after a name (such as -p0) are not supported",
            )
        if name in seen:
            raise LineError(f"{where}:{at}: {entry} is listed already, at line {seen[name]}")
        seen[name] = at
        yield name, at


def read_file(path: Path) -> bytes:
    """A file's content. Raises ``OSError``, also for what has no end, such as a pipe."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no regular file")
    return path.read_bytes()


def _check_names(patches: list[Patch], folder: Path) -> None:
    known: list[str] = []
    for patch in patches:
        for required in patch.requires:
            if required not in known:
                later = any(other.name == required for other in patches)
                raise LineError(
                    f"{folder.name}/{patch.name}: 'Requires: {required}' "
                    + ("comes later in the series" if later else "names no patch of the series"),
                    fix="put it before" if later else _suggest(required, known),
                )
        known.append(patch.name)


def read_toml(path: Path, kind: type[_T]) -> _T:
    """Decode a TOML file into ``kind``. Raises ``LineError`` naming file, key and expectation."""
    where = f"{path.parent.name}/{path.name}"
    try:
        return msgspec.toml.decode(read_file(path), type=kind)
    except OSError as error:
        raise LineError(f"can't read {where}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        key = at.strip("`.") or "top level"
        raise LineError(
            f"{where}: {key}: {_in_words(message)}", fix=_known_keys(message, key, kind)
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LineError(f"{where} is no TOML: {error}", fix=_toml_remedy(path)) from None


def _toml_remedy(path: Path) -> str:
    raw = path.read_bytes()
    if raw.startswith(codecs.BOM_UTF8):
        return "save it without a byte-order mark"
    if path.name == LOCK_FILE:  # after a merge with conflicts, say
        again = f"vllm-overlay lock {path.parent.name}"
        return f"delete it and run '{again}'; look at what git diff says then"
    return ""


def _in_words(message: str) -> str:
    """msgspec's message, with what a pattern means in place of the pattern."""
    pattern = re.search(r"`str` matching regex '(.+)'", message)
    words = _PATTERNS.get(pattern[1].replace("\\\\", "\\"), "") if pattern else ""
    if pattern and words:
        return f"expected {words}"
    return message[:1].lower() + message[1:]


def _known_keys(message: str, key: str, kind: type) -> str:
    """For an unknown key: the nearest one that exists, else the list."""
    unknown = re.search(r"unknown field `(.+?)`", message)
    if unknown is None:
        return ""
    for part in key.split("."):
        field = next((f for f in msgspec.structs.fields(kind) if f.name == part), None)
        if field is not None and isinstance(field.type, type):
            kind = field.type
    return _suggest(unknown[1], [f.name for f in msgspec.structs.fields(kind)])


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(known)}" if known else ""
