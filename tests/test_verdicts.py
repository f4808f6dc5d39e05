"""Verdicts with evidence: the verb on a line in small, and the weighing by itself."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import UnavailableError
from overlay.lines.line import read_line
from overlay.moving.carry import Carried
from overlay.moving.evidence import Postconditions, find_postconditions, judge
from overlay.moving.history import FileChange, History, UpstreamCommit
from overlay.report import Reporter
from overlay.sources.ondemand import OnDemandTree
from overlay.sources.source import Sources
from overlay.trees.match import Verdict
from tests.support.carrying import Memory, series
from tests.support.tiny import VLLM_FILES, git

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from overlay.patches.patch import Patch
    from tests.conftest import Ran, Repo
    from tests.support.tiny import Tiny

ONE = VLLM_FILES["vllm/one.py"]


def edit(text: bytes, *edits: tuple[bytes, bytes]) -> bytes:
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


TAKEN = (b"one = 3\n", b"one = 33\n")


class Upstream:
    """vLLM's repository, going on from the pin."""

    def __init__(self, tiny: Tiny) -> None:
        self.repo = tiny.repos["vllm"]
        git(self.repo, "config", "uploadpack.allowAnySHA1InWant", "true")
        git(self.repo, "config", "uploadpack.allowFilter", "true")
        git(self.repo, "reset", "-q", "--hard", "v1.2.3")

    def commit(self, files: Mapping[str, bytes | None], message: str) -> str:
        for path, data in files.items():
            if data is None:
                (self.repo / path).unlink()
            else:
                (self.repo / path).write_bytes(data)
        git(self.repo, "add", "-A", "-f")
        git(self.repo, "commit", "-q", "-F", "-", stdin=message.encode())
        return git(self.repo, "rev-parse", "HEAD").decode().strip()


@pytest.fixture
def vllm(tiny: Tiny) -> Upstream:
    return Upstream(tiny)


@pytest.fixture
def verdicts(run: Callable[..., Ran], vllm: Upstream) -> Callable[..., Any]:
    """Verdicts of vLLM's series at a commit, by patch, with the exit code."""

    def at(commit: str, *options: str, history: bool = True) -> tuple[int, Any]:
        clone = ("--history", f"vllm={vllm.repo}") if history else ()
        where = ("--upstream", "vllm", "--at", commit)
        ran = run("verdicts", "tiny", *where, *clone, *options, "--json")
        assert "upstreams" in ran.json, ran.json
        document = ran.json["upstreams"]["vllm"]
        return ran.code, {patch["patch"]: patch for patch in document["patches"]}

    return at


def test_own_pins(run: Callable[..., Ran]) -> None:
    ran = run("verdicts", "tiny")
    assert ran.code == 0
    rows = [row.split("\t") for row in ran.out.splitlines()]
    assert [row[:3] for row in rows] == [
        ["vllm", "first", "applies"],
        ["vllm", "second", "applies"],
        ["flashinfer", "check", "applies"],
    ]
    assert "history" not in ran.err  # there is no range


def test_conflict_names_the_commit(vllm: Upstream, verdicts: Callable[..., Any]) -> None:
    vllm.commit({"vllm/two.py": b"two = 22\n"}, "Elsewhere (#1)\n")
    culprit = vllm.commit({"vllm/one.py": edit(ONE, (b"= 3\n", b"= 0x3\n"))}, "Hex (#2)\n")
    code, found = verdicts(vllm.commit({"docs/guide.md": b"# Guide!\n"}, "Go on (#3)\n"))
    assert code == 15
    assert (found["first"]["verdict"], found["second"]["verdict"]) == ("conflict", "applies")
    assert found["first"]["commits"]["changed"] == [
        {"id": culprit, "subject": "Hex (#2)", "pull": 2}
    ]
    assert found["first"]["todo"] == "resolve vllm/one.py"
    (conflict,) = found["first"]["conflicts"]
    assert (conflict["path"], conflict["kind"], conflict["lines"]) == (
        "vllm/one.py",
        "content",
        [4],
    )


