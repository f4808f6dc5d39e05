from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from overlay.lines.line import read_line
from overlay.lines.revision import line_at
from overlay.patches.review import as_markdown, as_text, review
from tests.support.tiny import TRAILERS, git

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]


@pytest.fixture
def project(tiny: Tiny) -> Tiny:
    """The folder above ``patches`` as a repository, with one commit."""
    git(tiny.root, "init", "-q", "-b", "main", "--template=")
    commit(tiny)
    return tiny


def commit(tiny: Tiny, message: str = "A commit") -> str:
    git(tiny.root, "add", "-A", "patches")
    git(tiny.root, "commit", "-q", "--allow-empty", "-m", message)
    return git(tiny.root, "rev-parse", "HEAD").decode().strip()


def test_a_line_at_a_revision_is_the_line_that_was_there(project: Tiny) -> None:
    now = read_line(project.patches, "tiny")
    then = line_at(project.patches, "tiny", "HEAD")
    assert then is not None
    assert (then.settings, then.series) == (now.settings, now.series)
    project.edit("a line in small", "another")
    (project.folder / "vllm" / "first.patch").unlink()
    again = line_at(project.patches, "tiny", "main")
    assert again is not None
    assert (again.settings, again.series) == (now.settings, now.series)
    assert line_at(project.patches, "other", "HEAD") is None
    # Nothing was written where the project lies
    assert sorted(path.name for path in project.root.iterdir()) == sorted(
        [".git", "index", "patches", "vllm", "flashinfer"]
    )
    assert not list((project.root / ".git").glob("git-checked"))


def test_a_worktree_and_a_folder_deep_inside_a_repository_will_do(
    project: Tiny, tmp_path: Path
) -> None:
    git(project.root, "worktree", "add", "-q", "--detach", str(tmp_path / "other"))
    assert line_at(tmp_path / "other" / "patches", "tiny", "HEAD") is not None


@pytest.mark.parametrize(
    "revision",
    [
        "nothing", "", " ", "--help", "-h", "HEAD\nHEAD", "HEAD\0", "HEAD:patches", "HEAD^{tree}",
        "a..b", "\x1b[31m", "\udcff", "x" * 5000, "HEAD~99", "refs/heads/../../HEAD", ":/nothing",
    ],
)  # fmt: skip
def test_what_names_no_commit_is_refused(project: Tiny, run: Run, revision: str) -> None:
    ran = run("range-diff", "tiny", "--", revision)
    assert ran.code == 3, ran.err
    assert "internal error" not in ran.err
    assert all(letter.isprintable() or letter == "\n" for letter in ran.err)
    assert run("range-diff", "tiny", "HEAD", "--", revision).code == 3


def test_an_option_for_git_in_a_revision_does_nothing(project: Tiny, run: Run) -> None:
    target = project.root / "written"
    for word in (f"--output={target}", f"--batch-command={target}", "--upload-pack=touch x"):
        assert run("range-diff", "tiny", "--", word).code == 3
    assert not target.exists()


def test_links_and_odd_names_at_a_revision_are_not_followed(project: Tiny, run: Run) -> None:
    (project.folder / "vllm" / "..hidden.patch").write_text("x")
    (project.folder / "vllm" / "Not A Patch").write_text("x")
    commit(project)
    assert line_at(project.patches, "tiny", "HEAD") is not None
    secret = project.root / "secret"
    secret.write_text("first.patch\n")
    (project.folder / "vllm" / "series").unlink()
    (project.folder / "vllm" / "series").symlink_to(secret)
    commit(project)
    ran = run("range-diff", "tiny", "HEAD", "HEAD~1")
    assert ran.code == 3
    assert "vllm/series is no file" in ran.err


@pytest.mark.parametrize("file", ["line.toml", "vllm/series", "vllm/first.patch"])
def test_a_line_that_could_not_be_read_then_is_named_with_the_revision(
    project: Tiny, run: Run, file: str
) -> None:
    path = project.folder / file
    old = path.read_bytes()
    path.write_bytes(b"<<<<<<< HEAD\n" + old)
    commit(project)
    path.write_bytes(old)
    ran = run("range-diff", "tiny", "HEAD")
    assert ran.code in (3, 4)
    assert "tiny can't be read at HEAD" in ran.err
    assert "vllm-overlay-revision-" not in ran.err


