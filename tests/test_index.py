import errno
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.errors import LineError, MachineError, SourceError, UnavailableError
from overlay.report import Reporter
from overlay.sources import download, index
from overlay.sources.index import fetch_release
from overlay.sources.pipconfig import PipConfig, Place, parse_pip_config, read_pip_config, redacted
from tests.support.servers import IndexServer, index_server

FILE = "demo_pkg-1.0rc1.tar.gz"
WHEEL = "demo_pkg-1.0rc1-cp99-abi3-win_amd64.whl"
DATA = random.Random(7).randbytes(300_000)
SHA = hashlib.sha256(DATA).hexdigest()
QUIET = Reporter(quiet=True)


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No configuration of pip's, no credentials, no proxies, short pauses."""
    for name in list(os.environ):
        if name.upper().startswith("PIP_") or name.lower().endswith("_proxy") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.setattr(download, "BACKOFF", 0.001)


@pytest.fixture(params=[False, True], ids=["html", "json"])
def pages(request: pytest.FixtureRequest) -> Iterator[IndexServer]:
    """An index that has the file, once with each kind of page."""
    with index_server(as_json=request.param) as server:
        server.add("demo-pkg", FILE, DATA)
        yield server


@pytest.fixture
def server() -> Iterator[IndexServer]:
    with index_server() as server:
        server.add("demo-pkg", FILE, DATA)
        yield server


def configure(monkeypatch: pytest.MonkeyPatch, **settings: object) -> None:
    """What pip would answer; the tests of pip itself are below."""
    config = PipConfig(**settings)  # type: ignore[arg-type]
    monkeypatch.setattr(index, "read_pip_config", lambda: config)


def use(monkeypatch: pytest.MonkeyPatch, *servers: IndexServer, retries: int = 5) -> None:
    urls = tuple(server.simple_url for server in servers)
    configure(monkeypatch, index_urls=urls[:1], extra_index_urls=urls[1:], retries=retries)


def fetch(tmp_path: Path, *, file: str = FILE, sha256: str = SHA, offline: bool = False) -> Path:
    return fetch_release(
        "Demo.Pkg", file, sha256, cache=tmp_path / "cache", offline=offline, report=QUIET
    )


def place(tmp_path: Path, name: str = FILE, sha256: str = SHA) -> Path:
    return tmp_path / "cache" / "downloads" / sha256 / name


