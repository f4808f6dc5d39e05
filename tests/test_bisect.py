from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.patches.bisect import End, Result, search
from tests.support.tiny import VLLM_FILES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]

GOOD, BAD, SKIPPED = Result.GOOD, Result.BAD, Result.SKIPPED


def judged(results: list[Result], low: int = 0) -> tuple[End, list[int], list[int]]:
    asked: list[int] = []

    def judge(at: int) -> Result:
        asked.append(at)
        return results[at]

    end, suspects = search(low, len(results) - 1, judge)
    return end, list(suspects), asked


@given(first=st.integers(1, 40), rest=st.integers(0, 40))
def test_the_first_bad_one_is_found_in_few_steps(first: int, rest: int) -> None:
    end, suspects, asked = judged([GOOD] * first + [BAD] * (rest + 1))
    assert (end, suspects) == (End.FOUND, [first])
    assert len(asked) == len(set(asked)) <= 2 + (first + rest).bit_length()


@given(
    first=st.integers(1, 12), rest=st.integers(0, 12), skipped=st.sets(st.integers(1, 23))
)  # fmt: skip
def test_skipped_ones_leave_open_only_what_they_hide(
    first: int, rest: int, skipped: set[int]
) -> None:
    results = [GOOD] * first + [BAD] * (rest + 1)
    for at in skipped:
        if at < len(results) - 1:
            results[at] = SKIPPED
    end, suspects, asked = judged(results)
    last_good = max(at for at in range(first) if results[at] is GOOD)
    first_bad = min(at for at in range(first, len(results)) if results[at] is BAD)
    assert suspects == list(range(last_good + 1, first_bad + 1))
    assert (end is End.FOUND) == (len(suspects) == 1)
    assert len(asked) == len(set(asked))


@pytest.mark.parametrize(
    ("results", "end"),
    [
        ([BAD, BAD], End.GOOD_FAILS),
        ([GOOD, GOOD], End.BAD_PASSES),
        ([SKIPPED, BAD], End.UNJUDGED),
        ([GOOD, SKIPPED], End.UNJUDGED),
    ],
)
def test_ends_that_are_not_as_they_should_be_end_it(results: list[Result], end: End) -> None:
    assert judged(results)[:2] == (end, [])


# --- the verb --------------------------------------------------------------------------------


@pytest.fixture
def longer(tiny: Tiny) -> Tiny:
    """Six vLLM patches; ``fifth`` brings the word that commands look for."""
    for at, name in ((10, "third"), (20, "fourth"), (30, "fifth"), (39, "sixth")):
        text = (tiny.repos["vllm"] / "vllm/one.py").read_bytes()
        new = text.replace(b"one = %d\n" % at, b"%s = 1\n" % name.encode())
        tiny.add_patch("vllm", name, {"vllm/one.py": new})
    return tiny


def script(folder: Path, body: str) -> tuple[str, ...]:
    path = folder / "check.py"
    path.write_text(f"import os, sys, subprocess\nfrom pathlib import Path\n{body}\n")
    return sys.executable, str(path)


LOOK = "sys.exit(b'fifth' in Path('vllm/one.py').read_bytes())"


def test_the_first_patch_that_fails_is_named(longer: Tiny, run: Run, tmp_path: Path) -> None:
    ran = run("bisect", "tiny", "--", *script(tmp_path, LOOK))
    assert (ran.code, ran.out) == (0, "fifth\n")
    document = run("bisect", "tiny", "--json", "--", *script(tmp_path, LOOK)).json
    assert (document["end"], document["suspects"]) == ("found", ["fifth"])
    assert [tried["state"] for tried in document["tried"][:2]] == ["overlay-base", "sixth"]
    assert all(
        tried["exit_code"] == (1 if tried["state"] in ("fifth", "sixth") else 0)
        for tried in document["tried"]
    )


def test_the_other_series_and_narrower_ends(longer: Tiny, run: Run, tmp_path: Path) -> None:
    look = script(tmp_path, "sys.exit(b'line x' in Path('csrc/prefill.cu').read_bytes())")
    assert run("bisect", "tiny", "--upstream", "flashinfer", "--", *look).out == "check\n"
    narrow = ("--good", "fourth", "--bad", "vllm/fifth.patch")
    ran = run("bisect", "tiny", *narrow, "--json", "--", *script(tmp_path, LOOK))
    assert [tried["state"] for tried in ran.json["tried"]] == ["fourth", "fifth"]
    assert ran.json["suspects"] == ["fifth"]


