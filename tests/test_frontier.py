import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from overlay.cli import main
from overlay.errors import LineError
from overlay.lines.line import UPSTREAMS
from overlay.moving.frontier import choose_versions
from overlay.sources import index, pipconfig
from overlay.sources.pipconfig import PipConfig
from overlay.sources.releases import known_pins
from overlay.trees.store import cache_folder
from overlay.verbs.frontier import _blocks
from tests.support import releases
from tests.support.releases import ONE, add_flashinfer, add_release, commit, files_at, make_history
from tests.support.tiny import Tiny, git

_ONE_BY_ONE = [(1, 2), (2, 3), (3, 4)]
LISTED = ("0.9", "1.0rc1", "1.0", "1.0.post1", "1.1rc1", "1.1", "1.2.dev3", "2.0rc1")
Run = Callable[..., Any]

MORE = b"zero = 0\n" + ONE
MERGED = ONE.replace(b"= 3\n", b"= 33\n")
OTHER = ONE.replace(b"= 3\n", b"= 34\n")
AROUND = ONE.replace(b"= 1\n", b"= 11\n").replace(b"= 6\n", b"= 66\n")


@pytest.fixture(autouse=True)
def pip_answers_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would for the index of ``tiny``; that it is asked rightly is shown in test_index."""
    if request.node.get_closest_marker("real") is None:
        for module in (pipconfig, index):  # imported by now, or the fake would stay in one
            monkeypatch.setattr(module, "read_pip_config", _pip_config)


def _pip_config() -> PipConfig:
    return PipConfig(find_links=(os.environ["PIP_FIND_LINKS"],), no_index=True)


# --- which versions ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pin", "bounds", "pre", "expected"),
    [
        ("1.0", ("", ""), False, "1.0 1.0.post1 1.1"),
        ("1.0", ("", ""), True, "1.0 1.0.post1 1.1rc1 1.1"),
        ("1.0rc1", ("", ""), False, "1.0rc1 1.0 1.0.post1 1.1"),
        ("1.0", ("0.9", "1.0"), False, "0.9 1.0"),
        ("1.0", ("0.9", "1.1rc1"), False, "0.9 1.0 1.0.post1 1.1rc1"),
        ("1.0", ("", "2.0rc1"), False, "1.0 1.0.post1 1.1 2.0rc1"),
        ("1.0", ("1.1", ""), False, "1.1"),
        ("1.0", ("0.1", "0.9.5"), False, "0.9"),
        ("1.0rc1", ("0.9", "1.1"), False, "0.9 1.0rc1 1.0 1.0.post1 1.1"),  # the pin shows
        ("3.0", ("", ""), False, "3.0"),  # newer than all that is listed
        ("1.0.0", ("", "1.0"), False, "1.0.0"),
    ],
)
def test_a_range(pin: str, bounds: tuple[str, str], pre: bool, expected: str) -> None:
    assert choose_versions(pin, LISTED, bounds=bounds, pre=pre) == tuple(expected.split())


def test_named_versions_come_in_order_and_once() -> None:
    named = ["1.1", "v1.0", "1.0.0", "1.0rc1"]
    assert choose_versions("1.0", LISTED, named=named) == ("1.0rc1", "1.0", "1.1")


@pytest.mark.parametrize(
    ("named", "bounds"),
    [
        (["1.0", "7.7"], ("", "")),
        (["latest"], ("", "")),
        ([], ("1.1", "1.0")),
        ([], ("x", "")),
        ([], ("1.0.1", "1.0.2")),
    ],
)
def test_no_such_version(named: list[str], bounds: tuple[str, str]) -> None:
    with pytest.raises(LineError):
        choose_versions("1.0", LISTED, named=named, bounds=bounds)


# --- verdicts ------------------------------------------------------------------------------


def vllm(run: Run, *options: str) -> dict[str, Any]:
    ran = run("frontier", "tiny", "--upstream", "vllm", "--json", *options)
    assert ran.code == 0, ran.err
    return dict(ran.json["upstreams"]["vllm"])


def grid(found: dict[str, Any]) -> dict[str, str]:
    """Version to the verdicts on it, in the series' order; or why there are none."""
    return {
        column["version"]: column.get("reason")
        or " ".join(cell["verdict"] for cell in column["cells"])
        for column in found["versions"]
    }