def leave_part(tmp_path: Path, data: bytes) -> Path:
    part = place(tmp_path, FILE + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(data)
    return part


# --- finding -------------------------------------------------------------------------------


def test_sdist_from_either_kind_of_page(
    pages: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, pages)
    assert fetch(tmp_path) == place(tmp_path)
    assert place(tmp_path).read_bytes() == DATA
    names = {path.name for path in place(tmp_path).parent.iterdir()}
    assert names - {".lock"} == {FILE, FILE + ".ok"}
    fetch(tmp_path)
    assert pages.gets(FILE) == 1
    agents = [seen.headers["accept-encoding"] for seen in pages.seen if "/files/" in seen.path]
    assert agents == ["identity"]


def test_wheel_for_another_machine(
    pages: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = pages.add("demo-pkg", WHEEL, b"wheel")
    use(monkeypatch, pages)
    assert fetch(tmp_path, file=WHEEL, sha256=sha256).read_bytes() == b"wheel"


def test_page_that_states_no_hash(
    pages: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.stated[FILE] = None
    use(monkeypatch, pages)
    assert fetch(tmp_path).read_bytes() == DATA


def test_page_that_states_another_hash(
    pages: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.stated[FILE] = "0" * 64
    use(monkeypatch, pages)
    with pytest.raises(SourceError, match="0" * 64):
        fetch(tmp_path)
    assert pages.gets(FILE) == 0


def test_index_out_of_reach_hides_no_other(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}/simple"
        urls = (
            str(tmp_path / "no-folder"),
            "ftp://127.0.0.1/x",
            "nonsense://",
            "http://[::1",
            server.simple_url,
        )
        configure(monkeypatch, index_urls=(dead,), extra_index_urls=urls)
        assert fetch(tmp_path).read_bytes() == DATA


def test_index_with_other_content_hides_no_other(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index_server() as bad:
        bad.add("demo-pkg", FILE, b"other")
        bad.stated[FILE] = None
        use(monkeypatch, bad, server)
        assert fetch(tmp_path).read_bytes() == DATA
        assert bad.gets(FILE) == 1


@pytest.mark.parametrize("page", ["<html>log in</html>", "\0\xff", "", "{"])
def test_portal_in_place_of_a_page(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    server.faults.page_html = page
    use(monkeypatch, server)
    with pytest.raises(UnavailableError, match="doesn't list the file"):
        fetch(tmp_path)


def test_nobody_has_it(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.page_status = 503
    url = server.simple_url.replace("://", "://me:s3cret@")
    configure(monkeypatch, index_urls=(url,), find_links=(str(tmp_path),))
    with pytest.raises(UnavailableError) as caught:
        fetch(tmp_path)
    text = str(caught.value)
    for part in (
        "Demo.Pkg",
        FILE,
        SHA,
        "1 index, 1 find-links",
        "HTTP 503",
        "***@127",
        "find-links",
    ):
        assert part in text
    assert "s3cret" not in text
    assert "me:" not in text


@pytest.mark.parametrize("kind", ["absolute", "relative", "url", "html", "home"])
def test_find_links_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    home = tmp_path / "nobody"
    folder = home / "wheels"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(DATA)
    (folder / "unrelated.txt").touch()
    (tmp_path / "links.html").write_text(f'<a href="nobody/wheels/{FILE}">x</a>')
    monkeypatch.chdir(tmp_path)
    spelled = {
        "absolute": str(folder),
        "relative": "nobody/wheels",
        "url": folder.as_uri(),
        "html": str(tmp_path / "links.html"),
        "home": "~/wheels",
    }[kind]
    configure(monkeypatch, find_links=(spelled,), no_index=True)
    assert fetch(tmp_path, offline=kind != "url").read_bytes() == DATA


def test_find_links_as_a_page(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, find_links=(f"{server.simple_url}demo-pkg/",), no_index=True)
    assert fetch(tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("kind", ["url", "path"])
def test_index_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    page = tmp_path / "pypi" / "simple" / "demo-pkg" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../files/{FILE}#sha256={SHA}">x</a>')
    (tmp_path / "pypi" / "files").mkdir()
    (tmp_path / "pypi" / "files" / FILE).write_bytes(DATA)
    root = tmp_path / "pypi" / "simple"
    configure(monkeypatch, index_urls=(root.as_uri() if kind == "url" else str(root),))
    assert fetch(tmp_path, offline=True).read_bytes() == DATA


def test_folder_with_another_file_of_the_name(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).write_bytes(b"other")
    part = leave_part(tmp_path, DATA[:1000])
    configure(monkeypatch, find_links=(str(tmp_path),), no_index=True)
    with pytest.raises(SourceError, match=hashlib.sha256(b"other").hexdigest()):
        fetch(tmp_path)
    assert part.read_bytes() == DATA[:1000]
    configure(monkeypatch, find_links=(str(tmp_path),), index_urls=(server.simple_url,))
    assert fetch(tmp_path).read_bytes() == DATA


def test_web_page_that_points_to_this_machine(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILE).write_bytes(DATA)
    server.faults.page_html = f'<a href="{(tmp_path / FILE).as_uri()}">x</a>'
    use(monkeypatch, server)
    with pytest.raises(UnavailableError, match="points to a file on this machine"):
        fetch(tmp_path)


# --- offline -------------------------------------------------------------------------------


def test_offline_opens_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_socket(*_: object, **__: object) -> None:
        raise AssertionError("a socket, while offline")

    page = tmp_path / "wheels" / "more.html"
    page.parent.mkdir()
    page.write_text(f'<a href="http://127.0.0.1:1/{FILE}">x</a>')
    configure(
        monkeypatch,
        index_urls=("http://127.0.0.1:1/simple",),
        find_links=("http://127.0.0.1:1/links", str(page.parent)),
    )
    monkeypatch.setattr(socket, "socket", no_socket)
    monkeypatch.setattr(socket, "create_connection", no_socket)
    monkeypatch.setattr(socket, "getaddrinfo", no_socket)
    with pytest.raises(UnavailableError) as caught:
        fetch(tmp_path, offline=True)
    for part in ("Demo.Pkg", FILE, SHA, "not asked, since offline: 2", "`fetch`", "find-links"):
        assert part in str(caught.value)


def test_offline_from_the_cache(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, server)
    fetch(tmp_path)
    monkeypatch.setattr(index, "read_pip_config", lambda: pytest.fail("pip was asked"))
    assert fetch(tmp_path, offline=True) == place(tmp_path)


# --- downloading ---------------------------------------------------------------------------


def test_dropped_connections_are_resumed(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.drop_after, server.faults.drops = 100_000, 2
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.ranges(FILE) == [None, "bytes=100000-", "bytes=200000-"]
    assert [seen.headers.get("if-range") is not None for seen in server.seen[1:]] == [
        False,
        True,
        True,
    ]


def test_dropped_connections_without_range(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.drop_after, server.faults.drops = 100_000, 2
    server.faults.ignore_range = True
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("is_ignoring", [False, True])
def test_drops_that_never_end(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ignoring: bool
) -> None:
    server.faults.drop_after = 1000
    server.faults.ignore_range = is_ignoring
    use(monkeypatch, server, retries=3)
    with pytest.raises(UnavailableError, match="4 attempts in a row"):
        fetch(tmp_path)
    assert server.gets(FILE) == 4
    part = place(tmp_path, FILE + ".part")
    assert part.read_bytes() == DATA[: 1000 if is_ignoring else 4000]
    server.faults.drop_after = None
    assert fetch(tmp_path).read_bytes() == DATA


@pytest.mark.parametrize("left", [b"", DATA[:1], DATA[:-1]])
def test_part_of_an_earlier_run_is_resumed(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    leave_part(tmp_path, left)
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.ranges(FILE) == [f"bytes={len(left)}-" if left else None]


def test_whole_part_needs_no_request(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_part(tmp_path, DATA)
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.gets(FILE) == 0


@pytest.mark.parametrize("left", [b"x" * 1000, b"x" * len(DATA), DATA + b"x"])
def test_bad_part_is_restarted_once(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes
) -> None:
    leave_part(tmp_path, left)
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.ranges(FILE) == [f"bytes={len(left)}-", None]


@pytest.mark.parametrize(("left", "requests"), [(b"", 1), (DATA[:1000], 2)])
def test_wrong_bytes_are_refused(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bytes, requests: int
) -> None:
    server.faults.wrong_bytes = True
    leave_part(tmp_path, left)
    use(monkeypatch, server)
    got = hashlib.sha256(bytes([DATA[0] ^ 1]) + DATA[1:]).hexdigest()
    with pytest.raises(SourceError, match=f"(?s)expected sha256 {SHA}.*got sha256 +{got}"):
        fetch(tmp_path)
    assert server.gets(FILE) == requests
    assert [path.name for path in place(tmp_path).parent.iterdir()] == [".lock"]


def test_file_that_changes_between_two_attempts(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If-Range: the second answer is the whole new file, not the end of it."""
    server.faults.drop_after, server.faults.drops = 100_000, 1
    server.files[FILE] = b"x" * len(DATA)
    use(monkeypatch, server)
    pauses = iter([lambda: server.files.update({FILE: DATA})])
    monkeypatch.setattr(time, "sleep", lambda _: next(pauses)())
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.gets(FILE) == 2


def test_no_length(server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults.no_length = True
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.gets(FILE) == 1


def test_no_length_and_cut_short(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.no_length = True
    server.faults.drop_after, server.faults.drops = 1000, 1
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.ranges(FILE) == [None, "bytes=1000-"]


@pytest.mark.parametrize("statuses", [[503, 503], [500], [429, 502, 504]])
def test_faults_that_pass(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statuses: list[int]
) -> None:
    server.faults.statuses = list(statuses)
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.gets(FILE) == len(statuses) + 1


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (410, 1), (403, 1), (304, 1), (503, 3)])
def test_faults_that_stay(
    server: IndexServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    requests: int,
) -> None:
    server.faults.status = status
    use(monkeypatch, server, retries=2)
    with pytest.raises(UnavailableError, match=f"HTTP {status}"):
        fetch(tmp_path)
    assert server.gets(FILE) == requests


def test_portal_in_place_of_the_file(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.portal = True
    part = leave_part(tmp_path, DATA[:1000])
    use(monkeypatch, server)
    with pytest.raises(UnavailableError, match="HTML page came instead"):
        fetch(tmp_path)
    assert part.read_bytes() == DATA[:1000]


def test_stated_encoding_is_not_undone(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.encoding = "gzip"
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA


def test_redirect(server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults.redirect = True
    server.faults.drop_after, server.faults.drops = 1000, 1
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA


def test_progress_adds_up(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when resumed, and when a restart takes bytes back."""
    steps: list[int] = []
    totals: list[int | None] = []

    class Counting(Reporter):
        def progress(self, label: str, total: int | None = None):  # type: ignore[no-untyped-def]
            totals.append(total)
            return memoryview_free(steps)

    server.faults.drop_after, server.faults.drops = 100_000, 1
    server.faults.ignore_range = True
    use(monkeypatch, server)
    fetch_release("demo-pkg", FILE, SHA, cache=tmp_path, offline=False, report=Counting())
    assert totals == [len(DATA)]
    assert sum(steps) == len(DATA)


class memoryview_free:
    """A context manager that yields ``steps.append``."""

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def __enter__(self) -> object:
        return self.steps.append

    def __exit__(self, *_: object) -> None:
        pass


# --- credentials and trust -----------------------------------------------------------------


def test_credentials_in_the_address(
    pages: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.faults.auth = ("me@home", "s3:cret/")
    use(monkeypatch, pages)
    with pytest.raises(UnavailableError, match="HTTP 401"):
        fetch(tmp_path)
    configure(monkeypatch, index_urls=(pages.with_credentials("me@home", "s3:cret/"),))
    assert fetch(tmp_path).read_bytes() == DATA


def test_credentials_from_netrc(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.auth = ("me", "s3cret")
    netrc = tmp_path / "nobody" / ".netrc"
    netrc.parent.mkdir()
    netrc.write_text("machine 127.0.0.1 login me password s3cret\n")
    netrc.chmod(0o600)
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA


def test_credentials_go_to_their_own_index_only(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with index_server() as other:
        other.add("demo-pkg", FILE, b"")
        configure(
            monkeypatch,
            index_urls=(other.simple_url,),
            extra_index_urls=(server.with_credentials("me", "s3cret"),),
        )
        fetch(tmp_path)
        assert not any("authorization" in seen.headers for seen in other.seen)
        assert all("authorization" in seen.headers for seen in server.seen)


def test_plain_http_needs_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, index_urls=("http://index.invalid/simple",))
    with pytest.raises(UnavailableError, match="trusted-host"):
        fetch(tmp_path)
    configure(
        monkeypatch,
        index_urls=("http://index.invalid/simple",),
        trusted_hosts=("index.invalid",),
    )
    with pytest.raises(UnavailableError, match="ConnectError"):
        fetch(tmp_path)


def test_proxy_is_used(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, asked as a proxy, answers 404: what counts is that it was asked."""
    proxy = server.url.removeprefix("http://")
    configure(
        monkeypatch,
        index_urls=("http://index.invalid/simple",),
        trusted_hosts=("index.invalid",),
        proxy=proxy,
    )
    assert fetch(tmp_path).read_bytes() == DATA
    assert {seen.headers["host"] for seen in server.seen} == {"index.invalid"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed one for 127.0.0.1, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    argv = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
            "-keyout", folder / "key.pem", "-out", folder / "cert.pem")  # fmt: skip
    subprocess.run(argv, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes((folder / "key.pem").read_bytes() + (folder / "cert.pem").read_bytes())
    return both


@pytest.mark.parametrize("how", ["none", "cert", "variable", "trusted-host"])
def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certificate: Path, how: str) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with index_server(certificate=certificate) as server:
        server.add("demo-pkg", FILE, DATA)
        settings: dict[str, object] = {"index_urls": (server.simple_url,), "retries": 0}
        if how == "cert":
            settings["cert"] = str(certificate)
        elif how == "trusted-host":
            settings["trusted_hosts"] = (server.url.removeprefix("https://"),)
        elif how == "variable":
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        configure(monkeypatch, **settings)
        if how == "none":
            with pytest.raises(UnavailableError, match="CERTIFICATE_VERIFY_FAILED"):
                fetch(tmp_path)
        else:
            assert fetch(tmp_path).read_bytes() == DATA


@pytest.mark.parametrize(
    "settings", [{"cert": "/no/such.pem"}, {"client_cert": "/no/such"}, {"proxy": "x://y"}]
)
def test_bad_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    configure(monkeypatch, **settings)
    with pytest.raises(MachineError, match="certificates or proxies"):
        fetch(tmp_path)


# --- the cache -----------------------------------------------------------------------------


def test_verified_file_is_not_read_again(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, server)
    fetch(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_sha256", lambda _: pytest.fail("hashed again"))
        fetch(tmp_path)
    place(tmp_path, FILE + ".ok").write_text("{")
    fetch(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(index, "_sha256", lambda _: pytest.fail("hashed again"))
        fetch(tmp_path)
    assert server.gets(FILE) == 1


def test_changed_file_is_fetched_again(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, server)
    path = fetch(tmp_path)
    path.write_bytes(b"x" + DATA[1:])
    with pytest.raises(UnavailableError):
        fetch(tmp_path, offline=True)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.gets(FILE) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = leave_part(tmp_path, b"")
    part.unlink()
    part.symlink_to("/dev/full")
    use(monkeypatch, server)
    with pytest.raises(MachineError, match=r"(?s)full: .*cache.*free some space") as caught:
        fetch(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert not place(tmp_path).exists()


def test_too_little_room_is_told_before(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    use(monkeypatch, server)
    with pytest.raises(MachineError, match="300000 bytes are still to come, 1000 are free"):
        fetch(tmp_path)


def test_cache_that_is_a_file(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").touch()
    use(monkeypatch, server)
    with pytest.raises(MachineError, match=r"(?s)can't be used.*VLLM_OVERLAY_CACHE"):
        fetch(tmp_path)


def test_cache_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the owner of all files ignores modes, the calls that would fail are made to."""
    place(tmp_path).parent.mkdir(parents=True)
    place(tmp_path).write_bytes(DATA)

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "open", read_only)
    assert fetch(tmp_path) == place(tmp_path)
    place(tmp_path).unlink()
    with pytest.raises(MachineError, match=r"(?s)can't be used.*Read-only file system"):
        fetch(tmp_path)


SCRIPT = """
import sys
from pathlib import Path
from overlay.sources.index import fetch_release
from overlay.report import Reporter
file, sha256, cache = sys.argv[1:]
fetch_release("demo-pkg", file, sha256, cache=Path(cache), offline=False, report=Reporter())
"""


def start(server: IndexServer, cache: Path) -> subprocess.Popen[str]:
    root = str(Path(index.__file__).parent.parent)
    return subprocess.Popen(
        (sys.executable, "-c", SCRIPT, FILE, SHA, str(cache)),
        env=os.environ | {"PYTHONPATH": root, "PIP_INDEX_URL": server.simple_url},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_in_the_middle(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.slow = 0.1
    child = start(server, tmp_path / "cache")
    part = place(tmp_path, FILE + ".part")
    until = time.monotonic() + 30
    while not (part.exists() and part.stat().st_size > 50_000):
        assert child.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    size = part.stat().st_size
    assert 50_000 < size < len(DATA)
    server.faults.slow = 0
    use(monkeypatch, server)
    assert fetch(tmp_path).read_bytes() == DATA
    assert server.ranges(FILE)[-1] == f"bytes={size}-"


def test_two_processes_download_once(server: IndexServer, tmp_path: Path) -> None:
    server.faults.slow = 0.1
    children = [start(server, tmp_path / "cache") for _ in range(2)]
    told = [child.communicate(timeout=60)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert server.gets(FILE) == 1
    assert sum("waiting for another process" in text for text in told) == 1
    assert place(tmp_path).read_bytes() == DATA


def test_two_threads_download_once(
    server: IndexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults.slow = 0.01
    use(monkeypatch, server)
    threads = [threading.Thread(target=fetch, args=(tmp_path,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.gets(FILE) == 1
    assert place(tmp_path).read_bytes() == DATA


# --- names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [
    "../demo_pkg-1.0.tar.gz", "a/demo_pkg-1.0.tar.gz", ".", "", "demo_pkg-1.0.tar.gz\n",
    "other-1.0.tar.gz", "demo_pkg-1.0.exe", "demo_pkg.whl", "demo_pkg-.tar.gz", ".lock",
    "-1.tar.gz",
])  # fmt: skip
def test_bad_file_names(tmp_path: Path, file: str) -> None:
    with pytest.raises(LineError) as caught:
        fetch(tmp_path, file=file)
    assert repr(file) in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("sha256", ["", "0" * 63, "G" * 64, SHA.upper(), f"../{SHA[3:]}"])
def test_bad_hashes(tmp_path: Path, sha256: str) -> None:
    with pytest.raises(LineError, match="no SHA-256"):
        fetch(tmp_path, sha256=sha256)


# --- pip -----------------------------------------------------------------------------------


def test_no_configuration() -> None:
    assert read_pip_config() == PipConfig()


def test_configuration_file_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / FILE).write_bytes(DATA)
    file = tmp_path / "pip.conf"
    file.write_text(
        f"[global]\nno-index = yes\nquiet = 3\nfind-links =\n    {tmp_path}/none\n"
        f"    {tmp_path}/wheels\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert fetch(tmp_path).read_bytes() == DATA


def test_hostile_environment(
    tmp_path: Path, server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text("raise SystemExit('the wrong pip')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # what names the current folder gets it
    for name, value in {
        "PIP_QUIET": "3", "PIP_VERBOSE": "nonsense", "PIP_PYTHON": "/no/python",
        "PIP_LOG": "/no/log",
        "PIP_REQUIRE_VIRTUALENV": "1", "PIP_USE_FEATURE": "none-such", "PIP_EDITOR": "x",
        "PIP_INDEX_URL": server.simple_url, "PIP_DEFAULT_TIMEOUT": "7", "PIP_RETRIES": "1",
        "FORCE_COLOR": "1", "COLUMNS": "10", "PYTHONWARNINGS": "error", "PIP_NO_SUCH": "x",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    expected = PipConfig(index_urls=(server.simple_url,), timeout=7, retries=1)
    assert read_pip_config() == expected
    assert fetch(tmp_path).read_bytes() == DATA


def test_weak_and_strong_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nindex-url = https://a.invalid\ntimeout = 1\nretries = 1\nproxy = p:1\n"
        "[install]\nindex-url = https://b.invalid\ntimeout = 2\ncert = /c%%20\n"
        "[download]\nindex_url = https://c.invalid\ntrusted-host = x\n    y:8\n"
        "[list]\nproxy = no\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_RETRIES", "4")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    assert read_pip_config() == PipConfig(
        index_urls=("https://c.invalid",), timeout=2, retries=4, proxy="p:1",
        trusted_hosts=("x", "y:8"), cert="/c%%20",
    )  # fmt: skip


def test_broken_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("no section = 1\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    with pytest.raises(MachineError, match=r"(?s)pip can't say.*pip\.conf"):
        read_pip_config()


@pytest.mark.parametrize("line", ["global.timeout='soon'", "global.retries='-1'",
                                  ":env:.no-index='perhaps'", "global.timeout='nan'"])  # fmt: skip
def test_values_that_are_none(line: str) -> None:
    with pytest.raises(MachineError, match="can't be read"):
        parse_pip_config([line])


def test_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run((sys.executable, "-m", "venv", "--without-pip", bare), check=True)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MachineError, match="module pip is missing"):
        read_pip_config()


@given(st.text(), st.text())
def test_credentials_never_show(user: str, password: str) -> None:
    """Not even where an unquoted / or @ makes the address a malformed one."""
    url = f"https://{user}:{password}@index.invalid/simple"
    assert redacted(url) == "https://***@index.invalid/simple"
    assert str(Place(kind="index", url=url)) == "index https://***@index.invalid/simple"


def test_malformed_addresses_show_no_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, index_urls=("http://me:s3/cret@127.0.0.1:1/simple",))
    with pytest.raises(UnavailableError) as caught:
        fetch(tmp_path)
    assert "s3" not in str(caught.value)
    assert "cret@" not in str(caught.value)


def test_order_of_places() -> None:
    config = PipConfig(index_urls=("https://a",), extra_index_urls=("file:///b", "https://a"),
                       find_links=("https://c", "d"))  # fmt: skip
    assert [str(place) for place in config.places("https://default")] == [
        "find-links d", "index file:///b", "find-links https://c", "index https://a",
    ]  # fmt: skip
    assert [p.url for p in PipConfig().places("https://default")] == ["https://default"]
    assert PipConfig(no_index=True).places("https://default") == ()
