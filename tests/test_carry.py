"""Carrying: verdicts on tiny trees, and the same trees as ``git cherry-pick`` makes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from overlay.errors import ApplyError
from overlay.moving.carry import carry_series, old_states, renames_between
from overlay.patches.patch import parse_patch
from overlay.trees.git import Git
from overlay.trees.match import Entry, Verdict
from tests.conftest import numbered
from tests.support.carrying import carry, memory, series

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from overlay.moving.carry import Carried, Conflict
    from overlay.trees.store import Commit, Store
    from tests.conftest import File, Repo

SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("VLLM_OVERLAY_TEST_EXAMPLES", "25")),
    suppress_health_check=[HealthCheck.too_slow],
)
LONG = numbered(1, 60)


def edit(text: bytes, *edits: tuple[bytes, bytes]) -> bytes:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def git(make_store: Callable[..., Store]) -> Git:
    return make_store().git


@pytest.fixture
def world(upstream: Repo, git: Git) -> World:
    return World(upstream, git)


class World:
    """A base, patches on it, and an upstream that went on from it."""

    def __init__(self, repo: Repo, git: Git) -> None:
        self.repo, self.git = repo, git
        self.base = self.tip = repo.git("rev-parse", "HEAD").decode().strip()

    def patch(self, name: str, files: dict[str | bytes, File], *trailers: str) -> None:
        self.repo.reset(self.tip)
        body = "".join(f"{trailer}\n" for trailer in trailers)
        self.tip = self.repo.commit(files, f"{name}\n" + (f"\n{body}" if body else ""))

    def upstream(self, *changes: dict[str | bytes, File]) -> str:
        self.repo.reset(self.base)
        for files in changes:
            new = self.repo.commit(files, "Upstream\n")
        return new

    def carry(self, *changes: dict[str | bytes, File], **how: object) -> list[Carried]:
        new = self.upstream(*changes)
        return carry(self.repo, self.git, self.base, self.tip, new, **how)


def long(*edits: tuple[bytes, bytes]) -> dict[str | bytes, File]:
    return {"pkg/long.py": edit(LONG, *edits)}


def test_verdicts_of_strict_matching_stay(world: World) -> None:
    world.patch("same", {"a.py": b"print(2)\n"})
    world.patch("below", long((b"line 40\n", b"forty\n")))
    world.patch("taken", {"pkg/short.py": b"one\n2\nthree\n"})
    made = world.carry({**long((b"line 1\n", b"0\nline 1\n")), "pkg/short.py": b"one\n2\nthree\n"})
    assert [one.verdict for one in made] == ["applies", "offset", "merged"]
    assert all(one.ok for one in made)
    assert made[2].changes == {}


def test_other_context_is_merged(world: World) -> None:
    world.patch("forty", long((b"line 40\n", b"forty\n")))
    (made,) = world.carry(long((b"line 42\n", b"forty-two\n")))
    assert made.verdict is Verdict.CONTEXT
    assert made.ok
    both = edit(LONG, (b"line 40\n", b"forty\n"), (b"line 42\n", b"forty-two\n"))
    assert made.changes == {b"pkg/long.py": Entry(mode=0o100644, data=both)}
    (finding,) = made.findings
    assert finding.verdict is Verdict.CONTEXT
    assert "three-way merge" in finding.why


def test_conflict_has_three_sides_and_markers(world: World) -> None:
    world.patch("forty", {**long((b"line 40\n", b"forty\n")), "a.py": b"print(2)\n"})
    (made,) = world.carry(long((b"line 40\n", b"FORTY\n")))
    assert made.verdict is Verdict.CONFLICT
    assert not made.ok
    assert made.changes == {}  # not the half of it that would go
    (conflict,) = made.conflicts
    assert (conflict.path, conflict.kind) == (b"pkg/long.py", "content")
    (region,) = conflict.regions
    assert region.sides == (b"FORTY\n", b"line 40\n", b"forty\n")
    assert region.line == 40
    marked = b"<<<<<<< upstream\nFORTY\n||||||| base\nline 40\n=======\nforty\n>>>>>>> patch\n"
    assert conflict.marked == edit(LONG, (b"line 40\n", marked))


def test_markers_are_longer_than_what_looks_like_them(world: World) -> None:
    odd = b"<<<<<<< upstream\nx\n||||||| base\n=======\ny\n>>>>>>> patch\n" + LONG
    world.patch("begin", {"odd": odd})
    world.base = world.tip
    world.patch("forty", {"odd": edit(odd, (b"line 40\n", b"forty\n"))})
    (made,) = world.carry({"odd": edit(odd, (b"line 40\n", b"FORTY\n"))})
    (conflict,) = made.conflicts
    assert [region.ours for region in conflict.regions] == [b"FORTY\n"]
    assert b"\n<<<<<<<< upstream\n" in conflict.marked
    # and they are no conflict where the merge is clean
    (made,) = world.carry({"odd": edit(odd, (b"line 42\n", b"42\n"))})
    assert made.verdict is Verdict.CONTEXT


def test_key_of_a_conflict_goes_with_its_lines(world: World) -> None:
    world.patch("forty", long((b"line 40\n", b"forty\n")))
    taken = (b"line 40\n", b"FORTY\n")
    keys = [
        world.carry(change)[0].conflicts[0].key
        for change in (
            long(taken),
            long(taken, (b"line 1\n", b"0\nline 1\n")),
            long((b"line 40\n", b"XL\n")),
        )
    ]
    assert keys[0] == keys[1] != keys[2]


def test_bad_patches_are_left_out_and_the_rest_goes_on(world: World) -> None:
    world.patch("first", long((b"line 10\n", b"ten\n")))
    world.patch("second", long((b"line 10\n", b"ten\n"), (b"line 50\n", b"fifty\n")))
    first, second = world.carry(long((b"line 10\n", b"TEN\n")))
    assert (first.verdict, second.verdict) == ("conflict", "applies")
    assert second.changes[b"pkg/long.py"] == Entry(
        mode=0o100644, data=edit(LONG, (b"line 10\n", b"TEN\n"), (b"line 50\n", b"fifty\n"))
    )


def test_blocked_by_a_derived_need(world: World) -> None:
    world.patch("other", long((b"line 30\n", b"thirty\n")))
    world.patch("first", long((b"line 10\n", b"ten\n"), (b"line 30\n", b"thirty\n")))
    world.patch("second", long((b"line 10\n", b"ten!\n"), (b"line 30\n", b"thirty\n")))
    taken = long((b"line 10\n", b"TEN\n"), (b"line 30\n", b"XXX\n"))
    other, first, second = world.carry(taken)
    assert [other.verdict, first.verdict, second.verdict] == ["conflict", "conflict", "blocked"]
    assert second.needs == ("first",)
    assert second.conflicts  # still there to be looked at
    assert not second.ok


def test_blocked_by_a_declared_need(world: World) -> None:
    world.patch("first", long((b"line 10\n", b"ten\n")))
    world.patch("second", {"a.py": b"print(2)\n"}, "Requires: first")
    first, second = world.carry(long((b"line 10\n", b"TEN\n")))
    assert (first.verdict, second.verdict) == ("conflict", "blocked")
    assert (second.needs, second.changes) == (("first",), {})
    # what upstream has taken is there to stand on
    merged, second = world.carry(long((b"line 10\n", b"ten\n")))
    assert (merged.verdict, second.verdict) == ("merged", "applies")


def test_partly_merged_by_hunks(world: World) -> None:
    ours = [(b"line 10\n", b"ten\n"), (b"line 50\n", b"fifty\n")]
    world.patch("both", long(*ours))
    (made,) = world.carry(long(ours[0]))
    assert made.verdict is Verdict.PARTLY_MERGED
    assert [finding.verdict for finding in made.findings] == ["merged", "applies"]
    assert made.changes[b"pkg/long.py"] == Entry(mode=0o100644, data=edit(LONG, *ours))


def test_partly_merged_where_the_context_went_on(world: World) -> None:
    ours = [(b"line 10\n", b"ten\n"), (b"line 50\n", b"fifty\n")]
    world.patch("both", long(*ours))
    later = [(b"line 12\n", b"twelve\n"), (b"line 52\n", b"fifty-two\n")]
    (made,) = world.carry(long(ours[0], *later))
    assert made.verdict is Verdict.PARTLY_MERGED
    assert [finding.verdict for finding in made.findings] == ["merged", "context"]
    assert made.changes[b"pkg/long.py"] == Entry(mode=0o100644, data=edit(LONG, *ours, *later))


def test_merged_where_the_context_went_on(world: World) -> None:
    world.patch("ten", long((b"line 10\n", b"ten\n")))
    (made,) = world.carry(long((b"line 10\n", b"ten\n"), (b"line 12\n", b"twelve\n")))
    assert (made.verdict, made.changes) == (Verdict.MERGED, {})


def test_mode_that_is_left_is_not_lost(world: World) -> None:
    world.patch("run", {"a.py": (0o100755, b"print(2)\n")})
    (made,) = world.carry({"a.py": b"print(2)\n"})
    assert made.verdict is Verdict.PARTLY_MERGED
    assert made.changes == {b"a.py": Entry(mode=0o100755, data=b"print(2)\n")}


def test_name_that_is_left_is_not_lost(world: World) -> None:
    new = edit(LONG, (b"line 10\n", b"ten\n"))
    world.patch("move", {"pkg/long.py": None, "pkg/new.py": new})
    (made,) = world.carry({"pkg/long.py": new})
    assert made.verdict is Verdict.PARTLY_MERGED
    assert made.changes == {
        b"pkg/long.py": None,
        b"pkg/new.py": Entry(mode=0o100644, data=new),
    }


def test_modes_of_both_sides_are_merged(world: World) -> None:
    world.patch("forty", long((b"line 40\n", b"forty\n")))
    new = edit(LONG, (b"line 42\n", b"42\n"))
    (made,) = world.carry({"pkg/long.py": (0o100755, new)})
    assert made.verdict is Verdict.CONTEXT
    entry = made.changes[b"pkg/long.py"]
    assert entry == Entry(mode=0o100755, data=edit(new, (b"line 40\n", b"forty\n")))


@pytest.mark.parametrize("changed", [False, True], ids=["strictly", "by a merge"])
def test_file_that_upstream_renamed(world: World, changed: bool) -> None:
    world.patch("forty", long((b"line 40\n", b"forty\n")))
    new = edit(LONG, (b"line 42\n", b"42\n")) if changed else LONG
    upstream: dict[str | bytes, File] = {"pkg/long.py": None, "src/longer.py": new}
    where = {b"pkg/long.py": b"src/longer.py"}
    (made,) = world.carry(upstream, renames=where.get)
    assert made.verdict is Verdict.MOVED
    assert made.changes == {
        b"src/longer.py": Entry(mode=0o100644, data=edit(new, (b"line 40\n", b"forty\n")))
    }
    assert "src/longer.py" in made.findings[0].why
    # not known: a conflict that says so
    (made,) = world.carry(upstream)
    assert made.verdict is Verdict.CONFLICT
    assert [(c.path, c.kind) for c in made.conflicts] == [(b"pkg/long.py", "deleted")]


def test_both_renamed_the_same_way(world: World) -> None:
    world.patch("move", {"pkg/long.py": None, "pkg/new.py": edit(LONG, (b"line 9\n", b"9\n"))})
    other = edit(LONG, (b"line 30\n", b"30\n"))
    (made,) = world.carry({"pkg/long.py": None, "pkg/new.py": other})
    assert made.verdict is Verdict.MOVED
    assert made.changes == {
        b"pkg/new.py": Entry(mode=0o100644, data=edit(other, (b"line 9\n", b"9\n")))
    }


def test_rename_takes_upstreams_change_along(world: World) -> None:
    world.patch("move", {"pkg/long.py": None, "pkg/new.py": edit(LONG, (b"line 9\n", b"9\n"))})
    other = edit(LONG, (b"line 11\n", b"11\n"))
    (made,) = world.carry({"pkg/long.py": other})
    assert made.verdict is Verdict.CONTEXT
    assert made.changes == {
        b"pkg/long.py": None,
        b"pkg/new.py": Entry(mode=0o100644, data=edit(other, (b"line 9\n", b"9\n"))),
    }


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        ({"new.py": b"ours\n"}, {"new.py": b"theirs\n"}, "added"),
        ({"new/x.py": b"ours\n"}, {"new": b"theirs\n"}, "added"),
        ({"new": b"ours\n"}, {"new/x.py": b"theirs\n"}, "added"),
        ({"a.py": None}, {"a.py": b"print(3)\n"}, "deleted"),
        ({"a.py": b"print(2)\n"}, {"a.py": None}, "deleted"),
        ({"link": (0o120000, b"a.py")}, {"link": (0o120000, b"bin/run")}, "binary"),
        ({"link": (0o120000, b"a.py")}, {"link": b"text\n"}, "mode"),
        ({"data.bin": b"\0ours"}, {"data.bin": b"\0theirs"}, "binary"),
        ({"a.py": None, "b.py": b"print(1)\n"}, {"b.py": b"theirs\n"}, "added"),
    ],
)
def test_kinds_of_conflict(
    world: World, ours: dict[str | bytes, File], theirs: dict[str | bytes, File], kind: str
) -> None:
    world.patch("ours", ours)
    (made,) = world.carry(theirs)
    assert made.verdict is Verdict.CONFLICT
    assert [conflict.kind for conflict in made.conflicts] == [kind]
    assert any(finding.verdict is Verdict.CONFLICT for finding in made.findings)
    assert made.changes == {}


# --- never twice ------------------------------------------------------------------------------

BLOCK = b"def fix(values):\n    return sorted(values)\n"


@pytest.mark.parametrize("at", [b"line 25\n", b"line 3\n", b"line 60\n"])
@pytest.mark.parametrize("strictly", [False, True], ids=["by a merge", "strictly"])
def test_what_upstream_took_elsewhere_is_not_made_twice(
    world: World, at: bytes, strictly: bool
) -> None:
    world.patch("fix", long((b"line 20\n", BLOCK + b"line 20\n")))
    taken = edit(LONG, (at, at + BLOCK))
    if not strictly:
        taken = edit(taken, (b"line 21\n", b"x\n"))
    (made,) = world.carry({"pkg/long.py": taken})
    assert (made.verdict, made.changes) == (Verdict.CONFLICT, {})
    (conflict,) = made.conflicts
    assert conflict.kind == "twice"
    assert f"line {taken[: taken.index(BLOCK)].count(b'def') + int(at.split()[1]) + 1}" in (
        conflict.why
    )
    assert conflict.marked.count(BLOCK) == 2
    assert any(finding.verdict is Verdict.CONFLICT for finding in made.findings)


def test_what_upstream_took_in_place_is_not_made_twice(world: World) -> None:
    world.patch("fix", long((b"line 20\n", BLOCK + b"line 20\n")))
    taken = long((b"line 20\n", BLOCK + b"line 20\n"), (b"line 21\n", b"x\n"))
    (made,) = world.carry(taken)
    assert (made.verdict, made.changes) == (Verdict.MERGED, {})


def test_what_upstream_took_and_went_on_with_is_not_made_twice(world: World) -> None:
    """As FlashInfer did with its code owners: git merges that cleanly, and has it twice."""
    owners = b"# expert parallel\npkg/expert/  @ada @bob @carl\ntests/expert/  @ada @bob @carl\n"
    world.patch("owners", long((b"line 21\n", owners + b"\nline 21\n")))
    later = owners.replace(b"@carl", b"@carl @dora @emil")
    renamed = [(b"line %d\n" % n, b"line %d!\n" % n) for n in (17, 18, 19)]
    new = edit(LONG, *renamed, (b"line 20\n", later + b"\nline 20\n"))
    (made,) = world.carry({"pkg/long.py": new})
    assert made.verdict is Verdict.CONFLICT
    assert [conflict.kind for conflict in made.conflicts] == ["twice"]


def test_what_two_changes_have_in_common_is_no_sign(world: World) -> None:
    # `else:` is in both additions, but each has three lines of its own
    one = b"if one:\n    first = 1\n    second = 2\nelse:\n"
    other = b"if other:\n    third = 3\n    fourth = 4\nelse:\n"
    world.patch("one", long((b"line 20\n", one + b"line 20\n")))
    (made,) = world.carry(long((b"line 22\n", b"x\n"), (b"line 50\n", other + b"line 50\n")))
    assert made.verdict is Verdict.CONTEXT


def test_a_short_line_is_no_sign(world: World) -> None:
    """As index-mapping's `else:` on vLLM 0.32.0: half of what it adds, and anywhere else too."""
    world.patch("one", long((b"line 20\n", b"return_counts=True,\nelse:\nline 20\n")))
    (made,) = world.carry(long((b"line 50\n", b"if other:\n    third = 3\nelse:\nline 50\n")))
    assert made.verdict is Verdict.APPLIES


