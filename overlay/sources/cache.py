"""What is in the cache folder, and how it is tidied: ``cache`` and ``cache gc``.

Only names of the layout are ever looked at, and stores only if they hold refs of ours: a cache
folder that was set to somebody's home by mistake loses nothing.

Collecting is safe beside running verbs. Writers are kept out by the store's lock. Readers hold
none, so nothing that a reader may have found is taken from it: what is dropped loses its ref
and its states at once, so that nobody finds it any more; its objects go in a later collection,
at least ``GRACE`` seconds after. A process that is killed meanwhile leaves files that the next
collection takes for what they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from filelock import FileLock, Timeout

from overlay.files import machine_errors
from overlay.lines.line import UPSTREAMS, Upstream
from overlay.sources.cachefiles import (
    Item,
    age,
    answers,
    children,
    downloads,
    half_answers,
    half_states,
    is_plain,
    leftovers,
    measure,
    parts,
    remove,
    size_of,
    states,
    store_leftovers,
)
from overlay.sources.source import promisor
from overlay.trees.store import Store

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

# Longer than any verb reads a state that it found at its start
GRACE = 3600.0
BASES, TIPS = "refs/overlay/base/", "refs/overlay/tip/"
# A base that came from git leaves the fetched commit here; only the fetch itself needs it
FETCHED = "refs/overlay/fetched/"
# refs/overlay/dropped/<seconds since the epoch>/<base|tip|fetched>/<key>
DROPPED = "refs/overlay/dropped/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What lines stand on, and so is kept whatever its age.

    Attributes:
        refs: full names of base and tip refs, by upstream.
        downloads: SHA-256 of release files.
    """

    refs: Mapping[Upstream, Collection[str]] = field(default_factory=dict)
    downloads: Collection[str] = ()


@dataclass(slots=True, kw_only=True)
class Collected:
    """What a collection did, or would do.

    Attributes:
        freed: bytes; without a dry run measured, else what removed files hold.
        removed: files and folders, leftovers and states and downloads.
        dropped: refs that nobody finds from now on.
        waiting: refs dropped before whose objects stay until ``GRACE`` is over.
        repacked: stores whose objects now lie in one pack.
        busy: what another process holds, so that it was left alone.
    """

    freed: int = 0
    removed: list[Item] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    repacked: list[Upstream] = field(default_factory=list)
    busy: list[str] = field(default_factory=list)


def describe(cache: Path) -> list[Item]:
    """Everything in the cache, with sizes. Takes no lock and changes nothing."""
    found = list(downloads(cache))
    for upstream in UPSTREAMS:
        store = Store(cache, upstream)
        refs = _refs(store)
        if not refs:
            continue
        size = measure(store.folder)
        found.append(
            Item(kind="store", name=upstream, path=store.folder, size=size.size,
                 detail=f"{size.packs} packs, {size.loose} loose objects")
        )  # fmt: skip
        found += [
            Item(kind="base" if name.startswith(BASES) else "tip", name=name, path=store.folder,
                 size=None, detail=f"{upstream}: {ref.subject}")
            for name, ref in refs.items() if name.startswith((BASES, TIPS))
        ]  # fmt: skip
        kept = states(cache, upstream)
        found.append(
            Item(kind="states", name=upstream, path=store.states,
                 size=sum(path.stat().st_size for path in kept if is_plain(path)),
                 detail=f"{len(kept)} kept states")
        )  # fmt: skip
    found += [
        Item(kind="answers", name=name, path=cache / name, size=sum(map(size_of, paths)),
             detail=f"{len(paths)} kept answers")
        for name, paths in answers(cache).items() if paths
    ]  # fmt: skip
    return [*found, *leftovers(cache)]


