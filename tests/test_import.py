"""Patches of other tools into a series: held against git am, git apply and diff(1)."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlay.errors import ApplyError, LineError, OverlayError, PatchError
from overlay.lines.lint import lint_line
from overlay.patches.diff import Kind
from overlay.patches.foreign import Defaults, check_author, read_letter, read_letters
from overlay.patches.importer import Imported, import_series, read_patches
from overlay.patches.loosediff import read_diffs, split_parts
from tests.support.desk import Desk, make_desk
from tests.test_match import commit_all, damaged, histories

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from overlay.patches.patch import Patch
    from overlay.trees.store import Commit, Store
    from tests.conftest import Ran, Repo
    from tests.support.tiny import Tiny

DEFAULTS = Defaults(author="Def Ault <def@example.invalid>", date="1600000000 +0000")
EDIT = "@@ -2,3 +2,3 @@\n line 2\n-line 3\n+line three\n line 4\n"
PLAIN = f"--- a/a.py\n+++ b/a.py\n{EDIT}"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path / "desk", patches=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "patches"
    made.mkdir()
    return made


def fill(folder: Path, files: Mapping[str, str | bytes], series: str | None = None) -> Path:
    """Patch files in a folder, listed in a series file in this order or as ``series`` says."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    listed = "".join(f"{name}\n" for name in files) if series is None else series
    (folder / "series").write_text(listed)
    return folder


def take(
    desk: Desk, path: Path, *, append: bool = False, defaults: Defaults = DEFAULTS, **more: Any
) -> Imported:
    line = desk.line()
    found, skipped = read_patches(path, defaults, line=line, upstream="vllm", **more)
    return import_series(
        line, "vllm", found, desk.store, desk.base, skipped=skipped, append=append
    )  # fmt: skip


def one(desk: Desk, folder: Path, text: str | bytes, **more: Any) -> Patch:
    """The patch that a file becomes."""
    take(desk, fill(folder, {"fix.patch": text}), **more)
    return desk.line().series["vllm"][0]


def refused(desk: Desk, path: Path, kind: type[OverlayError] = PatchError, **more: Any) -> str:
    """All that is said when nothing is imported, and nothing is."""
    before = desk.snapshot()
    with pytest.raises(kind) as caught:
        take(desk, path, **more)
    assert desk.snapshot() == before
    return str(caught.value)


# --- folders -------------------------------------------------------------------------------


def test_a_quilt_folder(desk: Desk, folder: Path) -> None:
    files = {
        "debian/Fix_It.patch": f"Description: fix it\n Why.\nAuthor: A B <a@b.invalid>\n\n{PLAIN}",
        "0007-index.diff": "Index: x/b.py\n" + "=" * 67 + "\n--- x.orig/b.py\t2020-01-01 10:00:00\n"
        "+++ x/b.py\t2020-01-02 10:00:00\n@@ -1,2 +1,3 @@\n line 1\n+new\n line 2\n",
        "zero.patch": "--- b.py\n+++ b.py\n@@ -40,2 +40,3 @@\n line 39\n line 40\n+end\n",
    }
    series = "# heading\ndebian/Fix_It.patch\n\n0007-index.diff # why\nzero.patch -p0\n"
    done = take(desk, fill(folder, files, series))
    assert done.files == {
        "fix_it": "debian/Fix_It.patch", "index": "0007-index.diff", "zero": "zero.patch",
    }  # fmt: skip
    assert done.offsets == ()
    assert (desk.series / "series").read_text() == "fix_it.patch\nindex.patch\nzero.patch\n"
    assert desk.apply().tree == done.tree
    assert {patch.verdict for patch in desk.apply().patches} == {"applies"}
    origin = desk.work(desk.folder / "origin")
    for name, strip in (("debian/Fix_It.patch", 1), ("0007-index.diff", 1), ("zero.patch", 0)):
        origin.git("apply", "--index", f"-p{strip}", str(folder / name))
    assert origin.git("write-tree").decode().strip() == done.tree