def test_text_says_all(run: Callable[..., Ran], vllm: Upstream) -> None:
    vllm.commit({"vllm/one.py": edit(ONE, (b"= 3\n", b"= 0x3\n"))}, "Hex (#2)\n")
    new = vllm.commit({"vllm/old.py": None}, "Drop old (#3)\n")
    where = ("--upstream", "vllm", "--at", new)
    ran = run("verdicts", "tiny", *where, "--history", f"vllm={vllm.repo}")
    assert ran.code == 15
    assert "first\tconflict\t1 in conflict\tresolve vllm/one.py" in ran.out
    assert "second\tpartly-merged\t1 go, 1 there\tnothing" in ran.out
    for text in (
        "error: 1 patches of tiny need a person",
        "upstream changed:",
        "Hex (#2)",
        "both sides changed the same lines (line 4)",
        "second: partly-merged",
    ):
        assert text in ran.err
    ran = run("verdicts", "tiny", *where)
    assert "no history at hand" in ran.err
    assert "--history vllm=CLONE" in ran.err


def test_taken_and_changed_since_is_merged(vllm: Upstream, verdicts: Callable[..., Any]) -> None:
    vllm.commit({"vllm/one.py": edit(ONE, TAKEN)}, "Take it (#4)\n")
    new = vllm.commit({"vllm/one.py": edit(ONE, (b"= 3\n", b"= 333\n"))}, "Go on (#5)\n")
    code, found = verdicts(new)
    assert (code, found["first"]["verdict"]) == (0, "merged")
    assert found["first"]["carried_as"] == "conflict"
    assert [commit["pull"] for commit in found["first"]["commits"]["took"]] == [4]
    # which nobody can know without history
    code, found = verdicts(new, history=False)
    assert (code, found["first"]["verdict"]) == (15, "conflict")


def test_taken_and_gone_without_a_word_is_looked_at(
    vllm: Upstream, verdicts: Callable[..., Any]
) -> None:
    vllm.commit({"vllm/one.py": edit(ONE, TAKEN)}, "Take it (#4)\n")
    code, found = verdicts(vllm.commit({"vllm/one.py": ONE}, "Tidy up (#5)\n"))
    assert (code, found["first"]["verdict"]) == (15, "reworked")
    assert found["first"]["carried_as"] == "applies"
    assert not found["first"]["ok"]


def test_taken_and_reverted_applies_again(vllm: Upstream, verdicts: Callable[..., Any]) -> None:
    vllm.commit({"vllm/one.py": edit(ONE, TAKEN)}, "Take it (#4)\n")
    code, found = verdicts(vllm.commit({"vllm/one.py": ONE}, 'Revert "Take it (#4)" (#5)\n'))
    assert (code, found["first"]["verdict"]) == (0, "applies")
    assert "took that back" in found["first"]["notes"][0]
    assert [commit["pull"] for commit in found["first"]["commits"]["undid"]] == [5]


def test_rename_that_only_history_knows(vllm: Upstream, verdicts: Callable[..., Any]) -> None:
    git(vllm.repo, "mv", "vllm/one.py", "vllm/values.py")
    vllm.commit({}, "Move it (#4)\n")
    other = b"".join(ONE.splitlines(keepends=True)[:9]) + b"".join(
        b"x = %d\n" % i for i in range(40)
    )
    new = vllm.commit({"vllm/values.py": other}, "Change most of it (#5)\n")
    code, found = verdicts(new)
    assert (code, found["first"]["verdict"]) == (0, "moved")
    assert "vllm/values.py" in found["first"]["findings"][0]["why"]
    code, found = verdicts(new, history=False)
    assert (code, found["first"]["verdict"]) == (15, "conflict")
    assert found["first"]["conflicts"][0]["kind"] == "deleted"


def test_contents_are_fetched_when_they_are_read(
    tiny: Tiny, vllm: Upstream, tmp_path: Path
) -> None:
    line, path = read_line(tiny.patches, "tiny"), b"docs/guide.md"
    online, offline = (
        Sources(
            cache=tmp_path / "other", report=Reporter(quiet=True), offline=is_offline,
            choices={"vllm": "git"},
        )
        for is_offline in (False, True)
    )  # fmt: skip
    base = online.base(line, "vllm", {})
    tree = OnDemandTree(offline, "vllm", base)
    with pytest.raises(UnavailableError, match=r"docs/guide\.md"):
        tree.get(path)
    assert tree.missing is not None
    gone = vllm.repo.rename(vllm.repo.with_name("gone"))
    tree = OnDemandTree(online, "vllm", base)
    with pytest.raises(UnavailableError, match=r"docs/guide\.md"):
        tree.get(path)
    assert tree.missing is not None
    gone.rename(vllm.repo)
    tree = OnDemandTree(online, "vllm", base)
    entry = tree.get(path)
    assert entry is not None
    assert entry.data == VLLM_FILES["docs/guide.md"]
    assert (tree.get(b"nowhere"), tree.missing) == (None, None)
    assert tree.is_folder(b"docs")


