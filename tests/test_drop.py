from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from overlay.moving import tombstones
from overlay.moving.tombstones import FILE
from overlay.patches import series
from tests.support.tiny import TRAILERS, VLLM_FILES, git

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]

ONE = VLLM_FILES["vllm/one.py"]


def edit(text: bytes, at: int, new: bytes) -> bytes:
    assert b"one = %d\n" % at in text
    return text.replace(b"one = %d\n" % at, new)


@pytest.fixture
def longer(tiny: Tiny) -> Tiny:
    """Five vLLM patches: ``far`` meets what ``first`` did far away, ``near`` stands on it."""
    first = edit(ONE, 3, b"one = 33\n")
    far = edit(first, 30, b"far = 1\nfar = 2\n")
    tiny.add_patch("vllm", "far", {"vllm/one.py": far})
    near = far.replace(b"one = 33\n", b"one = 333\n")
    tiny.add_patch("vllm", "near", {"vllm/one.py": near})
    tiny.add_patch(
        "vllm", "says-so", {"vllm/two.py": b"two = 22\n"}, trailers=f"Requires: near\n{TRAILERS}"
    )
    return tiny


def snapshot(tiny: Tiny) -> dict[str, bytes]:
    return {
        str(path.relative_to(tiny.patches)): path.read_bytes()
        for path in sorted(tiny.patches.rglob("*"))
        if path.is_file()
    }


def tree(run: Run, upstream: str = "vllm") -> str:
    return str(run("apply", "tiny", "--json").json["upstreams"][upstream]["tree"])


def test_others_keep_their_bytes_and_a_locked_line_verifies(longer: Tiny, run: Run) -> None:
    assert run("lock", "tiny").code == 0
    before = snapshot(longer)
    ran = run("drop", "tiny", "second", "--reason", "done otherwise", "--json")
    assert ran.code == 0
    assert ran.json == {
        "verb": "drop",
        "line": "tiny",
        "locked": True,
        "series": [
            {
                "upstream": "vllm", "dropped": ["second"], "cascaded": {}, "rewritten": [],
                "kept": ["first", "far", "near", "says-so"],
            }
        ],
    }  # fmt: skip
    after = snapshot(longer)
    assert before.keys() - after.keys() == {"tiny/vllm/second.patch"}
    assert after.keys() - before.keys() == {FILE}
    changed = {name for name in before.keys() & after.keys() if before[name] != after[name]}
    assert changed == {"tiny/lock.toml", "tiny/vllm/series"}
    assert run("verify", "tiny").code == 0
    (stone,) = tombstones.read(longer.patches)
    assert (stone.patch, stone.line, stone.why, stone.reason) == (
        "second", "tiny", "dropped", "done otherwise",
    )  # fmt: skip
    assert (stone.from_version, stone.at_version) == ("1.2.3", "1.2.3")
    assert run("lint", "tiny").code == 0


@pytest.mark.parametrize("states_ids", [True, False])
def test_patches_that_met_other_ids_or_lines_are_written_anew_and_only_they(
    longer: Tiny, run: Run, states_ids: bool
) -> None:
    longer.add_patch("vllm", "below", {"vllm/one.py": b"one = -1\n" + longer_text(longer)})
    text = longer_text(longer)
    new = text.replace(b"one = 38\n", b"last\n")
    path = longer.add_patch("vllm", "last", {"vllm/one.py": new})
    if not states_ids:  # then the line numbers alone tell
        path.write_bytes(re.sub(rb"(?m)^index .*\n", b"", path.read_bytes()))
    before = snapshot(longer)
    ran = run("drop", "tiny", "below", "--json")
    assert ran.code == 0
    assert ran.json["series"][0]["rewritten"] == ["last"]
    after = snapshot(longer)
    name = "tiny/vllm/last.patch"
    assert {n for n in after if n in before and before[n] != after[n]} == {
        name, "tiny/vllm/series",
    }  # fmt: skip
    # Nothing in the message changed, and plain git takes the series to the same tree
    assert before[name].split(b"diff --git")[0] == after[name].split(b"diff --git")[0]
    repo = longer.repos["vllm"]
    git(repo, "checkout", "-q", "--detach", "v1.2.3")
    for patch in ("first", "second", "far", "near", "says-so", "last"):
        git(repo, "am", "-q", stdin=after[f"tiny/vllm/{patch}.patch"])
    assert git(repo, "rev-parse", "HEAD^{tree}").decode().strip() == tree(run)
    assert run("lint", "tiny").code == 0


def longer_text(tiny: Tiny) -> bytes:
    return (tiny.repos["vllm"] / "vllm/one.py").read_bytes()


def test_what_stands_on_it_is_named_and_nothing_changes(longer: Tiny, run: Run) -> None:
    assert run("lock", "tiny").code == 0
    before = snapshot(longer)
    ran = run("drop", "tiny", "first")
    assert ran.code == 18
    assert "near: vllm/one.py: the context at line" in ran.err
    assert "says-so: Requires: near" in ran.err
    assert "--cascade" in ran.err
    assert snapshot(longer) == before
    # Declared alone is enough
    assert "says-so: Requires: near" in run("drop", "tiny", "near").err
    assert snapshot(longer) == before


def test_cascade_takes_them_along_with_the_reason(longer: Tiny, run: Run) -> None:
    assert run("lock", "tiny").code == 0
    ran = run("drop", "tiny", "first", "--cascade", "--reason", "gone", "--json")
    assert ran.code == 0
    (done,) = ran.json["series"]
    assert done["dropped"] == ["first"]
    assert list(done["cascaded"]) == ["near", "says-so"]
    assert longer.series("vllm") == ["second.patch", "far.patch"]
    assert done["rewritten"] == ["far"]
    assert run("verify", "tiny").code == 0
    reasons = {stone.patch: stone.reason for stone in tombstones.read(longer.patches)}
    assert reasons["first"] == "gone"
    assert reasons["says-so"] == "went with first: gone"