# --- decisions, resolutions, renames ------------------------------------------------------------


def test_resolution_by_hand(world: World) -> None:
    world.patch("first", long((b"line 10\n", b"ten\n")))
    world.patch("second", long((b"line 10\n", b"ten!\n")))
    new = world.upstream(long((b"line 10\n", b"TEN\n")))
    world.repo.commit(long((b"line 10\n", b"Ten\n")), "Resolved\n")
    resolved = parse_patch(world.repo.patch(), name="resolved")
    first, second = carry(
        world.repo, world.git, world.base, world.tip, new, decided={"first": resolved}
    )
    assert (first.name, first.verdict, first.decided) == ("first", "applies", "resolved")
    assert first.changes[b"pkg/long.py"] == Entry(
        mode=0o100644, data=edit(LONG, (b"line 10\n", b"Ten\n"))
    )
    assert second.verdict is Verdict.CONFLICT  # by itself: what it stands on is there
    other = world.upstream(long((b"line 10\n", b"else\n")))
    stale = carry(world.repo, world.git, world.base, world.tip, other, decided={"first": resolved})
    assert [one.verdict for one in stale] == ["conflict", "blocked"]
    assert not stale[0].ok


def test_skipped(world: World) -> None:
    world.patch("first", long((b"line 10\n", b"ten\n")))
    world.patch("second", {"a.py": b"print(2)\n"}, "Requires: first")
    world.patch("third", {"bin/run": (0o100755, b"#!/bin/sh\nexit 1\n")})
    first, second, third = world.carry({"docs/new": b"\n"}, decided={"first": None})
    assert (first.decided, first.changes, first.ok) == ("skipped", {}, True)
    assert (second.verdict, third.verdict) == ("blocked", "applies")


