from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlay.errors import ExportError
from overlay.lines.line import UPSTREAMS, read_line
from overlay.patches.checkout import checkout
from overlay.patches.commits import Work as Opened
from overlay.patches.export import export
from overlay.patches.patch import parse_patch
from overlay.patches.series import series_text
from overlay.report import Reporter
from overlay.sources.source import Sources
from overlay.trees.apply import apply_series
from overlay.trees.store import Store, cache_folder
from tests.support.desk import FILES, ROOT, TRAILERS, lines, make_desk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlay.lines.line import Upstream
    from overlay.patches.commits import Draft
    from tests.support.desk import Desk, Work

FIRST, SECOND, THIRD = (f"area: do the {name}" for name in ("first", "second", "third"))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path)


def changed(desk: Desk, before: dict[str, tuple[bytes, int]]) -> set[str]:
    """Names of files of the series that were made, written or deleted since ``before``."""
    after = desk.snapshot()
    names = before.keys() | after.keys()
    return {Path(name).name for name in names if before.get(name) != after.get(name)}


def refused(desk: Desk, work: Work, **options: list[str]) -> str:
    """The message of the export's refusal, which must leave the patches folder alone."""
    before = desk.snapshot()
    with pytest.raises(ExportError) as caught:
        desk.export(work, **options)  # type: ignore[arg-type]
    assert desk.snapshot() == before
    assert sorted(path.name for path in desk.series.parent.iterdir()) == ["line.toml", "vllm"]
    return str(caught.value)


# --- what changes, and what doesn't --------------------------------------------------------