def test_numbered_mails_and_a_mailbox_say_what_git_am_says(desk: Desk, tmp_path: Path) -> None:
    origin = desk.work(desk.folder / "origin")
    for number, subject in enumerate(("one: do", "[media] two: do", "three: d\u00f6 it"), 1):
        origin.edit("a.py", b"line %d\n" % (9 * number), b"%d\n" % number)
        message = f"{subject}\n\nWhy {number}.\n\nSigned-off-by: Mia <mia@example.invalid>\n"
        origin.commit(message, GIT_AUTHOR_DATE=f"{1700000000 + number} -0330")
    out = tmp_path / "out"
    origin.git("format-patch", "-q", "-o", str(out), "--cover-letter", "HEAD~3")
    box = tmp_path / "topic.mbox"
    box.write_bytes(origin.git("format-patch", "--stdout", "HEAD~3"))
    origin.git("reset", "-q", "--hard", "HEAD~3")
    origin.git("am", "-q", stdin=box.read_bytes())
    form = "--format=%an <%ae> %ad%n%B%x00"
    said = origin.git("log", "--reverse", "--date=raw", form, "HEAD~3..").decode().split("\0\n")
    for path, names in ((out, ["one-do", "media-two-do", "three-d-it"]), (box, None)):
        fresh = make_desk(tmp_path / path.name.replace(".", "-"), patches=False)
        done = take(fresh, path)
        assert done.tree == origin.git("rev-parse", "HEAD^{tree}").decode().strip()
        assert list(done.files) == (names or ["one-do", "two-do", "three-d-it"])
        patches = fresh.line().series["vllm"]
        assert [
            f"{p.author} <{p.email}> {p.date}\n{p.message}".strip() for p in patches
        ] == [text.strip("\0\n") for text in said if text.strip("\0\n")]  # fmt: skip


def test_the_imported_series_is_in_the_form_of_export(desk: Desk, folder: Path) -> None:
    files = {f"{i}-p.patch": PLAIN.replace("three", f"x{i}").replace("-line 3", f"-line {w}")
             for i, w in ((1, "3"), (2, "x1"))}  # fmt: skip
    take(desk, fill(folder, files))
    before = desk.snapshot()
    work = desk.checkout()
    assert desk.export(work).kept == ("p", "p-2")
    assert desk.snapshot() == before
    desk.export(work, reformat=True)
    assert {k: v[0] for k, v in desk.snapshot().items()} == {k: v[0] for k, v in before.items()}
    codes = {fault.code for fault in lint_line(desk.patches, "demo").faults}
    assert not codes & {"form", "malformed", "numbered-name"}


def test_append_and_a_series_that_is_not_empty(desk: Desk, folder: Path, tmp_path: Path) -> None:
    take(desk, fill(folder, {"fix.patch": PLAIN}))
    more = tmp_path / "more"
    second = PLAIN.replace("-line 3", "-line three").replace("+line three", "+3")
    fill(more, {"fix.patch": second})
    assert "has 1 patches already" in refused(desk, more, LineError)
    first = (desk.series / "fix.patch").read_bytes()
    done = take(desk, more, append=True)
    assert (desk.series / "series").read_text() == "fix.patch\nfix-2.patch\n"
    assert (desk.series / "fix.patch").read_bytes() == first
    assert desk.apply().tree == done.tree


def test_all_that_is_wrong_is_said_at_once_and_what_is_right_can_be_had(
    desk: Desk, folder: Path
) -> None:
    files = {
        "good.patch": PLAIN,
        "again.patch": PLAIN,
        "bad.patch": "--- a/b.py\n+++ b/b.py\n@@ -1,2 +1,2 @@\n line 1\n-nothing\n+x\n",
        "binary.patch": "diff --git a/data.bin b/data.bin\nindex 1111..2222 100644\n"
        "Binary files a/data.bin and b/data.bin differ\n",
    }
    said = refused(desk, fill(folder, files))
    assert "3 of 4 patches" in said
    assert "again.patch:3: a.py: the file is already" not in said
    assert "again.patch:3: a.py: the change is there already, at line 2" in said
    assert "bad.patch:3: b.py: the context at line 1 is not in the file" in said
    assert "binary.patch:3: binary diff without content" in said
    assert "is left to import" in refused(desk, folder, LineError, skip=list(files))
    done = take(desk, folder, skip=["again.patch", "bad", "binary.patch"])
    assert done.files == {"good": "good.patch"}
    assert done.skipped == ("again.patch", "bad.patch", "binary.patch")


