"""A line as the project's own history has it at a revision.

What a revision holds is untrusted: only files of a line's layout are taken over, regular ones,
into a folder of our own, and read there by the same code as ever.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import LineError, OverlayError, PatchError
from overlay.lines.line import CODENAME, LINE_FILE, SERIES_FILE, UPSTREAMS, Line, read_line
from overlay.patches.checkout import git_folders
from overlay.patches.patch import NAME, SUFFIX
from overlay.trees.git import Git, ObjectReader
from overlay.trees.objects import parse_tree

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

_FOLDER, _PLAIN = 0o40000, (0o100644, 0o100755)
# Longer names of revisions are no names
_MAX_REVISION = 1000


def line_at(root: Path, name: str, revision: str) -> Line | None:
    """The line ``name`` of the folder ``root`` at a revision; None when it has none then.

    Its ``folder`` is gone when this returns.

    Raises:
        LineError: ``root`` is in no repository, there is no such revision, or the line could
            not be read then; ``PatchError``: one of its patches could not.
    """
    if not CODENAME.match(name):
        raise LineError(f"there is no line {name!r}", fix="line names are letters and digits")
    with tempfile.TemporaryDirectory(prefix="vllm-overlay-revision-") as scratch:
        files = _line_files(root.resolve(), name, revision, Path(scratch))
        if LINE_FILE not in files:
            return None
        for path, data in files.items():
            target = Path(scratch, name, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        try:
            return read_line(Path(scratch), name)
        except (LineError, PatchError) as error:
            kind: type[OverlayError] = type(error)
            raise kind(
                f"{name} can't be read at {_shown(revision)}: {error.what}",
                why=error.why,
                fix="compare with a revision at which it can be",
            ) from None


class _Elsewhere(Git):
    """Git that works from a folder of ours on somebody's repository, and writes nothing there."""

    def __init__(self, folder: Path, repository: Path) -> None:
        super().__init__(folder)
        self._repository = repository

    def open(
        self, *arguments: str, env: Mapping[str, str] | None = None, network: bool = False
    ) -> subprocess.Popen[bytes]:
        own = {"GIT_DIR": str(self._repository), **(env or {})}
        return super().open(*arguments, env=own, network=network)


def _line_files(root: Path, name: str, revision: str, scratch: Path) -> dict[str, bytes]:
    top = _top(root)
    here = scratch / "git"
    here.mkdir()
    reader = ObjectReader(_Elsewhere(here, git_folders(top)[0]))
    try:
        tree = _tree(reader, revision)
        for step in (*root.relative_to(top).parts, name):
            tree = _folder(reader, tree, os.fsencode(step)) if tree else ""
        return _files(reader, tree) if tree else {}
    finally:
        reader.close()


def _top(root: Path) -> Path:
    for folder in (root, *root.parents):
        if (folder / ".git").exists():
            return folder
    raise LineError(
        f"{root} is in no git repository",
        why="revisions of a line are revisions of the project that holds it",
        fix="run inside a checkout of the project",
    )


def _shown(revision: str) -> str:
    return revision if revision.isprintable() and len(revision) < 80 else ascii(revision[:60])


def _tree(reader: ObjectReader, revision: str) -> str:
    """Id of a revision's tree. The name goes to git as data, never as an option."""
    plain = revision.isprintable() and revision.strip() and len(revision) <= _MAX_REVISION
    found = reader.get(f"{revision}^{{commit}}") if plain else None
    if found is None or found[1] != "commit":
        raise LineError(
            f"there is no revision {_shown(revision)!r}",
            why="a shallow clone lacks older ones" if plain else "",
            fix="name a commit, branch or tag of the project (git fetch, in a shallow clone)",
        )
    return found[2][5:45].decode()


def _names(reader: ObjectReader, tree: str) -> Mapping[bytes, tuple[int, str]]:
    found = reader.get(tree)
    if found is None:
        raise LineError(
            f"tree {tree} is missing from the project's repository",
            fix="fetch it, if the clone is a partial one",
        )
    return parse_tree(found[2])


def _folder(reader: ObjectReader, tree: str, name: bytes) -> str:
    mode, oid = _names(reader, tree).get(name, (0, ""))
    return oid if mode == _FOLDER else ""


def _files(reader: ObjectReader, tree: str) -> dict[str, bytes]:
    """Content by path of what makes a line."""
    found: dict[str, tuple[int, str] | None] = {}
    found[LINE_FILE] = _names(reader, tree).get(LINE_FILE.encode())
    for upstream in UPSTREAMS:
        below = _folder(reader, tree, upstream.encode())
        for raw, entry in _names(reader, below).items() if below else ():
            name = raw.decode(errors="replace")
            is_patch = name.endswith(SUFFIX) and NAME.match(name.removesuffix(SUFFIX))
            if is_patch or name == SERIES_FILE:
                found[f"{upstream}/{name}"] = entry
    files = {}
    for path, located in found.items():
        if located is None:
            continue
        mode, oid = located
        blob = reader.get(oid) if mode in _PLAIN else None
        if blob is None:
            raise LineError(
                f"{path} is no file, or its content is missing from the project's repository",
                fix="compare with a revision at which it is there",
            )
        files[path] = blob[2]
    return files
