"""Commits of a checkout back to patch files and the series file; what didn't change stays.

Nothing is written before the whole new series, read and applied by the same code as ever, has
given the tree of every commit.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from overlay.errors import ExportError, PatchError
from overlay.files import locked, machine_errors
from overlay.lines.line import SERIES_FILE, Line, Upstream, read_series
from overlay.patches.checkout import BASE_TAG, Record, git_folders, write_record
from overlay.patches.commits import Draft, Work, opened
from overlay.patches.patch import NAME, NAME_TRAILER, SUFFIX, Patch, message_faults, parse_patch
from overlay.patches.series import publish, series_text
from overlay.trees.apply import apply_series
from overlay.trees.match import Verdict, match_patch
from overlay.trees.store import Commit, Store, StoredTree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SQUASH = re.compile(r"(fixup|squash|amend)! ")
# Long enough to tell patches apart, short enough for a column of a table
_NAME_LENGTH = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export did, by patch names.

    Attributes:
        kept: files that were not touched.
        rewritten, added, dropped: files that were.
        renamed: old name -> new name; the new one is in ``kept`` or ``rewritten`` too.
        series: names in order.
        series_changed: whether the series file was written.
        unnamed: names that were made from subjects, since the commits give none.
        untracked: paths in the checkout that git was never told of, and that no patch holds.
        tree: id of the patched tree.
    """

    kept: tuple[str, ...]
    rewritten: tuple[str, ...]
    added: tuple[str, ...]
    dropped: tuple[str, ...]
    renamed: Mapping[str, str]
    series: tuple[str, ...]
    series_changed: bool
    unnamed: tuple[str, ...]
    untracked: tuple[str, ...]
    tree: str


def export(
    line: Line,
    upstream: Upstream,
    folder: Path,
    store: Store,
    base: Commit,
    *,
    drop: Sequence[str] = (),
    reformat: bool = False,
) -> Exported:
    """Write the commits of the checkout at ``folder`` to the series of ``upstream``.

    Args:
        line: to be written to.
        upstream: whose series.
        folder: a checkout of that series.
        store: holds ``base``.
        base: the line's base tree.
        drop: patches that may vanish, and must.
        reformat: write every patch in canonical form, unchanged ones too.

    Raises:
        ExportError: something would be lost or is not as it should be; nothing was written.
    """
    # Beside the store, since a lock file in the patches folder would show in 'git status'
    with locked(store.folder.with_suffix(".export.lock")), opened(folder, store) as work:
        _check_record(work.record, line, upstream, base, folder)
        work.check_idle()
        drafts = work.drafts()
        _check_drafts(work, drafts, base)
        names, unnamed = _names(drafts)
        mails = [Mail(*pair) for pair in zip(names, work.mails(drafts), strict=True)]
        # Read again: another export may have held the lock until now
        old = {patch.name: patch for patch in read_series(line.folder / upstream)}
        renamed = _renames(mails, old)
        before = old | {new: old[name] for name, new in renamed.items()}
        untouched = 0 if reformat else _untouched(drafts, names, old, store, base)
        files = _files(work, drafts, mails, {} if reformat else before, untouched)
        _check_fresh(work.record, old, files)
        gone = [name for name in old if name not in files]
        _check_drops([name for name in gone if name not in renamed], drop, names, old)
        target = line.folder / upstream
        with machine_errors(target, is_cache=False):
            written = publish(
                target, files, _series(target, names, renamed),
                gone + _left_behind(work.record, target, files, old),
                known=old, store=store, base=base, trees=[draft.tree for draft in drafts],
            )  # fmt: skip
            _update_record(work, files)
        same = [name for name in names if name in before]
        kept = tuple(name for name in same if files[name] == before[name].raw)
        return Exported(
            kept=kept,
            rewritten=tuple(name for name in same if name not in kept),
            added=tuple(name for name in names if name not in same),
            dropped=tuple(name for name in gone if name not in renamed),
            renamed=renamed,
            series=tuple(names),
            series_changed=SERIES_FILE in written,
            unnamed=tuple(name for name in names if name in unnamed),
            untracked=work.untracked,
            tree=drafts[-1].tree if drafts else base.tree,
        )


class Mail:
    """What git made of a commit, and what we read in it: a patch, or an error."""

    def __init__(self, name: str, raw: bytes) -> None:
        self.name, self.raw = name, raw
        self.patch: Patch | None = None
        self._error = ""
        try:
            self.patch = parse_patch(raw, name=name)
        except PatchError as error:
            self._error = str(error)

    def faults(self, draft: Draft) -> list[str]:
        """What of the commit the mail doesn't carry."""
        if self.patch is None:
            return [self._error]
        found = list(message_faults(self.patch))
        if not found and (self.patch.subject, self.patch.body) != draft.message:
            found.append("part of its message would be taken for a diff, or be lost")
        return found


