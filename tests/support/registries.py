"""FAKE registries, for what the real one can't be made to do.

``FakeTools`` stands in for oras, cosign and syft, on a registry in memory: for tests that run
where none of them is installed, and for races that a test has to win. ``faulty_registry`` is an
HTTP server that gives the real programs bad answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from overlay.images.signing import PREDICATES
from overlay.images.tools import Answer, Tools

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Respond = Callable[[BaseHTTPRequestHandler], tuple[int, Mapping[str, str], bytes]]


@dataclass
class Memory:
    """What a fake registry holds; one repository, or all the same."""

    manifests: dict[str, bytes] = field(default_factory=dict)
    configs: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    signatures: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # key and tag
    statements: dict[tuple[str, str, str], bytes] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FakeTools(Tools):
    """FAKE oras, cosign and syft.

    Attributes:
        memory: of the registry.
        before: called with program and arguments before each is obeyed.
        log: what was started.
    """

    memory: Memory
    before: Callable[[tuple[str, ...]], None] | None = None
    log: list[tuple[str, ...]] = field(default_factory=list)

    def run(
        self,
        program: str,
        *argv: str | Path,
        secrets: Mapping[str, str] | None = None,
        timeout: float | None = None,
        cwd: Path | None = None,
    ) -> Answer:
        del secrets, timeout, cwd
        words = [str(word) for word in argv]
        plain = [word for word in words if word not in ("--plain-http", "--to-plain-http")]
        self.started += 1
        self.log.append((program, *plain))
        if self.before is not None:
            self.before((program, *plain))
        if program == "oras":
            return self._oras(plain)
        return self._cosign(plain) if program == "cosign" else _syft(plain)

    def _oras(self, words: list[str]) -> Answer:
        memory = self.memory
        match words:
            case ["repo", "tags", _]:
                return _said("".join(f"{tag}\n" for tag in memory.tags))
            case ["resolve", name]:
                found = memory.tags.get(name.rpartition(":")[2])
                return _said(f"{found}\n") if found else _failed(f"{name}: not found")
            case ["tag", name, tag]:
                memory.tags[tag] = _digest(name)
                return _said("")
            case ["cp", *_, source, _]:
                self._take(Path(source.rpartition("@")[0]), _digest(source))
                return _said("")
            case ["manifest", "fetch", name]:
                return _bytes(memory.manifests[_digest(name)])
            case ["manifest", "fetch-config", name]:
                return _bytes(memory.configs[_digest(name)])
        raise AssertionError(f"the fake oras doesn't know {words}")

    def _take(self, folder: Path, digest: str) -> None:
        def blob(name: str) -> bytes:
            return (folder / "blobs" / "sha256" / name.removeprefix("sha256:")).read_bytes()

        manifest = blob(digest)
        self.memory.manifests[digest] = manifest
        self.memory.configs[digest] = blob(json.loads(manifest)["config"]["digest"])

    def _cosign(self, words: list[str]) -> Answer:
        verb, *rest = words
        options = {rest[at]: rest[at + 1] for at in range(len(rest) - 1) if rest[at][0] == "-"}
        key = options.get("--key", "")
        if verb == "public-key":
            return _bytes(Path(key).read_bytes())
        digest, tag = _digest(words[-1]), options.get("-a", "=").partition("=")[2]
        if verb in ("sign", "attest"):
            return self._signed(verb, Path(key).read_text(), digest, tag, options)
        return self._verified(verb, key, digest, tag, options)

    def _signed(
        self, verb: str, key: str, digest: str, tag: str, options: dict[str, str]
    ) -> Answer:
        if verb == "sign":
            self.memory.signatures.setdefault(digest, set()).add((key, tag))
        else:
            kind = options["--type"]
            predicate = Path(options["--predicate"]).read_bytes()
            self.memory.statements[(digest, kind, key)] = predicate
        return _said("")

    def _verified(
        self, verb: str, key: str, digest: str, tag: str, options: dict[str, str]
    ) -> Answer:
        if verb == "download":
            kinds = {uri: kind for kind, uri in PREDICATES.items()}
            wanted = kinds[options["--predicate-type"]]
            for (about, kind, _), predicate in self.memory.statements.items():
                if (about, kind) == (digest, wanted):
                    return _bytes(_envelope(digest, kind, predicate))
            return _failed("found no attestations")
        read = Path(key).read_text()
        if verb == "verify-attestation":
            kind = options["--type"]
            found = self.memory.statements.get((digest, kind, read))
            return _bytes(_envelope(digest, kind, found)) if found else _failed(
                "no matching attestations: "
            )  # fmt: skip
        signed = self.memory.signatures.get(digest, set())
        if not signed:
            return _failed("no signatures found", code=10)
        if read not in {by for by, _ in signed}:
            return _failed("invalid signature when validating", code=12)
        if tag and (read, tag) not in signed:
            return _failed("missing or incorrect annotation", code=12)
        return _said("")


def _syft(words: list[str]) -> Answer:
    name = words[words.index("--source-name") + 1]
    return _said(json.dumps({
        "bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": "urn:uuid:random",
        "metadata": {"timestamp": "now", "component": {"name": name}},
        "components": [
            {"name": "vllm", "version": "0.28.0", "purl": "pkg:pypi/vllm@0.28.0"},
        ],
    }))  # fmt: skip


def _envelope(digest: str, kind: str, predicate: bytes) -> bytes:
    statement = {
        "predicateType": PREDICATES[kind],  # type: ignore[index]
        "subject": [{"digest": {"sha256": digest[7:]}}],
        "predicate": json.loads(predicate),
    }
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps({"payload": payload}).encode() + b"\n"


def _digest(name: str) -> str:
    return name.rpartition("@")[2]


def _said(text: str) -> Answer:
    return _bytes(text.encode())


def _bytes(data: bytes) -> Answer:
    return Answer(code=0, out=data, said="")


def _failed(text: str, code: int = 1) -> Answer:
    return Answer(code=code, out=b"", said=f"Error: {text}")


@contextmanager
def faulty_registry(respond: Respond) -> Iterator[str]:
    """A FAKE registry on loopback; its address.

    Args:
        respond: status, headers and body for each request.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            status, headers, body = respond(self)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = answer

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Nothing: the tests look at the requests themselves."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Nothing: clients that hear no more hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sha256(data: bytes) -> str:
    """The digest of some bytes, as registries write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
