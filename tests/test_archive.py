import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlay.errors import SourceError, UnavailableError
from overlay.report import Reporter
from overlay.sources import archive
from overlay.sources.archive import Member, read_archive
from overlay.sources.index import fetch_release
from overlay.trees.store import cache_folder

TOP = "demo-1.0"


def entry(name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, link: str = "",
          mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:  # fmt: skip
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, link, mode, len(data)
    return info, data


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def sdist(tmp_path: Path) -> Path:
    return tmp_path / "demo-1.0.tar.gz"


def members(path: Path, **options: tuple[str, ...]) -> dict[bytes, tuple[int, bytes]]:
    return {m.path: (m.mode, m.data) for m in read_archive(path, **options)}


def refused(path: Path, **options: tuple[str, ...]) -> str:
    with pytest.raises(SourceError) as caught:
        list(read_archive(path, **options))
    assert path.name in caught.value.what
    assert caught.value.fix
    return str(caught.value)


def test_files_links_and_modes(sdist: Path) -> None:
    pack(
        sdist,
        entry(TOP, kind=tarfile.DIRTYPE, mode=0o755),
        entry(f"{TOP}/a.py", b"a\r\n\xff"),
        entry(f"{TOP}/run", b"#!", mode=0o4777),
        entry(f"{TOP}/group-only", b"", mode=0o677),
        entry(f"{TOP}/d/e/f", b"f"),
        entry(f"{TOP}/d/up", kind=tarfile.SYMTYPE, link="../a.py"),
        entry(f"{TOP}/d/dangling", kind=tarfile.SYMTYPE, link="./nothing/here"),
        entry(f"{TOP}/d", kind=tarfile.DIRTYPE),
    )
    assert members(sdist) == {
        b"a.py": (0o100644, b"a\r\n\xff"),
        b"run": (0o100755, b"#!"),
        b"group-only": (0o100644, b""),
        b"d/e/f": (0o100644, b"f"),
        b"d/up": (0o120000, b"../a.py"),
        b"d/dangling": (0o120000, b"./nothing/here"),
    }


@pytest.mark.parametrize("format_", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_are_bytes_in_every_format(sdist: Path, format_: int) -> None:
    names = [b"\xff\xfe", "größe".encode(), b"a b", b"x" * 90]
    if format_ != tarfile.USTAR_FORMAT:
        names.append(b"/".join([b"long" * 30] * 5))
    with tarfile.open(sdist, "w:gz", format=format_, errors="surrogateescape") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(f"{TOP}/{os.fsdecode(name)}"))
    assert list(members(sdist)) == names


def test_generated_files_are_left_out(sdist: Path) -> None:
    large = os.urandom(1 << 20) * 9  # more than a header may take: its content is passed over
    pack(
        sdist,
        entry(f"{TOP}/PKG-INFO", large),
        entry(f"{TOP}/demo.egg-info/SOURCES.txt", b"s"),
        entry(f"{TOP}/demo.egg-info.txt", b"kept"),
        entry(f"{TOP}/src/PKG-INFO", b"kept"),
    )
    kept = members(sdist, generated=("PKG-INFO", "demo.egg-info/"))
    assert set(kept) == {b"demo.egg-info.txt", b"src/PKG-INFO"}


@pytest.mark.parametrize("name", ["setup.cfg", "demo.egg-info", "a.py/", "a"])
def test_a_generated_name_that_is_missing(sdist: Path, name: str) -> None:
    pack(sdist, entry(f"{TOP}/a.py"), entry(f"{TOP}/demo.egg-info/x"))
    assert f"not there: {name}" in refused(sdist, generated=("a.py", name))


BAD_PATHS = [
    ("/etc/passwd", "an absolute path"),
    (f"{TOP}/../x", "a path with '..'"),
    ("../x", "a path with '..'"),
    (f"{TOP}/./x", "an empty or '.' component"),
    (f"{TOP}//x", "an empty or '.' component"),
    (f"{TOP}/a\\b", "a path with a backslash"),
    ("C:/x", "a path with a drive letter"),
    (f"{TOP}/c:x", "a path with a drive letter"),
    (f"{TOP}/a\0b", "a path with a NUL byte"),
    ("other/x", "more than one top folder"),
    (f"{TOP}/.git/config", "git takes for its own"),
    (f"{TOP}/sub/.GiT", "git takes for its own"),
    (f"{TOP}/GIT~1/x", "git takes for its own"),
    (f"{TOP}/.git. ./x", "git takes for its own"),
    (f"{TOP}/.git::$INDEX_ALLOCATION/x", "git takes for its own"),
    (f"{TOP}/.g\u200cit/x", "git takes for its own"),
    (f"{TOP}/\ufeff.git", "git takes for its own"),
    (f"{TOP}/ok", "two members of one name"),
    (f"{TOP}/ok/x", "a file and a folder of one name"),
    (f"{TOP}/ok/x/y/z", "a file and a folder of one name"),
    (f"{TOP}/folder", "a file and a folder of one name"),
    (TOP, "a file where its top folder should be"),
]


@pytest.mark.parametrize(("path", "message"), BAD_PATHS)
def test_bad_paths(sdist: Path, path: str, message: str) -> None:
    info, data = entry(path, b"x")
    info.pax_headers = {"path": path}  # the only way in for a NUL
    pack(sdist, entry(f"{TOP}/ok", b"x"), entry(f"{TOP}/folder/x", b"x"), (info, data))
    assert message in refused(sdist)


@pytest.mark.parametrize("path", [".github/x", ".gitignore", "git", "a.git/x", ".gitmodules",
                                  "git~2", "...", "c/d:e", "..a"])  # fmt: skip
def test_harmless_paths_that_look_alike(sdist: Path, path: str) -> None:
    pack(sdist, entry(f"{TOP}/{path}", b"x"))
    assert list(members(sdist)) == [path.encode()]


def test_a_folder_in_the_place_of_a_file(sdist: Path) -> None:
    pack(sdist, entry(f"{TOP}/a"), entry(f"{TOP}/a", kind=tarfile.DIRTYPE))
    assert "a file and a folder of one name" in refused(sdist)


@pytest.mark.parametrize(("at", "target", "message"), [
    ("l", "/etc/passwd", "an absolute target"),
    ("l", "C:/x", "an absolute target"),
    ("l", "..", "leaves the tree"),
    ("d/l", "../../x", "leaves the tree"),
    ("d/l", "../d/../../demo-1.0/a", "leaves the tree"),
    ("l", "", "a bad target"),
    ("l", "a\\b", "a bad target"),
    ("l", ".git/hooks", "git takes for its own"),
    (".gitmodules", "a", "in the place of .gitmodules"),
    ("GITMOD~1", "a", "in the place of .gitmodules"),
    ("l", "later/x", "through another link"),
    ("l", "later/../x", "through another link"),
    ("later/x", "a", "a file and a folder of one name"),
])  # fmt: skip
def test_bad_links(sdist: Path, at: str, target: str, message: str) -> None:
    pack(
        sdist,
        entry(f"{TOP}/d/a"),
        entry(f"{TOP}/{at}", kind=tarfile.SYMTYPE, link=target),
        entry(f"{TOP}/later", kind=tarfile.SYMTYPE, link="d"),
    )
    assert message in refused(sdist)


@pytest.mark.parametrize(("kind", "message"), [
    (tarfile.CHRTYPE, "a character device"),
    (tarfile.BLKTYPE, "a block device"),
    (tarfile.FIFOTYPE, "a fifo"),
    (tarfile.LNKTYPE, "a hard link"),
    (tarfile.CONTTYPE, "a member of unknown type"),
    (b"Z", "a member of unknown type"),
])  # fmt: skip
def test_what_git_has_no_word_for(sdist: Path, kind: bytes, message: str) -> None:
    pack(sdist, entry(f"{TOP}/a", b""), entry(f"{TOP}/b", kind=kind, link=f"{TOP}/a"))
    assert message in refused(sdist)


def test_sparse_files(sdist: Path, tmp_path: Path) -> None:
    (tmp_path / TOP).mkdir()
    with (tmp_path / TOP / "holes").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"end")
    for variant in ("gnu", "posix"):
        argv = ("tar", "-C", tmp_path, "--sparse", f"--format={variant}", "-czf", sdist, TOP)
        subprocess.run(argv, check=True)
        assert "a sparse file" in refused(sdist)


