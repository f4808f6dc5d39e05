from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlay.patches.patch import parse_patch
from overlay.patches.rangediff import Way, compare, difference
from tests.conftest import numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlay.patches.patch import Patch
    from overlay.patches.rangediff import Change
    from tests.conftest import File, Repo

    Make = Callable[..., Patch]

LINES = numbered(1, 60)


@pytest.fixture
def make(make_repo: Callable[[], Repo]) -> Make:
    """``make(name, before, after)``: what git writes for the way between two states."""
    repo = make_repo()

    def patch(
        name: str, before: Mapping[str, File], after: Mapping[str, File], message: str = ""
    ) -> Patch:
        repo.git("read-tree", "--empty")
        repo.git("clean", "-qffdx")
        repo.commit(before, "Begin\n")
        repo.commit(after, message or f"area: do {name}\n\nWhy.\n")
        return parse_patch(repo.patch(), name=name)

    return patch


def ways(changes: Sequence[Change]) -> list[tuple[str, str]]:
    return [(str(change.way), change.name) for change in changes]


def replaced(at: int, new: bytes, text: bytes = LINES) -> bytes:
    return text.replace(b"line %d\n" % at, new)


def one(old: Patch, new: Patch) -> Change:
    (change,) = compare([old], [new])
    return change


@pytest.fixture
def plain(make: Make) -> Patch:
    return make("fix", {"f": LINES}, {"f": replaced(30, b"new\n")})


def test_the_same_file_is_the_same(plain: Patch) -> None:
    change = one(plain, plain)
    assert (change.way, change.is_same, change.notes, difference(change)) == (
        Way.SAME,
        True,
        (),
        [],
    )


def test_other_ids_and_line_numbers_are_index_only(plain: Patch, make: Make) -> None:
    longer = b"begin\n" + LINES
    change = one(plain, make("fix", {"f": longer}, {"f": replaced(30, b"new\n", longer)}))
    assert (change.way, change.message, difference(change)) == (Way.INDEX, False, [])


def test_other_lines_around_are_context_only(plain: Patch, make: Make) -> None:
    other = replaced(28, b"another\n")
    change = one(plain, make("fix", {"f": other}, {"f": replaced(30, b"new\n", other)}))
    assert change.way is Way.CONTEXT
    assert difference(change) == [
        "@@", " modify: f", " @@", "  line 27", "- line 28", "+ another", "  line 29",
        " -line 30", " +new",
    ]  # fmt: skip


def test_a_mode_that_stays_is_context(make: Make) -> None:
    new = replaced(30, b"new\n")
    old = make("fix", {"f": LINES}, {"f": new})
    change = one(old, make("fix", {"f": (0o100755, LINES)}, {"f": (0o100755, new)}))
    assert change.way is Way.INDEX
    changed = one(old, make("fix", {"f": LINES}, {"f": (0o100755, new)}))
    assert changed.way is Way.CONTENT
    assert any("mode: 100644 -> 100755" in line for line in difference(changed))


@pytest.mark.parametrize(
    "after",
    [
        replaced(30, b"newer\n"),
        replaced(31, b"", replaced(30, b"new\n")),
        # The same lines, no longer side by side, do something else
        replaced(31, b"line 31\nnew\n", replaced(30, b"")),
    ],
)
def test_any_other_added_or_removed_line_is_content(plain: Patch, make: Make, after: bytes) -> None:
    change = one(plain, make("fix", {"f": LINES}, {"f": after}))
    assert change.way is Way.CONTENT
    assert difference(change)


def test_another_path_or_kind_or_line_end_is_content(plain: Patch, make: Make) -> None:
    new = replaced(30, b"new\n")
    assert one(plain, make("fix", {"g": LINES}, {"g": new})).way is Way.CONTENT
    assert one(plain, make("fix", {"f": LINES}, {"f": None})).way is Way.CONTENT
    ends = make("fix", {"f": b"a\n"}, {"f": b"b\n"}), make("fix", {"f": b"a\n"}, {"f": b"b"})
    assert one(*ends).way is Way.CONTENT
    assert any("no line end" in line for line in difference(one(*ends)))