def test_an_untouched_line_is_no_difference(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    done = desk.export(work)
    assert desk.snapshot() == before
    assert done.kept == done.series == ("first", "second", "third")
    assert (done.rewritten, done.added, done.dropped) == ((), (), ())
    assert not done.series_changed
    assert done.tree == desk.apply().tree


def test_so_is_one_whose_commits_were_all_made_again(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    head = work.git("rev-parse", "HEAD")
    work.git("rebase", "-q", "--force-rebase", "overlay-base")
    assert work.git("rev-parse", "HEAD") != head
    desk.export(work)
    assert desk.snapshot() == before


def test_a_patch_in_another_form_is_kept_while_it_says_and_does_the_same(desk: Desk) -> None:
    """A diffstat, git's signature, short ids and another context stay as the author sent them."""
    path = desk.series / "second.patch"
    work = desk.checkout()
    foreign = work.git("format-patch", "-1", "--stdout", "--unified=5", "HEAD~1")
    foreign = foreign.replace(b"Patch-Name: second\n", b"")
    assert b"\n---\n a.py | " in foreign
    path.write_bytes(foreign)
    before = desk.snapshot()
    work = desk.checkout()
    work.git("rebase", "-q", "--force-rebase", "overlay-base")
    assert desk.export(work).kept == ("first", "second", "third")
    assert desk.snapshot() == before
    assert desk.export(work, reformat=True).rewritten == ("second",)
    assert changed(desk, before) == {"second.patch"}
    assert b"\n---\n a.py | " not in path.read_bytes()


def test_a_patch_at_other_lines_than_it_says_is_kept_in_an_untouched_series(desk: Desk) -> None:
    path = desk.series / "third.patch"
    raw = path.read_bytes()
    assert raw.count(b"@@ -44,7 +44,8 @@") == 1
    path.write_bytes(raw.replace(b"@@ -44,7 +44,8 @@", b"@@ -40,7 +40,8 @@"))
    before = desk.snapshot()
    assert desk.apply().patches[2].verdict == "offset"
    work = desk.checkout()
    assert desk.export(work).kept == ("first", "second", "third")
    assert desk.snapshot() == before
    # When its commit is made again there is no reason to keep the wrong numbers
    work.git("rebase", "-q", "--force-rebase", "overlay-base")
    assert desk.export(work).rewritten == ("third",)


def test_edit_of_one_patch_by_rebase(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    work.rebase(("pick", FIRST), ("edit", SECOND), ("pick", THIRD))
    assert "a rebase is under way" in refused(desk, work)
    work.edit("a.py", b"second\n", b"the other\n")
    work.git("commit", "-qa", "--amend", "--no-edit")
    work.git("rebase", "--continue", GIT_EDITOR="true")
    done = desk.export(work)
    assert (done.kept, done.rewritten) == (("first", "third"), ("second",))
    assert changed(desk, before) == {"second.patch"}
    assert desk.apply().tree == done.tree == work.git("rev-parse", "HEAD^{tree}").decode().strip()


def test_a_patch_that_moved_to_other_lines_is_rewritten(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    work.rebase(("edit", FIRST), ("pick", SECOND), ("pick", THIRD))
    work.edit("a.py", b"first\n", b"first\nyet\nmore\n")
    work.git("commit", "-qa", "--amend", "--no-edit")
    work.git("rebase", "--continue", GIT_EDITOR="true")
    done = desk.export(work)
    assert done.rewritten == ("first", "second", "third")
    assert changed(desk, before) == {"first.patch", "second.patch", "third.patch"}
    assert all(patch.verdict == "applies" for patch in desk.apply().patches)


def test_reword_changes_that_file_alone(desk: Desk) -> None:
    before = desk.snapshot()
    old = (desk.series / "third.patch").read_bytes()
    work = desk.checkout()
    work.amend(work.message().replace("Why the third", "Because the third"))
    done = desk.export(work)
    assert done.rewritten == ("third",)
    assert changed(desk, before) == {"third.patch"}
    new = (desk.series / "third.patch").read_bytes()
    assert new == old.replace(b"Why the third", b"Because the third")


def test_reorder_changes_the_series_and_takes_comments_along(desk: Desk) -> None:
    work = desk.checkout()
    work.rebase(("pick", SECOND), ("pick", FIRST), ("pick", THIRD))
    done = desk.export(work)
    assert done.series == ("second", "first", "third")
    assert (desk.series / "series").read_text() == (
        "# The demo line.\n# Second to none\nsecond.patch\nfirst.patch\nthird.patch  # last\n"
    )
    assert "third" in done.kept


def test_fold_needs_a_word(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    work.rebase(("pick", FIRST), ("fixup", SECOND), ("pick", THIRD))
    assert "--drop second" in refused(desk, work)
    done = desk.export(work, drop=["second.patch"])
    assert (done.kept, done.rewritten, done.dropped) == (("third",), ("first",), ("second",))
    assert changed(desk, before) == {"first.patch", "second.patch", "series"}
    assert (desk.series / "series").read_text() == (
        "# The demo line.\nfirst.patch\nthird.patch  # last\n"
    )


def test_squash_leaves_two_names_which_is_said(desk: Desk) -> None:
    work = desk.checkout()
    work.rebase(("pick", FIRST), ("squash", SECOND), ("pick", THIRD))
    assert "has several names: first, second" in refused(desk, work)


def test_drop(desk: Desk) -> None:
    work = desk.checkout()
    work.rebase(("pick", FIRST), ("pick", THIRD))
    assert "--drop second" in refused(desk, work)
    assert "still has a commit" in refused(desk, work, drop=["second", "first"])
    assert "no patch of that name" in refused(desk, work, drop=["second", "nothing"])
    assert desk.export(work, drop=["second"]).dropped == ("second",)
    assert not (desk.series / "second.patch").exists()
    assert desk.export(work).kept == ("first", "third")


def test_drop_of_everything(desk: Desk) -> None:
    work = desk.checkout()
    work.git("reset", "-q", "--hard", "overlay-base")
    done = desk.export(work, drop=["first", "second", "third"])
    assert (done.series, done.tree) == ((), desk.base.tree)
    assert (desk.series / "series").read_text() == "# The demo line.\n"


def test_split_keeps_the_name_on_one_half(desk: Desk) -> None:
    work = desk.checkout()
    message = work.message()
    work.git("reset", "-q", "--mixed", "HEAD~1")
    work.edit("a.py", b"third\nmore\n", b"third\n")
    work.commit(message)
    work.edit("a.py", b"third\n", b"third\nmore\n")
    both = work.commit(message)
    text = refused(desk, work)
    assert "are both named third" in text
    assert both[:12] in text
    work.amend(message.replace("third", "rest").replace("Patch-Name: rest\n", ""))
    done = desk.export(work)
    assert (done.rewritten, done.added, done.unnamed) == (
        ("third",), ("area-do-the-rest",), ("area-do-the-rest",),
    )  # fmt: skip
    assert done.series == ("first", "second", "third", "area-do-the-rest")


def test_insert_in_the_middle(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    work.rebase(("pick", FIRST), ("break", ""), ("pick", SECOND), ("pick", THIRD))
    work.commit(f"3 docs: say X\n\nWhy.\n\n{TRAILERS}Patch-Name: middle\n", {"b.py": b"b\n"})
    work.git("rebase", "--continue", GIT_EDITOR="true")
    done = desk.export(work)
    assert (done.added, done.kept) == (("middle",), ("first", "second", "third"))
    assert changed(desk, before) == {"middle.patch", "series"}
    raw = (desk.series / "middle.patch").read_bytes()
    assert b"Patch-Name" not in raw
    patch = parse_patch(raw, name="middle")
    assert (patch.author, patch.subject) == ("Mia Müller", "3 docs: say X")
    assert patch.body == f"Why.\n\n{TRAILERS}".strip()


def test_the_file_is_what_git_writes_for_the_commit_without_its_name(desk: Desk) -> None:
    messages = {
        "a b": f"area: x\n\nWhy.\n\n{TRAILERS}",
        "c": "area: only a subject\n",
        "d": "area: no trailers\n\nWhy.\n\nAnd more.\n",
        "e": "area: a long ünïcode subject " + "that goes on " * 8 + "\n\nWhy.\n",
    }
    work = desk.checkout()
    expected = {}
    for number, (key, message) in enumerate(messages.items()):
        gap = "" if message.endswith(TRAILERS) else "\n"
        work.commit(message, {"b.py": lines(number)})
        mail = work.git(
            "format-patch", "-1", "--stdout", "--zero-commit", "--no-signature", "--full-index",
            "--binary", "--no-stat", "--no-numbered",
        )  # fmt: skip
        name = f"n{key.replace(' ', '-')}"
        expected[name] = mail
        work.amend(f"{message}{gap}Patch-Name: {name}\n")
    desk.export(work)
    for name, mail in expected.items():
        assert (desk.series / f"{name}.patch").read_bytes() == mail
    assert desk.export(work).kept == ("first", "second", "third", *expected)


def test_white_space_at_line_ends_is_no_part_of_a_message(desk: Desk) -> None:
    work = desk.checkout()
    work.commit("area: x  \n\nWhy. \r\nSo.\t\n\nPatch-Name: x \n", {"b.py": b"1\n"})
    desk.export(work)
    patch = parse_patch((desk.series / "x.patch").read_bytes(), name="x")
    assert (patch.subject, patch.body) == ("area: x", "Why.\nSo.")


def test_rename_by_the_trailer(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    work.amend(work.message().replace("Patch-Name: third", "Patch-Name: last-one"))
    done = desk.export(work)
    assert done.renamed == {"third": "last-one"}
    assert (done.kept, done.dropped, done.added) == (("first", "second", "last-one"), (), ())
    assert changed(desk, before) == {"third.patch", "last-one.patch", "series"}
    assert (desk.series / "series").read_text().endswith("last-one.patch  # last\n")
    assert (desk.series / "last-one.patch").read_bytes() == before["demo/vllm/third.patch"][0]


def test_names_made_from_subjects(desk: Desk) -> None:
    work = desk.checkout()
    for number, subject in enumerate(
        ("Fix it", "fix: it", "47 fix it", "Ä", "area: " + "word " * 20)
    ):
        work.commit(f"{subject.strip()}\n\nWhy.\n", {"b.py": lines(number)})
    done = desk.export(work)
    assert done.unnamed == (
        "fix-it", "fix-it-2", "fix-it-3", "patch", "area-" + "-".join(["word"] * 8),
    )  # fmt: skip
    before = desk.snapshot()
    assert desk.export(work).unnamed == done.unnamed
    assert desk.snapshot() == before


def test_every_kind_of_change_survives(desk: Desk) -> None:
    work = desk.checkout()
    work.commit(
        f"area: all\n\nWhy.\n\n{TRAILERS}Patch-Name: all\n",
        {
            "crlf.txt": b"one\r\n2\r\nthree\r\n",
            "latin.txt": b"caf\xe9\xff\nstill no end",
            "data.bin": bytes(range(255, -1, -1)) * 3,
            "new.bin": b"\0\1\2",
            "run.sh": (0o100644, b"#!/bin/sh\n"),
            "b.py": None,
            "moved/b b.py": lines(39) + b"end\n",
            "link": (0o120000, b"b.py"),
            "with space.txt": b"x\r\ny",
            "tab\there\u00fc": b"odd\n",
            "empty": b"",
            ".gitattributes": b"* text=auto eol=crlf\n*.py -diff\n",
            "$Id$.sh": b"$Id$ $Id: 12 $\n",
        },
    )
    tree = work.git("rev-parse", "HEAD^{tree}").decode().strip()
    assert desk.export(work).added == ("all",)
    raw = (desk.series / "all.patch").read_bytes()
    assert b"rename from b.py\nrename to moved/b b.py\n" in raw
    assert b"GIT binary patch" in raw
    patched = desk.apply()
    assert patched.tree == tree
    before = desk.snapshot()
    assert desk.export(desk.checkout()).kept == ("first", "second", "third", "all")
    assert desk.snapshot() == before


def test_a_first_series(tmp_path: Path) -> None:
    desk = make_desk(tmp_path, patches=False)
    desk.series.rmdir()
    work = desk.checkout()
    assert desk.export(work).series == ()
    assert not desk.series.exists()
    work.commit(f"area: one\n\nWhy.\n\n{TRAILERS}", {"b.py": b"b\n"})
    assert desk.export(work).added == ("area-one",)
    assert (desk.series / "series").read_text() == "area-one.patch\n"


# --- refusals ------------------------------------------------------------------------------


def conflict(work: Work) -> None:
    work.git("branch", "side", "overlay-base")
    work.git("checkout", "-q", "side")
    work.commit("side\n", {"a.py": b"other\n"})
    work.git("checkout", "-q", "demo")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("merge", "side"), "a merge is under way"),
        (("cherry-pick", "side"), "a cherry-pick is under way"),
        (("revert", "HEAD~2"), "a revert is under way"),
        (("rebase", "side"), "a rebase is under way"),
        (("rebase", "--apply", "side"), "a rebase or 'git am' is under way"),
        (("bisect", "start", "HEAD", "overlay-base"), "a bisection is under way"),
    ],
)
def test_something_under_way(desk: Desk, command: tuple[str, ...], said: str) -> None:
    work = desk.checkout()
    conflict(work)
    if command[0] == "revert":
        work.commit("x\n\nPatch-Name: x\n", {"a.py": b"gone\n"})
    work.git(*command, ok=(0, 1))
    assert said in refused(desk, work)


def test_changes_in_no_commit(desk: Desk) -> None:
    work = desk.checkout()
    (work.path / "forgotten").write_text("new")
    (work.path / "ignored").mkdir()
    (work.path / "ignored" / "x").write_text("x")
    assert desk.export(work).untracked == ("forgotten",)
    work.write({"a.py": b"changed\n", "b.py": None})
    text = refused(desk, work)
    assert "a.py\nb.py" in text
    work.git("add", "--all")
    assert "forgotten" in refused(desk, work)
    work.git("reset", "-q", "--hard")
    (work.path / "a.py").touch()
    assert desk.export(work).kept


def test_merges_and_strangers(desk: Desk) -> None:
    work = desk.checkout()
    work.git("branch", "side", "overlay-base")
    work.git("checkout", "-q", "side")
    work.commit("side\n", {"b.py": b"other\n"})
    work.git("checkout", "-q", "demo")
    work.git("merge", "-q", "-m", "both", "side")
    assert "is a merge" in refused(desk, work)
    work.git("checkout", "-q", "--orphan", "stranger")
    work.commit("stranger\n", {"b.py": b"1\n"})
    assert "does not stand on the base tree" in refused(desk, work)


def test_commits_that_can_be_no_patch_are_named_all_at_once(desk: Desk) -> None:
    work = desk.checkout()
    empty = work.commit("area: nothing\n")
    fixup = work.commit("fixup! area: do the first\n", {"b.py": b"1\n"})
    text = refused(desk, work)
    assert f"{empty[:12]} ('area: nothing') changes nothing" in text
    assert f"{fixup[:12]}" in text
    assert "autosquash" in text


@pytest.mark.parametrize(
    "message",
    [
        "[area] subject\n\nWhy.\n",
        "Re: subject\n\nWhy.\n",
        "area: x\n\nWhy.\n---\nand more\n",
        "area: x\n\ndiff --git a/a.py b/a.py\nsaid git\n",
        "area: x\n\nWhy.\n\ndiff -u said\nthis\n",
        "area: x\n\n--- a/file\n+++ b/file\n",
        "area: x\n\nIndex: 3 of it\n",
        "area: x\n\nFrom: somebody <a@b>\n\nWhy.\n",
        "area: x\n\nWhy.\nFrom here on it is split\n",
        "area: x\n\nOne.\n\n\nTwo.\n",
        "area: x\n\nFrom 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
        "From: a <a@b>\n\nWhy.\n",
        "\n\nPatch-Name: nameless\n",
    ],
)
def test_messages_that_a_mail_would_not_carry(desk: Desk, message: str) -> None:
    work = desk.checkout()
    work.write({"b.py": b"1\n"})
    work.git("add", "--all")
    work.git(
        "commit", "-q", "--allow-empty-message", "--cleanup=verbatim", "-F", "-",
        stdin=message.encode(),
    )  # fmt: skip
    text = refused(desk, work)
    assert "mail format" in text
    assert work.git("rev-parse", "HEAD").decode()[:12] in text


def test_message_not_in_utf_8(desk: Desk) -> None:
    work = desk.checkout()
    work.write({"b.py": b"1\n"})
    work.git("commit", "-qa", "-m", "area: x")
    # 'git commit' would mend it; other tools don't
    raw = work.git("cat-file", "commit", "HEAD").replace(b"area: x", b"area: caf\xe9")
    broken = work.git("hash-object", "-t", "commit", "-w", "--stdin", stdin=raw).decode().strip()
    work.git("update-ref", "HEAD", broken)
    assert "is not UTF-8" in refused(desk, work)
    # Unless the commit says what it is in; git writes the mail in UTF-8 then
    work.git(
        "-c", "i18n.commitEncoding=ISO-8859-1", "commit", "-q", "--amend", "-F", "-",
        stdin=b"area: caf\xe9\n\nna\xefve\n",
    )  # fmt: skip
    (name,) = desk.export(work).added
    assert parse_patch((desk.series / f"{name}.patch").read_bytes(), name=name).body == "naïve"


@pytest.mark.parametrize("name", ["Upper", "with space", "-x", "../x", ".x", "x/y", ""])
def test_names_that_are_none(desk: Desk, name: str) -> None:
    work = desk.checkout()
    work.commit(f"area: x\n\nWhy.\n\nPatch-Name: {name}\n", {"b.py": b"1\n"})
    assert "is no name" in refused(desk, work)


def test_a_checkout_of_something_else(desk: Desk) -> None:
    work = desk.checkout()
    record = work.path / ".git" / "overlay.json"
    text = record.read_text()
    record.write_text(text.replace('"demo"', '"other"'))
    assert "is a checkout of other vllm" in refused(desk, work)
    record.write_text(text.replace(desk.base.commit, "0" * 40))
    assert "another base tree" in refused(desk, work)
    record.unlink()
    assert "does not say which line" in refused(desk, work)
    assert "is no git checkout" in refused(desk, desk.work(desk.patches))


def test_what_others_did_to_the_series_is_not_undone(desk: Desk) -> None:
    work = desk.checkout()
    raw = (desk.series / "first.patch").read_bytes()
    (desk.series / "first.patch").write_bytes(raw.replace(b"Why", b"How"))
    assert "first was changed" in refused(desk, work)
    (desk.series / "first.patch").write_bytes(raw)
    series = (desk.series / "series").read_text()
    (desk.series / "series").write_text(series.replace("third.patch", ""))
    assert "third was removed" in refused(desk, work)
    (desk.series / "series").write_text(series)
    work.rebase(("pick", FIRST), ("pick", SECOND))
    desk.export(work, drop=["third"])
    (desk.series / "third.patch").write_bytes(raw.replace(b"Why", b"Who"))
    (desk.series / "series").write_text(series)
    other = make_desk(desk.folder / "other")
    shutil.copy(other.series / "third.patch", desk.series / "third.patch")
    assert "third was added" in refused(desk, work)


def test_a_series_that_was_changed_while_the_line_was_read(desk: Desk) -> None:
    stale = desk.line()
    one, two = desk.checkout(), desk.checkout()
    one.amend(one.message().replace("Why", "How"))
    two.amend(two.message().replace("Why", "Who"))
    desk.export(one)
    before = desk.snapshot()
    with pytest.raises(ExportError, match="third was changed"):
        export(stale, "vllm", two.path, desk.store, desk.base)
    assert desk.snapshot() == before


def test_an_unlisted_file_is_not_overwritten(desk: Desk) -> None:
    (desk.series / "extra.patch").write_text("mine")
    work = desk.checkout()
    work.commit("area: x\n\nPatch-Name: extra\n", {"b.py": b"1\n"})
    assert "exists and is not in the series" in refused(desk, work)


def test_requires_must_name_an_earlier_patch(desk: Desk) -> None:
    work = desk.checkout()
    work.commit("area: x\n\nWhy.\n\nRequires: forth\nPatch-Name: x\n", {"b.py": b"1\n"})
    assert "'Requires: forth' names no patch" in refused(desk, work)


# --- hostility, kills, siblings ------------------------------------------------------------


def test_nothing_in_the_checkout_runs(desk: Desk) -> None:
    work = desk.checkout()
    ran = desk.folder / "ran"
    script = desk.folder / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {ran}\ncat\n")
    script.chmod(0o755)
    for key in (
        "core.fsmonitor", "core.sshCommand", "core.pager", "core.alternateRefsCommand",
        "diff.external", "diff.evil.command", "diff.evil.textconv", "filter.evil.clean",
        "filter.evil.smudge", "filter.evil.process", "gpg.program", "uploadpack.packObjectsHook",
    ):  # fmt: skip
        work.git("config", key, str(script))
    work.git("config", "diff.noprefix", "true")
    work.git("config", "diff.context", "9")
    work.git("config", "format.signature", "evil")
    work.git("config", "log.showSignature", "true")
    work.git("config", "core.hooksPath", str(desk.folder))
    (work.path / ".git" / "info" / "attributes").write_text("* filter=evil diff=evil text\n")
    for name in FILES:
        os.utime(work.path / name, follow_symlinks=False)  # So that git would look into them
    work.git("diff", "--exit-code", ok=(0, 1, 128))
    assert ran.exists()  # the trap works
    ran.unlink()
    for name in FILES:
        os.utime(work.path / name, follow_symlinks=False)
    work.git("config", "core.worktree", str(desk.folder))
    before = desk.snapshot()
    desk.export(work)
    desk.export(work, reformat=True)
    assert not ran.exists()
    assert desk.snapshot() == before


def test_a_missing_commit_is_not_fetched_by_the_checkouts_configuration(desk: Desk) -> None:
    work = desk.checkout()
    ran = desk.folder / "ran"
    for key, value in (
        ("core.repositoryFormatVersion", "1"),
        ("extensions.partialClone", "evil"),
        ("remote.evil.url", f"ext::touch {ran}"),
        ("remote.evil.promisor", "true"),
        ("protocol.ext.allow", "always"),
    ):
        work.git("config", key, value)
    (work.path / ".git" / "HEAD").write_text("1" * 40 + "\n")
    work.git("rev-parse", "HEAD^{commit}", ok=(128,))
    assert ran.exists()  # the trap works
    ran.unlink()
    assert "has no HEAD commit" in refused(desk, work)
    assert not ran.exists()


def test_a_diff_that_gives_another_tree_is_refused(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = desk.checkout()
    work.commit("area: x\n\nWhy.\n\nPatch-Name: x\n", {"b.py": b"right\n"})
    mails = Opened.mails

    def wrong(self: Opened, drafts: Sequence[Draft]) -> list[bytes]:
        """Stands in for a git whose diff is wrong; there is none at hand."""
        return [mail.replace(b"+right", b"+wrong") for mail in mails(self, drafts)]

    monkeypatch.setattr(Opened, "mails", wrong)
    assert "does not give the tree of its commit" in refused(desk, work)


def test_replaced_and_grafted_commits_do_not_count(desk: Desk) -> None:
    before = desk.snapshot()
    work = desk.checkout()
    work.git("replace", "HEAD", "HEAD~1")
    desk.export(work)
    assert desk.snapshot() == before


def test_a_split_index_and_a_linked_worktree(desk: Desk) -> None:
    work = desk.checkout()
    work.git("update-index", "--split-index")
    assert desk.export(work).kept == ("first", "second", "third")
    work.git("worktree", "add", "-q", "-b", "side", str(desk.folder / "side"))
    side = desk.work(desk.folder / "side")
    side.commit(f"area: x\n\nWhy.\n\n{TRAILERS}Patch-Name: x\n", {"b.py": b"1\n"})
    assert desk.export(side).added == ("x",)
    side.write({"b.py": b"2\n"})
    assert "b.py" in refused(desk, side)


_KILLED = """
import os, signal, sys
from pathlib import Path
import overlay.patches.series
from tests.support.desk import Desk, Work, make_desk
from overlay.trees.store import Commit, Store
folder, commit, tree, left = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
real = {"replace": Path.replace, "unlink": Path.unlink}
def counted(name):
    def call(self, *a, **k):
        global left
        if self.suffix == ".patch" or self.name == "series":
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        return real[name](self, *a, **k)
    return call
Path.replace, Path.unlink = counted("replace"), counted("unlink")
base = Commit(commit=commit, tree=tree)
desk = Desk(folder=folder, store=Store(folder / "cache", "vllm"), base=base)
desk.export(desk.work(folder / "work1"), drop=["second"])
print("done")
"""


def test_a_rerun_after_a_kill_repairs(tmp_path: Path) -> None:
    desk = make_desk(tmp_path / "whole")
    work = desk.checkout()
    message = work.message().replace("Patch-Name: third", "Patch-Name: last")
    work.amend(message.replace("Why", "How"))
    work.rebase(("pick", FIRST), ("pick", THIRD))
    work.commit(f"area: x\n\nWhy.\n\n{TRAILERS}Patch-Name: x\n", {"b.py": b"1\n"})
    start = tmp_path / "start"
    shutil.copytree(desk.folder, start, symlinks=True)
    desk.export(work, drop=["second"])
    wanted = {name: data for name, (data, _) in desk.snapshot().items()}
    for step in range(20):
        folder = tmp_path / f"step{step}"
        shutil.copytree(start, folder, symlinks=True)
        argv = (
            sys.executable, "-c", _KILLED, str(folder), desk.base.commit, desk.base.tree, str(step),
        )  # fmt: skip
        ran = subprocess.run(argv, cwd=ROOT, capture_output=True, check=False)
        if ran.returncode == 0:
            break
        assert ran.returncode == -signal.SIGKILL, ran.stderr
        again = type(desk)(folder=folder, store=Store(folder / "cache", "vllm"), base=desk.base)
        names = [patch.name for patch in again.line().series["vllm"]]
        drop = ["second"] if "second" in names else []
        again.export(again.work(folder / "work1"), drop=drop)
        assert {name: data for name, (data, _) in again.snapshot().items()} == wanted, step
    assert step == 5  # two patches, the series, two deletions


# --- the series file -----------------------------------------------------------------------

_names = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)
_comments = st.sampled_from(["", "", "# word\n", "\n", "# one\n\n# two\n", "\n# b\n", "  \n"])


@given(_names, st.lists(_comments, min_size=7, max_size=7), st.booleans(), st.data())
def test_series_text(
    names: list[str], comments: list[str], ends: bool, data: st.DataObject
) -> None:
    entries = [f"{name}.patch{data.draw(st.sampled_from(['', '  # why']))}\n" for name in names]
    text = "".join(a + b for a, b in zip(comments, [*entries, ""], strict=False))
    text = text if ends else text.removesuffix("\n")
    assert series_text(text, names, {}) == text
    wanted = data.draw(_names)
    renamed = {}
    gone = [name for name in names if name not in wanted]
    if gone:
        renamed = {gone[0]: "zz"}
        wanted.insert(data.draw(st.integers(0, len(wanted))), "zz")
    new = series_text(text, wanted, renamed)
    with tempfile.TemporaryDirectory() as folder:
        from overlay.lines.line import series_names

        path = Path(folder) / "series"
        path.write_text(new)
        assert [name for name, _ in series_names(path)] == wanted
    assert series_text(new, wanted, {}) == new


# --- properties ----------------------------------------------------------------------------

_PROPERTY = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_content = st.one_of(
    st.lists(st.sampled_from([b"a", b"b\r", b"\xff", b"", b"From x", b"-- ", b"diff --git"]))
    .map(b"\n".join),
    st.binary(max_size=40),
)  # fmt: skip
_path = st.sampled_from(["a.py", "b.py", "crlf.txt", "n/m", "n", "q \u00e4", "latin.txt", "run.sh"])
_mode = st.sampled_from([0o100644, 0o100755, 0o120000])


@given(
    st.lists(
        st.dictionaries(
            _path, st.one_of(st.none(), st.tuples(_mode, _content)), min_size=1, max_size=4
        ),
        min_size=1,
        max_size=3,
    )
)
@_PROPERTY
def test_any_commits_come_back_as_the_same_tree(
    edits: list[dict[str, tuple[int, bytes] | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        desk = make_desk(Path(folder))
        work = desk.checkout()
        made = 0
        for edit in edits:
            made += _commit_edit(work, edit)
        tree = work.git("rev-parse", "HEAD^{tree}").decode().strip()
        done = desk.export(work)
        assert done.tree == desk.apply().tree == tree
        assert len(done.added) == made
        before = desk.snapshot()
        again = desk.checkout()
        again.git("rebase", "-q", "--force-rebase", "overlay-base")
        assert desk.export(again).kept == done.series
        assert desk.snapshot() == before


def _commit_edit(work: Work, edit: dict[str, tuple[int, bytes] | None]) -> bool:
    """Commit what of ``edit`` can be done; whether anything was."""
    for name, file in edit.items():
        if file is not None and file[0] == 0o120000 and (b"\0" in file[1] or not file[1]):
            continue  # no link can be so
        parent = work.path / "n"
        if name == "n/m" and (parent.is_symlink() or parent.is_file()):
            parent.unlink()
        if name == "n" and parent.is_dir() and not parent.is_symlink():
            shutil.rmtree(parent)
        work.write({name: file})
    work.git("add", "--all", "--force")
    if not work.git("diff", "--cached", "--name-only"):
        return False
    work.git("commit", "-q", "-F", "-", stdin=b"area: edit\n\nWhy.\n")
    return True


# --- the real thing ------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("upstream", UPSTREAMS)
def test_infernal_comes_back_unchanged(upstream: Upstream, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    git = make_desk(tmp_path / "desk", patches=False).work(tmp_path)
    git.git("init", "-q")
    git.git("add", "patches")
    git.git("commit", "-q", "-m", "patches")
    line = read_line(tmp_path / "patches", "infernal")
    report = Reporter(quiet=True)
    cache = cache_folder()
    base = Sources(cache=cache, report=report).base(line, upstream, {}).commit
    store = Store(cache, upstream)
    patched = apply_series(store, base, line.series[upstream])
    made = checkout(store, patched, line, upstream, tmp_path / "work", report)
    work = replace(git, path=made.folder)
    assert work.git("status", "--porcelain", "--untracked-files=all") == b""
    done = export(line, upstream, made.folder, store, base)
    assert done.kept == tuple(patch.name for patch in line.series[upstream])
    # Once more with other commit ids, and once in canonical form: still the same bytes
    work.git("rebase", "-q", "--force-rebase", "overlay-base")
    export(line, upstream, made.folder, store, base)
    export(line, upstream, made.folder, store, base, reformat=True)
    assert git.git("status", "--porcelain", "patches") == b""
