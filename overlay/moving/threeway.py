"""Merge what a patch makes of one file into another version of that file.

Texts are merged by ``git merge-file``; the rest is decided by comparing. A merge that is clean
but makes a change a second time, which upstream has made elsewhere in the file, is a conflict.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.patches.diff import SYMLINK, Hunk
from overlay.trees.match import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

    from overlay.trees.git import Git

# Labels of conflict markers. They are fixed, so that one conflict reads the same on every line.
OURS, BASE, THEIRS = "upstream", "base", "patch"
_OPENING = re.compile(rb"^(<{7,}) upstream\r?$", re.MULTILINE)
_MARKER_LIKE = re.compile(rb"^(?:<{7,}|\|{7,}|={7,}|>{7,})", re.MULTILINE)
# Where git looks for the NUL that makes a file binary
_HEAD = 8000
TWICE = "the change may be there already, at line {}"
# Share of a line's words that another must have, to be a later form of it
_ALIKE = 0.7
# Bytes of a line that two changes don't have in common by chance, as they have "else:"
_TELLING = 12


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """One file that the three-way merge could not settle.

    Attributes:
        path: on the new base.
        kind: ``content``, ``deleted`` (one side deleted what the other changed), ``added`` (both
            have it, or something is in its way), ``mode`` (file against link), ``binary`` (no
            text to merge) or ``twice`` (the merge is clean, but makes a change that upstream
            seems to have made elsewhere in the file).
        base: the file before the patch on the old base.
        ours: on the new base, as carried so far.
        theirs: after the patch on the old base.
        marked: ``ours`` with conflict markers in diff3's style; empty where there is no text.
            Of kind ``twice``: the clean merge.
        why: evidence for a person.
    """

    path: bytes
    kind: str
    base: Entry | None = field(repr=False)
    ours: Entry | None = field(repr=False)
    theirs: Entry | None = field(repr=False)
    marked: bytes = field(repr=False, default=b"")
    why: str = ""

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The conflicting places of ``marked``, in order."""
        size = max(map(len, _OPENING.findall(self.marked)), default=0)
        return tuple(_regions(self.marked, size)) if size else ()

    @cached_property
    def key(self) -> str:
        """SHA-256 in hex of what conflicts: the same on every line and at any place in a file."""
        digest = hashlib.sha256(self.kind.encode())
        sides = [side for region in self.regions for side in region.sides] or [self.marked]
        for side in sides:
            digest.update(b"%d\n" % len(side) + side)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One place between conflict markers. ``line`` is that of the first marker, 1-based."""

    line: int
    ours: bytes
    base: bytes
    theirs: bytes

    @property
    def sides(self) -> tuple[bytes, bytes, bytes]:
        """All three."""
        return self.ours, self.base, self.theirs


class Merger:
    """Merges files. A context manager: it keeps a folder for the texts that git merges."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Merger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def merge(
        self,
        path: bytes,
        base: Entry | None,
        ours: Entry | None,
        theirs: Entry | None,
        hunks: Sequence[Hunk] = (),
    ) -> Entry | Conflict | None:
        """The file that holds both changes; None where it is deleted.

        Args:
            path: of ``ours``, for the conflict.
            base, ours, theirs: the file before both changes, after upstream's, after the patch's.
            hunks: the patch's, to see whether upstream has made one elsewhere.
        """
        if theirs in (ours, base):
            return ours
        if ours == base:
            return theirs
        kind, why = _unlike(base, ours, theirs)
        marked = b""
        if not kind and ours is not None and theirs is not None:
            old = base if base is not None else Entry(mode=theirs.mode, data=b"")
            mode = theirs.mode if ours.mode == old.mode else ours.mode
            for one, other in ((ours, theirs), (theirs, ours)):
                if one.data in (old.data, other.data) and base is not None:
                    return Entry(mode=mode, data=other.data)
            if ours.mode == SYMLINK or any(b"\0" in s.data[:_HEAD] for s in (old, ours, theirs)):
                kind, why = "binary", "both sides changed it, and it has no lines to merge"
            else:
                kind, why, marked = self._text(base, old.data, ours.data, theirs.data, hunks)
            if not kind:
                return Entry(mode=mode, data=marked)
        return Conflict(
            path=path, kind=kind, base=base, ours=ours, theirs=theirs, marked=marked, why=why
        )

    def _text(
        self, base: Entry | None, old: bytes, ours: bytes, theirs: bytes, hunks: Sequence[Hunk]
    ) -> tuple[str, str, bytes]:
        """Kind and reason of a conflict, or neither; and the merged text."""
        marked, clean = self._texts(old, ours, theirs)
        if base is None:
            return "added", "both sides have this new file", marked
        if not clean:
            return "content", "both sides changed the same lines", marked
        if line := made_twice(hunks, old, ours, theirs, marked):
            return "twice", TWICE.format(line), marked
        return "", "", marked

    def _texts(self, base: bytes, ours: bytes, theirs: bytes) -> tuple[bytes, bool]:
        """The merged text, and whether it is clean."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="vllm-overlay-")
        folder = Path(self._folder.name)
        names = []
        for name, data in ((OURS, ours), (BASE, base), (THEIRS, theirs)):
            (folder / name).write_bytes(data)
            names.append(str(folder / name))
        labels = [part for label in (OURS, BASE, THEIRS) for part in ("-L", label)]
        # More conflicts than one are told in the exit code, up to 127; 255 is a failure
        merge = ("merge-file", "-p", "-q", "--diff3", *labels)
        size = _marker_size(base, ours, theirs)
        marked = self._git.run(*merge, f"--marker-size={size}", *names, ok=range(128))
        return marked, not any(_regions(marked, size))


def _marker_size(*texts: bytes) -> int:
    """Length of conflict markers that no line of a file can be taken for."""
    found = (len(like) for text in texts for like in _MARKER_LIKE.findall(text))
    return max((length + 1 for length in found), default=7)


def _regions(marked: bytes, size: int) -> Iterator[Region]:
    signs = (b"<{%d} upstream", b"\\|{%d} base", b"={%d}", b">{%d} patch")
    first, second, third, last = (sign % size + rb"\r?$" for sign in signs)
    pattern = b"^%s\n(.*?)^%s\n(.*?)^%s\n(.*?)^%s" % (first, second, third, last)
    for found in re.finditer(pattern, marked, re.MULTILINE | re.DOTALL):
        line = marked.count(b"\n", 0, found.start()) + 1
        yield Region(line=line, ours=found[1], base=found[2], theirs=found[3])


def _unlike(base: Entry | None, ours: Entry | None, theirs: Entry | None) -> tuple[str, str]:
    """Kind and reason of a conflict between a file and none, or a link; else empty."""
    if ours is None:
        return "deleted", "upstream has no such file any more"
    if theirs is None:
        return "deleted", "upstream changed what the patch deletes"
    sides = [side for side in (base, ours, theirs) if side is not None]
    if len({side.mode == SYMLINK for side in sides}) > 1:
        return "mode", "one side has a file, another a link"
    return "", ""


def made_twice(
    hunks: Sequence[Hunk], base: bytes, ours: bytes, theirs: bytes, merged: bytes
) -> int:
    """Line of ``ours`` with a change that ``merged`` has a second time; 0 if there is none.

    Clean as it may be, a merge makes again what upstream has made at another place of the file,
    or at the same place with a line changed.
    """
    lines = [line.strip() for line in ours.split(b"\n")]
    was, had = _lines(base), Counter(lines)
    if not had - was:
        return 0
    would, now = _lines(theirs), _lines(merged)
    for hunk in hunks:
        for added in _added_runs(hunk):
            run = [line for line in added if re.search(rb"\w", line) and not was[line]]
            twice = [line for line in run if had[line] and now[line] > max(had[line], would[line])]
            if not any(len(line) >= _TELLING for line in twice):
                continue
            at = lines.index(twice[0])
            near = [line for line in lines[max(at - len(run), 0) : at + len(run)] if not was[line]]
            rest = [line for line in run if line not in twice]
            count = len(twice) + sum(any(_alike(line, other) for other in near) for line in rest)
            if 2 * count >= len(run):  # less is what any two changes may have in common
                return at + 1
    return 0


def _added_runs(hunk: Hunk) -> Iterator[list[bytes]]:
    """The different lines of each run of added lines, without white space at either end."""
    run: list[bytes] = []
    for line in (*hunk.lines, b" "):
        if line[:1] == b"+":
            run.append(line[1:].strip())
        elif line[:1] == b" " and run:
            yield list(dict.fromkeys(run))
            run = []


def _alike(one: bytes, other: bytes) -> bool:
    """Whether most words of a line are in another, which may have been made of it."""
    words = Counter(re.findall(rb"\w+", one))
    return (words & Counter(re.findall(rb"\w+", other))).total() >= _ALIKE * words.total()


def _lines(text: bytes) -> Counter[bytes]:
    return Counter(line.strip() for line in text.split(b"\n"))


def line_changes(before: bytes, after: bytes) -> Counter[bytes]:
    """How many more (or fewer) of each line there are; lines with no difference are left out."""
    made = Counter(after.splitlines(keepends=True))
    made.subtract(before.splitlines(keepends=True))
    return Counter({line: count for line, count in made.items() if count})
