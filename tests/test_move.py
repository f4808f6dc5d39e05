from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from overlay.cli import main
from overlay.lines.line import read_line
from overlay.moving.tombstones import read as tombstones
from overlay.patches.patch import parse_patch
from tests.support.moves import LATER_FILES, ONE, Work, add_series, files_of, make_later
from tests.support.tiny import TRAILERS, git

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]


@pytest.fixture
def later(tiny: Tiny, run: Run) -> Path:
    """The line ``later``; ``tiny`` has four patches and is locked."""
    add_series(tiny)
    assert run("lock", "tiny").code == 0
    return make_later(tiny)


def states(ran: Ran) -> dict[str, tuple[str, str]]:
    return {patch["patch"]: (patch["verdict"], patch["state"]) for patch in ran.json["patches"]}


def opened(tiny: Tiny, run: Run, patch: str = "first") -> Work:
    assert run("move", "--resolve", patch).code == 0
    return Work(path=tiny.root / "work" / f"tiny-{patch}")


def test_every_patch_is_tried_and_nothing_of_the_line_changes(
    tiny: Tiny, run: Run, later: Path
) -> None:
    git(tiny.root, "init", "-q")
    git(tiny.root, "add", "patches")
    git(tiny.root, "commit", "-q", "-m", "lines")
    before = files_of(tiny.patches)
    ran = run("move", "tiny", "vllm", "later", "--json")
    assert ran.code == 15
    assert ran.json["error"]["kind"] == "verdict"
    assert states(ran) == {
        "first": ("conflict", "waits"),
        "second": ("applies", "carried"),
        "third": ("merged", "dropped"),
        "fourth": ("offset", "carried"),
    }
    (conflict,) = ran.json["patches"][0]["conflicts"]
    assert (conflict["path"], conflict["kind"], conflict["lines"]) == (
        "vllm/one.py",
        "content",
        [6],
    )
    assert git(tiny.root, "status", "--porcelain", "--", "patches") == b""
    journal = tiny.folder / "move" / "journal.json"
    assert files_of(tiny.patches).keys() - before.keys() == {
        "tiny/move/journal.json",
        "tiny/move/.gitignore",
    }
    pinned = read_line(tiny.patches, "later").settings.vllm.repository
    assert str(tiny.root) not in journal.read_text().replace(pinned, "")  # no path of this machine
    assert run("verify", "tiny").code == 0
    assert run("lint", "tiny").code == 0
    # The same again goes on with the same
    assert states(run("move", "tiny", "vllm", "later", "--json")) == states(ran)
    assert states(run("move", "--status", "--json")) == states(ran)


def test_the_worktree_is_as_git_leaves_a_cherry_pick(tiny: Tiny, run: Run, later: Path) -> None:
    run("move", "tiny", "vllm", "later")
    ran = run("move", "tiny", "--resolve", "first", "--json")
    work = Work(path=tiny.root / "work" / "tiny-first")
    assert work.read("vllm/one.py").startswith(
        b"# new\n# newer\none = 0\none = 1\none = 2\n<<<<<<< upstream\none = 3  # three\n"
        b"||||||| base\none = 3\n=======\none = 33\n>>>>>>> patch\none = 4\n"
    )
    assert work.git("status", "--porcelain") == b"UU vllm/one.py\n"
    base, ours, theirs = (work.git("show", f":{stage}:vllm/one.py") for stage in (1, 2, 3))
    assert base == ONE
    assert ours.startswith(b"# new")
    assert theirs == ONE.replace(b"= 3\n", b"= 33\n")
    assert work.git("diff", "--name-only", "overlay-base", "HEAD") == b""
    shown = work.git("show", "--format=%an%n%B", "CHERRY_PICK_HEAD")
    assert shown.startswith(b"Ada\narea: first\n\nThe reason.\n")
    assert shown.endswith(b"-one = 3\n+one = 33\n one = 4\n one = 5\n one = 6\n")
    for text in ("The reason.", "vllm/one.py", "at line 6", "other patches on it: fourth"):
        assert text in ran.json["dossier"]
    assert (work.path / ".git/overlay-dossier.txt").read_text() == ran.json["dossier"]
    work.git("fsck", "--strict")