def test_binary_files_count_by_what_they_become(make: Make) -> None:
    first, second, third = (bytes(range(256)) * n for n in (2, 3, 4))
    old = make("fix", {"f": first}, {"f": second})
    assert one(old, make("fix", {"f": first}, {"f": third})).way is Way.CONTENT
    again = make("fix", {"f": first}, {"f": second}, "area: reworded\n\nWhy.\n")
    assert one(old, again).way is Way.INDEX


def test_a_message_is_told_apart_from_the_diff(plain: Patch, make: Make) -> None:
    change = one(plain, make("fix", {"f": LINES}, {"f": replaced(30, b"new\n")}, "area: x\n\nY.\n"))
    assert (change.way, change.notes) == (Way.INDEX, ("message",))
    assert [line for line in difference(change) if line[0] in "+-"] == [
        "-Subject: area: do fix", "+Subject: area: x", "-Why.", "+Y.",
    ]  # fmt: skip


def test_new_and_dropped_come_last_and_the_rest_in_order_of_the_series(make: Make) -> None:
    patches = [
        make(name, {"f": LINES}, {"f": replaced(at, b"%s\n" % name.encode())})
        for name, at in (("one", 5), ("two", 15), ("three", 25), ("four", 35))
    ]
    changed = make("one", {"f": LINES}, {"f": replaced(5, b"uno\n")})
    got = compare(patches[:3], [changed, patches[2], patches[3]])
    assert ways(got) == [
        ("same", "three"), ("content", "one"), ("new", "four"), ("dropped", "two"),
    ]  # fmt: skip
    assert difference(got[2])[1].startswith("+From: ")
    assert difference(got[3])[1].startswith("-From: ")


def test_files_renamed_are_found_by_content_then_by_message(plain: Patch, make: Make) -> None:
    same = parse_patch(plain.raw, name="better-name")
    change = one(plain, same)
    assert (change.way, change.notes, change.is_same) == (Way.SAME, ("was fix",), False)
    other = make("better-name", {"f": LINES}, {"f": replaced(30, b"x\n")}, plain.message)
    assert (one(plain, other).way, one(plain, other).renamed) == (Way.CONTENT, True)


def test_names_that_went_round_are_followed_by_content(make: Make) -> None:
    first, second = (
        make(name, {"f": LINES}, {"f": replaced(at, b"x\n")}) for name, at in (("a", 5), ("b", 9))
    )
    swapped = parse_patch(second.raw, name="a"), parse_patch(first.raw, name="b")
    got = compare([first, second], swapped)
    assert [(change.way, change.renamed) for change in got] == [(Way.SAME, True)] * 2
    assert sum(change.reordered for change in got) == 1


def test_two_that_fit_equally_are_not_guessed_between(plain: Patch) -> None:
    twins = [parse_patch(plain.raw, name=name) for name in ("one", "two")]
    assert ways(compare([plain], twins)) == [("new", "one"), ("new", "two"), ("dropped", "fix")]


def test_only_those_that_moved_are_reordered(make: Make) -> None:
    patches = [
        make(str(at), {"f": LINES}, {"f": replaced(at, b"x%d\n" % at)}) for at in range(10, 60, 10)
    ]
    last_first = compare(patches, [patches[-1], *patches[:-1]])
    assert [change.name for change in last_first if change.reordered] == ["50"]
    assert all(change.way is Way.SAME for change in last_first)
    without = compare(patches, patches[1:])
    assert not any(change.reordered for change in without)


def test_nothing_from_a_patch_steers_the_terminal(make: Make) -> None:
    dirty = "area: \u202ex\n\nWhy \u202e.\n"
    change = compare([], [make("fix", {"f": b"a\n"}, {"f": b"\x1b[31m\xff\x9b\r\n"}, dirty)])[0]
    for line in difference(change):
        assert all(letter.isprintable() for letter in line), line
    assert any("\\x1b[31m" in line for line in difference(change))


def test_empty_series() -> None:
    assert compare([], []) == ()
