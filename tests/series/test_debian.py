"""Series that no one here wrote: Debian's, imported, applied, exported, and applied again.

Each state must be the tree that ``git apply`` makes of Debian's own file, and a second export
must change no byte. What is refused is in ``expected.py``, with the reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.errors import ApplyError, PatchError
from overlay.lines.line import read_line
from overlay.patches.checkout import checkout
from overlay.patches.export import export
from overlay.patches.foreign import Defaults
from overlay.patches.importer import import_series, read_patches
from overlay.report import Reporter
from overlay.trees.apply import apply_series
from overlay.trees.store import Store, cache_folder
from tests.series.debian import Mirror
from tests.series.expected import EXPECTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlay.lines.line import Line
    from overlay.trees.store import Commit

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt, for Debian's sources"),
]

ROOT = Path(__file__).parents[2]
DEFAULTS = Defaults(author="Importer <importer@example.invalid>", date="1700000000 +0000")
# Where we are stricter than git: it passes over text, believes one of two, takes the nearest
STRICTER = re.compile(
    "ambiguous|no part of a diff|longer than its header|says another place|the text is not"
    "|would split the mail"
)


@pytest.fixture(scope="module")
def mirror() -> Mirror:
    return Mirror(_folder() / "mirror")


def _folder() -> Path:
    """Beside the cache: downloads and stores of gigabytes that no line needs."""
    return cache_folder().with_name(cache_folder().name + "-series")


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """``git apply`` on an index of its own, without a working tree."""

    store: Store
    index: Path

    def git(self, *arguments: str, ok: Sequence[int] = (0,)) -> tuple[int, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        clean |= {
            "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_DIR": str(self.store.folder), "GIT_INDEX_FILE": str(self.index),
        }  # fmt: skip
        done = subprocess.run(("git", *arguments), env=clean, capture_output=True, check=False)
        assert done.returncode in ok, (arguments, done.stderr)
        return done.returncode, done.stdout.decode().strip()

    def read(self, tree: str) -> None:
        self.git("read-tree", tree)

    def apply(self, patch: Path, strip: int, *options: str) -> bool:
        command = ("apply", "--cached", "--whitespace=nowarn", f"-p{strip}", *options, str(patch))
        return self.git(*command, ok=(0, 1, 128))[0] == 0

    def tree(self) -> str:
        return self.git("write-tree")[1]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_series_of_debian(name: str, mirror: Mirror, tmp_path: Path) -> None:
    source = mirror.fetch(name)
    store = Store(_folder() / name, "vllm")
    base = source.base(store)
    patches = tmp_path / "lines"
    (patches / "debian" / "vllm").mkdir(parents=True)
    shutil.copyfile(ROOT / "patches/infernal/line.toml", patches / "debian" / "line.toml")
    folder = source.unpack_patches(tmp_path / "source")
    refused = _refused(patches, folder, store, base)

    line = read_line(patches, "debian")
    found, skipped = read_patches(
        folder, DEFAULTS, line=line, upstream="vllm", skip=tuple(refused)
    )  # fmt: skip
    done = import_series(line, "vllm", found, store, base, skipped=skipped)
    assert set(done.skipped) == set(refused)
    line = read_line(patches, "debian")
    applied = apply_series(store, base, line.series["vllm"], use_states=False)
    assert {patch.verdict for patch in applied.patches} == {"applies"}
    assert applied.tree == done.tree
    trees = dict(zip(done.files.values(), (patch.tree for patch in applied.patches), strict=True))
    oracle = Oracle(store=store, index=tmp_path / "index")
    takes = _hold_against_git(patches, folder, oracle, base, trees, refused)

    before = {path.name: path.read_bytes() for path in line.folder.rglob("*") if path.is_file()}
    work = tmp_path / "work"
    checkout(store, applied, line, "vllm", work, Reporter(quiet=True))
    for reformat in (False, True):
        exported = export(line, "vllm", work, store, base, reformat=reformat)
        assert exported.kept == exported.series == tuple(done.files)
        assert exported.tree == done.tree
    after = {path.name: path.read_bytes() for path in line.folder.rglob("*") if path.is_file()}
    assert after == before

    _compare(name, source.version, len(found) + len(skipped), refused, takes)


def _refused(patches: Path, folder: Path, store: Store, base: Commit) -> dict[str, str]:
    """What can't be imported, each with its first reason. Nothing is written meanwhile."""
    line = read_line(patches, "debian")
    refused: dict[str, str] = {}
    while error := _attempt(line, folder, store, base, refused):
        more = re.findall(r"^(\S+?):(?:\d+:)? (.*)", error.why, re.MULTILINE)
        assert more, error
        assert not list((line.folder / "vllm").iterdir())
        refused = {**dict(reversed(more)), **refused}
    return refused


def _attempt(
    line: Line, folder: Path, store: Store, base: Commit, refused: dict[str, str]
) -> PatchError | ApplyError | None:
    """What an import says; one that succeeds is undone."""
    found, _ = read_patches(folder, DEFAULTS, line=line, upstream="vllm", skip=tuple(refused))
    try:
        import_series(line, "vllm", found, store, base)
    except (PatchError, ApplyError) as error:
        return error
    for path in (line.folder / "vllm").iterdir():
        path.unlink()
    return None


def _hold_against_git(
    patches: Path, folder: Path, oracle: Oracle, base: Commit, trees: dict[str, str],
    refused: dict[str, str],
) -> set[str]:  # fmt: skip
    """Every state against ``git apply`` of Debian's file; the refused files that git takes."""
    line = read_line(patches, "debian")
    line.series["vllm"] = ()
    found, _ = read_patches(folder, DEFAULTS, line=line, upstream="vllm")
    oracle.read(base.tree)
    at = base.tree
    takes: set[str] = set()
    for file, group in groupby(found, key=lambda each: each.letter.file.partition("#")[0]):
        parts = [each.letter for each in group]
        bad = {each.file for each in parts} & set(refused)
        is_taken = oracle.apply(folder / file, parts[0].strip, *(("--check",) if bad else ()))
        good = [trees[each.file] for each in parts if each.file not in bad]
        if bad:
            takes |= bad if is_taken else set()
            if good:
                at = good[-1]
                oracle.read(at)
            continue
        assert is_taken, f"git refuses {file}"
        assert oracle.tree() == good[-1], file
        at = good[-1]
    return takes


def _compare(name: str, version: str, count: int, refused: dict[str, str], takes: set[str]) -> None:
    stricter = {file for file in takes if STRICTER.search(refused[file])}
    assert takes == stricter, {file: refused[file] for file in takes - stricter}
    known = EXPECTED[name]
    if version != known.version:
        pytest.skip(f"all as git has it; the table is of {known.version}, Debian has {version}")
    assert count == known.count
    assert set(refused) == set(known.refused), refused
    assert takes == set(known.git)
    for file, reason in known.refused.items():
        assert reason in refused[file]
