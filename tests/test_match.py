"""Patches against trees, held against plain git: the same result, or a documented refusal."""

from __future__ import annotations

import difflib
import os
import random
import re
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlay.errors import PatchError
from overlay.patches.diff import Kind
from overlay.patches.patch import parse_patch
from overlay.trees.apply import apply_series
from overlay.trees.match import Entry, Outcome, Verdict, match_patch
from overlay.trees.objects import blob_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from overlay.trees.store import Commit, Store
    from tests.conftest import Repo

    Files = dict[bytes, tuple[int, bytes]]

MODES = (0o100644, 0o100755)
LINK = 0o120000
HEADER = (
    b"From: A <a@b.invalid>\nDate: Mon, 30 Nov 2026 12:00:00 +0000\nSubject: [PATCH] x\n\n---\n"
)
# The suite runs often: enough to find a slip, and the same every time
SETTINGS = settings(
    derandomize=True,
    deadline=None,
    max_examples=int(os.environ.get("VLLM_OVERLAY_TEST_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


class FakeTree:
    """A tree in memory, in the place of a store's."""

    def __init__(self, files: Files) -> None:
        self.files = files

    def get(self, path: bytes) -> Entry | None:
        found = self.files.get(path)
        return Entry(mode=found[0], data=found[1]) if found else None

    def is_folder(self, path: bytes, *, without: Collection[bytes] = ()) -> bool:
        return any(p.startswith(path + b"/") and p not in without for p in self.files)


def match(diff: bytes, files: Files) -> Outcome:
    return match_patch(parse_patch(HEADER + diff, name="fix"), FakeTree(files))


def patched(outcome: Outcome, files: Files) -> Files:
    made = dict(files)
    for path, entry in outcome.changes.items():
        made.pop(path, None)
        if entry is not None:
            made[path] = (entry.mode, entry.data)
    return made


# --- whole trees, against git am -----------------------------------------------------------

LINES = [
    b"", b"a", b"b", b"c", b"}", b"-- ", b"-", b"+", b" ", b"--- a/f", b"+++ b/f", b"@@ -1 +1 @@",
    b"From 0 Mon", b"From: x", b"diff --git a/f b/f", b"\\ No newline at end of file", b"caf\xe9",
    b"\xc3\xa9", b"cr\r", b"\r", b"\t", b"index 1..2", b"GIT binary patch", b"---",
]  # fmt: skip
ACTIONS = ["edit", "edit", "edit", "add", "delete", "chmod", "rename", "copy", "link"]
PATHS = [
    b"f", b"g.py", b"dir", b"dir/g", b"dir/sub/h", b"f/in", b"with space", b"a b/a b", b'qu"ote',
    b"tab\t", b"caf\xc3\xa9", b"lat\xe9n", b"back\\slash", b"-dash", b"b/f",
]  # fmt: skip

lines = st.lists(st.sampled_from(LINES), max_size=25)


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    if draw(st.integers(0, 5)) == 0:
        seed = draw(st.binary(min_size=1, max_size=40))
        return b"\0" + seed * draw(st.sampled_from([1, 30]))
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    text = end.join(draw(lines))
    return text + draw(st.sampled_from([end, end, end, b""])) if text else b""


@st.composite
def edits(draw: st.DrawFn, content: bytes) -> bytes:
    if not content or draw(st.integers(0, 8)) == 0:
        return draw(contents())
    if b"\0" in content:
        at = draw(st.integers(1, len(content)))
        return content[:at] + draw(st.binary(max_size=9)) + content[at + 3 :]
    parts = content.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(parts)))
        stop = min(len(parts), at + draw(st.integers(0, 2)))
        parts[at:stop] = [
            line + b"\n" for line in draw(st.lists(st.sampled_from(LINES), max_size=2))
        ]
    return b"".join(parts)


def consistent(files: Files) -> Files:
    """Without files that would stand where a folder is needed."""
    folders = {path[:i] for path in files for i, byte in enumerate(path) if byte == 0x2F}
    return {path: file for path, file in files.items() if path not in folders}


@st.composite
def trees(draw: st.DrawFn) -> Files:
    paths = draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=6, unique=True))
    return consistent({path: (draw(st.sampled_from(MODES)), draw(contents())) for path in paths})


