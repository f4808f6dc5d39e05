"""Says before anything is built whether a line can serve a recipe, and if not, why.

Every kernel shape that a recipe can ask for is put to the line's patched FlashInfer; vLLM's own
check and its refusals stand beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from overlay.errors import ApplyError, OverlayError, RecipeError, UnknownError, UnsupportedError
from overlay.kernels.capability import Answer, read_capability
from overlay.kernels.memory import memory
from overlay.kernels.owncheck import draft_step, own_check
from overlay.kernels.recipe import Drafts, override
from overlay.kernels.refusals import Refusal, refusals
from overlay.kernels.shapes import DECODE_ROWS, DRAFT_STEP, derive
from overlay.trees.pipeline import apply_line
from overlay.trees.store import StoredTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlay.kernels.bringers import Bringers, Brought
    from overlay.kernels.capability import Capability, Told
    from overlay.kernels.memory import Memory
    from overlay.kernels.owncheck import OwnCheck
    from overlay.kernels.recipe import Recipe
    from overlay.kernels.shapes import Asked, Shapes
    from overlay.lines.line import Line
    from overlay.sources.source import Sources
    from overlay.trees.match import Tree


class Outcome(StrEnum):
    """What becomes of a recipe on a line, best first."""

    FINE = "fine"
    UNKNOWN = "unknown"
    UNSUPPORTED = "unsupported"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A kernel that a recipe asks for, and what FlashInfer's sources say of it.

    Attributes:
        asked: the shape, and all rows that lead to it.
        told: the worst answer over these rows.
        brought: who has it, where this tree lacks it.
    """

    asked: Asked
    told: Told
    brought: Brought | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """One recipe on one line.

    Attributes:
        line, flashinfer, recipe: names and FlashInfer's version.
        outcome: the worst of all that follows.
        judged: each shape that is asked for.
        own: vLLM's own check.
        refused: checks of vLLM that the recipe doesn't pass.
        ways_out: changes to the recipe with which it is fine.
        shapes, memory: what the recipe asks for and takes.
    """

    line: str
    flashinfer: str
    recipe: str
    outcome: Outcome
    judged: tuple[Judged, ...]
    own: OwnCheck
    refused: tuple[Refusal, ...]
    ways_out: tuple[str, ...]
    shapes: Shapes
    memory: Memory

    @property
    def reason(self) -> str:
        """Why it isn't fine, in a line; empty where it is."""
        told = [each for each in self.judged if each.told.answer == self.outcome.value]
        if told:
            return describe(told[0].asked)
        answer = "refused" if self.outcome is Outcome.REFUSED else "unknown"
        found = [each for each in self.refused if each.answer == answer]
        if found:
            return f"{found[0].what} ({found[0].where})"
        return "" if self.outcome is Outcome.FINE else f"vLLM's own check {self.own.what}"

    @property
    def brought(self) -> str:
        """Which releases and patches have what is missing."""
        said = (str(each.brought).split("; ") for each in self.judged if each.brought)
        return "; ".join(dict.fromkeys(who for one in said for who in one))


class Trees:
    """A line's patched trees, read once for all recipes.

    Args:
        line: on the pins that are asked.
        sources: where base trees come from.
        bringers: asked for who has what is missing; one for all lines of an invocation.

    Raises:
        ApplyError: a patch doesn't apply.
        CapabilityError: this FlashInfer has none of the kernels.
    """

    def __init__(self, line: Line, sources: Sources, bringers: Bringers) -> None:
        self.line = line
        states = apply_line(line, sources)
        for upstream, state in states.items():
            if state.tree.bad:
                raise ApplyError(
                    f"{line.name}: {upstream}/{state.tree.bad[0].name} does not apply",
                    fix=f"see 'vllm-overlay apply {line.name}'",
                )
        self.vllm: Tree = StoredTree(states["vllm"].store.reader, states["vllm"].tree.tree)
        state = states["flashinfer"]
        self.flashinfer: Tree = StoredTree(state.store.reader, state.tree.tree)
        version = line.pin("flashinfer").version
        self.capability = read_capability(self.flashinfer, version=version)
        # A tree that isn't understood says nothing, and so nothing of where the tables part
        self.edge = self.capability.decode_max_rows or DECODE_ROWS
        self.draft_step = draft_step(self.vllm)
        self.bringers = bringers

    def shapes(self, recipe: Recipe) -> Shapes:
        """What a recipe asks for on these trees."""
        step = self.draft_step or DRAFT_STEP
        return derive(recipe, decode_rows=self.edge, draft_step=step)

    def refusals(self, recipe: Recipe) -> tuple[Refusal, ...]:
        """What vLLM refuses, and what couldn't be found out about it."""
        found = refusals(self.vllm, recipe)
        wide = recipe.drafts.method == "dspark" and recipe.drafts.topk is None
        if wide and self.draft_step is None:
            what = "how wide a draft is: the sources don't say it as expected"
            found += (Refusal(answer="unknown", what=what, where="vllm"),)
        return found


