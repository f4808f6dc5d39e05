"""What must be true of a tree once a patch is in it, and isn't true without the patch.

One set a patch name, the same on every line; ``test_postconditions.py`` holds each against the
patched trees, the bare pins, and the trees with one patch left out. A postcondition is a
function of both trees that raises where it doesn't hold. It looks at what the code does: pure
functions are cut out and run on the values of DOMAIN.md, methods are driven with fakes, the rest
is read as a syntax tree. None looks at a comment.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.static.source import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.static.trees import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Postcondition:
    """One statement on both trees.

    ``on_pin`` maps lines whose bare pin has it right already to why that is so: there it must
    hold without the patch too.
    """

    patch: str
    name: str
    holds: Callable[[Pair], None]
    on_pin: Mapping[str, str]

    def fails(self, pair: Pair) -> str | None:
        """Why it doesn't hold on two trees, or None where it does."""
        try:
            self.holds(pair)
        except Missing as error:
            return str(error)
        except NameError:  # a fake is missing: that says nothing of the tree
            raise
        except Exception as error:  # code of a tree, driven with fakes, may fail in any way
            return f"{type(error).__name__}: {error}"
        return None


POSTCONDITIONS: dict[str, list[Postcondition]] = defaultdict(list)


def of(patch: str, **on_pin: str) -> Callable[[Callable[[Pair], None]], Callable[[Pair], None]]:
    """Register a postcondition of a patch."""

    def register(holds: Callable[[Pair], None]) -> Callable[[Pair], None]:
        POSTCONDITIONS[patch].append(
            Postcondition(patch=patch, name=holds.__name__, holds=holds, on_pin=on_pin)
        )
        return holds

    return register


# Registers them
from tests.static import of_attention, of_drafts, of_flashinfer, of_layer, of_warmup  # noqa: E402

__all__ = ["POSTCONDITIONS", "of_attention", "of_drafts", "of_flashinfer", "of_layer", "of_warmup"]
