"""The verbs from a line to its wheels, as a user meets them; on a whole line in small."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.cli import cli
from overlay.wheels import distinfo, rawzip
from tests.support.tiny import TRAILERS, VLLM_FILES, git

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

    Run = Callable[..., Ran]

ROOT = Path(__file__).parents[1]


def test_the_way_from_a_line_to_wheels(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    refused = run("apply", "tiny")
    assert refused.code == 8
    assert "no lock.toml" in refused.err
    assert "run 'vllm-overlay lock tiny'" in refused.err
    assert run("lock", "tiny").code == 0
    assert run("apply", "tiny").code == 0
    assert run("verify", "tiny").code == 0
    built = run("wheel", "tiny", "--out", str(tmp_path / "out"), "--json").json
    vllm, flashinfer = (row["path"] for row in built["wheels"])
    local = f"tiny.o{built['digest'][:8]}"
    assert vllm.endswith(f"/vllm-1.2.3+{local}-py3-none-any.whl")
    assert flashinfer.endswith(f"/flashinfer_python-4.5.6rc7+{local}-py3-none-any.whl")
    with zipfile.ZipFile(vllm) as wheel:
        assert wheel.read("vllm/one.py") == VLLM_FILES["vllm/one.py"].replace(b"= 3\n", b"= 33\n")
        assert wheel.read("vllm/new.py") == b"new = 1\n"
        assert "vllm/old.py" not in wheel.namelist()
        assert f"version = '1.2.3+{local}'".encode() in wheel.read("vllm/_version.py")
        metadata = wheel.read(f"vllm-1.2.3+{local}.dist-info/METADATA").decode()
    assert f"Requires-Dist: flashinfer-python==4.5.6rc7+{local}\n" in metadata
    assert "4.5.5" not in metadata
    with zipfile.ZipFile(flashinfer) as wheel:
        assert b"// line x\n" in wheel.read("flashinfer/data/csrc/prefill.cu")
    looked = run("inspect", vllm, flashinfer, "--json")
    assert looked.code == 0
    assert [one["problems"] for one in looked.json["found"]] == [[], []]


def test_wheels_are_the_same_bytes_from_every_source(
    run: Run, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {}
    for source in ("archive", "git"):
        monkeypatch.setenv("VLLM_OVERLAY_CACHE", str(tmp_path / f"cache-{source}"))
        run("lock", "tiny", "--source", source)
        out = tmp_path / source
        assert run("wheel", "tiny", "--source", source, "--out", str(out)).code == 0
        made[source] = {path.name: path.read_bytes() for path in out.iterdir()}
    assert made["archive"] == made["git"]


def test_warm_apply_starts_few_processes(run: Run, tiny: Tiny) -> None:
    run("lock", "tiny")
    warm = run("apply", "tiny", "--json").json
    assert warm["processes"] <= 2
    assert all(p["cached"] for u in warm["upstreams"].values() for p in u["patches"])
    patch = tiny.folder / "vllm" / "first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+one = 33\n", b"+one = 34\n"))
    changed = run("apply", "tiny", "--relock", "--json").json
    assert changed["processes"] <= 6
    assert [p["cached"] for p in changed["upstreams"]["vllm"]["patches"]] == [False, False]


def test_a_bad_patch_does_not_hide_the_verdicts_of_others(run: Run, tiny: Tiny) -> None:
    patch = tiny.folder / "vllm" / "first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"-one = 3\n", b"-one = three\n"))
    ran = run("apply", "tiny")
    assert ran.code == 7
    verdicts = {row.split("\t")[1]: row.split("\t")[2] for row in ran.out.splitlines()}
    assert verdicts == {"first": "conflict", "second": "applies", "check": "applies"}
    assert "the context at line 1 is not in the file" in ran.err
    assert "vllm/one.py" in ran.err


def test_json_errors_are_documents_with_the_verdicts(run: Run, tiny: Tiny) -> None:
    patch = tiny.folder / "vllm" / "first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"-one = 3\n", b"-one = three\n"))
    ran = run("apply", "tiny", "--json")
    assert ran.code == 7
    assert ran.json["error"]["kind"] == "apply"
    patches = ran.json["upstreams"]["vllm"]["patches"]
    assert [patch["verdict"] for patch in patches] == ["conflict", "applies"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("first.patch", b"The reason.", b"A reason."), "patch first: file is"),
        (("first.patch", b"+one = 33\n", b"+one = 34\n"), "first: vllm/one.py becomes"),
    ],
)
def test_verify_names_patch_and_file(
    run: Run, tiny: Tiny, change: tuple[str, bytes, bytes], said: str
) -> None:
    run("lock", "tiny")
    name, old, new = change
    path = tiny.folder / "vllm" / name
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))
    for verb in ("verify", "apply", "wheel"):
        ran = run(verb, "tiny")
        assert ran.code == 8
        assert said in ran.err
    assert not (tiny.root / "dist").exists()


def test_verify_notices_reorder_loss_and_changed_pins(run: Run, tiny: Tiny) -> None:
    run("lock", "tiny")
    series = tiny.folder / "vllm" / "series"
    series.write_text("second.patch\nfirst.patch\n")
    assert "the order is second, first; locked first, second" in run("verify", "tiny").err
    series.write_text("first.patch\n")
    assert "patch second is locked but not in the series" in run("verify", "tiny").err
    series.write_text("first.patch\nsecond.patch\n")
    tiny.edit('upstream = "==4.5.5"\nline', 'upstream = "==4.5.5"\n# a comment\nline')
    assert run("verify", "tiny").code == 0


def test_rewording_changes_no_wheel(run: Run, tiny: Tiny, tmp_path: Path) -> None:
    run("lock", "tiny")
    first = run("wheel", "tiny", "--out", str(tmp_path / "a"), "--json").json
    path = tiny.folder / "vllm" / "first.patch"
    path.write_bytes(path.read_bytes().replace(b"The reason.", b"A better reason."))
    second = run("wheel", "tiny", "--relock", "--out", str(tmp_path / "b"), "--json").json
    assert first["digest"] == second["digest"]
    names = [path.name for path in (tmp_path / "a").iterdir()]
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_default_folder_holds_the_newest_pair_only(run: Run, tiny: Tiny) -> None:
    run("lock", "tiny")
    assert run("wheel", "tiny").code == 0
    folder = tiny.root / "dist" / "tiny"
    (folder / "other-1-py3-none-any.whl").touch()
    first = {path.name for path in folder.glob("*tiny.o*.whl")}
    patch = tiny.folder / "vllm" / "first.patch"
    patch.write_bytes(patch.read_bytes().replace(b"+one = 33\n", b"+one = 34\n"))
    ran = run("wheel", "tiny", "--relock")
    second = {path.name for path in folder.glob("*tiny.o*.whl")}
    assert (len(first), len(second), first & second) == (2, 2, set())
    assert all(f"removed {name}, an earlier build" in ran.err for name in first)
    assert (folder / "other-1-py3-none-any.whl").exists()


def test_a_patch_to_build_inputs_refuses_the_overlay(run: Run, tiny: Tiny) -> None:
    tiny.add_patch("vllm", "kernel", {"csrc/kernel.cu": b"// faster\n"})
    run("lock", "tiny")
    ran = run("wheel", "tiny")
    assert ran.code == 9
    assert "vllm/kernel: csrc/kernel.cu: source of the compiled modules" in ran.err
    assert not list(tiny.root.glob("dist/**/*.whl"))


def test_a_requirement_that_upstream_does_not_have_is_refused(run: Run, tiny: Tiny) -> None:
    tiny.edit('upstream = "==4.5.5"', 'upstream = "==4.4.4"')
    run("lock", "tiny")
    ran = run("wheel", "tiny")
    assert ran.code == 9
    assert "vLLM's wheel does not require flashinfer-python==4.4.4" in ran.err


def test_an_empty_series_builds_upstream_under_our_version(
    run: Run, tiny: Tiny, tmp_path: Path
) -> None:
    for upstream in ("vllm", "flashinfer"):
        (tiny.folder / upstream / "series").write_text("# nothing\n")
    assert run("lock", "tiny").code == 0
    built = run("wheel", "tiny", "--out", str(tmp_path / "out"), "--json").json
    assert [row["changes"] for row in built["wheels"]] == [0, 0]
    assert run("inspect", *(row["path"] for row in built["wheels"])).code == 0


def test_inspect_holds_unpatched_files_against_upstreams_wheel(
    run: Run, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RECORD alone would believe a maker who lists other files than upstream's."""
    built = make_forged_wheel(run, tmp_path)
    found = run("inspect", str(built), "--json")
    assert found.code == 9
    problems = found.json["found"][0]["problems"]
    assert {problem["path"] for problem in problems if problem["kind"] == "baseline"} == {
        "vllm/two.py"
    }
    monkeypatch.setenv("VLLM_OVERLAY_CACHE", str(tmp_path / "empty"))
    notes = run("inspect", str(built), "--json").json["found"][0]["notes"]
    assert [note["kind"] for note in notes] == ["no-baseline"]
    del tiny


