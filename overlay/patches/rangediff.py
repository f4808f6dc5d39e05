"""What changed between two versions of a series, patch by patch, sorted by how much to look at.

A move rewrites nearly every patch file, and most of it says nothing: ids and line numbers. So
each patch is put into the first group that its difference fits, and only what differs is shown.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from overlay.patches.paths import quote_path

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from overlay.patches.diff import FileDiff, Hunk
    from overlay.patches.patch import Patch


class Way(StrEnum):
    """How a patch differs from what it was, from least to most."""

    SAME = "same"  # byte for byte
    INDEX = "index-only"  # blob ids, line numbers, hunk headings, the mail's form
    CONTEXT = "context-only"  # the lines around; every line added or removed is as it was
    CONTENT = "content"
    NEW = "new"
    DROPPED = "dropped"


_WAYS = list(Way)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What became of one patch.

    Attributes:
        way: how its diff differs.
        old, new: the patch before and after; one of them is None if new or dropped.
        message: whether author, date, subject or reason differ.
        reordered: whether it stands elsewhere among the patches that both series have.
    """

    way: Way
    old: Patch | None
    new: Patch | None
    message: bool = False
    reordered: bool = False

    @property
    def name(self) -> str:
        """The patch's name now, or the one that it had."""
        patch = self.new or self.old
        assert patch is not None  # noqa: S101 - one of them is there
        return patch.name

    @property
    def renamed(self) -> bool:
        """Whether the patch file has another name now."""
        return self.old is not None and self.new is not None and self.old.name != self.new.name

    @property
    def is_same(self) -> bool:
        """Whether there is nothing at all to look at."""
        return self.way is Way.SAME and not (self.renamed or self.reordered)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else changed, in words."""
        notes = ["message"] if self.message else []
        notes += [f"was {self.old.name}"] if self.renamed and self.old else []
        return (*notes, *(["reordered"] if self.reordered else []))


def compare(old: Sequence[Patch], new: Sequence[Patch]) -> tuple[Change, ...]:
    """What became of each patch: by way, and within one in the order of the series.

    A patch is found again by its content, then its name, then its author, date and subject.
    """
    pairs = _pairs(old, new)
    stayed = _longest_rise([pairs[at] for at in sorted(pairs)])
    changes = []
    for at, patch in enumerate(new):
        if at not in pairs:
            changes.append(Change(way=Way.NEW, old=None, new=patch))
            continue
        before = old[pairs[at]]
        changes.append(
            Change(
                way=_way(before, patch),
                old=before,
                new=patch,
                message=_message(before) != _message(patch),
                reordered=pairs[at] not in stayed,
            )
        )
    found = set(pairs.values())
    changes += [
        Change(way=Way.DROPPED, old=patch, new=None)
        for at, patch in enumerate(old)
        if at not in found
    ]
    return tuple(sorted(changes, key=lambda change: _WAYS.index(change.way)))


def _pairs(old: Sequence[Patch], new: Sequence[Patch]) -> dict[int, int]:
    """Index of a new patch -> index of the old one that it was. Two that fit leave it open."""
    keys: tuple[Callable[[Patch], Hashable], ...] = (
        lambda patch: (patch.name, _content(patch)),
        _content,
        lambda patch: patch.name,
        _message,
        lambda patch: (*_message(patch)[:3], patch.subject),
    )
    pairs: dict[int, int] = {}
    for key in keys:
        olds = _by(key, old, set(pairs.values()))
        for value, news in _by(key, new, set(pairs)).items():
            if len(news) == len(olds.get(value, ())) == 1:
                pairs[news[0]] = olds[value][0]
    return pairs


def _by(
    key: Callable[[Patch], Hashable], patches: Sequence[Patch], without: set[int]
) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for at, patch in enumerate(patches):
        if at not in without:
            found.setdefault(key(patch), []).append(at)
    return found


def _longest_rise(numbers: Sequence[int]) -> set[int]:
    """The longest run of rising numbers: what kept its order while the others moved."""
    ends: list[int] = []  # smallest last number of a run of each length
    at_end: list[int] = []
    before: dict[int, int | None] = {}
    for number in numbers:
        place = bisect_left(ends, number)
        before[number] = at_end[place - 1] if place else None
        ends[place : place + 1] = [number]
        at_end[place : place + 1] = [number]
    kept: set[int] = set()
    at = at_end[-1] if at_end else None
    while at is not None:
        kept.add(at)
        at = before[at]
    return kept


def _way(old: Patch, new: Patch) -> Way:
    if old.raw == new.raw:
        return Way.SAME
    if _content(old) != _content(new):
        return Way.CONTENT
    same = [_with_context(diff) for diff in old.files] == [_with_context(d) for d in new.files]
    return Way.INDEX if same else Way.CONTEXT


def _message(patch: Patch) -> tuple[str, ...]:
    return patch.author, patch.email, patch.date, patch.subject, patch.body


def _content(patch: Patch) -> tuple[Hashable, ...]:
    """What a patch changes, whatever stands around it; files in any order."""
    return tuple(sorted((_changed(diff) for diff in patch.files), key=repr))


def _changed(diff: FileDiff) -> tuple[Hashable, ...]:
    runs = tuple(run for hunk in diff.hunks for run in _runs(hunk))
    return *_header(diff), runs, (diff.binary, diff.new_blob) if diff.binary else None


def _with_context(diff: FileDiff) -> tuple[Hashable, ...]:
    return *_header(diff), tuple(hunk.lines for hunk in diff.hunks), diff.binary


def _header(diff: FileDiff) -> tuple[Hashable, ...]:
    # A mode that stays is context, as git's index line has it
    modes = () if diff.old_mode == diff.new_mode else (diff.old_mode, diff.new_mode)
    return diff.kind, diff.old_path, diff.new_path, modes


def _runs(hunk: Hunk) -> Iterator[tuple[bytes, ...]]:
    """Lines added or removed without one that stays between them."""
    run: list[bytes] = []
    for line in (*hunk.lines, b" "):
        if line[:1] != b" ":
            run.append(line)
        elif run:
            yield tuple(run)
            run = []


def difference(change: Change) -> list[str]:
    """A diff of what a reader would compare: message, paths, lines; no ids, no line numbers.

    Each line has a sign of its own before the patch's. Nothing in it can steer a terminal.
    """
    before, after = (_text(patch) if patch else [] for patch in (change.old, change.new))
    found = difflib.unified_diff(before, after, n=3, lineterm="")
    return ["@@" if line.startswith("@@") else line for line in found][2:]


def _text(patch: Patch) -> list[str]:
    lines = [f"From: {patch.author} <{patch.email}>", f"Date: {patch.date}"]
    lines += [f"Subject: {patch.subject}", "", *patch.body.split("\n")]
    lines = [_shown(line) for line in lines]
    for diff in patch.files:
        old, new = (quote_path(path) if path else "none" for path in (diff.old_path, diff.new_path))
        lines += ["", f"{diff.kind}: {new if old == new else f'{old} -> {new}'}"]
        if diff.old_mode != diff.new_mode:
            modes = (f"{mode:06o}" if mode else "none" for mode in (diff.old_mode, diff.new_mode))
            lines.append(f"mode: {' -> '.join(modes)}")
        if diff.binary:
            made = diff.new_blob.decode() if diff.new_blob else ""
            lines.append(f"binary: {len(diff.binary.data)} bytes, makes {made}")
        for hunk in diff.hunks:
            lines += ["@@", *(_shown(_line(line)) for line in hunk.lines)]
    return lines


def _line(line: bytes) -> str:
    end = "" if line.endswith(b"\n") else "\\ no line end"
    return line.removesuffix(b"\n").decode(errors="backslashreplace") + end


def _shown(line: str) -> str:
    return "".join(
        letter if letter.isprintable() or letter == "\t" else repr(letter)[1:-1] for letter in line
    )
