"""The mutants session's own parts: survivors fail, lost texts are errors, nothing is touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.app import App
from overlay.checks.sessions import PATCHED_PYTHON_VARIABLE, SURVIVOR_CODE
from overlay.errors import CheckError
from overlay.trees.pipeline import apply_line
from tests.mutants import table
from tests.mutants.bench import Bench, Result, Survivor
from tests.mutants.defects import (
    Catalogue,
    Defect,
    Edit,
    Lost,
    Mutant,
    OnLine,
    lost_patches,
    make_mutant,
    read_catalogue,
)
from tests.mutants.noticed import Noticed
from tests.mutants.runs import Run, Warm, WarmEndedError, limit_for, run_tests
from tests.mutants.shadow import Environment, installed_files, make_shadow, read_environment
from tests.static.trees import Trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.tiny import Tiny

ROOT = Path(__file__).parent.parent
TWO = Edit(file="vllm/two.py", old="two = 2", new="two = 3")


@pytest.fixture
def trees(tiny: Tiny) -> Trees:
    """The tiny line, applied."""
    app = App(patches=tiny.root / "patches")
    line = app.line("tiny")
    return Trees(line=line, patched=apply_line(line, app.sources))


def defect(*edits: Edit, **given: Any) -> Defect:
    return Defect(name="bad", what="two is three", patch="first", edits=edits, **given)


# Defects and their texts


def test_a_defect_changes_its_file_and_no_other(trees: Trees) -> None:
    made = make_mutant(defect(TWO), trees)
    assert isinstance(made, Mutant)
    ((key, data),) = made.files.items()
    assert key == ("vllm", "vllm/two.py")
    assert data is not None
    assert b"two = 3" in data
    assert made.pair.vllm.get("vllm/two.py") == data
    assert made.pair.vllm.get("vllm/one.py") == trees.final().vllm.get("vllm/one.py")
    assert trees.final().vllm.text("vllm/two.py") != data.decode()


def test_several_edits_of_one_file_all_count(trees: Trees) -> None:
    more = Edit(file="vllm/two.py", old="two = 3", new="two = 4")
    made = make_mutant(defect(TWO, more), trees)
    assert isinstance(made, Mutant)
    assert made.pair.vllm.text("vllm/two.py").startswith("two = 4")


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (Edit(file="vllm/two.py", old="three = 3", new=""), "'three = 3' 0 times, not 1"),
        (Edit(file="vllm/one.py", old="one = 1", new="x"), "times, not 1"),
        (Edit(file="vllm/none.py", old="a", new="b"), "there is no vllm/none.py"),
        (Edit(file="vllm/two.py", old="two = 2", new="two = 2"), "stays as it was"),
        (Edit(file="vllm/two.py", old="two = 2", new="two = ("), "no Python"),
    ],
)
def test_a_text_that_does_not_fit_is_an_error_that_names_it(
    trees: Trees, edit: Edit, why: str
) -> None:
    with pytest.raises(CheckError, match=r"bad can't be made on tiny") as refused:
        make_mutant(defect(edit), trees)
    assert why in refused.value.why


def test_a_line_may_have_a_text_of_its_own(trees: Trees) -> None:
    other = Edit(file="vllm/two.py", old="two = 1", new="two = 3")
    made = make_mutant(defect(other, on={"tiny": OnLine(edits=(TWO,), patch="second")}), trees)
    assert isinstance(made, Mutant)
    assert made.patch == "second"


def test_absent_has_a_reason_and_must_be_true(trees: Trees) -> None:
    gone = Edit(file="vllm/two.py", old="three", new="3")
    absent = {"tiny": OnLine(absent="there is no three")}
    assert make_mutant(defect(gone, on=absent), trees) == "there is no three"
    with pytest.raises(CheckError, match="can be made"):
        make_mutant(defect(TWO, on=absent), trees)


def test_each_patch_left_out_is_a_defect(trees: Trees) -> None:
    found = lost_patches(trees.line, Catalogue(defect=()))
    assert {one.patch for one in found} == {
        patch.name for series in trees.line.series.values() for patch in series
    }
    for one in found:
        made = make_mutant(one, trees)
        assert isinstance(made, Mutant)
        assert made.files
        for (upstream, path), data in made.files.items():
            assert data != trees.final().of(upstream).get(path)


def test_the_catalogue_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "defects.toml"
    path.write_text('[[defect]]\nname = "a"\nwhat = "b"\npatch = "c"\nedit = []\n')
    with pytest.raises(CheckError, match="no list of defects"):
        read_catalogue(path)
    path.write_text(2 * '[[defect]]\nname = "a"\nwhat = "b"\npatch = "c"\n')
    with pytest.raises(CheckError, match="two defects of one name: a"):
        read_catalogue(path)


def test_the_projects_catalogue_names_tests_and_lines_that_exist() -> None:
    found = read_catalogue(table.CATALOGUE)
    lines = set(App(patches=ROOT / "patches").root.iterdir())
    known = {path.name for path in lines}
    every: list[Defect | Lost] = [*found.defect, *found.lost.values()]
    for one in every:
        assert set(one.on) <= known
        tests = [*one.tests, *(t for other in one.on.values() for t in other.tests or ())]
        assert tests or one.unseen
        for test in tests:
            file, _, name = test.partition("::")
            source = (ROOT / "tests" / "patched" / file).read_text()
            assert f"def {name.partition('[')[0]}(" in source, test


# Shadows


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment's folder of packages, with one package in it."""
    site = tmp_path / "site"
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/deep/__init__.py": "from vllm.deep import bad\n",
        "vllm/deep/bad.py": "import inspect\n\ndef f():\n    return 1\n",
        "vllm/deep/good.py": "from vllm.deep.bad import f\n",
        "vllm/other/data.txt": "data",
        "flashinfer/jit/env.py": "from pathlib import Path\nHERE = Path(__file__).resolve()\n",
        "flashinfer/data/csrc/a.cu": "// a\n",
        "flashinfer/data/csrc/b.cu": "// b\n",
    }.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return site


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_shadow_is_the_package_with_one_other_file(site: Path, tmp_path: Path) -> None:
    before = contents(site)
    bad = b"import inspect\n\ndef f():\n    return 2\n"
    make_shadow(site, tmp_path / "shadow", {"vllm/deep/bad.py": bad})
    assert contents(tmp_path / "shadow" / "vllm") == {
        name.removeprefix("vllm/"): data
        for name, data in {**before, "vllm/deep/bad.py": bad}.items()
        if name.startswith("vllm/") and not name.startswith("vllm/other/")
    }  # other/ is one link, which rglob doesn't follow
    assert (tmp_path / "shadow/vllm/other/data.txt").read_text() == "data"
    code = (
        "import inspect, vllm.deep.good as g; print(g.f(), 'return 2' in inspect.getsource(g.f),"
        " g.f.__code__.co_filename)"
    )
    env = {"PYTHONPATH": os.pathsep.join((str(tmp_path / "shadow"), str(site)))}
    argv = (sys.executable, "-c", code)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["2", "True"]
    assert "shadow" in done.stdout
    assert contents(site) == {**contents(site), **before}
    assert not [n for n in contents(site) if n not in before and "__pycache__" not in n]
    assert not list((site / "vllm/deep").glob("__pycache__/bad*"))


