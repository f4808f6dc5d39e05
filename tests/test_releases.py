import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from overlay.errors import LineError, SourceError, UnavailableError
from overlay.lines.line import File, read_line
from overlay.report import Reporter
from overlay.sources import download, index, pipconfig, releases
from overlay.sources.pipconfig import PipConfig
from overlay.sources.releases import (
    UNRELEASED,
    is_released,
    known_pins,
    offered,
    pin_commit,
    pin_release,
    released,
    with_pin,
)
from overlay.sources.source import Sources
from overlay.trees.store import cache_folder
from tests.support.servers import IndexServer, index_server
from tests.support.tiny import Tiny, make_sdist

SHORT, FULL = "0a1b2c3d4", "0a1b2c3d4" + "e" * 31
WHEEL = "vllm-{}-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture(autouse=True)
def own_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of the machine's, short pauses."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.lower().endswith("_proxy") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setattr(download, "BACKOFF", 0.001)


def use(monkeypatch: pytest.MonkeyPatch, *servers: IndexServer) -> None:
    """What pip would answer; that it is asked rightly is shown in test_index."""
    urls = tuple(server.simple_url for server in servers)
    config = PipConfig(index_urls=urls[:1], extra_index_urls=urls[1:])
    for module in (pipconfig, index):  # imported by now, or the fake would stay in one
        monkeypatch.setattr(module, "read_pip_config", lambda: config)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IndexServer]:
    with index_server() as made:
        use(monkeypatch, made)
        yield made


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(cache=tmp_path / "cache", report=Reporter())


def offline(sources: Sources) -> Sources:
    return Sources(cache=sources.cache, report=sources.report, offline=True)


