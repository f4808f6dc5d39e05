"""Lint: every check with a line that has the fault; the good line has none at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlay.errors import LineError, OverlayError
from overlay.lines.line import read_line
from overlay.lines.lint import lint_line
from overlay.patches.patch import parse_patch
from overlay.sources.source import Base
from overlay.trees.apply import Patched, apply_series

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from overlay.lines.lint import Linted
    from overlay.trees.store import Commit, Store

PIN = """\
[{upstream}]
version = "{version}"
repository = "https://example.invalid/x.git"
commit = "{commit}"
tag = "v{version}"
[{upstream}.sdist]
file = "{file}-{version}.tar.gz"
sha256 = "{a}"
[{upstream}.wheel]
file = "{file}-{version}-py3-none-any.whl"
sha256 = "{b}"
"""
LINE = (
    'format = 1\nsummary = "A line of tests."\npython = ["3.9", "3.11"]\ntorch = "2.13.0"\n'
    'cuda = "13.3.1"\narchitectures = ["12.0a"]\n'
    + PIN.format(
        upstream="vllm", version="0.28.0", file="vllm", commit="1" * 40, a="a" * 64, b="b" * 64
    )
    + PIN.format(
        upstream="flashinfer", version="0.6.18rc10", file="flashinfer_python",
        commit="2" * 40, a="c" * 64, b="d" * 64,
    )
    + '[requirements.flashinfer-python]\nupstream = "==0.6.16"\nline = "==0.6.18rc10"\n'
)  # fmt: skip
TRAILERS = "Upstream-Status: Pending\nRemove-When: upstream does it\n"
HUNK = (
    b"--- a/vllm/a.py\n+++ b/vllm/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three\n"
)  # fmt: skip


def mail(
    *,
    subject: str = "a: write two in capitals",
    reason: str = "Small letters are too small.\n",
    trailers: str = TRAILERS,
    diff: bytes = b"diff --git a/vllm/a.py b/vllm/a.py\n" + HUNK,
) -> bytes:
    head = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nFrom: Ada <ada@example.invalid>\n"
        f"Date: Mon, 30 Nov 2026 12:06:00 +0000\nSubject: [PATCH] {subject}\n\n"
    )
    return (head + "\n".join(part for part in (reason, trailers) if part) + "\n").encode() + diff


def added(*lines: bytes, path: bytes = b"vllm/a.py", context: bytes = b"one\n") -> bytes:
    body = b"".join(b"+" + line for line in lines)
    return (
        b"diff --git a/%s b/%s\n--- a/%s\n+++ b/%s\n@@ -1,2 +1,%d @@\n %s%s %s"
        % (path, path, path, path, 2 + len(lines), context, body, context)
    )  # fmt: skip


def new_file(content: bytes, path: bytes = b"vllm/new.py", mode: bytes = b"100644") -> bytes:
    lines = content.splitlines(keepends=True)
    body = b"".join(b"+" + line for line in lines)
    head = b"diff --git a/%s b/%s\nnew file mode %s\n--- /dev/null\n" % (path, path, mode)
    return head + b"+++ b/%s\n@@ -0,0 +1,%d @@\n" % (path, len(lines)) + body


class Folder:
    """A line on disk that tests spoil."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "infernal"
        for upstream in ("vllm", "flashinfer"):
            (self.home / upstream).mkdir(parents=True)
        self.settings(LINE)
        self.patch("two", mail())

    def settings(self, text: str) -> None:
        (self.home / "line.toml").write_text(text)

    def patch(self, name: str, raw: bytes, *, upstream: str = "vllm", listed: bool = True) -> None:
        path = self.home / upstream / f"{name}.patch"
        if listed and not path.exists():
            with (self.home / upstream / "series").open("a") as series:
                series.write(f"{name}.patch\n")
        path.write_bytes(raw)

    def series(self, text: str) -> None:
        (self.home / "vllm" / "series").write_text(text)

    def lint(self) -> Linted:
        return lint_line(self.root, "infernal")

    def codes(self, severity: str = "error") -> list[tuple[str, str, int]]:
        return [
            (f.file.removeprefix("infernal/"), f.code, f.line)
            for f in self.lint().faults
            if f.severity == severity
        ]


@pytest.fixture
def line(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "patches")


def test_a_good_line_has_no_fault(line: Folder) -> None:
    read_line(line.root, "infernal")
    assert line.lint().faults == ()
    assert line.lint().applied == ()


