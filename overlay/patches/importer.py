"""Patches that this tool did not write, into a line's series: applied as strictly as ever.

Each becomes a commit on the base tree, and each commit a patch file in the one form that
``export`` writes. All of them or none: what can't be carried is named, and nothing is written.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import ApplyError, LineError, OverlayError, PatchError
from overlay.patches.commits import NAME_LINE, format_mails
from overlay.patches.foreign import read_letter, read_letters
from overlay.patches.loosediff import UNPLACED
from overlay.patches.patch import NAME_TRAILER, Patch, message_faults, parse_patch
from overlay.patches.series import extend
from overlay.trees.apply import apply_series, refuse_bad, write_commit
from overlay.trees.match import match_patch
from overlay.trees.store import Commit, FastImport, StoredTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlay.lines.line import Line, Upstream
    from overlay.patches.foreign import Defaults, Letter
    from overlay.trees.match import Outcome
    from overlay.trees.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One patch as it was found.

    Attributes:
        letter: where.
        patch: None where it can't be read.
        fault: why not.
    """

    letter: Letter
    patch: Patch | None
    fault: OverlayError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import did.

    Attributes:
        files: name -> file that it was made from, in order.
        offsets: names of patches that stood at other lines than they said.
        skipped: files that were left out, as asked.
        tree: id of the patched tree.
    """

    files: dict[str, str]
    offsets: tuple[str, ...]
    skipped: tuple[str, ...]
    tree: str


def read_patches(
    path: Path, defaults: Defaults, *, line: Line, upstream: Upstream, skip: Sequence[str] = ()
) -> tuple[list[Read], list[str]]:
    """Read all patches at ``path``, the faulty ones too, and the files that ``skip`` leaves out.

    Raises:
        LineError: their order can't be told, or ``skip`` names one that isn't there.
    """
    letters = read_letters(path, taken=[patch.name for patch in line.series[upstream]])
    unknown = [name for name in skip if all(name not in _names(each) for each in letters)]
    if unknown:
        raise LineError(f"--skip {unknown[0]}: {path} has no such patch")
    kept = [each for each in letters if not _names(each) & set(skip)]
    if not kept:
        raise LineError(f"no patch of {path} is left to import")
    found = []
    for letter in kept:
        try:
            found.append(Read(letter=letter, patch=read_letter(letter, defaults)))
        except PatchError as error:
            found.append(Read(letter=letter, patch=None, fault=error))
    return found, [each.file for each in letters if each not in kept]


def import_series(
    line: Line,
    upstream: Upstream,
    found: Sequence[Read],
    store: Store,
    base: Commit,
    *,
    skipped: Sequence[str] = (),
    append: bool = False,
) -> Imported:
    """Make ``found`` the series of ``upstream``, or its end.

    Args:
        line: as its folder says it now.
        upstream: whose series.
        found: what ``read_patches`` gave.
        store: holds ``base``.
        base: the line's base tree.
        skipped: for the result.
        append: the series may have patches already.

    Raises:
        LineError: the series has patches already.
        PatchError, ApplyError: some can't be read, or carried, or don't apply. Nothing was
            written.
    """
    old = line.series[upstream]
    if old and not append:
        raise LineError(
            f"{line.name}'s {upstream} series has {len(old)} patches already",
            fix="add --append to put the others behind them, or take a new line (new --like)",
        )
    start, trees = base, list[str]()
    if old:
        patched = apply_series(store, base, old)
        refuse_bad(patched, line.name, upstream)
        start = Commit(commit=patched.commit, tree=patched.tree)
        trees = [each.tree for each in patched.patches]
    carried = _carry(found, store, start)
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-import-") as scratch:
        mails = format_mails(
            store.git, start.commit, carried.tip.commit, len(found), Path(scratch)
        )  # fmt: skip
    _check_mails(found, mails)
    new = {each.letter.name: mail for each, mail in zip(found, mails, strict=True)}
    extend(line, upstream, new, store, base, [*trees, *carried.trees])
    return Imported(
        files={each.letter.name: each.letter.file for each in found},
        offsets=carried.offsets,
        skipped=tuple(skipped),
        tree=carried.tip.tree,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Carried:
    tip: Commit
    trees: tuple[str, ...]
    offsets: tuple[str, ...]


def _carry(found: Sequence[Read], store: Store, start: Commit) -> _Carried:
    """A commit for each patch; all that is wrong with any of them at once."""
    faults: list[str] = []
    made: list[Commit] = []
    offsets = []
    key = hashlib.sha256("\n".join((start.commit, *(each.letter.file for each in found))).encode())
    ref = f"refs/overlay/tip/{key.hexdigest()}"  # 'cache gc' takes it when it is old
    with store.writing(), FastImport(store) as stream:
        tree = StoredTree(store.reader, start.tree)
        for each in found:
            if each.patch is None:
                faults += str(each.fault).replace("\n", "\n  ").split("\n")
                continue
            outcome = match_patch(each.patch, tree)
            if not outcome.verdict.good:
                faults += _findings(each.letter, outcome)
                continue
            parent = None if made else start.commit
            write_commit(stream, each.patch, outcome.changes, parent, ref)
            now = stream.made()
            if now.tree == (made[-1].tree if made else start.tree):
                faults.append(f"{each.letter.file}: changes nothing")
            made.append(now)
            tree.changes |= outcome.changes
            if outcome.verdict == "offset":
                offsets.append(each.patch.name)
        if faults:
            stream.abort()
            kind = ApplyError if all(each.patch for each in found) else PatchError
            count = len({fault.partition(":")[0] for fault in faults if fault[0] != " "})
            raise kind(
                f"{count} of {len(found)} patches can't be carried as they are",
                why="\n".join(faults),
                fix="mend them where they come from, or leave them out with --skip",
            )
    return _Carried(
        tip=made[-1] if made else start, trees=tuple(each.tree for each in made),
        offsets=tuple(offsets),
    )  # fmt: skip


def _findings(letter: Letter, outcome: Outcome) -> list[str]:
    bad = [finding for finding in outcome.findings if not finding.verdict.good]
    return [
        f"{letter.file}:{finding.at}: {finding.path}: "
        + (finding.why or finding.verdict).replace(f" at line {UNPLACED}", "")
        for finding in bad
    ]


def _names(letter: Letter) -> set[str]:
    return {letter.name, letter.file}


def _check_mails(found: Sequence[Read], mails: Sequence[bytes]) -> None:
    """A mail must say what was read, and nothing that git would cut."""
    faults = []
    for each, mail in zip(found, mails, strict=True):
        assert each.patch is not None  # noqa: S101 - _carry() refused those
        try:
            made = parse_patch(mail, name=each.letter.file)
        except PatchError as error:
            faults.append(str(error))
            continue
        told = list(message_faults(made))
        if any(NAME_LINE.match(text) for text in each.patch.body.split("\n")):
            told.append(f"'{NAME_TRAILER}:' is in the message; names are the files' own")
        elif not told and (made.subject, made.body) != (each.patch.subject, each.patch.body):
            told.append("part of its text would be taken for a diff, or be lost")
        faults += [f"{each.letter.file}: {fault}" for fault in told]
    if faults:
        raise PatchError(
            f"the text of {len(faults)} patches can't be carried in a mail",
            why="\n".join(faults),
            fix="mend it where it comes from, or leave them out with --skip",
        )
