"""Moves an alias, such as ``infernal`` or ``latest``, to a published image.

Only here, only on demand, and only to what the key has signed under that very tag. An alias is
the one kind of tag that may be replaced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import ImageError, PublishError
from overlay.images.tag import parse_tag

if TYPE_CHECKING:
    from collections.abc import Collection

    from overlay.images.imagelist import Published
    from overlay.images.registry import Registry
    from overlay.images.signing import Verifier

_ALIAS = re.compile(r"[a-z][a-z0-9]*(?:[._-][a-z0-9]+)*\Z")
_MAX_ALIAS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoted:
    """An alias that was moved.

    Attributes:
        alias, tag: the alias, and the tag that it stands for now.
        before: digest that it named; "" where it is new.
        digest: that it names now.
    """

    alias: str
    tag: str
    before: str
    digest: str


def promote(
    image: Published, alias: str, registry: Registry, verifier: Verifier, lines: Collection[str]
) -> Promoted:
    """Let ``alias`` name a published image, after its signature holds.

    Args:
        image: entry of ``images.toml``.
        alias: a word that is no tag of the grammar.
        registry: where the image is.
        verifier: of the key that it must be signed by.
        lines: codenames; such an alias takes images of its own line alone.

    Raises:
        PublishError: no alias; or the registry has another image under the tag, or none.
        SignatureError: unsigned, signed by another key, or as another tag.
    """
    _check_alias(alias, image, lines)
    there = registry.digest(image.tag)
    if there != image.digest:
        raise PublishError(
            f"{registry.repository.tagged(image.tag)} isn't what was published",
            why=f"published {image.digest}, there now: {there or 'no such tag'}",
            fix="find out who changed the registry before anything is promoted from it",
        )
    verifier.verify(image.digest, image.tag)
    before = registry.digest(alias)
    if before != image.digest:
        registry.put_tag(image.digest, alias)
    after = registry.digest(alias)
    if after != image.digest:
        raise PublishError(
            f"{alias} doesn't name {image.tag}: somebody else moves it now",
            why=f"set to {image.digest}, read back {after or 'nothing'}",
            fix="agree on who promotes, then run it again",
        )
    return Promoted(alias=alias, tag=image.tag, before=before or "", digest=image.digest)


def _check_alias(alias: str, image: Published, lines: Collection[str]) -> None:
    if _is_tag(alias):
        raise PublishError(
            f"{alias} is a tag, and tags never move",
            fix="an alias is a word of its own, such as 'latest' or the line's codename",
        )
    if not _ALIAS.match(alias) or len(alias) > _MAX_ALIAS or alias.startswith("sha256"):
        raise PublishError(
            f"{alias!r} can't be an alias",
            why=f"an alias begins with a letter and has up to {_MAX_ALIAS} of a-z, 0-9, and "
            "between them '.', '_' or '-'",
        )
    if alias in lines and alias != image.line:
        raise PublishError(
            f"alias {alias} is for images of the line {alias}", why=f"{image.tag} is {image.line}"
        )


def _is_tag(text: str) -> bool:
    try:
        parse_tag(text)
    except ImageError:
        return False
    return True
