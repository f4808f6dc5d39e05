"""An image that is to be published, held against the line that it claims to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import PublishError
from overlay.images.labels import read_labels
from overlay.images.oci import read_layout
from overlay.images.reference import is_loopback
from overlay.images.requirements import lock_path, read_requirements
from overlay.images.tag import make_tag
from overlay.lines.lock import read_lock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from overlay.images.labels import Labels
    from overlay.images.oci import Image
    from overlay.images.reference import Repository
    from overlay.images.tag import Tag
    from overlay.lines.line import Line
    from overlay.lines.lock import Lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An image, what it claims, and the line in that very state."""

    image: Image
    labels: Labels
    line: Line
    lock: Lock
    tag: Tag


def read_candidate(
    layout: Path, find_line: Callable[[str], Line], to: Repository, date: str
) -> Candidate:
    """Read an OCI layout, and refuse what can't be published to ``to``.

    Args:
        layout: its folder; every blob is held against its digest.
        find_line: reads a line by its name.
        to: where it is to go.
        date: of its tag, ``yyyymmdd``.

    Raises:
        ImageError: no layout, another platform, or no labels of ours.
        PublishError: built from another state of the line, or for a test.
    """
    image = read_layout(layout)
    labels = read_labels(image.labels)
    line = find_line(labels.line)
    lock = read_lock(line)
    if lock is None or lock.digest != labels.digest:
        raise PublishError(
            f"{layout} was built from another state of {line.name}",
            why=f"its labels say {labels.digest}, lock.toml {lock.digest if lock else 'nothing'}",
            fix=f"build it anew (nox -s image -- {line.name}), or check out the commit that it "
            f"was built from: {labels.source or 'unknown'}",
        )
    if read_requirements(lock_path(line)).sha256 != labels.requirements:
        raise PublishError(
            f"{layout} was built from another {lock_path(line).name} of {line.name}",
            fix=f"build it anew: nox -s image -- {line.name}",
        )
    _refuse_unfinished(labels, layout, to)
    tag = make_tag(
        line, lock.digest, date=date, revision=1, packages=tuple(labels.packages.items())
    )
    return Candidate(image=image, labels=labels, line=line, lock=lock, tag=tag)


def _refuse_unfinished(labels: Labels, layout: Path, to: Repository) -> None:
    """A registry on this machine takes anything: it is for tests."""
    if is_loopback(to):
        return
    if labels.contents != "full":
        raise PublishError(
            f"{layout} is an image for tests: what vLLM needs isn't in it",
            why=f"its label 'contents' says {labels.contents!r}",
            fix=f"build the full one: nox -s image -- {labels.line}",
        )
    if labels.is_dirty or not labels.source:
        raise PublishError(
            f"{layout} was built from what isn't committed",
            why="nobody could say later what it was built from",
            fix=f"commit, then build it anew: nox -s image -- {labels.line}",
        )