def test_a_patch_that_nothing_is_wrong_with_but_that_does_not_apply(
    desk: Desk, folder: Path
) -> None:
    refused(desk, fill(folder, {"x.patch": PLAIN.replace(" line 2", " line two")}), ApplyError)


@pytest.mark.parametrize(
    ("series", "said"),
    [
        ("../out.patch\n", "lies outside"),
        ("/etc/passwd\n", "lies outside"),
        ("link.patch\n", "lies outside"),
        ("fix.patch -R\n", "options -R"),
        ("fix.patch -p1 -p0\n", "options"),
        ("fix.patch.gz\n", "compressed"),
        ("fix.patch\nfix.patch\n", "listed already"),
        ("none.patch\n", "can't read"),
        ("# nothing\n", "names no patch"),
    ],
)
def test_a_series_that_can_not_be(desk: Desk, folder: Path, series: str, said: str) -> None:
    (folder.parent / "out.patch").write_text(PLAIN)
    (folder / "link.patch").symlink_to(folder.parent / "out.patch")
    fill(folder, {"fix.patch": PLAIN}, series)
    assert said in refused(desk, folder, LineError)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["0001-a.patch", "b.patch"], "b.patch has no number"),
        (["0001-a.patch", "1-b.patch"], "the same number"),
        ([], "names no patch"),
    ],
)
def test_a_folder_without_an_order(
    desk: Desk, folder: Path, names: list[str], said: str
) -> None:  # fmt: skip
    for name in names:
        (folder / name).write_text(PLAIN)
    assert said in refused(desk, folder, LineError)
    assert "no such patch" in refused(desk, fill(folder, {"a": PLAIN}), LineError, skip=["b"])


# --- what stands above a diff --------------------------------------------------------------

DEP3 = """Description: make it faster
 It was slow.
 .
 Now it isn't.
Author: Ann Author <ann@example.invalid>
Origin: vendor, https://example.invalid/1
Bug-Debian: https://example.invalid/2
Bug-Debian: https://example.invalid/3
Last-Update: 2021-02-03
---
This patch header follows DEP-3.
 a.py | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

"""
DEP3_BODY = """It was slow.

Now it isn't.

This patch header follows DEP-3.

Origin: vendor, https://example.invalid/1
Bug-Debian: https://example.invalid/2
Bug-Debian: https://example.invalid/3
Last-Update: 2021-02-03"""

