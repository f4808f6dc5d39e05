"""Makes ``images.toml``'s entries of a repository again, from the registry's tags and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlay.errors import ImageError, PublishError
from overlay.images.imagelist import FILE, Published, read_images, record
from overlay.images.labels import read_labels
from overlay.images.publish import read_tag
from overlay.images.reference import is_loopback

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.images.registry import Registry
    from overlay.images.tag import Tag
    from overlay.report import Reporter


def relist(
    folder: Path, registry: Registry, report: Reporter
) -> tuple[tuple[Published, ...], list[str]]:
    """Write the list anew for one repository; all entries, and the tags that can't be listed.

    Raises:
        PublishError: a tag that is listed names another image now: nobody may do that.
    """
    tags = [(text, tag) for text in registry.tags() if (tag := read_tag(text)) is not None]
    found: list[Published] = []
    skipped: list[str] = []
    with report.progress(f"reading {len(tags)} images", len(tags)) as advance:
        for text, tag in tags:
            try:
                found.append(_entry(registry, text, tag))
            except (ImageError, PublishError) as error:
                report.say(f"not listed: {text}: {error.what}")
                skipped.append(text)
            advance(1)
    _refuse_moved(folder, registry, found)
    return record(folder, found, replace=str(registry.repository)), skipped


def _entry(registry: Registry, text: str, tag: Tag) -> Published:
    repository = registry.repository
    digest = registry.digest(text)
    if digest is None:
        raise PublishError("it went while it was read")
    image = registry.image(digest)
    labels = read_labels(image.labels)
    if (labels.line, labels.digest[:8]) != (tag.codename, tag.digest):
        raise PublishError(f"its labels are of {labels.line}, digest {labels.digest[:8]}")
    return Published(
        repository=str(repository),
        tag=text,
        digest=digest,
        line=labels.line,
        overlay=labels.digest,
        date=tag.date,
        size=image.size,
        plain_http=repository.plain_http and not is_loopback(repository),
    )


def _refuse_moved(folder: Path, registry: Registry, found: list[Published]) -> None:
    listed = {
        one.tag: one.digest
        for one in read_images(folder)
        if one.repository == str(registry.repository)
    }
    moved = [one for one in found if listed.get(one.tag, one.digest) != one.digest]
    if moved:
        raise PublishError(
            f"{len(moved)} published tags of {registry.repository} name other images now",
            why="\n".join(f"{one.tag}: was {listed[one.tag]}, is {one.digest}" for one in moved),
            fix=f"find out who moved them; to take the registry's word, delete them from {FILE} "
            "and run this again",
        )