@st.composite
def next_trees(draw: st.DrawFn, files: Files) -> Files:
    made = dict(files)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(made) or PATHS))
        mode, data = made.get(path, (MODES[0], b""))
        other = draw(st.sampled_from(PATHS))
        action = draw(st.sampled_from(ACTIONS))
        if action == "edit" and mode != LINK:
            made[path] = (mode, draw(edits(data)))
        elif action == "add":
            made = {p: f for p, f in made.items() if not (p + b"/").startswith(other + b"/")}
            made[other] = (draw(st.sampled_from(MODES)), draw(contents()))
        elif action == "delete":
            made.pop(path, None)
        elif action == "chmod" and mode != LINK:
            made[path] = (mode ^ 0o111, data)
        elif action in ("rename", "copy"):
            if action == "rename":
                made.pop(path, None)
            keep = mode == LINK or draw(st.booleans())
            made[other] = (mode, data if keep else draw(edits(data)))
        elif action == "link":
            made[path] = (LINK, draw(st.sampled_from([b"f", b"dir/g", b"nowhere", b"lat\xe9n"])))
    return consistent(made)


@st.composite
def histories(draw: st.DrawFn) -> list[Files]:
    history = [draw(trees())]
    for _ in range(draw(st.integers(1, 4))):
        made = draw(next_trees(history[-1]))
        if made != history[-1]:
            history.append(made)
    assume(len(history) > 1)
    return history


def commit_all(repo: Repo, history: list[Files], ref: str) -> list[bytes]:
    """Commit the trees one after the other; the commits."""
    out = []
    for number, files in enumerate(history, start=1):
        out.append(
            b"commit %s\nmark :%d\ncommitter C <c@d.invalid> %d +0000\ndata 9\nNumber %d\n"
            % (ref.encode(), number, 1700000000 + number, number)
        )
        out.append(b"deleteall\n")
        for path, (mode, data) in files.items():
            quoted = b'"' + b"".join(b"\\%03o" % byte for byte in path) + b'"'
            out.append(b"M %o inline %s\ndata %d\n%s\n" % (mode, quoted, len(data), data))
    asked = b"".join(b"get-mark :%d\n" % number for number in range(1, len(history) + 1))
    stream = b"".join(out) + b"\n" + asked + b"done\n"
    return repo.git("fast-import", "--quiet", "--done", "--force", stdin=stream).split()


@pytest.fixture(scope="session")
def arena(make_repo: Callable[[], Repo]) -> Repo:
    repo = make_repo()
    repo.commit({})
    return repo


@pytest.fixture(scope="session")
def arena_store(make_store: Callable[..., Store]) -> Store:
    return make_store()


@SETTINGS
@given(
    history=histories(),
    options=st.sampled_from(
        [
            ("-M",),
            ("-C", "--find-copies-harder"),
            ("--no-renames",),
            ("-M", "-U1"),
            ("-M10%", "-U8"),
        ]
    ),
)
def test_a_series_gives_the_trees_of_git_am(
    history: list[Files],
    options: tuple[str, ...],
    arena: Repo,
    arena_store: Store,
    import_base: Callable[..., Commit],
) -> None:
    commits = [commit.decode() for commit in commit_all(arena, history, "refs/heads/made")]
    mails = [arena.patch(commit, *options) for commit in commits[1:]]
    arena.reset(commits[0])
    # --keep-cr: else git am cuts the CR of every CRLF line
    arena.git("am", "--quiet", "--keep-cr", stdin=b"".join(mails))
    revisions = arena.git("rev-list", "--reverse", f"{commits[0]}..HEAD").decode().split()
    expected = [arena.tree(commit) for commit in revisions]
    assert expected == [arena.tree(commit) for commit in commits[1:]]

    base = import_base(arena_store, arena, commits[0])
    patches = [parse_patch(mail, name=f"p{number}") for number, mail in enumerate(mails)]
    result = apply_series(arena_store, base, patches, use_states=False)
    assert [patch.tree for patch in result.patches] == expected
    assert {patch.verdict for patch in result.patches} == {Verdict.APPLIES}


