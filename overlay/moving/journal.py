"""The journal of a move: what it is to, and what the maintainer has decided so far.

It lies in ``patches/<line>/move/`` from the start, as text without a path of any machine: verdicts
and merges are worked out again by every run, so whoever has the folder can go on. A ``.gitignore``
in it keeps it to its maker until ``save`` takes that away.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from overlay.errors import MoveError, PatchError
from overlay.files import machine_errors, write_atomic
from overlay.lines.line import CODENAME, Pin, Strict, Upstream, read_file
from overlay.patches.patch import SUFFIX, Patch, parse_patch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MOVE_FOLDER, JOURNAL_FILE, _IGNORE_FILE = "move", "journal.json", ".gitignore"
_IGNORE = b"# Nothing here is committed before 'move --save'.\n*\n"


_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Decision(Strict, frozen=True):
    """What was said about one patch.

    Attributes:
        of: SHA-256 of the patch file that it is about. Another one needs another decision.
        skip: the reason for which the patch is left behind; else ``patch`` is given.
        patch: SHA-256 of the resolved patch, which lies beside the journal.
        recorded: keys of the resolutions that were recorded from it.
    """

    of: _Sha256
    skip: str | None = None
    patch: _Sha256 | None = None
    recorded: tuple[str, ...] = ()


class Journal(Strict, frozen=True):
    """``journal.json``.

    Attributes:
        upstream: whose series is moved.
        pin: where to.
        to: the line that is made of it; None for the line itself.
        decisions: by patch name.
        format: of this file.
    """

    upstream: Upstream
    pin: Pin
    to: Annotated[str, Meta(pattern=f"^{CODENAME.pattern}")] | None = None
    decisions: dict[str, Decision] = msgspec.field(default_factory=dict)
    format: Literal[1] = 1


def moving(line: Path) -> bool:
    """Whether a move of the line in this folder is under way."""
    return (line / MOVE_FOLDER / JOURNAL_FILE).exists()


def find_moves(root: Path) -> list[str]:
    """Names of the lines below ``root`` that are being moved, sorted."""
    return sorted(path.parts[-3] for path in root.glob(f"*/{MOVE_FOLDER}/{JOURNAL_FILE}"))


def read_journal(line: Path) -> Journal:
    """The journal of the line in this folder. Raises ``MoveError`` if there is none to be read."""
    path = line / MOVE_FOLDER / JOURNAL_FILE
    where = f"{line.name}/{MOVE_FOLDER}/{JOURNAL_FILE}"
    try:
        return msgspec.json.decode(read_file(path), type=Journal)
    except FileNotFoundError:
        raise MoveError(
            f"no move of {line.name} is under way",
            fix=f"begin one: move {line.name} UPSTREAM VERSION",
        ) from None
    except OSError as error:
        raise MoveError(f"can't read {where}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MoveError(
            f"{where} is damaged",
            why=str(error),
            fix=f"restore it, or give the move up: move {line.name} --abort",
        ) from None


def begin(line: Path, journal: Journal) -> None:
    """Begin a move: the last thing written is the journal, and before that there is no move."""
    folder = line / MOVE_FOLDER
    with machine_errors(folder, is_cache=False):
        shutil.rmtree(folder, ignore_errors=True)  # of a killed run; it holds no journal
        folder.mkdir()
        write_atomic(folder / _IGNORE_FILE, _IGNORE)
    _write(line, journal)


def decide(
    line: Path, journal: Journal, patch: Patch, decision: Decision, resolved: bytes = b""
) -> Journal:
    """Note a decision about ``patch``; ``resolved`` is the patch file that it names."""
    folder = line / MOVE_FOLDER
    if decision.patch is not None:
        with machine_errors(folder, is_cache=False):
            # Beside the one of an earlier decision, which holds until the journal is written
            write_atomic(folder / _resolved_name(patch.name, decision.patch), resolved)
    made = msgspec.structs.replace(
        journal, decisions={**journal.decisions, patch.name: decision}
    )  # fmt: skip
    _write(line, made)
    _tidy(folder, made)
    return made


def decided(line: Path, journal: Journal, patches: Mapping[str, Patch]) -> dict[str, Patch | None]:
    """What holds of the decisions, as ``overlay.moving.carry.carry_series`` takes it.

    Those about a patch that was changed or removed since are left out (``stale``).
    """
    found: dict[str, Patch | None] = {}
    for name, decision in journal.decisions.items():
        if name not in patches or decision.of != patches[name].sha256:
            continue
        found[name] = None if decision.patch is None else _resolved(line, name, decision.patch)
    return found


def stale(journal: Journal, patches: Mapping[str, Patch]) -> list[str]:
    """Names of patches that were changed since something was decided about them."""
    return [
        name
        for name, decision in journal.decisions.items()
        if name in patches and decision.of != patches[name].sha256
    ]


def is_saved(line: Path) -> bool:
    """Whether ``git add`` takes the move."""
    return not (line / MOVE_FOLDER / _IGNORE_FILE).exists()


def save(line: Path) -> None:
    """Let ``git add`` take the move, so that others can go on with it."""
    folder = line / MOVE_FOLDER
    _tidy(folder, read_journal(line))
    with machine_errors(folder, is_cache=False):
        (folder / _IGNORE_FILE).unlink(missing_ok=True)


def end(line: Path) -> None:
    """Remove the move: first the journal, and then there is none."""
    folder = line / MOVE_FOLDER
    with machine_errors(folder, is_cache=False):
        (folder / JOURNAL_FILE).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _write(line: Path, journal: Journal) -> None:
    path = line / MOVE_FOLDER / JOURNAL_FILE
    with machine_errors(path, is_cache=False):
        write_atomic(path, msgspec.json.format(msgspec.json.encode(journal)) + b"\n")


def _resolved_name(name: str, sha256: str) -> str:
    return f"{name}-{sha256[:12]}{SUFFIX}"


def _resolved(line: Path, name: str, sha256: str) -> Patch:
    path = line / MOVE_FOLDER / _resolved_name(name, sha256)
    fix = f"restore it, or resolve the patch again: move {line.name} --resolve {name}"
    try:
        patch = parse_patch(read_file(path), name=name)
    except OSError as error:
        what = f"can't read {line.name}/{MOVE_FOLDER}/{path.name}: {error.strerror}"
        raise MoveError(what, fix=fix) from None
    except PatchError as error:
        raise MoveError(
            f"{MOVE_FOLDER}/{path.name}: {error.what}", why=error.why, fix=fix
        ) from None
    if patch.sha256 != sha256:
        raise MoveError(
            f"{line.name}/{MOVE_FOLDER}/{path.name} is not what was resolved",
            why=f"its SHA-256 is {patch.sha256}, the journal says {sha256}",
            fix=fix,
        )
    return patch


def _tidy(folder: Path, journal: Journal) -> None:
    """Remove resolved patches of earlier decisions, and what a killed run left."""
    wanted = {JOURNAL_FILE, _IGNORE_FILE}
    for name, decision in journal.decisions.items():
        if decision.patch is not None:
            wanted.add(_resolved_name(name, decision.patch))
    for path in folder.iterdir():
        if path.name not in wanted and path.is_file():
            path.unlink(missing_ok=True)
