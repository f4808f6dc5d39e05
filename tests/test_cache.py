"""The cache: what is listed, what a collection takes, and what it must never take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from overlay.patches.patch import parse_patch
from overlay.report import Reporter
from overlay.sources.cache import BASES, DROPPED, GRACE, TIPS, Keep, collect, describe
from overlay.sources.source import REMOTE, fetch_objects, promisor
from overlay.trees.apply import apply_series
from overlay.trees.store import EPOCH, IDENTITY, FastImport, Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from overlay.sources.cache import Collected
    from overlay.trees.store import Commit

NOTHING = Keep()
SHA = "ab" * 32


class Filled:
    """A cache with one base and one patched state of vLLM."""

    def __init__(self, cache: Path, repo, import_base) -> None:  # type: ignore[no-untyped-def]
        self.cache = cache
        self.repo = repo
        self.store = Store(cache, "vllm")
        self.base: Commit = import_base(self.store, repo)
        self.tip = self.apply(b"print(2)\n")

    def apply(self, content: bytes) -> str:
        """Apply a series of one patch; the commit."""
        start = self.repo.git("rev-parse", "HEAD").decode().strip()
        self.repo.commit({"a.py": content}, "Print\n")
        patch = parse_patch(self.repo.patch(), name="print")
        self.repo.reset(start)
        patched = apply_series(self.store, self.base, [patch])
        assert not patched.bad
        return patched.commit

    def refs(self, prefix: str = "refs/overlay/") -> dict[str, str]:
        out = self.store.git.run("for-each-ref", "--format=%(refname) %(objectname)", prefix)
        return dict(line.split(" ") for line in out.decode().splitlines())

    def has(self, commit: str) -> bool:
        self.store.reader.close()  # a process that runs on may still see removed packs
        return self.store.reader.get(commit) is not None

    def states(self) -> list[Path]:
        return sorted(self.store.states.glob("*.json"))

    def collect(self, **how: object) -> Collected:
        return collect(self.cache, keep=how.pop("keep", NOTHING), **how)  # type: ignore[arg-type]

    def keep(self) -> Keep:
        return Keep(refs={"vllm": list(self.refs())})

    def age(self, seconds: float) -> None:
        """Make everything in the cache older."""
        for path in self.cache.rglob("*"):
            made_old(path, seconds)


def made_old(path: Path, seconds: float = 2 * GRACE) -> Path:
    then = time.time() - seconds
    os.utime(path, (then, then), follow_symlinks=False)
    return path


def put(path: Path, data: bytes = b"12345") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def filled(tmp_path: Path, upstream, import_base: Callable[..., Commit]) -> Filled:  # type: ignore[no-untyped-def]
    return Filled(tmp_path / "cache", upstream, import_base)


# --- describe --------------------------------------------------------------------------------


def test_an_empty_or_missing_cache_holds_nothing(tmp_path: Path) -> None:
    assert describe(tmp_path) == []
    assert describe(tmp_path / "none") == []
    done = collect(tmp_path / "none", keep=NOTHING, everything=True)
    assert (done.freed, done.removed, done.dropped) == (0, [], [])
    assert list(tmp_path.iterdir()) == []


def test_describe_names_everything_with_its_size(filled: Filled) -> None:
    put(filled.cache / "downloads" / SHA / "vllm-1.tar.gz")
    put(filled.cache / "downloads" / SHA / "vllm-1.tar.gz.ok")
    put(filled.cache / "downloads" / SHA / "vllm-1-py3-none-any.whl.part", b"123")
    items = {(item.kind, item.name): item for item in describe(filled.cache)}
    ((base, _),) = filled.refs(BASES).items()
    ((tip, _),) = filled.refs(TIPS).items()
    assert set(items) == {
        ("download", "vllm-1.tar.gz"), ("store", "vllm"), ("base", base), ("tip", tip),
        ("states", "vllm"), ("leftover", "vllm-1-py3-none-any.whl.part"),
    }  # fmt: skip
    assert items["download", "vllm-1.tar.gz"].size == 5
    assert items["download", "vllm-1.tar.gz"].detail == "verified"
    assert items["leftover", "vllm-1-py3-none-any.whl.part"].size == 3
    assert items["states", "vllm"].size == sum(path.stat().st_size for path in filled.states())
    store = sum(p.stat().st_size for p in filled.store.folder.rglob("*") if p.is_file())
    assert items["store", "vllm"].size == store
    assert items["base", base].detail == "vllm: base"


# --- leftovers -------------------------------------------------------------------------------

LEFT = [
    f"downloads/{SHA}/vllm-1.tar.gz.part",
    f"downloads/{SHA}/vllm-1.tar.gz.ok.part",
    f"states/vllm/.{'0' * 64}.json.abcd_123",
    "stores/vllm.git/HEAD.lock",
    "stores/vllm.git/objects/pack/tmp_pack_Ab12",
    "stores/vllm.git/objects/pack/.tmp-12-pack-ab.pack",
    "stores/vllm.git/objects/ab/tmp_obj_x1",
    "stores/.new-xyz/vllm.git/HEAD",
]
LOCKS = [
    "packed-refs.lock",
    "shallow.lock",
    f"refs/overlay/tip/{'0' * 64}.lock",
]


@pytest.mark.parametrize("name", LEFT)
def test_leftovers_of_dead_processes_go(filled: Filled, name: str) -> None:
    left = put(filled.cache / name)
    for path in (left, *left.parents[: len(left.relative_to(filled.cache).parts) - 1]):
        made_old(path)
    assert any(item.kind == "leftover" for item in describe(filled.cache))
    planned = filled.collect(dry_run=True)
    assert left.exists()
    assert planned.freed >= 5
    assert [item.size for item in planned.removed] == [5]
    done = filled.collect()
    assert not left.exists()
    assert done.freed >= 5
    assert [item.kind for item in describe(filled.cache)].count("leftover") == 0
    assert filled.has(filled.tip)


@pytest.mark.parametrize("name", [name for name in LEFT if "/.tmp-" not in name])
def test_young_leftovers_may_belong_to_somebody(filled: Filled, name: str) -> None:
    left = put(filled.cache / name)
    filled.collect()
    assert left.exists()


@pytest.mark.parametrize("name", LOCKS)
def test_locks_of_killed_git_processes_go_with_the_next_write(filled: Filled, name: str) -> None:
    left = put(filled.store.folder / name)
    assert any(item.kind == "leftover" for item in describe(filled.cache))
    with filled.store.writing():
        assert not left.exists()


def test_a_download_under_way_is_left_alone(filled: Filled) -> None:
    part = made_old(put(filled.cache / "downloads" / SHA / "vllm-1.tar.gz.part"))
    with FileLock(part.parent / ".lock"):
        done = filled.collect()
    assert done.busy == [part.name]
    assert part.exists()
    filled.collect()
    assert not part.exists()


# --- what is nobody's business here ----------------------------------------------------------


def test_a_home_folder_as_cache_loses_nothing(tmp_path: Path, make_repo: Callable) -> None:
    home = tmp_path / "home"
    files = [
        "downloads/thesis.part", "downloads/thesis.tar.gz", f"downloads/{SHA}/notes.txt",
        f"downloads/{SHA}/notes.part", "states/vllm/notes.json", "states/texas.json",
        "stores/.new-york/notes", "stores/list.lock", "HEAD.lock", "tmp_pack_x",
        "stores/vllm.txt",
    ]  # fmt: skip
    for name in files:
        made_old(put(home / name))
    mine = make_repo()
    mine.commit({"a": b"1"})
    mine.commit({"a": b"2"})
    mine.git("reset", "--quiet", "--hard", "HEAD^")  # what was reset is reachable no more
    mine.git("clone", "--quiet", "--bare", str(mine.path), str(home / "stores" / "vllm.git"))
    made_old(put(home / "stores/vllm.git/objects/pack/tmp_pack_x"))

    def contents() -> dict[str, bytes]:
        return {str(p.relative_to(home)): p.read_bytes() for p in home.rglob("*") if p.is_file()}

    before = contents()
    collect(home, keep=NOTHING, everything=True, grace=0, days=0)
    after = contents()
    # Git itself notes, beside the stores, that it is new enough
    assert after.keys() - before.keys() <= {"stores/git-checked"}
    left = {name: data for name, data in before.items() if name not in after}
    assert left == {}
    assert all(after[name] == data for name, data in before.items())


def test_links_are_not_followed(filled: Filled, tmp_path: Path) -> None:
    elsewhere = made_old(put(tmp_path / "elsewhere" / "vllm-1.tar.gz.part"))
    (filled.cache / "downloads").mkdir()
    (filled.cache / "downloads" / SHA).symlink_to(elsewhere.parent)
    state = made_old(put(tmp_path / "states" / f"{'0' * 64}.json"))
    (filled.cache / "states" / "flashinfer").symlink_to(state.parent)
    filled.collect(everything=True, grace=0)
    assert elsewhere.exists()
    assert state.exists()


# --- states, tips, bases ---------------------------------------------------------------------


def test_what_is_young_or_kept_stays(filled: Filled) -> None:
    filled.collect()
    assert filled.refs(TIPS)
    assert filled.states()
    filled.age(40 * 86400)
    filled.collect(keep=filled.keep(), everything=True)
    assert set(filled.refs(TIPS).values()) == {filled.tip}
    assert filled.states()
    assert filled.has(filled.tip)


def test_an_old_tip_is_found_no_more_and_goes_after_the_grace(filled: Filled) -> None:
    filled.age(40 * 86400)
    done = filled.collect(days=30)
    assert len(done.dropped) == 1
    assert filled.refs(TIPS) == {}
    assert filled.states() == []  # nobody finds it from now on
    assert filled.has(filled.tip)  # who found it before can read on
    waiting = filled.collect()
    assert len(waiting.waiting) == 1
    assert filled.has(filled.tip)
    _backdate(filled)
    filled.age(40 * 86400)
    done = filled.collect()
    assert not filled.has(filled.tip)
    assert done.freed > 0
    assert filled.refs(DROPPED) == {}
    assert filled.has(filled.base.commit)
    assert filled.apply(b"print(2)\n") == filled.tip


def _backdate(filled: Filled) -> None:
    """Make dropped refs look dropped long ago."""
    for name, commit in filled.refs(DROPPED).items():
        old = name.replace(name.split("/")[3], str(int(time.time() - 2 * GRACE)))
        text = f"update {old} {commit}\ndelete {name}\n"
        filled.store.git.run("update-ref", "--stdin", stdin=text.encode())


def test_use_keeps_a_tip_young(filled: Filled) -> None:
    filled.age(40 * 86400)
    for state in filled.states():
        os.utime(state)
    assert filled.collect().dropped == []


def test_bases_go_only_when_everything_may(filled: Filled) -> None:
    filled.age(400 * 86400)
    filled.collect(grace=0)
    assert filled.refs(TIPS) == {}
    assert filled.has(filled.base.commit)
    filled.collect(everything=True, grace=0)
    filled.collect(everything=True, grace=0)
    assert filled.refs() == {} or not filled.has(filled.base.commit)


def test_everything_drops_what_no_line_pins(filled: Filled) -> None:
    keep = filled.keep()
    other = filled.apply(b"print(3)\n")
    kept, gone = "cd" * 32, "ef" * 32
    for sha in (kept, gone):
        put(filled.cache / "downloads" / sha / "vllm-1.tar.gz")
        put(filled.cache / "downloads" / sha / "vllm-1.tar.gz.ok")
    keep = Keep(refs=keep.refs, downloads=[kept])
    filled.age(2 * GRACE)
    done = filled.collect(keep=keep, everything=True, grace=0)
    assert not filled.has(other)
    assert filled.has(filled.tip)
    assert (filled.cache / "downloads" / kept / "vllm-1.tar.gz").exists()
    assert not (filled.cache / "downloads" / gone / "vllm-1.tar.gz").exists()
    assert not (filled.cache / "downloads" / gone / "vllm-1.tar.gz.ok").exists()
    assert done.freed >= 10


def test_a_state_whose_commit_is_gone_goes(filled: Filled) -> None:
    (good,) = filled.states()
    text = good.read_bytes().replace(filled.tip.encode(), b"0" * 40)
    bad = put(good.with_name(f"{'0' * 64}.json"), text)
    broken = put(good.with_name(f"{'1' * 64}.json"), b"{")
    filled.collect()
    assert filled.states() == [good]
    assert not bad.exists()
    assert not broken.exists()


def test_dry_run_changes_nothing_and_says_the_same(filled: Filled) -> None:
    filled.age(40 * 86400)
    before = sorted(p for p in filled.cache.rglob("*") if not p.name.endswith(".lock"))
    planned = filled.collect(dry_run=True)
    assert sorted(p for p in filled.cache.rglob("*") if not p.name.endswith(".lock")) == before
    done = filled.collect()
    assert planned.dropped == done.dropped != []
    assert [item.name for item in planned.removed] == [item.name for item in done.removed] != []


def test_many_applies_become_one_pack(filled: Filled) -> None:
    text = b"".join(b"x%d = %d\n" % (n, n * 7919 % 10007) for n in range(3000))
    made = [filled.apply(text + b"print(%d)\n" % number) for number in range(3, 9)]
    (before,) = [item for item in describe(filled.cache) if item.kind == "store"]
    assert "0 loose" not in before.detail
    done = filled.collect()
    (after,) = [item for item in describe(filled.cache) if item.kind == "store"]
    assert after.detail == "1 packs, 0 loose objects"
    assert done.repacked == ["vllm"]
    assert done.freed == (before.size or 0) - (after.size or 0) > 0
    assert all(filled.has(commit) for commit in made)
    assert filled.store.git.run("fsck", "--strict", "--connectivity-only") is not None
    assert filled.collect().repacked == []


# --- beside others ---------------------------------------------------------------------------


def test_a_reader_reads_on(filled: Filled) -> None:
    other = filled.apply(b"print(3)\n")
    filled.age(40 * 86400)
    reader = filled.store.reader
    assert reader.get(filled.base.commit)
    filled.collect()
    filled.collect()
    for name in (filled.tip, other, f"{filled.tip}^{{tree}}", f"{other}:a.py"):
        assert reader.get(name), name


def test_it_waits_for_a_writer(filled: Filled) -> None:
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from overlay.sources.cache import Keep, collect
        collect(Path(sys.argv[1]), keep=Keep())
        """
    )
    argv = (sys.executable, "-c", script, str(filled.cache))
    with filled.store.writing():
        process = subprocess.Popen(argv)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
    assert process.wait(30) == 0


