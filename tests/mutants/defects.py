"""Defects that checks must notice: which there are on a line, and their text put into its trees."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from overlay.errors import CheckError
from overlay.lines.line import Strict
from overlay.patches.paths import unquote_path
from overlay.trees.match import Entry
from overlay.trees.store import StoredTree
from tests.static.trees import Pair, View

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from overlay.lines.line import Line, Upstream
    from tests.static.trees import Trees

LOST = "lost/"


class Edit(Strict, frozen=True):
    """``old``, which stands in ``file`` exactly ``count`` times, becomes ``new``."""

    file: str
    old: str
    new: str
    count: int = 1


class OnLine(Strict, frozen=True):
    """What is other on one line: any part of a ``Defect``."""

    edits: tuple[Edit, ...] | None = None
    patch: str | None = None
    tests: tuple[str, ...] | None = None
    unseen: str | None = None
    absent: str = ""


class Defect(Strict, frozen=True):
    """One defect, as ``defects.toml`` has it.

    Attributes:
        name: short, for test names and tables.
        what: the defect in words.
        patch: that makes right what the defect makes wrong; ``upstream`` where no patch does, and
            the pin has it right.
        edits: of files of either upstream, by their path in its tree. None for a lost patch.
        tests: node ids below tests/patched that should fail first; the rest is run if they don't.
        unseen: why no test of tests/patched can notice it on a CPU.
        named: whether it is one that users of earlier builds met, not one of our own making.
        on: what differs on single lines; ``absent`` says why the defect can't be made there.
    """

    name: str
    what: str
    patch: str
    edits: tuple[Edit, ...] = ()
    tests: tuple[str, ...] = ()
    unseen: str = ""
    named: bool = False
    on: dict[str, OnLine] = msgspec.field(default_factory=dict)


class Lost(Strict, frozen=True):
    """What is known of the loss of one patch: as in ``Defect``."""

    tests: tuple[str, ...] = ()
    unseen: str = ""
    on: dict[str, OnLine] = msgspec.field(default_factory=dict)


class Catalogue(Strict, frozen=True):
    """The whole file."""

    defect: tuple[Defect, ...]
    lost: dict[str, Lost] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A defect on one line: the files of both upstreams that it changes.

    ``files`` has content by path, None where the file is gone. ``also`` says what else it takes
    along. ``tests`` and ``unseen`` are those of the defect.
    """

    name: str
    what: str
    patch: str
    files: Mapping[tuple[Upstream, str], bytes | None]
    pair: Pair
    tests: tuple[str, ...]
    unseen: str
    also: str = ""


