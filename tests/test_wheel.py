from __future__ import annotations

import errno
import io
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlay.errors import MachineError, OverlayError, SourceError, WheelError
from overlay.report import Reporter
from overlay.wheels import distinfo, rawzip, wheel
from overlay.wheels.wheel import Change, flashinfer_build_meta, overlay_wheel, vllm_version_file
from tests.support.wheels import (
    canonical,
    info_files,
    make_wheel,
    record_line,
    record_text,
    sha256,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
RECORD = canonical({})
VERSION = distinfo.overlay_version("0.28.0", RECORD)
INFO = f"vllm-{VERSION}.dist-info"
FILES = {
    "vllm/__init__.py": b"x = 1\n" * 100,
    "vllm/run.sh": b"#!/bin/sh\n",
    "vllm/a, b.txt": b"a comma and a space\n",
    "vllm/empty": b"",
    "vllm/stored.bin": bytes(range(256)),
    "vllm/ünïcode.py": b"u = 1\n",
    "vllm/big.so": os.urandom(rawzip._CHUNK + 4321) + b"0" * 10000,
}


def build(base: Path, out: Path, **kw: Any) -> Path:
    arguments: dict[str, Any] = {
        "version": VERSION,
        "changes": [],
        "requirements": {},
        "record": RECORD,
        "report": Reporter(quiet=True),
        **kw,
    }
    return overlay_wheel(base, arguments.pop("sha256", None) or sha256(base), out, **arguments)


def content(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def check_record(path: Path) -> None:
    """RECORD lists all members in order, with hash and size by the standard library."""
    files = content(path)
    own = f"{INFO}/RECORD"
    lines = [record_line(name, data) for name, data in files.items() if name != own]
    assert files[own] == record_text([*lines, (own, "", "")])


def refusal(error: type[OverlayError], base: Path, tmp_path: Path, **kw: Any) -> str:
    out = tmp_path / "out"
    with pytest.raises(error) as caught:
        build(base, out, **kw)
    assert not out.exists() or list(out.iterdir()) == [], "something half-written is left"
    return str(caught.value)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, FILES)


# --- what comes out


def test_an_overlay_of_nothing_keeps_content_order_and_modes(base: Path, tmp_path: Path) -> None:
    result = build(base, tmp_path / "out")
    assert result.name == f"vllm-{VERSION}-py3-none-any.whl"
    files = content(result)
    assert list(files) == [
        *FILES,
        *(f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "licenses/LICENSE", "overlay.json")),
        f"{INFO}/RECORD",
    ]
    assert {name: files[name] for name in FILES} == FILES
    assert files[f"{INFO}/overlay.json"] == RECORD
    check_record(result)
    with zipfile.ZipFile(result) as archive:
        assert archive.testzip() is None
        infos = {info.filename: info for info in archive.infolist()}
    assert {info.date_time for info in infos.values()} == {(1980, 1, 1, 0, 0, 0)}
    assert infos["vllm/run.sh"].external_attr >> 16 == 0o100755
    assert infos["vllm/__init__.py"].external_attr >> 16 == 0o100644
    # copied as they are, not recompressed; what is ours is stored
    assert infos["vllm/__init__.py"].compress_type == zipfile.ZIP_DEFLATED
    assert infos[f"{INFO}/RECORD"].compress_type == zipfile.ZIP_STORED


def test_changes_stand_where_they_belong(base: Path, tmp_path: Path) -> None:
    changes = [
        Change(path="vllm/z/added.py", data=b"z\n"),
        Change(path="vllm/__init__.py", data=b"x = 2\n", mode=0o100755),
        Change(path="vllm/empty", data=None),
        Change(path="vllm/a/added.py", data=b"a\n"),
        Change(path="vllm/run.sh", data=b"", mode=0o100644),
    ]
    result = build(base, tmp_path / "out", changes=changes)
    names = [name for name in content(result) if not name.startswith(INFO)]
    assert names == [
        *(name for name in FILES if name != "vllm/empty"),
        "vllm/a/added.py",
        "vllm/z/added.py",
    ]
    assert content(result)["vllm/__init__.py"] == b"x = 2\n"
    check_record(result)
    with zipfile.ZipFile(result) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert (modes["vllm/__init__.py"], modes["vllm/run.sh"]) == (0o100755, 0o100644)


