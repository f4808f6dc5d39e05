"""Write the tables of ``docs/speed.md`` from what ``run.sh OUT --speed`` measured.

    python docs/speed/make.py

``docs/speed/LINE.json`` is the ``speed.json`` of that line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.with_suffix(".md")
HEAD = (
    "tokens", "DCP", "launches: 1 rank", "ours", "upstream's",
    "µs: 1 rank", "ours", "of it index map", "upstream's", "floor", "upstream's by ours",
)  # fmt: skip


def row(one: dict[str, Any]) -> tuple[object, ...]:
    """Cells of one size."""
    launches = {name: len(kernels) for name, kernels in one["launches"].items()}
    us = one["us"]
    return (
        one["tokens"], one["dcp"],
        launches["one_rank"], launches["patched"], launches["upstream"],
        f"{us['one_rank']:.1f}", f"**{us['patched']:.1f}**", f"{us['patched_index']:.1f}",
        f"{us['upstream']:.1f}", f"{us['memory_floor']:.1f}",
        f"{us['upstream'] / us['patched']:.1f}",
    )  # fmt: skip


def table(line: str) -> str:
    """What was measured of one line."""
    measured = json.loads((HERE / f"{line}.json").read_text(encoding="utf-8"))
    rows = [HEAD, ("---:",) * len(HEAD), *map(row, measured["rows"])]
    heading = (
        f"{measured['device']}, torch {measured['torch']}, "
        f"copies at {measured['copy_bandwidth_gb_s'] / 1000:.1f} TB/s.\n\n"
    )
    return heading + "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)


def main() -> None:
    """Fill every place of the page that names a line."""

    def filled(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{table(found[1])}\n\n<!-- end -->"

    text = PAGE.read_text(encoding="utf-8")
    pattern = r"<!-- (\w+) -->\n.*?<!-- end -->"
    PAGE.write_text(re.sub(pattern, filled, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