def collect(
    cache: Path,
    *,
    keep: Keep,
    days: float = 30,
    everything: bool = False,
    dry_run: bool = False,
    grace: float = GRACE,
) -> Collected:
    """Remove what nobody needs, and pack what stays.

    Args:
        cache: the cache folder.
        keep: what the lines at hand stand on.
        days: a tip that is not kept goes when it is older.
        everything: drop all bases, tips and downloads that are not kept, whatever their age.
        dry_run: only say what would go.
        grace: seconds that dropped objects and half-made files are left alone. 0 is for
            when nothing else runs.

    Raises:
        MachineError: the cache can't be written to, or a store stays locked.
    """
    result = Collected()
    with machine_errors(cache):
        _downloads(cache, keep if everything else None, result, grace=grace, dry_run=dry_run)
        old = 0 if everything else days * 86400
        _answers(cache, result, old=old, grace=grace, dry_run=dry_run)
        for upstream in UPSTREAMS:
            store = Store(cache, upstream)
            if not _refs(store):
                continue  # not ours, or nothing in it yet
            job = _Store(store, cache, keep, days, everything, dry_run, grace, result)
            if dry_run:
                job.run()
            else:
                with store.writing():
                    job.run()
    return result


def _downloads(
    cache: Path, keep: Keep | None, result: Collected, *, grace: float, dry_run: bool
) -> None:
    doomed = [item for item in parts(cache) if age(item.path) >= grace]
    if keep is not None:
        doomed += [i for i in downloads(cache) if i.path.parent.name not in keep.downloads]
    for item in doomed:
        if dry_run:
            _take(item, result, dry_run=True)
            continue
        # The same lock that a download holds: a part under way is nobody's leftover
        lock = FileLock(item.path.parent / ".lock", timeout=0)
        try:
            with lock:
                _take(item, result, dry_run=False)
                if item.kind == "download":
                    result.freed += remove(item.path.with_name(item.path.name + ".ok"))
        except Timeout:
            result.busy.append(item.name)


def _answers(cache: Path, result: Collected, *, old: float, grace: float, dry_run: bool) -> None:
    doomed = [item for item in half_answers(cache) if age(item.path) >= grace]
    doomed += [
        Item(kind="answers", name=name, path=path, size=size_of(path), detail="old")
        for name, paths in answers(cache).items()
        for path in paths
        if age(path) >= old
    ]
    for item in doomed:
        _take(item, result, dry_run=dry_run)