def test_a_shadow_leaves_a_lost_file_out(site: Path, tmp_path: Path) -> None:
    make_shadow(site, tmp_path / "shadow", {"vllm/deep/bad.py": None})
    assert not (tmp_path / "shadow/vllm/deep/bad.py").exists()
    assert (site / "vllm/deep/bad.py").exists()


def test_flashinfer_finds_its_replaced_sources(site: Path, tmp_path: Path) -> None:
    """It looks for them from where its own file is, links resolved."""
    files = installed_files({("flashinfer", "csrc/a.cu"): b"// bad\n", ("vllm", "tests/t.py"): b""})
    assert files == {"flashinfer/data/csrc/a.cu": b"// bad\n"}
    make_shadow(site, tmp_path / "shadow", files)
    code = (
        "import flashinfer.jit.env as e; print((e.HERE.parents[1] / 'data/csrc/a.cu').read_text())"
    )
    env = {"PYTHONPATH": str(tmp_path / "shadow")}
    argv = (sys.executable, "-c", code)
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "// bad"


def test_an_environment_is_asked_where_its_packages_are(tmp_path: Path) -> None:
    found = read_environment(Path(sys.executable))
    assert (found.site / "pytest").is_dir()
    assert found.versions["pytest"] == pytest.__version__
    (tmp_path / "python").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(CheckError, match="can't be run"):
        read_environment(tmp_path / "python")


# Runs