def test_the_order_of_changes_is_of_no_account(base: Path, tmp_path: Path) -> None:
    changes = [Change(path=f"vllm/{name}.py", data=name.encode()) for name in "bca"]
    one = build(base, tmp_path / "one", changes=changes)
    two = build(base, tmp_path / "two", changes=changes[::-1])
    assert one.read_bytes() == two.read_bytes()


_AGAIN = """
import os, sys
from pathlib import Path
from overlay.report import Reporter
from overlay.wheels.wheel import Change, overlay_wheel
base, digest, out, version, record = sys.argv[1:]
os.umask(int(os.environ["MASK"], 8))
overlay_wheel(Path(base), digest, Path(out), version=version, record=record.encode(),
    changes=[Change(path="vllm/__init__.py", data=b"x = 2\\n"),
             Change(path="vllm/new.py", data=b"n\\n")],
    requirements={"torch": "torch==2.13.0+cpu", "lark": "lark"}, report=Reporter(quiet=True))
"""


def test_the_same_bytes_in_any_environment(base: Path, tmp_path: Path) -> None:
    digests = set()
    for number, env in enumerate(
        (
            {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1", "MASK": "022"},
            {"TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2", "MASK": "077"},
            {"SOURCE_DATE_EPOCH": "1", "PYTHONHASHSEED": "3", "MASK": "000", "PYTHONUTF8": "1"},
        )
    ):
        out = tmp_path / str(number)
        argv = (sys.executable, "-c", _AGAIN, str(base), sha256(base), str(out), VERSION, RECORD)
        subprocess.run(argv, check=True, env={"PYTHONPATH": str(ROOT), **env})
        (result,) = out.iterdir()
        digests.add(sha256(result))
        assert stat.S_IMODE(result.stat().st_mode) == 0o666 & ~int(env["MASK"], 8)
    assert len(digests) == 1
    check_record(result)


def test_pip_installs_it_and_agrees_with_its_record(base: Path, tmp_path: Path) -> None:
    result = build(base, tmp_path / "out", changes=[Change(path="vllm/new.py", data=b"n = 1\n")])
    site = tmp_path / "site"
    argv = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet")
    subprocess.run((*argv, "--target", str(site), str(result)), check=True)
    for line in (site / INFO / "RECORD").read_text("utf-8").splitlines():
        assert line.count(",") >= 2
    rows = distinfo.read_record((site / INFO / "RECORD").read_bytes(), "installed")
    assert {*FILES, "vllm/new.py", f"{INFO}/overlay.json"} <= rows.keys()
    for name, row in rows.items():
        if row.hash:
            assert distinfo.row(name, (site / name).read_bytes()) == row
    assert os.access(site / "vllm/run.sh", os.X_OK)


TEXT = st.text("abyz_0ü", min_size=1, max_size=8)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    before=st.dictionaries(TEXT, st.binary(max_size=300), min_size=1, max_size=6),
    after=st.dictionaries(TEXT, st.none() | st.binary(max_size=300), max_size=6),
)
def test_any_change_of_any_wheel_round_trips(
    before: dict[str, bytes], after: dict[str, bytes | None], tmp_path: Path
) -> None:
    base = make_wheel(tmp_path, {f"vllm/{name}": data for name, data in before.items()})
    changes = [
        Change(path=f"vllm/{name}", data=data)
        for name, data in after.items()
        if data is not None or name in before
    ]
    result = build(base, tmp_path / "out", changes=changes)
    expected = {f"vllm/{name}": data for name, data in before.items()}
    for change in changes:
        expected.pop(change.path, None)
        if change.data is not None:
            expected[change.path] = change.data
    files = content(result)
    assert {name: data for name, data in files.items() if not name.startswith(INFO)} == expected
    check_record(result)