@pytest.mark.parametrize("way", ["staged", "committed"])
def test_a_resolution_ends_the_move(tiny: Tiny, run: Run, later: Path, way: str) -> None:
    heading = "# Stands on 1.2.3, for a reason.\n"
    tiny.edit("format = 1\n", f"{heading}format = 1\n")
    assert run("lock", "tiny").code == 0
    old = read_line(tiny.patches, "tiny")
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run)
    work.resolve()
    if way == "committed":
        work.commit()
    ran = run("move", "--continue", "--json")
    assert (ran.code, ran.json["state"]) == (0, "done")
    new = read_line(tiny.patches, "tiny")
    assert new.settings.vllm == read_line(tiny.patches, "later").settings.vllm
    assert [patch.name for patch in new.series["vllm"]] == ["first", "second", "fourth"]
    first, _, fourth = new.series["vllm"]
    assert (first.author, first.date, first.message) == (
        old.series["vllm"][0].author,
        old.series["vllm"][0].date,
        old.series["vllm"][0].message,
    )
    assert b"-one = 3  # three\n+one = 33  # three\n" in first.raw
    assert re.search(rb"\nindex [0-9a-f]{40}\.\.[0-9a-f]{40} 100644\n", first.raw)
    assert fourth.requires == ("second",)  # what upstream has isn't in the series
    assert {c["name"]: (c["way"], c["notes"]) for c in ran.json["changes"]} == {
        "first": ("content", []),
        "second": ("same", []),
        "third": ("dropped", []),
        "fourth": ("index-only", ["message"]),
    }
    (stone,) = tombstones(tiny.patches)
    assert (stone.patch, stone.why, stone.from_version, stone.at_version, stone.line) == (
        "third", "merged", "1.2.3", "1.3.0", "tiny",
    )  # fmt: skip
    assert (tiny.folder / "line.toml").read_text().startswith(heading)
    assert not (tiny.folder / "move").exists()
    assert run("verify", "tiny").code == 0
    assert run("lint", "tiny").code == 0
    # exported as they are, the files are the same
    assert run("checkout", "tiny", "vllm", str(tiny.root / "all")).code == 0
    ran = run("export", "tiny", "vllm", str(tiny.root / "all"), "--reformat", "--json")
    assert ran.json["kept"] == ["first", "second", "fourth"]


def test_what_no_move_can_decide_is_said(tiny: Tiny, run: Run, later: Path) -> None:
    tiny.edit("format = 1\n", "# Stands on 1.2.3.\nformat = 1\n")
    run("move", "tiny", "vllm", "later")
    ran = run("move", "--skip", "first", "--reason", "no need", "--json")
    look = "\n".join(ran.json["look"])
    assert "line.toml:1 speaks of 1.2.3: # Stands on 1.2.3." in look
    assert "torch is 2.13.0; vllm 1.3.0 asks ==2.14.0" in look
    assert "vllm 1.3.0 asks flashinfer-python==4.6.0; we give ==4.5.6rc7" in look
    settings = read_line(tiny.patches, "tiny").settings
    assert settings.torch == "2.13.0"
    requirement = settings.requirements["flashinfer-python"]
    assert (requirement.upstream, requirement.line) == ("==4.6.0", "==4.5.6rc7")


def test_to_a_new_line_leaves_the_old_one(tiny: Tiny, run: Run, later: Path) -> None:
    before = files_of(tiny.folder)
    run("move", "tiny", "vllm", "later", "--to", "copper")
    assert run("move", "--skip", "first", "--reason", "no need").code == 0
    assert files_of(tiny.folder) == before
    made = read_line(tiny.patches, "copper")
    assert [patch.name for patch in made.series["vllm"]] == ["second", "fourth"]
    assert made.series["flashinfer"] == read_line(tiny.patches, "tiny").series["flashinfer"]
    assert run("verify", "copper").code == 0
    stones = {stone.patch: (stone.why, stone.reason) for stone in tombstones(tiny.patches)}
    assert stones == {"first": ("skipped", "no need"), "third": ("merged", "")}


