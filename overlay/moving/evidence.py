"""The verdict on a carried patch with all that is known besides, as a dossier that a person reads.

Carrying sees trees. History knows what upstream did in between, postconditions know what the
patch was for, tombstones know what other lines found. Each may change a verdict in one direction
only: towards a person who looks at it.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlay.patches.paths import quote_path
from overlay.trees.match import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from overlay.lines.line import Upstream
    from overlay.moving.carry import Carried
    from overlay.moving.history import History, Told, UpstreamCommit
    from overlay.moving.tombstones import Tombstone
    from overlay.patches.patch import Patch
    from overlay.trees.match import Tree

_POSTCONDITIONS = "tests/static/postconditions.py"
_SHOWN = 8  # of a list, for a person; a program gets all


@dataclass(frozen=True, kw_only=True)
class Dossier:
    """What is known of one patch on one pin.

    Attributes:
        verdict: in the light of everything.
        carried: what carrying made of it, with its own verdict.
        notes: sentences of evidence besides the findings.
        commits: upstream's commits, by what they did: ``took`` hunks of the patch, ``undid``
            that, are of the ``same pull request``, ``changed`` the conflicting lines, or
            ``touched`` the files, newest first.
        todo: what a person has to do.
    """

    name: str
    verdict: Verdict
    carried: Carried
    notes: tuple[str, ...] = ()
    commits: dict[str, tuple[UpstreamCommit, ...]] = field(default_factory=dict)
    todo: str = ""

    @property
    def ok(self) -> bool:
        """Whether a move needs nobody: it carries the patch, or drops it as merged."""
        return self.verdict is Verdict.MERGED or (self.carried.ok and self.verdict.carried)

    @property
    def hunks(self) -> str:
        """How many hunks (or whole files) are carried, there, and in conflict."""
        found = [f for f in self.carried.findings if f.path]
        there = sum(f.verdict is Verdict.MERGED for f in found)
        bad = sum(f.verdict in (Verdict.CONFLICT, Verdict.BLOCKED) for f in found)
        parts = ((len(found) - there - bad, "go"), (there, "there"), (bad, "in conflict"))
        return ", ".join(f"{count} {what}" for count, what in parts if count)

    def lines(self) -> Iterator[str]:
        """The dossier as text, without the patch's name."""
        told = [f for f in self.carried.findings if f.why and f.verdict is not Verdict.OFFSET]
        for finding in told[:_SHOWN]:
            yield f"{_where(finding)}{finding.verdict}: {finding.why}"
        if len(told) > _SHOWN:
            yield f"and {len(told) - _SHOWN} hunks more"
        for conflict in self.carried.conflicts:
            at = ", ".join(str(region.line) for region in conflict.regions)
            yield f"{quote_path(conflict.path)}: {conflict.why}" + (f" (line {at})" if at else "")
        yield from self.notes
        for what, commits in self.commits.items():
            for commit in commits[:_SHOWN]:
                yield f"upstream {what}: {commit.text}"
            if len(commits) > _SHOWN:
                yield f"upstream {what}: and {len(commits) - _SHOWN} commits more"
        yield f"to do: {self.todo}"

    def json(self) -> dict[str, Any]:
        """For a program."""
        return {
            "patch": self.name,
            "verdict": self.verdict,
            "ok": self.ok,
            "carried_as": self.carried.verdict,
            "findings": [
                {"path": f.path, "line": f.at, "verdict": f.verdict, "why": f.why}
                for f in self.carried.findings
            ],
            "conflicts": [
                {
                    "path": quote_path(c.path), "kind": c.kind, "why": c.why, "key": c.key,
                    "lines": [region.line for region in c.regions],
                }
                for c in self.carried.conflicts
            ],
            "needs": list(self.carried.needs),
            "notes": list(self.notes),
            "commits": {
                what: [{"id": c.id, "subject": c.subject, "pull": c.pull} for c in commits]
                for what, commits in self.commits.items()
            },
            "todo": self.todo,
        }  # fmt: skip


def _where(finding: Finding) -> str:
    return f"{finding.path} (patch line {finding.at}): " if finding.path else ""


def judge(
    patch: Patch,
    carried: Carried,
    *,
    history: History | None = None,
    stone: Tombstone | None = None,
    does_without: str = "",
) -> Dossier:
    """Weigh what carrying made of a patch against what else is known.

    Args:
        patch: the patch.
        carried: its outcome on the new pin.
        history: of upstream up to that pin, if at hand.
        stone: of a line that found the patch merged by then, if any.
        does_without: why the bare new pin does what the patch is for, if it does.
    """
    verdict = carried.verdict
    notes: list[str] = []
    commits: dict[str, tuple[UpstreamCommit, ...]] = {}
    undone = False
    if history is not None:
        told = history.of(patch)
        undone = told.undone is not None and not told.whole
        commits = _commits(history, told, carried)
        verdict, notes = _by_history(verdict, told)
    if does_without:
        notes.append(f"the pin does without it what it is for: {does_without}")
        if verdict is not Verdict.MERGED and not undone:
            verdict = Verdict.REWORKED
    if stone is not None:
        since = f"{stone.line} dropped {stone.patch} at {stone.at_version} as merged"
        notes.append(f"{since}: {stone.reason or stone.pull or 'no reason given'}")
    return Dossier(
        name=patch.name, verdict=verdict, carried=carried, notes=tuple(notes), commits=commits,
        todo=_todo(verdict, carried),
    )  # fmt: skip