def test_rewrites_see_the_changed_content_and_keep_the_mode(base: Path, tmp_path: Path) -> None:
    result = build(
        base,
        tmp_path / "out",
        changes=[Change(path="vllm/run.sh", data=b"new", mode=0o100755)],
        rewrites={"vllm/run.sh": lambda data: data + b"!", "vllm/empty": lambda _: b"full"},
    )
    files = content(result)
    assert (files["vllm/run.sh"], files["vllm/empty"]) == (b"new!", b"full")
    with zipfile.ZipFile(result) as archive:
        assert archive.getinfo("vllm/run.sh").external_attr >> 16 == 0o100755
    assert "no vllm/none" in refusal(
        WheelError, base, tmp_path / "x", rewrites={"vllm/none": lambda data: data}
    )


def test_only_version_and_named_requirements_change_in_metadata(base: Path, tmp_path: Path) -> None:
    wanted = {"flashinfer-python": "flashinfer-python==0.6.18rc10+x", "lark": "lark==1"}
    files = content(build(base, tmp_path / "out", requirements=wanted))
    before = info_files()["vllm-0.28.0.dist-info/METADATA"].decode()
    expected = (
        before.replace("\nVersion: 0.28.0\n", f"\nVersion: {VERSION}\n")
        .replace("Flashinfer_Python==0.6.16.post3", "flashinfer-python==0.6.18rc10+x")
        .replace("lark[all]<2,>=1.2", "lark==1")
    )
    assert files[f"{INFO}/METADATA"].decode() == expected != before


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("body", ["", "\n", "\nVersion: 9\n"])
def test_metadata_keeps_its_line_ends(end: str, body: str) -> None:
    data = f"Metadata-Version: 2.1\nName: x\nVERSION:1\nRequires-Dist: a\n{body}"
    result = distinfo.rewrite_metadata(
        data.replace("\n", end).encode(), version="1+b", requirements={"a": "a>2"}
    )
    assert result.decode() == data.replace(":1\n", ": 1+b\n", 1).replace(
        ": a\n", ": a>2\n"
    ).replace("\n", end)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"numpy": "numpy==1"}, "requires numpy 0 times"),
        ({"pandas": "torch"}, "can't replace the requirement on pandas"),
        ({"torch": "torch =="}, "no requirement"),
        ({"torch": "torch \t"}, "can't replace"),
        ({"torch": "torch==1\nVersion: 2"}, "no requirement"),
    ],
)
def test_requirements_that_cannot_be_replaced(
    base: Path, tmp_path: Path, wanted: dict[str, str], message: str
) -> None:
    assert message in refusal(WheelError, base, tmp_path, requirements=wanted)


def test_a_folded_requirement_is_replaced_whole() -> None:
    data = b"Metadata-Version: 2.1\nName: x\nVersion: 1\nRequires-Dist: a<2,\n  >1\nSummary: s\n"
    result = distinfo.rewrite_metadata(data, version="2", requirements={"a": "a==1"})
    assert result == data.replace(b"a<2,\n  >1", b"a==1").replace(b": 1\n", b": 2\n", 1)


def test_metadata_that_requires_a_project_twice() -> None:
    data = b"Metadata-Version: 2.1\nName: x\nVersion: 1\nRequires-Dist: a\nRequires-Dist: A>1\n"
    with pytest.raises(WheelError, match="requires a 2 times"):
        distinfo.rewrite_metadata(data, version="2", requirements={"a": "a"})
    with pytest.raises(WheelError, match="states a version 0 times"):
        distinfo.rewrite_metadata(
            data.replace(b"Version: 1\n", b"", 1)[17:], version="2", requirements={}
        )


# --- what is refused


def test_another_hash(base: Path, tmp_path: Path) -> None:
    message = refusal(SourceError, base, tmp_path, sha256="0" * 64)
    assert sha256(base) in message
    assert "0" * 64 in message
    build(base, tmp_path / "ok", sha256="0" * 64, verified=True)