def test_a_patch_that_stands_on_a_skipped_one_waits(tiny: Tiny, run: Run, later: Path) -> None:
    run("move", "tiny", "vllm", "later")
    ran = run("move", "--skip", "second.patch", "--reason", "not ours", "--json")
    assert states(ran)["fourth"] == ("blocked", "waits")
    assert ran.json["patches"][3]["needs"] == ["second"]
    run("move", "--skip", "first", "--reason", "x")
    work = opened(tiny, run, "fourth")
    assert work.git("diff", "--cached", "--name-only") == b"vllm/one.py\n"  # a clean merge, staged
    ran = run("move", "--continue", "--json")
    assert ran.code == 0
    (fourth,) = read_line(tiny.patches, "tiny").series["vllm"]
    assert fourth.requires == ()


def test_a_patch_waits_for_those_it_stands_on(tiny: Tiny, run: Run, later: Path) -> None:
    tiny.add_patch(
        "vllm", "fifth", {"vllm/two.py": b"two = 222\n"}, trailers=f"Requires: first\n{TRAILERS}"
    )
    run("move", "tiny", "vllm", "later")
    ran = run("move", "--resolve", "fifth")
    assert ran.code == 17
    assert "fifth stands on first" in ran.err


@pytest.mark.parametrize("staged", [True, False])
def test_markers_are_named_by_file_and_line(
    tiny: Tiny, run: Run, later: Path, staged: bool
) -> None:
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run)
    if staged:
        work.git("add", "-A")
    ran = run("move", "--continue")
    assert ran.code == 17
    assert [f"vllm/one.py:{line}" for line in (6, 8, 12)] == re.findall(
        r"vllm/one.py:\d+", ran.err
    )[-3:]


def test_what_is_not_finished_is_refused(tiny: Tiny, run: Run, later: Path) -> None:
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run)
    path = work.path / "vllm/one.py"
    path.write_bytes(b"one = 3\n")
    assert "unmerged" in run("move", "--continue").err
    work.resolve(line=b"")
    path.write_bytes(b"loose\n")
    assert "not staged" in run("move", "--continue").err
    path.write_bytes(work.git("show", "HEAD:vllm/one.py"))
    work.git("add", "-A")
    ran = run("move", "--continue")
    assert (ran.code, "changes nothing" in ran.err, "--skip first" in ran.err) == (17, True, True)
    path.write_bytes(b"one\n")
    work.git("add", "-A")
    work.commit()
    work.user_git("commit", "-q", "--allow-empty", "-m", "more")
    assert "2 commits" in run("move", "--continue").err
    work.user_git("reset", "-q", "--soft", "HEAD~1")
    work.user_git("commit", "-q", "--amend", "-m", "area: other\n\nPatch-Name: other\n")
    assert "named other" in run("move", "--continue").err
    assert states(run("move", "--status", "--json"))["first"] == ("conflict", "waits")


def test_the_message_may_be_changed(tiny: Tiny, run: Run, later: Path) -> None:
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run)
    work.resolve()
    work.user_git("commit", "-q", "-m", f"area: one\n\nAnother reason.\n\n{TRAILERS}")
    ran = run("move", "--continue", "--json")
    assert ran.code == 0
    first = read_line(tiny.patches, "tiny").series["vllm"][0]
    assert (first.name, first.author, first.reason) == ("first", "Ada", "Another reason.")


def test_a_resolution_is_replayed_wherever_the_conflict_is_met(
    tiny: Tiny, run: Run, later: Path
) -> None:
    shutil.copytree(tiny.folder, tiny.patches / "other")
    run("move", "tiny", "vllm", "later")
    opened(tiny, run).resolve()
    assert run("move", "--continue").code == 0
    (recorded,) = (tiny.patches / "resolutions").iterdir()
    assert b"Patch: first\nLine: tiny\nMove: vllm 1.2.3 to 1.3.0\nPath: vllm/one.py\n" in (
        recorded.read_bytes()
    )
    assert run("lines").out.count("resolutions") == 0
    ran = run("move", "other", "vllm", "later", "--json")
    assert (ran.code, ran.json["state"]) == (0, "done")
    assert ran.json["patches"][0]["state"] == "replayed"
    assert ran.json["patches"][0]["replayed"] == [recorded.stem]
    assert any("first: resolved as recorded" in text for text in ran.json["look"])
    assert (tiny.patches / "other/vllm/first.patch").read_bytes() == (
        tiny.folder / "vllm/first.patch"
    ).read_bytes()


