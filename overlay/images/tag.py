"""Names of images: made from a line by one function, read back by another.

``<codename>-vllm<commit>-fi<commit>[-<package><version>...]-o<digest>-cu133-torch213-<date>-r<N>``.
The tags that the fork had before are read too. There vLLM's and b12x's ids are of git trees of an
integration branch, so that no commit has them; FlashInfer's is of a commit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from packaging.version import InvalidVersion, Version

from overlay.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from overlay.lines.line import Line

Meaning = Literal["commit", "tree", "version", "digest"]

MAX_LENGTH = 128
"""Characters that Docker and the OCI distribution specification allow in a tag."""

_CODENAME = r"(?P<codename>[a-z][a-z0-9]*(?:-[a-z][a-z0-9]*)*?)"
_END = (
    r"-cu(?P<cuda>[0-9]{2,4})-torch(?P<torch>[0-9]{2,4})"
    r"-(?P<date>[0-9]{8})-r(?P<revision>[1-9][0-9]{0,5})"
)
_OURS = re.compile(
    rf"{_CODENAME}-vllm(?P<vllm>[0-9a-f]{{7}})-fi(?P<flashinfer>[0-9a-f]{{7}})"
    rf"(?P<packages>(?:-[a-z0-9_]+[a-z_][0-9][0-9a-z.]*)*)-o(?P<digest>[0-9a-f]{{8}}){_END}\Z"
)
_FORKS = re.compile(
    rf"{_CODENAME}-vllm(?P<vllm>[0-9a-f]{{7}})(?:-b12x(?P<b12x>[0-9a-f]{{7}}))?"
    rf"-fi(?P<flashinfer>[0-9a-f]{{7}}){_END}\Z"
)
_PACKAGE = re.compile(r"(?P<name>[a-z0-9_]*[a-z_])(?P<version>[0-9][0-9a-z.]*)\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """What a tag says.

    Attributes:
        vllm, flashinfer: ids of 7 hex digits.
        packages: name and version of extra packages, or the id where the fork gave one.
        digest: first 8 digits of the line's digest; empty in the fork's tags.
        cuda, torch: major and minor version without the dot, such as ``133``.
        date: ``yyyymmdd``.
        revision: N of ``rN``, from 1.
        meanings: what each id is, by ``vllm``, ``flashinfer`` and a package's name.
    """

    codename: str
    vllm: str
    flashinfer: str
    packages: tuple[tuple[str, str], ...]
    digest: str
    cuda: str
    torch: str
    date: str
    revision: int

    @property
    def is_forks(self) -> bool:
        """Whether it has the form that the fork's tags had before this project."""
        return not self.digest

    @property
    def meanings(self) -> Mapping[str, Meaning]:
        """What each id is."""
        packages: Meaning = "tree" if self.is_forks else "version"
        found: dict[str, Meaning] = {
            "vllm": "tree" if self.is_forks else "commit",
            "flashinfer": "commit",
            **dict.fromkeys((name for name, _ in self.packages), packages),
        }
        return found if self.is_forks else {**found, "digest": "digest"}

    def __str__(self) -> str:
        packages = "".join(f"-{name.replace('-', '_')}{version}" for name, version in self.packages)
        ids = (
            f"vllm{self.vllm}{packages}-fi{self.flashinfer}"
            if self.is_forks
            else f"vllm{self.vllm}-fi{self.flashinfer}{packages}-o{self.digest}"
        )
        return f"{self.codename}-{ids}-cu{self.cuda}-torch{self.torch}-{self.date}-r{self.revision}"


def make_tag(
    line: Line,
    digest: str,
    *,
    date: str,
    revision: int,
    packages: Iterable[tuple[str, str]] = (),
) -> Tag:
    """The tag of an image of a line.

    Args:
        line: whose pins and settings go in.
        digest: of the line, 64 hex digits.
        date: ``yyyymmdd``.
        revision: N of ``rN``; belongs to publishing alone.
        packages: name and version of each extra package in the image.

    Raises:
        ImageError: it would be no tag, or could not be read back.
    """
    made = Tag(
        codename=line.name,
        vllm=line.settings.vllm.commit_text[:7],
        flashinfer=line.settings.flashinfer.commit_text[:7],
        packages=tuple(packages),
        digest=digest[:8],
        cuda=_digits(line.settings.cuda),
        torch=_digits(line.settings.torch),
        date=date,
        revision=revision,
    )
    if parse_tag(str(made)) != made:
        raise ImageError(
            f"{made} could not be read back",
            why="a package's name and version can't be told from each other",
            fix="leave that package out of [image.packages] in line.toml",
        )
    return made


def parse_tag(text: str) -> Tag:
    """Read a tag, ours or the fork's.

    Raises:
        ImageError: it has neither form, or is no tag at all.
    """
    if len(text) > MAX_LENGTH:
        raise ImageError(
            f"{text[:40]!r}... has {len(text)} characters",
            why=f"registries take tags of {MAX_LENGTH}",
            fix="shorten the codename, or carry fewer extra packages",
        )
    match = _OURS.match(text) or _FORKS.match(text)
    if match is None or not _is_date(match["date"]):
        raise ImageError(
            f"{text!r} is no tag of an image of ours",
            why="expected <codename>-vllm<7>-fi<7>[-<package><version>...]-o<8>-cu133-torch213-"
            "<yyyymmdd>-r<N>, or the fork's form with b12x<7> and without o<8>",
            fix="see 'vllm-overlay tag LINE' for one that is",
        )
    fields = match.groupdict()
    packages = (
        tuple(_package(part, text) for part in fields["packages"].split("-")[1:])
        if "packages" in fields
        else tuple((("b12x", fields["b12x"]),) if fields["b12x"] else ())
    )
    return Tag(
        codename=match["codename"],
        vllm=match["vllm"],
        flashinfer=match["flashinfer"],
        packages=packages,
        digest=fields.get("digest") or "",
        cuda=match["cuda"],
        torch=match["torch"],
        date=match["date"],
        revision=int(match["revision"]),
    )


def _package(part: str, text: str) -> tuple[str, str]:
    """Name and version: the shortest name after which a version in normal form follows."""
    for end in range(1, len(part)):
        match = _PACKAGE.match(part)
        name, version = part[:end], part[end:]
        if match and (name[-1].isalpha() or name[-1] == "_") and _is_version(version):
            return name.replace("_", "-"), version
    raise ImageError(f"{part!r} in the tag {text!r} is no package with a version")


def _is_version(text: str) -> bool:
    try:
        return text[0].isdigit() and str(Version(text)) == text
    except InvalidVersion:
        return False


def _is_date(text: str) -> bool:
    try:
        return datetime.strptime(text, "%Y%m%d").strftime("%Y%m%d") == text
    except ValueError:
        return False


def _digits(version: str) -> str:
    return "".join(version.split(".")[:2])
