from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.errors import MoveError
from overlay.moving.resolutions import Resolutions, marker_lines
from overlay.moving.threeway import Conflict, Merger
from overlay.trees.match import Entry
from tests.conftest import numbered

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.trees.store import Store

ABOUT = "Patch: p\nLine: l\nMove: vllm 1 to 2"


def entry(data: bytes) -> Entry:
    return Entry(mode=0o100644, data=data)


def conflict(
    store: Store, base: bytes, ours: bytes, theirs: bytes, path: bytes = b"a.py"
) -> Conflict:
    with Merger(store.git) as merger:
        made = merger.merge(path, entry(base), entry(ours), entry(theirs), ())
    assert isinstance(made, Conflict)
    return made


@pytest.fixture
def met(store: Store) -> Conflict:
    with store.writing():
        pass
    base = numbered(1, 30)
    return conflict(
        store, base, base.replace(b"e 9\n", b"e nine\n"), base.replace(b"e 9\n", b"e IX\n")
    )


RESOLVED = numbered(1, 30).replace(b"e 9\n", b"e nine IX\n")


def test_the_same_conflict_is_resolved_alike(store: Store, met: Conflict, tmp_path: Path) -> None:
    book = Resolutions(tmp_path)
    assert book.replay(met) is None
    assert book.record(store.git, met, RESOLVED, ABOUT)
    assert book.replay(met) == RESOLVED
    text = book.path(met.key).read_text()
    assert text.startswith(f"{ABOUT}\nPath: a.py\n\ndiff --git a/conflict b/conflict\n")


def test_line_place_and_name_are_no_part_of_it(store: Store, met: Conflict, tmp_path: Path) -> None:
    book = Resolutions(tmp_path)
    book.record(store.git, met, RESOLVED, ABOUT)
    base = b"above\n" * 50 + numbered(1, 30) + b"below\n"
    elsewhere = conflict(
        store, base, base.replace(b"e 9\n", b"e nine\n"), base.replace(b"e 9\n", b"e IX\n"),
        b"other.py",
    )  # fmt: skip
    assert elsewhere.key == met.key
    assert book.replay(elsewhere) == base.replace(b"e 9\n", b"e nine IX\n")


def test_other_surroundings_or_another_conflict_are_left_alone(
    store: Store, met: Conflict, tmp_path: Path
) -> None:
    book = Resolutions(tmp_path)
    book.record(store.git, met, RESOLVED, ABOUT)
    base = numbered(1, 30).replace(b"e 8\n", b"e eight\n")
    same_key = conflict(
        store, base, base.replace(b"e 9\n", b"e nine\n"), base.replace(b"e 9\n", b"e IX\n")
    )
    assert same_key.key == met.key
    assert book.replay(same_key) is None
    base = numbered(1, 30)
    other = conflict(
        store, base, base.replace(b"e 9\n", b"e 9.0\n"), base.replace(b"e 9\n", b"e IX\n")
    )
    assert other.key != met.key
    assert book.replay(other) is None


def test_a_doubtful_merge_can_be_confirmed(store: Store, met: Conflict, tmp_path: Path) -> None:
    book = Resolutions(tmp_path)
    doubt = Conflict(
        path=b"a", kind="twice", base=entry(b"1\n"), ours=entry(b"2\n"), theirs=entry(b"3\n"),
        marked=b"2\n3\n",
    )  # fmt: skip
    assert book.record(store.git, doubt, b"2\n3\n", ABOUT)
    assert book.replay(doubt) == b"2\n3\n"


def test_what_no_text_can_resolve_is_not_recorded(store: Store, tmp_path: Path) -> None:
    gone = Conflict(path=b"a", kind="deleted", base=entry(b"1"), ours=None, theirs=entry(b"2"))
    assert not Resolutions(tmp_path).record(store.git, gone, b"2", ABOUT)
    assert Resolutions(tmp_path).replay(gone) is None
    assert not list(tmp_path.iterdir())


def test_damage_is_named(store: Store, met: Conflict, tmp_path: Path) -> None:
    book = Resolutions(tmp_path)
    book.record(store.git, met, RESOLVED, ABOUT)
    path = book.path(met.key)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(MoveError, match=f"{met.key}.diff can't be replayed"):
        book.replay(met)
    path.unlink()
    path.mkdir()
    with pytest.raises(MoveError):
        book.replay(met)


LINES = st.lists(st.sampled_from([b"a", b"b", b"c\r", b"", b"x=1", b"\xff\0"]), max_size=8)


@settings(max_examples=60)
@given(parts=st.tuples(LINES, LINES, LINES, LINES), end=st.booleans())
def test_any_resolution_comes_back(
    make_store: Callable[..., Store],
    parts: tuple[list[bytes], list[bytes], list[bytes], list[bytes]],
    end: bool,
) -> None:
    store = make_store()
    with store.writing():
        pass
    base, ours, theirs, resolved = (
        b"\n".join([b"top", *part, b"bottom"]) + b"\n" * end for part in parts
    )
    with Merger(store.git) as merger:
        met = merger.merge(b"a", entry(base), entry(ours), entry(theirs), ())
    if not isinstance(met, Conflict) or not met.marked:
        return
    with tempfile.TemporaryDirectory() as folder:
        book = Resolutions(Path(folder))
        assert book.record(store.git, met, resolved, ABOUT)
        assert book.replay(met) == resolved


def test_markers_are_told_from_text_that_was_there() -> None:
    text = b"<<<<<<< a\n=======\n>>>>>>> b\r\n<<<<<<<< long\n|||||||\nx <<<<<<< y\n<<<<<<<z\n"
    assert list(marker_lines(text, ())) == [1, 3, 4, 5]
    assert list(marker_lines(text, [b"<<<<<<< a\n"])) == [3, 4, 5]
