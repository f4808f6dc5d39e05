"""What became of each patch of a series on one version, as short as a frontier shows it.

It is kept in the cache, under a key of everything that it depends on: both pins, the patches, the
recorded resolutions, the tombstones, the postconditions, the git, and this tool's own code. What
came of a clone's history or of a source that the user named is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from overlay.files import write_atomic
from overlay.lines.line import UPSTREAMS
from overlay.patches.paths import quote_path
from overlay.trees.match import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.lines.line import Line, Pin, Upstream
    from overlay.moving.evidence import Dossier
    from overlay.moving.examine import Examined
    from overlay.sources.source import Sources

_POSTCONDITIONS = "tests/static"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One patch on one version.

    Attributes:
        name: of the patch.
        verdict: in the light of all evidence.
        ok: whether a move would need nobody.
        goes: whether carrying alone, without other evidence, would need nobody.
        needs: bad patches that it stands on.
        why: why it needs a person, in a line.
    """

    name: str
    verdict: Verdict
    ok: bool
    goes: bool
    needs: tuple[str, ...] = ()
    why: str = ""


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """One version: a cell a patch, and why postconditions say nothing, if so."""

    cells: tuple[Cell, ...]
    note: str = ""


def cells_of(examined: Examined) -> Cells:
    """What a frontier shows of a series that was carried and weighed."""
    cells = tuple(
        Cell(
            name=dossier.name, verdict=dossier.verdict, ok=dossier.ok, goes=dossier.carried.ok,
            needs=dossier.carried.needs, why=evidence(dossier),
        )
        for dossier in examined.dossiers
    )  # fmt: skip
    return Cells(cells=cells, note=examined.postconditions)


def evidence(dossier: Dossier) -> str:
    """Why a patch needs a person, in a line."""
    carried = dossier.carried
    if carried.needs:
        return f"needs {', '.join(carried.needs)}"
    found = list(dossier.notes)
    found += [f"{quote_path(c.path)}: {c.why or c.kind}" for c in carried.conflicts]
    found += [f"{f.path}: {f.why}" for f in carried.findings if not f.verdict.carried and f.why]
    more = len(carried.conflicts) - 1
    files = f" (and {more} more file{'s' * (more > 1)})" if more > 0 and not dossier.notes else ""
    return (found[0].splitlines()[0] if found else "") + files


class Keeper:
    """Finds and keeps cells of one series of one line.

    Args:
        line, upstream: whose series.
        sources: where base trees come from.
        root: the ``patches`` folder.
    """

    def __init__(self, line: Line, upstream: Upstream, sources: Sources, root: Path) -> None:
        self._folder = sources.cache / "frontier"
        self._asks = (root.resolve().parent / _POSTCONDITIONS).is_dir()
        # A source that the user named may be another tree than the pin's archive
        self._is_used = not sources.choices
        digest = hashlib.sha256(f"{upstream} {sys.version}\n".encode())
        for name in UPSTREAMS:
            digest.update(msgspec.json.encode(line.pin(name)))
        for patch in line.series[upstream]:
            digest.update(f"{patch.name} {patch.sha256}\n".encode())
        for path in (*_inputs(root.resolve()), sources.cache / "stores" / "git-checked"):
            data = path.read_bytes() if path.is_file() else b""
            digest.update(f"{path.name} {hashlib.sha256(data).hexdigest()}\n".encode())
        self._digest = digest

    def find(self, pin: Pin) -> Cells | None:
        """The cells on a pin, if they were kept."""
        if not self._is_used:
            return None
        try:
            return msgspec.json.decode(self._path(pin).read_bytes(), type=Cells)
        except (OSError, UnicodeDecodeError, msgspec.DecodeError):
            return None

    def keep(self, pin: Pin, cells: Cells) -> None:
        """Keep cells, unless something that could not be asked now may be asked next time."""
        if self._is_used and not (self._asks and cells.note):
            with contextlib.suppress(OSError):  # it costs the next run time, and this one nothing
                self._folder.mkdir(parents=True, exist_ok=True)
                write_atomic(self._path(pin), msgspec.json.encode(cells))

    def _path(self, pin: Pin) -> Path:
        digest = self._digest.copy()
        digest.update(msgspec.json.encode(pin))
        return self._folder / f"{digest.hexdigest()}.json"


def _inputs(root: Path) -> Iterator[Path]:
    """Files that decide what a verdict is, besides trees and patches."""
    yield from sorted(Path(__file__).parents[1].rglob("*.py"))
    yield from sorted((root.parent / _POSTCONDITIONS).glob("*.py"))
    yield from sorted((root / "resolutions").glob("*"))
    yield root / "dropped.toml"