def test_a_broken_file_with_another_hash_is_called_another_file(base: Path, tmp_path: Path) -> None:
    digest = sha256(base)
    base.write_bytes(base.read_bytes()[:-30])
    assert "isn't the wheel that is pinned" in refusal(SourceError, base, tmp_path, sha256=digest)
    assert "no zip file" in refusal(WheelError, base, tmp_path)
    assert "can't be read" in refusal(
        SourceError, tmp_path / "none-1-py3-none-any.whl", tmp_path, sha256="0" * 64,
        version=distinfo.overlay_version("1", RECORD),
    )  # fmt: skip


def rezip(base: Path, edit: Callable[[zipfile.ZipInfo], None], name: str) -> None:
    """Write a wheel again with the directory entry of one member edited."""
    files = content(base)
    with zipfile.ZipFile(base) as archive:
        infos = archive.infolist()
    with zipfile.ZipFile(base, "w") as archive:
        for info in infos:
            data = files[info.filename]
            if info.filename == name:
                edit(info)
            archive.writestr(info, data)


def test_symbolic_links(base: Path, tmp_path: Path) -> None:
    def edit(info: zipfile.ZipInfo) -> None:
        info.external_attr = (stat.S_IFLNK | 0o777) << 16

    rezip(base, edit, "vllm/run.sh")
    assert "symbolic link: vllm/run.sh" in refusal(WheelError, base, tmp_path)


def test_devices(base: Path, tmp_path: Path) -> None:
    def edit(info: zipfile.ZipInfo) -> None:
        info.external_attr = (stat.S_IFCHR | 0o600) << 16

    rezip(base, edit, "vllm/run.sh")
    assert "no regular file: vllm/run.sh" in refusal(WheelError, base, tmp_path)


def test_methods_that_installers_may_not_know(base: Path, tmp_path: Path) -> None:
    def edit(info: zipfile.ZipInfo) -> None:
        info.compress_type = zipfile.ZIP_BZIP2

    rezip(base, edit, "vllm/run.sh")
    assert "packed by method 12" in refusal(WheelError, base, tmp_path)


def patch_headers(base: Path, name: str, edit: Callable[[bytearray, int, int], None]) -> None:
    """Edit the bytes of a wheel, told where the local and central header of a member are."""
    data = bytearray(base.read_bytes())
    raw = name.encode()
    local = next(
        at for at in _all(data, b"PK\x03\x04") if data[at + 30 : at + 30 + len(raw)] == raw
    )
    central = next(
        at for at in _all(data, b"PK\x01\x02") if data[at + 46 : at + 46 + len(raw)] == raw
    )
    edit(data, local, central)
    base.write_bytes(data)


def _all(data: bytes | bytearray, needle: bytes) -> Iterator[int]:
    at = data.find(needle)
    while at >= 0:
        yield at
        at = data.find(needle, at + 1)


def test_encrypted_members(base: Path, tmp_path: Path) -> None:
    def edit(data: bytearray, local: int, central: int) -> None:
        data[local + 6] |= 1
        data[central + 8] |= 1

    patch_headers(base, "vllm/run.sh", edit)
    assert "encrypted member: vllm/run.sh" in refusal(WheelError, base, tmp_path)


def test_a_local_header_that_says_otherwise(base: Path, tmp_path: Path) -> None:
    def edit(data: bytearray, local: int, central: int) -> None:
        data[local + 30] = ord("V")

    patch_headers(base, "vllm/run.sh", edit)
    assert "contradicts itself about the member vllm/run.sh" in refusal(WheelError, base, tmp_path)


def test_members_that_overlap(base: Path, tmp_path: Path) -> None:
    def edit(data: bytearray, local: int, central: int) -> None:
        struct.pack_into("<I", data, central + 20, 1000)

    patch_headers(base, "vllm/a, b.txt", edit)
    assert "overlap" in refusal(WheelError, base, tmp_path)