def test_there_is_no_such_line(line: Folder) -> None:
    with pytest.raises(LineError, match="no line 'infernol'"):
        lint_line(line.root, "infernol")


# --- patches ---------------------------------------------------------------------------------

GOOD_TRAILERS = [
    "Upstream: a/b#1\nUpstream-Status: Submitted [by mail]\nRemove-When: x\n",
    "Upstream: a/b#1\nUpstream-Status: Backport [0.33.0]\nRemove-When: x\n",
    "Upstream-Status: Backport [0.33.0]\nRemove-When: x\n",
    "Upstream-Status: Denied\nRemove-When: x\n",
    "Upstream-Status: Inactive-Upstream [2019]\nRemove-When: x\n",
    "Upstream-Status: Inappropriate [ours]\nRemove-When: x\n",
]
BAD_TRAILERS = [
    ("", ["missing-trailer", "missing-trailer"]),
    ("Upstream-Status: Pending\n", ["missing-trailer"]),
    ("Remove-When: x\n", ["missing-trailer"]),
    ("Upstream-Status: Submitted [1]\nRemove-When: x\n", ["missing-trailer"]),
    ("Upstream: a/b#1\nUpstream-Status: Submitted\nRemove-When: x\n", ["trailer"]),
    ("Upstream: a/b\nUpstream-Status: Pending\nRemove-When: x\n", ["trailer"]),
    ("Upstream-Status: Soon\nRemove-When: x\n", ["trailer"]),
    ("Upstream-Status: Inappropriate []\nRemove-When: x\n", ["trailer"]),
    (TRAILERS + "Remove-When: y\n", ["trailer"]),
    (TRAILERS + "Patch-Name: two\n", ["name-trailer"]),
    (TRAILERS + "Requires: three\n", ["requires"]),
    (TRAILERS + "Requires: two\n", ["requires"]),
]


@pytest.mark.parametrize("trailers", GOOD_TRAILERS)
def test_good_trailers(line: Folder, trailers: str) -> None:
    line.patch("two", mail(trailers=trailers))
    assert line.lint().faults == ()


@pytest.mark.parametrize(("trailers", "codes"), BAD_TRAILERS)
def test_bad_trailers(line: Folder, trailers: str, codes: list[str]) -> None:
    line.patch("two", mail(trailers=trailers))
    assert [code for _, code, _ in line.codes()] == codes


@pytest.mark.parametrize(
    ("trailers", "fix"),
    [
        ("Upstream-Status: Pending\nRemoved-When: x\n", "misspelling"),
        (TRAILERS + "\nSigned-off-by: Ada <ada@example.invalid>\n", "last paragraph"),
    ],
)
def test_a_trailer_that_is_nearly_there_is_explained(line: Folder, trailers: str, fix: str) -> None:
    line.patch("two", mail(trailers=trailers))
    assert any(fix in fault.fix for fault in line.lint().errors)


@pytest.mark.parametrize(
    ("change", "code", "at"),
    [
        ({"subject": "a: " + "x" * 70}, "subject", 4),
        ({"subject": "write two in capitals"}, "subject", 4),
        ({"subject": "[a] a: write"}, "message", 4),
        ({"reason": ""}, "no-reason", 4),
        ({"reason": "Why. \n"}, "message", 0),
        ({"reason": "Why.\n\nFrom here on.\n"}, "message", 0),
    ],
)
def test_message(line: Folder, change: dict[str, str], code: str, at: int) -> None:
    line.patch("two", mail(**change))  # type: ignore[arg-type]
    assert ("vllm/two.patch", code, at) in line.codes()


def test_a_subject_of_72_characters_is_no_fault(line: Folder) -> None:
    line.patch("two", mail(subject="a: " + "x" * 69))
    assert line.lint().faults == ()


DIFFS = [
    (added(b"new \n"), "white-space", 6),
    (added(b"ok\n", b"\t\n"), "white-space", 7),
    (added(b" \tnew\n"), "white-space", 6),
    (added(b"new\r\n"), "line-ends", 4),
    (added(b"<<<<<<< ours\n"), "conflict-marker", 6),
    (added(b">>>>>>> theirs\n"), "conflict-marker", 6),
    (new_file(b"a\r\nb\nc\n"), "line-ends", 5),
    (new_file(b"a\nb\r\nc\n"), "line-ends", 5),
]