def _series(target: Path, names: Sequence[str], renamed: Mapping[str, str]) -> bytes:
    path = target / SERIES_FILE
    old = path.read_bytes().decode() if path.exists() else ""
    return series_text(old, names, renamed).encode()


def _check_record(
    record: Record, line: Line, upstream: Upstream, base: Commit, folder: Path
) -> None:
    if (record.line, record.upstream) != (line.name, upstream):
        raise ExportError(
            f"{folder} is a checkout of {record.line} {record.upstream}, "
            f"not of {line.name} {upstream}",
            fix=f"run 'vllm-overlay export {record.line} {record.upstream}', "
            "or name another folder",
        )
    if record.base != base.commit:
        raise ExportError(
            f"{folder} stands on another base tree than {line.name} does now",
            why=f"checkout: {record.base}, line: {base.commit}; the pin was moved, or the "
            "checkout came from another kind of source",
            fix="make a new checkout and carry the commits over with git cherry-pick, "
            "or export with the --source that the checkout was made with",
        )


def _check_drafts(work: Work, drafts: Sequence[Draft], base: Commit) -> None:
    """Commits that can be no patch, all of them at once."""
    faults = []
    before = base.tree
    for draft in drafts:
        if draft.tree == before:
            faults.append(f"commit {draft} changes nothing; drop it, or add its change")
        if _SQUASH.match(draft.message[0]):
            faults.append(f"commit {draft} waits for 'git rebase -i --autosquash'")
        before = draft.tree
    if faults:
        raise ExportError(
            f"{len(faults)} commits of {work.folder} can't become patches",
            why="\n".join(faults),
            fix=f"run 'git rebase -i --autosquash {BASE_TAG}' there",
        )


def _names(drafts: Sequence[Draft]) -> tuple[list[str], set[str]]:
    """A name for each draft, and those that were made from subjects."""
    given: dict[str, Draft] = {}
    faults = []
    for draft in drafts:
        if len(draft.names) > 1:
            faults.append(f"commit {draft} has several names: {', '.join(draft.names)}")
        for name in draft.names[:1]:
            if not NAME.match(name):
                faults.append(
                    f"commit {draft}: {name!r} is no name; expected lower-case letters, digits, "
                    "'-', '_' or '.'"
                )
            elif name in given:
                faults.append(f"commits {given[name]} and {draft} are both named {name}")
            given[name] = draft
    if faults:
        raise ExportError(
            "the names of the patches are not clear",
            why="\n".join(faults),
            fix=f"reword the commits (git rebase -i) so that each has one '{NAME_TRAILER}:' line "
            "of its own, or none to be named after its subject",
        )
    names: list[str] = []
    made: set[str] = set()
    for draft in drafts:
        name = draft.names[0] if draft.names else _slug(draft.message[0], {*given, *names})
        if not draft.names:
            made.add(name)
        names.append(name)
    return names, made


def _slug(subject: str, taken: set[str]) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    words = re.sub(r"^[0-9-]+", "", words) or "patch"
    if len(words) > _NAME_LENGTH:
        words = words[: _NAME_LENGTH + 1].rpartition("-")[0] or words[:_NAME_LENGTH]
    numbered = [words, *(f"{words}-{number}" for number in range(2, len(taken) + 3))]
    return next(name for name in numbered if name not in taken)


def _files(
    work: Work,
    drafts: Sequence[Draft],
    mails: Sequence[Mail],
    before: Mapping[str, Patch],
    untouched: int,
) -> dict[str, bytes]:
    """Content of every patch file, in order; ``before`` holds what may be kept, by new name."""
    files: dict[str, bytes] = {}
    faults: list[str] = []
    parent = drafts[0].parents[0] if drafts else ""
    for at, (draft, mail) in enumerate(zip(drafts, mails, strict=True)):
        old = before.get(mail.name)
        tree = StoredTree(work.reader, f"{parent}^{{tree}}")
        if old is not None and (at < untouched or _same(old, mail, tree)):
            files[mail.name] = old.raw
        else:
            files[mail.name] = mail.raw
            faults += [f"commit {draft}: {fault}" for fault in mail.faults(draft)]
        parent = draft.commit
    if faults:
        raise ExportError(
            "git's mail format would not carry these commits as they are",
            why="\n".join(faults),
            fix="reword the commits (git rebase -i)",
        )
    return files