def test_source_that_is_a_clone_gives_history(vllm: Upstream, verdicts: Callable[..., Any]) -> None:
    vllm.commit({"vllm/one.py": edit(ONE, TAKEN)}, "Take it (#4)\n")
    new = vllm.commit({"vllm/one.py": edit(ONE, (b"= 3\n", b"= 333\n"))}, "Go on (#5)\n")
    source = ("--source", f"vllm={vllm.repo}")
    code, found = verdicts(new, *source, history=False)
    assert (code, found["first"]["verdict"]) == (0, "merged")


def test_another_lines_pins(run: Callable[..., Ran], tiny: Tiny, vllm: Upstream) -> None:
    new = vllm.commit({"vllm/one.py": edit(ONE, TAKEN)}, "Take it (#4)\n")
    old = git(vllm.repo, "rev-parse", "v1.2.3^{commit}").decode().strip()
    tree = [git(vllm.repo, "rev-parse", f"{c}^{{tree}}").decode().strip() for c in (old, new)]
    assert run("new", "other", "--like", "tiny").code == 0
    path = tiny.patches / "other" / "line.toml"
    text = path.read_text().replace(old, new).replace(tree[0], tree[1])
    archive, _, rest = text.partition('sources = ["archive", "git"]')
    path.write_text(f'{archive}sources = ["git"]{rest}'.replace('tag = "v1.2.3"\n', ""))
    ran = run("verdicts", "tiny", "--at", "other", "--json")
    assert ran.code == 0, ran.json
    found = {
        name: [patch["verdict"] for patch in told["patches"]]
        for name, told in ran.json["upstreams"].items()
    }
    assert found == {"vllm": ["merged", "applies"], "flashinfer": ["applies"]}


def test_tombstone_of_another_line_is_shown(
    tiny: Tiny, vllm: Upstream, verdicts: Callable[..., Any]
) -> None:
    (tiny.patches / "dropped.toml").write_text(
        f"""[[dropped]]
patch = "first"
upstream = "vllm"
line = "older"
from-version = "0.0.1"
at-version = "0.0.dev0"
why = "merged"
sha256 = "{"0" * 64}"
reason = "it is there"
"""
    )
    code, found = verdicts(vllm.commit({"vllm/two.py": b"two = 22\n"}, "Elsewhere (#1)\n"))
    assert code == 0
    assert found["first"]["notes"] == ["older dropped first at 0.0.dev0 as merged: it is there"]


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--history", "vllm"), 2, "UPSTREAM=CLONE"),
        (("--history", "torch=x"), 2, "UPSTREAM=CLONE"),
        (("--at", "1.2.3"), 2, "--upstream"),
        (("--at", "nowhere", "--upstream", "vllm"), 3, "nowhere"),
    ],
)
def test_refusals(run: Callable[..., Ran], options: tuple[str, ...], code: int, says: str) -> None:
    ran = run("verdicts", "tiny", *options)
    assert ran.code == code
    assert says in ran.err


def test_history_that_is_no_clone(run: Callable[..., Ran], vllm: Upstream, tmp_path: Path) -> None:
    new = vllm.commit({"vllm/two.py": b"two = 22\n"}, "Elsewhere (#1)\n")
    where = ("--upstream", "vllm", "--at", new)
    ran = run("verdicts", "tiny", *where, "--history", f"vllm={tmp_path}")
    assert ran.code == 6
    assert "no git repository" in ran.err


def test_line_that_does_not_apply_where_it_stands(
    run: Callable[..., Ran], tiny: Tiny, vllm: Upstream
) -> None:
    (tiny.folder / "vllm" / "series").write_text("second.patch\nfirst.patch\n")
    path = tiny.folder / "vllm" / "first.patch"
    path.write_bytes(path.read_bytes().replace(b" one = 2\n", b" one = 2!\n"))
    new = vllm.commit({"vllm/two.py": b"two = 22\n"}, "Elsewhere (#1)\n")
    ran = run("verdicts", "tiny", "--upstream", "vllm", "--at", new)
    assert ran.code == 7
    assert "first does not apply to the base" in ran.err


# --- weighing -----------------------------------------------------------------------------------


@pytest.fixture
def patch(upstream: Repo) -> Patch:
    base = upstream.git("rev-parse", "HEAD").decode().strip()
    text = b"one more line\ntwo\nthree more lines\n"
    upstream.commit({"pkg/short.py": text}, "Fix\n\nUpstream: o/r#7\n")
    (made,) = series(upstream, base)
    return made