def vllm_sdist(folder: Path, version: str, commit: str = f"'g{SHORT}'") -> bytes:
    """An sdist whose ``_version.py`` is as setuptools-scm writes it."""
    stated = f"__version__ = version = '{version}'\n\n__commit_id__ = commit_id = {commit}\n"
    files = {
        "vllm/_version.py": stated.encode(), "vllm/a.py": b"a = 1\n", "PKG-INFO": b"x\n",
        "vllm.egg-info/PKG-INFO": b"x\n",
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    return make_sdist(folder / "made.tar.gz", f"vllm-{version}", files).read_bytes()


def release(server: IndexServer, folder: Path, version: str) -> tuple[str, str]:
    """Offer an sdist and a wheel; their hashes."""
    data = vllm_sdist(folder / "made", version)
    sdist = server.add("vllm", f"vllm-{version}.tar.gz", data)
    return sdist, server.add("vllm", WHEEL.format(version), f"wheel {version}".encode())


def test_versions_come_oldest_first(server: IndexServer, sources: Sources) -> None:
    for version in ("0.10.0", "0.9.1", "0.10.0rc2", "0.10.0.post1", "0.9.1.dev3"):
        server.add("vllm", f"vllm-{version}.tar.gz", version.encode())
    assert released(sources, "vllm") == (
        "0.9.1.dev3", "0.9.1", "0.10.0rc2", "0.10.0", "0.10.0.post1",
    )  # fmt: skip


def test_files_that_are_no_use_are_passed_over(server: IndexServer, sources: Sources) -> None:
    for name in (
        "vllm-1.0-cp38-abi3-manylinux_2_28_aarch64.whl", "vllm-1.0-py3-none-win_amd64.whl",
        "vllm-1.1.zip", "vllm-1.2+cu129-py3-none-any.whl", "vllm-x.tar.gz", "vllm-1.3.egg",
    ):  # fmt: skip
        server.add("vllm", name, name.encode())
    server.add("vllm", "vllm-0.1.tar.gz", b"sdist")
    assert released(sources, "vllm") == ("0.1",)


def test_the_last_build_of_a_wheel_counts(server: IndexServer, sources: Sources) -> None:
    names = [f"vllm-1.0{build}-py3-none-any.whl" for build in ("", "-10", "-2", "-9a")]
    for name in names:
        server.add("vllm", name, name.encode())
    wheel = offered(sources, "vllm")["1.0"].wheel
    assert wheel is not None
    assert wheel.file == names[1]


def test_all_places_count_and_the_first_wins(
    server: IndexServer, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index_server() as other:
        use(monkeypatch, server, other)
        first = server.add("vllm", "vllm-1.0.tar.gz", b"one")
        other.add("vllm", "vllm-1.0.tar.gz", b"another")
        other.add("vllm", "vllm-2.0.tar.gz", b"two")
        found = offered(sources, "vllm")
    assert list(found) == ["1.0", "2.0"]
    assert found["1.0"].sdist == File(file="vllm-1.0.tar.gz", sha256=first)


def test_a_pin_says_what_index_and_archive_say(
    server: IndexServer, sources: Sources, tmp_path: Path
) -> None:
    sdist, wheel = release(server, tmp_path, "1.0")
    pin = pin_release(sources, "vllm", "1.0")
    assert (pin.version, pin.tag, pin.abbreviation, pin.commit) == ("1.0", "v1.0", SHORT, None)
    assert (pin.sdist.sha256, pin.wheel.sha256, pin.tree) == (sdist, wheel, None)
    assert pin.sources == ("archive",)  # git can't be asked for an abbreviation
    assert pin.generated == ("PKG-INFO", "vllm.egg-info/", "vllm/_version.py")  # no setup.cfg
    assert pin.repository.endswith("/vllm.git")
    assert is_released(pin)


@pytest.mark.parametrize("word", ["commit", "version"])  # FlashInfer said "version" until 0.6.17
def test_a_full_commit_lets_git_in(
    server: IndexServer, sources: Sources, tmp_path: Path, word: str
) -> None:
    text = f'"""Meta."""\n__version__ = "1.0"\n__git_{word}__ = "{FULL}"\n'
    path = make_sdist(
        tmp_path / "a.tar.gz", "flashinfer_python-1.0",
        {"flashinfer/_build_meta.py": text.encode(), "setup.cfg": b"", "a.h": b""},
    )  # fmt: skip
    project = "flashinfer-python"
    server.add(project, "flashinfer_python-1.0.tar.gz", path.read_bytes())
    server.add(project, "flashinfer_python-1.0-py3-none-any.whl", b"wheel")
    pin = pin_release(sources, "flashinfer", "1.0")
    assert (pin.commit, pin.abbreviation) == (FULL, None)
    assert pin.sources == ("archive", "git")
    assert pin.generated == ("setup.cfg", "flashinfer/_build_meta.py")


def test_asking_again_needs_no_network(
    server: IndexServer, sources: Sources, tmp_path: Path
) -> None:
    release(server, tmp_path, "1.0")
    pin = pin_release(sources, "vllm", "1.0")
    asked = len(server.seen)
    assert asked
    server.faults.page_status = server.faults.status = 500
    assert pin_release(sources, "vllm", "1.0.0") == pin  # another spelling of the same
    assert pin_release(offline(sources), "vllm", "1.0") == pin
    assert released(offline(sources), "vllm") == ("1.0",)
    assert len(server.seen) == asked
    # nor is the archive read again
    for path in (sources.cache / "downloads").rglob("*.tar.gz"):
        path.unlink()
    assert pin_release(offline(sources), "vllm", "1.0") == pin


def test_a_list_grows_old(
    server: IndexServer, sources: Sources, capsys: pytest.CaptureFixture[str]
) -> None:
    server.add("vllm", "vllm-1.0.tar.gz", b"one")
    assert released(sources, "vllm") == ("1.0",)
    server.add("vllm", "vllm-2.0.tar.gz", b"two")
    assert released(sources, "vllm") == ("1.0",)
    (kept,) = (sources.cache / "releases").rglob("index.json")
    hours_ago = time.time() - 3 * 3600
    os.utime(kept, (hours_ago, hours_ago))
    server.faults.page_status = 404
    assert released(sources, "vllm") == ("1.0",)
    assert "3 h ago" in capsys.readouterr().err
    server.faults.page_status = None
    assert released(offline(sources), "vllm") == ("1.0",)
    assert released(sources, "vllm") == ("1.0", "2.0")


def test_a_release_that_came_since_is_asked_for(
    server: IndexServer, sources: Sources, tmp_path: Path
) -> None:
    release(server, tmp_path, "1.0")
    assert released(sources, "vllm") == ("1.0",)
    release(server, tmp_path, "2.0")
    (kept,) = (sources.cache / "releases").rglob("index.json")
    os.utime(kept, (0, 0))
    assert pin_release(sources, "vllm", "2.0").version == "2.0"


@pytest.mark.parametrize("damage", [b"", b"[1]", b"\xff\xfe{", b'[{"version": 3}]'])
def test_a_damaged_list_is_made_again(server: IndexServer, sources: Sources, damage: bytes) -> None:
    server.add("vllm", "vllm-1.0.tar.gz", b"one")
    released(sources, "vllm")
    (kept,) = (sources.cache / "releases").rglob("index.json")
    kept.write_bytes(damage)
    assert released(sources, "vllm") == ("1.0",)


def test_offline_knows_nothing_at_first(server: IndexServer, sources: Sources) -> None:
    server.add("vllm", "vllm-1.0.tar.gz", b"one")
    with pytest.raises(UnavailableError, match="no place lists") as caught:
        released(offline(sources), "vllm")
    assert "offline" in caught.value.why
    assert not server.seen


def test_an_index_out_of_reach_is_named(server: IndexServer, sources: Sources) -> None:
    server.faults.page_status = 503
    with pytest.raises(UnavailableError, match="no place lists") as caught:
        released(sources, "vllm")
    assert "HTTP 503" in caught.value.why


@pytest.mark.parametrize("version", ["2.0", "1.0rc1", "newest", "", "../x"])
def test_no_such_version(
    server: IndexServer, sources: Sources, tmp_path: Path, version: str
) -> None:
    release(server, tmp_path, "1.0")
    with pytest.raises(LineError):
        pin_release(sources, "vllm", version)


def test_what_is_lacking_is_named(server: IndexServer, sources: Sources, tmp_path: Path) -> None:
    server.add("vllm", WHEEL.format("1.0"), b"wheel")
    server.add("vllm", "vllm-2.0.tar.gz", vllm_sdist(tmp_path / "a", "2.0"))
    _, three = release(server, tmp_path, "3.0")
    server.stated["vllm-3.0.tar.gz"] = None  # without a hash it can't be pinned
    assert three
    for version, lacks in (("1.0", "sdist"), ("2.0", "wheel"), ("3.0", "sdist")):
        with pytest.raises(UnavailableError, match=f"{version} has no {lacks}"):
            pin_release(sources, "vllm", version)


def test_a_yanked_release_is_refused(sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    with index_server(as_json=True) as server:  # which yanks all
        use(monkeypatch, server)
        server.add("vllm", "vllm-1.0.tar.gz", b"one")
        assert offered(sources, "vllm")["1.0"].yanked == "a test yanks all"
        with pytest.raises(UnavailableError, match="was yanked"):
            pin_release(sources, "vllm", "1.0")


@pytest.mark.parametrize("stated", ["None", "'gnothex'", "'g12'", ""])
def test_an_archive_without_a_commit_is_refused(
    server: IndexServer, sources: Sources, tmp_path: Path, stated: str
) -> None:
    server.add("vllm", "vllm-1.0.tar.gz", vllm_sdist(tmp_path / "a", "1.0", stated))
    server.add("vllm", WHEEL.format("1.0"), b"wheel")
    with pytest.raises(SourceError, match="does not state its commit"):
        pin_release(sources, "vllm", "1.0")


def test_another_archive_than_listed_is_refused(
    server: IndexServer, sources: Sources, tmp_path: Path
) -> None:
    release(server, tmp_path, "1.0")
    server.faults.wrong_bytes = True
    with pytest.raises(SourceError, match="isn't the file"):
        pin_release(sources, "vllm", "1.0")


def test_a_pin_of_a_line_is_taken_as_it_stands(tiny: Tiny) -> None:
    sources = _of_tiny()
    (mine,) = known_pins(tiny.patches, "vllm")
    assert mine.tree
    assert pin_release(sources, "vllm", "1.2.3", known=[mine]) is mine
    other = pin_release(sources, "vllm", "1.2.3")
    assert other.abbreviation
    assert mine.commit_text.startswith(other.commit_text)
    assert other.wheel == mine.wheel


def _of_tiny() -> Sources:
    return Sources(cache=cache_folder(), report=Reporter())


def test_a_folder_of_archives_is_a_place(tiny: Tiny) -> None:
    sources = offline(_of_tiny())
    assert released(sources, "flashinfer") == ("4.5.6rc7",)
    pin = pin_release(sources, "flashinfer", "4.5.6rc7")
    assert pin.commit == read_line(tiny.patches, "tiny").settings.flashinfer.commit


def test_what_another_line_says_wrong_is_not_told(tiny: Tiny) -> None:
    broken = tiny.patches / "broken"
    broken.mkdir()
    (broken / "line.toml").write_text("format = 2\n")
    assert [pin.version for pin in known_pins(tiny.patches, "vllm")] == ["1.2.3"]


def test_a_commit_is_pinned_without_release_files(tiny: Tiny) -> None:
    line = read_line(tiny.patches, "tiny")
    known = known_pins(tiny.patches, "vllm")
    pin = pin_commit("vllm", FULL, known=known)
    assert (pin.version, pin.commit, pin.sources) == (UNRELEASED, FULL, ("git",))
    assert pin.repository == line.settings.vllm.repository
    assert not is_released(pin)
    full = line.settings.vllm.commit
    assert full is not None
    assert pin_commit("vllm", full, known=known) == line.settings.vllm
    fields = {"abbreviation": full[:9], "commit": None, "sources": ("archive",)}
    short = msgspec.structs.replace(line.settings.vllm, **fields)
    assert pin_commit("vllm", full, known=[short]) is short
    with pytest.raises(LineError, match="full commit id"):
        pin_commit("vllm", full[:12], known=known)


def test_git_gives_the_base_of_a_pinned_commit(tiny: Tiny) -> None:
    line = read_line(tiny.patches, "tiny")
    repo = tiny.repos["vllm"]
    head = re.sub(r"\s", "", (repo / ".git/refs/heads/main").read_text())
    pin = pin_commit("vllm", head, known=known_pins(tiny.patches, "vllm"))
    sources = _of_tiny()
    base = sources.base(with_pin(line, "vllm", pin), "vllm", {})
    assert base.kind == "git"
    names = sources.store("vllm").git.run("ls-tree", "-r", "--name-only", base.commit.tree)
    assert b"vllm/new.py" in names.splitlines()  # of the patches: HEAD is after them


def test_a_moved_line_requires_what_it_builds(tiny: Tiny) -> None:
    line = read_line(tiny.patches, "tiny")
    pin = msgspec.structs.replace(line.settings.flashinfer, version="9.9")
    moved = with_pin(line, "flashinfer", pin)
    assert moved.pin("flashinfer").version == "9.9"
    assert moved.settings.requirements["flashinfer-python"].line == "==9.9"
    assert line.pin("flashinfer").version == "4.5.6rc7"  # nothing is written, nothing changed
    other = msgspec.structs.replace(line.settings.vllm, version="9.9")
    assert with_pin(line, "vllm", other).settings.requirements == line.settings.requirements


def test_no_index_is_asked_for_what_pip_does_not_name(
    sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipconfig, "read_pip_config", lambda: PipConfig(no_index=True))
    with pytest.raises(UnavailableError, match="no place lists"):
        releases.released(sources, "vllm")
