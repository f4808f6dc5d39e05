"""What a wheel says about itself: ``RECORD``, ``METADATA``, version files, and our record.

Rewriting is by line: what isn't named stays as it is, byte for byte.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.metadata import parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from overlay.errors import SourceError, WheelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RECORD_MEMBER = "overlay.json"
"""Name of the provenance record inside the dist-info folder."""

_DIGITS = re.compile(r"[A-Za-z0-9_-]+")
_LENGTHS = {"sha256": 43, "sha384": 64, "sha512": 86}  # characters, base64 without padding


@dataclass(frozen=True, slots=True)
class Row:
    """One line of ``RECORD``; hash and size are empty where the file can't state them."""

    path: str
    hash: str
    size: str


def row(path: str, data: bytes) -> Row:
    """Return the line of ``RECORD`` for a file's content."""
    return Row(path, "sha256=" + unpadded(hashlib.sha256(data).digest()), str(len(data)))


def unpadded(digest: bytes) -> str:
    """Return a digest the way ``RECORD`` writes it: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def read_record(data: bytes, label: str) -> dict[str, Row]:
    """Return the rows of a ``RECORD`` by path.

    Raises:
        WheelError: not UTF-8 or CSV of three columns, a path twice, a weak or malformed hash.
    """
    rows: dict[str, Row] = {}
    try:
        lines = list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise WheelError(f"the RECORD of {label} can't be read", why=str(error)) from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if len(line) != 3:
            raise WheelError(f"line {number} of the RECORD of {label} has {len(line)} columns")
        entry = Row(*line)
        if entry.path in rows:
            raise WheelError(f"the RECORD of {label} lists {entry.path} twice")
        if entry.hash:
            algorithm, _, value = entry.hash.partition("=")
            if len(value) != _LENGTHS.get(algorithm) or not _DIGITS.fullmatch(value):
                raise WheelError(
                    f"the RECORD of {label} has no usable hash for {entry.path}",
                    why=f"It says {entry.hash!r}; wheels need sha256 or better.",
                )
        rows[entry.path] = entry
    return rows


def check_record(rows: Mapping[str, Row], sizes: Mapping[str, int], own: str, label: str) -> None:
    """Check that ``RECORD`` and members (name to size in bytes) name the same files.

    Args:
        rows: of the wheel's ``RECORD``.
        sizes: of its members, RECORD among them.
        own: the path of RECORD itself, the only one that has no hash.
        label: the wheel, for messages.

    Raises:
        WheelError: a member isn't listed, a listed file is missing, a hash is missing, or a
            size differs.
    """
    for name in sizes:
        if name not in rows:
            raise WheelError(f"the RECORD of {label} doesn't list its member {name}")
    for name, entry in rows.items():
        if name not in sizes:
            raise WheelError(f"the RECORD of {label} lists {name}, which it doesn't hold")
        if name != own and not entry.hash:
            raise WheelError(f"the RECORD of {label} has no hash for {name}")
        if name != own and entry.size not in ("", str(sizes[name])):
            raise WheelError(
                f"the RECORD of {label} has a wrong size for {name}",
                why=f"It says {entry.size}; the member has {sizes[name]} bytes.",
            )


def format_record(rows: Iterable[Row]) -> bytes:
    """Return the bytes of a ``RECORD``."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows((entry.path, entry.hash, entry.size) for entry in rows)
    return out.getvalue().encode("utf-8")