def test_each_state_is_as_a_fresh_checkout_whatever_the_command_does(
    longer: Tiny, run: Run, tmp_path: Path
) -> None:
    """It edits, deletes, adds, stages, commits, ignores; and lists what it finds."""
    seen = tmp_path / "seen"
    body = f"""
git = lambda *a: subprocess.run(("git", *a), check=True, stdout=subprocess.PIPE).stdout
state = os.environ["VLLM_OVERLAY_PATCH"]
assert Path(os.environ["VLLM_OVERLAY_FOLDER"]).samefile("."), os.getcwd()
assert (os.environ["VLLM_OVERLAY_LINE"], os.environ["VLLM_OVERLAY_UPSTREAM"]) == ("tiny", "vllm")
name = git("log", "-1", "--format=%(trailers:key=Patch-Name,valueonly)").decode().strip()
with open({str(seen)!r}, "a") as out:
    status = git("status", "--porcelain", "--ignored").decode()
    print(state, name or "overlay-base", repr(status), file=out)
bad = b"fifth" in Path("vllm/one.py").read_bytes()
Path("vllm/one.py").write_bytes(b"fifth")
Path("vllm/two.py").unlink()
Path("vllm/__pycache__").mkdir()
Path("vllm/__pycache__/one.pyc").write_bytes(b"stale")
Path(".gitignore").write_text("*")
Path("nested").mkdir()
git("init", "-q", "nested")
git("add", "-f", "vllm")
git("-c", "user.name=a", "-c", "user.email=b", "commit", "-q", "-m", "mine")
Path("docs/guide.md").write_text("loose")
sys.exit(bad)
"""
    ran = run("bisect", "tiny", "--", *script(tmp_path, body))
    assert (ran.code, ran.out) == (0, "fifth\n"), ran.err
    rows = [line.split(" ", 2) for line in seen.read_text().splitlines()]
    assert len(rows) >= 4
    assert all(state == name and status == "''" for state, name, status in rows), rows


@pytest.mark.parametrize(
    ("body", "words", "end"),
    [
        ("sys.exit(1)", "on the bare pin too", "good fails"),
        ("sys.exit(0)", "no patch makes it fail", "bad passes"),
        ("sys.exit(125)", "can't tell at overlay-base", "unjudged"),
    ],
)
def test_where_no_patch_did_it(
    longer: Tiny, run: Run, tmp_path: Path, body: str, words: str, end: str
) -> None:
    ran = run("bisect", "tiny", "--", *script(tmp_path, body))
    assert (ran.code, ran.out) == (19, "")
    assert words in ran.err
    ran = run("bisect", "tiny", "--json", "--", *script(tmp_path, body))
    assert (ran.code, ran.json["end"], ran.json["error"]["exit_code"]) == (19, end, 19)


def test_states_that_cannot_be_told_leave_several(longer: Tiny, run: Run, tmp_path: Path) -> None:
    body = f"if os.environ['VLLM_OVERLAY_PATCH'] in ('fourth', 'fifth'): sys.exit(125)\n{LOOK}"
    ran = run("bisect", "tiny", "--json", "--", *script(tmp_path, body))
    assert (ran.code, ran.json["suspects"]) == (19, ["fourth", "fifth", "sixth"])


@pytest.mark.parametrize("body", ["sys.exit(130)", "os.kill(os.getpid(), 9)"])
def test_an_end_that_is_no_answer_stops_it(
    longer: Tiny, run: Run, tmp_path: Path, body: str
) -> None:
    ran = run("bisect", "tiny", "--", *script(tmp_path, body))
    assert ran.code == 19
    assert "overlay-base" in ran.err


def test_what_the_command_prints_is_no_part_of_the_answer(
    longer: Tiny, run: Run, tmp_path: Path
) -> None:
    body = f"print('noise', flush=True)\n{LOOK}"
    ran = run("bisect", "tiny", "--json", "--", *script(tmp_path, body))
    assert ran.json["suspects"] == ["fifth"]
    assert "noise" in ran.err


def test_nothing_is_left_behind_not_even_read_only_files(
    longer: Tiny, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    body = f"Path('a').mkdir(); Path('a/b').write_text(''); os.chmod('a', 0o555)\n{LOOK}"
    run("bisect", "tiny", "--", *script(tmp_path, body))
    run("bisect", "tiny", "--", *script(tmp_path, "sys.exit(1)"))
    assert list(temporary.iterdir()) == []


def test_a_program_is_found_from_here_and_a_missing_one_is_named(
    longer: Tiny, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check = tmp_path / "check.sh"
    check.write_text("#!/bin/sh\n! grep -q fifth vllm/one.py\n")
    check.chmod(0o755)
    assert run("bisect", "tiny", "--", "./check.sh").out == "fifth\n"
    ran = run("bisect", "tiny", "--", "no-such-program")
    assert ran.code == 19
    assert "no-such-program" in ran.err


def test_a_git_that_called_us_does_not_lead_the_command_astray(
    longer: Tiny, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    body = f"subprocess.run(('git', 'rev-parse', 'HEAD'), check=True)\n{LOOK}"
    assert run("bisect", "tiny", "--", *script(tmp_path, body)).out == "fifth\n"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--good", "fifth", "--bad", "first"), 3),
        (("--good", "fifth", "--bad", "fifth"), 3),
        (("--good", "nothing"), 3),
        (("--bad", "check"), 3),  # of the other series
        (("--upstream", "torch"), 2),
    ],
)
def test_ends_that_make_no_sense(
    longer: Tiny, run: Run, options: tuple[str, ...], code: int
) -> None:
    assert run("bisect", "tiny", *options, "--", "true").code == code
    assert run("bisect", "tiny").code == 2


def test_a_bad_patch_after_the_ends_does_not_matter(longer: Tiny, run: Run, tmp_path: Path) -> None:
    assert VLLM_FILES["vllm/one.py"].count(b"one = 38\n") == 1
    longer.edit("-one = 39\n", "-one = 39 \n", "vllm/sixth.patch")
    assert run("bisect", "tiny", "--", *script(tmp_path, LOOK)).code == 7
    ran = run("bisect", "tiny", "--bad", "fifth", "--", *script(tmp_path, LOOK))
    assert ran.out == "fifth\n"
