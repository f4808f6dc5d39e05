"""Every way in which the tool refuses: one class and one exit code a kind.

A message says what happened, why, and what to do next. Nothing else in the package
prints an error or calls ``sys.exit``; ``overlay.cli`` turns these into exit codes.
"""

from __future__ import annotations


class OverlayError(Exception):
    """Base of all refusals.

    Args:
        what: one sentence that names the file, patch or value at fault.
        why: the evidence, or the expectation that was not met.
        fix: the next step, an imperative.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix

    @property
    def kind(self) -> str:
        """Stable machine-readable name, as it stands in ``--json`` output."""
        return type(self).__name__.removesuffix("Error").lower()

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.fix) if part)


class LineError(OverlayError):
    """A line's folder, ``line.toml``, ``series`` or trailers are malformed."""

    exit_code = 3


class PatchError(OverlayError):
    """A patch file can't be read as one mail with one diff."""

    exit_code = 4


class SourceError(OverlayError):
    """A source isn't what its pin says, or is unsafe to unpack."""

    exit_code = 5


class UnavailableError(OverlayError):
    """A source can't be had now: offline, out of reach, or gone."""

    exit_code = 6


class ApplyError(OverlayError):
    """At least one patch has a bad verdict."""

    exit_code = 7


class LockError(OverlayError):
    """The line disagrees with its lock."""

    exit_code = 8


class WheelError(OverlayError):
    """A wheel can't be built as an overlay, or its content contradicts its record."""

    exit_code = 9


class LintError(OverlayError):
    """A line's patches have faults that git would let through."""

    exit_code = 10


class MachineError(OverlayError):
    """The machine lacks something: git too old, cache read-only, disk full."""

    exit_code = 11


class ExportError(OverlayError):
    """Commits can't become patches without losing something."""

    exit_code = 12


class GitError(OverlayError):
    """A git command failed in a way that no verb foresaw."""

    exit_code = 13


class CheckError(OverlayError):
    """A check of a patched tree failed, or its receipt can't be used."""

    exit_code = 14


class VerdictError(OverlayError):
    """On another pin, at least one patch needs a person."""

    exit_code = 15


class SurvivorError(OverlayError):
    """A defect was put back into a patched tree, and no check noticed."""

    exit_code = 16


class MoveError(OverlayError):
    """A move can't begin, go on or end as asked."""

    exit_code = 17


class DropError(OverlayError):
    """A patch can't be dropped: others of the series stand on it."""

    exit_code = 18


class BisectError(OverlayError):
    """A bisection ended without a patch to name."""

    exit_code = 19


class CapabilityError(OverlayError):
    """A FlashInfer tree has no sparse-MLA kernels for SM120, or none that can be read."""

    exit_code = 20


class RecipeError(OverlayError):
    """A recipe can't be read, or asks for what can't be."""

    exit_code = 21


class UnsupportedError(OverlayError):
    """A recipe asks for a kernel that isn't there, or for what a backend refuses."""

    exit_code = 22


class UnknownError(OverlayError):
    """Nothing says that a recipe can't run, and the sources don't say that it can."""

    exit_code = 23


class KernelError(OverlayError):
    """A line's kernels can't be compiled, or what was compiled isn't what was asked for."""

    exit_code = 24


class ImageError(OverlayError):
    """An image can't be built as asked, or isn't what its labels claim."""

    exit_code = 25


class EngineError(OverlayError):
    """There is no engine that can build or hand over an image: none, too old, full."""

    exit_code = 26


class PublishError(OverlayError):
    """An image can't be published, promoted or compared as asked."""

    exit_code = 27


class SignatureError(OverlayError):
    """A signature or attestation of an image is missing, or isn't the key's."""

    exit_code = 28