def rewrite_metadata(data: bytes, *, version: str, requirements: Mapping[str, str]) -> bytes:
    """Return ``METADATA`` with another version, and the named requirements replaced.

    All other lines stay as they are.

    Args:
        data: the upstream's METADATA.
        version: the new version.
        requirements: canonical project name to the requirement that replaces that project's.

    Raises:
        WheelError: the version isn't stated exactly once, a project isn't required exactly
            once, or a replacement is no requirement on its project.
    """
    for project, text in requirements.items():
        _check_requirement(project, text)
    split = re.search(rb"\r?\n(?=\r?\n)", data)
    end = split.end() if split else len(data)
    counts = dict.fromkeys(("", *requirements), 0)
    out = bytearray()
    # a field is its line and the folded ones after it, which begin with a blank
    for field in re.findall(rb"[^\n]*\n?(?:[ \t][^\n]*\n?)*", data[:end]):
        name, _, value = field.partition(b":")
        new: str | None = None
        if name.lower() == b"version":
            counts[""] += 1
            new = version
        elif name.lower() == b"requires-dist":
            project = _project_of(value.decode("utf-8", "replace"))
            if project in requirements:
                counts[project] += 1
                new = requirements[project]
        if new is None:
            out += field
        else:
            out += name + b": " + new.encode("utf-8") + re.search(rb"\r?\n?\Z", field)[0]  # type: ignore[index]
    for project, count in counts.items():
        if count != 1:
            what = f"requires {project}" if project else "states a version"
            raise WheelError(
                f"the METADATA of the base wheel {what} {count} times, not once",
                fix="Name a requirement that the upstream has, or pin another wheel.",
            )
    result = bytes(out) + data[end:]
    _check_rewritten(data, result, version, requirements)
    return result


def _check_requirement(project: str, text: str) -> None:
    try:
        named = canonicalize_name(Requirement(text).name)
    except InvalidRequirement as error:
        raise WheelError(f"{text!r} is no requirement", why=str(error)) from error
    if named != project or not text.isprintable():
        raise WheelError(f"{text!r} can't replace the requirement on {project}")


def _project_of(text: str) -> str:
    try:
        return canonicalize_name(Requirement(" ".join(text.split())).name)  # it may be folded
    except InvalidRequirement:
        return ""  # older metadata has forms that today's grammar refuses; not ours to judge


def _check_rewritten(
    before: bytes, after: bytes, version: str, requirements: Mapping[str, str]
) -> None:
    """See by the packaging library's own parser that nothing else has changed."""
    old, old_rest = parse_email(before)
    new, new_rest = parse_email(after)
    expected: dict[str, Any] = dict(old) | {"version": version}
    if requirements:
        expected["requires_dist"] = [
            requirements.get(_project_of(text), text) for text in old.get("requires_dist", [])
        ]
    if dict(new) != expected or old_rest != new_rest:
        raise WheelError(
            "the METADATA of the base wheel can't be rewritten line by line",
            why="Parsed before and after, it differs in more than was asked for.",
        )


def requirements_of(metadata: bytes) -> dict[str, list[str]]:
    """Return the requirements that METADATA states, by canonical project name."""
    found: dict[str, list[str]] = {}
    for text in parse_email(metadata)[0].get("requires_dist", []):
        found.setdefault(_project_of(text), []).append(text)
    return found


