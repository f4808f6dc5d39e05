"""Mails: what is read, what comes back out, what is refused."""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.errors import PatchError
from overlay.patches.patch import NAME_TRAILER, Patch, message_faults, parse_patch
from overlay.trees.apply import apply_series

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.trees.store import Commit, Store
    from tests.conftest import Repo

DIFF = (
    b"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-print(1)\n+print(2)\n"
    b"-- \n2.39.5\n\n"
)
HEAD = (
    b"From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001\n"
    b"From: Ada Author <ada@example.invalid>\n"
    b"Date: Mon, 30 Nov 2026 13:30:00 +0130\n"
    b"Subject: [PATCH 3/7] print: say two\n"
)
MAIL = (
    HEAD
    + b"\nOne is too few.\n\nRequires: first, second\nUpstream: none\n---\n a.py | 2 +-\n\n"
    + DIFF
)


def parse(raw: bytes) -> Patch:
    return parse_patch(raw, name="fix")


def refused(raw: bytes) -> PatchError:
    with pytest.raises(PatchError) as caught:
        parse(raw)
    assert str(caught.value).startswith("fix:")
    return caught.value


def test_fields() -> None:
    patch = parse(MAIL)
    assert (patch.author, patch.email) == ("Ada Author", "ada@example.invalid")
    assert patch.date == "1796040000 +0130"
    assert patch.subject == "print: say two"
    assert patch.body == "One is too few.\n\nRequires: first, second\nUpstream: none"
    assert patch.reason == "One is too few."
    assert patch.requires == ("first", "second")
    assert patch.trailer("upstream") == ("none",)
    assert len(patch.files) == 1
    assert patch.raw == MAIL


def test_trailers_with_continuations() -> None:
    patch = parse(
        HEAD + b"\nWhy.\n\nRemove-When: upstream\n has it\n\tat last\nUpstream: x\n" + DIFF
    )
    assert patch.trailers == (("Remove-When", "upstream has it at last"), ("Upstream", "x"))
    assert parse(HEAD + b"\nNote: this is\nno trailer block.\n" + DIFF).trailers == ()
    assert parse(HEAD + b"\n" + DIFF).trailers == ()
    odd = parse(HEAD + "\nWhy.\n\nUpstream: a\u2028b\x0bc\n".encode() + DIFF)
    assert odd.trailers == (("Upstream", "a\u2028b\x0bc"),)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (b"[PATCH] x", "x"),
        (b"[RFC PATCH v2 01/10] x", "x"),
        (b"x [PATCH] y", "x [PATCH] y"),
        (b"[PATCH] [Bugfix] x", "[Bugfix] x"),
        (b"x", "x"),
        (b"a long\n  folded one", "a long folded one"),
        (b"=?UTF-8?q?=C3=A4=20b?=\n =?UTF-8?q?=20c?=", "ä b c"),
        (b"[PATCH] =?UTF-8?B?w6Q=?= b", "ä b"),
        ("roh ä".encode(), "roh ä"),
    ],
)
def test_subjects(subject: bytes, expected: str) -> None:
    assert parse(MAIL.replace(b"[PATCH 3/7] print: say two", subject)).subject == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (b"A B <a@b>", ("A B", "a@b")),
        (b'"B, A" <a@b>', ("B, A", "a@b")),
        (b'"A \\"q\\" B" <a@b>', ('A "q" B', "a@b")),
        (b"=?UTF-8?q?M=C3=BCller=2C=20J?= <a@b>", ("Müller, J", "a@b")),
        (b"=?UTF-8?q?A=20=28x=29?= <a@b>", ("A (x)", "a@b")),
        (b"a@b", ("a@b", "a@b")),
        (b"<a@b>", ("a@b", "a@b")),
    ],
)
def test_authors(address: bytes, expected: tuple[str, str]) -> None:
    patch = parse(MAIL.replace(b"Ada Author <ada@example.invalid>", address))
    assert (patch.author, patch.email) == expected