HEADS = {
    "dep3": (DEP3, "Ann Author", "1612310400 +0000", "make it faster", DEP3_BODY),
    "mail with fields": (
        "From: =?UTF-8?q?J=C3=BCrg?= <j@x.invalid>\nDate: Wed Apr 5 14:37:42 2023 +0300\n"
        "Subject: [PATCH 2/3] Re: [net] long\n subject\nX-Mailer: no\nForwarded: no\n\n"
        "Why.\n\nSigned-off-by: J <j@x.invalid>\n---\n a.py | 2 +-\n\n",
        "J\u00fcrg", "1680694662 +0300", "long subject",
        "Why.\n\nSigned-off-by: J <j@x.invalid>\nForwarded: no",
    ),
    "free text": ("# DP: a word.\n\nAnd more.\n\n", "Def Ault", "1600000000 +0000", "fix",
                  "# DP: a word.\n\nAnd more."),
    "nothing": ("", "Def Ault", "1600000000 +0000", "fix", ""),
    "like a field": ("Note: a word\n\n", "Def Ault", "1600000000 +0000", "fix", "Note: a word"),
    "no address": (
        "Description: x\nAuthor: Somebody\nDate: 2020-01-02 03:04:05 -0100\n\n",
        "Def Ault", "1577937845 -0100", "x", "Author: Somebody",
    ),
    "empty first line": ("Subject:\n the\n subject\nBug:\n https://x.invalid\n\n", "Def Ault",
                         "1600000000 +0000", "the subject", "Bug: https://x.invalid"),
    "its own name": (
        "Subject: x\n\nWhy.\n\nPatch-Name: fix.patch\nBug: y\n\n",
        "Def Ault", "1600000000 +0000", "x", "Why.\n\nBug: y",
    ),
    "zone in words": ("From: a@b.invalid\nDate: Fri, 31 May 2013 19:12:12 +0000 (+0100)\n\n",
                      "a@b.invalid", "1370027532 +0000", "fix", ""),
    "words before a mail": (
        f"Backport of:\n\nFrom {'1' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@b.invalid>\n"
        "Date: Mon, 1 Jan 2024 00:00:00 +0000\nSubject: s\n\nWhy.\n---\n",
        "A", "1704067200 +0000", "s", "Why.\n\nBackport of:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_heads(desk: Desk, folder: Path, case: str) -> None:
    head, author, date, subject, body = HEADS[case]
    patch = one(desk, folder, head + PLAIN)
    assert (patch.author, patch.date, patch.subject, patch.body) == (author, date, subject, body)


def test_a_charset_is_taken_where_it_is_said(desk: Desk, folder: Path, tmp_path: Path) -> None:
    text = b"Description: caf\xe9\nAuthor: J\xfcrg <j@x.invalid>\n\n" + PLAIN.encode()
    said = refused(desk, fill(folder, {"fix.patch": text}))
    assert "fix.patch:1: the text is not utf-8: byte 0xe9" in said
    latin = Defaults(author="", date="0 +0000", charset="latin-1")
    assert one(desk, folder, text, defaults=latin).author == "J\u00fcrg"
    mail = b"From: J\xfcrg <j@x.invalid>\nSubject: s\nContent-Type: text/plain; charset=latin1\n\n"
    other = make_desk(tmp_path / "other", patches=False)
    assert one(other, folder, mail + PLAIN.encode()).author == "J\u00fcrg"


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("Date: yesterday\n\n", "dated 'yesterday'"),
        ("Date: Mon, 1 Jan 1900 00:00:00 +0000\n\n", "dated"),
        ("Subject: x\nContent-Transfer-Encoding: base64\n\n", "encoded as base64"),
        ("Subject: x\nContent-Type: text/plain; charset=nonsense\n\n", "no charset 'nonsense'"),
        ("a \0 b\n\n", "fix.patch:1: the text holds a control character"),
        ("Subject: x\n\nFrom: in the body\n", "for a mail header"),
        ("Subject: x\n\nFrom there on\n", "split the mail"),
        ("Subject: x\n\nPatch-Name: y\n", "names are the files' own"),
        ("Subject: x\n\n+++ no diff\n\n---\n", None),
    ],
)
def test_heads_that_a_mail_can_not_carry(
    desk: Desk, folder: Path, head: str, said: str | None
) -> None:
    if said is None:
        assert "+++ no diff" in one(desk, folder, head + PLAIN).body
        return
    assert said in refused(desk, fill(folder, {"fix.patch": head + PLAIN}))


def test_no_author_is_made_up(desk: Desk, folder: Path) -> None:
    nobody = Defaults(author="", date="0 +0000")
    said = refused(desk, fill(folder, {"fix.patch": PLAIN}), defaults=nobody)
    assert "fix.patch: names no author" in said
    assert check_author("A B <a@b>") == "A B <a@b>"
    for bad in ("A B", "<a@b>", "A <a@b> c", "A\n <a@b>", ""):
        with pytest.raises(LineError):
            check_author(bad)