def test_recorded_resolution(world: World) -> None:
    world.patch("forty", long((b"line 40\n", b"forty\n")))
    asked: list[Conflict] = []

    def replay(conflict: Conflict) -> bytes | None:
        asked.append(conflict)
        return edit(LONG, (b"line 40\n", b"Forty\n"))

    (made,) = world.carry(long((b"line 40\n", b"FORTY\n")), replay=replay)
    assert made.verdict is Verdict.CONTEXT
    assert made.replayed == (asked[0].key,)
    assert made.conflicts == ()
    assert made.changes[b"pkg/long.py"] == Entry(
        mode=0o100644, data=edit(LONG, (b"line 40\n", b"Forty\n"))
    )
    (made,) = world.carry(long((b"line 40\n", b"FORTY\n")), replay=lambda _: None)
    assert made.verdict is Verdict.CONFLICT


def test_series_must_apply_where_it_stands(world: World) -> None:
    world.patch("first", long((b"line 10\n", b"ten\n")))
    patches = series(world.repo, world.base, world.tip)
    with pytest.raises(ApplyError, match="first"):
        old_states([*patches, *patches], memory(world.repo, world.base))


def test_renames_by_content(world: World, store: Store, import_base: Callable[..., Commit]) -> None:
    old = import_base(store, world.repo, world.base)
    new = world.upstream(
        {
            "pkg/long.py": None, "pkg/sub/other.py": edit(LONG, (b"line 7\n", b"7\n")),
            "lib/long.py": edit(LONG, (b"line 8\n", b"8\n")),
            "a.py": None, "b.md": b"print(1)\n", "bin/run": None,
        }
    )  # fmt: skip
    renamed = renames_between(store.git, old.tree, import_base(store, world.repo, new).tree)
    assert renamed(b"pkg/long.py") == b"lib/long.py"
    assert renamed(b"a.py") is None  # nothing of that name or kind is new
    assert renamed(b"bin/run") is None
    assert renamed(b"docs/crlf.txt") is None


