"""publish, promote, images and image-diff, with FAKE programs on a registry in memory.

What the real programs do is in tests/images/test_publish_real.py.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from overlay.cli import main
from overlay.errors import MachineError, PublishError, UnavailableError
from overlay.images import claim as claiming
from overlay.images.claim import claim
from overlay.images.imagelist import Published, read_images, record
from overlay.images.labels import read_labels
from overlay.images.oci import read_layout
from overlay.images.reference import parse_repository
from overlay.images.registry import Registry
from overlay.images.tools import Answer, Tools
from overlay.verbs import publishing
from tests.support.layouts import make_layout
from tests.support.publishing import make_image, make_project
from tests.support.registries import FakeTools, Memory, sha256

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.layouts import Layout

REPOSITORY = "127.0.0.1:5000/fake/vllm"
DATE = "20261201"


class Desk:
    """A project, a fake registry, and the command."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        self.project = make_project(folder / "project")
        self.folder = folder
        self.memory = Memory()
        self.tools: list[FakeTools] = []
        self.before: Callable[[tuple[str, ...]], None] | None = None
        self.key = folder / "cosign.key"
        self.key.write_text("KEY")
        self._capfd = capfd
        monkeypatch.setattr(publishing, "_registry", self._registry)
        monkeypatch.setattr("overlay.images.tools.find", lambda program: program)
        monkeypatch.setattr(claiming.time, "sleep", lambda seconds: None)

    def _registry(self, repository: Any, timeout: float) -> Registry:
        tools = FakeTools(timeout=timeout, memory=self.memory, before=self.before)
        self.tools.append(tools)
        return Registry(repository=repository, tools=tools)

    def image(self, name: str = "image", **options: Any) -> Layout:
        return make_image(self.project, self.folder / name, **options)

    def run(self, *words: str, code: int = 0) -> Any:
        self._capfd.readouterr()
        verb, *rest = words
        got = main(["--patches", str(self.project / "patches"), verb, "--json", *rest])
        out, err = self._capfd.readouterr()
        assert got == code, out + err
        return json.loads(out)

    def publish(self, layout: Layout, *words: str, code: int = 0) -> Any:
        return self.run(
            "publish", str(layout.folder), "--to", REPOSITORY, "--key", str(self.key),
            "--date", DATE, *words, code=code,
        )  # fmt: skip

    def listed(self) -> list[tuple[str, str]]:
        return [(one.tag, one.digest) for one in read_images(self.project)]

    @property
    def started(self) -> list[str]:
        """First words of what was started last."""
        return [" ".join(words[:2]) for words in self.tools[-1].log]


@pytest.fixture
def desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Desk:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    return Desk(tmp_path, monkeypatch, capfd)


# --- publish ---------------------------------------------------------------------------------


def test_the_tag_goes_up_after_all_else(desk: Desk) -> None:
    layout = desk.image()
    said = desk.publish(layout)
    assert said["status"] == "published"
    assert said["tag"].startswith("infernal-vllm2cf0a69-fie62941a-o")
    assert said["tag"].endswith(f"-cu133-torch213-{DATE}-r1")
    assert said["reference"] == f"{REPOSITORY}@{layout.digest}"
    assert desk.memory.tags == {said["tag"]: layout.digest}
    order = [one for one in desk.started if one in
             ("oras cp", "cosign attest", "cosign sign", "oras tag")]  # fmt: skip
    assert order == ["oras cp", "cosign attest", "cosign attest", "cosign sign", "oras tag",
                     "cosign sign"]  # fmt: skip
    assert desk.memory.signatures[layout.digest] == {("KEY", ""), ("KEY", said["tag"])}
    assert desk.listed() == [(said["tag"], layout.digest)]


def test_the_same_content_twice_is_a_no_op(desk: Desk) -> None:
    layout = desk.image()
    first = desk.publish(layout)
    listing = (desk.project / "images.toml").read_bytes()
    again = desk.publish(layout)
    assert (again["status"], again["tag"]) == ("unchanged", first["tag"])
    changing = {"cosign attest", "cosign sign", "oras tag", "syft scan"}
    assert not changing & set(desk.started)
    assert (desk.project / "images.toml").read_bytes() == listing