# --- diffs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("diff", "changed"),
    [
        (f"--- a/a.py.orig\n+++ b/a.py\n{EDIT}", "a.py"),
        (f"--- x-1.0/a.py   2020-01-01 10:00:00.000000000 +0100\n+++ x/a.py\n{EDIT}", "a.py"),
        (f"diff -u a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n{EDIT}-- \n2.30\n\n> quoted\n", "a.py"),
        (f"diff --git x/a.py y/a.py\nindex 1111..2222\n--- x/a.py\n+++ y/a.py\n{EDIT}", "a.py"),
        ("--- a/with space.txt\n+++ b/with space.txt\n@@ -1 +1 @@\n-x\n+y\n", "with space.txt"),
        ("--- a/crlf.txt\n+++ b/crlf.txt\n@@ -2 +2 @@\n-two\r\n+TWO\r\n", None),
        ("--- a/crlf.txt\n+++ b/crlf.txt\n@@ -1,2 +1,2 @@\n one\r\n-two\r\n+TWO\r\n", None),
        ("--- a/crlf.txt\n+++ b/crlf.txt\n@@ -1,3 +1,3 @@\n one\r\n-two\r\n+2\r\n three\r\n",
         "crlf.txt"),
        ("--- a/gone 2020-01-01\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n", None),
        ("--- a/run.sh\t2020-01-01 00:00:00\n+++ b/run.sh\t1970-01-01 00:00:00 +0000\n"
         "@@ -1 +0,0 @@\n-#!/bin/sh\n", "run.sh"),
        ("--- /dev/null\n+++ b/n/new.txt\n@@ -0,0 +1,2 @@\n+a\0\n+\xff\n", "n/new.txt"),
        ('--- /dev/null\n+++ "b/q\\303\\244"\n@@ -0,0 +1 @@\n+x\n\\ No newline at end of file\n',
         '"q\\303\\244"'),
        ("diff --git a/run.sh b/run.sh\nold mode 100755\nnew mode 100644\n", "run.sh"),
        ("diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+b.py\n"
         "\\ No newline at end of file\n", "l"),
        ("--- a/latin.txt\n+++ b/latin.txt\n@@ -1,2 +1,2 @@\n-caf\xe9\n+caf\n no end\n"
         "\\ No newline at end of file\n", "latin.txt"),
    ],
)  # fmt: skip
def test_diffs_as_git_reads_them(desk: Desk, folder: Path, diff: str, changed: str | None) -> None:
    text = diff.encode("latin-1")
    path = fill(folder, {"fix.patch": text})
    origin = desk.work(desk.folder / "origin")
    accepted = (0,) if changed else (0, 1)
    origin.git("apply", "--index", str(folder / "fix.patch"), ok=accepted)
    if changed is None:
        refused(desk, path, OverlayError)
        return
    done = take(desk, path)
    assert origin.git("write-tree").decode().strip() == done.tree
    assert origin.git("diff", "--cached", "--name-only").decode().strip() == changed


@pytest.mark.parametrize(
    ("diff", "said"),
    [
        (f"--- a/a.py\n+++ b/b.py\n{EDIT}", "names a.py and '+++' names b.py"),
        (f"--- a/a.py\r\n+++ b/a.py\r\n{EDIT}", "end in CR"),
        (f"--- a.py\n+++ a.py\n{EDIT}", "no 1 folders to strip (-p1)"),
        (f"--- /dev/null\n+++ /dev/null\n{EDIT}", "neither '---' nor '+++'"),
        (f"--- a/../a.py\n+++ b/../a.py\n{EDIT}", "leaves the tree"),
        (f"--- a/.git/config\n+++ b/.git/config\n{EDIT}", "git's own folder"),
        (f"--- a/a.py \n+++ b/a.py \n{EDIT}", "where the path"),
        (PLAIN + PLAIN, "is changed by two diffs, here and at line 1"),
        (PLAIN + "words\n", "text that is no part of a diff: b'words'"),
        (PLAIN + " line 5\n", "is longer than its header counts"),
        (PLAIN + "-- \n+more\n", "text that is no part of a diff: b'+more'"),
        (PLAIN.replace("@@ -2,3 +2,3", "@@ -2,4 +2,4"), "ends early"),
        (PLAIN + "@@ -1,2 +7,2 @@\n line 9\n-line 10\n+x\n", "says another place"),
        (PLAIN[:-1], "the last line has no end"),
        ("words\n", "holds no diff"),
        (EDIT, "no '---' and '+++' names a file"),
        (PLAIN + "Only in b: new.py\n", "text that is no part of a diff"),
        ("Binary files a/x and b/x differ\n" + PLAIN, "diff says this of files"),
        ("Only in new: x.py\n" + PLAIN, "diff says this of files"),
        ("Symbolic links a/x and b/x differ\n" + PLAIN, "diff says this of files"),
        ("File a/x is a regular file while file b/x is a directory\n" + PLAIN, "diff says this"),
        ("Only in debug builds: this.\n\nBinary files may differ.\n" + PLAIN, None),
        (PLAIN + "Binary files a/x and b/x differ\n", "text that is no part of a diff"),
        ("diff --git a/m b/m\nnew file mode 160000\nindex 0000000..1111111\n--- /dev/null\n"
         "+++ b/m\n@@ -0,0 +1 @@\n+Subproject commit 1\n", "mode 160000"),
        (f"diff --git x/b.py y/b.py\n--- x/a.py\n+++ y/a.py\n{EDIT}", "names other files"),
        ("diff --git a/a.py b/b.py\nrename from a.py\nrename to c.py\n", "names other ones"),
        ("diff --git x/a.py y/b.py\nold mode 100644\nnew mode 100755\n", "only 'diff --git'"),
        ("diff --git a/a.py b/a.py\n", "changes nothing"),
    ],
)  # fmt: skip
def test_diffs_that_are_refused(desk: Desk, folder: Path, diff: str, said: str | None) -> None:
    if said is None:  # above the diff it is text
        assert "Binary files" in one(desk, folder, diff).body
        return
    text = refused(desk, fill(folder, {"fix.patch": diff}))
    assert said in text
    assert "fix.patch" in text


