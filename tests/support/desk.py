"""A maintainer's desk: a line with a small series, its store, and checkouts driven by plain git.

desk = make_desk(folder)               # a line 'demo' with the patches first, second, third
work = desk.checkout()                 # Work: .git(...), .write(...), .commit(...), .rebase(...)
work.rebase({"second": "drop"})
exported = desk.export(work, drop=["second"])
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlay.lines.line import Line, read_line
from overlay.patches.checkout import Checkout, checkout
from overlay.patches.export import Exported, export
from overlay.report import Reporter
from overlay.sources.archive import Member
from overlay.trees.apply import PatchedTree, apply_series
from overlay.trees.store import Commit, Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    File = bytes | tuple[int, bytes] | None

ROOT = Path(__file__).parents[2]
TRAILERS = "Upstream-Status: Pending\nRemove-When: upstream does it\n"


def lines(count: int, word: str = "line") -> bytes:
    return b"".join(b"%s %d\n" % (word.encode(), number) for number in range(1, count + 1))


FILES: dict[str, bytes | tuple[int, bytes]] = {
    "a.py": lines(60),
    "b.py": lines(40),
    "crlf.txt": b"one\r\ntwo\r\nthree\r\n",
    "latin.txt": b"caf\xe9\nno end",
    "data.bin": bytes(range(256)) * 3,
    "run.sh": (0o100755, b"#!/bin/sh\n"),
    "link": (0o120000, b"a.py"),
    "with space.txt": b"x\n",
    # Attributes that would change bytes, or what a diff shows, if anything looked at them
    ".gitattributes": b"*.txt text eol=lf\n*.py filter=evil diff=evil\n*.bin binary\n*.sh ident\n",
    ".gitignore": b"ignored/\n",
}

_SEQUENCE_EDITOR = """
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
todo = [l for l in path.read_text().splitlines() if l and not l.startswith("#")]
plan = json.loads(Path(sys.argv[0]).with_suffix(".json").read_text())
by = {l.split(" ", 2)[2].removeprefix("# "): l.split(" ", 2)[1] for l in todo}
out = []
for word, subject in plan:
    out.append(f"{word} {by[subject]}" if subject in by else word)
