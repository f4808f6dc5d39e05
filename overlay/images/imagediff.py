"""What changed between two images: pins, patches, packages, base and layers.

Each side is read from a layout on disk or from a registry. Packages and the content of patches
come from the layers of a layout, and from the statements beside an image in a registry; those are
read, not verified.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from overlay.errors import ImageError, PublishError
from overlay.images.labels import read_labels
from overlay.images.provenance import effect_id
from overlay.images.sbom import packages
from overlay.images.signing import downloaded
from overlay.lines.line import UPSTREAMS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlay.images.labels import Labels
    from overlay.images.oci import Image
    from overlay.images.registry import Registry

_RECORD, _METADATA = ".dist-info/overlay.json", ".dist-info/METADATA"
_MAX_MEMBER = 16 << 20  # bytes of a record or METADATA


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One image, as far as it can be known.

    Attributes:
        name: as it was asked for.
        labels: what it claims.
        layers: digest and bytes of each, from the base up.
        packages: versions by name, such as ``pypi/vllm``; None where nothing says.
        effects: by ``vllm/NAME``, what each patch does, as one hash; None where nothing says.
    """

    name: str
    digest: str
    labels: Labels
    layers: tuple[tuple[str, int], ...]
    packages: Mapping[str, str] | None
    effects: Mapping[str, str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One difference: what kind of thing, its name, how it was and is; "" where it isn't."""

    kind: str
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDiff:
    """What changed.

    Attributes:
        rows: sorted by kind, in the order of ``KINDS``.
        shared, download: bytes of the second image's layers that are in the first, and that
            aren't: what who has the first has to fetch.
        unknown: what could not be compared, and why.
    """

    rows: tuple[Row, ...]
    shared: int
    download: int
    unknown: tuple[str, ...]


def facts_of_layout(name: str, image: Image, *, sbom: Mapping[str, Any] | None = None) -> Facts:
    """Facts of an image on disk: packages and patches are looked for in its layers."""
    found: dict[str, str] = {}
    effects: dict[str, str] = {}
    for entry in image.files():
        if not entry.path.endswith((_RECORD, _METADATA)) or not 0 < entry.size <= _MAX_MEMBER:
            continue
        data = entry.read()
        if entry.path.endswith(_METADATA):
            project, version = _project(data)
            found[f"pypi/{project}"] = version
        else:
            effects |= _record_effects(data)
    return Facts(
        name=name,
        digest=image.digest,
        labels=read_labels(image.labels),
        layers=tuple((layer.digest, layer.size) for layer in image.layers),
        packages=packages(sbom) if sbom is not None else found,
        effects=effects or None,
    )


def facts_of_remote(name: str, registry: Registry, digest: str) -> Facts:
    """Facts of an image in a registry, without downloading its layers."""
    image = registry.image(digest)
    where = (registry.repository, registry.tools, digest)
    sbom = downloaded(*where, "cyclonedx")
    made = downloaded(*where, "slsaprovenance1")
    try:
        labels = read_labels(image.labels)
    except ImageError as error:
        raise PublishError(f"{name}: {error.what}", why=error.why, fix=error.fix) from None
    return Facts(
        name=name,
        digest=digest,
        labels=labels,
        layers=tuple((layer.digest, layer.size) for layer in image.layers),
        packages=packages(sbom) if sbom is not None else None,
        effects=_stated_effects(made),
    )


def compare_images(before: Facts, after: Facts) -> ImageDiff:
    """What ``after`` is that ``before`` isn't, and the other way round."""
    rows = [*_settings(before.labels, after.labels), *_patches(before, after)]
    unknown = []
    if before.packages is None or after.packages is None:
        unknown.append("packages: an image in a registry without an SBOM has to be pulled first")
    else:
        only = _comparable(before.packages, after.packages)
        rows += _changes("package", *only)
    if before.effects is None or after.effects is None:
        unknown.append("content of patches of one name: no provenance says what they do")
    rows += _layers(before.layers, after.layers)
    have = {digest for digest, _ in before.layers}
    new = {digest: size for digest, size in after.layers if digest not in have}
    total = dict(after.layers)
    return ImageDiff(
        rows=tuple(rows),
        shared=sum(total.values()) - sum(new.values()),
        download=sum(new.values()),
        unknown=tuple(unknown),
    )


def _settings(before: Labels, after: Labels) -> Iterator[Row]:
    """What the labels say in a word: pins and versions."""
    for upstream in UPSTREAMS:
        pins = [f"{one.version} ({one.commit})" for one in
                (before.upstream(upstream), after.upstream(upstream))]  # fmt: skip
        if pins[0] != pins[1]:
            yield Row(kind="pin", name=upstream, before=pins[0], after=pins[1])
    for name in ("line", "digest", "contents", "torch", "torch_cuda", "cuda", "python", "driver",
                 "base", "requirements", "kernels", "source"):  # fmt: skip
        old, new = str(getattr(before, name)), str(getattr(after, name))
        if old != new:
            yield Row(kind="base" if name == "base" else "label", name=name, before=old, after=new)
    old, new = (" ".join(one.architectures) for one in (before, after))
    if old != new:
        yield Row(kind="label", name="architectures", before=old, after=new)


def _patches(before: Facts, after: Facts) -> Iterator[Row]:
    """Added, dropped, and of one name but with other effect."""
    for upstream in UPSTREAMS:
        old = before.labels.upstream(upstream).patches
        new = after.labels.upstream(upstream).patches
        for patch in (*old, *(each for each in new if each not in old)):
            name = f"{upstream}/{patch}"
            if patch not in new:
                yield Row(kind="patch", name=name, before="there", after="")
            elif patch not in old:
                yield Row(kind="patch", name=name, before="", after="there")
            elif before.effects is not None and after.effects is not None:
                ids = [(one.get(name) or "unknown")[:12] for one in (before.effects, after.effects)]
                if ids[0] != ids[1]:
                    yield Row(kind="patch", name=name, before=ids[0], after=ids[1])


def _comparable(
    before: Mapping[str, str], after: Mapping[str, str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Where one side knows Python's packages alone, only those can be held against the other's."""
    kinds = {key.partition("/")[0] for key in before} & {key.partition("/")[0] for key in after}
    old, new = (
        {key: value for key, value in each.items() if key.partition("/")[0] in kinds}
        for each in (before, after)
    )
    return old, new


def _changes(kind: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[Row]:
    return [
        Row(kind=kind, name=key, before=before.get(key, ""), after=after.get(key, ""))
        for key in sorted(before.keys() | after.keys())
        if before.get(key, "") != after.get(key, "")
    ]


def _layers(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> Iterator[Row]:
    old, new = dict(before), dict(after)
    for digest, size in old.items():
        if digest not in new:
            yield Row(kind="layer", name=digest[:19], before=f"{size} bytes", after="")
    for digest, size in new.items():
        if digest not in old:
            yield Row(kind="layer", name=digest[:19], before="", after=f"{size} bytes")


def _project(metadata: bytes) -> tuple[str, str]:
    """Name and version of a METADATA file's head."""
    head = metadata.decode("utf-8", "replace").partition("\n\n")[0]
    fields = dict(line.partition(": ")[::2] for line in reversed(head.splitlines()))
    return canonicalize_name(fields.get("Name", "").strip()), fields.get("Version", "").strip()


def _record_effects(record: bytes) -> dict[str, str]:
    """What each patch of a wheel's record does."""
    try:
        series = json.loads(record)["series"]
        return {
            f"{upstream}/{patch['name']}": effect_id(patch["effect"])
            for upstream in UPSTREAMS
            for patch in series[upstream]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ImageError("a record in the image can't be read", why=str(error)) from None


def _stated_effects(predicate: Mapping[str, Any] | None) -> dict[str, str] | None:
    try:
        stated = (predicate or {})["buildDefinition"]["internalParameters"]["patches"]
        return {
            f"{upstream}/{name}": str(value)
            for upstream in UPSTREAMS
            for name, value in stated[upstream].items()
        }
    except (KeyError, TypeError, AttributeError):
        return None
