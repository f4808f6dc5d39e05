"""Diffs as bytes: what is read, and that everything doubtful is refused with its line."""

from __future__ import annotations

import base64
import time
import zlib

import pytest

from overlay.errors import PatchError
from overlay.patches.diff import FileDiff, Kind, parse_diff

HEAD = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n"
GOOD = HEAD + b"@@ -1,3 +1,4 @@ heading\n one\n-two\n+2\n+2.5\n three\n"


def parse(text: bytes) -> tuple[FileDiff, ...]:
    return parse_diff(text, name="fix", first_line=10)


def refused(text: bytes) -> str:
    with pytest.raises(PatchError) as caught:
        parse(text)
    assert caught.value.fix
    return str(caught.value)


def test_hunk() -> None:
    (diff,) = parse(GOOD)
    assert (diff.kind, diff.old_path, diff.new_path, diff.at) == (Kind.MODIFY, b"f", b"f", 10)
    (hunk,) = diff.hunks
    assert (hunk.old, hunk.new) == (b"one\ntwo\nthree\n", b"one\n2\n2.5\nthree\n")
    assert (hunk.old_start, hunk.new_start, hunk.leading, hunk.trailing, hunk.at) == (
        1,
        1,
        1,
        1,
        13,
    )


def test_lines_that_look_like_diff_syntax() -> None:
    body = (
        b"@@ -1,5 +1,5 @@\n diff --git a/x b/x\n---- a/x\n+--- b/x\n-- \n+-- \n"
        b" @@ -1 +1 @@\n From x\n"
    )
    (diff,) = parse(HEAD + body + b"-- \n2.39.5\n\n")
    assert diff.hunks[0].old == b"diff --git a/x b/x\n--- a/x\n- \n@@ -1 +1 @@\nFrom x\n"
    assert diff.hunks[0].new == b"diff --git a/x b/x\n--- b/x\n-- \n@@ -1 +1 @@\nFrom x\n"


def test_no_final_newline_on_either_side() -> None:
    marker = b"\\ No newline at end of file\n"
    (diff,) = parse(HEAD + b"@@ -1 +1 @@\n-old\n" + marker + b"+new\n" + marker)
    assert (diff.hunks[0].old, diff.hunks[0].new) == (b"old", b"new")
    (diff,) = parse(HEAD + b"@@ -1 +1 @@\n-old\n" + marker.replace(b"No", b"Kein") + b"+new\n")
    assert (diff.hunks[0].old, diff.hunks[0].new) == (b"old", b"new\n")


def test_bytes_stay_bytes() -> None:
    (diff,) = parse(HEAD + b"@@ -1 +1 @@\n-\xff\0\r\n+\xfe\r\r\n")
    assert (diff.hunks[0].old, diff.hunks[0].new) == (b"\xff\0\r\n", b"\xfe\r\r\n")


def test_change_of_type_is_a_deletion_and_an_addition_of_one_path() -> None:
    old, new = parse(
        b"diff --git a/f b/f\ndeleted file mode 100644\n--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
        b"diff --git a/f b/f\nnew file mode 120000\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+y\n"
    )
    assert (old.kind, old.new_path, new.kind, new.old_path) == (Kind.DELETE, None, Kind.ADD, None)


@pytest.mark.parametrize(
    ("header", "kind", "old", "new"),
    [
        (b"a/f b/f\nold mode 100644\nnew mode 100755\n", Kind.MODIFY, b"f", b"f"),
        (b"a/f g b/f g\nold mode 100644\nnew mode 100755\n", Kind.MODIFY, b"f g", b"f g"),
        (b"a/a b/a b/a b/a\nold mode 100644\nnew mode 100755\n", Kind.MODIFY, b"a b/a", b"a b/a"),
        (
            b'"a/\\303\\244" "b/\\303\\244"\ndeleted file mode 100644\n',
            Kind.DELETE,
            b"\xc3\xa4",
            None,
        ),
        (b"a/\xc3\xa4 b/\xc3\xa4\nnew file mode 100644\n", Kind.ADD, None, b"\xc3\xa4"),
        (b'"a/t\\tq\\"" b/g\nrename from "t\\tq\\""\nrename to g\n', Kind.RENAME, b't\tq"', b"g"),
        (b"a/f b/g\nsimilarity index 100%\ncopy from f\ncopy to g\n", Kind.COPY, b"f", b"g"),
        (b"a/f b/f\nnew file mode 100644\nindex 0000000..e69de29\n", Kind.ADD, None, b"f"),
    ],
)
def test_headers_without_hunks(
    header: bytes, kind: Kind, old: bytes | None, new: bytes | None
) -> None:
    (diff,) = parse(b"diff --git " + header)
    assert (diff.kind, diff.old_path, diff.new_path) == (kind, old, new)


