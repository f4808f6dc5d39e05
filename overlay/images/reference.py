"""Names in a registry: repositories, and images in them by tag or digest.

What a user, a file or a registry says is checked here before it gets near a command line: no
option, no path, no credentials, no upper case that a registry would refuse later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from overlay.errors import PublishError

DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")  # the OCI distribution specification's
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = re.compile(rf"{_PART}(?:/{_PART})*\Z")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-f:.]+\])(?::([0-9]{{1,5}}))?\Z")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::[0-9]+)?\Z")
_MAX_LENGTH = 255  # of host and path together: beyond, some registries cut
_EXAMPLE = "write it as REGISTRY/REPOSITORY, such as ghcr.io/owner/vllm or 127.0.0.1:5000/vllm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A repository of a registry.

    Attributes:
        host: with its port, where it has one.
        path: below the host.
        plain_http: it is spoken to without TLS: on loopback, or because somebody asked for it.
    """

    host: str
    path: str
    plain_http: bool

    def __str__(self) -> str:
        return f"{self.host}/{self.path}"

    def at(self, digest: str) -> str:
        """An image of this repository by its digest."""
        return f"{self}@{checked_digest(digest)}"

    def tagged(self, tag: str) -> str:
        """An image of this repository by a tag."""
        return f"{self}:{checked_tag(tag)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An image: a repository, and a tag or a digest in it; exactly one of the two isn't empty."""

    repository: Repository
    tag: str = ""
    digest: str = ""

    def __str__(self) -> str:
        name = self.repository
        return name.at(self.digest) if self.digest else name.tagged(self.tag)


def parse_repository(text: str, *, insecure: bool = False) -> Repository:
    """Read ``REGISTRY/REPOSITORY``.

    Args:
        text: what somebody wrote.
        insecure: plain HTTP is all right for any host, not for loopback only.
    """
    host, slash, path = text.partition("/")
    if "@" in host:
        raise _malformed(text, "no user and no password belong in it: log in with 'oras login'")
    found = _HOST.match(host)
    if text.startswith("-") or "://" in text or not slash:
        raise _malformed(text, "a registry's host and a path, with no scheme and no options")
    if not found or (host != "localhost" and not any(sign in host for sign in ".:")):
        raise _malformed(text, f"{host!r} is no host of a registry (lower case, a dot or a port)")
    if found.group(1) and not 0 < int(found.group(1)) < 65536:
        raise _malformed(text, f"{found.group(1)} is no port")
    if not _PATH.match(path):
        raise _malformed(
            text, f"{path!r} is no path of a repository: lower case, parts between slashes, no tag"
        )
    if len(text) > _MAX_LENGTH:
        raise _malformed(text, f"{len(text)} characters are more than {_MAX_LENGTH}")
    return Repository(host=host, path=path, plain_http=insecure or bool(_LOOPBACK.match(host)))


def parse_reference(text: str, *, insecure: bool = False) -> Reference:
    """Read ``REGISTRY/REPOSITORY:TAG`` or ``REGISTRY/REPOSITORY@sha256:...``."""
    name, at, digest = text.rpartition("@")
    if at and "@" not in name and digest.startswith("sha256:"):
        repository = parse_repository(name, insecure=insecure)
        return Reference(repository=repository, digest=checked_digest(digest))
    head, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        raise _malformed(text, "it names neither a tag nor a digest")
    return Reference(repository=parse_repository(head, insecure=insecure), tag=checked_tag(tag))


def is_loopback(repository: Repository) -> bool:
    """Whether the registry is on this machine."""
    return bool(_LOOPBACK.match(repository.host))


def checked_digest(text: str) -> str:
    """``text`` if it is the digest of an image, else a refusal."""
    if not DIGEST.match(text):
        raise PublishError(
            f"{_shown(text)} is no digest", why="a digest is sha256: and 64 hex digits, lower case"
        )
    return text


def checked_tag(text: str) -> str:
    """``text`` if it can be a tag, else a refusal."""
    if not TAG.match(text):
        raise PublishError(
            f"{_shown(text)} is no tag",
            why="a tag has 1 to 128 letters, digits, '_', '.' and '-', and begins with none of "
            "the last two",
        )
    return text


def _malformed(text: str, why: str) -> PublishError:
    return PublishError(f"{_shown(text)} is no repository", why=why, fix=_EXAMPLE)


def _shown(text: str) -> str:
    """As a refusal quotes it: what stands before an '@' in a host may be a password."""
    _, at, rest = text.partition("@")
    if at and not rest.startswith("sha256:"):
        text = f"...@{rest}"
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