def test_numbers_that_contradict_each_other_are_not_believed(desk: Desk, folder: Path) -> None:
    second = "@@ -19,3 +17,3 @@\n line 19\n-line 20\n+x\n line 21\n"
    done = take(desk, fill(folder, {"x.patch": PLAIN + second}))
    assert done.offsets == ("x",)
    origin = desk.work(desk.folder / "origin")
    origin.git("apply", "--index", str(folder / "x.patch"))
    assert origin.git("write-tree").decode().strip() == done.tree
    twice = "--- /dev/null\n+++ b/t\n@@ -0,0 +1,9 @@\n" + "+a\n+b\n+c\n" * 3
    edit = "--- a/t\n+++ b/t\n@@ -1,3 +1,4 @@\n+0\n a\n b\n c\n@@ -4,3 +{},4 @@\n a\n b\n+1\n c\n"
    take(desk, fill(folder, {"t.patch": twice, "fine.patch": edit.format(5)}), append=True)
    other = make_desk(folder / "other", patches=False)
    said = refused(other, fill(folder, {"t.patch": twice, "edited.patch": edit.format(2)}),
                   ApplyError)  # fmt: skip
    assert "edited.patch:8: t: ambiguous" in said


def test_line_numbers_are_those_of_the_file(desk: Desk, folder: Path) -> None:
    head = "Description: x\n\n"
    diff = "Index: a.py\n" + PLAIN + PLAIN.replace("a.py", "b.py").replace("line 4", "line 5")
    said = refused(desk, fill(folder, {"x.patch": head + diff}), ApplyError)
    assert "x.patch:13: b.py: the context at line 2 is not in the file" in said


# --- the verb ------------------------------------------------------------------------------


def test_the_verb(run: Callable[..., Ran], tiny: Tiny, folder: Path) -> None:
    mails = sorted((tiny.folder / "vllm").glob("*.patch"))
    names = [line for line in (tiny.folder / "vllm" / "series").read_text().split() if line]
    fill(folder, {name: (tiny.folder / "vllm" / name).read_bytes() for name in names})
    assert run("import", "tiny", "vllm", str(folder)).code == LineError.exit_code
    before = {path.name: path.read_bytes() for path in mails}
    for path in mails:
        path.unlink()
    (tiny.folder / "vllm" / "series").write_text("# none\n")
    done = run("import", "tiny", "vllm", str(folder), "--json")
    assert done.code == 0, done.err
    assert done.json["files"] == {"first": "first.patch", "second": "second.patch"}
    assert {path.name: path.read_bytes() for path in mails} == before
    series = (tiny.folder / "vllm" / "series").read_text()
    assert series == "# none\nfirst.patch\nsecond.patch\n"
    again = run("import", "tiny", "vllm", str(folder), "--append")
    assert again.code == ApplyError.exit_code
    assert "first.patch" in again.err
    assert run("apply", "tiny", "--relock").code == 0
    bad = run("import", "tiny", "vllm", str(folder), "--author", "me")
    assert bad.code == LineError.exit_code
    plain = fill(folder / "plain", {"x.patch": "--- a/vllm/new.py\n+++ b/vllm/new.py\n"
                                    "@@ -1 +1 @@\n-new = 1\n+new = 2\n"})  # fmt: skip
    options = ("--append", "--author", "Me <me@x>")
    said = run("import", "tiny", "vllm", str(plain), *options)
    assert said.code == 0, said.err
    assert said.out == "x\tapplies\tx.patch\n"