def test_a_corrupt_metadata(base: Path, tmp_path: Path) -> None:
    def edit(data: bytearray, local: int, central: int) -> None:
        struct.pack_into("<I", data, central + 16, 1)

    patch_headers(base, "vllm-0.28.0.dist-info/METADATA", edit)
    assert "corrupt member: vllm-0.28.0.dist-info/METADATA" in refusal(WheelError, base, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/etc/passwd", "absolute path: '/etc/passwd'"),
        ("c:/x", "absolute path"),
        ("../x", "outside of the wheel: '../x'"),
        ("vllm/../../x", "outside of the wheel"),
        ("vllm//x", "malformed name"),
        ("vllm/./x", "malformed name"),
        ("vllm\\x", "malformed name"),
        ("vllm/a\nb", "malformed name"),
        ("vllm-0.28.0.data/scripts/x", "has a vllm-0.28.0.data folder"),
        ("other-1.dist-info/METADATA", "2 dist-info folders"),
        ("vllm-0.28.0.dist-info/overlay.json", "an overlay already"),
        ("vllm-0.28.0.dist-info/RECORD.jws", "signed (RECORD.jws)"),
    ],
)
def test_names_that_are_refused(tmp_path: Path, name: str, message: str) -> None:
    base = make_wheel(tmp_path, {**FILES, name: b"x"})
    assert message in refusal(WheelError, base, tmp_path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name(base: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(base, "a") as archive:
        archive.writestr("vllm/run.sh", b"other")
    assert "two members called vllm/run.sh" in refusal(WheelError, base, tmp_path)


def test_a_name_in_no_stated_encoding(base: Path, tmp_path: Path) -> None:
    def edit(data: bytearray, local: int, central: int) -> None:
        data[local + 7] &= ~8
        data[central + 9] &= ~8

    patch_headers(base, "vllm/ünïcode.py", edit)
    assert "no stated encoding" in refusal(WheelError, base, tmp_path)


def _lines() -> list[tuple[str, str, str]]:
    content = {**FILES, **info_files()}
    return [record_line(name, data) for name, data in content.items()]


OWN = ("vllm-0.28.0.dist-info/RECORD", "", "")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (record_text([*_lines()[1:], OWN]), "doesn't list its member vllm/__init__.py"),
        (record_text([*_lines(), ("vllm/gone", *_lines()[0][1:]), OWN]), "lists vllm/gone, which"),
        (record_text([*_lines(), _lines()[0], OWN]), "lists vllm/__init__.py twice"),
        (record_text([*_lines()[1:], (_lines()[0][0], "", ""), OWN]), "no hash for vllm/__init__"),
        (record_text([*_lines()[1:], (_lines()[0][0], "md5=abc", "600"), OWN]), "no usable hash"),
        (record_text([*_lines()[1:], (_lines()[0][0], "sha256=abc=", "600"), OWN]), "no usable"),
        (record_text([*_lines()[1:], (*_lines()[0][:2], "1"), OWN]), "wrong size for vllm/__init"),
        (record_text([*_lines(), OWN]) + b"a,b\n", "has 2 columns"),
        (b"\xff\xfe,,\n", "can't be read"),
        (record_text(_lines()), "doesn't list its member vllm-0.28.0.dist-info/RECORD"),
    ],
)
def test_a_record_that_is_wrong(tmp_path: Path, record: bytes, message: str) -> None:
    base = make_wheel(tmp_path, FILES, record=record)
    assert message in refusal(WheelError, base, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([Change(path="vllm/none.py", data=None)], "no such file"),
        ([Change(path="/vllm/x", data=b"")], "no path inside a wheel"),
        ([Change(path="vllm/../x", data=b"")], "no path inside a wheel"),
        ([Change(path="", data=b"")], "no path inside a wheel"),
        ([Change(path="vllm-0.28.0.dist-info/WHEEL", data=b"")], "belongs to the wheel's metadata"),
        ([Change(path="vllm/x", data=b"", mode=0o120000)], "mode 120000"),
        ([Change(path="vllm/x", data=b"")] * 2, "changed twice"),
        ([Change(path="vllm/empty/x", data=b"")], "vllm/empty would be a file and a folder"),
        ([Change(path="vllm", data=b"")], "vllm would be a file and a folder"),
    ],
)
def test_changes_that_do_not_fit(
    base: Path, tmp_path: Path, changes: list[Change], message: str
) -> None:
    assert message in refusal(WheelError, base, tmp_path, changes=changes)