def test_several_at_once_in_both_series_count_together(longer: Tiny, run: Run) -> None:
    ran = run("drop", "tiny", "near", "says-so.patch", "vllm/first", "flashinfer/check", "--json")
    assert ran.code == 0
    assert longer.series("vllm") == ["second.patch", "far.patch"]
    assert longer.series("flashinfer") == []
    assert run("lock", "tiny").code == 0


def test_a_line_that_was_not_locked_gets_no_lock(longer: Tiny, run: Run) -> None:
    ran = run("drop", "tiny", "second")
    assert ran.code == 0
    assert "lock tiny" in ran.err
    assert not (longer.folder / "lock.toml").exists()


def test_a_lock_that_disagreed_already_is_left_alone(longer: Tiny, run: Run) -> None:
    assert run("lock", "tiny").code == 0
    longer.add_patch("vllm", "later", {"vllm/later.py": b"later = 1\n"})
    before = (longer.folder / "lock.toml").read_bytes()
    ran = run("drop", "tiny", "second", "--json")
    assert (ran.code, ran.json["locked"]) == (0, False)
    assert (longer.folder / "lock.toml").read_bytes() == before


def test_a_run_that_is_repeated_says_so_and_changes_nothing(longer: Tiny, run: Run) -> None:
    assert run("drop", "tiny", "second").code == 0
    before = snapshot(longer)
    ran = run("drop", "tiny", "second")
    assert ran.code == 0
    assert "already" in ran.err
    assert snapshot(longer) == before


@pytest.mark.parametrize("killed_at", ["first", "second", "series"])
def test_a_run_killed_while_it_writes_can_be_repeated(
    longer: Tiny, run: Run, monkeypatch: pytest.MonkeyPatch, killed_at: str
) -> None:
    """The kill is an exit without any clean-up, in a child."""
    import os

    assert run("lock", "tiny").code == 0
    real = type(longer.folder).replace
    count = {"first": 1, "second": 2, "series": 2}[killed_at]

    def dies(self: object, target: object) -> object:
        nonlocal count
        count -= 1
        if count == 0:
            os._exit(9)
        return real(self, target)  # type: ignore[arg-type]

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(type(longer.folder), "replace", dies)
        run("drop", "tiny", "first", "--cascade")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [stone.patch for stone in tombstones.read(longer.patches)]
    assert run("drop", "tiny", "first", "--cascade").code == 0
    assert longer.series("vllm") == ["second.patch", "far.patch"]
    assert len(tombstones.read(longer.patches)) == 3
    assert run("lock", "tiny").code == 0
    assert run("lint", "tiny").code == 0


def test_what_cannot_be_written_leaves_all_as_it_was(
    longer: Tiny, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(longer)

    def full(*_: object, **__: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("overlay.patches.drop.publish", full)
    ran = run("drop", "tiny", "first", "--cascade")
    assert ran.code == 11
    assert snapshot(longer) == before
    assert series.publish is not full


@pytest.mark.parametrize(
    ("patch", "code"), [("firs", 3), ("tiny/first", 3), ("../first", 3), ("", 3)]
)
def test_no_such_patch(longer: Tiny, run: Run, patch: str, code: int) -> None:
    before = snapshot(longer)
    assert run("drop", "tiny", "first", patch).code == code
    assert snapshot(longer) == before


def test_a_series_that_does_not_apply_is_refused_first(longer: Tiny, run: Run) -> None:
    longer.edit("-one = 3\n", "-one = 3 \n", "vllm/first.patch")
    before = snapshot(longer)
    assert run("drop", "tiny", "second").code == 7
    assert snapshot(longer) == before


def test_stale_ids_elsewhere_are_no_reason_to_write_a_patch_anew(longer: Tiny, run: Run) -> None:
    path = longer.folder / "flashinfer" / "check.patch"
    longer.add_patch("flashinfer", "other", {"include/a.h": b"#pragma twice\n"})
    raw = path.read_bytes()
    at = raw.index(b"index ") + 6
    path.write_bytes(raw[:at] + b"0123456789" + raw[at + 10 :])
    stale = path.read_bytes()
    ran = run("drop", "tiny", "other", "--json")
    assert ran.code == 0
    assert ran.json["series"][0]["rewritten"] == []
    assert path.read_bytes() == stale


# --- lint asks the tombstones ----------------------------------------------------------------


def test_lint_notes_a_patch_that_upstream_has(longer: Tiny, run: Run) -> None:
    fields = {"patch": "first", "upstream": "vllm", "line": "old", "sha256": "0" * 64}
    stone = tombstones.Tombstone(
        **fields, from_version="1.0", at_version="1.2", why="merged", pull="vllm-project/vllm#7"
    )
    tombstones.add(longer.patches, stone)
    ran = run("lint", "tiny", "--json")
    assert ran.code == 0
    (fault,) = [f for f in ran.json["lines"]["tiny"]["faults"] if f["code"] == "merged-elsewhere"]
    assert (fault["severity"], fault["file"]) == ("hint", "tiny/vllm/first.patch")
    assert "vllm 1.2" in fault["what"]
    assert "vllm-project/vllm#7" in fault["what"]


def test_lint_names_a_tombstone_file_that_cannot_be_read(longer: Tiny, run: Run) -> None:
    (longer.patches / FILE).write_text("[[dropped]]\npatch = 1\n")
    ran = run("lint", "tiny", "--json")
    assert ran.code == 10
    assert [f["code"] for f in ran.json["lines"]["tiny"]["faults"]] == ["dropped-file"]
