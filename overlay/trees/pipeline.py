"""The way from a line to its patched trees, as every verb goes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlay.lines.line import UPSTREAMS, Line, Upstream
from overlay.lines.lock import Lock, read_lock
from overlay.trees.apply import Patched, apply_series

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlay.sources.source import Sources


def apply_line(
    line: Line,
    sources: Sources,
    *,
    upstreams: Sequence[Upstream] = UPSTREAMS,
    use_states: bool = True,
) -> dict[Upstream, Patched]:
    """Base trees and patched trees of a line; bad verdicts are in them, not raised."""
    lock = read_lock(line)
    return {
        upstream: _apply(line, upstream, sources, lock, use_states=use_states)
        for upstream in upstreams
    }


def _apply(
    line: Line, upstream: Upstream, sources: Sources, lock: Lock | None, *, use_states: bool
) -> Patched:
    known = lock.known_trees(upstream) if lock else {}
    base = sources.base(line, upstream, known)
    store = sources.store(upstream)
    tree = apply_series(store, base.commit, line.series[upstream], use_states=use_states)
    return Patched(base=base, tree=tree, store=store)