def make_forged_wheel(run: Run, tmp_path: Path) -> Path:
    """A wheel of ours with an unpatched file changed, and RECORD and zip form to match."""
    run("lock", "tiny")
    rows = run("wheel", "tiny", "--out", str(tmp_path / "out"), "--json").json["wheels"]
    honest = Path(rows[0]["path"])
    forged = tmp_path / "forged" / honest.name
    forged.parent.mkdir()
    with zipfile.ZipFile(honest) as wheel:
        files = {info: wheel.read(info) for info in wheel.infolist()}
    evil = b"two = 666\n"
    row = distinfo.row("vllm/two.py", evil)
    with forged.open("wb") as file:
        writer = rawzip.Writer(file.fileno(), lambda _: None)
        for info, data in files.items():
            content = data
            if info.filename == "vllm/two.py":
                content = evil
            if info.filename.endswith("/RECORD"):
                rows_ = distinfo.read_record(data, "RECORD") | {row.path: row}
                content = distinfo.format_record(rows_.values())
            writer.store(info.filename, content, info.external_attr >> 16)
        writer.close()
    return forged


def test_line_faults_name_file_key_and_remedy(run: Run, tiny: Tiny) -> None:
    tiny.edit("commit =", "comit =")
    ran = run("show", "tiny")
    assert ran.code == 3
    assert "tiny/line.toml: vllm: object contains unknown field `comit`" in ran.err
    assert "did you mean 'commit'?" in ran.err