def test_a_resolution_that_reaches_beyond_its_conflicts_is_not_recorded(
    tiny: Tiny, run: Run, later: Path
) -> None:
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run)
    work.resolve()
    (work.path / "docs/guide.md").write_bytes(b"# More\n")
    work.git("add", "-A")
    ran = run("move", "--continue")
    assert "docs/guide.md" in ran.err
    assert not (tiny.patches / "resolutions").exists()


def test_others_go_on_with_what_was_saved(
    tiny: Tiny, run: Run, later: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.add_patch(
        "vllm",
        "fifth",
        {"docs/guide.md": b"# Our guide\n"},
        trailers=f"Requires: first\n{TRAILERS}",
    )
    git(tiny.root, "init", "-q")
    run("move", "tiny", "vllm", "later", "--to", "copper")
    run("move", "--skip", "second", "--reason", "not ours")
    run("move", "--skip", "fourth", "--reason", "not ours either")
    opened(tiny, run).resolve()
    git(tiny.root, "add", "patches")
    assert b"move" not in git(tiny.root, "ls-files")
    ran = run("move", "--save", "--json")
    assert ran.json["saved"]
    git(tiny.root, "add", "patches")
    git(tiny.root, "commit", "-q", "-m", "half-moved")
    monkeypatch.setenv("VLLM_OVERLAY_CACHE", str(tmp_path / "another"))
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(tiny.root), str(clone))

    def there(*arguments: str) -> int:
        return main(["--patches", str(clone / "patches"), *arguments])

    assert there("move", "--status") == 0
    assert there("move", "--resolve", "first") == 0
    Work(path=clone / "work/tiny-first").resolve()
    assert there("move", "--continue") == 0
    assert [p.name for p in read_line(clone / "patches", "copper").series["vllm"]] == [
        "first", "fifth",
    ]  # fmt: skip
    assert there("verify", "copper") == 0


def test_giving_up_leaves_the_line_and_keeps_what_was_recorded(
    tiny: Tiny, run: Run, later: Path
) -> None:
    before = files_of(tiny.folder)
    run("move", "tiny", "vllm", "later")
    run("move", "--skip", "second", "--reason", "x")
    work = opened(tiny, run)
    work.resolve()
    assert run("move", "--continue").code == 15
    journal = tiny.folder / "move/journal.json"
    journal.write_bytes(journal.read_bytes()[:-30])
    assert "damaged" in run("move", "--status").err
    assert run("move", "--abort").code == 0
    assert files_of(tiny.folder) == before
    assert len(files_of(tiny.patches / "resolutions")) == 1
    assert run("move", "tiny", "--abort").code == 17
    ran = run("move", "tiny", "vllm", "later", "--json")
    assert states(ran)["first"] == ("context", "replayed")


def test_a_decision_holds_only_for_the_patch_that_it_was_about(
    tiny: Tiny, run: Run, later: Path
) -> None:
    run("move", "tiny", "vllm", "later")
    run("move", "--skip", "fourth", "--reason", "x")
    path = tiny.folder / "vllm/fourth.patch"
    path.write_bytes(path.read_bytes().replace(b"The reason.", b"A reason."))
    ran = run("move", "--status", "--json")
    assert ran.json["stale"] == ["fourth"]
    assert states(ran)["fourth"] == ("offset", "carried")


def test_a_folder_of_another_move_is_not_taken(tiny: Tiny, run: Run, later: Path) -> None:
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run)
    work.resolve()
    run("move", "--abort")
    make_later(tiny, {"vllm/one.py": ONE.replace(b"= 3\n", b"= 3 + 0\n")}, name="third")
    run("move", "tiny", "vllm", "third")
    assert states(run("move", "--continue", "--json"))["first"] == ("conflict", "waits")
    ran = run("move", "--continue", "--in", str(work.path))
    assert (ran.code, "for another pin" in ran.err) == (17, True)


