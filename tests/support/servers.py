"""Loopback servers for tests: a package index with faults to switch on, and a real git server.

Both are context managers, listen on 127.0.0.1 only, and are gone when the block ends::

    with index_server() as index:
        index.add("demo", "demo-1.0.tar.gz", data)
        index.faults.drop_after = 1000          # each answer ends after 1000 bytes
        ...                                     # PIP_INDEX_URL=index.simple_url
        assert index.gets("demo-1.0.tar.gz") == 2

    with git_server(folder_of_bare_repositories) as git:
        git.allow_filter = False                # may be switched while it runs
        ...                                     # git clone {git.url}/name.git
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_LARGEST_BODY = 256 << 20
_CHUNK = 1 << 14


# --- package index -------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong. Each holds until changed; all but ``auth`` concern file downloads only.

    Attributes:
        drop_after: the connection is closed after so many bytes of a body.
        drops: how many answers ``drop_after`` still hits; negative: all.
        ignore_range: a Range header is ignored.
        wrong_bytes: the first byte of what is sent is changed.
        statuses: answered in turn instead of the file, then the file is served.
        status: answered always, instead of the file.
        portal: an HTML page is sent instead of the file, with status 200.
        no_length: no Content-Length, the connection's end ends the body.
        slow: seconds of pause before each 16 KiB.
        encoding: stated as Content-Encoding, though the bytes are the file's own.
        redirect: this many times the request is redirected to another path first.
        auth: user and password that every request must carry (pages too).
        page_status: answered instead of every page.
        page_html: sent instead of every page, as text/html.
    """

    drop_after: int | None = None
    drops: int = -1
    ignore_range: bool = False
    wrong_bytes: bool = False
    statuses: list[int] = field(default_factory=list)
    status: int | None = None
    portal: bool = False
    no_length: bool = False
    slow: float = 0.0
    encoding: str | None = None
    redirect: bool = False
    auth: tuple[str, str] | None = None
    page_status: int | None = None
    page_html: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One request: method, path without query, and headers with lower-case names."""

    method: str
    path: str
    headers: dict[str, str]


class IndexServer:
    """A simple index (PEP 503 as HTML, or PEP 691 as JSON) with files in memory.

    Attributes:
        url: ``http://127.0.0.1:<port>``; ``simple_url`` is the index below it.
        faults: see ``Faults``.
        seen: all requests, in order.
        stated: file name to the SHA-256 that pages state for it; the true one at first,
            None to state none.
    """

    def __init__(self, url: str, *, as_json: bool) -> None:
        self.url = url
        self.as_json = as_json
        self.faults = Faults()
        self.seen: list[Seen] = []
        self.files: dict[str, bytes] = {}
        self.projects: dict[str, list[str]] = {}
        self.stated: dict[str, str | None] = {}
        self.lock = threading.Lock()

    @property
    def simple_url(self) -> str:
        return f"{self.url}/simple/"

    def with_credentials(self, user: str, password: str) -> str:
        """``simple_url`` with a user and a password in it."""
        return self.simple_url.replace(
            "://", f"://{quote(user, safe='')}:{quote(password, safe='')}@", 1
        )

    def add(self, project: str, file: str, data: bytes) -> str:
        """Offer a file; returns its SHA-256."""
        self.files[file] = data
        self.projects.setdefault(project, []).append(file)
        self.stated[file] = hashlib.sha256(data).hexdigest()
        return hashlib.sha256(data).hexdigest()

    def gets(self, file: str) -> int:
        """How often the file was asked for."""
        return sum(seen.path == f"/files/{file}" for seen in self.seen)

    def ranges(self, file: str) -> list[str | None]:
        """The Range headers of the requests for the file, None where there was none."""
        return [seen.headers.get("range") for seen in self.seen if seen.path == f"/files/{file}"]


class _IndexHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    index: IndexServer

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.index.lock:
            self.index.seen.append(Seen(method="GET", path=path, headers=headers))
        if not self._is_authorised():
            self._send(401, b"", {"WWW-Authenticate": 'Basic realm="index"'})
        elif path.startswith("/simple/"):
            self._page(path.removeprefix("/simple/").strip("/"))
        elif path.startswith(("/files/", "/moved/")):
            self._file(path.split("/", 2)[2], is_moved=path.startswith("/moved/"))
        else:
            self._send(404, b"")

    def _is_authorised(self) -> bool:
        if self.index.faults.auth is None:
            return True
        token = base64.b64encode(":".join(self.index.faults.auth).encode()).decode()
        return self.headers.get("Authorization") == f"Basic {token}"

    def _page(self, project: str) -> None:
        faults, files = self.index.faults, self.index.projects.get(project)
        if faults.page_status or (faults.page_html is None and files is None):
            self._send(faults.page_status or 404, b"")
        elif faults.page_html is not None:
            self._send(200, faults.page_html.encode(), {"Content-Type": "text/html"})
        elif self.index.as_json:
            self._send(200, self._json(project, files or []),
                       {"Content-Type": "application/vnd.pypi.simple.v1+json"})  # fmt: skip
        else:
            self._send(200, self._html(files or []), {"Content-Type": "text/html"})

    def _json(self, project: str, files: list[str]) -> bytes:
        entries = [
            {
                "filename": file,
                "url": f"../../files/{quote(file)}",
                "hashes": {"sha256": stated} if (stated := self.index.stated[file]) else {},
                "yanked": "a test yanks all",
            }
            for file in files
        ]
        page = {"meta": {"api-version": "1.0"}, "name": project, "files": entries}
        return json.dumps(page).encode()

    def _html(self, files: list[str]) -> bytes:
        rows = []
        for file in files:
            stated = self.index.stated[file]
            mark = f"#sha256={stated}" if stated else ""
            rows.append(
                f'<a href="../../files/{quote(file)}{mark}" data-requires-python="&lt;3">'
                f"{html.escape(file)}</a>"
            )
        return ("<!DOCTYPE html><html><body>" + "\n".join(rows) + "</body></html>").encode()

    def _file(self, file: str, *, is_moved: bool) -> None:
        faults, data = self.index.faults, self.index.files.get(file)
        with self.index.lock:
            status = faults.statuses.pop(0) if faults.statuses else faults.status
        if data is None or status:
            self._send(status or 404, b"")
        elif faults.portal:
            self._send(200, b"<html>please log in</html>", {"Content-Type": "text/html"})
        elif faults.redirect and not is_moved:
            self._send(302, b"", {"Location": f"/moved/{quote(file)}"})
        else:
            self._body(data)

    def _body(self, data: bytes) -> None:
        faults = self.index.faults
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        headers = {"Content-Type": "application/octet-stream", "ETag": etag}
        asked, start, status = self.headers.get("Range", ""), 0, 200
        is_same = self.headers.get("If-Range", etag) == etag
        if asked.startswith("bytes=") and is_same and not faults.ignore_range:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(data):
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if faults.encoding:
            headers["Content-Encoding"] = faults.encoding
        body = data[start:]
        if faults.wrong_bytes and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        self._send(status, body, headers, is_file=True)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *,
        is_file: bool = False,
    ) -> None:  # fmt: skip
        faults = self.index.faults
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if is_file and faults.no_length:
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_file:
            body = self._cut(body)
        for at in range(0, len(body), _CHUNK):
            if is_file and faults.slow:
                time.sleep(faults.slow)
            self.wfile.write(body[at : at + _CHUNK])
        self.wfile.flush()

    def _cut(self, body: bytes) -> bytes:
        faults = self.index.faults
        with self.index.lock:
            if faults.drop_after is None or faults.drops == 0:
                return body
            faults.drops -= 1
        self.close_connection = True
        return body[: faults.drop_after]

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def index_server(
    *, as_json: bool = False, certificate: Path | None = None
) -> Iterator[IndexServer]:
    """Serve an empty index, to be filled with ``add``; pages are HTML, or JSON if asked.

    With a ``certificate`` (PEM, the key in the same file) it is served over TLS.
    """

    class Handler(_IndexHandler):
        pass

    with _serving(Handler, certificate) as url:
        Handler.index = IndexServer(url, as_json=as_json)
        yield Handler.index


# --- git -----------------------------------------------------------------------------------


class GitServer:
    """A real git server: ``git http-backend`` over the bare repositories below one folder.

    Attributes:
        url: ``http://127.0.0.1:<port>``; a repository is ``{url}/<its path below the folder>``.
        allow_filter: whether partial clones are served (uploadpack.allowFilter).
        allow_reachable: whether any reachable commit may be asked for by its id
            (uploadpack.allowReachableSHA1InWant).
        allow_any: whether any object may be (uploadpack.allowAnySHA1InWant), which is what
            blobs on demand need under protocol 0.
        is_down: every request is answered with 503.
        seen: the requests, as (method, path with query).
    """

    def __init__(self, url: str, root: Path) -> None:
        self.url, self.root = url, root
        self.allow_filter = self.allow_reachable = self.allow_any = True
        self.is_down = False
        self.seen: list[tuple[str, str]] = []

    def environment(self) -> dict[str, str]:
        """What git runs with: no configuration but the switches here."""
        options = {
            "uploadpack.allowFilter": self.allow_filter,
            # in this order: a false allowAnySHA1InWant takes all of them back
            "uploadpack.allowAnySHA1InWant": self.allow_any,
            "uploadpack.allowReachableSHA1InWant": self.allow_reachable,
        }
        pairs = [(name, str(value).lower()) for name, value in options.items()]
        pairs.append(("safe.directory", "*"))
        found = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        found |= {
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_COUNT": str(len(pairs)),
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
        }
        for number, (name, value) in enumerate(pairs):
            found |= {f"GIT_CONFIG_KEY_{number}": name, f"GIT_CONFIG_VALUE_{number}": value}
        return found


class _GitHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    git: GitServer

    def do_GET(self) -> None:
        self._run(b"")

    def do_POST(self) -> None:
        self._run(self._read_body())

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(min(int(self.headers.get("Content-Length", 0)), _LARGEST_BODY))
        parts, size = [], 0
        while length := int(self.rfile.readline().split(b";")[0], 16):
            size += length
            if size > _LARGEST_BODY:
                raise ValueError("a request larger than a test needs")
            parts.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _run(self, body: bytes) -> None:
        self.git.seen.append((self.command, self.path))
        if self.git.is_down:
            self._answer(503, [], b"")
            return
        parts = urlsplit(self.path)
        variables = {
            "REQUEST_METHOD": self.command,
            "PATH_INFO": unquote(parts.path),
            "QUERY_STRING": parts.query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "REMOTE_ADDR": "127.0.0.1",
            "SERVER_PROTOCOL": self.request_version,
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        done = subprocess.run(
            ("git", "http-backend"),
            env=self.git.environment() | variables,
            input=body, capture_output=True, timeout=60, check=False,
        )  # fmt: skip
        head, _, content = done.stdout.partition(b"\r\n\r\n")
        pairs = [line.decode().split(": ", 1) for line in head.split(b"\r\n") if b": " in line]
        status = next((int(value.split()[0]) for name, value in pairs if name == "Status"), 200)
        if done.returncode and not pairs:
            status = 500
        self._answer(status, [(name, value) for name, value in pairs if name != "Status"], content)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def git_server(root: Path) -> Iterator[GitServer]:
    """Serve the bare repositories below ``root`` over smart HTTP, for reading."""

    class Handler(_GitHandler):
        pass

    with _serving(Handler) as url:
        Handler.git = GitServer(url, root)
        yield Handler.git


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is what some tests are about: nothing is printed."""


@contextmanager
def _serving(
    handler: type[BaseHTTPRequestHandler], certificate: Path | None = None
) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