@SETTINGS
@given(history=histories(), options=st.sampled_from([("-M",), ("-C", "--find-copies-harder")]))
def test_a_patch_is_merged_where_its_outcome_is(
    history: list[Files], options: tuple[str, ...], arena: Repo
) -> None:
    commits = commit_all(arena, history[:2], "refs/heads/made")
    patch = parse_patch(arena.patch(commits[1].decode(), *options), name="p")
    assert patched(match_patch(patch, FakeTree(history[0])), history[0]) == history[1]
    outcome = match_patch(patch, FakeTree(history[1]))
    changed = {path for diff in patch.files for path in diff.paths}
    if any(
        d.kind is Kind.COPY and d.new_blob is None and d.old_path in changed for d in patch.files
    ):
        # Of a mere copy git states no id, and the source is no longer what was copied
        assert not outcome.verdict.good
        return
    assert outcome.verdict is Verdict.MERGED, outcome.findings


@SETTINGS
@given(history=histories(), seeds=st.lists(st.integers(0, 1 << 30), min_size=8, max_size=8))
def test_what_we_take_of_a_damaged_patch_git_takes_alike(
    history: list[Files], seeds: list[int], arena: Repo, tmp_path_factory: pytest.TempPathFactory
) -> None:
    commits = [commit.decode() for commit in commit_all(arena, history[:2], "refs/heads/made")]
    diff = arena.git("diff", "--full-index", "--binary", "-M", *commits)
    for seed in seeds:
        changed = damaged(diff, random.Random(seed))
        try:
            outcome = match(changed, history[0])
        except PatchError:
            continue
        if not outcome.verdict.good:
            continue
        index = {"GIT_INDEX_FILE": str(tmp_path_factory.getbasetemp() / "index")}
        arena.git("read-tree", commits[0], env=index)
        arena.git("apply", "--cached", "--whitespace=nowarn", "-", stdin=changed, env=index)
        listed = arena.git("ls-files", "--stage", "-z", env=index).split(b"\0")[:-1]
        expected = {}
        for entry in listed:
            head, _, path = entry.partition(b"\t")
            mode, blob, _ = head.decode().split()
            expected[path] = (int(mode, 8), blob)
        made = patched(outcome, history[0])
        assert {p: (m, blob_id(d)) for p, (m, d) in made.items()} == expected


def damaged(diff: bytes, chance: random.Random) -> bytes:
    """A diff with a line changed, moved, doubled or cut, as careless editing does."""
    rows = diff.splitlines(keepends=True)
    for _ in range(chance.randint(1, 2)):
        at = chance.randrange(len(rows))
        way = chance.randrange(6)
        if way == 0:
            del rows[at]
        elif way == 1:
            rows.insert(at, rows[chance.randrange(len(rows))])
        elif way == 2:
            rows[at] = chance.choice((b"+", b"-", b" ")) + rows[at][1:]
        elif way == 3:
            digit = b"%d" % chance.randrange(10)
            rows[at] = re.sub(rb"\d", lambda _, d=digit: d, rows[at], count=1)  # type: ignore[misc]
        elif way == 4:
            rows[at] = rows[at].replace(b"/", b"/x", 1)
        else:
            rows[at] = rows[at].rstrip() + chance.choice((b" \n", b"\r\n", b"", b"y\n"))
        if not rows:
            break
    return b"".join(rows)