def outcome(verdict: Verdict) -> Carried:
    return Carried(name="fix", verdict=verdict, findings=(), changes={})


def commit(number: int, subject: str, *lines: bytes) -> UpstreamCommit:
    change = FileChange(added=Counter(lines), removed=Counter([b"one", b"three"]))
    files = {b"pkg/short.py": change} if lines else {}
    return UpstreamCommit(id=f"{number:040}", subject=subject, files=files)


WHOLE = commit(1, "Take it (#9)", b"one more line", b"three more lines")
UNDO = commit(2, 'Revert "Take it (#9)" (#10)')
PULL = commit(3, "In another form (#7)")


@pytest.mark.parametrize(
    ("commits", "carried", "verdict", "ok"),
    [
        ((), "applies", "applies", True),
        ((), "merged", "merged", True),
        ((), "conflict", "conflict", False),
        ((), "partly-merged", "partly-merged", True),
        ((WHOLE,), "conflict", "merged", True),
        ((WHOLE,), "blocked", "merged", True),
        ((WHOLE,), "merged", "merged", True),
        # it would be made a second time
        ((WHOLE,), "context", "reworked", False),
        ((WHOLE,), "applies", "reworked", False),
        ((UNDO, WHOLE), "applies", "applies", True),
        ((UNDO, WHOLE), "conflict", "conflict", False),
        ((PULL,), "conflict", "reworked", False),
        ((PULL,), "applies", "reworked", False),
        ((PULL,), "merged", "merged", True),
        ((PULL,), "partly-merged", "partly-merged", True),
        ((PULL, UNDO, WHOLE), "conflict", "conflict", False),
    ],
)
def test_what_history_does_to_a_verdict(
    patch: Patch, commits: tuple[UpstreamCommit, ...], carried: str, verdict: str, ok: bool
) -> None:
    history = History(commits=commits, repository="o/r")
    found = judge(patch, outcome(Verdict(carried)), history=history)
    assert (found.verdict, found.ok) == (verdict, ok)
    assert found.todo
    assert bool(found.notes) == (bool(commits) and carried not in ("merged", "partly-merged"))


@pytest.mark.parametrize(
    ("carried", "verdict"),
    [("applies", "reworked"), ("conflict", "reworked"), ("merged", "merged")],
)
def test_pin_that_does_it_already(patch: Patch, carried: str, verdict: str) -> None:
    found = judge(patch, outcome(Verdict(carried)), does_without="flag_is_off")
    assert found.verdict == verdict
    assert "flag_is_off" in found.notes[0]


def test_postconditions_of_what_was_reverted_say_nothing(patch: Patch) -> None:
    history = History(commits=(UNDO, WHOLE), repository="o/r")
    found = judge(patch, outcome(Verdict.APPLIES), history=history, does_without="flag_is_off")
    assert found.verdict is Verdict.APPLIES


class FakePostcondition:
    """Holds where a file is."""

    def __init__(self, path: bytes) -> None:
        self.name, self.path = f"has_{path.decode()}", path

    def fails(self, pair: dict[str, Memory]) -> str | None:
        if self.path == b"undefined":
            raise NameError("undefined")
        return None if pair["vllm"].get(self.path) else "is not there"


def has(*paths: str) -> dict[Any, Any]:
    from overlay.trees.match import Entry

    files = {path.encode(): Entry(mode=0o100644, data=b"") for path in paths}
    return {"vllm": Memory(files), "flashinfer": Memory({})}


@pytest.mark.parametrize(
    ("old", "new", "met"),
    [
        (has(), has("a", "b"), "has_a, has_b"),
        (has(), has("a"), ""),
        (has("a"), has("a", "b"), "has_b"),  # what held before tells nothing
        (has("a", "b"), has("a", "b"), ""),
    ],
)
def test_postconditions(old: dict[Any, Any], new: dict[Any, Any], met: str) -> None:
    known = {"fix": [FakePostcondition(b"a"), FakePostcondition(b"b")]}
    asked = Postconditions(known=known, pair=dict, view=lambda tree: tree)
    assert asked.hold("fix", old, new) == met
    assert asked.hold("other", old, new) == ""
    unsure = {"fix": [*known["fix"], FakePostcondition(b"undefined")]}
    assert Postconditions(known=unsure, pair=dict, view=lambda t: t).hold("fix", old, new) == ""


def test_postconditions_elsewhere(tmp_path: Path) -> None:
    assert "postconditions.py" in find_postconditions(tmp_path).missing
