"""Writes docs/mutants.md: which check notices which defect, from the receipts of the lines.

``python -m tests.mutants.table`` from the repository's root; the session does it by itself.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.checks.receipt import read_receipts
from overlay.errors import CheckError, OverlayError
from overlay.files import write_atomic
from overlay.lines.line import find_lines, read_line
from overlay.report import Reporter
from tests.mutants.defects import lost_patches, on_line, read_catalogue

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlay.checks.receipt import Receipt
    from overlay.lines.line import Line
    from tests.mutants.defects import Catalogue, Defect

ROOT = Path(__file__).absolute().parents[2]
PAGE = "docs/mutants.md"
CATALOGUE = Path(__file__).with_name("defects.toml")
SESSION = "mutants"
# Nothing of FlashInfer is compiled on a CPU: these tests read its sources
READING = ("test_flashinfer_sources.py::test_prefill",)

INTRODUCTION = """\
# Mutants: what notices which defect

A check that can't fail proves nothing. `nox -s mutants -- LINE` puts defects into a line's
patched trees, one at a time, and shows which check of `static` and which test of `cpu` fails
while it is there. A defect that none notices, or that `cpu` doesn't notice and nobody said why,
fails the session: `vllm-overlay check mutants` ends with exit code 16 (nox makes 1 of it).
The installed wheels are not touched: files of the tree shadow them for one process.

**This page is written by the session**, and by `python -m tests.mutants.table`, from the receipts
in `receipts/`. The defects are in `tests/mutants/defects.toml`; each patch left out of its series
is one more. In bold: what users of earlier builds met, or what a pin gets wrong by itself.

In the tables:

- *patch*: the one that the defect undoes; *upstream* where the bare pin has it right.
- *static*: the first postcondition that fails, of that patch unless another is named, and how it
  came to: it *ran* code of the tree with fakes, or *read* its text. The latter says that the text
  is another, not that it does something wrong.
- *cpu*: the first test that fails, below `tests/patched`. It runs the upstreams' own code; what
  is marked *read* reads FlashInfer's kernels, as nothing compiles them on a CPU.
"""


def render(lines: Sequence[Line], catalogue: Catalogue, root: Path) -> str:
    """The whole page. Raises ``CheckError`` for a receipt that can't be read."""
    parts = [INTRODUCTION]
    for line in lines:
        receipt = _receipt(root, line.name)
        defects = [*catalogue.defect, *lost_patches(line, catalogue)]
        parts.append("\n".join(_section(line.name, defects, receipt)) + "\n")
    return "\n".join(parts)


def _receipt(root: Path, line: str) -> Receipt | None:
    for one in read_receipts(root, line):
        if isinstance(one, CheckError):
            if f"/{SESSION}-" in one.what:
                raise one
        elif one.session == SESSION:
            return one
    return None


def _section(line: str, defects: Sequence[Defect], receipt: Receipt | None) -> Iterator[str]:
    yield f"## {line}\n"
    if receipt is None:
        yield f"Not run yet: `nox -s mutants -- {line}`."
        return
    rows, absent = [], []
    counts = dict.fromkeys(("both", "static", "cpu", "none"), 0)
    for defect in defects:
        one, _ = on_line(defect, line)
        said = _said(receipt.notes.get(one.name, ()))
        if "absent" in said:
            absent.append(f"- `{one.name}`: {said['absent']}.")
        elif said:
            counts[_by(said)] += 1
            rows.append(_row(one, said))
        else:
            rows.append(f"| {_named(one)} | {one.patch} | not run | not run |")
    minutes = f"{receipt.duration_s / 60:.0f} minutes on {receipt.machine.cores} cores"
    yield (
        f"Digest `{receipt.digest[:8]}`, {receipt.when[:10]}, {minutes}: {sum(counts.values())} "
        f"defects, {counts['both']} noticed by both sessions, {counts['static']} by `static` "
        f"alone, {counts['cpu']} by `cpu` alone, {counts['none']} by none.\n"
    )
    yield "| defect | patch | static | cpu |"
    yield "|---|---|---|---|"
    yield from rows
    if absent:
        yield f"\nWhat can't be made on {line}:\n"
        yield from absent


def _said(notes: Sequence[str]) -> Mapping[str, str]:
    return dict(note.split(": ", 1) for note in notes)


def _by(said: Mapping[str, str]) -> str:
    static, cpu = (said.get(name, "nothing") != "nothing" for name in ("static", "cpu"))
    return {(True, True): "both", (True, False): "static", (False, True): "cpu"}.get(
        (static, cpu), "none"
    )


def _row(defect: Defect, said: Mapping[str, str]) -> str:
    static = said["static"].removeprefix(f"{defect.patch}: ")
    cpu = said["cpu"]
    if cpu == "nothing":
        kind = "read its text" if static.endswith("(read)") or "(read)," in static else "ran it"
        why = f": {defect.unseen}" if defect.unseen else ""
        cpu = f"nothing{why} (noticed by `static` alone, which {kind})"
    else:
        cpu = f"`{cpu}`" + (" (read)" if cpu.startswith(READING) else "")
    also = f"; {said['also']}" if "also" in said else ""
    cells = (f"{_named(defect)}{also}", defect.patch, static, cpu)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _named(defect: Defect) -> str:
    name = f"`{defect.name}`"
    return f"{f'**{name}**' if defect.named else name} {defect.what}"


def main() -> int:
    """Write the page; the exit code."""
    report = Reporter()
    try:
        patches = ROOT / "patches"
        lines = [read_line(patches, name) for name in find_lines(patches)]
        text = render(lines, read_catalogue(CATALOGUE), ROOT)
    except OverlayError as error:
        report.error(error)
        return error.exit_code
    write_atomic(ROOT / PAGE, text.encode())
    report.say(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