def test_a_maintainers_way(run: Run, tiny: Tiny) -> None:
    """Checkout, a change by git, export, lint, lock; then a diff by ``new``, and a line."""
    run("lock", "tiny")
    work = tiny.root / "work"
    assert run("checkout", "tiny", "vllm", str(work)).code == 0
    assert "nothing changed" in run("export", "tiny", "vllm", str(work)).err
    (work / "vllm" / "two.py").write_bytes(b"two = 22\n")
    message = b"area: make two larger\n\nThe reason.\n\nPatch-Name: larger\n" + TRAILERS.encode()
    git(work, "commit", "-q", "-a", "-F", "-", stdin=message)
    done = run("export", "tiny", "vllm", str(work), "--json").json
    assert (done["kept"], done["added"]) == (["first", "second"], ["larger"])
    assert tiny.series("vllm") == ["first.patch", "second.patch", "larger.patch"]
    assert run("apply", "tiny").code == 8
    assert run("lint", "tiny").code == 0
    assert run("lock", "tiny").code == 0
    diff = tiny.root / "a.diff"
    (work / "vllm" / "two.py").write_bytes(b"two = 222\n")
    diff.write_bytes(git(work, "diff", "--full-index"))
    author = ("--author", "Ada <ada@example.invalid>")
    assert run("new", "tiny", "vllm", "largest", "--from", str(diff), *author).code == 0
    assert tiny.series("vllm")[-1] == "largest.patch"
    linted = run("lint", "tiny", "--json")
    assert linted.code == 10
    faults = linted.json["lines"]["tiny"]["faults"]
    assert [fault["code"] for fault in faults] == ["template"] * 3
    assert run("new", "copper", "--like", "tiny").code == 0
    assert [row["line"] for row in run("lines", "--json").json["lines"]] == ["copper", "tiny"]
    assert run("cache", "gc", "--everything", "--json").code == 0
    assert run("apply", "tiny", "--relock", "--offline").code == 0


def test_export_drops_nothing_unasked(run: Run, tiny: Tiny) -> None:
    run("lock", "tiny")
    work = tiny.root / "work"
    run("checkout", "tiny", "vllm", str(work))
    git(work, "reset", "-q", "--hard", "HEAD~1")
    ran = run("export", "tiny", "vllm", str(work))
    assert ran.code == 12
    assert "second" in ran.err
    assert tiny.series("vllm") == ["first.patch", "second.patch"]
    assert run("export", "tiny", "vllm", str(work), "--drop", "second").code == 0
    assert tiny.series("vllm") == ["first.patch"]
    assert not (tiny.folder / "vllm" / "second.patch").exists()


def test_usage_errors(run: Run) -> None:
    assert run("aply").code == 2
    assert "did you mean" in run("aply").err.lower()
    assert run("apply", "--json").json["error"]["exit_code"] == 2
    assert run("inspect").code == 2
    assert run("apply", "nix").code == 3
    assert run("apply", "../tiny").code == 3


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_verb_teaches_by_example_and_has_json(name: str) -> None:
    command = cli.commands[name]
    assert command.help
    assert command.epilog
    assert f"vllm-overlay {name}" in command.epilog
    assert any("--json" in param.opts for param in command.params)


def test_the_front_and_the_module_are_the_same_command(tiny: Tiny) -> None:
    outputs = [
        subprocess.run(
            (sys.executable, *front, "--patches", str(tiny.patches), "lines"),
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        for front in (("build.py",), ("-m", "overlay"))
    ]
    assert outputs[0] == outputs[1] != b""


def test_two_builds_of_one_line_at_once(tiny: Tiny, tmp_path: Path) -> None:
    command = (sys.executable, "build.py", "--patches", str(tiny.patches))
    subprocess.run((*command, "lock", "tiny"), cwd=ROOT, check=True)
    env = os.environ | {"VLLM_OVERLAY_CACHE": str(tmp_path / "fresh")}
    out = str(tmp_path / "out")
    both = [
        subprocess.Popen(
            (*command, "wheel", "tiny", "--out", out),
            cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    errors = [process.communicate()[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    wheels = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len([name for name in wheels if name.endswith(".whl")]) == 2
    git(tiny.repos["vllm"], "fsck")
