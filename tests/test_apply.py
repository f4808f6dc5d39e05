"""A series on a base tree: verdicts, states, processes, and processes that die half-way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import ApplyError, OverlayError
from overlay.patches.patch import Patch, parse_patch
from overlay.trees.apply import PatchedTree, apply_series, refuse_bad
from overlay.trees.match import Verdict
from overlay.trees.store import Store
from tests.conftest import numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from overlay.trees.store import Commit
    from tests.conftest import File, Repo

ROOT = Path(__file__).parent.parent
LONG = numbered(1, 60)


def change(line: int, text: bytes, content: bytes = LONG) -> bytes:
    return content.replace(b"line %d\n" % line, text)


def series(repo: Repo, **steps: Mapping[str | bytes, File]) -> list[Patch]:
    """One commit and patch a step, named after it."""
    made = []
    for name, files in steps.items():
        repo.commit(files, f"Step {name}\n")
        made.append(parse_patch(repo.patch(), name=name))
    return made


def verdicts(patched: PatchedTree) -> dict[str, Verdict]:
    return {patch.name: patch.verdict for patch in patched.patches}


@pytest.fixture
def base(upstream: Repo, store: Store, import_base: Callable[..., Commit]) -> Commit:
    return import_base(store, upstream)


@pytest.fixture
def three(upstream: Repo, base: Commit) -> list[Patch]:
    two = change(5, b"five\n")
    return series(
        upstream,
        one={"a.py": b"print(2)\n"},
        two={"pkg/long.py": two, "new.py": b"new\n"},
        three={"pkg/long.py": change(40, b"forty\n", two), "data.bin": b"\0\1", "bin/run": None},
    )


def test_series_has_the_trees_of_its_commits(
    upstream: Repo, store: Store, base: Commit, three: list[Patch]
) -> None:
    patched = apply_series(store, base, three)
    assert [p.tree for p in patched.patches] == [upstream.tree(f"HEAD~{n}") for n in (2, 1, 0)]
    assert patched.tree == upstream.tree()
    assert patched.bad == ()
    kind, text = store.git.run("cat-file", "-p", patched.commit).split(b"\n\n", 1)
    assert b"author Ada Author <ada@example.invalid> 1700000000 +0130" in kind
    assert b"committer Ada Author <ada@example.invalid> 1700000000 +0130" in kind
    assert text == b"Step three\n\nPatch-Name: three\n"


def test_effects(upstream: Repo, store: Store, base: Commit, three: list[Patch]) -> None:
    final = apply_series(store, base, three).final()
    assert sorted(final) == ["a.py", "bin/run", "data.bin", "new.py", "pkg/long.py"]
    assert (final["bin/run"].mode_before, final["bin/run"].mode) == ("100755", "000000")
    assert final["bin/run"].blob == "0" * 40
    assert (final["new.py"].mode_before, final["new.py"].mode) == ("000000", "100644")
    assert final["new.py"].before == "0" * 40
    blob = upstream.git("rev-parse", "HEAD:pkg/long.py").decode().strip()
    assert final["pkg/long.py"].blob == blob


def test_empty_series(store: Store, base: Commit) -> None:
    patched = apply_series(store, base, [])
    assert (patched.tree, patched.commit, patched.bad) == (base.tree, base.commit, ())


def test_the_last_file_can_go(
    upstream: Repo, store: Store, import_base: Callable[..., Commit]
) -> None:
    upstream.git("rm", "-rq", ".")
    upstream.commit({"only": b"x\n"})
    base = import_base(store, upstream)
    patched = apply_series(store, base, series(upstream, gone={"only": None}))
    assert patched.tree == upstream.tree() == "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def test_every_patch_gets_a_verdict(
    upstream: Repo, store: Store, import_base: Callable[..., Commit]
) -> None:
    origin = upstream.git("rev-parse", "HEAD").decode().strip()
    steps: dict[str, Mapping[str | bytes, File]] = {
        "fine": {"a.py": b"print(2)\n"},
        "landed": {"pkg/short.py": b"one\n2\nthree\n"},
        "half": {"pkg/long.py": change(50, b"fifty\n", change(5, b"five\n"))},
        "broken": {"docs/crlf.txt": b"one\r\n2\r\nthree\r\n"},
    }
    patches = [p for name, files in steps.items() for p in series(upstream, **{name: files})]

    def requiring(name: str, file: str, required: str) -> Patch:
        upstream.commit({file: b"x\n"}, f"{name}\n\nRequires: {required}\n")
        return parse_patch(upstream.patch(), name=name)

    patches += [
        requiring("on-broken", "new1", "fine, broken"),
        requiring("on-blocked", "new2", "on-broken"),
        requiring("on-landed", "new3", "landed"),
        requiring("on-fine", "new4", "fine"),
    ]
    upstream.reset(origin)
    upstream.commit(
        {
            "pkg/short.py": b"one\n2\nthree\n",
            "pkg/long.py": b"top\n" + change(5, b"five\n"),
            "docs/crlf.txt": b"one\ntwo\nthree\n",
        }
    )
    patched = apply_series(store, import_base(store, upstream), patches)
    assert verdicts(patched) == {
        "fine": Verdict.APPLIES,
        "landed": Verdict.MERGED,
        "half": Verdict.PARTLY_MERGED,
        "broken": Verdict.CONFLICT,
        "on-broken": Verdict.BLOCKED,
        "on-blocked": Verdict.BLOCKED,
        "on-landed": Verdict.APPLIES,
        "on-fine": Verdict.APPLIES,
    }
    half = patched.patches[2]
    assert [f.verdict for f in half.findings] == [Verdict.MERGED, Verdict.OFFSET]
    assert half.effects == ()
    assert "requires broken, which is bad" in patched.patches[4].findings[0].why
    with pytest.raises(ApplyError) as caught:
        refuse_bad(patched, "infernal", "vllm")
    assert "5 of 8 vllm patches of infernal don't apply" in caught.value.what
    assert "docs/crlf.txt (patch line" in caught.value.why
    # a bad patch leaves the state before it
    assert patched.patches[3].tree == patched.patches[0].tree
    # and all that comes from the states, too
    assert verdicts(apply_series(store, patched.base, patches)) == verdicts(patched)


def test_a_patch_after_an_offset_one(
    upstream: Repo, store: Store, three: list[Patch], import_base: Callable[..., Commit]
) -> None:
    upstream.reset("HEAD~3")
    upstream.commit({"pkg/long.py": b"top\n" + LONG})
    patched = apply_series(store, import_base(store, upstream), three)
    assert verdicts(patched) == {
        "one": Verdict.APPLIES, "two": Verdict.OFFSET, "three": Verdict.OFFSET
    }  # fmt: skip
    upstream.git("am", "--quiet", stdin=b"".join(patch.raw for patch in three))
    assert patched.tree == upstream.tree()


# --- states --------------------------------------------------------------------------------


def test_a_change_to_one_patch_applies_it_and_the_later_ones(
    upstream: Repo, store: Store, base: Commit, three: list[Patch], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_series(store, base, three)
    reworded = parse_patch(three[1].raw.replace(b"Step two", b"Step 2"), name="two")
    read: list[str] = []
    real = store.reader.get

    def get(name: str) -> tuple[str, str, bytes] | None:
        read.append(name)
        return real(name)

    monkeypatch.setattr(store.reader, "get", get)
    patched = apply_series(store, base, [three[0], reworded, three[2]])
    assert [patch.cached for patch in patched.patches] == [True, False, False]
    assert patched.tree == upstream.tree()
    untouched = upstream.git("rev-parse", "HEAD~3:a.py", "HEAD~2:a.py").decode().split()
    assert not set(untouched) & set(read)
    assert apply_series(store, base, [three[0], reworded]).tree == upstream.tree("HEAD~1")
    assert all(p.cached for p in apply_series(store, base, [three[0], reworded, three[2]]).patches)
    assert not any(p.cached for p in apply_series(store, base, three, use_states=False).patches)


def test_a_name_is_part_of_a_state(store: Store, base: Commit, three: list[Patch]) -> None:
    first = apply_series(store, base, three)
    renamed = parse_patch(three[0].raw, name="uno")
    second = apply_series(store, base, [renamed, *three[1:]])
    assert second.tree == first.tree
    assert second.patches[0].commit != first.patches[0].commit


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "not UTF-8": lambda data: b"\xff" + data,
    "another type": lambda _: b"[1, 2]",
    "unknown verdict": lambda data: data.replace(b'"applies"', b'"perfect"'),
    "another tree": lambda data: data.replace(json.loads(data)["tree"].encode(), b"1" * 40),
    "another commit": lambda data: data.replace(json.loads(data)["commit"].encode(), b"1" * 40),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_made_again(
    damage: str, store: Store, base: Commit, three: list[Patch]
) -> None:
    before = apply_series(store, base, three)
    for path in store.states.iterdir():
        path.write_bytes(DAMAGES[damage](path.read_bytes()))
    after = apply_series(store, base, three)
    assert not any(patch.cached for patch in after.patches)
    assert after == before
    assert all(patch.cached for patch in apply_series(store, base, three).patches)


def test_a_store_that_is_gone_under_its_states(
    upstream: Repo,
    store: Store,
    base: Commit,
    three: list[Patch],
    import_base: Callable[..., Commit],
) -> None:
    before = apply_series(store, base, three)
    store.reader.close()
    shutil.rmtree(store.folder)
    again = Store(store.folder.parent.parent, "vllm")
    with pytest.raises(OverlayError):
        apply_series(again, base, three)
    fresh = Store(store.folder.parent.parent, "vllm")
    assert import_base(fresh, upstream, "HEAD~3") == base
    after = apply_series(fresh, base, three)
    assert after == before
    assert not any(patch.cached for patch in after.patches)


# --- processes -----------------------------------------------------------------------------


def child(cache: Path, *arguments: str, ok: bool = True) -> dict[str, Any]:
    done = subprocess.run(
        (sys.executable, "-m", "tests.support.child", str(cache), *arguments),
        capture_output=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stderr.decode()
    return dict(json.loads(done.stdout)) if ok else {}


def ids(answer: dict[str, Any]) -> list[Any]:
    return [answer["base"], answer["tree"], answer["patches"]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ids(child(tmp_path_factory.mktemp("cache")))


def fsck(cache: Path) -> None:
    git = ("git", "--git-dir", str(cache / "stores" / "vllm.git"))
    done = subprocess.run((*git, "fsck", "--full", "--strict"), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"missing" not in done.stdout


@pytest.mark.parametrize("states", ["cached", "lost"])
def test_a_warm_store_costs_few_processes(tmp_path: Path, states: str) -> None:
    child(tmp_path)
    if states == "lost":
        shutil.rmtree(tmp_path / "states")
    counter = tmp_path / "bin" / "git"
    counter.parent.mkdir()
    log = tmp_path / "log"
    counter.write_text(f'#!/bin/sh\necho "$@" >>{log}\nexec {shutil.which("git")} "$@"\n')
    counter.chmod(0o755)
    # the first call with another git has to look at its version
    environment = {**os.environ, "PATH": f"{counter.parent}:{os.environ['PATH']}"}
    command = (sys.executable, "-m", "tests.support.child", str(tmp_path))
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=environment)
    answer = json.loads(done.stdout)
    assert answer["cached"] == [states == "cached"] * 4
    started = log.read_text().splitlines()
    assert len(started) <= 6, started
    assert answer["processes"] <= len(started)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_warm_store_costs_few_processes_of_any_kind(tmp_path: Path) -> None:
    child(tmp_path)
    shutil.rmtree(tmp_path / "states")
    log = tmp_path / "log"
    command = ("strace", "-f", "-qq", "-e", "trace=execve", "-e", "signal=none", "-o", str(log))
    child_command = (sys.executable, "-m", "tests.support.child", str(tmp_path))
    done = subprocess.run((*command, *child_command), capture_output=True, check=False, cwd=ROOT)
    if done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.decode()[:80]}")
    started = [line for line in log.read_text().splitlines() if line.endswith("= 0")]
    assert len(started) - 1 <= 6, started  # less Python itself


DEATHS = [
    "create:1", "put:1", "put:200", "made:1", "exit:1", "put:403", "made:3", "exit:2", "write:1",
    "write:3", "replace:1", "replace:3",
]  # fmt: skip


@pytest.mark.parametrize("death", DEATHS)
def test_a_killed_process_leaves_nothing_that_hurts(
    death: str, tmp_path: Path, expected: list[Any]
) -> None:
    child(tmp_path, "--die", death, ok=False)
    assert ids(child(tmp_path)) == expected
    fsck(tmp_path)


def test_killed_at_any_moment(tmp_path: Path, expected: list[Any]) -> None:
    command = (sys.executable, "-m", "tests.support.child", str(tmp_path))
    for moment in (0.15, 0.2, 0.25, 0.3, 0.35, 0.4):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment)
        process.kill()
        process.wait()
    assert ids(child(tmp_path)) == expected
    fsck(tmp_path)


def test_two_at_once(tmp_path: Path, expected: list[Any]) -> None:
    command = (sys.executable, "-m", "tests.support.child", str(tmp_path))
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    answers = [json.loads(process.communicate()[0]) for process in both]
    assert [ids(answer) for answer in answers] == [expected] * 3
    fsck(tmp_path)


# --- machines that don't take it -----------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system over a folder; the test is skipped where nobody may mount."""
    done = subprocess.run(("mount", *options, str(folder)), capture_output=True, check=False)
    if done.returncode:
        pytest.skip("may not mount a file system here")
    try:
        yield
    finally:
        for _ in range(50):  # a child may take a moment to let go
            if (
                subprocess.run(("umount", str(folder)), check=False, capture_output=True).returncode
                == 0
            ):
                break
            time.sleep(0.1)


def test_read_only_cache(tmp_path: Path, expected: list[Any]) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    child(cache)
    with mounted(cache, "--bind", "-o", "ro", str(cache)):
        answer = child(cache)
        assert ids(answer) == expected
        assert answer["cached"] == [True] * 4
    shutil.rmtree(cache / "states")
    with mounted(cache, "--bind", "-o", "ro", str(cache)):
        answer = child(cache)
        assert answer["error"] == "machine"
        assert "VLLM_OVERLAY_CACHE" in answer["message"]


@pytest.mark.parametrize("size", ["16k", "48k", "96k", "144k"])
def test_full_disk(tmp_path: Path, size: str, expected: list[Any]) -> None:
    with mounted(tmp_path, "-t", "tmpfs", "-o", f"size={size}", "none"):
        answer = child(tmp_path)
        assert answer.get("error") == "machine", answer
        assert "free some room" in answer["message"]
        assert str(tmp_path) in answer["message"]
        subprocess.run(("mount", "-o", "remount,size=32m", str(tmp_path)), check=True)
        assert ids(child(tmp_path)) == expected
        fsck(tmp_path)