def test_a_file_may_become_a_folder(base: Path, tmp_path: Path) -> None:
    changes = [Change(path="vllm/empty", data=None), Change(path="vllm/empty/x", data=b"")]
    assert "vllm/empty/x" in content(build(base, tmp_path / "out", changes=changes))


@pytest.mark.parametrize("version", ["0.28.0", "0.28.1+infernal.o12345678", VERSION + "0"])
def test_a_version_that_is_not_the_records(base: Path, tmp_path: Path, version: str) -> None:
    assert VERSION in refusal(WheelError, base, tmp_path, version=version)


def test_a_line_whose_name_would_be_normalised() -> None:
    assert VERSION.startswith("0.28.0+infernal.o")
    for line in ("Infernal", "in-fernal", "007", "a b", ""):
        with pytest.raises(WheelError, match="normal form"):
            distinfo.overlay_version("0.28.0", canonical({"line": line}))
    with pytest.raises(WheelError, match="names no line"):
        distinfo.overlay_version("0.28.0", b"[]")


def test_a_file_that_is_not_called_a_wheel(base: Path, tmp_path: Path) -> None:
    other = base.rename(tmp_path / "vllm.zip")
    assert "isn't the name of a wheel" in refusal(WheelError, other, tmp_path)
    other = other.rename(tmp_path / "flash-0.28.0-py3-none-any.whl")
    assert "dist-info folder of something else" in refusal(WheelError, other, tmp_path)


# --- forms of zip that upstreams may use


class Pipe(io.RawIOBase):
    """A stream that can't seek: zipfile then writes data descriptors."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


def test_streamed_zip64_and_prefixed_zips_come_out_the_same(base: Path, tmp_path: Path) -> None:
    """Data descriptors, extra fields, comments, ZIP64 headers, folders, leading bytes."""
    plain = build(base, tmp_path / "plain").read_bytes()
    files = content(base)
    with zipfile.ZipFile(base) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[call-overload]
        archive.writestr("vllm/", b"")
        for name, data in files.items():
            info = zipfile.ZipInfo(name, (2030, 1, 1, 1, 1, 2))
            info.external_attr = infos[name].external_attr
            info.compress_type = infos[name].compress_type
            info.comment = b"comment"
            info.extra = struct.pack("<HHI", 0x9999, 4, 7)
            with archive.open(info, "w", force_zip64=True) as member:
                member.write(data)
        archive.comment = b"comment"
    base.write_bytes(b"#!/bin/leading\n" + pipe.data)
    with zipfile.ZipFile(base) as archive:
        assert archive.getinfo("vllm/run.sh").flag_bits & 8, "the test wants data descriptors"
    assert build(base, tmp_path / "streamed").read_bytes() == plain


def test_members_without_a_unix_mode(base: Path, tmp_path: Path) -> None:
    def edit(info: zipfile.ZipInfo) -> None:
        info.create_system = 0
        info.external_attr = 0x20

    rezip(base, edit, "vllm/run.sh")
    with zipfile.ZipFile(build(base, tmp_path / "out")) as archive:
        assert archive.getinfo("vllm/run.sh").external_attr >> 16 == 0o100644


def test_more_than_a_zip_can_hold(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        writer = rawzip.Writer(file.fileno())
        huge = rawzip.Member(
            name="a", mode=0o100644, method=0, crc=0, packed=1 << 32, size=1 << 32, start=0
        )
        with pytest.raises(WheelError, match="beyond 4 GiB"):
            writer.copy(file.fileno(), huge, "a")
        for number in range(0xFFFF):
            writer.store(str(number), b"", 0o100644)
        with pytest.raises(WheelError, match="65535 members"):
            writer.close()


@given(st.binary(max_size=5000), st.booleans())
def test_chunks_are_what_read_returns(data: bytes, stored: bool) -> None:
    packed = data if stored else zlib.compress(data, wbits=-15)
    fd = os.memfd_create("x")
    try:
        os.write(fd, b"lead" + packed)
        member = rawzip.Member(
            name="x",
            mode=0o100644,
            method=0 if stored else 8,
            crc=zlib.crc32(data),
            packed=len(packed),
            size=len(data),
            start=4,
        )
        assert rawzip.read(fd, member, "x") == b"".join(rawzip.chunks(fd, member, "x")) == data
    finally:
        os.close(fd)


# --- the machine


def test_no_room(base: Path, tmp_path: Path) -> None:
    """A real ENOSPC is not to be had without a disk of one's own: a file size limit stands in."""
    code = _AGAIN.replace(
        "import os, sys",
        "import os, sys, signal, resource\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))",
    )
    out = tmp_path / "out"
    argv = (sys.executable, "-c", code, str(base), sha256(base), str(out), VERSION, RECORD)
    done = subprocess.run(
        argv, env={"PYTHONPATH": str(ROOT), "MASK": "022"}, capture_output=True, text=True
    )
    assert "overlay.errors.MachineError" in done.stderr
    assert os.strerror(errno.EFBIG) in done.stderr
    assert list(out.iterdir()) == []