def test_no_archive_at_all(sdist: Path) -> None:
    assert "can't be read" in refused(sdist)
    sdist.write_bytes(b"<html>")
    assert "not a gzip file at all" in refused(sdist)
    sdist.write_bytes(gzip.compress(os.urandom(5000)))
    assert "not a tar archive" in refused(sdist)
    for empty in (b"", gzip.compress(b"")):
        sdist.write_bytes(empty)
        assert "truncated" in refused(sdist)
    pack(sdist)
    assert "holds no files" in refused(sdist)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "demo-1.0.tar.gz"
    pack(path, *(entry(f"{TOP}/{n}", hashlib.sha256(b"%d" % n).digest() * 40) for n in range(9)))
    return path.read_bytes()


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_truncated_archive(
    data: st.DataObject, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "demo-1.0.tar.gz"
    plain = gzip.decompress(whole)
    end = plain.rindex(hashlib.sha256(b"8").digest()) + 32  # the last content
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:  # cut before compression: gzip itself is content
        path.write_bytes(gzip.compress(plain[: data.draw(st.integers(0, end))], 1))
    refused(path)


@given(position=st.integers(0), bit=st.integers(0, 7))
@settings(deadline=None, max_examples=60)
def test_a_changed_byte_never_goes_unnoticed(
    position: int, bit: int, whole: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bit") / "demo-1.0.tar.gz"
    bad = bytearray(whole)
    bad[10 + (position % (len(bad) - 10))] ^= 1 << bit  # after gzip's own header
    path.write_bytes(bad)
    try:
        list(read_archive(path))
    except SourceError:
        return
    # What gzip's checksum doesn't cover: the file name in its header.
    assert gzip.decompress(bytes(bad)) == gzip.decompress(whole)


def test_a_bad_header_in_the_middle_is_not_the_end(sdist: Path, whole: bytes) -> None:
    plain = bytearray(gzip.decompress(whole))
    second = plain.index(f"{TOP}/1\0".encode())
    plain[second + 148 : second + 154] = b"777777"
    sdist.write_bytes(gzip.compress(plain))
    assert "a bad header" in refused(sdist)


def test_data_behind_the_end(sdist: Path, whole: bytes) -> None:
    sdist.write_bytes(whole + whole)
    assert "data after its end mark" in refused(sdist)


def test_limits(sdist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(sdist, *(entry(f"{TOP}/{n}", bytes(100_000)) for n in range(10)))
    with monkeypatch.context() as patch:
        patch.setattr(archive, "MAX_FILE", 99_999)
        assert "a file larger than is allowed" in refused(sdist)
    with monkeypatch.context() as patch:
        patch.setattr(archive, "MAX_TOTAL", 999_999)
        assert "unpacks to more than is allowed" in refused(sdist)
    with monkeypatch.context() as patch:
        patch.setattr(archive, "MAX_MEMBERS", 9)
        assert "too many members" in refused(sdist)
    assert len(members(sdist)) == 10


def test_bombs_are_refused_before_they_are_read(sdist: Path) -> None:
    info = tarfile.TarInfo(f"{TOP}/bomb")
    info.size = archive.MAX_FILE + 1
    sdist.write_bytes(gzip.compress(info.tobuf() + bytes(1024)))
    assert "a file larger than is allowed" in refused(sdist)
    # An extended header is read as a whole, before anybody sees the member.
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 64 << 20
    sdist.write_bytes(gzip.compress(info.tobuf() + bytes(64 << 20), 1))
    assert "a header larger than is allowed" in refused(sdist)


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1, max_size=8)
PATHS = st.lists(NAMES | st.sampled_from(["..", ".", ".git", "a", "b", "C:"]), min_size=1,
                 max_size=4).map("/".join)  # fmt: skip


@given(st.lists(PATHS, min_size=1, max_size=5, unique=True))
@settings(deadline=None, max_examples=80)
def test_what_is_let_through_git_takes_too(
    tmp_path_factory: pytest.TempPathFactory, paths: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("paths")
    path = pack(folder / "demo-1.0.tar.gz", *(entry(f"{TOP}/{p}", p.encode()) for p in paths))
    try:
        found = list(read_archive(path))
    except SourceError:
        return
    assert [m.path for m in found] == [p.encode() for p in paths]
    tree = git_tree(found)
    lines = b"".join(b"100644 %s\t%s\0" % (blob(m.data).hex().encode(), m.path) for m in found)
    environment = {"PATH": os.environ["PATH"], "GIT_DIR": str(folder / "git")}
    for argv, data in (
        (("git", "init", "-q", "--bare", folder / "git"), b""),
        (("git", "-c", "core.protectHFS=true", "update-index", "-z", "--index-info"), lines),
    ):
        subprocess.run(argv, input=data, env=environment, check=True, capture_output=True)
    done = subprocess.run(("git", "write-tree", "--missing-ok"), env=environment, check=True,
                          capture_output=True)  # fmt: skip
    assert done.stdout.decode().strip() == tree


def blob(data: bytes) -> bytes:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).digest()


def git_tree(found: list[Member]) -> str:
    """The id of the git tree that the members make."""
    root: dict[bytes, Any] = {}
    for member in found:
        folder = root
        *parents, name = member.path.split(b"/")
        for parent in parents:
            folder = folder.setdefault(parent, {})
        folder[name] = (b"%o" % member.mode, blob(member.data))

    def written(folder: dict[bytes, Any]) -> bytes:
        rows = []
        for name, value in folder.items():
            if isinstance(value, dict):
                rows.append((name + b"/", b"40000", name, written(value)))
            else:
                mode, digest = value
                rows.append((name, mode, name, digest))
        body = b"".join(b"%s %s\0%s" % row[1:] for row in sorted(rows))
        header = b"tree %d\0" % len(body)
        return hashlib.sha1(header + body, usedforsecurity=False).digest()

    return written(root).hex()


@pytest.fixture(scope="module")
def vllm_sdist() -> Path:
    try:
        return fetch_release(
            "vllm",
            "vllm-0.28.0.tar.gz",
            "ac96dd0ec5be9c13f2aa4bfb50498c4727110406f6e4980b58a4097e4d18634a",
            cache=cache_folder(),
            offline=False,
            report=Reporter(quiet=True),
        )
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.real
def test_vllm_archive_is_the_git_tree(vllm_sdist: Path) -> None:
    generated = ("setup.cfg", "PKG-INFO", "vllm.egg-info/", "vllm/_version.py")
    started = time.perf_counter()
    found = list(read_archive(vllm_sdist, generated=generated))
    took = time.perf_counter() - started
    started = time.perf_counter()
    with tarfile.open(vllm_sdist, "r|gz") as tar:
        for info in tar:
            if info.isreg():
                tar.extractfile(info).read()  # type: ignore[union-attr]
    bare = time.perf_counter() - started
    assert len(found) == 6605 - 9
    assert git_tree(found) == "1940041619b03a5d3d1a73e9cffc295de329ad9d"
    assert took < 3 * bare, f"{took:.2f} s; tarfile alone: {bare:.2f} s"