def test_renames_where_contents_are_missing(world: World, tmp_path: Path) -> None:
    """A partial clone can still tell what kept its content."""
    renamed: dict[str | bytes, File] = {
        "pkg/long.py": None, "lib/long.py": LONG,
        "pkg/short.py": None, "lib/short.py": b"one\ntwo\nthree\nfour\n",
    }  # fmt: skip
    new = world.upstream(renamed)
    world.repo.git("config", "uploadpack.allowFilter", "true")
    url, partial = world.repo.path.as_uri(), tmp_path / "partial.git"
    world.repo.git("clone", "--quiet", "--bare", "--filter=blob:none", url, str(partial))
    find = renames_between(Git(partial), world.base, new)
    assert find(b"pkg/long.py") == b"lib/long.py"
    assert find(b"pkg/short.py") is None


# --- against git --------------------------------------------------------------------------------

edits = st.lists(
    st.tuples(st.integers(0, 29), st.sampled_from(["change", "delete", "insert"])),
    min_size=1, max_size=4, unique_by=lambda pair: pair[0],
)  # fmt: skip


def edited(text: bytes, changes: list[tuple[int, str]], who: str) -> bytes:
    lines = text.splitlines(keepends=True)
    for at, how in sorted(changes, reverse=True):
        if at >= len(lines):
            continue
        new = f"{who} {at}\n".encode()
        lines[at : at + (how != "insert")] = [] if how == "delete" else [new]
    return b"".join(lines)


