"""Receipts: the record of one check run, and what it counts for.

A receipt lies in ``receipts/<line>/<session>-<card or cpu>.json`` of the repository, so that those
of several machines stand side by side; a committed one is evidence.
``overlay.checks.receipt_plugin`` writes them. A receipt speaks for the digest that it names, and
for the tests as they were then.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from overlay.errors import CheckError
from overlay.lines.line import LINE_FILE, Strict

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FOLDER = "receipts"


class Trees(Strict, frozen=True):
    """Tree ids of one upstream before and after the series."""

    base: str
    patched: str


class Machine(Strict, frozen=True):
    """What it ran on: processor, usable cores, operating system."""

    cpu: str
    cores: int
    os: str


class Card(Strict, frozen=True):
    """The CUDA device; ``capability`` such as 9.0, ``cuda`` the version torch is built with."""

    name: str
    count: int
    capability: str
    memory_gib: float
    cuda: str
    driver: str


class Skip(Strict, frozen=True):
    """Tests that were skipped for one reason; parameters are left out of the names."""

    reason: str
    tests: tuple[str, ...]


class Counts(Strict, frozen=True):
    """Number of tests by outcome."""

    passed: int
    failed: int
    skipped: int


class Receipt(Strict, frozen=True):
    """One run of one session on one line.

    Attributes:
        format: of this document; 1.
        line, digest, trees: what was checked; trees by upstream.
        session: name of the check.
        inputs: hash of the session's own inputs (``hash_inputs``).
        command: as a person would run it again.
        outcome: ``passed``; ``failed``; ``skipped`` when not one test ran.
        counts, failures, skips: of tests.
        notes: what tests have to say beyond their outcome, by topic.
        duration_s: seconds from pytest's start to its end.
        when: UTC, start of the run.
        machine, card, versions: where it ran; ``card`` is None without a CUDA device.
    """

    format: Literal[1]
    line: str
    digest: str
    trees: dict[str, Trees]
    session: str
    inputs: str
    command: str
    outcome: Literal["passed", "failed", "skipped"]
    counts: Counts
    failures: tuple[str, ...]
    skips: tuple[Skip, ...]
    notes: dict[str, tuple[str, ...]]
    duration_s: float
    when: str
    machine: Machine
    versions: dict[str, str]
    card: Card | None = None

    @property
    def card_name(self) -> str:
        """The card, or ``cpu``."""
        return self.card.name if self.card else "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one receipt counts for.

    ``state`` is the outcome when the receipt is of this digest, else ``stale``; ``same_tests``
    says whether the session's inputs are those of the receipt.
    """

    receipt: Receipt
    state: Literal["passed", "failed", "skipped", "stale"]
    same_tests: bool

    @property
    def settled(self) -> bool:
        """Whether the session needn't run again."""
        return self.state == "passed" and self.same_tests


def judge(receipt: Receipt, *, digest: str, inputs: str) -> Standing:
    """What a receipt counts for, where the line has ``digest`` and the session ``inputs``."""
    return Standing(
        receipt=receipt,
        state=receipt.outcome if receipt.digest == digest else "stale",
        same_tests=receipt.inputs == inputs,
    )


def read_receipts(root: Path, line: str) -> list[Receipt | CheckError]:
    """All receipts of a line below the repository's ``root``, by file name.

    A file that is no receipt of this line comes as the error that says why: it must not hide the
    others, and must not pass for none.
    """
    found: list[Receipt | CheckError] = []
    for path in sorted((root / FOLDER / line).glob("*.json")):
        try:
            receipt = msgspec.json.decode(path.read_bytes(), type=Receipt, strict=True)
        except (OSError, msgspec.DecodeError) as error:
            found.append(_unreadable(path, str(error)))
            continue
        if receipt.line != line or not path.name.startswith(f"{receipt.session}-"):
            found.append(_unreadable(path, f"it is of {receipt.session} on {receipt.line}"))
        else:
            found.append(receipt)
    return found


def _unreadable(path: Path, why: str) -> CheckError:
    return CheckError(
        f"{FOLDER}/{path.parent.name}/{path.name} is no receipt",
        why=why,
        fix="delete it and run the session again",
    )


def hash_inputs(root: Path, paths: Iterable[str]) -> str:
    """SHA-256 over names and bytes of files and of all files in folders, below ``root``."""
    files: set[Path] = set()
    for name in paths:
        path = root / name
        files |= set(path.rglob("*")) if path.is_dir() else {path}
    whole = hashlib.sha256()
    for path in sorted(files):
        inside = path.relative_to(root)
        if path.is_file() and not any(is_by_product(part) for part in inside.parts):
            content = hashlib.sha256(_deciding(path)).hexdigest()
            whole.update(f"{inside.as_posix()}\0{content}\n".encode())
    return whole.hexdigest()


def _deciding(path: Path) -> bytes:
    """A file's bytes; of a line's settings without the image's, on which no check depends."""
    data = path.read_bytes()
    return data.partition(b"\n[image]\n")[0] if path.name == LINE_FILE else data


def is_by_product(part: str) -> bool:
    """Whether a file or folder of this name comes of running things."""
    return part == "__pycache__" or part.endswith((".pyc", "_cache"))


def to_document(receipt: Receipt) -> dict[str, Any]:
    """A receipt as plain data."""
    document: dict[str, Any] = msgspec.to_builtins(receipt)
    return document