def test_the_same_content_on_a_later_day_is_a_no_op(desk: Desk) -> None:
    layout = desk.image()
    first = desk.publish(layout)
    again = desk.publish(layout, "--date", "20270101")
    assert (again["status"], again["tag"]) == ("unchanged", first["tag"])
    assert len(desk.memory.tags) == 1


def test_another_content_is_refused_and_next_takes_the_next_revision(desk: Desk) -> None:
    first, second = desk.image("a"), desk.image("b", salt="b")
    tag = desk.publish(first)["tag"]
    refused = desk.publish(second, code=27)["error"]
    assert refused["kind"] == "publish"
    assert tag.replace("-r1", "-r2") in refused["fix"]
    assert desk.memory.tags == {tag: first.digest}
    said = desk.publish(second, "--next")
    assert said["tag"] == tag.replace("-r1", "-r2")
    assert desk.memory.tags == {tag: first.digest, said["tag"]: second.digest}
    assert len(desk.listed()) == 2


def test_a_gap_in_the_revisions_is_not_filled(desk: Desk) -> None:
    first, second = desk.image("a"), desk.image("b", salt="b")
    tag = desk.publish(first)["tag"]
    desk.memory.tags[tag.replace("-r1", "-r7")] = "sha256:" + "0" * 64
    assert desk.publish(second, "--next")["tag"] == tag.replace("-r1", "-r8")


def test_dry_run_changes_nothing_and_needs_no_key(desk: Desk) -> None:
    layout = desk.image()
    said = desk.run("publish", str(layout.folder), "--to", REPOSITORY, "--dry-run")
    assert said["status"] == "would publish"
    assert desk.started == ["oras repo"]
    assert not (desk.project / "images.toml").exists()


def test_without_a_key_nothing_is_published(desk: Desk) -> None:
    layout = desk.image()
    said = desk.run("publish", str(layout.folder), "--to", REPOSITORY, code=28)
    assert "cosign generate-key-pair" in said["error"]["fix"]
    assert not desk.tools[-1].log


def test_a_line_stands_for_the_image_that_was_built_of_it(desk: Desk) -> None:
    made = make_image(desk.project, desk.project / "dist" / "images" / "infernal")
    words = ("publish", "infernal", "--to", REPOSITORY, "--key", str(desk.key))
    assert desk.run(*words)["digest"] == made.digest


def test_a_line_without_an_image(desk: Desk) -> None:
    words = ("publish", "infernal", "--to", REPOSITORY, "--key", str(desk.key))
    assert "nox -s image -- infernal" in desk.run(*words, code=27)["error"]["fix"]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"digest": "0" * 64}, "publish", "another state of infernal"),
        ({"requirements": "0" * 64}, "publish", "another requirements.lock"),
        ({"line": "nosuch"}, "line", "nosuch"),
    ],
)
def test_an_image_of_another_state(
    desk: Desk, changes: dict[str, str], kind: str, said: str
) -> None:
    code = {"publish": 27, "line": 3}[kind]
    error = desk.publish(desk.image(**changes), code=code)["error"]
    assert error["kind"] == kind
    assert said in error["what"]
    assert not desk.memory.manifests


@pytest.mark.parametrize(
    "changes", [{"contents": "small"}, {"is_dirty": True}, {"source": ""}], ids=str
)
def test_what_is_for_tests_stays_on_this_machine(desk: Desk, changes: dict[str, Any]) -> None:
    layout = desk.image(**changes)
    words = ("publish", str(layout.folder), "--to", "ghcr.io/owner/vllm", "--key", str(desk.key))
    desk.run(*words, code=27)
    assert desk.publish(layout)["status"] == "published"


def test_another_platform(desk: Desk) -> None:
    layout = make_layout(desk.folder / "arm", architecture="arm64")
    assert "linux/amd64" in desk.publish(layout, code=25)["error"]["fix"]