@pytest.mark.parametrize(
    ("date", "expected"),
    [
        (b"Thu, 1 Jan 1970 00:00:00 +0000", "0 +0000"),
        (b"Thu, 31 Dec 2099 23:59:59 +0000", "4102444799 +0000"),
        (b"Mon, 30 Nov 2026 12:00:00 -0000", "1796040000 +0000"),
        (b"30 Nov 2026 12:00:00 -0730", "1796067000 -0730"),
    ],
)
def test_dates(date: bytes, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        assert parse(MAIL.replace(b"Mon, 30 Nov 2026 13:30:00 +0130", date)).date == expected
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "date",
    [b"", b"yesterday", b"2026-13-45", b"Mon, 30 Nov 2026", b"Mon, 30 Nov 2026 12:00:00",
     b"Wed, 31 Dec 1969 23:59:59 +0000", b"Fri, 1 Jan 2100 00:00:00 +0000",
     b"Mon, 1 Jan 0001 00:00:00 +0000", b"Mon, 1 Jan 99999 00:00:00 +0000",
     b"Mon, 30 Nov 2026 25:00:00 +0000", b"Mon, 30 Nov 2026 12:00:00 +9999",
     b"Mon, 30 Nov 2026 12:00:00 +" + b"9" * 30, b"9" * 5000, b"Mon, 30 Feb 2026 12:00:00 +0000"],
)  # fmt: skip
def test_bad_dates(date: bytes) -> None:
    error = refused(MAIL.replace(b"Mon, 30 Nov 2026 13:30:00 +0130", date))
    assert "'Date:'" in error.what
    assert len(str(error)) < 500


MALFORMED = {
    "empty": (b"", "no mail"),
    "no mail": (DIFF, "no mail"),
    "CRLF header": (MAIL.replace(b"\n", b"\r\n"), "CRLF"),
    "quoted-printable": (
        HEAD + b"Content-Transfer-Encoding: quoted-printable\n\nx\n---\n" + DIFF,
        "quoted-printable",
    ),
    "base64": (HEAD + b"Content-Transfer-Encoding: BASE64\n\nx\n---\n" + DIFF, "base64"),
    "other charset": (
        HEAD + b"Content-Type: text/plain; charset=latin1\n\nx\n---\n" + DIFF,
        "latin1",
    ),
    "attachment": (
        HEAD + b"Content-Type: multipart/mixed; boundary=x\n\n---\n" + DIFF,
        "multipart",
    ),
    "no From:": (MAIL.replace(b"From: ", b"Frm: "), "'From:'"),
    "no Date:": (MAIL.replace(b"Date: ", b"Dte: "), "'Date:'"),
    "no Subject:": (MAIL.replace(b"Subject: ", b"S: "), "'Subject:'"),
    "empty From:": (MAIL.replace(b"Ada Author <ada@example.invalid>", b""), "'From:'"),
    "no address": (MAIL.replace(b"<ada@example.invalid>", b""), "'From:'"),
    "no diff": (MAIL[: MAIL.index(b"diff --git")], "no diff"),
    "header only": (HEAD, "no diff"),
    "plain diff": (MAIL.replace(b"diff --git a/a.py b/a.py\n", b""), "no diff"),
    "plain diff before git's": (
        MAIL.replace(b"diff --git", b"--- a/b\n+++ b/b\n@@ -1 +1 @@\n-a\n+b\ndiff --git"),
        "starts a diff",
    ),
    "message with a diff line": (MAIL.replace(b"One is", b"--- a/b is"), "starts a diff"),
    "message not UTF-8": (MAIL.replace(b"One", b"\xff"), "not UTF-8"),
    "message with NUL": (MAIL.replace(b"One", b"\0"), "NUL"),
    "subject not UTF-8": (MAIL.replace(b"print: say", b"\xff"), "not UTF-8"),
    "unknown charset": (MAIL.replace(b"print: say", b"=?klingon?q?a?="), "can't be decoded"),
    "line break in an encoded author": (
        MAIL.replace(b"Ada Author", b"=?UTF-8?q?A=0Afrom_x?="),
        "control characters",
    ),
    "line break in an encoded subject": (
        MAIL.replace(b"print: say", b"=?UTF-8?q?A=0AB?="),
        "control characters",
    ),
    "bracket in an encoded author": (
        MAIL.replace(b"Ada Author", b"=?UTF-8?q?A=3Cx=3E?="),
        "names no author",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str) -> None:
    raw, expected = MALFORMED[case]
    error = refused(raw)
    assert expected in str(error)
    assert (
        error.fix
        or error.why
        or "Subject" in error.what
        or "From" in error.what
        or "NUL" in error.what
    )


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (MAIL.replace(b"[PATCH 3/7]", b"[PATCH] [Bugfix]"), "eat the start of the subject"),
        (MAIL.replace(b"print: say", b"Re: say"), "eat the start of the subject"),
        (MAIL.replace(b"[PATCH 3/7] print: say two", b"[PATCH]"), "the subject is empty"),
        (MAIL.replace(b"One is", b"From: is"), "for a mail header"),
        (MAIL.replace(b"few.\n", b"few. \n"), "white space at line ends"),
        (MAIL.replace(b"few.\n", b"few.\n\n\n"), "several blank lines"),
        (MAIL.replace(b" a.py |", b"lost words\n a.py |"), "is lost"),
        (MAIL.replace(b"few.\n", b"few.\nFrom here on\n"), "split the mail"),
    ],
)
def test_what_git_would_cut_from_a_message_is_named(raw: bytes, expected: str) -> None:
    assert list(message_faults(parse(MAIL))) == []
    assert expected in "\n".join(message_faults(parse(raw)))