@pytest.mark.parametrize(("diff", "code", "at"), DIFFS)
def test_added_lines(line: Folder, diff: bytes, code: str, at: int) -> None:
    raw = mail(diff=diff)
    first = raw.count(b"\n", 0, raw.index(b"diff --git"))
    line.patch("two", raw)
    assert line.codes() == [("vllm/two.patch", code, first + at)]


@pytest.mark.parametrize(
    "diff",
    [
        added(b"new\r\n", context=b"one\r\n"),
        added(b"two blanks  \n", path=b"vllm/a.md"),
        added(b"    tab\tinside\n", b"=======\n"),
        new_file(b"a\r\nb\r\n"),
        b"diff --git a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\n+++ b/vllm/a.py\n"
        b"@@ -1,3 +1,3 @@\n-moved \n one\n+moved \n two\n",
    ],
)
def test_added_lines_without_fault(line: Folder, diff: bytes) -> None:
    line.patch("two", mail(diff=diff))
    assert line.lint().faults == ()


def test_a_line_without_end_does_not_shift_line_numbers(line: Folder) -> None:
    raw = mail(
        diff=b"diff --git a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\n+++ b/vllm/a.py\n"
        b"@@ -1 +1 @@\n-one\n\\ No newline at end of file\n+two \n"
    )
    line.patch("two", raw)
    assert line.codes() == [("vllm/two.patch", "white-space", raw.count(b"\n"))]


@pytest.mark.parametrize(
    ("diff", "code"),
    [
        (new_file(b"#!/bin/sh\n"), "file-mode"),
        (new_file(b"x = 1\n", mode=b"100755"), "file-mode"),
        (new_file(b"x = 1\n", path=b"tests/new.py"), "ships-nowhere"),
    ],
)
def test_hints(line: Folder, diff: bytes, code: str) -> None:
    line.patch("two", mail(diff=diff))
    assert [code for _, code, _ in line.codes("hint")] == [code]
    assert line.lint().errors == ()


def test_a_new_executable_script_is_no_hint(line: Folder) -> None:
    line.patch("two", mail(diff=new_file(b"#!/bin/sh\n", mode=b"100755")))
    assert line.lint().faults == ()


def test_form_is_a_hint(line: Folder) -> None:
    raw = mail().replace(b"From " + b"0" * 40, b"From " + b"1" * 40)
    raw = raw.replace(b"--- a/", b"index 1234567..89abcde 100644\n--- a/") + b"-- \n2.39.5\n\n"
    line.patch("two", raw)
    (hint,) = line.lint().faults
    assert (hint.code, hint.severity) == ("form", "hint")
    for part in ("commit id", "abbreviated", "git's version"):
        assert part in hint.what


def test_broken_patches_are_faults_and_the_others_are_checked(line: Folder) -> None:
    two = HUNK.replace(b"-1,3 +1,3", b"-1,3 +1,4")
    three = HUNK.replace(b"-1,3 +1,3", b"-1,2 +1,3")
    three = three.replace(b"a.py", b"b.py")
    diff = b"diff --git a/vllm/a.py b/vllm/a.py\n" + two
    diff += b"diff --git a/vllm/b.py b/vllm/b.py\n" + three
    raw = mail(diff=diff, trailers="Upstream-Status: Pending\n")
    line.patch("two", raw)
    line.patch("other", mail(subject="no area"))
    line.patch("nothing", b"hello\n")
    line.patch("needs", mail(trailers=TRAILERS + "Requires: two\n"))
    first = raw.count(b"\n", 0, raw.index(b"@@")) + 1
    codes = line.codes()
    assert [c for c in codes if c[0] == "vllm/two.patch"] == [
        ("vllm/two.patch", "missing-trailer", 0),
        ("vllm/two.patch", "hunk-count", first + 5),
        ("vllm/two.patch", "hunk-count", first + 13),
    ]
    assert ("vllm/other.patch", "subject", 4) in codes
    assert ("vllm/nothing.patch", "malformed", 1) in codes
    assert not any(file == "vllm/needs.patch" for file, *_ in codes)


