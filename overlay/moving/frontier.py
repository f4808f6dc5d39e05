"""How far upstream a line's series goes: a verdict for each patch on each of many versions.

Base trees that are not in the store are imported; beyond that nothing is written. A version that
can't be had is a column with the reason in place of verdicts.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from overlay.errors import LineError, OverlayError, SourceError, UnavailableError
from overlay.lines.lock import read_lock
from overlay.moving.cells import Keeper, cells_of
from overlay.moving.examine import Examiner
from overlay.report import Reporter
from overlay.sources.releases import known_pins, pin_release
from overlay.trees.match import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from overlay.lines.line import Line, Pin, Upstream
    from overlay.moving.cells import Cell, Cells
    from overlay.sources.source import Sources
    from overlay.trees.store import Commit

_DOWNLOADS = 4  # at once; imports go one after another, for the store has one writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One version.

    Attributes:
        version: of upstream.
        pin: what the verdicts were made with; None where there are none.
        reason: why there are no verdicts; empty where there are.
        cells: what became of each patch, in the series' order.
    """

    version: str
    pin: Pin | None = field(default=None, repr=False)
    reason: str = ""
    cells: tuple[Cell, ...] = field(default=(), repr=False)

    @property
    def bad(self) -> int | None:
        """How many patches need a person; None where that isn't known."""
        return None if self.reason else sum(not cell.ok for cell in self.cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """The first version after the line's pin on which a patch does not hold.

    Attributes:
        version: the version.
        after: the newest one before it on which the patch holds.
        merged: the first one before it that had all of the patch; empty if none had.
        cell: what became of the patch.
        commit: upstream's commit that did it, where history says so: short id and subject.
    """

    version: str
    after: str
    merged: str
    cell: Cell
    commit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """One series on many versions.

    Attributes:
        line: name of the line.
        upstream: whose series.
        pin: version that the line stands on.
        patches: names, in order.
        columns: oldest version first.
        commits: by patch: the commit that breaks it, where history says so.
    """

    line: str
    upstream: Upstream
    pin: str
    patches: tuple[str, ...]
    columns: tuple[Column, ...]
    commits: dict[str, str] = field(default_factory=dict)

    @property
    def reaches(self) -> str:
        """The newest version that needs no work on any patch; empty if there is none."""
        return next((c.version for c in reversed(self.columns) if c.bad == 0), "")

    def breaks(self, patch: str) -> Break | None:
        """Where a patch stops going along, if it does."""
        at, after, merged = self.patches.index(patch), self.pin, ""
        for column in self.columns:
            if column.reason or Version(column.version) <= Version(self.pin):
                continue
            cell = column.cells[at]
            if not cell.ok:
                return Break(
                    version=column.version, after=after, merged=merged, cell=cell,
                    commit=self.commits.get(patch, ""),
                )  # fmt: skip
            after = column.version
            if cell.verdict is Verdict.MERGED and not merged:
                merged = column.version
        return None


def breaker(broken: Break) -> str:
    """What broke a patch, in a line."""
    if broken.merged:  # which fades: upstream has gone on from there
        return f"upstream has it since {broken.merged}: drop it"
    return broken.commit or broken.cell.why


def sentence(frontier: Frontier) -> str:
    """What a frontier says, in a line."""
    pin, total = Version(frontier.pin), len(frontier.patches)
    there = [column for column in frontier.columns if not column.reason]
    newer = [column for column in there if Version(column.version) > pin]
    says = [f"Stands on {frontier.pin}"]
    if newer and Version(frontier.reaches or frontier.pin) > pin:
        says.append(f"The whole series reaches {frontier.reaches}")
    elif newer:
        says.append("The whole series reaches no newer version")
    if newer and newer[-1].bad:
        verb = "needs" if newer[-1].bad == 1 else "need"
        says.append(f"On {newer[-1].version} {newer[-1].bad} of {total} patches {verb} a person")
    older = [column for column in reversed(there) if Version(column.version) < pin]
    back = [column.version for column in takewhile(lambda column: column.bad == 0, older)]
    if older:
        says.append(f"It goes back to {back[-1]}" if back else "It goes back to no older version")
    return ". ".join(says) + "."


def choose_versions(
    pin: str,
    listed: Sequence[str],
    *,
    named: Sequence[str] = (),
    bounds: tuple[str, str] = ("", ""),
    pre: bool = False,
) -> tuple[str, ...]:
    """Which versions to look at, oldest first.

    Args:
        pin: version that the line stands on.
        listed: what there is.
        named: exactly these, in any spelling.
        bounds: else those between two versions, both included; empty for the pin and for the
            newest final release.
        pre: pre-releases as well. The pin and the bounds count whatever they are.

    Raises:
        LineError: a version can't be read, isn't there, or the bounds are the wrong way round.
    """
    spelled = {_version(text): text for text in (*listed, pin)}
    if named:
        wanted = {_version(text) for text in named}
        if unknown := sorted(wanted - spelled.keys()):
            raise LineError(
                f"there is no version {', '.join(map(str, unknown))}",
                why=f"newest: {', '.join(list(spelled.values())[-6:-1])}",
                fix="check the spelling, or pip's configuration",
            )
    else:
        finals = [version for version in spelled if not version.is_prerelease]
        first = _version(bounds[0] or pin)
        last = _version(bounds[1]) if bounds[1] else max([*finals, _version(pin)])
        if first > last:
            raise LineError(f"no version lies between {first} and {last}", fix="swap them")
        ends = {first, last, _version(pin)}
        wanted = {
            version for version in spelled
            if first <= version <= last and (pre or version in ends or version in finals)
        }  # fmt: skip
        if not wanted:
            raise LineError(f"no release lies between {first} and {last}", fix="widen the range")
    return tuple(spelled[version] for version in sorted(wanted))


def find_frontier(
    line: Line,
    upstream: Upstream,
    sources: Sources,
    versions: Sequence[str],
    *,
    root: Path,
    clone: Path | None = None,
) -> Frontier:
    """Carry one series of a line to every version of ``versions``.

    Args:
        line: whose series; it must apply to its own pin.
        upstream: which of its series.
        sources: where base trees come from.
        versions: to look at, in order.
        root: the ``patches`` folder.
        clone: of upstream, with its history, where at hand.

    Raises:
        ApplyError: the series does not apply to its own pin.
        LineError: there is no such version.
        UnavailableError: no version at all can be had.
    """
    columns = []
    refused: OverlayError | None = None
    said: dict[str, None] = {}
    base_of(line, upstream, sources)  # if that can't be had no version matters
    keeper = Keeper(line, upstream, sources, root)
    for version, pin in _pins(line, upstream, sources, versions, root):
        try:
            if isinstance(pin, OverlayError):
                raise pin
            clones = _clones(upstream, line.pin(upstream), pin, clone)
            kept = None if clones else keeper.find(pin)
            if kept is None:
                examiner = Examiner(
                    root=root, line=line, pins={upstream: pin}, sources=sources, clones=clones
                )
                kept = _examine(examiner, upstream, said)
                if not clones:
                    keeper.keep(pin, kept)
            said |= {kept.note: None} if kept.note else {}
            columns.append(Column(version=version, pin=pin, cells=kept.cells))
        except (UnavailableError, SourceError) as error:
            refused = refused or error
            columns.append(Column(version=version, reason=error.what))
    for note in said:
        sources.report.say(note)
    if refused and all(column.reason for column in columns):
        raise refused
    return Frontier(
        line=line.name,
        upstream=upstream,
        pin=line.pin(upstream).version,
        patches=tuple(patch.name for patch in line.series[upstream]),
        columns=tuple(columns),
    )


def _examine(examiner: Examiner, upstream: Upstream, said: dict[str, None]) -> Cells:
    """Carry and weigh; without history where the clone does not hold it."""
    try:
        return cells_of(examiner.examine(upstream))
    except UnavailableError as error:
        if not examiner.clones:
            raise
        cells = cells_of(dataclasses.replace(examiner, clones={}).examine(upstream))
        said[error.what] = None
        return cells


def _clones(upstream: Upstream, own: Pin, pin: Pin, clone: Path | None) -> dict[Upstream, Path]:
    """The clone, where history leads from the line's pin to the other one."""
    forward = clone is not None and Version(pin.version) > Version(own.version)
    return {upstream: clone} if forward and clone is not None else {}


def base_of(line: Line, upstream: Upstream, sources: Sources) -> Commit:
    """The base commit that a line stands on."""
    lock = read_lock(line)
    return sources.base(line, upstream, lock.known_trees(upstream) if lock else {}).commit


def _pins(
    line: Line, upstream: Upstream, sources: Sources, versions: Sequence[str], root: Path
) -> Iterator[tuple[str, Pin | OverlayError]]:
    """The pin of each version, or why there is none; archives come side by side."""
    quiet = dataclasses.replace(sources, report=Reporter(quiet=True))
    known = (line.pin(upstream), *known_pins(root, upstream))
    pinned = {pin.version: pin for pin in reversed(known)}

    def find(version: str) -> Pin | OverlayError:
        if version in pinned:
            return pinned[version]
        try:
            return pin_release(quiet, upstream, version, known=known)
        except (UnavailableError, SourceError) as error:
            return error

    pool = ThreadPoolExecutor(_DOWNLOADS)
    try:
        for version, future in [(version, pool.submit(find, version)) for version in versions]:
            yield version, _wait(sources.report, f"{upstream} {version}", future)
    finally:
        pool.shutdown(cancel_futures=True)


def _wait(report: Reporter, what: str, future: Future[Pin | OverlayError]) -> Pin | OverlayError:
    """The result; says what it waits for when that takes long."""
    try:
        return future.result(timeout=0.5)
    except TimeoutError:
        with report.progress(f"waiting for {what}"):
            return future.result()


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise LineError(f"{text!r} is no version", fix="say one such as 0.28.0") from None
