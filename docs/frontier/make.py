"""Draw the frontiers of all lines anew, and put their tables into ``docs/frontier.md``.

    python docs/frontier/make.py [--offline]

Downloads the releases that the cache lacks (0.9 GB in all), then takes seconds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, PAGE = HERE.parents[1], HERE.with_suffix(".md")
RANGES = {"vllm": "0.25.0..0.33.0", "flashinfer": "0.6.14..0.7.4"}


def make(line: str, upstream: str, options: list[str]) -> str:
    """Write the picture of one frontier; its tables."""
    name = f"{line}-{upstream}"
    tables = HERE / f"{name}.md"
    command = (
        sys.executable, ROOT / "build.py", "frontier", line, "--upstream", upstream,
        "--range", RANGES[upstream], "--out", HERE / f"{name}.svg", "--out", tables, *options,
    )  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    text = tables.read_text()
    tables.unlink()
    return text


def main() -> None:
    """Do it for every heading of the page that has a picture."""
    page = PAGE.read_text()
    for line, upstream in re.findall(r"<!-- (\w+)-(\w+) -->", page):
        mark, end = f"<!-- {line}-{upstream} -->", f"<!-- end of {line}-{upstream} -->"
        before, _, rest = page.partition(mark)
        _, _, after = rest.partition(end)
        tables = make(line, upstream, sys.argv[1:])
        picture = f"![{tables.splitlines()[0]}](frontier/{line}-{upstream}.svg)"
        page = f"{before}{mark}\n\n{picture}\n\n{tables}\n{end}{after}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
