"""Paths as bytes and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.patches.paths import check_path, parents, quote_path, unquote_path

if TYPE_CHECKING:
    from tests.conftest import Repo


@settings(derandomize=True, deadline=None)
@given(st.binary(min_size=1).filter(lambda path: b"\0" not in path))
def test_quoting_goes_both_ways(path: bytes) -> None:
    assert unquote_path(quote_path(path).encode()) == path


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (b"a b/c.py", "a b/c.py"),
        ("ä".encode(), "ä"),
        (b"\xe4", '"\\344"'),
        (b'q"', '"q\\""'),
        (b"back\\slash", '"back\\\\slash"'),
        (b"tab\t\x7f", '"tab\\t\\177"'),
    ],
)
def test_text_of_a_path(path: bytes, text: str) -> None:
    assert quote_path(path) == text


def test_quoting_is_that_of_git(upstream: Repo) -> None:
    path = bytes(range(1, 256)).replace(b"/", b"")[:200]
    upstream.commit({path: b"x\n"})
    listed = upstream.git("diff", "--name-only", "HEAD^", "HEAD").rstrip(b"\n")
    assert unquote_path(listed) == path


@pytest.mark.parametrize("text", [b'"', b'"a', b'"a\\"', b'"\\8"', b'"\\400"', b'"\\1"', b'"a"b"'])
def test_malformed_quoting(text: bytes) -> None:
    with pytest.raises(ValueError):
        unquote_path(text)


@pytest.mark.parametrize(
    "path",
    [b"a", b"a/b.c", b".github/x", b".gitignore", b"a.git/x", b"..a/b..", b"...", b"a b", b"\xff"],
)
def test_good_paths(path: bytes) -> None:
    assert check_path(path) == ""


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (b"", "empty"),
        (b"/a", "absolute"),
        (b"a/../b", "leaves the tree"),
        (b"a/", "leaves the tree"),
        (b"a\nb", "line break"),
        (b".Git/config", "git's own folder"),
        (b"a/.git. .", "git's own folder"),
        (b"GIT~1", "git's own folder"),
        (b".git:stream", "git's own folder"),
        (b".g\xe2\x80\x8dit", "git's own folder"),
    ],
)
def test_bad_paths(path: bytes, why: str) -> None:
    assert why in check_path(path)


def test_parents() -> None:
    assert list(parents(b"a/b/c")) == [b"a/b", b"a"]
    assert list(parents(b"a")) == []