def test_each_patch_on_each_version(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.2.2", {"vllm/one.py": OTHER})  # older than the pin
    add_release(tiny, "1.2.4")
    add_release(tiny, "1.3.0", {"vllm/one.py": MORE})
    add_release(tiny, "1.4.0", {"vllm/one.py": AROUND, "vllm/old.py": None})
    add_release(tiny, "1.4.1", {"vllm/one.py": MERGED})
    add_release(tiny, "1.5.0", {"vllm/one.py": OTHER, "vllm/old.py": b"old = False\n"})
    add_release(tiny, "1.6.0rc1")
    found = vllm(run, "--range", "1.2.2..")
    assert grid(found) == {
        "1.2.2": "conflict applies",
        "1.2.3": "applies applies",
        "1.2.4": "applies applies",
        "1.3.0": "context applies",  # its hunk begins the file
        "1.4.0": "context partly-merged",
        "1.4.1": "merged applies",
        "1.5.0": "conflict conflict",
    }
    assert (found["pin"], found["reaches"]) == ("1.2.3", "1.4.1")
    first, second = found["patches"]
    assert (first["breaks"]["version"], first["breaks"]["after"]) == ("1.5.0", "1.4.1")
    assert first["breaks"]["why"] == "upstream has it since 1.4.1: drop it"
    assert "vllm/old.py" in second["breaks"]["why"]
    assert [column["reaches"] for column in found["versions"]] == [False] + 5 * [True] + [False]


def test_patches_are_carried_one_on_the_other(run: Run, tiny: Tiny) -> None:
    """A cell is a patch on a version with those before it, not alone."""
    tiny.add_patch("vllm", "third", {"vllm/one.py": MERGED.replace(b"= 33\n", b"= 333\n")})
    add_release(tiny, "1.3.0", {"vllm/one.py": MORE})
    add_release(tiny, "1.4.0", {"vllm/one.py": MERGED})
    add_release(tiny, "1.5.0", {"vllm/one.py": OTHER})
    found = vllm(run)
    assert grid(found) == {
        "1.2.3": "applies applies applies",
        "1.3.0": "context applies context",
        "1.4.0": "merged applies applies",
        "1.5.0": "conflict applies blocked",
    }
    assert found["patches"][2]["breaks"]["why"] == "needs first"


def test_a_version_that_cannot_be_had_is_a_column(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0", lacks="sdist")
    add_release(tiny, "1.4.0", lacks="wheel")
    add_release(tiny, "1.5.0", {"../escape": b""})
    add_release(tiny, "1.6.0", commit="unknown")
    add_release(tiny, "1.7.0")
    (tiny.index / "vllm-1.8.0.tar.gz").write_bytes(b"no archive")
    (tiny.index / releases.WHEEL.format("1.8.0")).write_bytes(b"wheel")
    found = vllm(run)
    told = grid(found)
    assert told["1.2.3"] == told["1.7.0"] == "applies applies"
    assert told["1.3.0"] == "vllm 1.3.0 has no sdist"
    assert told["1.4.0"] == "vllm 1.4.0 has no wheel for x86-64"
    assert "'..'" in told["1.5.0"]
    assert "does not state its commit" in told["1.6.0"]
    assert "not a gzip file" in told["1.8.0"]
    assert found["reaches"] == "1.7.0"


def test_if_no_version_can_be_had_it_is_an_error(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0", lacks="sdist")
    ran = run("frontier", "tiny", "--upstream", "vllm", "--versions", "1.3.0")
    assert (ran.code, ran.out) == (6, "")
    assert "has no sdist" in ran.err


def test_a_series_that_does_not_apply_has_no_frontier(run: Run, tiny: Tiny) -> None:
    series = tiny.folder / "vllm" / "series"
    first = tiny.folder / "vllm" / "first.patch"
    first.write_bytes(first.read_bytes().replace(b"-one = 3\n", b"-one = 5\n"))
    assert "first.patch" in series.read_text()
    ran = run("frontier", "tiny", "--upstream", "vllm")
    assert ran.code == 7
    assert "first" in ran.err


def test_both_series_unless_one_is_asked_for(run: Run, tiny: Tiny) -> None:
    add_flashinfer(tiny, "4.5.7", {"csrc/prefill.cu": b"// other\n"})
    ran = run("frontier", "tiny", "--json")
    assert list(ran.json["upstreams"]) == ["vllm", "flashinfer"]
    assert grid(ran.json["upstreams"]["flashinfer"]) == {
        "4.5.6rc7": "applies",
        "4.5.7": "conflict",
    }
    (tiny.folder / "flashinfer" / "series").unlink()
    assert list(run("frontier", "tiny", "--json").json["upstreams"]) == ["vllm"]


def test_asking_again_imports_nothing(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0", {"vllm/one.py": MORE})
    first = vllm(run)
    for path in tiny.index.iterdir():
        path.unlink()
    ran = run("frontier", "tiny", "--upstream", "vllm", "--json", "--offline")
    assert ran.json["upstreams"]["vllm"] == first
    assert "importing" not in ran.err


def kept() -> list[Path]:
    return sorted((cache_folder() / "frontier").glob("*.json"))


def poison() -> None:
    """Make every kept cell say what cannot be."""
    for path in kept():
        path.write_bytes(path.read_bytes().replace(b'"applies"', b'"moved"'))


def test_cells_are_kept(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER})
    first = vllm(run)
    assert len(kept()) == 2
    assert vllm(run) == first
    poison()
    assert grid(vllm(run)) == {"1.2.3": "moved moved", "1.3.0": "conflict moved"}


def _reword(tiny: Tiny) -> None:
    path = tiny.folder / "vllm" / "second.patch"
    path.write_bytes(path.read_bytes().replace(b"The reason.", b"Another reason."))


def _reorder(tiny: Tiny) -> None:
    (tiny.folder / "vllm" / "series").write_text("second.patch\nfirst.patch\n")


def _repin(tiny: Tiny) -> None:
    tiny.edit('version = "4.5.6rc7"', 'version = "4.5.6rc8"')
    tiny.edit('line = "==4.5.6rc7"', 'line = "==4.5.6rc8"')


def _resolve(tiny: Tiny) -> None:
    (tiny.patches / "resolutions").mkdir()
    (tiny.patches / "resolutions" / f"{'a' * 64}.diff").write_bytes(b"--- a\n")


def _bury(tiny: Tiny) -> None:
    (tiny.patches / "dropped.toml").write_text("dropped = []\n")


def _postcondition(tiny: Tiny) -> None:
    (tiny.root / "tests" / "static").mkdir(parents=True)
    (tiny.root / "tests" / "static" / "of_something.py").write_text("")


def _damage(tiny: Tiny) -> None:
    for path in kept():
        path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    "change", [_reword, _reorder, _repin, _resolve, _bury, _postcondition, _damage]
)
def test_cells_are_kept_for_what_they_came_of_only(
    run: Run, tiny: Tiny, change: Callable[[Tiny], None]
) -> None:
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER})
    vllm(run)
    poison()
    change(tiny)
    assert "moved" not in " ".join(grid(vllm(run)).values())