# --- series ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("series", "found"),
    [
        ("two.patch\ntwo.patch\n", [("vllm/series", "listed-twice", 2)]),
        ("# x\ntwo.patch\ngone.patch\n", [("vllm/series", "missing", 3)]),
        ("", [("vllm/two.patch", "unlisted", 0)]),
        ("two.patch -p0\n", [("vllm/series", "name", 1), ("vllm/two.patch", "unlisted", 0)]),
        ("two.patch\nTHREE.patch\n", [("vllm/series", "name", 2)]),
    ],
)
def test_series(line: Folder, series: str, found: list[tuple[str, str, int]]) -> None:
    line.series(series)
    assert [fault for fault in line.codes() if fault in found] == found
    assert {file for file, *_ in line.codes()} == {file for file, *_ in found}


def test_names(line: Folder) -> None:
    line.patch("0001-one", mail())
    line.patch("Two", mail(), listed=False)
    codes = line.codes()
    assert ("vllm/0001-one.patch", "numbered-name", 0) in codes
    assert ("vllm/Two.patch", "name", 0) in codes
    assert ("vllm/Two.patch", "unlisted", 0) in codes


def test_a_requirement_that_comes_later(line: Folder) -> None:
    line.patch("two", mail(trailers=TRAILERS + "Requires: three\n"))
    line.patch("three", mail())
    assert line.codes() == [("vllm/two.patch", "requires", 0)]
    line.series("three.patch\ntwo.patch\n")
    assert line.codes() == []


def test_a_misspelt_series_folder_is_no_empty_series(line: Folder) -> None:
    (line.home / "flashinfr").mkdir()
    (line.home / "flashinfr" / "series").touch()
    (line.home / "notes").mkdir()
    assert line.codes() == [("flashinfr", "unlisted", 0)]
    assert line.codes("hint") == [("notes", "unlisted", 0)]


# --- line.toml -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "key", "at"),
    [
        ('summary = "A line of tests."', 'summary = ""', "summary", 2),
        ('["3.9", "3.11"]', '["3.11", "3.9"]', "python", 3),
        ('["12.0a"]', "[]", "architectures", 6),
        ('"vllm-0.28.0.tar.gz"', '"vllm-0.27.0.tar.gz"', "vllm.sdist.file", 13),
        ("vllm-0.28.0-py3", "vllm-0.27.0-py3", "vllm.wheel.file", 16),
        ("flashinfer_python-0.6.18rc10-py3", "vllm-0.6.18rc10-py3", "flashinfer.wheel.file", 27),
        ("vllm-0.28.0-py3-none-any.whl", "vllm.whl", "vllm.wheel.file", 16),
        ('tag = "v0.28.0"', 'tag = "v0.27.0"', "vllm.tag", 11),
        ('torch = "2.13.0"\n', "", "torch", 0),
        ('torch = "2.13.0"\n', 'torch = "2.13.0"\ntroch = "1"\n', "troch", 5),
        ("b" * 64, "xyz", "vllm.wheel.sha256", 17),
    ],
)
def test_settings(line: Folder, old: str, new: str, key: str, at: int) -> None:
    assert LINE.count(old) == 1
    line.settings(LINE.replace(old, new))
    (fault,) = line.lint().faults
    assert (fault.file, fault.code, fault.line) == ("infernal/line.toml", "line-file", at)
    assert fault.what.startswith(f"{key}: ")


def test_all_bad_keys_are_named_at_once(line: Folder) -> None:
    line.settings(LINE.replace('"2.13.0"', "2").replace("b" * 64, "x").replace("tag =", "tga ="))
    keys = {fault.what.partition(":")[0] for fault in line.lint().faults}
    assert keys == {"torch", "vllm.wheel.sha256", "vllm.tga", "flashinfer.tga"}


@pytest.mark.parametrize("text", ["format = \n", "\xff", LINE.replace('== "', '="') + "[", ""])
def test_no_toml(line: Folder, text: str) -> None:
    (line.home / "line.toml").write_bytes(text.encode("latin-1"))
    assert line.lint().errors
    assert {fault.code for fault in line.lint().faults} == {"line-file"}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: (line.home / "line.toml").unlink(),
        lambda line: line.series("two\n"),
        lambda line: line.series("\udcff\n".encode("utf-8", "surrogateescape").decode("latin-1")),
        lambda line: line.patch("two", b""),
        lambda line: line.patch("two", mail(diff=b"")),
        lambda line: line.settings(LINE.replace('commit = "1', 'abbreviation = "1234567"\n#')),
        lambda line: line.settings(LINE.replace('line = "==0.6.18rc10"', 'line = "==1"')),
    ],
)
def test_what_read_line_refuses_is_an_error(
    line: Folder, spoil: Callable[[Folder], object]
) -> None:
    spoil(line)
    with pytest.raises(OverlayError):
        read_line(line.root, "infernal")
    assert line.lint().errors