def test_a_folder_that_cannot_be_written_to(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_bytes(b"")
    with pytest.raises(MachineError, match="can't be written"):
        build(base, out)
    with pytest.raises(MachineError, match="can't be written"):
        build(base, Path("/proc/none"))


def test_parts_of_dead_runs_are_cleared_and_live_ones_left(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    target = out / f"vllm-{VERSION}-py3-none-any.whl"
    dead = out / f".{target.name}.0123abcd.part"
    dead.write_bytes(b"half")
    foreign = out / ".other.whl.0123abcd.part"
    foreign.write_bytes(b"half")
    with wheel._beside(target) as fd:
        assert not dead.exists()
        os.write(fd, b"slow run")
        build(base, out)
        assert target.stat().st_size > 100
    assert target.read_bytes() == b"slow run"
    assert sorted(out.iterdir()) == sorted([target, foreign])


def test_two_runs_at_once(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(build(base, out).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len(set(results)) == 1
    assert len(list(out.iterdir())) == 1


def test_a_run_that_is_killed_leaves_nothing_that_hinders(base: Path, tmp_path: Path) -> None:
    """Killed at the last moment: all written, not yet renamed."""
    out = tmp_path / "out"
    code = _AGAIN.replace(
        "base, digest",
        "from overlay.wheels import rawzip\n"
        "import time\n"
        "rawzip.Writer.close = lambda self: (self._flush(), time.sleep(60))\n"
        "base, digest",
        1,
    )
    argv = (sys.executable, "-c", code, str(base), sha256(base), str(out), VERSION, RECORD)
    process = subprocess.Popen(argv, env={"PYTHONPATH": str(ROOT), "MASK": "022"})
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        parts = list(out.glob(".*.part")) if out.exists() else []
        if parts and parts[0].stat().st_size > 500_000:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.suffix for path in out.iterdir()] == [".part"]
    result = build(base, out)
    assert list(out.iterdir()) == [result]


def test_memory_stays_small(tmp_path: Path) -> None:
    """A member of 100 MB that doesn't compress; an interpreter alone takes 30."""
    piece = os.urandom(1 << 20)
    base = make_wheel(tmp_path, {"vllm/__init__.py": b"", "vllm/big.bin": piece * 100})
    # not ru_maxrss, which a process inherits from the one that started it
    code = _AGAIN + 'print(Path("/proc/self/status").read_text())\n'
    argv = (sys.executable, "-c", code, str(base), sha256(base), str(tmp_path / "out"))
    env = {"PYTHONPATH": str(ROOT), "MASK": "022"}
    done = subprocess.run((*argv, VERSION, RECORD), check=True, env=env, capture_output=True)
    peak = int(done.stdout.split(b"VmHWM:")[1].split()[0]) // 1024
    assert peak < 60, f"{peak} MB"


# --- version files

VLLM_VERSION = b"""\
# file generated by vcs-versioning
__version__: str
commit_id: str | None

__version__ = version = '0.28.0'
__version_tuple__ = version_tuple = (0, 28, 0)

__commit_id__ = commit_id = 'g2cf0a6915'
"""
COMMIT = "2cf0a6915ce544dc493a0990f2ea38d81601128a"


def test_vllm_version_file() -> None:
    result = vllm_version_file(VLLM_VERSION, "0.28.0+infernal.o1234abcd", COMMIT)
    assert result.decode() == VLLM_VERSION.decode().replace(
        "'0.28.0'", "'0.28.0+infernal.o1234abcd'"
    ).replace("(0, 28, 0)", "(0, 28, 0, 'infernal.o1234abcd')")
    assert vllm_version_file(VLLM_VERSION, "0.28.0+a.o1", "2cf0a69")


@pytest.mark.parametrize(
    ("data", "version", "commit", "message"),
    [
        (VLLM_VERSION, "0.28.0+a", "3" * 40, "another commit"),
        (VLLM_VERSION, "0.28.0+a", "2cf", "another commit"),
        (VLLM_VERSION, "0.28.1+a", COMMIT, "states version 0.28.0"),
        (VLLM_VERSION, "0.28.0", COMMIT, "states version 0.28.0"),
        (VLLM_VERSION.replace(b"'g2cf0a6915'", b"None"), "0.28.0+a", COMMIT, "isn't of the form"),
        (VLLM_VERSION.replace(b"(0, 28, 0)", b""), "0.28.0+a", COMMIT, "isn't of the form"),
        (VLLM_VERSION * 2, "0.28.0+a", COMMIT, "isn't of the form"),
    ],
)
def test_vllm_version_files_that_are_refused(
    data: bytes, version: str, commit: str, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        vllm_version_file(data, version, commit)


def test_a_wheel_that_was_built_from_another_commit_says_the_pins_in_the_end() -> None:
    """As vLLM 0.26.0's: its archive states another commit than its wheel."""
    pin = "f2654939e69b4069b13977e9aef3e31d4dcaf051"
    with pytest.raises(SourceError, match="another commit"):
        vllm_version_file(VLLM_VERSION, "0.28.0+a.o1", pin)
    with pytest.raises(SourceError, match="another commit"):
        vllm_version_file(VLLM_VERSION, "0.28.0+a.o1", pin, built="ffd46bfab")
    result = vllm_version_file(VLLM_VERSION, "0.28.0+a.o1", pin, built=COMMIT)
    assert b"__commit_id__ = commit_id = 'gf2654939e'\n" in result
    assert COMMIT[:9].encode() not in result


@pytest.mark.parametrize("key", ["__git_commit__", "__git_version__"])
def test_flashinfer_build_meta(key: str) -> None:
    commit = "e62941a1da605fb9b3c8c50b23c9720df12cf6b4"
    data = (
        '"""Build metadata for flashinfer package."""\n'
        f'__version__ = "0.6.18rc10"\n{key} = "{commit}"\n'
    ).encode()
    result = flashinfer_build_meta(data, "0.6.18rc10+infernal.o1234abcd", commit)
    assert result == data.replace(b'rc10"', b'rc10+infernal.o1234abcd"')
    with pytest.raises(SourceError, match="another commit"):
        flashinfer_build_meta(data, "0.6.18rc10+infernal.o1234abcd", "0" * 40)
    with pytest.raises(SourceError, match="isn't of the form"):
        flashinfer_build_meta(b"", "0.6.18rc10+infernal.o1234abcd", commit)