def _take(item: Item, result: Collected, *, dry_run: bool) -> None:
    result.removed.append(item)
    result.freed += (item.size or 0) if dry_run else remove(item.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ref:
    commit: str
    subject: str


def _refs(store: Store) -> dict[str, _Ref]:
    """Our refs of a store by full name; none where there is no store of ours."""
    if not store.exists() or store.folder.is_symlink() or store.folder.parent.is_symlink():
        return {}
    out = store.git.run(
        "for-each-ref", "--format=%(refname)%00%(objectname)%00%(contents:subject)", "refs/overlay/"
    )
    rows = (line.split(b"\0") for line in out.splitlines() if line.count(b"\0") == 2)
    return {
        name.decode(): _Ref(commit=commit.decode(), subject=subject.decode(errors="replace"))
        for name, commit, subject in rows
    }


@dataclass(frozen=True, slots=True)
class _Store:
    """One collection of one store, whose write lock the caller holds."""

    store: Store
    cache: Path
    keep: Keep
    days: float
    everything: bool
    dry_run: bool
    grace: float
    result: Collected

    def run(self) -> None:
        upstream = self.store.upstream
        half = half_states(self.cache, "states", upstream)
        for item in (*store_leftovers(self.cache, upstream), *half):
            # Git of a checkout may write here without our lock: only what is old is dead. But a
            # killed repack's packs would make the next one fail; should it live on, it fails,
            # which loses nothing, since it deletes old packs last.
            if age(item.path) >= self.grace or item.name.startswith(".tmp-"):
                _take(item, self.result, dry_run=self.dry_run)
        refs = _refs(self.store)
        expired = self._expired(refs)
        dropped = self._dropped(refs)
        self.result.dropped += dropped
        if not self.dry_run:
            self._update(refs, dropped, expired)
        self._states(set(refs) - set(dropped))
        now = measure(self.store.folder)
        if self.dry_run or not (expired or now.loose or now.packs > 1):
            return
        self._repack()
        self.result.repacked.append(upstream)
        self.result.freed += max(now.size - measure(self.store.folder).size, 0)

    def _expired(self, refs: Iterable[str]) -> list[str]:
        """Refs dropped long enough ago; the others are said to wait."""
        expired = []
        for name in refs:
            if not name.startswith(DROPPED):
                continue
            stamp = name.removeprefix(DROPPED).partition("/")[0]
            if stamp.isdigit() and time.time() - int(stamp) >= self.grace:
                expired.append(name)
            else:
                self.result.waiting.append(name)
        return expired

    def _dropped(self, refs: Iterable[str]) -> list[str]:
        kept = self.keep.refs.get(self.store.upstream, ())
        return [name for name in refs if name not in kept and self._is_unwanted(name)]

    def _is_unwanted(self, name: str) -> bool:
        if name.startswith(TIPS):
            return self.everything or self._unused_days(name) >= self.days
        return self.everything and name.startswith((BASES, FETCHED))

    def _unused_days(self, tip: str) -> float:
        """Days since a tip, or the state of the same key, was written."""
        state = self.store.states / f"{tip.removeprefix(TIPS)}.json"
        files = [path for path in (state, self.store.folder / tip) if path.exists()]
        files = files or [self.store.folder / "packed-refs"]
        return min(age(path) for path in files) / 86400

    def _update(self, refs: Mapping[str, _Ref], dropped: list[str], expired: list[str]) -> None:
        stamp = int(time.time())
        lines = [f"delete {name} {refs[name].commit}\n" for name in (*dropped, *expired)]
        if self.grace > 0:
            lines += [
                f"update {DROPPED}{stamp}/{name.removeprefix('refs/overlay/')} "
                f"{refs[name].commit}\n"
                for name in dropped
            ]
        if lines:
            # One transaction: killed half-way, all of it holds or none
            self.store.git.run("update-ref", "--stdin", stdin="".join(lines).encode())

    def _states(self, refs: Collection[str]) -> None:
        """Remove states that lead to a commit which no living ref holds."""
        living = sorted(name for name in refs if not name.startswith(DROPPED))
        out = b""
        if living:
            out = self.store.git.run(
                "rev-list", "--stdin", stdin="".join(f"{name}\n" for name in living).encode()
            )
        commits = set(out.decode().split())
        for path in states(self.cache, self.store.upstream):
            if _commit_of(path) not in commits:
                size = path.stat().st_size
                item = Item(kind="states", name=path.name, path=path, size=size, detail="stale")
                _take(item, self.result, dry_run=self.dry_run)

    def _repack(self) -> None:
        """Everything reachable into one pack; the rest goes once it is older than the grace."""
        expiry = f"{int(time.time() - self.grace)} +0000" if self.grace else "now"
        # Contents that a fetch left out are promised, not lost: without a promisor git would
        # give up. It is never asked, since nothing here may use the network.
        packs = self.store.folder / "objects" / "pack"
        is_partial = any(path.suffix == ".promisor" for path in children(packs))
        switches = promisor("file:///nowhere") if is_partial else ()
        self.store.git.run(
            *switches, "repack", "-d", "--quiet",
            "--cruft",  # what is unreachable but young stays, in a pack of its own
            f"--cruft-expiration={expiry}",
            "--no-write-bitmap-index",  # serves fetches from here, of which there are none
        )  # fmt: skip
        excluded = ("--exclude-promisor-objects",) if is_partial else ()
        self.store.git.run(*switches, "prune", *excluded, f"--expire={expiry}")


class _State(msgspec.Struct):
    commit: str


def _commit_of(path: Path) -> str:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_State).commit
    except (OSError, msgspec.DecodeError):
        return ""