path.write_text("\\n".join(out) + "\\n")
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A git repository with files, driven by plain git under a maintainer's identity."""

    path: Path
    home: Path

    def git(
        self, *arguments: str, stdin: bytes = b"", ok: Sequence[int] = (0,), **env: Any
    ) -> bytes:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        clean |= {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_AUTHOR_NAME": "Mia Müller",
            "GIT_AUTHOR_EMAIL": "mia@example.invalid",
            "GIT_COMMITTER_NAME": "Mia",
            "GIT_COMMITTER_EMAIL": "mia@example.invalid",
            "LC_ALL": "C.UTF-8",
        }
        done = subprocess.run(
            ("git", *arguments), cwd=self.path, env=clean | env, input=stdin, capture_output=True,
            check=False,
        )  # fmt: skip
        assert done.returncode in ok, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def write(self, files: Mapping[str, File]) -> None:
        for name, file in files.items():
            path = self.path / name
            if path.is_symlink() or path.exists():
                path.unlink()
            if file is None:
                continue
            mode, data = file if isinstance(file, tuple) else (0o100644, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            if mode == 0o120000:
                path.symlink_to(os.fsdecode(data))
            else:
                path.write_bytes(data)
                path.chmod(mode & 0o777)

    def edit(self, name: str, old: bytes, new: bytes) -> None:
        data = (self.path / name).read_bytes()
        assert old in data
        (self.path / name).write_bytes(data.replace(old, new, 1))

    def commit(self, message: str, files: Mapping[str, File] | None = None, **env: Any) -> str:
        self.write(files or {})
        self.git("add", "--all", "--force")
        text = message.encode()
        self.git(
            "commit", "-q", "--allow-empty", "--cleanup=verbatim", "-F", "-", stdin=text, **env
        )
        return self.git("rev-parse", "HEAD").decode().strip()

    def amend(self, message: str) -> None:
        text = message.encode()
        self.git("commit", "-q", "--amend", "--cleanup=verbatim", "-F", "-", stdin=text)

    def rebase(self, *plan: tuple[str, str], ok: Sequence[int] = (0,)) -> None:
        """``git rebase -i overlay-base`` with a scripted editor: (word, subject) a line."""
        import json

        editor = self.home / "sequence.py"
        editor.write_text(_SEQUENCE_EDITOR)
        editor.with_suffix(".json").write_text(json.dumps(plan))
        self.git(
            "rebase", "-q", "-i", "overlay-base", ok=ok, GIT_EDITOR="true",
            GIT_SEQUENCE_EDITOR=f"{sys.executable} {editor}",
        )  # fmt: skip

    def message(self, commit: str = "HEAD") -> str:
        return self.git("log", "-1", "--format=%B", commit).decode().rstrip("\n") + "\n"

    def members(self) -> list[Member]:
        found = []
        for entry in self.git("ls-tree", "-r", "-z", "HEAD").split(b"\0")[:-1]:
            head, _, path = entry.partition(b"\t")
            mode, _, blob = head.decode().split()
            data = self.git("cat-file", "blob", blob)
            found.append(Member(path=path, mode=int(mode, 8), data=data))
        return found


@dataclass(kw_only=True)
class Desk:
    folder: Path
    store: Store
    base: Commit
    count: int = 0

    @property
    def patches(self) -> Path:
        return self.folder / "patches"

    @property
    def series(self) -> Path:
        return self.patches / "demo" / "vllm"

    def line(self) -> Line:
        return read_line(self.patches, "demo")

    def apply(self) -> PatchedTree:
        return apply_series(self.store, self.base, self.line().series["vllm"])

    def checkout(self, **options: Any) -> Work:
        self.count += 1
        made = self.make(self.folder / f"work{self.count}", **options)
        return self.work(made.folder)

    def work(self, path: Path) -> Work:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return Work(path=path, home=home)

    def make(self, folder: Path, **options: Any) -> Checkout:
        return checkout(
            self.store, self.apply(), self.line(), "vllm", folder, Reporter(quiet=True),
            **options,
        )  # fmt: skip

    def export(self, work: Work, *, drop: Sequence[str] = (), reformat: bool = False) -> Exported:
        return export(
            self.line(), "vllm", work.path, self.store, self.base, drop=drop, reformat=reformat
        )

    def snapshot(self) -> dict[str, tuple[bytes, int]]:
        """Every file of the patches folder: content and inode. A rewritten file has another."""
        return {
            str(path.relative_to(self.patches)): (path.read_bytes(), path.stat().st_ino)
            for path in sorted(self.patches.rglob("*"))
            if path.is_file()
        }


def make_desk(folder: Path, *, patches: bool = True) -> Desk:
    """The line ``demo`` in ``folder``; its three patches were written by plain git."""
    origin = Work(path=folder / "origin", home=folder)
    origin.path.mkdir(parents=True)
    origin.git("init", "-q", "-b", "main", "--template=")
    (origin.path / ".git" / "info").mkdir()
    # The repository that stands for upstream must hold these bytes, whatever its attributes say
    (origin.path / ".git" / "info" / "attributes").write_text("* -text !filter !diff !ident\n")
    origin.commit("Begin\n", FILES)
    store = Store(folder / "cache", "vllm")
    base = store.import_tree(
        origin.members(), ref="refs/overlay/base/demo", message="vllm 1.0\n", expect={}
    )
    desk = Desk(folder=folder, store=store, base=base)
    desk.series.mkdir(parents=True)
    shutil.copyfile(ROOT / "patches/infernal/line.toml", desk.patches / "demo" / "line.toml")
    if patches:
        for number, (name, old) in enumerate((("first", 5), ("second", 25), ("third", 45)), 1):
            origin.edit("a.py", b"line %d\n" % old, b"%s\nmore\n" % name.encode())
            message = f"area: do the {name}\n\nWhy the {name} is done.\n\n{TRAILERS}"
            origin.commit(message, GIT_AUTHOR_DATE=f"{1700000000 + number * 60} +0130")
            mail = origin.git(
                "format-patch", "-1", "--stdout", "--zero-commit", "--no-signature",
                "--full-index", "--binary", "--no-stat", "--no-numbered",
            )  # fmt: skip
            (desk.series / f"{name}.patch").write_bytes(mail)
        (desk.series / "series").write_text(
            "# The demo line.\nfirst.patch\n# Second to none\nsecond.patch\nthird.patch  # last\n"
        )
    return desk