# --- applied trees ---------------------------------------------------------------------------

CONTENT = b"".join(b"line %d\n" % number for number in range(1, 21))


def change(at: int, *, old_start: int | None = None, above: bytes = b"") -> bytes:
    """Replace a line of ``CONTENT``; ``above`` spoils the outermost line of context."""
    context = [b" line %d\n" % number for number in range(at - 2, at + 3)]
    context[2] = b"-line %d\n+LINE %d\n" % (at, at)
    if above:
        context[0] = b" " + above
    return (
        b"diff --git a/vllm/a.py b/vllm/a.py\n--- a/vllm/a.py\n+++ b/vllm/a.py\n"
        b"@@ -%d,5 +%d,5 @@\n" % (old_start or at - 2, old_start or at - 2)
    ) + b"".join(context)


@pytest.fixture
def applied(
    store: Store, make_repo: Callable, import_base: Callable[..., Commit]
) -> Callable[[Folder], Linted]:
    repo = make_repo()
    repo.commit({"vllm/a.py": CONTENT})
    base = import_base(store, repo)

    def lint(line: Folder) -> Linted:
        series = read_line(line.root, "infernal").series["vllm"]
        tree = apply_series(store, base, series)
        patched = Patched(
            base=Base(commit=base, kind="archive", origin="test"), tree=tree, store=store
        )
        return lint_line(line.root, "infernal", trees={"vllm": patched})

    return lint


@pytest.mark.parametrize(
    ("diff", "code", "what"),
    [
        (change(10, old_start=7), "offset", "at line 8"),
        (change(10, above=b"other\n"), "fuzz", "1 lines above and 0 below"),
        (change(10).replace(b"-line 10", b"-line X"), "conflict", "not in the file"),
        (change(10).replace(b" line 9", b" line X").replace(b" line 11", b" line X"), "fuzz",
         "2 lines above and 2 below"),
        (change(10).replace(b"-line 10\n+LINE 10\n", b" line 10\n-line X\n").replace(
            b"-8,5 +8,5", b"-8,6 +8,5"), "merged", "there already"),
        (change(10).replace(b"--- a", b"index %s..%s 100644\n--- a" % (b"1" * 40, b"2" * 40)),
         "index-line", "before"),
    ],
)  # fmt: skip
def test_what_applying_shows(
    line: Folder,
    applied: Callable[[Folder], Linted],
    diff: bytes,
    code: str,
    what: str,
) -> None:
    line.patch("two", mail(diff=diff))
    linted = applied(line)
    assert linted.applied == ("vllm",)
    assert linted.errors[0].code == code
    assert what in linted.errors[0].what


def test_what_applies_as_it_says_has_no_fault(
    line: Folder, applied: Callable[[Folder], Linted]
) -> None:
    line.patch("two", mail(diff=change(10)))
    line.patch("later", mail(diff=change(10).replace(b"-line 10", b"-LINE 10")
                             .replace(b"+LINE 10", b"+ten")))  # fmt: skip
    assert applied(line).faults == ()


def test_a_blocked_patch_is_an_error(line: Folder, applied: Callable[[Folder], Linted]) -> None:
    line.patch("two", mail(diff=change(10).replace(b"-line 10", b"-line X")))
    line.patch("more", mail(diff=change(15), trailers=TRAILERS + "Requires: two\n"))
    assert ("infernal/vllm/more.patch", "blocked") in [
        (fault.file, fault.code) for fault in applied(line).errors
    ]


def test_an_index_line_that_holds_is_no_fault(
    line: Folder, applied: Callable[[Folder], Linted], make_repo: Callable
) -> None:
    repo = make_repo()
    repo.commit({"vllm/a.py": CONTENT})
    repo.commit({"vllm/a.py": CONTENT.replace(b"10", b"ten")}, f"a: ten\n\nWhy.\n\n{TRAILERS}")
    raw = repo.patch("HEAD", "--zero-commit", "--no-stat", "--no-signature")
    assert parse_patch(raw, name="two").files[0].old_blob
    line.patch("two", raw)
    assert applied(line).errors == ()