def test_carried_is_what_cherry_pick_makes(make_repo: Callable[[], Repo], git: Git) -> None:
    compared: list[bool] = []

    @SETTINGS
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        repo = make_repo()
        base = repo.commit({"file": numbered(1, 30)}, "Base\n")
        ours, commits = numbered(1, 30), []
        for number in range(data.draw(st.integers(1, 3))):
            ours = edited(ours, data.draw(edits), f"patch{number}")
            commits.append(repo.commit({"file": ours}, f"p{number}\n"))
        # upstream may have taken the first one, and goes on
        repo.reset(commits[0] if data.draw(st.booleans()) else base)
        theirs = edited((repo.path / "file").read_bytes(), data.draw(edits), "upstream")
        repo.git("reset", "--quiet", "--hard", base)
        new = repo.commit({"file": theirs}, "Upstream\n")

        made = carry(repo, git, base, commits[-1], new)
        assert all(one.verdict.carried == bool(one.changes) for one in made)
        repo.reset(new)
        how = ("--keep-redundant-commits", "-Xdiff-algorithm=myers")
        repo.git("cherry-pick", *how, *commits, ok=(0, 1))
        clean = not repo.git("ls-files", "--unmerged")
        if clean and all(one.ok for one in made):
            compared.append(any(not one.verdict.good for one in made))
            assert memory(repo, new).with_changes(made) == memory(repo).files

    compare()
    assert sum(compared) >= 5  # not only those that strict matching settles