def test_cells_of_a_named_source_are_not_kept(run: Run, tiny: Tiny) -> None:
    vllm(run, "--source", "archive")
    assert kept() == []


def test_nothing_of_the_line_changes(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER})
    before = {path: path.read_bytes() for path in tiny.root.rglob("patches/**/*.*")}
    vllm(run)
    assert {path: path.read_bytes() for path in tiny.root.rglob("patches/**/*.*")} == before


# --- history -------------------------------------------------------------------------------


def test_history_names_the_commit_that_breaks_a_patch(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    clone = make_history(tiny, tmp_path / "clone")
    commit(clone, "Add a line (#1)", {"vllm/one.py": MORE})
    commit(clone, "Something else (#2)", {"docs/guide.md": b"# Other\n"})
    culprit = commit(clone, "Change three (#3)", {"vllm/one.py": b"zero = 0\n" + OTHER})
    commit(clone, "Change the end (#4)", {"vllm/one.py": b"zero = 0\n" + OTHER + b"end\n"})
    head = commit(clone, "Drop old (#5)", {"vllm/old.py": b"older = True\n"})
    add_release(tiny, "1.3.0", files_at(clone), commit=head[:9])
    found = vllm(run, "--history", f"vllm={clone}")
    first, second = found["patches"]
    assert first["breaks"]["commit"] == f"{culprit[:10]} Change three (#3)"
    assert second["breaks"]["commit"] == f"{head[:10]} Drop old (#5)"
    # and without it, versions are all there is
    assert [p["breaks"]["commit"] for p in vllm(run)["patches"]] == [None, None]


def test_history_follows_a_file_that_was_renamed(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    clone = make_history(tiny, tmp_path / "clone")
    commit(clone, "Rename (#1)", {"vllm/one.py": None, "vllm/sub/one.py": ONE})
    between = commit(clone, "Go on (#2)", {"vllm/sub/one.py": MORE})
    add_release(tiny, "1.3.0", files_at(clone), commit=between[:9])
    culprit = commit(clone, "Change three (#3)", {"vllm/sub/one.py": b"zero = 0\n" + OTHER})
    add_release(tiny, "1.4.0", files_at(clone), commit=culprit[:9])
    found = vllm(run, "--history", f"vllm={clone}")
    assert grid(found)["1.3.0"] == "moved applies"
    assert found["patches"][0]["breaks"]["version"] == "1.4.0"
    assert found["patches"][0]["breaks"]["commit"] == f"{culprit[:10]} Change three (#3)"


def test_no_commit_is_named_that_was_not_seen_to_break(
    run: Run, tiny: Tiny, tmp_path: Path
) -> None:
    """The release is a branch: what it changed is in no commit of the clone."""
    clone = make_history(tiny, tmp_path / "clone")
    head = commit(clone, "Harmless (#1)", {"vllm/one.py": MORE})
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER}, commit=head[:9])
    ran = run("frontier", "tiny", "--upstream", "vllm", "--json", "--history", f"vllm={clone}")
    first, _ = ran.json["upstreams"]["vllm"]["patches"]
    assert first["breaks"]["commit"] is None
    assert "no single commit" in ran.err