def test_a_resolution_that_was_changed_meanwhile_is_refused(
    tiny: Tiny, run: Run, later: Path
) -> None:
    run("move", "tiny", "vllm", "later")
    run("move", "--skip", "second", "--reason", "x")
    opened(tiny, run).resolve()
    run("move", "--continue")
    (resolved,) = (tiny.folder / "move").glob("first-*.patch")
    assert parse_patch(resolved.read_bytes(), name="first").author == "Ada"
    resolved.write_bytes(resolved.read_bytes().replace(b"33", b"34"))
    ran = run("move", "--status")
    assert (ran.code, "is not what was resolved" in ran.err) == (17, True)
    resolved.unlink()
    assert run("move", "--status").code == 17


def test_a_resolution_may_be_mended_and_taken_again(tiny: Tiny, run: Run, later: Path) -> None:
    run("move", "tiny", "vllm", "later")
    run("move", "--skip", "second", "--reason", "x")
    work = opened(tiny, run)
    work.resolve()
    assert "first: taken" in run("move", "--continue").err
    assert "first: taken" not in run("move", "--continue").err
    (work.path / "vllm/one.py").write_bytes(work.read("vllm/one.py").replace(b"= 33", b"= 34"))
    work.git("add", "-A")
    assert "first: taken" in run("move", "--continue").err
    assert len(list((tiny.folder / "move").glob("first-*.patch"))) == 1
    assert run("lint", "tiny", "--json").json["lines"]["tiny"]["faults"] == []
    run("move", "--skip", "fourth", "--reason", "x")
    assert b"+one = 34" in read_line(tiny.patches, "tiny").series["vllm"][0].raw


def resolve_the_fourth(tiny: Tiny, run: Run) -> None:
    """Begin a move, and settle its last patch alone, with a line of our own."""
    run("move", "tiny", "vllm", "later")
    work = opened(tiny, run, "fourth")
    path = work.path / "vllm/one.py"
    path.write_bytes(path.read_bytes().replace(b"= 300\n", b"= 3000\n"))
    work.git("add", "-A")
    assert run("move", "--continue").code == 15


def test_a_resolution_goes_along_when_those_before_it_change(
    tiny: Tiny, run: Run, later: Path
) -> None:
    resolve_the_fourth(tiny, run)
    work = opened(tiny, run)
    work.resolve()
    path = work.path / "vllm/one.py"
    path.write_bytes(path.read_bytes().replace(b"= 28\n", b"= 280\n"))  # context of the other
    work.git("add", "-A")
    ran = run("move", "--continue", "--json")
    assert (ran.code, ran.json["state"]) == (0, "done")
    assert states(ran)["fourth"] == ("context", "resolved")
    assert any("fourth: context" in text for text in ran.json["look"])
    assert b" one = 280\n one = 29\n-one = 30\n+one = 3000\n" in (
        read_line(tiny.patches, "tiny").series["vllm"][-1].raw
    )


def test_a_resolution_that_does_not_fit_any_more_waits_again(
    tiny: Tiny, run: Run, later: Path
) -> None:
    resolve_the_fourth(tiny, run)
    work = opened(tiny, run)
    work.resolve()
    path = work.path / "vllm/one.py"
    path.write_bytes(path.read_bytes().replace(b"= 30\n", b"= 31\n"))
    work.git("add", "-A")
    ran = run("move", "--continue", "--json")
    assert states(ran)["fourth"] == ("conflict", "waits")
    assert "fourth\tconflict\twaits\twas resolved" in run("move", "--status").out
    # Upon what was made of it, not upon what it was
    assert run("move", "--resolve", "fourth", "--in", str(tiny.root / "again")).code == 0
    work = Work(path=tiny.root / "again")
    assert b"|||||||" in work.read("vllm/one.py")
    assert b"=======\none = 3000\n>>>>>>> patch\n" in work.read("vllm/one.py")
    work.resolve(line=b"one = 3001\n")
    assert run("move", "--continue", "--in", str(work.path)).code == 0
    assert b"-one = 31\n+one = 3001\n" in read_line(tiny.patches, "tiny").series["vllm"][-1].raw


