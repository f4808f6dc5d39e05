"""Sets a tag that must be nobody else's: between publishers who don't know of each other.

A registry's tag is a register that the last writer wins; there is no compare-and-swap. So:

1. read the tag; go on only where there is none;
2. write it, within ``WINDOW`` seconds of the reading, or give up;
3. wait ``settle`` seconds, longer than that window;
4. read it again: whose digest is there has won.

Suppose A was told that it won, and B overwrote A later than A's second reading. Then B wrote more
than ``settle`` after A did, and B's first reading was at most ``WINDOW`` before its writing, so
after A's: B saw A's tag, and did not write. So nobody who was told that it won is overwritten, and
who is overwritten is told so. What this stands on: a registry whose readings follow its writings,
and that doesn't carry out a request later than its sender gave up on it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import UnavailableError

if TYPE_CHECKING:
    from overlay.images.registry import Registry

SETTLE = 6.0
_SHARE = 0.8  # of ``settle``: the window. The rest is for clocks, and for killing a program


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """How an attempt ended.

    Attributes:
        won: the tag names our digest, and nobody can replace it unseen.
        digest: that the tag names now; "" where it names none.
    """

    won: bool
    digest: str


def claim(registry: Registry, tag: str, digest: str, *, settle: float = SETTLE) -> Claim:
    """Let ``tag`` name ``digest``, unless it names something already.

    Raises:
        UnavailableError: it isn't known whether the tag was set. Doing it again is safe.
    """
    began = time.monotonic()
    there = registry.digest(tag)
    if there not in (None, digest):
        return Claim(won=False, digest=there or "")
    left = settle * _SHARE - (time.monotonic() - began)
    if there is None:
        if left <= 0:
            raise _too_slow(registry, tag, settle)
        registry.put_tag(digest, tag, timeout=left)
    return settled(registry, tag, digest, settle=settle)


def settled(registry: Registry, tag: str, digest: str, *, settle: float = SETTLE) -> Claim:
    """Whether a tag that names ``digest`` still does when nobody can be writing any more."""
    time.sleep(settle)
    there = registry.digest(tag)
    return Claim(won=there == digest, digest=there or "")


def _too_slow(registry: Registry, tag: str, settle: float) -> UnavailableError:
    return UnavailableError(
        f"{registry.repository.host} took too long to say whether {tag} is there",
        why=f"a tag must be read and written within {settle * _SHARE:.1f} s, or another "
        "publisher could be overwritten; nothing was set",
        fix="run it again, with a longer --settle (every publisher to this repository the same)",
    )
