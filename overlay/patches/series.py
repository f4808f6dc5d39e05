"""Change a series folder as a whole: the series file's text, and patch files proven first."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlay.errors import ExportError, LineError, PatchError
from overlay.files import locked, machine_errors, write_atomic
from overlay.lines.line import SERIES_FILE, read_series
from overlay.patches.patch import NAME_TRAILER, SUFFIX, Patch
from overlay.trees.apply import apply_series

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from overlay.lines.line import Line, Upstream
    from overlay.trees.store import Commit, Store


def publish(
    target: Path,
    files: Mapping[str, bytes],
    series: bytes,
    gone: Sequence[str],
    *,
    known: Mapping[str, Patch],
    store: Store,
    base: Commit,
    trees: Sequence[str],
) -> list[str]:
    """Make ``target`` hold ``files`` and ``series``, proven first; file names that were written.

    Args:
        target: the series' folder.
        files: patch name -> content, in order.
        series: text of the series file.
        gone: names whose files go.
        known: patches that the series had; another file at a new name is not overwritten.
        store, base: to apply on.
        trees: tree after each patch.
    """
    for name, raw in files.items():
        path = target / f"{name}{SUFFIX}"
        if name not in known and path.exists() and path.read_bytes() != raw:
            raise ExportError(
                f"{target.name}/{path.name} exists and is not in the series",
                fix=f"remove the file, or choose another name ({NAME_TRAILER}: in the commit)",
            )
    with _stage(target) as stage:
        for name, raw in files.items():
            write_atomic(stage / f"{name}{SUFFIX}", raw)
        write_atomic(stage / SERIES_FILE, series)
        _prove(stage, store, base, trees)
        written: list[str] = []
        if not (series or target.exists()):
            return written
        target.mkdir(exist_ok=True)
        # Patches, then the series, then deletions: a kill between them leaves files that the
        # series doesn't list, or contents that the next export writes again.
        for name in (*(f"{name}{SUFFIX}" for name in files), SERIES_FILE):
            path = target / name
            if not path.exists() or path.read_bytes() != (stage / name).read_bytes():
                (stage / name).replace(path)
                written.append(name)
        for name in gone:
            (target / f"{name}{SUFFIX}").unlink(missing_ok=True)
        return written


def extend(
    line: Line,
    upstream: Upstream,
    mails: Mapping[str, bytes],
    store: Store,
    base: Commit,
    trees: Sequence[str],
) -> None:
    """Put patches at the end of a series, proven first.

    Args:
        line: as its folder says it now; one that was changed since is refused.
        upstream: whose series.
        mails: patch name -> content, in order.
        store, base: to apply on.
        trees: tree after each patch of the whole series.
    """
    target = line.folder / upstream
    old = {each.name: each for each in line.series[upstream]}
    files = {name: each.raw for name, each in old.items()} | dict(mails)
    with (
        locked(store.folder.with_suffix(".export.lock")),
        machine_errors(target, is_cache=False),
    ):
        if read_series(target) != line.series[upstream]:
            raise LineError(f"the {upstream} series was changed meanwhile", fix="run it again")
        series = target / SERIES_FILE
        text = series.read_bytes().decode() if series.exists() else ""
        publish(
            target, files, series_text(text, list(files), {}).encode(), (),
            known=old, store=store, base=base, trees=trees,
        )  # fmt: skip


def series_text(old: str, names: Sequence[str], renamed: Mapping[str, str]) -> str:
    """A series file that lists ``names``, with the comments of ``old`` where they belong.

    Comments directly above a patch, or behind it, go with it. What a blank line sets apart
    stays, in front of the same patch. The first block of the file is its heading and stays on
    top. Same names in the same order give the same text.
    """
    heading, blocks, tail = _blocks(old)
    order = {renamed.get(name, name): block for name, block in blocks.items()}
    changes = {new: before for before, new in renamed.items()}
    out = [heading]
    homeless = [block.apart for name, block in order.items() if name not in names]
    for name in names:
        block = order.get(name, _Block("", "", f"{name}{SUFFIX}\n"))
        entry = block.entry
        if name in changes:
            entry = entry.replace(changes[name], name, 1)
        out += [block.apart, block.above, entry]
    out += [text for text in homeless if text.strip()]
    out.append(tail)
    pieces = [piece for piece in out if piece]
    return "".join(
        piece if piece.endswith("\n") or piece is pieces[-1] else piece + "\n" for piece in pieces
    )


@dataclass(frozen=True, slots=True)
class _Block:
    """Lines of a series file up to and with one entry."""

    apart: str
    above: str
    entry: str


def _blocks(text: str) -> tuple[str, dict[str, _Block], str]:
    heading, above = "", ""
    blocks: dict[str, _Block] = {}
    for line in text.splitlines(keepends=True):
        entry = re.sub(r"(^|\s)#.*", "", line).strip()
        if not entry:
            above += line
            continue
        cut = max((m.end() for m in re.finditer(r"^[ \t]*\r?\n", above, re.MULTILINE)), default=0)
        apart, above = above[:cut], above[cut:]
        if not blocks:
            heading, apart, above = (apart, "", above) if cut else (above, "", "")
        blocks[entry.removesuffix(SUFFIX)] = _Block(apart, above, line)
        above = ""
    # Of a series that is still empty, all there is is its heading
    return (heading, blocks, above) if blocks else (above, {}, "")


def _prove(stage: Path, store: Store, base: Commit, trees: Sequence[str]) -> None:
    try:
        patches = read_series(stage)
    except (LineError, PatchError) as error:
        raise ExportError(error.what, why=error.why, fix=error.fix) from None
    patched = apply_series(store, base, patches)
    for patch, tree in zip(patched.patches, trees, strict=True):
        if not patch.verdict.good or patch.tree != tree:
            raise ExportError(
                f"{patch.name} as a patch does not give the tree of its commit",
                why="\n".join(
                    [f"{patch.verdict}: tree {patch.tree}, the commit has {tree}"]
                    + [f"{finding.path}: {finding.why}" for finding in patch.findings]
                ),
                fix="nothing was written; the commit holds what git's diff format can't carry",
            )


@contextlib.contextmanager
def _stage(target: Path) -> Iterator[Path]:
    """A folder beside ``target``, of the same name as messages show; leftovers go first."""
    prefix = f".export-{target.name}-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f"{prefix}*"):  # the caller holds the lock: nobody's
        shutil.rmtree(left, ignore_errors=True)
    holder = target.parent / f"{prefix}{os.getpid()}"
    stage = holder / target.name
    stage.mkdir(parents=True)
    try:
        yield stage
    finally:
        shutil.rmtree(holder, ignore_errors=True)
