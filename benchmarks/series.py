"""Time import and apply of a series of Debian's against ``git am`` and ``quilt push -a``.

    python benchmarks/series.py [PACKAGE] [--rounds N]

Needs apt and quilt. PACKAGE is ``linux`` unless named: 165 patches on 78,661 files, of which
those that ``tests/series/expected.py`` lists are left out everywhere. Each round runs, in turn,
each in a process of its own:

- ``import``: Debian's files into an empty series, proven;
- ``apply``: the series, when its first patch has just changed, so that every state is made anew;
- ``git am``: all mails at once, in a worktree of the base tree;
- ``git am each``: one process a mail, which is what tells the states apart;
- ``quilt``: ``quilt push -a`` in a plain copy of the base tree (it keeps no commits);

and then, from the patched tree, the patch in the middle changed:

- ``apply one``: ``apply``;
- ``git am rest``: back to the state before it, and all mails from there on;
- ``quilt rest``: popped down to it, and pushed again.

Resets that are no part of the work aren't timed. Prints medians in seconds, and ratios.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from apply import call  # noqa: E402 - beside this file

from overlay.lines.line import read_line  # noqa: E402
from overlay.patches.foreign import Defaults  # noqa: E402
from overlay.patches.importer import import_series, read_patches  # noqa: E402
from overlay.trees.apply import apply_series  # noqa: E402
from overlay.trees.store import Store, cache_folder  # noqa: E402
from tests.series.debian import Mirror  # noqa: E402
from tests.series.expected import EXPECTED  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.trees.store import Commit

AUTHOR = Defaults(author="Importer <importer@example.invalid>", date="1700000000 +0000")
LINE = "debian"


def work(
    verb: str, store: Store, base: Commit, patches: Path, folder: Path, skip: list[str]
) -> None:
    """What a timed process of ours does."""
    line = read_line(patches, LINE)
    if verb == "import":
        found, _ = read_patches(folder, AUTHOR, line=line, upstream="vllm", skip=skip)
        import_series(line, "vllm", found, store, base)
    elif apply_series(store, base, line.series["vllm"]).bad:
        sys.exit("some don't apply")


class Bench:
    def __init__(self, package: str, scratch: Path) -> None:
        cache = cache_folder().with_name(cache_folder().name + "-series")
        self.package, self.cache = package, cache
        source = Mirror(cache / "mirror").fetch(package)
        store = Store(cache / package, "vllm")
        self.base = source.base(store)
        self.folder = source.unpack_patches(scratch / "source")
        self.patches = scratch / "patches"
        self.series = self.patches / LINE / "vllm"
        self.series.mkdir(parents=True)
        shutil.copyfile(ROOT / "patches/infernal/line.toml", self.patches / LINE / "line.toml")
        self.imported()()
        self.mails = [self.series / name for name in (self.series / "series").read_text().split()]
        self.middle = len(self.mails) // 2
        self.tree, self.quilt = scratch / "tree", scratch / "quilt"
        call(("git", "clone", "-q", "--shared", "--no-checkout", store.folder, self.tree), scratch)
        call(("git", "checkout", "-q", "--detach", self.base.commit), self.tree)
        self.tree_before = self.base.commit
        call(("git", "worktree", "add", "-q", "--detach", self.quilt, self.base.commit), self.tree)
        (self.quilt / ".git").unlink()

    def _ours(self, verb: str, patches: Path) -> None:
        command = (sys.executable, __file__, self.package, "--work", verb, str(patches))
        call((*command, "--folder", self.folder), ROOT)

    def imported(self) -> Callable[[], object]:
        for path in self.series.iterdir():
            path.unlink()
        return lambda: self._ours("import", self.patches)

    def applied(self, at: int = 0) -> Callable[[], object]:
        path = self.mails[at]
        head, _, rest = path.read_bytes().partition(b"\n\n")
        path.write_bytes(head + f"\n\nEdited at {time.time_ns()}.\n".encode() + rest)
        return lambda: self._ours("apply", self.patches)

    def git_am(self) -> Callable[[], object]:
        call(("git", "reset", "-q", "--hard", self.base.commit), self.tree)
        return lambda: call(("git", "am", "-q", "--keep-cr", *self.mails), self.tree)

    def git_am_each(self) -> Callable[[], object]:
        call(("git", "reset", "-q", "--hard", self.base.commit), self.tree)
        return lambda: [call(("git", "am", "-q", "--keep-cr", m), self.tree) for m in self.mails]

    def git_am_rest(self) -> Callable[[], object]:
        """From the patched tree, which ``git_am_each`` has left."""
        back = f"HEAD~{len(self.mails) - self.middle}"

        def rest() -> None:
            call(("git", "reset", "-q", "--hard", back), self.tree)
            call(("git", "am", "-q", "--keep-cr", *self.mails[self.middle :]), self.tree)

        return rest

    def _quilt(self, *command: str) -> None:
        call(("quilt", *command, "-q"), self.quilt, {"QUILT_PATCHES": str(self.series)})

    def quilt_push(self) -> Callable[[], object]:
        if (self.quilt / ".pc" / "applied-patches").exists():
            self._quilt("pop", "-a")
        return lambda: self._quilt("push", "-a")

    def quilt_rest(self) -> Callable[[], object]:
        """From the patched tree, which ``quilt_push`` has left."""

        def rest() -> None:
            self._quilt("pop", self.mails[self.middle - 1].name)
            self._quilt("push", "-a")

        return rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", nargs="?", default="linux", choices=EXPECTED)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        cache = cache_folder().with_name(cache_folder().name + "-series")
        store = Store(cache / options.package, "vllm")
        (base,) = (
            found
            for ref in store.folder.glob("refs/overlay/base/*")
            if (found := store.find(f"refs/overlay/base/{ref.name}"))
        )
        verb, patches = options.work
        skip = list(EXPECTED[options.package].refused)
        work(verb, store, base, Path(patches), options.folder, skip)
        return
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(options.package, Path(scratch))
        print(f"{options.package}: {len(bench.mails)} patches")
        ways: dict[str, Callable[[], Callable[[], object]]] = {
            "import": bench.imported, "apply": bench.applied, "git am": bench.git_am,
            "git am each": bench.git_am_each, "quilt": bench.quilt_push,
            "apply one": lambda: bench.applied(bench.middle),
            "git am rest": bench.git_am_rest, "quilt rest": bench.quilt_rest,
        }  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, prepare in ways.items():
                timed = prepare()
                started = time.perf_counter()
                timed()
                seconds[name].append(time.perf_counter() - started)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        for name, median in medians.items():
            print(
                f"{name:11} {median:7.2f} s ({min(seconds[name]):.2f} to {max(seconds[name]):.2f})"
            )
        both = medians["import"] + medians["apply"]
        for peer in ("git am", "git am each", "quilt"):
            print(f"{peer} takes {medians[peer] / medians['apply']:.1f} times as long as apply, "
                  f"{medians[peer] / both:.1f} times as long as import and apply")  # fmt: skip
        for peer in ("git am rest", "quilt rest"):
            print(f"{peer} takes {medians[peer] / medians['apply one']:.1f} times as long as "
                  "apply one")  # fmt: skip


if __name__ == "__main__":
    main()