# --- one file, against git apply -----------------------------------------------------------


def diff_of(old: bytes, new: bytes) -> bytes:
    """A diff of ``f`` without ids, so that nothing but the lines can tell what is there."""
    one, other = (text.decode("latin-1").splitlines(keepends=True) for text in (old, new))
    out = ["diff --git a/f b/f\n"]
    for line in difflib.unified_diff(one, other, "a/f", "b/f"):
        out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(out).encode("latin-1")


def git_apply(folder: Path, diff: bytes, old: bytes) -> bytes | None:
    """What plain ``git apply`` makes of the file, None when it refuses."""
    (folder / "f").write_bytes(old)
    env = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ("git", "apply", "-"), input=diff, capture_output=True, check=False, cwd=folder,
        env={**env, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
    )  # fmt: skip
    return (folder / "f").read_bytes() if done.returncode == 0 else None


few = st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"}\n", b"\n"]), max_size=24)
inserted = st.lists(st.sampled_from([b"a\n", b"x\n"]), max_size=3)
places = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 3), inserted), min_size=1, max_size=3
)


def edited(content: list[bytes], changes: list[tuple[int, int, list[bytes]]]) -> list[bytes]:
    made = list(content)
    for at, count, new in changes:
        made[at : at + count] = new
    return made


@settings(SETTINGS, max_examples=SETTINGS.max_examples * 5)
@given(old=few, changes=places, before=places, ends=st.tuples(st.booleans(), st.booleans()))
def test_other_lines_around(
    old: list[bytes],
    changes: list[tuple[int, int, list[bytes]]],
    before: list[tuple[int, int, list[bytes]]],
    ends: tuple[bool, bool],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    source, target = (
        b"".join(text)[: -1 if cut else None]
        for text, cut in zip((old, edited(old, changes)), ends, strict=True)
    )
    assume(source != target)
    diff = diff_of(source, target)
    base = b"".join(edited(old, before))
    outcome = match(diff, {b"f": (MODES[0], base)})
    expected = git_apply(tmp_path_factory.getbasetemp(), diff, base)
    if outcome.verdict.good:
        assert outcome.changes[b"f"] == Entry(mode=MODES[0], data=expected or b"")
        assert expected is not None
    elif expected is not None:
        # where git goes on, we name the reason
        reasons = ("ambiguous", "the change is there already", "the context at line")
        assert all(f.why.startswith(reasons) for f in outcome.findings if not f.verdict.good)


@settings(SETTINGS, max_examples=SETTINGS.max_examples * 10)
@given(old=few, changes=places, around=st.tuples(few, few))
def test_a_patch_never_applies_to_what_holds_it(
    old: list[bytes],
    changes: list[tuple[int, int, list[bytes]]],
    around: tuple[list[bytes], list[bytes]],
) -> None:
    new = edited(old, changes)
    assume(old != new)
    diff = diff_of(b"".join(old), b"".join(new))
    above, below = around
    for now in (new, [*above, *new], [*new, *below], [*above, *new, *below]):
        if len(new) < len(old) and b"".join(old) in b"".join(now):
            continue  # what was put around is what the patch deletes: the old file again
        assert not match(diff, {b"f": (MODES[0], b"".join(now))}).verdict.good


# --- where we are stricter than git, and where exactly as strict ---------------------------

ONE = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -3,5 +3,5 @@\n 3\n 4\n-5\n+five\n 6\n 7\n"


def numbers(first: int, last: int) -> bytes:
    return b"".join(b"%d\n" % number for number in range(first, last + 1))


def verdict(diff: bytes, content: bytes, mode: int = MODES[0]) -> tuple[Verdict, str]:
    outcome = match(diff, {b"f": (mode, content)})
    return outcome.verdict, "; ".join(finding.why for finding in outcome.findings)


@pytest.mark.parametrize(
    ("content", "expected", "why"),
    [
        (numbers(1, 9), Verdict.APPLIES, ""),
        (b"new\n" + numbers(1, 9), Verdict.OFFSET, "at line 4, the patch says 3"),
        (numbers(2, 9), Verdict.OFFSET, "at line 2, the patch says 3"),
        (numbers(1, 9).replace(b"5", b"five"), Verdict.MERGED, "is there already, at line 3"),
        (numbers(1, 9).replace(b"7\n", b"7 \n"), Verdict.CONFLICT, "line 3 is not in the file"),
        (numbers(1, 9).replace(b"\n", b"\r\n"), Verdict.CONFLICT, "line 3 is not in the file"),
        (numbers(1, 9).replace(b"5", b"V"), Verdict.CONFLICT, "line 3 is not in the file"),
        (b"", Verdict.CONFLICT, "line 3 is not in the file"),
    ],
)
def test_one_hunk(content: bytes, expected: Verdict, why: str, tmp_path: Path) -> None:
    found, evidence = verdict(ONE, content)
    assert found is expected
    assert why in evidence
    assert (git_apply(tmp_path, ONE, content) is not None) == expected.good


def test_git_takes_the_nearest_of_several_places_and_we_refuse(tmp_path: Path) -> None:
    content = b"new\n" + numbers(1, 9) + numbers(1, 9)
    assert git_apply(tmp_path, ONE, content) is not None
    assert verdict(ONE, content) == (
        Verdict.CONFLICT,
        "ambiguous: the context fits at lines 4, 13",
    )


def test_git_applies_where_the_change_may_be_made_already_and_we_refuse(tmp_path: Path) -> None:
    content = numbers(1, 9).replace(b"5", b"five") + numbers(1, 9)
    assert git_apply(tmp_path, ONE, content) is not None
    assert (
        "fits at line 12, but the change may be there already, at line 3"
        in verdict(ONE, content)[1]
    )


def test_git_takes_another_mode_and_we_refuse(tmp_path: Path) -> None:
    diff = ONE.replace(b"--- a", b"index 1234567..89abcde 100644\n--- a")
    (tmp_path / "f").touch()
    (tmp_path / "f").chmod(0o755)
    assert git_apply(tmp_path, diff, numbers(1, 9)) is not None
    assert verdict(diff, numbers(1, 9), MODES[1]) == (
        Verdict.CONFLICT,
        "mode is 100755, the patch expects 100644",
    )


def test_git_cuts_a_line_end_that_the_context_lacks_and_we_refuse(tmp_path: Path) -> None:
    diff = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n-1\n+one\n 2\n"
    diff += b"\\ No newline at end of file\n"
    assert git_apply(tmp_path, diff, b"1\n2") == b"one\n2"
    assert git_apply(tmp_path, diff, b"1\n2\n") == b"one\n2"
    assert verdict(diff, b"1\n2")[0] is Verdict.APPLIES
    assert verdict(diff, b"1\n2\n")[0] is Verdict.CONFLICT


def test_git_takes_hunks_out_of_order_and_we_refuse(tmp_path: Path) -> None:
    first, second = b"@@ -1,2 +1,2 @@\n-1\n+one\n 2\n", b"@@ -8,2 +8,2 @@\n 8\n-9\n+nine\n"
    head = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n"
    assert git_apply(tmp_path, head + second + first, numbers(1, 9)) is not None
    with pytest.raises(PatchError, match="another place"):
        match(head + second + first, {b"f": (MODES[0], numbers(1, 9))})
    # in order, but each standing where the other should
    content = numbers(8, 9) + b"x\n" + numbers(1, 2)
    changed = (head + first + second).replace(b" 2\n@", b" 2\n 3\n@").replace(b"1,2", b"1,3")
    assert not verdict(changed, content)[0].good


def test_git_takes_a_blank_line_for_context_and_we_refuse(tmp_path: Path) -> None:
    diff = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n-1\n+one\n\n 3\n"
    assert git_apply(tmp_path, diff, b"1\n\n3\n") is not None
    with pytest.raises(PatchError, match="ends early"):
        match(diff, {})


@pytest.mark.parametrize("content", [b"new\n" + numbers(1, 5), numbers(1, 5) + b"new\n"])
def test_hunks_at_start_and_end_stay_there(content: bytes, tmp_path: Path) -> None:
    start = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1,3 +1,4 @@\n+0\n 1\n 2\n 3\n"
    end = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -3,3 +3,4 @@\n 3\n 4\n 5\n+6\n"
    for diff, moved in ((start, content.startswith(b"new")), (end, content.endswith(b"new\n"))):
        assert (git_apply(tmp_path, diff, content) is None) == moved
        assert verdict(diff, content)[0].good != moved


def test_insertion_without_context_fits_nowhere(tmp_path: Path) -> None:
    diff = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -2,0 +3 @@\n+new\n"
    assert not verdict(diff, numbers(1, 5))[0].good


def test_evidence_hunk_by_hunk() -> None:
    diff = ONE + b"@@ -13,3 +13,3 @@\n 13\n-14\n+fourteen\n 15\n"
    content = numbers(1, 20).replace(b"14", b"fourteen")
    outcome = match(diff, {b"f": (MODES[0], content)})
    assert outcome.verdict is Verdict.PARTLY_MERGED
    assert outcome.changes == {}
    assert [(f.verdict, f.path, f.at) for f in outcome.findings] == [
        (Verdict.APPLIES, "f", 9),
        (Verdict.MERGED, "f", 16),
    ]
    content = numbers(1, 20).replace(b"14", b"XIV")
    outcome = match(diff, {b"f": (MODES[0], content)})
    assert outcome.verdict is Verdict.CONFLICT
    assert "the context at line 13 is not in the file" in outcome.findings[1].why


WHOLE = {
    "addition": b"diff --git a/n b/n\nnew file mode 100644\n"
    b"--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n",
    "empty addition": b"diff --git a/n b/n\nnew file mode 100644\nindex 0000000..e69de29\n",
    "addition below": b"diff --git a/n/m b/n/m\nnew file mode 100644\nindex 0000000..e69de29\n",
    "addition below a file": b"diff --git a/f/m b/f/m\nnew file mode 100644\n",
    "deletion": b"diff --git a/f b/f\ndeleted file mode 100644\n"
    b"--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n",
    "deletion of empty": b"diff --git a/f b/f\ndeleted file mode 100644\n",
    "mode": b"diff --git a/f b/f\nold mode 100644\nnew mode 100755\n",
    "rename": b"diff --git a/f b/n\nsimilarity index 100%\nrename from f\nrename to n\n",
    "copy": b"diff --git a/f b/n\nsimilarity index 100%\ncopy from f\ncopy to n\n",
}


@pytest.mark.parametrize(
    ("case", "files", "expected", "why"),
    [
        ("addition", {}, Verdict.APPLIES, ""),
        ("addition", {b"n": b"x\n"}, Verdict.MERGED, "exists already"),
        ("addition", {b"n": b"x"}, Verdict.CONFLICT, "exists already"),
        ("addition", {b"n/m": b"x\n"}, Verdict.CONFLICT, "n is a folder"),
        ("empty addition", {b"n": b""}, Verdict.MERGED, "exists already"),
        ("empty addition", {b"n": b"x"}, Verdict.CONFLICT, "exists already"),
        ("addition below", {b"n": b""}, Verdict.CONFLICT, "n is a file"),
        ("addition below a file", {b"f": b""}, Verdict.CONFLICT, "f is a file"),
        ("deletion", {b"f": b"1\n"}, Verdict.APPLIES, ""),
        ("deletion", {}, Verdict.MERGED, "does not exist"),
        ("deletion", {b"f": b"1\n2\n"}, Verdict.CONFLICT, "not in the file"),
        ("deletion of empty", {b"f": b""}, Verdict.APPLIES, ""),
        ("deletion of empty", {b"f": b"1\n"}, Verdict.CONFLICT, "holds more"),
        ("mode", {b"f": b""}, Verdict.APPLIES, ""),
        ("mode", {}, Verdict.CONFLICT, "does not exist"),
        ("rename", {b"f": b"1"}, Verdict.APPLIES, ""),
        ("rename", {b"n": b"1"}, Verdict.MERGED, "does not exist"),
        ("rename", {b"f": b"1", b"n": b"1"}, Verdict.CONFLICT, "exists already"),
        ("rename", {}, Verdict.CONFLICT, "does not exist"),
        ("copy", {b"f": b"1"}, Verdict.APPLIES, ""),
        ("copy", {b"f": b"1", b"n": b"1"}, Verdict.MERGED, "exists already"),
        ("copy", {b"f": b"1", b"n": b"2"}, Verdict.CONFLICT, "exists already"),
        ("copy", {b"n": b"1"}, Verdict.CONFLICT, "does not exist"),
    ],
)
def test_whole_files(case: str, files: dict[bytes, bytes], expected: Verdict, why: str) -> None:
    outcome = match(WHOLE[case], {path: (MODES[0], data) for path, data in files.items()})
    assert outcome.verdict is expected
    assert why in outcome.findings[0].why
    assert bool(outcome.changes) == expected.good


def test_mode_that_is_set_already() -> None:
    assert verdict(WHOLE["mode"], b"", MODES[1])[0] is Verdict.MERGED


def test_folder_and_file_change_places() -> None:
    to_file = (WHOLE["deletion"] + WHOLE["addition"]).replace(b"/f", b"/d/f")
    to_file = to_file.replace(b"a/n", b"a/d").replace(b"b/n", b"b/d")
    outcome = match(to_file, {b"d/f": (MODES[0], b"1\n")})
    assert outcome.changes == {b"d/f": None, b"d": Entry(mode=MODES[0], data=b"x\n")}
    # another file keeps the folder
    assert not match(to_file, {b"d/f": (MODES[0], b"1\n"), b"d/g": (MODES[0], b"")}).verdict.good
    to_folder = WHOLE["deletion"] + WHOLE["addition"].replace(b"a/n", b"a/f/n").replace(
        b"b/n", b"b/f/n"
    )
    assert match(to_folder, {b"f": (MODES[0], b"1\n")}).verdict is Verdict.APPLIES


def test_binary_needs_the_very_file(arena: Repo) -> None:
    old, new = b"\0" + bytes(range(256)) * 8, b"\0" + bytes(range(256)) * 8 + b"new"
    history = [{b"f": (MODES[0], old)}, {b"f": (MODES[0], new)}]
    commit = commit_all(arena, history, "refs/heads/made")[1].decode()
    patch = parse_patch(arena.patch(commit), name="p")
    assert patch.files[0].binary is not None
    assert patch.files[0].binary.is_delta
    outcomes = [
        match_patch(patch, FakeTree({b"f": (MODES[0], data)})) for data in (old, new, old + b"x")
    ]
    assert [outcome.verdict for outcome in outcomes] == [
        Verdict.APPLIES, Verdict.MERGED, Verdict.CONFLICT,
    ]  # fmt: skip
    assert outcomes[0].changes[b"f"] == Entry(mode=MODES[0], data=new)
    assert "the patch expects" in outcomes[2].findings[0].why


def test_repetition_takes_no_time() -> None:
    diff = b"diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -9,3 +9,4 @@\n a\n a\n+b\n a\n"
    started = time.process_time()
    assert verdict(diff, b"a\n" * 300_000)[0] is Verdict.APPLIES
    assert verdict(diff, b"a" * 3_000_000)[0] is Verdict.CONFLICT
    assert time.process_time() - started < 2