# --- generated -----------------------------------------------------------------------------

_GENERATED = settings(
    max_examples=25, deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large,
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def arena(make_repo: Callable[[], Repo]) -> Repo:
    repo = make_repo()
    repo.commit({})
    return repo


@pytest.fixture(scope="module")
def fresh(make_store: Callable[..., Store], tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A desk whose base tree is set for each example."""
    made = make_desk(tmp_path_factory.mktemp("fresh") / "desk", patches=False)
    made.store = make_store()
    return made


def clear(desk: Desk, base: Commit) -> None:
    desk.base = base
    shutil.rmtree(desk.series)
    desk.series.mkdir()


@_GENERATED
@given(history=histories(), form=st.sampled_from(["mbox", "numbered", "series"]))
def test_any_mails_give_the_trees_of_git_am(
    history: list[dict[bytes, tuple[int, bytes]]], form: str, arena: Repo, fresh: Desk,
    import_base: Callable[..., Commit], tmp_path: Path,
) -> None:  # fmt: skip
    commits = [commit.decode() for commit in commit_all(arena, history, "refs/heads/made")]
    mails = [arena.patch(commit) for commit in commits[1:]]
    arena.reset(commits[0])
    arena.git("am", "--quiet", "--keep-cr", stdin=b"".join(mails))
    clear(fresh, import_base(fresh.store, arena, commits[0]))
    path = tmp_path / "in"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    if form == "mbox":
        path /= "all.mbox"
        path.write_bytes(b"".join(mails))
    elif form == "numbered":
        for number, mail in enumerate(mails, 1):
            (path / f"{number:04}-x.patch").write_bytes(mail)
    else:
        fill(path, {f"z{9 - number}.patch": mail for number, mail in enumerate(mails)})
    done = take(fresh, path)
    assert done.tree == arena.tree()
    trees = [arena.tree(commit) for commit in commits[1:]]
    assert [patch.tree for patch in fresh.apply().patches] == trees
    before = fresh.snapshot()
    work = fresh.checkout()
    assert fresh.export(work, reformat=True).kept == tuple(done.files)
    assert fresh.snapshot() == before
    shutil.rmtree(work.path)


@pytest.mark.parametrize(
    ("time", "is_there"),
    [
        ("1970-01-01 00:00:00.000000000 +0000", False),
        ("1970-01-01 01:00:00 +0100", False),
        ("1969-12-31 16:30:00.000000000 -0730", False),
        ("1970-01-01 00:00:00.000000000 +0000y", True),
        ("1970-01-01 00:00:01.000000000 +0000", True),
        ("1970-01-01 01:00:00.000000000 +0000", True),
    ],
)
def test_a_file_that_ends_empty_is_gone_only_by_the_time_that_says_so(
    time: str, is_there: bool
) -> None:
    head = f"--- a/a.py\t2020-01-01 00:00:00 +0000\n+++ b/a.py\t{time}\n"
    (part,) = split_parts(f"{head}@@ -1 +0,0 @@\n-line\n".encode(), file="x.patch")
    (diff,) = read_diffs(part, file="x.patch")
    assert (diff.kind is not Kind.DELETE) is is_there


def plain_files(files: Mapping[bytes, tuple[int, bytes]]) -> dict[bytes, tuple[int, bytes]]:
    """Without what a plain diff has no word for: modes, links, binaries, empty files."""
    return {
        path: (0o100644, data.replace(b"\0", b"") or b"x\n")
        for path, (_, data) in files.items()
        if path == path.strip()
    }


def write_tree(folder: Path, files: Mapping[bytes, tuple[int, bytes]]) -> None:
    for path, (_, data) in files.items():
        target = Path(bytes(folder / "x")[:-1].decode() + path.decode("utf-8", "surrogateescape"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


@pytest.mark.skipif(shutil.which("diff") is None, reason="needs diff")
@_GENERATED
@given(history=histories(), seed=st.integers(0, 1 << 30))
def test_any_plain_diff_gives_the_tree_of_git_apply(
    history: list[dict[bytes, tuple[int, bytes]]], seed: int, arena: Repo, fresh: Desk,
    import_base: Callable[..., Commit], tmp_path: Path,
) -> None:  # fmt: skip
    two = [plain_files(files) for files in history[:2]]
    commits = [commit.decode() for commit in commit_all(arena, two, "refs/heads/made")]
    base = import_base(fresh.store, arena, commits[0])
    for name, files in zip(("old", "new"), two, strict=True):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / name).mkdir()
        write_tree(tmp_path / name, files)
    diff = subprocess.run(
        ("diff", "-Naur", "old", "new"), cwd=tmp_path, capture_output=True, check=False,
        env={"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/bin:/bin"},
    ).stdout  # fmt: skip
    _check_like_git(diff, arena, fresh, base, commits[0], tmp_path, arena.tree(commits[1]))
    chance = random.Random(seed)
    for _ in range(6):
        if diff:
            changed = damaged(diff, chance)
            _check_like_git(changed, arena, fresh, base, commits[0], tmp_path, None)


def _check_like_git(
    diff: bytes, arena: Repo, desk: Desk, base: Commit, commit: str, scratch: Path,
    expected: str | None,
) -> None:  # fmt: skip
    """What we take git takes alike; what it takes of an undamaged diff, we take."""
    path = fill(scratch / "one", {"x.patch": diff})
    clear(desk, base)
    index = {"GIT_INDEX_FILE": str(scratch / "index")}
    arena.git("read-tree", commit, env=index)
    command = ("apply", "--cached", "--whitespace=nowarn", "-p1", "-")
    try:
        done = take(desk, path)
    except OverlayError as error:
        # A folder in a file's place is what diff has no words for, but for these
        if expected is not None and diff and b" while file " not in diff:
            pytest.fail(f"{diff!r}: {error}")
        return
    arena.git(*command, stdin=diff, env=index)
    tree = arena.git("write-tree", env=index).decode().strip()
    assert done.tree == tree
    assert expected in (None, tree)


@pytest.mark.parametrize(
    "raw",
    [
        b"From " + b"@" * 200_000 + b"\nA: b\n",
        b"From: <" + b"a@" * 100_000 + b"\nSubject: x\n\n" + PLAIN.encode(),
        b"Date: " + b"(" * 200_000 + b"\n\n" + PLAIN.encode(),
        b"Subject: " + b"[" * 200_000 + b"\n\n" + PLAIN.encode(),
        b"--- a/x" + b" " * 200_000 + b"y\n+++ b/x\n" + EDIT.encode(),
        b"diff --git " + b"x " * 100_000 + b"\nold mode 100644\nnew mode 100755\n",
        b"x\n---\n" + b" |" * 100_000 + b"\n" + PLAIN.encode(),
        PLAIN.encode() * 2_000,
    ],
)
def test_no_input_takes_long(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.patch").write_bytes(raw)
    started = time.process_time()
    for letter in read_letters(tmp_path / "x.patch"):
        with contextlib.suppress(PatchError):
            read_letter(letter, DEFAULTS)
    assert time.process_time() - started < 10


@_GENERATED
@given(data=st.binary(max_size=300), seed=st.integers(0, 1 << 30))
def test_any_bytes_are_a_refusal_at_worst(
    data: bytes, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.patch"
    for raw in (data, damaged(DEP3.encode() + PLAIN.encode() + data, random.Random(seed))):
        path.write_bytes(raw)
        for letter in read_letters(path) if raw else ():
            try:
                patch = read_letter(letter, DEFAULTS)
            except PatchError as error:
                named = "any.patch" in str(error)
            else:
                named = bool(patch.files)
            assert named