def test_files_without_texts_to_merge_wait_too(tiny: Tiny, run: Run) -> None:
    tiny.add_patch("vllm", "kernel", {"csrc/kernel.cu": b"// ours\n"})
    tiny.add_patch("vllm", "guide", {"docs/guide.md": None})
    files = {
        "vllm/one.py": ONE, "vllm/two.py": b"two = 2\n", "vllm/old.py": b"old = True\n",
        "docs/guide.md": b"# Another\n",
    }  # fmt: skip
    make_later(tiny, files)
    ran = run("move", "tiny", "vllm", "later", "--json")
    assert states(ran)["kernel"] == states(ran)["guide"] == ("conflict", "waits")
    work = opened(tiny, run, "kernel")
    assert work.git("status", "--porcelain") == b"DU csrc/kernel.cu\n"
    assert work.read("csrc/kernel.cu") == b"// ours\n"
    work.git("add", "-A")
    gone = opened(tiny, run, "guide")
    assert gone.git("status", "--porcelain") == b"UD docs/guide.md\n"
    gone.git("rm", "-q", "-f", "docs/guide.md")
    gone.commit()
    ran = run("move", "--continue", "--json")
    assert (ran.code, ran.json["state"]) == (0, "done")
    assert not (tiny.patches / "resolutions").exists()
    assert run("verify", "tiny").code == 0


