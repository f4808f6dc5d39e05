"""A base tree whose missing contents are fetched when they are read.

A store that was filled from git holds trees, and of the contents only what a line's own series
touches. Who follows a file to its new name, or looks at files that no patch touches, needs more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlay.errors import GitError, UnavailableError
from overlay.patches.paths import quote_path
from overlay.sources.source import fetch_objects
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Collection

    from overlay.lines.line import Upstream
    from overlay.sources.source import Base, Sources
    from overlay.trees.match import Entry


class OnDemandTree:
    """The tree of a base (``overlay.trees.match.Tree``).

    ``missing`` is why the content of a file could not be had, if that happened.
    """

    def __init__(self, sources: Sources, upstream: Upstream, base: Base) -> None:
        self._sources, self._base = sources, base
        self._store = sources.store(upstream)
        self._tree = StoredTree(self._store.reader, base.commit.tree)
        self.missing: UnavailableError | None = None

    def get(self, path: bytes) -> Entry | None:
        """The file at ``path``, or None. Raises ``UnavailableError``, naming it, where offline."""
        try:
            return self._tree.get(path)
        except UnavailableError as error:
            place = self._tree.locate(path)
            if self._sources.offline or not self._base.url or place is None:
                self.missing = error
                raise
        try:
            with self._store.writing():
                fetch_objects(self._store, self._base.url, [place[1]], self._sources.report)
        except GitError as error:
            self.missing = UnavailableError(
                f"the content of {quote_path(path)} (blob {place[1]}) can't be fetched",
                why=error.why,
                fix="try again, or use another --source",
            )
            raise self.missing from None
        return self._tree.get(path)

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        """Whether any file lies below ``path``, those of ``without`` left out."""
        return self._tree.is_folder(path, without=without)
