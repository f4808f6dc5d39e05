from __future__ import annotations

import multiprocessing
from typing import TYPE_CHECKING

import pytest

from overlay.errors import LineError
from overlay.moving import tombstones
from overlay.moving.tombstones import Tombstone
from overlay.patches.patch import parse_patch

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.patches.patch import Patch
    from tests.conftest import Repo


def stone(patch: str = "first", *, at: str = "2.0", why: str = "merged", **other: str) -> Tombstone:
    fields = {"sha256": "ab" * 32, "line": "demo", "upstream": "vllm", "from_version": "1.0"}
    return Tombstone(**{**fields, **other, "patch": patch, "at_version": at, "why": why})  # type: ignore[arg-type]


@pytest.fixture
def patch(upstream: Repo) -> Patch:
    upstream.commit({"a.py": b"print(2)\n"}, "area: print two\n")
    return parse_patch(upstream.patch(), name="first")


def test_what_is_added_is_read_and_stays_as_it_was_written(tmp_path: Path) -> None:
    assert tombstones.read(tmp_path) == ()
    one = stone(
        reason='upstream\'s own, "reworded"\nsince', pull="vllm-project/vllm#1", date="2026-11-30"
    )
    tombstones.add(tmp_path, one)
    first = (tmp_path / tombstones.FILE).read_bytes()
    two, three = stone("second", why="dropped"), stone("third", why="skipped")
    tombstones.add(tmp_path, two, three)
    assert (tmp_path / tombstones.FILE).read_bytes().startswith(first)
    assert tombstones.read(tmp_path) == (one, two, three)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [tombstones.FILE]


def test_an_interrupted_run_that_is_repeated_adds_nothing_twice(tmp_path: Path) -> None:
    tombstones.add(tmp_path, stone(), stone())
    before = (tmp_path / tombstones.FILE).read_bytes()
    tombstones.add(tmp_path, stone())
    assert (tmp_path / tombstones.FILE).read_bytes() == before
    assert tombstones.read(tmp_path) == (stone(),)


def test_a_comment_by_hand_and_a_missing_line_end_survive(tmp_path: Path) -> None:
    tombstones.add(tmp_path, stone())
    path = tmp_path / tombstones.FILE
    path.write_bytes(path.read_bytes() + b"# by hand")
    tombstones.add(tmp_path, stone("second"))
    assert b"# by hand\n" in path.read_bytes()
    assert [each.patch for each in tombstones.read(tmp_path)] == ["first", "second"]


@pytest.mark.parametrize(
    "text",
    [
        b"[[dropped]\n",
        b"\xff\n",
        b'[[dropped]]\npatch = "x"\n',
        b"<<<<<<< HEAD\n",
        b"other = 1\n",
    ],
)
def test_a_file_that_cannot_be_read_is_refused_and_kept(tmp_path: Path, text: bytes) -> None:
    (tmp_path / tombstones.FILE).write_bytes(text)
    with pytest.raises(LineError, match=tombstones.FILE):
        tombstones.add(tmp_path, stone())
    assert (tmp_path / tombstones.FILE).read_bytes() == text


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": "soon"},
        {"from_version": ""},
        {"sha256": "ab"},
        {"date": "30 Nov"},
        {"line": "De Mo"},
        {"patch": "../x"},
    ],
)
def test_values_that_say_nothing_are_refused(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        stone(**wrong)
    # and in a file as well, naming it
    tombstones.add(tmp_path, stone())
    path = tmp_path / tombstones.FILE
    old = {
        "at": "2.0",
        "from_version": "1.0",
        "sha256": "ab" * 32,
        "line": "demo",
        "patch": "first",
    }
    for key, value in wrong.items():
        if key == "date":
            path.write_text(path.read_text() + f'date = "{value}"\n')
        else:
            path.write_text(path.read_text().replace(f'"{old[key]}"', f'"{value}"'))
    with pytest.raises(LineError, match=tombstones.FILE):
        tombstones.read(tmp_path)


def test_only_what_upstream_has_by_this_version_is_merged(patch: Patch) -> None:
    def ask(version: str, *stones: Tombstone) -> str | None:
        found = tombstones.merged(stones, patch, "vllm", version)
        return found.at_version if found else None

    assert ask("2.0", stone(at="2.0")) == "2.0"
    assert ask("10.0", stone(at="9.0")) == "9.0"  # as numbers, not as text
    assert ask("2.0rc1", stone(at="2.0")) is None
    assert ask("1.9", stone(at="2.0")) is None
    assert ask("2.0", stone(why="dropped"), stone(why="skipped")) is None
    assert ask("2.0", stone(upstream="flashinfer")) is None
    assert ask("3.0", stone(at="2.5"), stone(at="2.0"), stone(at="2.1")) == "2.0"
    assert ask("3.0", stone("another")) is None
    assert ask("3.0", stone("another", sha256=patch.sha256)) == "2.0"


def test_what_is_taken_back_leaves_the_rest_as_it_was(tmp_path: Path) -> None:
    tombstones.add(tmp_path, stone("first"))
    before = (tmp_path / tombstones.FILE).read_bytes()
    tombstones.add(tmp_path, stone("second"), stone("third"))
    tombstones.take_back(tmp_path, stone("second"), stone("third"), stone("never"))
    assert (tmp_path / tombstones.FILE).read_bytes() == before
    tombstones.take_back(tmp_path, stone("first"))
    assert not (tmp_path / tombstones.FILE).exists()
    tombstones.take_back(tmp_path, stone("first"))


def _add(root: Path, number: int) -> None:
    tombstones.add(root, stone(f"patch-{number}"))


def test_several_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=_add, args=(tmp_path, number)) for number in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    names = {each.patch for each in tombstones.read(tmp_path)}
    assert names == {f"patch-{number}" for number in range(4)}