# --- round trip ----------------------------------------------------------------------------

words = st.text(
    st.sampled_from("ab. ,:;<>()[]@=?_\"'\\äß漢🎉-"), min_size=1, max_size=60
)  # fmt: skip


def clean(text: str) -> str:
    """As git keeps a line: no white space at the ends or in a row."""
    return " ".join(text.split())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    author=st.text(st.sampled_from('ab.,()@"äß漢 -'), max_size=50).map(clean),
    subject=st.lists(words, min_size=1, max_size=5).map(lambda parts: clean(" ".join(parts))),
    paragraphs=st.lists(words.map(clean).filter(bool), max_size=3),
    trailers=st.lists(st.sampled_from(["Requires: a", "Upstream: ä#1\n and more"]), max_size=2),
)
def test_a_message_survives_git(
    author: str,
    subject: str,
    paragraphs: list[str],
    trailers: list[str],
    make_store: Callable[..., Store],
    import_base: Callable[..., Commit],
    message_repo: Repo,
) -> None:
    subject = "x" + subject
    author = "A" + author
    body = "\n\n".join(
        ["w" + text for text in paragraphs] + (["\n".join(trailers)] * bool(trailers))
    )
    message = f"{subject}\n\n{body}\n" if body else f"{subject}\n"
    message_repo.reset("HEAD~1")
    message_repo.write({"a.py": b"print(2)\n"})
    message_repo.git("add", "a.py")
    message_repo.git(
        "commit", "--quiet", "--cleanup=verbatim", "--file=-",
        stdin=message.encode(), env={"GIT_AUTHOR_NAME": author},
    )  # fmt: skip
    stored = message_repo.git("show", "--no-patch", "--format=%an%n%ae%n%ad%n%s%n%b", "--date=raw")
    read = parse_patch(message_repo.patch(), name="fix")
    assert (
        f"{read.author}\n{read.email}\n{read.date}\n{read.subject}\n{read.body}".encode().strip()
        == stored.strip()
    )

    store = make_store()
    base = import_base(store, message_repo, "HEAD~1")
    made = apply_series(store, base, [read]).patches[0].commit
    again = store.git.run("format-patch", "-1", "--stdout", "--full-index", made)
    trailer = f"{NAME_TRAILER}: fix\n".encode()
    assert trailer in again
    back = parse_patch(again.replace(trailer, b""), name="fix")
    for key in ("author", "email", "date", "subject", "body", "trailers"):
        assert getattr(back, key) == getattr(read, key)


@pytest.fixture(scope="session")
def message_repo(make_repo: Callable[[], Repo]) -> Repo:
    repo = make_repo()
    repo.commit({"a.py": b"print(1)\n"})
    repo.commit({"a.py": b"print(2)\n"})
    return repo