def test_a_store_with_trees_alone_gets_the_contents_that_it_needs(
    tiny: Tiny, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.add_patch("vllm", "guide", {"docs/guide.md": b"# Guide\nours\n"})
    files = {**LATER_FILES, "docs/other/guide.md": b"# Guide\n"}
    del files["docs/guide.md"]
    make_later(tiny, files)
    for repo in (tiny.repos["vllm"], tiny.root / "vllm-later"):
        for key in ("allowFilter", "allowAnySHA1InWant"):
            git(repo, "config", f"uploadpack.{key}", "true")
    ran = run("move", "tiny", "vllm", "later", "--source", "git", "--json")
    assert states(ran)["first"] == ("conflict", "waits"), ran.out
    assert states(ran)["guide"] == ("moved", "carried")
    store = tmp_path / "cache" / "stores" / "vllm.git"
    missing = git(store, "rev-list", "--all", "--objects", "--missing=print").split(b"\n?")
    assert len(missing) > 3
    assert run("move", "--resolve", "first", "--source", "git").code == 0
    work = Work(path=tiny.root / "work" / "tiny-first")
    work.git("fsck", "--strict")
    work.resolve()
    assert run("move", "--continue", "--source", "git").code == 0
    assert run("verify", "tiny", "--source", "git").code == 0
    assert run("verify", "tiny").code == 0


def test_the_other_upstream_moves_by_itself(tiny: Tiny, run: Run, later: Path) -> None:
    """First vLLM, with the old FlashInfer; then FlashInfer. And back."""
    lines = {name: files_of(tiny.patches / name) for name in ("tiny", "later")}
    run("move", "tiny", "vllm", "later")
    run("move", "--skip", "first", "--reason", "x")
    half = read_line(tiny.patches, "tiny")
    assert half.settings.flashinfer.version == "4.5.6rc7"
    assert run("verify", "tiny").code == 0
    assert run("move", "later", "vllm", "1.2.3", "--to", "back", "--json").json["changes"] == []
    back = read_line(tiny.patches, "back").settings
    assert back.vllm.version == "1.2.3"
    assert files_of(tiny.patches / "later") == lines["later"]


def refusals() -> list[Any]:
    return [
        pytest.param(["move", "tiny", "vllm", "1.2.3"], 17, "stands on", id="there"),
        pytest.param(["move", "tiny", "vllm", "nowhere"], 3, "no version", id="unknown"),
        pytest.param(["move", "tiny", "vllm", "later", "--to", "tiny"], 3, "exists", id="taken"),
        pytest.param(["move", "tiny", "vllm", "later", "--to", "../x"], 3, "codename", id="name"),
        pytest.param(["move", "--status"], 17, "no move", id="none"),
        pytest.param(["move", "tiny", "--resolve", "first"], 17, "no move", id="none-of-tiny"),
        pytest.param(["move", "tiny", "vllm"], 2, "where to", id="no-target"),
        pytest.param(["move", "--status", "--save"], 2, "say one", id="two-actions"),
        pytest.param(["move", "--skip", "first"], 2, "--reason", id="no-reason"),
        pytest.param(
            ["move", "--skip", "first", "--reason", " "], 2, "--reason", id="empty-reason"
        ),
        pytest.param(["move", "--status", "--to", "x"], 2, "no meaning", id="to"),
        pytest.param(["move", "a", "vllm", "b", "--status"], 2, "give no b", id="target"),
    ]


@pytest.mark.parametrize(("arguments", "code", "text"), refusals())
def test_refusals(
    tiny: Tiny, run: Run, later: Path, arguments: list[str], code: int, text: str
) -> None:
    ran = run(*arguments)
    assert (ran.code, text in ran.err) == (code, True), ran.err
    assert not (tiny.folder / "move").exists()


def test_refusals_while_a_move_is_under_way(tiny: Tiny, run: Run, later: Path) -> None:
    make_later(tiny, name="third")
    assert run("move", "tiny", "vllm", "later").code == 15
    assert "already" in run("move", "tiny", "vllm", "later", "--to", "x").err
    assert "vllm that is being moved" in run("move", "tiny", "flashinfer", "--status").err
    assert run("move", "--resolve", "nothing").code == 17
    assert run("move", "--continue", "--in", str(tiny.root)).code == 17
    work = opened(tiny, run)
    assert run("move", "--resolve", "first").code == 11  # in use
    assert run("move", "--resolve", "first", "--in", str(tiny.root / "again")).code == 0
    ran = run("export", "tiny", "vllm", str(work.path))
    assert ran.code == 12
    shutil.copytree(tiny.folder, tiny.patches / "twin")
    assert "say which line" in run("move", "--status").err


def test_damaged_resolutions_are_named(tiny: Tiny, run: Run, later: Path) -> None:
    shutil.copytree(tiny.folder, tiny.patches / "other")
    run("move", "tiny", "vllm", "later")
    opened(tiny, run).resolve()
    run("move", "--continue")
    (recorded,) = (tiny.patches / "resolutions").iterdir()
    good = recorded.read_bytes()
    for bad in (b"nothing", good.replace(b"b/conflict", b"b/../x"), good[:-5]):
        recorded.write_bytes(bad)
        ran = run("move", "other", "vllm", "later")
        assert (ran.code, recorded.name in ran.err) == (17, True), ran.err
    # A text that fits nowhere, or leaves markers, is passed over
    recorded.write_bytes(good.replace(b" one = 4\n", b" one = 5\n"))
    assert states(run("move", "other", "vllm", "later", "--json"))["first"][1] == "waits"


@pytest.mark.parametrize("where", ["to", "name", "patch"])
def test_a_journal_from_elsewhere_reaches_no_other_place(
    tiny: Tiny, run: Run, later: Path, where: str
) -> None:
    run("move", "tiny", "vllm", "later")
    journal = tiny.folder / "move/journal.json"
    text = json.loads(journal.read_text())
    of = read_line(tiny.patches, "tiny").series["vllm"][1].sha256
    decision = {"of": of, "patch": "b" * 64, "skip": None, "recorded": []}
    if where == "to":
        text["to"] = "../../evil"
    elif where == "name":
        text["decisions"] = {"../../x": decision}
    else:
        text["decisions"] = {"second": {**decision, "patch": "/../../../x"}}
    journal.write_text(json.dumps(text))
    before = files_of(tiny.root)
    ran = run("move", "--skip", "first", "--reason", "x", "--json")
    if where == "name":  # of no patch of the series: nothing is read for it
        assert ran.json["state"] == "done"
    else:
        assert (ran.code, "damaged" in ran.json["error"]["what"]) == (17, True)
        assert files_of(tiny.root) == before
    assert not (tiny.root / "evil").exists()
    assert not (tiny.root.parent / "evil").exists()
