"""A line's folder: what is read, and that every mistake is named with file, key and remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from overlay.errors import LineError, PatchError
from overlay.lines.line import find_lines, read_line, series_names

if TYPE_CHECKING:
    from pathlib import Path

SHA = "a" * 64
LINE = f"""
format = 1
summary = "One line"
python = ["3.11", "3.12"]
torch = "2.13.0"
cuda = "13.3.1"
architectures = ["12.0a"]

[requirements.flashinfer-python]
upstream = "==0.6.16"
line = "==0.6.18rc10"

[vllm]
version = "0.28.0"
repository = "https://forge.invalid/vllm.git"
commit = "{"b" * 40}"
tree = "{"c" * 40}"

[vllm.sdist]
file = "vllm-0.28.0.tar.gz"
sha256 = "{SHA}"

[vllm.wheel]
file = "vllm-0.28.0-py3-none-any.whl"
sha256 = "{SHA}"

[flashinfer]
version = "0.6.18rc10"
repository = "https://forge.invalid/flashinfer.git"
abbreviation = "4ba787ec9"
sources = ["archive"]

[flashinfer.sdist]
file = "flashinfer_python-0.6.18rc10.tar.gz"
sha256 = "{SHA}"

[flashinfer.wheel]
file = "flashinfer_python-0.6.18rc10-py3-none-any.whl"
sha256 = "{SHA}"
"""
PATCH = """From: A <a@b.invalid>
Date: Mon, 30 Nov 2026 12:00:00 +0000
Subject: [PATCH] change

Why.

{trailers}
---
diff --git a/f b/f
--- a/f
+++ b/f
@@ -1 +1 @@
-1
+2
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "patches" / "eldritch"
    (folder / "vllm").mkdir(parents=True)
    (folder / "line.toml").write_text(LINE)
    return tmp_path / "patches"


def put(root: Path, series: str | bytes, **patches: str) -> None:
    folder = root / "eldritch" / "vllm"
    (folder / "series").write_bytes(series if isinstance(series, bytes) else series.encode())
    for name, trailers in patches.items():
        text = PATCH.format(trailers=trailers)
        (folder / f"{name}.patch").write_text(text)


def refused(root: Path, name: str = "eldritch") -> LineError:
    with pytest.raises(LineError) as caught:
        read_line(root, name)
    return caught.value


def test_good_line(root: Path) -> None:
    put(
        root, "# first things first\none.patch\n\n  two.patch  # why\n", one="", two="Requires: one"
    )
    line = read_line(root, "eldritch")
    assert line.pin("vllm").commit_text == "b" * 40
    assert line.pin("vllm").sources == ("archive", "git")
    assert line.pin("flashinfer").commit_text == "4ba787ec9"
    assert [patch.name for patch in line.series["vllm"]] == ["one", "two"]
    assert line.series["flashinfer"] == ()
    assert line.patch("two") == ("vllm", line.series["vllm"][1])
    assert line.patch("vllm/two.patch") == line.patch("two")
    assert find_lines(root) == ["eldritch"]


@pytest.mark.parametrize(
    ("old", "new", "expected", "fix"),
    [
        ("torch =", "torhc =", "torhc", "did you mean 'torch'?"),
        ("[vllm.sdist]\nfile", "[vllm.sdist]\nfiel", "vllm.sdist", "did you mean 'file'?"),
        ("tree =", "colour =", "vllm: ", "known: version"),
        ('cuda = "13.3.1"', "cuda = 13.3", "cuda: expected `str`", ""),
        ('cuda = "13.3.1"', "", "top level: object missing required field `cuda`", ""),
        ("[vllm.wheel]", "[vllm.weel]", "vllm", "did you mean 'wheel'?"),
        ('python = ["3.11", "3.12"]', 'python = "3.11"', "python: expected `array`", ""),
        ('"3.12"]', '"3.x"]', "python[1]", ""),
        ("format = 1", "format = 2", "format: invalid enum value 2", ""),
        (f'sha256 = "{SHA}"', f'sha256 = "{SHA[1:]}"', "vllm.sdist.sha256", ""),
        (f'sha256 = "{SHA}"', f'sha256 = "{SHA.upper()}"', "vllm.sdist.sha256", ""),
        (f'sha256 = "{SHA}"', f'sha256 = "{SHA}\\n"', "vllm.sdist.sha256", ""),
        ('commit = "b', 'commit = "', "vllm.commit", ""),
        ('tree = "c', 'tree = "x', "vllm.tree", ""),
        ('"4ba787ec9"', '"4ba"', "flashinfer.abbreviation", ""),
        ("abbreviation =", "# abbreviation =", "flashinfer: say either 'commit'", ""),
        ('sources = ["archive"]', "", "flashinfer: 'sources' offers git", ""),
        ('sources = ["archive"]', "sources = []", "flashinfer: 'sources' must name", ""),
        ('"https://forge.invalid/vllm.git"', '"--upload-pack=x"', "vllm.repository", ""),
        ('"https://forge.invalid/vllm.git"', '"ext::sh -c x"', "vllm.repository", ""),
        ('"vllm-0.28.0.tar.gz"', '"../vllm.tar.gz"', "vllm.sdist.file", ""),
        ('"==0.6.18rc10"', '"==0.6.17"', "must be '==0.6.18rc10'", ""),
        ("format = 1", "format = ", "is no TOML", ""),
        ("format = 1", "format = 1\nformat = 1", "is no TOML", ""),
    ],
)
def test_mistakes_in_line_toml(root: Path, old: str, new: str, expected: str, fix: str) -> None:
    assert old in LINE
    (root / "eldritch" / "line.toml").write_text(LINE.replace(old, new, 1))
    error = refused(root)
    assert error.what.startswith("eldritch/line.toml")
    assert expected in error.what
    assert fix in error.fix


