"""Tags: made from a line, read back, the fork's too; nothing else is taken for one."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import ImageError
from overlay.images.tag import MAX_LENGTH, Tag, make_tag, parse_tag
from overlay.lines.line import read_line

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

FORKS = "infernal-invocation-vllmd6cf36a-b12xf6dc512-fi1ac6942-cu133-torch213-20260827-r21"
OURS = "infernal-vllm2cf0a69-fie62941a-o0ad8b431-cu133-torch213-20261201-r1"

HEX7, HEX8 = (st.text("0123456789abcdef", min_size=n, max_size=n) for n in (7, 8))
VERSIONS = r"(0|[1-9][0-9]?)(\.(0|[1-9][0-9]?)){1,2}(rc[1-9])?(\.post[1-9])?"
PACKAGES = st.lists(
    st.tuples(
        st.sampled_from(["b12x", "lmcache", "instanttensor", "nvidia-x", "a-b-c"]),
        st.from_regex(VERSIONS, fullmatch=True),
    ),
    max_size=2, unique_by=lambda one: one[0],
).map(tuple)  # fmt: skip
TAGS = st.builds(
    Tag,
    codename=st.from_regex(r"[a-z][a-z0-9]{0,11}", fullmatch=True),
    vllm=HEX7, flashinfer=HEX7, packages=PACKAGES, digest=HEX8,
    cuda=st.sampled_from(["130", "133", "1310"]), torch=st.sampled_from(["211", "213"]),
    date=st.dates(date(2020, 1, 1), date(2099, 1, 1)).map(lambda d: d.strftime("%Y%m%d")),
    revision=st.integers(1, 999_999),
)  # fmt: skip


@given(TAGS)
def test_what_is_written_is_read_back(tag: Tag) -> None:
    if len(str(tag)) <= MAX_LENGTH:
        assert parse_tag(str(tag)) == tag
    else:
        with pytest.raises(ImageError, match="characters"):
            parse_tag(str(tag))


def test_the_forks_tags_are_read_and_its_trees_told_from_commits() -> None:
    tag = parse_tag(FORKS)
    assert str(tag) == FORKS
    assert tag.codename == "infernal-invocation"
    assert tag.is_forks
    assert tag.packages == (("b12x", "f6dc512"),)
    assert tag.meanings == {"vllm": "tree", "flashinfer": "commit", "b12x": "tree"}


def test_ours_have_commits_and_a_digest() -> None:
    tag = parse_tag(OURS)
    assert (tag.vllm, tag.digest, tag.revision, tag.is_forks) == ("2cf0a69", "0ad8b431", 1, False)
    assert tag.meanings == {"vllm": "commit", "flashinfer": "commit", "digest": "digest"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "latest",
        OURS.replace("r1", "r0"),
        OURS.replace("20261201", "20261301"),
        OURS.replace("20261201", "20260230"),
        OURS.replace("vllm2cf0a69", "vllm2cf0a6"),
        OURS.replace("o0ad8b431", "o0ad8b43g"),
        OURS + "\n",
        "-" + OURS,
        OURS.replace("infernal", "Infernal"),
        OURS.replace("-o0", "-b12x-o0"),
        OURS.replace("-o0", "-b12x1.05-o0"),  # not the version's normal form
        f"{OURS}/../x",
        FORKS.replace("-fi1ac6942", ""),
    ],
)
def test_what_is_no_tag_is_refused(text: str) -> None:
    with pytest.raises(ImageError):
        parse_tag(text)


def test_a_tag_is_made_from_a_line(tiny: Tiny) -> None:
    line = read_line(tiny.patches, "tiny")
    tag = make_tag(line, "ab" * 32, date="20261201", revision=3, packages=[("b12x", "1.5.1")])
    commit = line.settings.vllm.commit_text[:7]
    assert str(tag).startswith(f"tiny-vllm{commit}-fi")
    assert str(tag).endswith("-b12x1.5.1-oabababab-cu133-torch213-20261201-r3")


@pytest.mark.parametrize("package", [("a1b", "2"), ("b12x", "1.0+cu13"), ("x", "1!2")])
def test_a_package_that_could_not_be_read_back_is_refused(
    tiny: Tiny, package: tuple[str, str]
) -> None:
    with pytest.raises(ImageError):
        make_tag(
            read_line(tiny.patches, "tiny"), "ab" * 32,
            date="20261201", revision=1, packages=[package],
        )  # fmt: skip


def test_a_tag_longer_than_docker_takes_is_refused(tiny: Tiny) -> None:
    packages = [(f"package-{'x' * 60}", "1.2.3"), ("lmcache", "0.4.1")]
    with pytest.raises(ImageError, match="characters"):
        make_tag(
            read_line(tiny.patches, "tiny"), "ab" * 32,
            date="20261201", revision=1, packages=packages,
        )  # fmt: skip


def test_the_verb_makes_and_reads(run: Callable[..., Ran]) -> None:
    assert run("lock", "tiny").code == 0
    made = run("tag", "tiny", "--date", "20261201", "--revision", "2", "--json")
    assert made.code == 0
    read = run("tag", "--read", made.json["tag"], "--json")
    assert (read.json["codename"], read.json["revision"]) == ("tiny", 2)
    assert run("tag", "--read", FORKS, "--json").json["meanings"]["vllm"] == "tree"
    assert run("tag", "--read", "latest").code == 25
