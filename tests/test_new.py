from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlay.errors import ApplyError, LineError, MachineError, PatchError
from overlay.lines.line import read_line
from overlay.lines.new import NewPatch, new_line, new_patch
from overlay.patches.patch import parse_patch
from tests.support.desk import TRAILERS, make_desk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.desk import Desk, Work

IDENTITY = 'Mia "M" Müller, Dr. <mia@example.invalid> 1700000000 -0330'


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path)


@pytest.fixture
def work(desk: Desk) -> Work:
    """A checkout with one more commit, which touches three files."""
    work = desk.checkout()
    work.commit(
        f"area: do more\n\nWhy.\n\n{TRAILERS}",
        {"b.py": b"b\r\n", "data.bin": b"\0\1", "latin.txt": b"caf\xe9 no end"},
    )
    return work


def append(desk: Desk, name: str, raw: bytes, **options: str) -> NewPatch:
    options.setdefault("identity", IDENTITY)
    return new_patch(desk.line(), "vllm", name, raw, desk.store, desk.base, **options)


def tree(work: Work) -> str:
    return work.git("rev-parse", "HEAD^{tree}").decode().strip()


def test_a_plain_diff_becomes_a_patch_with_a_template(desk: Desk, work: Work) -> None:
    diff = work.git("diff", "--binary", "--full-index", "HEAD~1", "HEAD")
    made = append(desk, "more.patch", b"some words before\n" + diff)
    assert made.path == desk.series / "more.patch"
    assert made.is_template
    assert made.applied.verdict == "applies"
    assert desk.apply().tree == tree(work)
    assert (desk.series / "series").read_text().endswith("third.patch  # last\nmore.patch\n")
    patch = parse_patch(made.path.read_bytes(), name="more")
    assert (patch.author, patch.email) == ('Mia "M" Müller, Dr.', "mia@example.invalid")
    assert patch.date == "1700000000 -0330"
    assert patch.subject == "area: say in a few words what it does"
    assert [key for key, _ in patch.trailers] == ["Upstream-Status", "Remove-When"]
    assert b"some words" not in patch.raw


def test_a_mail_keeps_what_it_says_and_gets_the_canonical_form(desk: Desk, work: Work) -> None:
    mail = work.git("format-patch", "-1", "--stdout", "--binary", "--full-index")
    assert b"\n---\n" in mail
    made = append(desk, "more", mail)
    assert not made.is_template
    raw = made.path.read_bytes()
    assert b"\n---\n" not in raw
    assert raw.startswith(b"From " + b"0" * 40)
    patch = parse_patch(raw, name="more")
    assert (patch.subject, patch.author) == ("area: do more", "Mia Müller")
    # export writes the same
    before = desk.snapshot()
    again = desk.checkout()
    assert desk.export(again).kept[-1] == "more"
    desk.export(again, reformat=True)
    assert {name: data for name, (data, _) in desk.snapshot().items()} == {
        name: data for name, (data, _) in before.items()
    }


def test_the_first_patch_of_a_series(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, patches=False)
    work = desk.checkout()
    work.write({"b.py": b"b\n"})
    made = append(desk, "one", work.git("diff"), subject="area: one")
    assert parse_patch(made.path.read_bytes(), name="one").subject == "area: one"
    assert (desk.series / "series").read_text() == "one.patch\n"


def test_a_diff_that_does_not_apply_is_not_written(desk: Desk, work: Work) -> None:
    diff = work.git("diff", "HEAD~2", "HEAD~1")  # is in the series already
    before = desk.snapshot()
    with pytest.raises(ApplyError) as caught:
        append(desk, "again", diff)
    assert "again: merged" in caught.value.why
    assert desk.snapshot() == before


