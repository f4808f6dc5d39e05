"""``images.toml``: what was published, where, and under which digest.

One entry for each tag of a repository, sorted; it is committed. The registry is the authority: the
list can be made again from it, and an entry is never changed silently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tomli_w
from msgspec import Meta

from overlay.errors import PublishError
from overlay.files import locked, machine_errors, write_atomic
from overlay.images.reference import checked_tag, parse_repository

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE = "images.toml"
_HEAD = b"# What was published. 'publish' writes it; 'images --from' makes it again.\n"


class Published(
    msgspec.Struct, frozen=True, order=True, kw_only=True, forbid_unknown_fields=True,
    omit_defaults=True,
):  # fmt: skip
    """One published image.

    Attributes:
        repository: ``REGISTRY/REPOSITORY``.
        tag: the full one, of the grammar.
        digest: of the image's manifest.
        line: codename.
        overlay: the line's digest, 64 hex digits.
        date: of the tag, ``yyyymmdd``.
        size: bytes to download, all layers.
        plain_http: the registry was spoken to without TLS.
    """

    repository: str
    tag: str
    digest: Annotated[str, Meta(pattern=r"^sha256:[0-9a-f]{64}\Z")]
    line: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9]{0,31}\Z")]
    overlay: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    date: Annotated[str, Meta(pattern=r"^[0-9]{8}\Z")]
    size: Annotated[int, Meta(ge=0)]
    plain_http: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: Literal[1]
    image: list[Published] = []


def read_images(folder: Path) -> tuple[Published, ...]:
    """All that ``images.toml`` in ``folder`` lists; nothing where there is no such file."""
    path = folder / FILE
    try:
        found = tuple(msgspec.toml.decode(path.read_bytes(), type=_File).image)
        for one in found:
            checked_tag(one.tag)
            parse_repository(one.repository, insecure=one.plain_http)
    except FileNotFoundError:
        return ()
    except (msgspec.MsgspecError, ValueError, PublishError) as error:
        raise PublishError(
            f"{path} can't be read",
            why=str(error),
            fix="take it from git, or make it again: images --from REGISTRY/REPOSITORY",
        ) from None
    return found


def record(folder: Path, new: Iterable[Published], *, replace: str = "") -> tuple[Published, ...]:
    """Add entries to the list, which is written whole; all of it is returned.

    Args:
        folder: of the list.
        new: what was published; the same again changes nothing.
        replace: a repository all of whose entries give way to ``new``.

    Raises:
        PublishError: a tag is listed with another digest.
    """
    # The lock lies where nothing is committed
    with locked(folder / "dist" / f"{FILE}.lock"):
        kept = {
            (one.repository, one.tag): one
            for one in read_images(folder)
            if one.repository != replace
        }
        for one in new:
            listed = kept.setdefault((one.repository, one.tag), one)
            if listed.digest != one.digest:
                raise PublishError(
                    f"{folder / FILE} lists {one.tag} with another digest",
                    why=f"listed {listed.digest}, in {one.repository} now {one.digest}",
                    fix="find out who moved the tag; 'images --from' takes the registry's word",
                )
        listing = tuple(sorted(kept.values()))
        rows = msgspec.to_builtins(listing)
        data = _HEAD + tomli_w.dumps({"format": 1, "image": list(rows)}).encode()
        path = folder / FILE
        if listing or path.exists():
            with machine_errors(path, is_cache=False):
                if not path.exists() or path.read_bytes() != data:
                    write_atomic(path, data)
    return listing


def find_published(listing: Iterable[Published], tag: str, repository: str = "") -> Published:
    """The entry of a tag; ``repository`` says which, where several have it."""
    checked_tag(tag)
    found = [one for one in listing if one.tag == tag and repository in ("", one.repository)]
    if len(found) == 1:
        return found[0]
    if not found:
        where = f" to {repository}" if repository else ""
        raise PublishError(
            f"{tag} wasn't published{where}, as far as {FILE} knows",
            fix="see 'vllm-overlay images'; 'images --from REGISTRY/REPOSITORY' asks a registry",
        )
    raise PublishError(
        f"{tag} was published to {', '.join(one.repository for one in found)}",
        fix="say which with --to REGISTRY/REPOSITORY",
    )