def overlay_version(public: str, record: bytes) -> str:
    """Return the version of an overlay: ``<public>+<line>.o<first 8 digits of the digest>``.

    Args:
        public: the upstream's version.
        record: the provenance record, canonical JSON.

    Raises:
        WheelError: it would not be its own normal form, so installers would rename it.
    """
    try:
        line = json.loads(record)["line"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WheelError("the provenance record names no line", why=repr(error)) from error
    version = f"{public}+{line}.o{hashlib.sha256(record).hexdigest()[:8]}"
    try:
        normal = str(Version(version))
    except InvalidVersion:
        normal = "invalid"
    if normal != version:
        raise WheelError(
            f"{version} is no version in normal form",
            why=f"Its normal form is {normal}.",
            fix="Name the line with lower-case letters and digits, beginning with a letter.",
        )
    return version


def vllm_version_file(data: bytes, version: str, commit: str, built: str | None = None) -> bytes:
    """Return vLLM's ``_version.py`` with another version, as setuptools-scm would write it.

    The commit is the pin's: the version names the patches, the commit what they stand on.

    Args:
        data: the file in the upstream's wheel.
        version: the overlay's.
        commit: the pin's, in full or abbreviated.
        built: the commit that the wheel states, where the pin says that it is another one.

    Raises:
        SourceError: the file isn't of the known form, or states another commit or version.
    """
    label = "vllm/_version.py"
    stated = _stated(data, rb"^__commit_id__ = commit_id = '(g[0-9a-f]{7,40})'$", label)
    _check_commit(stated.removeprefix("g"), built or commit, label)
    if built is not None:
        data = data.replace(stated.encode(), f"g{commit[: len(stated) - 1]}".encode())
    parsed = Version(version)
    old = rb"^__version__ = version = '([^'\n]+)'$"
    _check_public(_stated(data, old, label), parsed, label)
    data = re.sub(old, b"__version__ = version = %b" % _quoted(version), data, flags=re.M)
    old = rb"^__version_tuple__ = version_tuple = (\([^\n]+\))$"
    before = _stated(data, old, label)
    fields = f"{before.removesuffix(')').removesuffix(',')}, {parsed.local!r})"
    return re.sub(
        old, b"__version_tuple__ = version_tuple = " + fields.encode("ascii"), data, flags=re.M
    )


def flashinfer_build_meta(
    data: bytes, version: str, commit: str, built: str | None = None
) -> bytes:
    """Return FlashInfer's ``_build_meta.py`` with the overlay's version and upstream's commit.

    The version goes in whole, local part and all, for what FlashInfer does with it:

    - Kernels compiled on demand are cached below a folder named for this version. Patched and
      unpatched sources, and two states of a line, so never share objects.
    - Import compares it with ``flashinfer-jit-cache`` where that is installed, and refuses, which
      is right: it holds kernels compiled from unpatched sources, which would be used instead of
      the patched ones.
    - Import compares it with ``flashinfer-cubin`` too. Those binaries come from no source that a
      patch can touch, so lines carry a patch (``cubin-version``) that compares public versions;
      without it, import refuses that companion as well.

    Stating the bare upstream version instead would satisfy both checks, and so let stale and
    prebuilt kernels shadow patched sources unnoticed.

    Args:
        data: the file in the upstream's wheel.
        version: the overlay's.
        commit: the pin's, in full or abbreviated.
        built: the commit that the wheel states, where the pin says that it is another one.

    Raises:
        SourceError: the file isn't of the known form, or states another commit or version.
    """
    label = "flashinfer/_build_meta.py"
    # 0.6.14 calls it a version, later ones a commit
    stated = _stated(data, rb'^__git_(?:commit|version)__ = "([0-9a-f]{7,40})"$', label)
    _check_commit(stated, built or commit, label)
    if built is not None:
        data = data.replace(stated.encode(), commit.encode())
    old = rb'^__version__ = "([^"\n]+)"$'
    _check_public(_stated(data, old, label), Version(version), label)
    return re.sub(old, f'__version__ = "{version}"'.encode("ascii"), data, flags=re.M)


def _quoted(text: str) -> bytes:
    return repr(text).encode("ascii")


def _stated(data: bytes, pattern: bytes, label: str) -> str:
    found = re.findall(pattern, data, flags=re.M)
    if len(found) != 1:
        raise SourceError(
            f"{label} of the base wheel isn't of the form this tool knows",
            why=f"It has {len(found)} lines like {pattern.decode('ascii')}, not one.",
            fix="Pin a wheel whose version file states version and commit.",
        )
    return str(found[0], "ascii", "replace")


def _check_commit(stated: str, commit: str, label: str) -> None:
    if len(commit) < 7 or not (commit.startswith(stated) or stated.startswith(commit)):
        raise SourceError(
            f"{label} of the base wheel states another commit than the pin",
            why=f"It says {stated}; the pin says {commit}.",
            fix="pin the wheel that was built from the pinned commit; or, where upstream's release "
            "is that wheel and its files are the pin's, say its commit in 'wheel.commit'",
        )


def _check_public(stated: str, version: Version, label: str) -> None:
    if stated != version.public or version.local is None:
        raise SourceError(
            f"{label} of the base wheel states version {stated}",
            why=f"An overlay called {version} stands on {version.public}.",
            fix="Pin the wheel of that version.",
        )