@pytest.fixture
def suite(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a tests/patched of one file into a root of its own."""

    def write(source: str) -> Path:
        folder = tmp_path / "root" / "tests" / "patched"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "device.py").write_text("")
        (folder / "test_it.py").write_text(source)
        return tmp_path / "root"

    return write


def run_suite(root: Path, *tests: str, shadow: Path | None = None, **given: Any) -> Run:
    wanted = tests or ("tests/patched",)
    return run_tests(Path(sys.executable), wanted, root=root, shadow=shadow, **given)


def test_a_run_names_the_first_test_that_fails(suite: Callable[[str], Path]) -> None:
    root = suite(
        "import pytest\n\ndef test_a(): pass\n\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): assert n == 1\n\n"
        "def test_c(): assert False\n"
    )
    run = run_suite(root)
    assert (run.outcome, run.killer) == ("failed", "test_it.py::test_b[2]")
    run = run_suite(root, "tests/patched/test_it.py::test_a")
    assert (run.outcome, run.killer, set(run.durations)) == ("passed", "", {"test_it.py"})


def test_a_module_that_fails_to_import_is_a_kill(suite: Callable[[str], Path]) -> None:
    run = run_suite(suite("from os import nothing_of_that_name\n"))
    assert (run.outcome, run.killer) == ("failed", "test_it.py")


def test_a_test_that_is_not_there_is_no_kill(suite: Callable[[str], Path]) -> None:
    run = run_suite(suite("def test_a(): pass\n"), "tests/patched/test_it.py::test_gone")
    assert run.outcome == "broken"


@pytest.fixture(params=["fresh", "warm"])
def warm(
    request: pytest.FixtureRequest,
    suite: Callable[[str], Path],
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Warm | None]:
    """None, or a process that has imported the package, save what defects are of."""
    if request.param == "fresh":
        yield None
        return
    monkeypatch.setattr("tests.mutants.runs.HERE", site / "here")
    shutil.copytree(ROOT / "tests/mutants/in_venv", site / "here/in_venv")
    (site / "here/in_venv/vllm").symlink_to(site / "vllm")
    (site / "vllm/deep/__init__.py").write_text("")
    one = Warm(Path(sys.executable), suite(""), ("vllm.deep",))
    yield one
    one.close()


def test_a_run_that_hangs_is_ended_with_its_ranks(
    suite: Callable[[str], Path], tmp_path: Path, warm: Warm | None
) -> None:
    root = suite(
        "import pathlib, subprocess, sys, time\n\ndef test_a():\n"
        "    child = subprocess.Popen((sys.executable, '-c', 'import time; time.sleep(600)'))\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "    child.wait()\n"
    )
    if warm:
        assert warm.serves(["vllm/deep/bad.py"])
    run = run_suite(root, limit_s=5, warm=warm)
    assert (run.outcome, run.killer) == ("hung", "")
    # A signal takes its time on a busy machine, and a zombie goes when its parent looks
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")
    deadline = time.monotonic() + 10
    while (gone := not status.exists() or "\nState:\tZ" in status.read_text()) is False:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert gone


def test_each_run_has_a_shadow_of_its_own(
    suite: Callable[[str], Path], tmp_path: Path, site: Path, warm: Warm | None
) -> None:
    (site / "vllm/deep/__init__.py").write_text("")
    root = suite("def test_a():\n    from vllm.deep.good import f\n    assert f() == 2\n")
    for number, outcome in ((1, "failed"), (2, "passed"), (1, "failed")):
        shadow = tmp_path / f"shadow-{number}"
        files = {"vllm/deep/bad.py": f"def f():\n    return {number}\n".encode()}
        if warm:
            assert warm.serves(files)
        if not shadow.exists():
            make_shadow(site, shadow, files)
        run = run_suite(root, shadow=shadow, warm=warm)
        assert run.outcome == outcome, run.output


def test_what_is_imported_already_is_not_served(suite: Callable[[str], Path]) -> None:
    one = Warm(Path(sys.executable), suite(""), ("json.decoder",))
    assert one.serves(["vllm/one.py"])
    assert not one.serves(["vllm/one.py", "flashinfer/data/csrc/a.cu"])
    one._loaded = frozenset(("vllm", "vllm.one"))
    assert not one.serves(["vllm/one.py"])
    assert not one.serves(["vllm/__init__.py"])
    one.close()


def test_a_process_that_has_ended_says_so(suite: Callable[[str], Path]) -> None:
    root = suite("def test_a(): pass\n")
    one = Warm(Path(sys.executable), root, ("no_such_module",))
    with pytest.raises(WarmEndedError):
        one.serves([])
    with pytest.raises(WarmEndedError):
        run_suite(root, warm=one)
    one.close()


def test_a_limit_is_far_above_what_the_tests_take() -> None:
    baseline = Run(outcome="passed", seconds=30, durations={"test_a.py": 2, "test_b.py": 18})
    assert limit_for(("test_a.py::test_x",), baseline) == 60 + 4 * (10 + 2)
    assert limit_for((), baseline) == 60 + 4 * 30


# Verdicts


def result(trees: Trees, *, static: bool, cpu: str | None, unseen: str = "") -> Result:
    made = make_mutant(defect(TWO, unseen=unseen), trees)
    assert isinstance(made, Mutant)
    outcomes = {"": "passed", None: "passed"}
    run = Run(outcome=outcomes.get(cpu, "failed"), seconds=1, killer=cpu or "")  # type: ignore[arg-type]
    seen = [Noticed(patch="first", check="it_is_so", how="read")] if static else []
    return Result(mutant=made, static=seen, cpu=None if cpu is None else run)


@pytest.mark.parametrize(
    ("static", "cpu", "unseen", "survives"),
    [
        (True, "test_it.py::test_a", "", False),
        (False, "test_it.py::test_a", "", False),
        (True, None, "it takes two devices", False),
        (True, "", "", True),  # nobody said why a CPU can't see it
        (False, "", "", True),
        (False, None, "it takes two devices", True),  # seen by nothing at all
    ],
)
def test_who_survives(
    trees: Trees, static: bool, cpu: str | None, unseen: str, survives: bool
) -> None:
    one = result(trees, static=static, cpu=cpu, unseen=unseen)
    if survives:
        with pytest.raises(Survivor, match="bad survives"):
            one.refuse_survivor()
    else:
        one.refuse_survivor()
    assert one.notes()[0] == ("static: first: it_is_so (read)" if static else "static: nothing")


def test_a_hang_is_a_kill_that_says_so(trees: Trees) -> None:
    made = make_mutant(defect(TWO), trees)
    assert isinstance(made, Mutant)
    one = Result(mutant=made, static=[], cpu=Run(outcome="hung", seconds=99))
    one.refuse_survivor()
    assert one.notes()[1] == "cpu: hangs, ended after 99 s"


# The whole way, with the tiny line's own package


@pytest.fixture
def bench(
    trees: Trees, suite: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A bench on an environment that has the tiny line's vllm, and tests that look at two."""
    site = tmp_path / "site"
    for name in ("vllm/one.py", "vllm/two.py"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(trees.final().vllm.get(name) or b"")
    (site / "vllm/__init__.py").write_text("")
    root = suite(
        "from vllm import two\n\ndef test_first(): pass\n\ndef test_two(): assert two.two == 2\n"
    )
    monkeypatch.setattr("tests.mutants.bench.UNTOUCHED", "vllm/one.py")
    with ThreadPoolExecutor(2) as pool:
        yield Bench(
            environment=Environment(python=Path(sys.executable), site=site, versions={}),
            root=root, trees=trees, pool=pool, scratch=tmp_path,
        )  # fmt: skip


def test_a_defect_is_put_back_and_noticed(bench: Bench) -> None:
    one = defect(TWO, tests=("test_it.py::test_two",))
    bench.begin([one])
    found = bench.result(one)
    assert isinstance(found, Result)
    assert found.cpu_killer == "test_it.py::test_two"
    found.refuse_survivor()


def test_a_run_is_repeated_where_what_starts_it_has_ended(bench: Bench) -> None:
    bench.warm = [Warm(Path(sys.executable), bench.root, ("no_such_module",))]
    one = defect(TWO, tests=("test_it.py::test_two",))
    bench.begin([one])
    found = bench.result(one)
    bench.warm[0].close()
    assert isinstance(found, Result)
    assert found.cpu_killer == "test_it.py::test_two"


def test_the_whole_suite_is_run_before_a_defect_survives(bench: Bench) -> None:
    missed = defect(TWO, tests=("test_it.py::test_first",))
    harmless = Defect(
        name="harmless", what="a comment", patch="first", tests=("test_it.py::test_first",),
        edits=(Edit(file="vllm/two.py", old="two = 2", new="two = 2  # still"),),
    )  # fmt: skip
    bench.begin([missed, harmless])
    found, survivor = bench.result(missed), bench.result(harmless)
    assert isinstance(found, Result)
    assert found.cpu_killer == "test_it.py::test_two"
    assert isinstance(survivor, Result)
    with pytest.raises(Survivor, match="no check notices: a comment"):
        survivor.refuse_survivor()


def test_tests_that_fail_by_themselves_prove_nothing(bench: Bench) -> None:
    (bench.root / "tests/patched/test_it.py").write_text("def test_two(): assert False\n")
    with pytest.raises(CheckError, match=r"fail without any defect: test_it\.py::test_two"):
        bench.begin([defect(TWO, tests=("test_it.py::test_two",))])


# The session


def test_a_survivor_has_an_exit_code_of_its_own(
    tiny: Tiny, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """check turns pytest's code for it into 16; every other failure stays 14."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("overlay.checks.sessions._refuse_other_builds", lambda *_: None)
    folder = tiny.root / "tests" / "mutants"
    folder.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\n")
    hook = "def pytest_sessionfinish(session):\n    session.exitstatus = {}\n"
    (folder / "test_it.py").write_text(
        f"import os\n\ndef test_a(): assert os.environ['{PATCHED_PYTHON_VARIABLE}']\n"
    )
    assert run("lock", "tiny").code == 0
    ran = run("check", "mutants", "tiny")
    assert ran.code == 14
    assert "needs an environment with the wheels of tiny" in ran.err
    for code, exit_code in ((0, 0), (SURVIVOR_CODE, 16), (1, 14)):
        (folder / "conftest.py").write_text(hook.format(code))
        ran = run("check", "mutants", "tiny", "--force", "--python", sys.executable)
        assert ran.code == exit_code, (code, ran.err)
    assert json.loads((tiny.root / "receipts/tiny/mutants-cpu.json").read_text())["counts"]


def test_the_sessions_conftest_gives_survivors_that_code(tmp_path: Path) -> None:
    """Its hooks, in a pytest of their own."""
    (tmp_path / "conftest.py").write_text(
        "from tests.mutants.conftest import pytest_exception_interact, pytest_sessionfinish\n"
    )
    (tmp_path / "test_it.py").write_text(
        "from tests.mutants.bench import Survivor\n\n"
        "def test_survivor(): raise Survivor('it lives')\n\ndef test_other(): assert False\n"
    )
    for only, code in (("survivor", SURVIVOR_CODE), ("other", 1), ("test", SURVIVOR_CODE)):
        argv = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", only, ".")
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, check=False)
        assert done.returncode == code, done.stdout


# The page


def test_the_page_says_what_the_receipts_say(trees: Trees, tmp_path: Path) -> None:
    catalogue = Catalogue(
        defect=(
            defect(TWO, named=True),
            Defect(name="apart", what="devices share", patch="first", unseen="it takes two"),
            Defect(name="gone", what="not here", patch="first"),
        )
    )
    text = table.render([trees.line], catalogue, tmp_path)
    assert "Not run yet: `nox -s mutants -- tiny`" in text
    folder = tmp_path / "receipts" / "tiny"
    folder.mkdir(parents=True)
    notes = {
        "bad": ["static: first: it_is_so (ran), 2 more", "cpu: test_it.py::test_a"],
        "apart": ["static: second: other (read)", "cpu: nothing"],
        "gone": ["absent: the pin has none"],
    }
    (folder / "mutants-cpu.json").write_text(json.dumps(receipt(notes)))
    text = table.render([trees.line], catalogue, tmp_path)
    assert "2 defects, 1 noticed by both sessions, 1 by `static` alone, 0 by `cpu`" in text
    row = "| **`bad`** two is three | first | it_is_so (ran), 2 more | `test_it.py::test_a` |"
    assert row in text
    assert "second: other (read) | nothing: it takes two (noticed by `static` alone, which" in text
    assert "- `gone`: the pin has none." in text
    assert "| **`lost/first`** " in text
    (folder / "mutants-cpu.json").write_text("{}")
    with pytest.raises(CheckError, match="no receipt"):
        table.render([trees.line], catalogue, tmp_path)


def test_the_page_is_that_of_the_receipts_here() -> None:
    """A page of other receipts would say of a digest what was never seen."""
    app = App(patches=ROOT / "patches")
    lines = [app.line(name) for name in sorted(p.name for p in app.root.iterdir())]
    text = table.render(lines, read_catalogue(table.CATALOGUE), ROOT)
    assert (ROOT / table.PAGE).read_text() == text, "run 'python -m tests.mutants.table'"


def receipt(notes: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "format": 1, "line": "tiny", "digest": "d" * 64, "trees": {}, "session": "mutants",
        "inputs": "i" * 64, "command": "nox -s mutants -- tiny", "outcome": "passed",
        "counts": {"passed": 1, "failed": 0, "skipped": 0}, "failures": [], "skips": [],
        "notes": notes, "duration_s": 60.0, "when": "2026-11-30T12:00:00Z",
        "machine": {"cpu": "c", "cores": 2, "os": "o"}, "versions": {}, "card": None,
    }  # fmt: skip