def _untouched(
    drafts: Sequence[Draft],
    names: Sequence[str],
    old: Mapping[str, Patch],
    store: Store,
    base: Commit,
) -> int:
    """How many commits from the first on are those that the patch files give: same ids."""
    applied = apply_series(store, base, list(old.values())).patches
    count = 0
    for draft, name, patch in zip(drafts, names, applied, strict=False):
        if not patch.verdict.good or (patch.name, patch.commit) != (name, draft.commit):
            break
        count += 1
    return count


def _same(before: Patch, mail: Mail, tree: StoredTree) -> bool:
    """Whether two patches say the same, and do the same at the lines that they state."""
    after = mail.patch
    if after is None or _identity(before) != _identity(after):
        return False
    if (before.subject, before.body) != (after.subject, after.body):
        return False
    outcome = match_patch(before, tree)
    if outcome.verdict is not Verdict.APPLIES:
        return False
    return outcome.changes == match_patch(after, tree).changes


def _identity(patch: Patch) -> tuple[str, str, str]:
    """What survives amending, rewording and rebasing."""
    return patch.author, patch.email, patch.date


def _renames(mails: Sequence[Mail], old: Mapping[str, Patch]) -> dict[str, str]:
    """Old name -> new name, where only a commit's name was changed, or little else.

    Author and date must agree, and subject or touched paths. Where several commits would do
    (one was split, say) nothing is taken for granted.
    """
    names = {mail.name for mail in mails}
    fresh = [mail.patch for mail in mails if mail.name not in old and mail.patch is not None]
    pairs = [
        (gone.name, new.name)
        for gone in old.values()
        for new in fresh
        if gone.name not in names
        and _identity(gone) == _identity(new)
        and (gone.subject == new.subject or _paths(gone) == _paths(new))
    ]
    return {
        before: new
        for before, new in pairs
        if sum(before == b for b, _ in pairs) == 1 and sum(new == n for _, n in pairs) == 1
    }


def _paths(patch: Patch) -> set[bytes]:
    return {path for diff in patch.files for path in diff.paths}


def _check_fresh(record: Record, old: Mapping[str, Patch], files: Mapping[str, bytes]) -> None:
    """Refuse to undo what somebody else did to the patch files since the checkout.

    What would be written anyway is no difference: an earlier export may have been killed.
    """
    will = {name: _sha256(raw) for name, raw in files.items()}
    faults = [
        f"{name} was {'changed' if name in record.patches else 'added'}"
        for name, patch in old.items()
        if patch.sha256 not in (record.patches.get(name), will.get(name))
    ]
    faults += [
        f"{name} was removed" for name in record.patches if name in files and name not in old
    ]
    if faults:
        raise ExportError(
            "the series was changed since the checkout was made or exported",
            why="\n".join(faults),
            fix="make a new checkout, carry your commits over (git fetch, git cherry-pick), "
            "and export that",
        )


def _left_behind(
    record: Record, target: Path, files: Mapping[str, bytes], old: Mapping[str, Patch]
) -> list[str]:
    """Files that an export would have deleted, had it not been killed just before."""
    found = []
    for name, sha256 in record.patches.items():
        path = target / f"{name}{SUFFIX}"
        if name in files or name in old or not path.exists():
            continue
        if _sha256(path.read_bytes()) == sha256:
            found.append(name)
    return found


def _update_record(work: Work, files: Mapping[str, bytes]) -> None:
    hashes = {name: _sha256(raw) for name, raw in files.items()}
    write_record(git_folders(work.folder)[1], msgspec.structs.replace(work.record, patches=hashes))


def _check_drops(
    vanished: Sequence[str], drop: Sequence[str], names: Sequence[str], old: Mapping[str, Patch]
) -> None:
    wanted = [name.removesuffix(SUFFIX) for name in drop]
    for name in wanted:
        if name in names:
            raise ExportError(
                f"--drop {name}: the checkout still has a commit of that name",
                fix="drop the commit first (git rebase -i)",
            )
        if name not in old:
            raise ExportError(f"--drop {name}: the series has no patch of that name")
        if name not in vanished:
            raise ExportError(f"--drop {name}: the patch was renamed, not dropped")
    lost = [name for name in vanished if name not in wanted]
    if lost:
        raise ExportError(
            f"{len(lost)} patches of the series have no commit in the checkout",
            why="\n".join(lost),
            fix="say " + " ".join(f"--drop {name}" for name in lost) + " if that is meant",
        )


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