@pytest.mark.parametrize("delay", [0.3, 0.45, 0.6])
def test_killed_in_the_middle_nothing_is_lost(filled: Filled, delay: float) -> None:
    made = [filled.apply(b"print(%d)\n" % number) for number in range(3, 7)]
    filled.age(40 * 86400)
    script = (
        "import sys; from pathlib import Path; from overlay.sources.cache import Keep, collect\n"
        "keep = Keep(refs={'vllm': sys.argv[2:]})\n"
        "while True: collect(Path(sys.argv[1]), keep=keep, days=1)\n"
    )
    argv = (sys.executable, "-c", script, str(filled.cache), *filled.refs())
    process = subprocess.Popen(argv, start_new_session=True)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert all(filled.has(commit) for commit in made)
    assert filled.apply(b"print(100)\n")
    filled.age(40 * 86400)
    filled.collect(keep=filled.keep())
    assert all(filled.has(commit) for commit in made)
    filled.store.git.run("fsck", "--strict")
    assert not [item for item in describe(filled.cache) if item.kind == "leftover"]


def test_a_store_from_git_keeps_its_promises(  # type: ignore[no-untyped-def]
    tmp_path: Path, upstream
) -> None:
    """Blobs that a partial clone lacks are promised, not lost; collecting knows that."""
    upstream.git("config", "uploadpack.allowFilter", "true")
    upstream.git("config", "uploadpack.allowAnySHA1InWant", "true")
    commit = upstream.git("rev-parse", "HEAD").decode().strip()
    store = Store(tmp_path / "cache", "vllm")
    switches = promisor(upstream.path.as_uri())
    fetch = (*switches, "fetch", "--quiet", "--no-tags", "--filter=blob:none", "--depth=1")
    with store.writing():
        fetched = f"{commit}:refs/overlay/fetched/{commit}"
        store.git.run(*fetch, REMOTE, fetched, network=True)
        with FastImport(store) as stream:
            stream.commit(f"{BASES}git-x", parent=None, identity=IDENTITY, date=EPOCH, message="b")
            stream.root(upstream.tree())
            base = stream.made()
    blob, other = upstream.git("rev-parse", "HEAD:a.py", "HEAD:pkg/long.py").decode().split()
    keep = Keep(refs={"vllm": [f"{BASES}git-x"]})
    for now in (blob, other):
        with store.writing():
            fetch_objects(store, upstream.path.as_uri(), [now], Reporter(quiet=True))
        done = collect(store.folder.parent.parent, keep=keep, everything=True, grace=0)
        assert done.repacked == ["vllm"]
        reader = store.reader
        assert reader.get(base.commit)
        assert reader.get(base.tree)
        assert reader.get(now)
        assert (reader.get(other) is None) == (now == blob)
    store.git.run(*switches, "fsck", "--strict")


def test_answers_are_listed_and_go_when_they_are_old(filled: Filled) -> None:
    old, young, half, other = (
        filled.cache / folder / name
        for folder, name in (
            ("frontier", f"{SHA}.json"),
            ("releases/vllm", f"{SHA}.json"),
            ("frontier", f".{SHA}.json.abcd1234"),
            ("frontier", "notes.json"),
        )
    )
    for path in (old, young, half, other):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    answers = {item.name: item.size for item in describe(filled.cache) if item.kind == "answers"}
    assert answers == {"frontier": 2, "releases/vllm": 2}
    made_old(old, 31 * 86400)
    made_old(half)
    assert len(filled.collect(dry_run=True, keep=filled.keep()).removed) == 2
    filled.collect(keep=filled.keep())
    assert [path.exists() for path in (old, young, half, other)] == [False, True, False, True]
    filled.collect(keep=filled.keep(), everything=True)
    assert [path.exists() for path in (young, other)] == [False, True]