def read_catalogue(path: Path) -> Catalogue:
    """The defects of a file. Raises ``CheckError``."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Catalogue)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckError(f"{path.name} is no list of defects", why=str(error)) from None
    names = [one.name for one in found.defect]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise CheckError(f"{path.name} has two defects of one name: {', '.join(twice)}")
    return found


def on_line(defect: Defect, line: str) -> tuple[Defect, str]:
    """The defect as it is on a line, and why it is absent there, or nothing."""
    other = defect.on.get(line, OnLine())
    given = {
        name: value
        for name in ("edits", "patch", "tests", "unseen")
        if (value := getattr(other, name)) is not None
    }
    return msgspec.structs.replace(defect, **given), other.absent


def lost_patches(line: Line, catalogue: Catalogue) -> list[Defect]:
    """One defect a patch of the line: the patch left out."""
    found = []
    for upstream, series in line.series.items():
        for patch in series:
            known = catalogue.lost.get(patch.name, Lost())
            found.append(
                Defect(
                    name=f"{LOST}{patch.name}",
                    what=f"the {upstream} patch is left out of the series",
                    patch=patch.name,
                    tests=known.tests,
                    unseen=known.unseen,
                    named=True,
                    on=known.on,
                )
            )
    return found


def make_mutant(defect: Defect, trees: Trees) -> Mutant | str:
    """The defect in the trees of a line, or why it is absent there.

    Raises ``CheckError`` when a text isn't there as often as said, or what becomes of it is no
    Python: the defect says nothing of the line then, whatever the checks say.
    """
    one, absent = on_line(defect, trees.line.name)
    if one.name.startswith(LOST):
        return absent or _lose(one, trees)
    changes: dict[tuple[Upstream, str], bytes | None] = {}
    problems = []
    for edit in one.edits:
        try:
            upstream = _owner(edit.file, trees.final())
            before = changes.get((upstream, edit.file)) or trees.final().of(upstream).get(edit.file)
            assert before is not None
            changes[upstream, edit.file] = _edited(edit, before)
        except CheckError as error:
            problems.append(error.what)
    if absent:
        if changes and not problems:
            raise CheckError(
                f"defect {one.name} is said to be absent on {trees.line.name}, but can be made",
                why=absent,
                fix=f"take 'absent' out of its on.{trees.line.name}",
            )
        return absent
    if problems or not one.edits:
        raise CheckError(
            f"defect {one.name} can't be made on {trees.line.name}",
            why="; ".join(problems) or "it has no edit",
            fix=f"give its text on this line, or say under on.{trees.line.name} why it is absent",
        )
    return Mutant(
        name=one.name, what=one.what, patch=one.patch, files=changes,
        pair=with_files(trees, changes), tests=one.tests, unseen=one.unseen,
    )  # fmt: skip


def _owner(path: str, pair: Pair) -> Upstream:
    owners: list[Upstream] = [u for u in ("vllm", "flashinfer") if pair.of(u).get(path) is not None]
    if len(owners) != 1:
        raise CheckError(f"there is no {path}" if not owners else f"both upstreams have {path}")
    return owners[0]


def _edited(edit: Edit, before: bytes) -> bytes:
    old, new = edit.old.encode(), edit.new.encode()
    found = before.count(old)
    if found != edit.count:
        first = edit.old.strip().partition("\n")[0]
        raise CheckError(f"{edit.file} has {first!r} {found} times, not {edit.count}")
    after = before.replace(old, new)
    if after == before:
        raise CheckError(f"{edit.file} stays as it was")
    if edit.file.endswith(".py"):
        try:
            ast.parse(after)
        except SyntaxError as error:
            raise CheckError(f"{edit.file} is no Python then: {error}") from None
    return after


def with_files(trees: Trees, changes: Mapping[tuple[Upstream, str], bytes | None]) -> Pair:
    """The patched trees with some files changed; nothing is written to the store."""
    views: dict[str, View] = {}
    for upstream, one in trees.patched.items():
        tree = StoredTree(one.store.reader, one.tree.tree)
        for (owner, path), data in changes.items():
            if owner == upstream:
                entry = None if data is None else Entry(mode=0o100644, data=data)
                tree.changes[path.encode()] = entry
        views[upstream] = View(tree)
    return Pair(**views)


def _lose(one: Defect, trees: Trees) -> Mutant:
    upstream, _ = trees.line.patch(one.patch)
    pair, verdicts = trees.without(f"{upstream}/{one.patch}")
    final = trees.final().of(upstream)
    changes: dict[tuple[Upstream, str], bytes | None] = {
        (upstream, path): now
        for path in _touched(trees, upstream)
        if (now := pair.of(upstream).get(path)) != final.get(path)
    }
    gone = [name for name, verdict in verdicts.items() if not verdict.good]
    return Mutant(
        name=one.name, what=one.what, patch=one.patch, files=changes, pair=pair,
        tests=one.tests, unseen=one.unseen,
        also=f"takes along {', '.join(gone)}" if gone else "",
    )  # fmt: skip


def _touched(trees: Trees, upstream: Upstream) -> list[str]:
    """Paths of every kind that a series touches."""
    found = {
        unquote_path(effect.path.encode()).decode()
        for applied in trees.patched[upstream].tree.patches
        for effect in applied.effects
    }
    return sorted(found)