def preflight(trees: Trees, name: str, recipe: Recipe) -> Preflight:
    """Judge one recipe on one line's trees."""
    shapes = trees.shapes(recipe)
    judged = [_judge(asked, trees.capability) for asked in shapes.asked]
    own = own_check(trees.vllm, trees.flashinfer, recipe, shapes, trees.capability)
    refused = trees.refusals(recipe)
    outcome = _outcome(judged, own, refused)
    ways: tuple[str, ...] = ()
    if any(each.told.answer is Answer.UNSUPPORTED for each in judged):
        judged = [
            replace(each, brought=trees.bringers.find(trees.line, each.asked.shape))
            if each.told.answer is Answer.UNSUPPORTED
            else each
            for each in judged
        ]
        ways = tuple(_ways_out(trees, recipe))
    return Preflight(
        line=trees.line.name, flashinfer=trees.line.pin("flashinfer").version, recipe=name,
        outcome=outcome, judged=tuple(judged), own=own, refused=refused, ways_out=ways,
        shapes=shapes, memory=memory(recipe),
    )  # fmt: skip


def complain(found: Sequence[Preflight]) -> OverlayError | None:
    """What is wrong with the recipes, as a refusal with its exit code; None if all are fine."""
    bad = [each for each in found if each.outcome in (Outcome.UNSUPPORTED, Outcome.REFUSED)]
    unknown = [each for each in found if each.outcome is Outcome.UNKNOWN]
    ways = [way for each in bad for way in each.ways_out]
    if bad:
        return UnsupportedError(
            f"{_names(bad)} can't be served",
            why="\n".join(f"{each.recipe} on {each.line}: {each.reason}" for each in bad),
            fix=f"or serve it otherwise: {ways[0]}" if len(bad) == 1 and ways else "",
        )
    if unknown:
        return UnknownError(
            f"whether {_names(unknown)} can be served isn't known",
            why="\n".join(f"{each.recipe} on {each.line}: {each.reason}" for each in unknown),
            fix="read the sources that are named; the tool doesn't understand them",
        )
    return None


def describe(asked: Asked) -> str:
    """A shape in words: table, model, heads, ids, pages, and the rows that lead to it."""
    shape = asked.shape
    extra = f" + {shape.extra_topk} in pages of {shape.extra_page}" if shape.extra_topk else ""
    fewest, most = asked.rows[0].rows, asked.rows[-1].rows
    rows = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"{shape.phase} table: {shape.model}, {shape.heads} heads, topk {shape.topk}, page "
        f"{shape.page}{extra}, {rows} rows ({asked.who})"
    )


def _names(found: Sequence[Preflight]) -> str:
    return ", ".join(dict.fromkeys(f"{each.recipe} on {each.line}" for each in found))


def _judge(asked: Asked, capability: Capability) -> Judged:
    """Ask about each number of rows; a source may decide by it."""
    worst: Told | None = None
    for rows in sorted({each.rows for each in asked.rows}):
        told = capability.ask(replace(asked.shape, rows=rows))
        if worst is None or _ORDER.index(told.answer) > _ORDER.index(worst.answer):
            worst = told
    assert worst is not None  # noqa: S101 - a shape is asked for by some rows
    return Judged(asked=asked, told=worst)


_ORDER = (Answer.SUPPORTED, Answer.UNKNOWN, Answer.UNSUPPORTED)


def _outcome(judged: Sequence[Judged], own: OwnCheck, refused: Sequence[Refusal]) -> Outcome:
    if any(each.answer == "refused" for each in refused):
        return Outcome.REFUSED
    answers = {each.told.answer for each in judged}
    if Answer.UNSUPPORTED in answers:
        return Outcome.UNSUPPORTED
    if own.answer == "refuses":
        return Outcome.REFUSED
    is_unknown = own.answer == "unknown" or Answer.UNKNOWN in answers or bool(refused)
    return Outcome.UNKNOWN if is_unknown else Outcome.FINE


def _ways_out(trees: Trees, recipe: Recipe) -> Iterator[str]:
    """Changes of one thing with which the recipe is fine, each tried."""
    for words, other in _changes(recipe, trees.edge):
        shapes = trees.shapes(other)
        judged = [_judge(asked, trees.capability) for asked in shapes.asked]
        own = own_check(trees.vllm, trees.flashinfer, other, shapes, trees.capability)
        if _outcome(judged, own, trees.refusals(other)) is Outcome.FINE:
            yield words


def _changes(recipe: Recipe, edge: int) -> Iterator[tuple[str, Recipe]]:
    """What one could change, the least first."""
    requests = edge // recipe.rows_a_request
    if 0 < requests < recipe.limits.max_num_seqs:
        rows = requests * recipe.rows_a_request
        words = (
            f"max_num_seqs={requests} keeps every step within the decode table "
            f"({requests} x {recipe.rows_a_request} = {rows} rows)"
        )
        yield words, override(recipe, [f"max_num_seqs={requests}"])
    if recipe.drafts.tokens:
        words = "no drafts: another mode (method=none tokens=0)"
        yield words, msgspec.structs.replace(recipe, drafts=Drafts())
    for tp in (2, 4, 8):
        if tp != recipe.parallel.tp:
            try:
                words = f"tp={tp} gives a rank {recipe.model.heads // tp} heads"
                yield words, override(recipe, [f"tp={tp}"])
            except RecipeError:
                continue
