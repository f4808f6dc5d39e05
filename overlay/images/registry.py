"""What a repository of a registry holds, and what is put there: by oras.

Everything is asked for by digest where a digest is known, and checked against it. A tag is the
registry's word alone: it is resolved to a digest once, and used no further.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlay.errors import PublishError
from overlay.images.reference import TAG, checked_digest
from overlay.images.tools import failure

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.images.reference import Repository
    from overlay.images.tools import Answer, Program, Tools

MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_MAX_DOCUMENT = 4 << 20  # of a manifest or an image's configuration, as registries limit them
_MAX_TAGS = 100_000
# Go's exit code for a defect: oras 1.2 has one where two uploads fail at once, each in another way
_PANIC = 2
_QUICK = 60.0  # seconds for what moves no content
_NOT_FOUND = re.compile(r": not found$|manifest unknown|name unknown|status code 404")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: its digest, and how many bytes it is to download."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """An image in a repository: what its manifest and configuration say.

    Attributes:
        digest: of the manifest.
        size: bytes to download: manifest, configuration and layers.
        layers: from the base up.
        config: the configuration, as JSON gives it.
    """

    digest: str
    size: int
    layers: tuple[Layer, ...]
    config: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the image; those that are no text are left out."""
        labels = (self.config.get("config") or {}).get("Labels") or {}
        return {str(k): v for k, v in labels.items() if isinstance(v, str)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """One repository, reached by ``tools``."""

    repository: Repository
    tools: Tools

    def tags(self) -> tuple[str, ...]:
        """All tags; none where there is no such repository yet."""
        answer = self._oras("repo", "tags", *self._http(), str(self.repository))
        if answer.code and _NOT_FOUND.search(answer.said):
            return ()
        lines = self._out(answer, f"can't list the tags of {self.repository}").splitlines()
        return tuple(sorted(tag for tag in lines[:_MAX_TAGS] if TAG.match(tag)))

    def digest(self, tag: str) -> str | None:
        """The digest that a tag names now; None where there is no such tag."""
        name = self.repository.tagged(tag)
        answer = self._oras("resolve", *self._http(), name)
        if answer.code and _NOT_FOUND.search(answer.said):
            return None
        return checked_digest(self._out(answer, f"can't resolve {name}").strip())

    def image(self, digest: str) -> Remote:
        """Manifest and configuration, each checked against its digest."""
        name = self.repository.at(digest)
        raw = self._document("fetch", name, digest)
        manifest = _object(raw, name)
        try:
            if manifest.get("mediaType", MANIFEST_TYPES[0]) not in MANIFEST_TYPES:
                raise ValueError(f"it is a {manifest['mediaType']}, not one image's manifest")
            config, layers = manifest["config"], manifest["layers"]
            found = [_layer(layer) for layer in layers]
            about = _layer(config)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PublishError(f"{name} is no manifest of an image", why=str(error)) from None
        if about.size > _MAX_DOCUMENT:
            raise PublishError(f"{name}: its configuration has {about.size} bytes")
        document = _object(
            self._document("fetch-config", name, about.digest), f"configuration of {name}"
        )
        size = len(raw) + about.size + sum(layer.size for layer in found)
        return Remote(digest=digest, size=size, layers=tuple(found), config=document)

    def push(self, layout: Path, digest: str) -> None:
        """Put the image of an OCI layout there, under its digest alone.

        What has arrived stays, so that a push that died half-way goes on where it was.
        """
        source = f"{layout.absolute()}@{checked_digest(digest)}"
        words = ("--no-tty", "--from-oci-layout", *self._http("--to-"))
        limit = self.tools.timeout
        answer = self._oras("cp", *words, source, str(self.repository), timeout=limit)
        if answer.code == _PANIC:
            words = ("--concurrency", "1", *words)
            answer = self._oras("cp", *words, source, str(self.repository), timeout=limit)
        self._out(answer, f"can't push {digest} to {self.repository}")

    def put_tag(self, digest: str, tag: str, *, timeout: float = _QUICK) -> None:
        """Let ``tag`` name ``digest``. Registries replace another meaning without a word."""
        name = self.repository.tagged(tag)
        answer = self._oras("tag", *self._http(), self.repository.at(digest), tag, timeout=timeout)
        self._out(answer, f"can't set {name}")

    def _document(self, verb: str, name: str, digest: str) -> bytes:
        """The manifest ``name`` or its configuration, which has ``digest``; oras limits both."""
        answer = self._oras("manifest", verb, *self._http(), name)
        self._out(answer, f"can't fetch {name}")
        found = f"sha256:{hashlib.sha256(answer.out).hexdigest()}"
        if found != digest:
            raise PublishError(
                f"{self.repository.host} gave other bytes for {digest}",
                why=f"they are {found}",
                fix="don't use this registry before somebody has looked at it",
            )
        return answer.out

    def _http(self, which: str = "--") -> tuple[str, ...]:
        return (f"{which}plain-http",) if self.repository.plain_http else ()

    def _oras(self, *argv: str, timeout: float = _QUICK) -> Answer:
        program: Program = "oras"
        return self.tools.run(program, *argv, timeout=min(timeout, self.tools.timeout))

    def _out(self, answer: Answer, what: str) -> str:
        if answer.code:
            raise failure(what, answer, self.repository.host)
        return answer.out.decode("utf-8", "replace")


def _object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise PublishError(f"{name} is no JSON", why=str(error)) from None
    if not isinstance(document, dict):
        raise PublishError(f"{name} is no JSON object")
    return document


def _layer(descriptor: dict[str, Any]) -> Layer:
    size = descriptor["size"]
    if not isinstance(size, int) or size < 0:
        raise ValueError(f"{size!r} is no size")
    return Layer(digest=checked_digest(str(descriptor["digest"])), size=size)
