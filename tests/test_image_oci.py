"""OCI layouts as data: digests, whiteouts, and what no layer of ours would hold."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import ImageError
from overlay.images import oci
from overlay.images.oci import read_layout
from tests.support.layouts import make_layout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


def seen(folder: Path, under: str = "") -> dict[str, bytes]:
    """Content of every file of the one image of a layout."""
    found = read_layout(folder).files(under)
    return {entry.path: entry.read() for entry in found if entry.kind == "file"}


def test_layers_are_merged_top_down(tmp_path: Path) -> None:
    layout = make_layout(
        tmp_path / "a",
        [{"etc/a": b"1", "etc/b": b"1", "usr/x/y": b"1"}, {"etc/a": b"2"}],
        labels={"k": "v"},
    )
    image = read_layout(layout.folder)
    assert image.digest == layout.digest
    assert image.labels == {"k": "v"}
    assert seen(layout.folder) == {"etc/a": b"2", "etc/b": b"1", "usr/x/y": b"1"}
    assert seen(layout.folder, "etc") == {"etc/a": b"2", "etc/b": b"1"}
    assert seen(layout.folder, "et") == {}


@pytest.mark.parametrize(
    ("upper", "left"),
    [
        ({"d/.wh.a": b""}, {"d/b", "d/e/c"}),
        ({"d/.wh.e": b""}, {"d/a", "d/b"}),
        ({".wh.d": b""}, set()),
        ({"d/.wh..wh..opq": b"", "d/new": b""}, {"d/new"}),
        ({"d/.wh.a": b"", "d/a": b"again"}, {"d/a", "d/b", "d/e/c"}),  # the lower one alone goes
        ({"d/e": b"now a file"}, {"d/a", "d/b", "d/e"}),
        ({"d": b"now a file"}, {"d"}),
    ],
)
def test_whiteouts_hide_lower_layers(
    tmp_path: Path, upper: Mapping[str, bytes], left: set[str]
) -> None:
    lower = {"d/a": b"1", "d/b": b"2", "d/e/c": b"3"}
    layout = make_layout(tmp_path / "a", [lower, upper])
    assert set(seen(layout.folder)) == left


def test_a_whiteout_hides_through_all_lower_layers(tmp_path: Path) -> None:
    layout = make_layout(
        tmp_path / "a", [{"d/a": b"1"}, {"d/b": b"1"}, {".wh.d": b""}, {"d/c": b""}]
    )
    assert set(seen(layout.folder)) == {"d/c"}


def test_a_changed_layer_is_refused(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "a")
    path = read_layout(layout.folder).layers[0].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ImageError, match="other content than its digest"):
        read_layout(layout.folder)


@pytest.mark.parametrize("which", ["manifest", "config"])
def test_a_changed_document_is_refused(tmp_path: Path, which: str) -> None:
    layout = make_layout(tmp_path / "a", labels={"key": "value"})
    image = read_layout(layout.folder)
    digest = image.digest if which == "manifest" else image.manifest["config"]["digest"]
    path = layout.blob(digest)
    path.write_bytes(path.read_bytes().replace(b"linux", b"linus").replace(b": 2", b": 3"))
    with pytest.raises(ImageError, match="other content than its digest"):
        read_layout(layout.folder)


def test_a_missing_or_short_blob_is_refused(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "a")
    path = read_layout(layout.folder).layers[0].path
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ImageError, match="size"):
        read_layout(layout.folder)
    path.unlink()
    with pytest.raises(ImageError, match="lacks the blob"):
        read_layout(layout.folder)


def test_a_layer_that_unpacks_to_something_else_is_refused(tmp_path: Path) -> None:
    first, second = (make_layout(tmp_path / n, [{"a": n.encode()}]) for n in ("a", "b"))
    image, other = read_layout(first.folder), read_layout(second.folder)
    swapped = oci.Image(
        folder=image.folder, digest=image.digest, manifest=image.manifest, config=image.config,
        layers=(
            oci.Layer(
                digest=image.layers[0].digest, diff_id=other.layers[0].diff_id,
                size=image.layers[0].size, media_type=image.layers[0].media_type,
                path=image.layers[0].path,
            ),
        ),
    )  # fmt: skip
    with pytest.raises(ImageError, match="unpacks to something else"):
        list(swapped.files())


@pytest.mark.parametrize("name", ["../x", "a/../../x", "/etc/passwd"])
def test_a_member_outside_of_the_image_is_refused(tmp_path: Path, name: str) -> None:
    layout = make_layout(tmp_path / "a", [{name: b""}])
    with pytest.raises(ImageError, match="outside of the image"):
        seen(layout.folder)


def test_a_path_twice_in_a_layer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(files: Mapping[str, bytes]) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for name in [*files, *(f"./{name}" for name in files)]:
                archive.addfile(tarfile.TarInfo(name))
        return out.getvalue()

    monkeypatch.setattr("tests.support.layouts._tar", twice)
    layout = make_layout(tmp_path / "a", [{"etc/a": b""}])
    with pytest.raises(ImageError, match="twice"):
        seen(layout.folder)


def test_another_platform_is_refused(tmp_path: Path) -> None:
    layout = make_layout(tmp_path / "a", architecture="arm64")
    with pytest.raises(ImageError, match="linux/arm64"):
        read_layout(layout.folder)


def edited(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["manifests"][0] |= changes
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "changes",
    [
        {"digest": "sha256:../../../etc/passwd"},
        {"digest": "md5:00"},
        {"size": -1},
        {"platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": None},
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    layout = make_layout(tmp_path / "a")
    edited(layout.folder, **changes)
    with pytest.raises(ImageError):
        read_layout(layout.folder)


def test_a_folder_that_is_no_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="no OCI layout"):
        read_layout(tmp_path)
