"""From a pin to a base tree in the store, and nothing but what the pin says.

A pin can be had as the release's archive, from git, or from a path that the user names. Kinds
are tried in the line's order; the next one only when a kind can't be had now. A source that
differs from its pin is refused and never replaced by another.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import GitError, SourceError, UnavailableError
from overlay.lines.line import PROJECTS, File, Line, Pin, Upstream
from overlay.patches.diff import EXECUTABLE, REGULAR, SYMLINK
from overlay.patches.paths import check_path, quote_path
from overlay.trees.store import (
    EPOCH,
    IDENTITY,
    Commit,
    FastImport,
    Store,
    StoredTree,
    WrongTreeError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlay.patches.patch import Patch
    from overlay.report import Reporter
    from overlay.sources.archive import Member
    from overlay.trees.git import ObjectReader

REMOTE = "pin"
# Blobs on demand: a tree of 6600 files is 1 MB, its contents 100 MB
_FETCH = (
    "--quiet", "--no-tags", "--no-write-fetch-head", "--recurse-submodules=no",
    "--filter=blob:none",
)  # fmt: skip


def promisor(url: str) -> tuple[str, ...]:
    """Switches that make ``REMOTE`` a promisor at ``url`` for one git command.

    Git filters only what a remote has promised to give later. The promise is not written to
    the store's configuration, where every reader would act on it: a missing blob must be seen
    as missing, and never be fetched behind our back.
    """
    values = {"url": url, "promisor": "true", "partialclonefilter": "blob:none"}
    return tuple(part for key, v in values.items() for part in ("-c", f"remote.{REMOTE}.{key}={v}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base tree that was checked against its pin.

    Attributes:
        commit: our commit of it.
        kind: ``archive``, ``git`` or ``path``.
        origin: what it was made from, for a person.
        url: the repository, if it came from git; contents may still have to be fetched.
    """

    commit: Commit
    kind: str
    origin: str
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """How the sources of one invocation are to be had.

    Attributes:
        cache: the cache folder.
        offline: never touch the network.
        choices: ``archive``, ``git`` or a path for each upstream; the line's own order for one
            that isn't named.
        report: for progress.
    """

    cache: Path
    report: Reporter
    offline: bool = False
    choices: Mapping[Upstream, str] = field(default_factory=dict)
    _stores: dict[Upstream, Store] = field(default_factory=dict, init=False, repr=False)

    def store(self, upstream: Upstream) -> Store:
        """The store of one upstream, one for the whole invocation."""
        if upstream not in self._stores:
            self._stores[upstream] = Store(self.cache, upstream)
        return self._stores[upstream]

    def base(self, line: Line, upstream: Upstream, known: Mapping[str, str]) -> Base:
        """The base tree of one upstream, imported if need be.

        Args:
            line: names the pin.
            upstream: which of its pins.
            known: tree ids that a lock promises for this pin, and where.
        """
        pin = line.pin(upstream)
        store = self.store(upstream)
        wanted = _Wanted(line, upstream, pin, store, self)
        choice = self.choices.get(upstream)
        if choice is None:
            base = wanted.in_order()
        elif choice in ("archive", "git"):
            base = wanted.kind(choice)
        else:
            base = wanted.path(Path(choice), known)
        wanted.check_tree(base)
        if base.url:
            wanted.blobs(base.commit, line.series[upstream], base.url)
        return base

    def refs(self, line: Line, upstream: Upstream) -> list[str]:
        """Refs that base commits of this pin have in the store, whatever they came from."""
        pin = line.pin(upstream)
        return list(_Wanted(line, upstream, pin, self.store(upstream), self).refs())

    def release(self, line: Line, upstream: Upstream) -> Path:
        """The pinned upstream wheel, downloaded if need be; its hash is checked."""
        return self.fetch(upstream, line.pin(upstream).wheel)

    def fetch(self, upstream: Upstream, file: File) -> Path:
        """A release file of one upstream from the cache or the package index, checked."""
        from overlay.sources.index import fetch_release  # costs more than a warm apply in all

        return fetch_release(
            PROJECTS[upstream], file.file, file.sha256,
            cache=self.cache, offline=self.offline, report=self.report,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One pin that is looked for."""

    line: Line
    upstream: Upstream
    pin: Pin
    store: Store
    how: Sources

    @property
    def message(self) -> str:
        """Message of the base commit: a function of the pin, whatever the source."""
        return f"{self.upstream} {self.pin.version}\n\nUpstream-Commit: {self.pin.commit_text}\n"

    def in_order(self) -> Base:
        missing = []
        for kind in self.pin.sources:
            try:
                return self.kind(kind)
            except UnavailableError as error:
                missing.append(error)
        if len(missing) == 1:
            raise missing[0]
        raise UnavailableError(
            f"{self.upstream} {self.pin.version} can't be had from any source of the line",
            why="\n".join(
                "\n  ".join((f"{kind}: {error.what}", *error.why.splitlines()))
                for kind, error in zip(self.pin.sources, missing, strict=True)
            ),
            fix=missing[0].fix,
        )

    def kind(self, kind: str) -> Base:
        if kind == "archive":
            return self.archive(None)
        if self.pin.commit is None:
            raise SourceError(
                f"{self.upstream} {self.pin.version} can't come from git",
                why=f"only the abbreviation {self.pin.abbreviation} of its commit is known, "
                "so the archive's hash is its identity",
                fix="use --source archive",
            )
        return self.git(self.pin.repository, check_tag=True)

    def archive(self, file: Path | None) -> Base:
        """Base from the sdist: ``file`` (checked already), else from the package index."""
        ref = self._ref("archive", self.pin.sdist.sha256, *self.pin.generated)
        origin = self.pin.sdist.file
        commit = self.store.find(ref)
        if commit is None:
            from overlay.sources.archive import read_archive

            archive = file or self.how.fetch(self.upstream, self.pin.sdist)
            with self.how.report.progress(f"importing {origin}"):
                commit = self._import(
                    read_archive(archive, generated=self.pin.generated), ref, self._promised()
                )
        return Base(commit=commit, kind="archive", origin=origin)

    def git(self, url: str, *, check_tag: bool) -> Base:
        """Base from the pinned commit of a repository."""
        commit_id = self.pin.commit
        assert commit_id is not None  # noqa: S101 - callers looked
        ref = self._ref("git", commit_id)
        origin = f"{url} {commit_id}"
        commit = self.store.find(ref)
        if commit is None:
            if self.how.offline:
                raise UnavailableError(
                    f"commit {commit_id} of {self.upstream} {self.pin.version} is not in the store",
                    why="--offline: the repository is not asked",
                    fix=f"run 'vllm-overlay fetch {self.line.name} --source git' while online",
                )
            commit = self._fetch(url, commit_id, ref, check_tag=check_tag)
        return Base(commit=commit, kind="git", origin=origin, url=url)

    def path(self, path: Path, known: Mapping[str, str]) -> Base:
        """Base from a path: an archive, a folder of archives, a git repository, a plain folder."""
        if not path.exists():
            raise SourceError(
                f"--source {path}: no such file or folder", fix="say archive, git, or a path"
            )
        if (path / self.pin.sdist.file).is_file():  # a folder of archives, one an upstream
            path /= self.pin.sdist.file
        if path.is_file():
            _check_hash(path, self.pin.sdist.sha256)
            return self.archive(path)
        if (path / ".git").exists() or (path / "objects").is_dir():
            if self.pin.commit is None:
                return self.kind("git")  # which says why not
            return self.git(str(path.absolute()), check_tag=False)
        if not path.is_dir():
            raise SourceError(
                f"--source {path}: neither a file nor a folder", fix="say archive, git, or a path"
            )
        promised = {**self._promised(), **known}
        if not promised:
            raise SourceError(
                f"--source {path}: nothing says which tree this folder must be",
                why=f"neither pin nor lock of {self.line.name} names a tree of {self.upstream}",
                fix="lock the line from its archive first",
            )
        ref = self._ref("path")
        members = read_folder(path, generated=self.pin.generated)
        with self.how.report.progress(f"importing {path}"):
            commit = self._import(members, ref, promised)
        return Base(commit=commit, kind="path", origin=str(path))

    def blobs(self, base: Commit, patches: Sequence[Patch], url: str) -> None:
        """Fetch the contents that the series touches and a partial clone lacks, all at once."""
        missing = sorted(_missing_blobs(self.store.reader, base.tree, patches))
        if not missing:
            return
        if self.how.offline:
            raise UnavailableError(
                f"{len(missing)} files that {self.line.name} patches are not in the store",
                why="the store holds trees only, and --offline forbids to fetch contents",
                fix=f"run 'vllm-overlay fetch {self.line.name} --source git' while online",
            )
        with self.store.writing():
            fetch_objects(self.store, url, missing, self.how.report)

    def check_tree(self, base: Base) -> None:
        """Refuse a base that was in the store already and isn't the tree that the pin names now."""
        if self.pin.tree not in (None, base.commit.tree):
            raise self._wrong_tree(base.commit.tree, f"{self.pin.tree} (the pin's 'tree')")

    def _wrong_tree(self, tree: str, promised: str) -> SourceError:
        return SourceError(
            f"{self.upstream} {self.pin.version}: the source is another tree than promised",
            why=f"its tree is {tree}; expected {promised}",
            fix="don't use this source; or, if the pin is wrong, correct 'tree' in line.toml",
        )

    def refs(self) -> Iterator[str]:
        """Names of this pin's base commits, one a kind of source."""
        yield self._ref("archive", self.pin.sdist.sha256, *self.pin.generated)
        yield self._ref("path")
        if self.pin.commit is not None:
            yield self._ref("git", self.pin.commit)

    def _ref(self, kind: str, *identity: str) -> str:
        """Name of a base commit in the store: by everything that its making depends on."""
        key = hashlib.sha256("\n".join((*identity, self.message)).encode()).hexdigest()
        return f"refs/overlay/base/{kind}-{key}"

    def _promised(self) -> dict[str, str]:
        return {self.pin.tree: "the pin's 'tree'"} if self.pin.tree else {}

    def _import(self, members: Iterator[Member], ref: str, promised: Mapping[str, str]) -> Commit:
        try:
            return self.store.import_tree(members, ref=ref, message=self.message, expect=promised)
        except WrongTreeError as error:
            raise self._wrong_tree(error.tree, error.promised) from None

    def _fetch(self, url: str, commit_id: str, ref: str, *, check_tag: bool) -> Commit:
        with self.store.writing():
            if check_tag:
                self._check_tag(url, commit_id)
            fetched = f"refs/overlay/fetched/{commit_id}"
            try:
                with self.how.report.progress(f"fetching {self.upstream} {commit_id[:12]}"):
                    self.store.git.run(
                        *promisor(url), "fetch", *_FETCH, "--depth=1", REMOTE,
                        f"{commit_id}:{fetched}", network=True,
                    )  # fmt: skip
            except GitError as error:
                raise UnavailableError(
                    f"{url} does not give commit {commit_id}",
                    why=error.why,
                    fix="check the pin's commit and repository, or use --source archive",
                ) from None
            found = self.store.find(fetched)
            if found is None or found.commit != commit_id:
                raise SourceError(f"{url} gave another commit than {commit_id}")
            if self.pin.tree not in (None, found.tree):
                raise SourceError(
                    f"{self.upstream} {self.pin.version}: the commit has another tree than the pin",
                    why=f"its tree is {found.tree}, line.toml says {self.pin.tree}",
                    fix="correct 'tree' in line.toml",
                )
            with FastImport(self.store) as stream:
                stream.commit(ref, parent=None, identity=IDENTITY, date=EPOCH, message=self.message)
                stream.root(found.tree)
                return stream.made()

    def _check_tag(self, url: str, commit_id: str) -> None:
        """The pin's tag must still name its commit; this also tells 'unreachable' apart."""
        pattern = f"refs/tags/{self.pin.tag}" if self.pin.tag else "HEAD"
        try:
            out = self.store.git.run(
                *promisor(url), "ls-remote", REMOTE, pattern, f"{pattern}^{{}}", network=True
            )
        except GitError as error:
            raise UnavailableError(
                f"{url} is out of reach", why=error.why, fix="use --source archive, or try later"
            ) from None
        if self.pin.tag is None:
            return
        named = [line.split(b"\t") for line in out.splitlines()]
        # An annotated tag is listed twice; the line with ^{} is the commit
        ids = {name: oid.decode() for oid, name in named}
        now = ids.get(f"{pattern}^{{}}".encode()) or ids.get(pattern.encode())
        if now != commit_id:
            raise SourceError(
                f"tag {self.pin.tag} of {url} {'moved' if now else 'is gone'}",
                why=f"the pin says commit {commit_id}, the repository says {now or 'nothing'}",
                fix="find out why upstream moved it; then correct the pin, or drop its 'tag'",
            )


def fetch_objects(store: Store, url: str, ids: Sequence[str], report: Reporter) -> None:
    """Get objects that a partial clone of ``url`` lacks, all at once. Hold ``store.writing()``."""
    # As git itself does it: say nothing of what we have, or the server takes the contents of
    # our trees for known and leaves them out
    switches = ("-c", "fetch.negotiationAlgorithm=noop", *promisor(url))
    with report.progress(f"fetching the contents of {len(ids)} files"):
        store.git.run(
            *switches, "fetch", *_FETCH, "--stdin", REMOTE,
            stdin="\n".join(ids).encode() + b"\n", network=True,
        )  # fmt: skip


def read_folder(folder: Path, *, generated: Sequence[str] = ()) -> Iterator[Member]:
    """Every file below a plain folder, in a fixed order, without ``generated`` ones."""
    from overlay.sources.archive import Member

    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder).as_posix())
        text = os.fsdecode(name)
        if any(text == g or (g.endswith("/") and text.startswith(g)) for g in generated):
            continue
        if path.is_symlink():
            yield Member(path=name, mode=SYMLINK, data=os.fsencode(path.readlink()))
        elif path.is_file():
            if why := check_path(name):
                raise SourceError(f"{quote_path(name)} {why}")
            mode = EXECUTABLE if path.stat().st_mode & 0o100 else REGULAR
            yield Member(path=name, mode=mode, data=path.read_bytes())
        elif not path.is_dir():
            raise SourceError(f"{path} is neither file nor folder nor link")


def _check_hash(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if got != sha256:
        raise SourceError(
            f"{path} is not the pinned archive",
            why=f"its SHA-256 is {got}, the pin says {sha256}",
            fix="don't use it; or correct the pin, if upstream's file is right",
        )


def _missing_blobs(reader: ObjectReader, tree: str, patches: Sequence[Patch]) -> set[str]:
    stored = StoredTree(reader, tree)
    paths = {
        path
        for patch in patches
        for diff in patch.files
        for path in (diff.old_path, diff.new_path)
        if path is not None
    }
    places = (stored.locate(path) for path in paths)
    return {
        place[1] for place in places if place and place[0] != 0o40000 and not reader.get(place[1])
    }