def test_outside_of_any_repository(tiny: Tiny, run: Run) -> None:
    ran = run("range-diff", "tiny", "HEAD")
    assert ran.code == 3
    assert "in no git repository" in ran.err


def test_a_line_that_comes_or_goes(project: Tiny, run: Run) -> None:
    first = git(project.root, "rev-parse", "HEAD").decode().strip()
    git(project.root, "rm", "-rq", "patches")
    (project.root / "patches").mkdir(exist_ok=True)
    git(project.root, "commit", "-q", "-m", "Remove")
    ran = run("range-diff", "tiny", first, "HEAD", "--json")
    assert ran.json["status"] == "removed"
    assert [c["way"] for c in ran.json["upstreams"]["vllm"]] == ["dropped", "dropped"]
    assert run("range-diff", "tiny", "HEAD", first, "--json").json["status"] == "new"
    assert run("range-diff", "tiny", first, "--json").json["status"] == "removed"
    assert run("range-diff", "tiny", "HEAD").code == 3
    assert "is removed" in run("range-diff", "tiny", first, "--markdown").out


def test_nothing_changed(project: Tiny, run: Run) -> None:
    ran = run("range-diff", "tiny", "HEAD")
    assert (ran.code, ran.out) == (0, "")
    assert "nothing changed" in ran.err
    assert "3 same" in run("range-diff", "tiny", "HEAD", "--markdown").out


def test_pins_patches_and_only_the_lines_that_differ(project: Tiny, run: Run) -> None:
    project.edit('torch = "2.13.0"', 'torch = "2.14.0"')
    project.edit("+one = 33\n", "+one = 34\n", "vllm/first.patch")
    project.edit("The reason.", "A better reason.", "vllm/second.patch")
    project.add_patch("vllm", "third", {"docs/guide.md": b"# A guide\n"})
    ran = run("range-diff", "tiny", "HEAD")
    rows = [line.split("\t") for line in ran.out.split("\n\n")[0].splitlines()]
    assert rows == [
        ["setting", "", "torch", "2.13.0 -> 2.14.0"],
        ["index-only", "vllm", "second", "message"],
        ["content", "vllm", "first", ""],
        ["new", "vllm", "third", ""],
    ]
    assert "-+one = 33\n++one = 34\n" in ran.out
    assert "-The reason.\n+A better reason.\n" in ran.out
    assert "guide" not in ran.out  # a new patch is a file to read
    old = commit(project)
    again = run("range-diff", "tiny", f"{old}~1", old)
    assert again.out == ran.out


def test_markdown_shows_words_as_they_are(project: Tiny, run: Run) -> None:
    hostile = "area: <img src=x> @someone |x| **b** [l](http://x) `c` #1"
    project.add_patch(
        "vllm", "third", {"vllm/two.py": b"```\n</details><script>\n````\n"}, subject=hostile,
        trailers=TRAILERS,
    )  # fmt: skip
    commit(project)
    project.edit("+````", "+`````", "vllm/third.patch")
    out = run("range-diff", "tiny", "HEAD", "--markdown").out
    outside = re.sub(r"(?s)(`{4,})diff\n.*?\n\1\n", "", out)
    assert not re.search(r"<img|<script|@someone|\*\*b|\]\(|#1(?!\d*;)", outside)
    (table,) = [line for line in out.splitlines() if "third" in line and line.startswith("|")]
    assert table.count("|") == 6
    fence = re.search(r"^(`+)diff$", out, re.MULTILINE)
    assert fence is not None
    assert len(fence[1]) > 5


def test_markdown_stays_below_what_a_summary_may_hold(
    project: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_line(project.patches, "tiny")
    project.edit("+one = 33\n", "+one = 34\n", "vllm/first.patch")
    project.edit("The reason.", "A better reason.", "vllm/second.patch")
    found = review("tiny", before, read_line(project.patches, "tiny"))
    assert "too long" not in as_markdown(found, "a", None)
    monkeypatch.setattr("overlay.patches.review._MAX_MARKDOWN", 900)
    short = as_markdown(found, "a", None)
    assert re.search(r"^[12] more differences are too long for this page\.$", short, re.MULTILINE)
    assert len(short) < 1200
    assert len(as_text(found)[0]) == 2