def test_a_series_that_was_changed_while_the_line_was_read(desk: Desk, work: Work) -> None:
    stale = desk.line()
    path = desk.series / "third.patch"
    path.write_bytes(path.read_bytes().replace(b"Why", b"Who"))
    diff = work.git("diff", "--binary", "--full-index", "HEAD~1", "HEAD")
    before = desk.snapshot()
    with pytest.raises(LineError, match="changed meanwhile"):
        new_patch(stale, "vllm", "x", diff, desk.store, desk.base, identity=IDENTITY)
    assert desk.snapshot() == before


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "neither a mail nor a diff"),
        (b"--- a.py\n+++ a.py\n@@ -1 +1 @@\n-x\n+y\n", "neither a mail nor a diff"),
        (b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n", "ends early"),
        (b"From x\n\nno headers\n", "holds no diff"),
    ],
)
def test_what_is_no_patch(desk: Desk, raw: bytes, said: str) -> None:
    before = desk.snapshot()
    with pytest.raises(PatchError, match=said):
        append(desk, "bad", raw)
    assert desk.snapshot() == before


def test_messages_that_would_be_cut(desk: Desk, work: Work) -> None:
    mail = work.git("format-patch", "-1", "--stdout", "--binary", "--full-index")
    for old, new, said in (
        (b"Why.", b"From here\n", "split the mail"),
        (b"Why.", b"Why.\n\nPatch-Name: x", "Patch-Name"),
        (b"\n---\n", b"\n---\nand more\n", "lost"),
    ):
        with pytest.raises(PatchError, match=said):
            append(desk, "bad", mail.replace(old, new, 1))


@pytest.mark.parametrize("name", ["first", "First", "a b", "../x", ""])
def test_names_that_are_taken_or_none(desk: Desk, work: Work, name: str) -> None:
    with pytest.raises(LineError):
        append(desk, name, work.git("diff", "HEAD~1"))


def test_the_author_is_the_user_as_git_knows_them(
    desk: Desk, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    diff = work.git("diff", "--binary", "--full-index", "HEAD~1", "HEAD")
    home = desk.folder / "someone"
    home.mkdir()
    for key in ("NAME", "EMAIL", "DATE"):
        monkeypatch.delenv(f"GIT_AUTHOR_{key}", raising=False)
        monkeypatch.delenv(f"GIT_COMMITTER_{key}", raising=False)
    for key in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(key, str(home))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.delenv("GIT_CONFIG_GLOBAL", raising=False)
    monkeypatch.delenv("EMAIL", raising=False)
    (home / ".gitconfig").write_text("[user]\n useConfigOnly = true\n")
    with pytest.raises(MachineError, match="who you are"):
        append(desk, "mine", diff, identity="")
    (home / ".gitconfig").write_text("[user]\n name = Zoë\n email = zoe@example.invalid\n")
    made = append(desk, "mine", diff, identity="")
    patch = parse_patch(made.path.read_bytes(), name="mine")
    assert (patch.author, patch.email) == ("Zoë", "zoe@example.invalid")


def test_a_new_line(desk: Desk) -> None:
    folder = new_line(desk.patches, "next", like="demo")
    assert folder == desk.patches / "next"
    text = (desk.patches / "demo" / "line.toml").read_bytes()
    assert b"# " in text
    assert (folder / "line.toml").read_bytes() == text
    line = read_line(desk.patches, "next")
    assert line.series == {"vllm": (), "flashinfer": ()}
    assert (folder / "vllm" / "series").read_text().startswith("# vllm ")
    assert sorted(path.name for path in desk.patches.iterdir()) == ["demo", "next"]


@pytest.mark.parametrize(
    ("name", "like", "said"),
    [
        ("demo", "demo", "exists already"),
        ("Next", "demo", "no codename"),
        ("a/b", "demo", "no codename"),
        ("next", "demi", "did you mean 'demo'"),
    ],
)
def test_a_new_line_that_can_not_be(desk: Desk, name: str, like: str, said: str) -> None:
    before = desk.snapshot()
    with pytest.raises(LineError) as caught:
        new_line(desk.patches, name, like=like)
    assert said in str(caught.value)
    assert desk.snapshot() == before