@pytest.mark.parametrize("data", [b"\xff", b"summary = '\xe4'\n", b"\0", b"x\n" * 3])
def test_line_toml_that_is_none(root: Path, data: bytes) -> None:
    (root / "eldritch" / "line.toml").write_bytes(data)
    assert "eldritch/line.toml is no TOML" in refused(root).what


@pytest.mark.parametrize("name", ["eldrich", "", "..", "../patches/eldritch", "Eldritch", "a b"])
def test_no_such_line(root: Path, name: str) -> None:
    error = refused(root, name)
    assert f"there is no line {name!r}" in error.what
    assert "eldritch" in error.fix


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ("one.patch\nmissing.patch\n", "vllm/series:2: can't read missing.patch: No such file"),
        ("one.patch\n\none.patch\n", "vllm/series:3: one.patch is listed already, at line 1"),
        ("one.patch -p0\n", "vllm/series:1: 'one.patch -p0' is no file name"),
        ("one\n", "vllm/series:1: 'one' is no file name"),
        ("../one.patch\n", "vllm/series:1: '../one.patch' is no file name"),
        ("One.patch\n", "vllm/series:1: 'One.patch' is no file name"),
        ("one.patch#no comment\n", "vllm/series:1: 'one.patch#no comment' is no file name"),
        (b"\xff.patch\n", "vllm/series is not UTF-8 (byte 0)"),
        (b"\xef\xbb\xbfone.patch\n", "vllm/series:1:"),
    ],
)
def test_mistakes_in_series(root: Path, series: str | bytes, expected: str) -> None:
    put(root, series, one="")
    assert refused(root).what.startswith(expected)


def test_series_with_crlf(root: Path) -> None:
    put(root, "# x\r\none.patch\r\ntwo.patch # y\r\n", one="", two="")
    names = list(series_names(root / "eldritch" / "vllm" / "series"))
    assert names == [("one", 2), ("two", 3)]


def test_requires(root: Path) -> None:
    put(root, "one.patch\ntwo.patch\n", one="Requires: two", two="")
    error = refused(root)
    assert "vllm/one: 'Requires: two' comes later in the series" in error.what
    put(root, "one.patch\ntwo.patch\n", one="", two="Requires: one, oen")
    error = refused(root)
    assert "vllm/two: 'Requires: oen' names no patch of the series" in error.what
    assert error.fix == "did you mean 'one'?"
    put(root, "one.patch\n", one="Requires: one")
    assert "one" in refused(root).what


def test_a_malformed_patch_is_named(root: Path) -> None:
    put(root, "one.patch\n")
    (root / "eldritch" / "vllm" / "one.patch").write_bytes(b"")
    with pytest.raises(PatchError, match="one"):
        read_line(root, "eldritch")


def test_no_such_patch(root: Path) -> None:
    put(root, "one.patch\n", one="")
    with pytest.raises(LineError) as caught:
        read_line(root, "eldritch").patch("oen")
    assert "line eldritch has no patch 'oen'" in caught.value.what
    assert caught.value.fix == "did you mean 'one'?"
