"""Patches against trees, held against plain git: the same result, or a documented refusal."""

from __future__ import annotations

import difflib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from overlay.apply import apply_series
from overlay.match import Entry, Outcome, Verdict, match_patch
from overlay.patch import parse_patch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from overlay.store import Commit, Store
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
    max_examples=int(os.environ.get("VLLM_OVERLAY_TEST_EXAMPLES", "60")),
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
    assert outcome.verdict is Verdict.MERGED, outcome.findings


# --- one file, against git apply -----------------------------------------------------------


def diff_of(old: bytes, new: bytes) -> bytes:
    """A diff of ``f`` without ids, so that nothing but the lines can tell what is there."""
    sides = [text.decode("latin-1").splitlines(keepends=True) for text in (old, new)]
    out = ["diff --git a/f b/f\n"]
    for line in difflib.unified_diff(*sides, "a/f", "b/f"):
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