def test_several_hunks_must_agree_on_their_places() -> None:
    second = b"@@ -8,3 +9,2 @@\n a\n-b\n c\n"
    assert len(parse(GOOD + second)[0].hunks) == 2
    for changed in (
        second.replace(b"+9", b"+8"),
        second.replace(b"-8", b"-3").replace(b"+9", b"+4"),
    ):
        assert "another place than the hunks before it" in refused(GOOD + changed)


MALFORMED = {
    "counts too short": (GOOD.replace(b"-1,3", b"-1,2"), "fix:19: hunk at line 13 is longer"),
    "counts too long": (GOOD.replace(b"+1,4", b"+1,5"), "1 new are missing"),
    "short before a signature": (HEAD + b"@@ -1 +1 @@\n-a\n+b\n-- \n+c\n", "signature"),
    "blank line as context": (GOOD.replace(b" three\n", b"\n"), "ends early"),
    "no changed line": (HEAD + b"@@ -1 +1 @@\n a\n", "changes nothing"),
    "no hunk": (HEAD, "no hunk below"),
    "cut off in a line": (GOOD[:-1], "fix:18: the last line has no end"),
    "no old side": (GOOD.replace(b"--- a/f\n", b""), "changes nothing"),
    "no new side": (GOOD.replace(b"+++ b/f\n", b""), "no '+++' line"),
    "sides turned": (GOOD.replace(b"--- a/f\n+++ b/f\n", b"+++ b/f\n--- a/f\n"), "changes nothing"),
    "no sides": (GOOD.replace(b"--- a/f\n+++ b/f\n", b""), "changes nothing"),
    "huge number": (GOOD.replace(b"-1,3", b"-1," + b"9" * 5000), "malformed hunk header"),
    "huge start": (GOOD.replace(b"-1,3", b"-" + b"9" * 400 + b",3"), "malformed hunk header"),
    "negative number": (GOOD.replace(b"-1,3", b"--1,3"), "malformed hunk header"),
    "combined diff": (GOOD.replace(b"@@ -", b"@@@ -"), "no hunk below"),
    "two diffs of one path": (GOOD + GOOD, "fix:19: f is changed by two"),
    "addition twice": (2 * (b"diff --git a/f b/f\nnew file mode 100644\n"), "changed by two"),
    "file and folder": (
        b"diff --git a/f b/f\nnew file mode 100644\ndiff --git a/f/g b/f/g\nnew file mode 100644\n",
        "f is a file and a folder",
    ),
    "text between": (GOOD + b"hello\n" + GOOD, "fix:19: text that is no part"),
    "second mail": (GOOD + b"-- \n2.39.5\n\nFrom 0 Mon\n" + GOOD, "after the signature"),
    "plain diff after the signature": (GOOD + b"-- \n2.39.5\n--- a/g\n+++ b/g\n", "signature"),
    "binary without content": (
        b"diff --git a/f b/f\nindex 1234567..89abcde 100644\nBinary files a/f and b/f differ\n",
        "binary diff without content",
    ),
    "submodule": (
        b"diff --git a/m b/m\nnew file mode 160000\n--- /dev/null\n+++ b/m\n@@ -0,0 +1 @@\n+S\n",
        "mode 160000",
    ),
    "folder mode": (b"diff --git a/m b/m\nnew file mode 040000\n", "mode 040000"),
    "setuid": (b"diff --git a/m b/m\nold mode 100644\nnew mode 104755\n", "mode 104755"),
    "mode with sign": (b"diff --git a/m b/m\nnew file mode +10064\n", "mode"),
    "one mode only": (b"diff --git a/m b/m\nold mode 100644\n" + GOOD[20:], "contradicts"),
    "rename without an end": (b"diff --git a/m b/n\nrename from m\n", "contradicts itself"),
    "two kinds": (
        b"diff --git a/m b/m\nnew file mode 100644\ndeleted file mode 100644\n",
        "contra",
    ),
    "said twice": (b"diff --git a/m b/m\nnew file mode 100644\nnew file mode 100755\n", "second"),
    "new file with old content": (
        b"diff --git a/f b/f\nnew file mode 100644\n--- /dev/null\n+++ b/f\n"
        b"@@ -1 +1,2 @@\n a\n+b\n",
        "depends on old content",
    ),
    "deleted file with new content": (
        b"diff --git a/f b/f\ndeleted file mode 100644\n--- a/f\n+++ /dev/null\n"
        b"@@ -1,2 +1 @@\n a\n-b\n",
        "keeps content",
    ),
    "no prefix": (GOOD.replace(b"a/f", b"f").replace(b"b/f", b"f"), "lacks the prefix"),
    "other prefixes": (GOOD.replace(b"a/f", b"i/f").replace(b"b/f", b"w/f"), "lacks the prefix"),
    "header names another": (GOOD.replace(b"--git a/f b/f", b"--git a/g b/g"), "names other ones"),
    "sides name two": (GOOD.replace(b"+++ b/f", b"+++ b/g"), "names another one"),
    "old side is no file": (GOOD.replace(b"--- a/f", b"--- /dev/null"), "names another one"),
    "time stamp": (GOOD.replace(b"--- a/f\n", b"--- a/f\t2020-01-01\n"), "names another one"),
    "rename to itself": (b"diff --git a/f b/f\nrename from f\nrename to f\n", "the same"),
    "index line": (GOOD.replace(b"--- a", b"index xyz..abc\n--- a"), "malformed index line"),
    "CRLF in the header": (GOOD.replace(b"b/f\n", b"b/f\r\n"), "fix:"),
    "a line without an end inside": (
        HEAD + b"@@ -1,2 +1 @@\n-a\n\\ No newline at end of file\n-b\n+c\n",
        "without an end",
    ),
    "quoting": (b'diff --git "a/\\9" "b/\\9"\nnew file mode 100644\n', "unknown escape"),
    "very long header": (b"diff --git a/" + b" " * 200_000 + b" b/\n", "too long"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str) -> None:
    text, expected = MALFORMED[case]
    message = refused(text)
    assert expected in message
    assert message.startswith("fix:")


@pytest.mark.parametrize(
    "path",
    [b"../x", b"x/../../y", b"/etc/passwd", b"x//y", b"./x", b".git/config", b"x/.GIT/hooks/h",
     b".git /x", b".git./x", b"git~1/x", b"GIT~1/x", b".git::$INDEX_ALLOCATION/x", b".git\\x",
     b".g\xe2\x80\x8cit/x", b"x/.git", b""],
)  # fmt: skip
def test_paths_that_no_tree_may_hold(path: bytes) -> None:
    header = b"diff --git a/%s b/%s\nnew file mode 100644\n" % (path, path)
    body = b"--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+x\n" % path
    assert "path" in refused(header + body)
    assert "path" in refused(b"diff --git a/f b/%s\nrename from f\nrename to %s\n" % (path, path))


def binary(data: bytes, *, size: int | None = None, word: bytes = b"literal") -> bytes:
    packed = zlib.compress(data, 9)
    lines = []
    for at in range(0, len(packed), 52):
        chunk = packed[at : at + 52]
        letter = bytes([len(chunk) + (64 if len(chunk) <= 26 else 70)])
        lines.append(letter + base64.b85encode(chunk, pad=True) + b"\n")
    head = b"%s %d\n" % (word, len(data) if size is None else size)
    ids = b"index " + b"0" * 40 + b".." + b"1" * 40 + b"\n"
    return (
        b"diff --git a/f b/f\nnew file mode 100644\n" + ids
        + b"GIT binary patch\n" + head + b"".join(lines) + b"\n"
    )  # fmt: skip


@pytest.mark.parametrize("data", [b"", b"\0", bytes(range(256)) * 9, b"x" * 100_000])
def test_binary(data: bytes) -> None:
    (diff,) = parse(binary(data) + b"literal 0\nHcmV?d00001\n\n")
    assert diff.binary is not None
    assert (diff.binary.data, diff.binary.is_delta) == (data, False)


GOOD_BINARY = binary(b"hello")
MALFORMED_BINARY = {
    "size too small": binary(b"hello", size=4),
    "size too large": binary(b"hello", size=6),
    "bomb under its size": binary(b"\0" * 10_000_000, size=10),
    "more than a patch may hold": binary(b"", size=999_999_999),
    "many, each within the bound": b"".join(
        binary(b"", size=200 << 20).replace(b"/f", b"/f%d" % n) for n in range(2)
    ),
    "no number": GOOD_BINARY.replace(b"literal 5", b"literal five"),
    "endless number": GOOD_BINARY.replace(b"literal 5", b"literal " + b"5" * 5000),
    "letter that is not in base85": GOOD_BINARY.replace(b"\n\n", b'"\n\n'),
    "no base85": GOOD_BINARY[:-20] + b"\xff" * 18 + b"\n\n",
    "not deflated": GOOD_BINARY[: GOOD_BINARY.index(b"literal")] + b"literal 5\nEzzzzz\n\n",
    "cut off": binary(bytes(range(256)) * 30)[:-200] + b"\n\n",
    "no hunk": GOOD_BINARY[: GOOD_BINARY.index(b"literal")],
    "no end": GOOD_BINARY[:-1],
}


@pytest.mark.parametrize("case", MALFORMED_BINARY)
def test_malformed_binary(case: str) -> None:
    started = time.monotonic()
    assert "binary diff" in refused(MALFORMED_BINARY[case])
    assert time.monotonic() - started < 2