# --- fuzz ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def rich_mail(make_repo: Callable[[], Repo]) -> bytes:
    """A mail with every kind of file diff."""
    repo = make_repo()
    noise = random.Random(1).randbytes(3000)
    long = b"".join(b"line %d\n" % number for number in range(40))
    repo.commit({"a": long, "b": noise, "c d": b"x", "gone": long[9:] + b"y\n", "run": b"#!\n"})
    repo.commit(
        {
            "a": long.replace(b"line 3\n", b"").replace(b"line 30\n", b"thirty"),
            "b": noise[:1500] + b"!" + noise[1500:],
            "c d": b"y",
            "gone": None,
            "moved": long[9:] + b"z\n",
            "run": (0o100755, b"#!\n"),
            b"new \xff": b"\0new",
            "link": (0o120000, b"a"),
        },
        "Chänge \u6f22 all of it in a subject that is long enough to be folded by git\n\n"
        "Because.\n\nRequires: x\n",
    )
    return repo.patch()


@settings(derandomize=True, deadline=None, max_examples=1500)
@given(seed=st.integers(0, 1 << 32))
def test_any_damage_is_a_patch_error_at_worst(seed: int, rich_mail: bytes) -> None:
    chance = random.Random(seed)
    raw = bytearray(rich_mail)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(raw))
        stop = min(len(raw), at + chance.choice((1, 1, 1, 2, 10, 100)))
        way = chance.randrange(6)
        if way == 0:
            del raw[at:stop]
        elif way == 1:
            raw[at:at] = raw[at:stop]
        elif way == 2:
            raw[at] = chance.randrange(256)
        elif way == 3:
            raw[at:at] = chance.choice(
                (b"\n", b"\r\n", b"\0", b"9" * 50, b'"', b"--- a/x\n", b"-- \n")
            )
        elif way == 4:
            lines = raw.splitlines(keepends=True)
            one, other = chance.randrange(len(lines)), chance.randrange(len(lines))
            lines[one], lines[other] = lines[other], lines[one]
            raw = bytearray(b"".join(lines))
        else:
            raw = raw[:at] or raw
    started = time.process_time()
    try:
        patch = parse_patch(bytes(raw), name="fix")
        list(message_faults(patch))
        assert patch.trailers is not None
    except PatchError as error:
        name = str(error).partition(":")[0]
        if name != "fix":
            raise
    assert time.process_time() - started < 1


@settings(derandomize=True, deadline=None, max_examples=300)
@given(header=st.sampled_from(["From", "Subject", "Date"]), value=st.text(max_size=60))
def test_any_header_is_a_patch_error_at_worst(header: str, value: str) -> None:
    old = {"From": "Ada Author", "Subject": "print: say", "Date": "Mon, 30 Nov 2026 13"}[header]
    raw = MAIL.replace(old.encode(), value.encode(errors="surrogatepass"), 1)
    try:
        patch = parse(raw)
    except PatchError:
        return
    assert "\n" not in patch.author + patch.email + patch.subject


@pytest.mark.parametrize(
    "raw",
    [
        MAIL + b"diff --git a/" + b"a " * 500_000,
        HEAD + b"\n" + b"---\n" * 300_000 + DIFF,
        HEAD + b"\n" + b"\n" * 1_000_000 + DIFF,
        HEAD + b"Subject: " + b"=?UTF-8?q?" * 50_000 + b"\n\n" + DIFF,
        HEAD.replace(b"Ada Author", b"(" * 100_000) + b"\n" + DIFF,
        HEAD.replace(b"Ada Author", b"=?" * 50_000) + b"\n" + DIFF,
        HEAD.replace(b"Ada Author", b" " * 100_000) + b"\n" + DIFF,
        HEAD.replace(b"print", b"[" * 100_000) + b"\n" + DIFF,
        HEAD + b"\n" + b"a: b\n" * 100_000 + DIFF,
    ],
    ids=[
        "header",
        "separators",
        "blank",
        "words",
        "brackets",
        "half words",
        "spaces",
        "tags",
        "trailers",
    ],
)
def test_no_input_takes_long(raw: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(PatchError):
        assert parse(raw).trailers is not None
    assert time.process_time() - started < 2