def _by_history(verdict: Verdict, told: Told) -> tuple[Verdict, list[str]]:
    made, count = told.hunks
    if told.undone is not None and not told.whole:
        taken = "made hunks of it" if told.taken else "merged its pull request"
        return verdict, [f"upstream {taken}, and took that back in {told.undone.text}"]
    if verdict is Verdict.MERGED:
        return verdict, []
    if told.whole:
        note = "upstream made all of it"
        if verdict.carried:  # and yet it is not there, so that the merge would make it again
            return Verdict.REWORKED, [f"{note}, and has changed or lost it since"]
        return Verdict.MERGED, [f"{note}, and went on from there"]
    notes = [f"upstream made {made} of its {count} hunks"] if made else []
    if told.same_pull and verdict is not Verdict.PARTLY_MERGED:
        numbers = sorted({f"#{commit.pull}" for commit in told.same_pull})
        notes.append(f"{', '.join(numbers)} landed in another form")
        return Verdict.REWORKED, notes
    if made and verdict is Verdict.CONFLICT:
        return Verdict.PARTLY_MERGED, notes
    return verdict, notes


def _commits(
    history: History, told: Told, carried: Carried
) -> dict[str, tuple[UpstreamCommit, ...]]:
    changed = {c.id: c for conflict in carried.conflicts for c in history.changed(conflict)}
    found = {
        "took": told.taken,
        "undid": (told.undone,) if told.undone else (),
        "same pull request": told.same_pull,
        "changed": tuple(changed.values()),
    }
    said = {commit.id for commits in found.values() for commit in commits}
    if not carried.verdict.good:
        found["touched"] = tuple(c for c in told.touching if c.id not in said)
    return {what: commits for what, commits in found.items() if commits}


def _todo(verdict: Verdict, carried: Carried) -> str:
    files = ", ".join(quote_path(conflict.path) for conflict in carried.conflicts)
    match verdict:
        case Verdict.MERGED:
            return "drop it; a move does so"
        case Verdict.REWORKED:
            return "compare it with upstream's form, and drop it if that does the same"
        case Verdict.PARTLY_MERGED if carried.conflicts:
            return f"resolve what upstream has not taken, in {files}"
        case Verdict.PARTLY_MERGED:
            return "nothing: a move carries what upstream has not taken"
        case Verdict.BLOCKED:
            return f"settle {', '.join(carried.needs)} first" + (f", then {files}" if files else "")
        case Verdict.CONFLICT:
            return f"resolve {files}" if files else "look at the findings"
        case Verdict.CONTEXT | Verdict.MOVED:
            return "nothing: a move carries it; read the new place once"
        case _:
            return "nothing: a move carries it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Postconditions:
    """The project's own statements of what each patch is for.

    Attributes:
        known: by patch: objects with ``name`` and ``fails(pair)``.
        pair, view: make what ``fails`` takes: a pair of views on the trees of both upstreams.
        missing: why they can't be asked, if so.
    """

    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    pair: Callable[..., Any] = dict
    view: Callable[[Tree], Any] = id
    missing: str = ""

    def hold(self, patch: str, old: Mapping[Upstream, Tree], new: Mapping[Upstream, Tree]) -> str:
        """Names of a patch's postconditions if all hold on the bare new pins; else nothing.

        Those that the bare old pins meet as well say nothing of the patch.
        """
        if patch not in self.known:
            return ""
        was, now = (
            self.pair(**{name: self.view(tree) for name, tree in trees.items()})
            for trees in (old, new)
        )
        telling = [one for one in self.known[patch] if _fails(one, was) is not None]
        if not telling or any(_fails(one, now) is not None for one in telling):
            return ""
        return ", ".join(one.name for one in telling)


def find_postconditions(root: Path) -> Postconditions:
    """Those of the project at ``root``; they are part of its tests, and not of the package."""
    if not (root / _POSTCONDITIONS).is_file():
        return Postconditions(missing=f"there is no {_POSTCONDITIONS} beside the lines")
    sys.path.insert(0, str(root))
    try:
        known = importlib.import_module("tests.static.postconditions").POSTCONDITIONS
        trees = importlib.import_module("tests.static.trees")
    except ImportError as error:
        return Postconditions(missing=f"{_POSTCONDITIONS} can't be imported: {error}")
    finally:
        sys.path.remove(str(root))
    return Postconditions(known=known, pair=trees.Pair, view=trees.View)


def _fails(postcondition: Any, pair: Any) -> str | None:
    """Why a postcondition does not hold; also where it can't be told on these trees."""
    try:
        why: str | None = postcondition.fails(pair)
    except NameError as error:
        return f"can't be told: {error}"
    return why