def test_a_clone_that_lacks_a_version_says_so(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    clone = make_history(tiny, tmp_path / "clone")
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER}, commit="fedcba987")
    ran = run("frontier", "tiny", "--upstream", "vllm", "--json", "--history", f"vllm={clone}")
    assert ran.code == 0
    assert grid(ran.json["upstreams"]["vllm"])["1.3.0"] == "conflict applies"
    assert "fedcba987" in ran.err
    before = git(clone, "status", "--porcelain")
    assert before == b""  # it was only read


def test_a_folder_that_is_no_clone_is_refused(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    add_release(tiny, "1.3.0")
    ran = run("frontier", "tiny", "--upstream", "vllm", "--history", f"vllm={tmp_path / 'nothing'}")
    assert ran.code == 6
    assert "no git repository" in ran.err


# --- the lines -----------------------------------------------------------------------------


@pytest.mark.real
@pytest.mark.parametrize("line", ["eldritch", "infernal", "next"])
def test_the_page_says_what_is_so(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every column of docs/frontier.md that some line stands on, so that it is at hand."""
    root = Path(__file__).parents[1]
    page = (root / "docs" / "frontier.md").read_text()
    for upstream in UPSTREAMS:
        pins = [pin.version for pin in known_pins(root / "patches", upstream)]
        named = ("--upstream", upstream, "--versions", ",".join(pins))
        code = main(["--patches", str(root / "patches"), "frontier", line, *named, "--json"])
        out, err = capfd.readouterr()
        assert code == 0, err
        found = json.loads(out)["upstreams"][upstream]
        _, _, rest = page.partition(f"<!-- {line}-{upstream} -->")
        table = rest[rest.index("| patch") :].partition("\n\n")[0].splitlines()
        heads, _, *rows = [row.strip("| ").split(" | ") for row in table]
        heads = [head.strip("*") for head in heads]
        told = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
        seen = 0
        for column in found["versions"]:
            for cell in column["cells"]:
                if column["version"] in heads:
                    seen += 1
                    assert told[cell["patch"]][column["version"]] == cell["verdict"]
        assert seen >= 2 * len(found["patches"])


# --- the command ---------------------------------------------------------------------------


def test_plain_lines_say_what_they_are_about(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER})
    add_release(tiny, "1.4.0", lacks="sdist")
    ran = run("frontier", "tiny", "--upstream", "vllm")
    assert ran.out.splitlines() == [
        "vllm\tfirst\t1.2.3\tapplies",
        "vllm\tfirst\t1.3.0\tconflict",
        "vllm\tfirst\t1.4.0\tno source",
        "vllm\tsecond\t1.2.3\tapplies",
        "vllm\tsecond\t1.3.0\tapplies",
        "vllm\tsecond\t1.4.0\tno source",
    ]
    assert "1.4.0: vllm 1.4.0 has no sdist" in ran.err
    assert "On 1.3.0 1 of 2 patches needs a person." in ran.err


@pytest.mark.parametrize(
    ("width", "blocks"), [(100, [(1, 4)]), (25, [(1, 4)]), (24, [(1, 3), (3, 4)]), (9, _ONE_BY_ONE)]
)
def test_a_grid_wider_than_the_terminal_is_cut(width: int, blocks: list[tuple[int, int]]) -> None:
    rows = [("patch", "1", "2", "3"), ("p", "bad", "b", "bad")]
    assert list(_blocks(rows, width)) == blocks


def test_files_are_written(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    add_release(tiny, "1.3.0", {"vllm/one.py": OTHER})
    svg, text = tmp_path / "f.svg", tmp_path / "f.md"
    ran = run(
        "frontier", "tiny", "--upstream", "vllm", "--out", str(svg), "--out", str(text), "--json"
    )
    assert json.loads(ran.out)["verb"] == "frontier"
    assert svg.read_bytes().startswith(b"<svg ")
    lines = text.read_text().splitlines()
    assert "| patch | **1.2.3** | 1.3.0 |" in lines
    assert "| first | applies | conflict |" in lines
    assert "| *need a person* | 0 | 1 |" in lines
    assert lines[-1].startswith("| first | 1.3.0 | conflict | vllm/one.py")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--versions", "1.3.0"], "--upstream"),
        (["--range", "1.."], "--upstream"),
        (["--upstream", "vllm", "--range", "1.0-2.0"], "A..B"),
        (["--upstream", "vllm", "--versions", ","], "names none"),
        (["--upstream", "vllm", "--versions", "1.2.3", "--pre"], "names all"),
        (["--out", "f.svg"], "say --upstream"),
        (["--upstream", "vllm", "--out", "f.gif"], "f.gif"),
        (["--upstream", "vllm", "--out", "no/such/f.svg"], "no folder"),
        (["--history", "elsewhere"], "--history elsewhere"),
        (["--history", "torch=x"], "--history torch=x"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(run: Run, options: list[str], says: str) -> None:
    ran = run("frontier", "tiny", *options)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err


def test_an_unknown_version_is_refused(run: Run, tiny: Tiny) -> None:
    add_release(tiny, "1.3.0")
    ran = run("frontier", "tiny", "--upstream", "vllm", "--versions", "1.3.0,9.9")
    assert ran.code == 3
    assert "9.9" in ran.err