@SETTINGS
@given(data=st.data())
def test_carrying_to_the_same_base_changes_nothing(
    make_repo: Callable[[], Repo], git: Git, data: st.DataObject
) -> None:
    repo = make_repo()
    text = numbered(1, 30)
    base = repo.commit({"one": text}, "Base\n")
    tip = base
    for number in range(data.draw(st.integers(1, 3))):
        text = edited(text, data.draw(edits), f"patch{number}")
        tip = repo.commit({"one": text}, f"p{number}\n")
    made = carry(repo, git, base, tip, base)
    assert {one.verdict for one in made} <= {Verdict.APPLIES}
    assert memory(repo, base).with_changes(made) == memory(repo, tip).files
    # and on its own result it is made a second time nowhere
    again = carry(repo, git, base, tip, tip)
    assert memory(repo, tip).with_changes(again) == memory(repo, tip).files


@settings(SETTINGS, phases=[Phase.generate])  # shrinking takes minutes
@given(data=st.data())
def test_nothing_is_made_twice(
    make_repo: Callable[[], Repo], git: Git, data: st.DataObject
) -> None:
    """Upstream has the series, or its start, and has moved lines of it and gone on."""
    repo = make_repo()
    text = numbered(1, 30)
    base = repo.commit({"file": text}, "Base\n")
    texts = [text]
    for number in range(data.draw(st.integers(1, 3))):
        texts.append(edited(texts[-1], data.draw(edits), f"patch{number}"))
        tip = repo.commit({"file": texts[-1]}, f"p{number}\n")
    lines = data.draw(st.sampled_from(texts[1:])).splitlines(keepends=True)
    start, length, to = (data.draw(st.integers(0, top)) for top in (25, 8, 25))
    block = lines[start : start + length]
    del lines[start : start + length]
    lines[to:to] = block
    theirs = edited(b"".join(lines), data.draw(edits), "upstream")
    repo.reset(base)
    new = repo.commit({"file": theirs}, "Upstream\n")
    made = carry(repo, git, base, tip, new)
    result = memory(repo, new).with_changes(made)[b"file"].data
    twice = [line for line in result.splitlines() if result.splitlines().count(line) > 1]
    assert [line for line in twice if line.startswith(b"patch")] == []


def test_new_tree_stays_as_it_is(world: World) -> None:
    world.patch("forty", long((b"line 40\n", b"forty\n")))
    patches = series(world.repo, world.base, world.tip)
    before, after = old_states(patches, memory(world.repo, world.base))
    new = memory(world.repo, world.upstream(long((b"line 42\n", b"42\n"))))
    was = dict(new.files)
    for _ in range(2):
        (made,) = carry_series(patches, before, after, new, git=world.git)
        assert made.verdict is Verdict.CONTEXT
    assert new.files == was