def test_a_tag_that_is_gone_again_is_no_success(desk: Desk) -> None:
    """As where a registry forgets what it has acknowledged."""

    def forget(words: tuple[str, ...]) -> None:
        if words[:2] == ("oras", "resolve"):
            desk.memory.tags.clear()

    desk.before = forget
    assert "it names nothing" in desk.publish(desk.image(), code=27)["error"]["why"]
    assert desk.listed() == []


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours runs after it."""


def test_killed_before_any_step_it_is_simply_done_again(desk: Desk) -> None:
    """At each start of a program; the tag never names what isn't complete."""
    layout = desk.image()
    desk.publish(layout)
    steps = len(desk.tools[-1].log)
    for step in range(steps):
        vars(desk.memory).update(vars(Memory()))
        (desk.project / "images.toml").unlink(missing_ok=True)
        left = [step]

        def kill(words: tuple[str, ...], left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        desk.before = kill
        with pytest.raises(Killed):
            desk.publish(layout)
        complete = len(desk.memory.statements) == 2 and layout.digest in desk.memory.signatures
        assert complete or not desk.memory.tags, step
        assert desk.listed() == []
        desk.before = None
        tag = desk.publish(layout)["tag"]
        assert desk.memory.tags == {tag: layout.digest}
        assert desk.memory.signatures[layout.digest] == {("KEY", ""), ("KEY", tag)}
        assert len(desk.memory.statements) == 2
        assert desk.listed() == [(tag, layout.digest)]


def _wrong_bytes(layout: Layout) -> None:
    blob = max((layout.folder / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    blob.write_bytes(blob.read_bytes()[::-1])


def _two_manifests(layout: Layout) -> None:
    path = layout.folder / "index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "manifests": index["manifests"] * 2}))


def _missing_blob(layout: Layout) -> None:
    manifest = json.loads(layout.blob(layout.digest).read_bytes())
    layout.blob(manifest["layers"][0]["digest"]).unlink()


def _linked_blob(layout: Layout) -> None:
    blob = layout.blob(layout.digest)
    blob.rename(layout.folder / "elsewhere")
    blob.symlink_to(layout.folder / "elsewhere")


def _no_labels(layout: Layout) -> None:
    shutil.rmtree(layout.folder)
    make_layout(layout.folder)


@pytest.mark.parametrize(
    "spoil", [_wrong_bytes, _two_manifests, _missing_blob, _linked_blob, _no_labels]
)
def test_a_broken_layout(desk: Desk, spoil: Callable[[Layout], None]) -> None:
    layout = desk.image()
    spoil(layout)
    assert desk.publish(layout, code=25)["error"]["fix"]
    assert not desk.tools[-1].log


@pytest.mark.parametrize("date", ["2026", "20261301", "../../x", "-r1", "20261201-r9"])
def test_a_date_that_is_none(desk: Desk, date: str) -> None:
    desk.publish(desk.image(), f"--date={date}", code=25)
    assert not desk.tools[-1].log


# --- two publishers --------------------------------------------------------------------------


OTHER = "sha256:" + "e" * 64


def interfere(desk: Desk, at: str, nth: int = 1) -> None:
    """Another publisher sets the tag, unasked, before the ``nth`` start of ``at``."""
    left = [nth]

    def before(words: tuple[str, ...]) -> None:
        if " ".join(words[:2]) == at:
            left[0] -= 1
            if left[0] == 0:
                tags = [words[-1].rpartition(":")[2]] if at == "oras resolve" else [words[-1]]
                desk.memory.tags[tags[0]] = OTHER

    desk.before = before


@pytest.mark.parametrize(
    ("at", "nth"),
    [("oras resolve", 1), ("oras resolve", 2)],
    ids=["between looking and claiming", "after writing"],
)
def test_who_loses_a_race_is_told_and_offered_the_next(desk: Desk, at: str, nth: int) -> None:
    interfere(desk, at, nth)
    error = desk.publish(desk.image(), code=27)["error"]
    assert "another publisher" in error["what"]
    assert OTHER in error["why"]
    assert "-r2" in error["fix"]
    assert set(desk.memory.tags.values()) == {OTHER}
    assert desk.listed() == []


def test_who_loses_a_race_is_not_signed_under_that_tag(desk: Desk) -> None:
    interfere(desk, "oras resolve", 2)
    layout = desk.image()
    desk.publish(layout, code=27)
    assert desk.memory.signatures[layout.digest] == {("KEY", "")}


def test_next_goes_on_after_a_lost_race(desk: Desk) -> None:
    interfere(desk, "oras resolve", 2)
    layout = desk.image()
    said = desk.publish(layout, "--next")
    assert said["tag"].endswith("-r2")
    assert desk.memory.tags[said["tag"]] == layout.digest


def test_who_is_overwritten_before_it_was_told_of_success(desk: Desk) -> None:
    """It died between tag and list; another publisher, whose look was earlier, wrote since."""
    layout = desk.image()
    tag = desk.publish(layout)["tag"]
    (desk.project / "images.toml").unlink()  # so nobody was told
    interfere(desk, "oras resolve", 2)
    assert "another publisher" in desk.publish(layout, code=27)["error"]["what"]
    assert desk.memory.tags[tag] == OTHER


def test_a_slow_registry_can_not_make_a_claim_late(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading and writing no more time may pass than the others wait."""
    now = [0.0]
    monkeypatch.setattr(claiming.time, "monotonic", lambda: now[0])

    def slow(words: tuple[str, ...]) -> None:
        now[0] += 5

    tools = FakeTools(memory=desk.memory, before=slow)
    registry = Registry(repository=parse_repository(REPOSITORY), tools=tools)
    with pytest.raises(UnavailableError, match="took too long"):
        claim(registry, "tag", OTHER, settle=6)
    assert desk.memory.tags == {}


def test_a_claim_s_write_is_bounded_by_what_is_left_of_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[float] = []

    class Spy(FakeTools):
        def run(self, program: str, *argv: str | Path, **options: Any) -> Answer:
            limits.append(options["timeout"])
            return FakeTools.run(self, program, *argv)

    monkeypatch.setattr(claiming.time, "sleep", lambda seconds: limits.append(-seconds))
    registry = Registry(repository=parse_repository(REPOSITORY), tools=Spy(memory=Memory()))
    assert claim(registry, "tag", OTHER, settle=6).won
    _, write, wait, _ = limits
    assert 0 < write < 6
    assert wait == -6


# --- promote ---------------------------------------------------------------------------------


@pytest.fixture
def published(desk: Desk) -> tuple[Desk, str, Layout]:
    layout = desk.image()
    return desk, desk.publish(layout)["tag"], layout


def promote(desk: Desk, tag: str, alias: str, *, key: str = "KEY", code: int = 0) -> Any:
    public = desk.folder / "cosign.pub"
    public.write_text(key)
    return desk.run("promote", tag, alias, "--key", str(public), code=code)


def test_promote_moves_an_alias(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, layout = published
    said = promote(desk, tag, "infernal")
    assert (said["before"], said["digest"], said["moved"]) == ("", layout.digest, True)
    assert desk.memory.tags["infernal"] == layout.digest
    assert promote(desk, tag, "infernal")["moved"] is False
    other = desk.image("other", salt="o")
    second = desk.publish(other, "--next")["tag"]
    said = promote(desk, second, "infernal")
    assert (said["before"], said["digest"]) == (layout.digest, other.digest)


@pytest.mark.parametrize(
    ("alias", "said"),
    [
        ("latest!", "can't be an alias"),
        ("-latest", "can't be an alias"),
        ("Latest", "can't be an alias"),
        ("sha256-00.sig", "can't be an alias"),
        ("a" * 65, "can't be an alias"),
        (f"infernal-vllm2cf0a69-fie62941a-o0ad8b431-cu133-torch213-{DATE}-r1", "tags never move"),
        ("eldritch", "of the line eldritch"),
    ],
)
def test_no_alias(published: tuple[Desk, str, Layout], alias: str, said: str) -> None:
    desk, tag, _ = published
    (desk.project / "patches" / "eldritch").mkdir()
    (desk.project / "patches" / "eldritch" / "line.toml").write_text("")
    public = desk.folder / "cosign.pub"
    public.write_text("KEY")
    error = desk.run("promote", "--key", str(public), "--", tag, alias, code=27)["error"]
    assert said in error["what"]
    assert list(desk.memory.tags) == [tag]


def test_promote_wants_the_right_key(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, _ = published
    assert promote(desk, tag, "latest", key="OTHER", code=28)["error"]["kind"] == "signature"
    assert "latest" not in desk.memory.tags


def test_promote_wants_a_signature(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, _ = published
    desk.memory.signatures.clear()
    assert "isn't signed" in promote(desk, tag, "latest", code=28)["error"]["what"]
    assert "latest" not in desk.memory.tags


def test_promote_wants_what_is_signed_under_that_tag(published: tuple[Desk, str, Layout]) -> None:
    """Content of ours that never won this tag is no image of this tag."""
    desk, tag, layout = published
    desk.memory.signatures[layout.digest].remove(("KEY", tag))
    assert "not as" in promote(desk, tag, "latest", code=28)["error"]["what"]
    assert "latest" not in desk.memory.tags


@pytest.mark.parametrize("there", [None, OTHER])
def test_promote_notices_a_tag_that_was_moved(
    published: tuple[Desk, str, Layout], there: str | None
) -> None:
    desk, tag, _ = published
    desk.memory.tags.pop(tag)
    if there:
        desk.memory.tags[tag] = there
    assert "isn't what was published" in promote(desk, tag, "latest", code=27)["error"]["what"]


def test_promote_of_what_was_not_published(desk: Desk) -> None:
    error = promote(desk, "no-such-tag", "latest", code=27)["error"]
    assert "wasn't published" in error["what"]


# --- images ----------------------------------------------------------------------------------


def test_the_list_is_made_again_from_the_registry(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, _ = published
    promote(desk, tag, "infernal")
    other = desk.image("other", salt="o")
    desk.publish(other, "--next")
    path = desk.project / "images.toml"
    before = path.read_bytes()
    path.unlink()
    said = desk.run("images", "--from", REPOSITORY)
    assert [one["tag"] for one in said["images"]] == [tag, tag.replace("-r1", "-r2")]
    assert path.read_bytes() == before
    assert desk.run("images") == {**said, "skipped": []}


def test_a_tag_whose_labels_say_otherwise_is_not_listed(
    published: tuple[Desk, str, Layout],
) -> None:
    desk, tag, layout = published
    stranger = re.sub("-o[0-9a-f]{8}-", "-offffffff-", tag)
    desk.memory.tags[stranger] = layout.digest
    said = desk.run("images", "--from", REPOSITORY)
    assert [one["tag"] for one in said["images"]] == [tag]
    assert said["skipped"] == [stranger]


def test_a_moved_tag_is_an_alarm_and_not_a_new_entry(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, layout = published
    other = desk.image("other", salt="o")
    desk.publish(other, "--next")
    desk.memory.tags[tag] = other.digest
    before = (desk.project / "images.toml").read_bytes()
    error = desk.run("images", "--from", REPOSITORY, code=27)["error"]
    assert layout.digest in error["why"]
    assert (desk.project / "images.toml").read_bytes() == before


def entry(number: int = 1, **changes: Any) -> Published:
    plain: dict[str, Any] = {
        "repository": REPOSITORY, "tag": f"tag-{number}", "digest": sha256(b"%d" % number),
        "line": "infernal", "overlay": "0" * 64, "date": DATE, "size": number,
    }  # fmt: skip
    return Published(**{**plain, **changes})


def test_the_list_is_sorted_whatever_the_order(tmp_path: Path) -> None:
    for number in (2, 3, 1):
        record(tmp_path, [entry(number)])
    assert [one.tag for one in read_images(tmp_path)] == ["tag-1", "tag-2", "tag-3"]


def test_an_entry_is_never_changed(tmp_path: Path) -> None:
    record(tmp_path, [entry(1)])
    record(tmp_path, [entry(1)])
    with pytest.raises(PublishError, match="another digest"):
        record(tmp_path, [entry(1, digest=sha256(b"x"))])
    assert read_images(tmp_path) == (entry(1),)


@pytest.mark.parametrize(
    "text",
    [
        "format = 2\n",
        "format = 1\n[[image]]\n",
        "format = 1\nimage = 3\n",
        "<<<<<<< ours\n",
        'format = 1\n[[image]]\nrepository = "-x/y"\ntag = "t"\ndigest = "sha256:'
        + "0" * 64
        + '"\nline = "infernal"\noverlay = "'
        + "0" * 64
        + '"\ndate = "20261201"\nsize = 1\n',
    ],
)
def test_a_list_that_can_not_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "images.toml").write_text(text)
    with pytest.raises(PublishError, match=r"images\.toml can't be read"):
        read_images(tmp_path)


# --- image-diff ------------------------------------------------------------------------------


def test_the_same_image_has_no_difference(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, layout = published
    for other in (str(layout.folder), f"{REPOSITORY}@{layout.digest}", tag):
        said = desk.run("image-diff", str(layout.folder), other)
        assert [row for row in said["differences"] if row["kind"] != "package"] == []
        assert said["download_bytes"] == 0
        assert said["unknown"] == []


def test_what_changed_between_two_images(desk: Desk) -> None:
    old = desk.image("old")
    new = desk.image(
        "new", salt="s", torch="2.14.0", packages={"vllm": "0.28.0+infernal.o2", "idna": "3"},
        effects={"index-mapping": "0" * 40},
    )  # fmt: skip
    said = desk.run("image-diff", str(old.folder), str(new.folder))
    found = {(row["kind"], row["name"]): (row["before"], row["after"])
             for row in said["differences"]}  # fmt: skip
    assert found[("label", "torch")] == ("2.13.0", "2.14.0")
    assert found[("package", "pypi/vllm")] == ("0.28.0+infernal.o1", "0.28.0+infernal.o2")
    assert found[("package", "pypi/idna")] == ("", "3")
    assert found[("package", "pypi/pyyaml")] == ("6.0", "")
    patches = [name for kind, name in found if kind == "patch"]
    assert patches == ["vllm/index-mapping"]
    assert [kind for kind, _ in found].count("layer") == 2
    last = json.loads(new.blob(new.digest).read_bytes())["layers"][-1]["size"]
    assert said["download_bytes"] == last
    assert said["shared_bytes"] > 0


def test_patches_that_came_and_went(desk: Desk) -> None:
    old = desk.image("old")
    labels = read_labels(read_layout(old.folder).labels)
    fewer = msgspec.structs.replace(labels.vllm, patches=(*labels.vllm.patches[1:], "brand-new"))
    new = desk.image("new", vllm=fewer)
    said = desk.run("image-diff", str(old.folder), str(new.folder))
    patches = [row for row in said["differences"] if row["kind"] == "patch"]
    assert [(row["name"], row["before"], row["after"]) for row in patches] == [
        (f"vllm/{labels.vllm.patches[0]}", "there", ""),
        ("vllm/brand-new", "", "there"),
    ]


def test_what_nobody_says_is_not_compared(published: tuple[Desk, str, Layout]) -> None:
    desk, tag, layout = published
    desk.memory.statements.clear()
    said = desk.run("image-diff", str(layout.folder), tag)
    assert len(said["unknown"]) == 2
    assert said["differences"] == []


def test_no_such_image(desk: Desk) -> None:
    assert "no such image" in desk.run(
        "image-diff", f"{REPOSITORY}:x", f"{REPOSITORY}:y", code=27
    )["error"]["what"]  # fmt: skip


# --- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "-h/x", "--to-plain-http/x", "host/x", "owner/name", "ghcr.io", "ghcr.io/",
        "ghcr.io/Owner/name", "GHCR.io/owner", "ghcr.io/a/../b", "ghcr.io/./b", "ghcr.io//b",
        "ghcr.io/a:tag", "ghcr.io/a@sha256:" + "0" * 64, "https://ghcr.io/a", "ghcr.io:99999/a",
        "ghcr.io:0/a", "ghcr.io:x/a", "ghcr.io/a b", "ghcr.io/a\n", "user:secret@ghcr.io/a",
        "ghcr.io/" + "a" * 300, "ghcr.io/a?b", "ghcr.io/-a", "ghcr..io/a", "[::1/a",
    ],
)  # fmt: skip
def test_no_repository(text: str) -> None:
    with pytest.raises(PublishError) as caught:
        parse_repository(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("ghcr.io/owner/vllm", False),
        ("localhost/a", True),
        ("localhost:5000/a", True),
        ("127.0.0.1:5000/a/b-c__d.e", True),
        ("[::1]:5000/a", True),
        ("127.0.0.1.example.com/a", False),
        ("localhost.example.com:5000/a", False),
        ("10.0.0.1:5000/a", False),
    ],
)
def test_plain_http_is_for_this_machine(text: str, plain: bool) -> None:
    assert parse_repository(text).plain_http is plain
    assert str(parse_repository(text)) == text
    assert parse_repository(text, insecure=True).plain_http is True


# --- programs --------------------------------------------------------------------------------


def script(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that comes first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def test_a_program_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError) as caught:
        Tools().run("cosign", "version")
    assert "package 'cosign'" in caught.value.fix


def test_a_slow_program_is_stopped_with_its_children(path: Path, tmp_path: Path) -> None:
    script(
        path, "oras", f"sh -c 'sleep 60; touch {tmp_path}/alive' & echo $! > {tmp_path}/pid; wait"
    )
    with pytest.raises(UnavailableError, match="got no end"):
        Tools().run("oras", "cp", timeout=0.5)
    child = int((tmp_path / "pid").read_text())
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_secrets_are_given_to_one_program_and_never_said(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "of-the-user")
    monkeypatch.setenv("COSIGN_REPOSITORY", "elsewhere.example/x")
    script(path, "oras", "env")
    script(path, "cosign", "env")
    said = Tools().run("oras", "x").out.decode()
    assert "of-the-user" not in said
    assert "elsewhere" not in said
    said = Tools().run("cosign", "x", secrets={"COSIGN_PASSWORD": "given"}).out.decode()
    assert "COSIGN_PASSWORD=given" in said
    assert "elsewhere" not in said


def test_what_a_program_says_is_quoted_without_secrets(path: Path) -> None:
    script(
        path, "oras",
        "printf 'Get https://me:hunter2@r.example/x?sig=TOPSECRET: Authorization: Bearer "
        "abcdefghijk.lmn\\033[31m\\n' >&2; exit 1",
    )  # fmt: skip
    said = Tools().run("oras", "x").said
    assert "r.example/x" in said
    for secret in ("hunter2", "TOPSECRET", "abcdefghijk", "\033"):
        assert secret not in said


@pytest.mark.parametrize(
    ("said", "kind", "fix"),
    [
        ("response status code 507: Insufficient Storage", UnavailableError, "no room"),
        ("basic credential not found", PublishError, "oras login r.example"),
        ("denied: requested access", PublishError, "oras login r.example"),
        ("response status code 403: Forbidden", PublishError, "oras login r.example"),
        ("toomanyrequests: slow down", UnavailableError, "fewer requests"),
        ("http: server gave HTTP response to HTTPS client", PublishError, "--insecure"),
        ("x509: certificate signed by unknown authority", UnavailableError, "certificate"),
        ("response status code 500: Internal", UnavailableError, "its log"),
        ("dial tcp 1.2.3.4:443: connect: connection refused", UnavailableError, "is up"),
        ("something new", PublishError, "says"),
    ],
)
def test_each_fault_says_what_to_do(path: Path, said: str, kind: type[Exception], fix: str) -> None:
    script(path, "oras", f"echo 'Error: {said}' >&2; exit 1")
    registry = Registry(repository=parse_repository("r.example/a"), tools=Tools())
    for ask in (registry.tags, lambda: registry.digest("t")):
        with pytest.raises(kind) as caught:
            ask()
        assert fix in caught.value.fix  # type: ignore[attr-defined]


def test_a_refusal_is_never_taken_for_a_free_tag(path: Path) -> None:
    """oras says 'recognizable error message not found' of answers without a body."""
    script(
        path, "oras",
        "echo 'recognizable error message not found: HEAD \"http://r/v2/a/manifests/t\": "
        "response status code 403: Forbidden' >&2; exit 1",
    )  # fmt: skip
    registry = Registry(repository=parse_repository("r.example/a"), tools=Tools())
    with pytest.raises(PublishError):
        registry.digest("t")


@pytest.mark.parametrize("answer", ["sha256:xyz", "", "-rf", "sha512:" + "0" * 128])
def test_a_digest_that_is_none(path: Path, answer: str) -> None:
    script(path, "oras", f"echo '{answer}'")
    registry = Registry(repository=parse_repository("r.example/a"), tools=Tools())
    with pytest.raises(PublishError, match="no digest"):
        registry.digest("t")


def test_another_image_than_asked_for() -> None:
    memory = Memory(manifests={OTHER: b"{}"})
    registry = Registry(repository=parse_repository(REPOSITORY), tools=FakeTools(memory=memory))
    with pytest.raises(PublishError, match="gave other bytes"):
        registry.image(OTHER)
