"""publish, promote and image-diff with the real oras, cosign and syft, on a real registry.

The registry is on loopback. What it can't be made to do, a FAKE one does (``faulty_registry``).
"""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.cli import main
from overlay.errors import PublishError, UnavailableError
from overlay.images.claim import claim
from overlay.images.imagelist import read_images
from overlay.images.reference import parse_repository
from overlay.images.registry import Registry
from overlay.images.tools import Tools
from tests.images.engine import registry
from tests.support.layouts import MANIFEST, make_layout
from tests.support.publishing import ROOT, make_image, make_project
from tests.support.registries import faulty_registry, sha256

if TYPE_CHECKING:
    from collections.abc import Iterator
    from http.server import BaseHTTPRequestHandler

    from tests.support.layouts import Layout

PASSWORD = "correct horse"  # noqa: S105
SETTLE = "2"  # seconds, on a machine that may be busy
DATE = "20261201"
MISSING = [name for name in ("oras", "cosign", "docker-registry") if not shutil.which(name)]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as address:
        yield address


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two key pairs, ``one`` and ``two``."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("one", "two"):
        subprocess.run(
            ("cosign", "generate-key-pair", "--output-key-prefix", name),
            cwd=folder, env={**os.environ, "COSIGN_PASSWORD": PASSWORD}, check=True,
            capture_output=True,
        )  # fmt: skip
    return folder


class Desk:
    """A project with images of its own, and a repository that nobody else uses."""

    def __init__(self, folder: Path, address: str, keys: Path, capfd: Any) -> None:
        self.folder, self.keys, self._capfd = folder, keys, capfd
        self.project = make_project(folder / "project")
        self.repository = f"{address}/{folder.name.strip('_').lower().replace('__', '_')}/vllm"

    def image(self, name: str = "image", **options: Any) -> Layout:
        return make_image(self.project, self.folder / name, **options)

    def words(self, layout: Layout, *more: str) -> tuple[str, ...]:
        return (
            str(layout.folder), "--to", self.repository, "--key", str(self.keys / "one.key"),
            "--date", DATE, "--settle", SETTLE, *more,
        )  # fmt: skip

    def run(self, *words: str, code: int = 0) -> Any:
        self._capfd.readouterr()
        verb, *rest = words
        got = main(["--patches", str(self.project / "patches"), verb, "--json", *rest])
        out, err = self._capfd.readouterr()
        assert PASSWORD not in out + err
        assert got == code, out + err
        return json.loads(out)

    def publish(self, layout: Layout, *more: str, code: int = 0) -> Any:
        return self.run("publish", *self.words(layout, *more), code=code)

    def start(self, layout: Layout, *more: str, path: Path | None = None) -> Any:
        """The command in a process of its own."""
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        if path is not None:
            env["PATH"] = f"{path}:{env['PATH']}"
        return subprocess.Popen(
            (sys.executable, "-m", "overlay", "--patches", str(self.project / "patches"),
             "publish", "--json", *self.words(layout, *more)),
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tags(self) -> dict[str, str]:
        """Tags and what they name, as oras says it; without what cosign keeps in tags."""
        return {
            tag: self.oras("resolve", f"{self.repository}:{tag}").strip()
            for tag in self.oras("repo", "tags", self.repository, code=None).split()
            if not tag.startswith("sha256-")
        }

    def oras(self, *words: str, code: int | None = 0) -> str:
        command = ("oras", *words[:-1], "--plain-http", words[-1])
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert code is None or done.returncode == code, done.stderr
        return done.stdout

    def cosign(self, verb: str, *words: str, key: str = "one.pub", code: int = 0) -> str:
        done = subprocess.run(
            ("cosign", verb, "--key", str(self.keys / key), "--insecure-ignore-tlog=true", *words),
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout


@pytest.fixture
def desk(
    tmp_path: Path, address: str, keys: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> Desk:
    monkeypatch.setenv("COSIGN_PASSWORD", PASSWORD)
    return Desk(tmp_path, address, keys, capfd)


def statement(desk: Desk, digest: str, kind: str) -> Any:
    out = desk.cosign("verify-attestation", "--type", kind, f"{desk.repository}@{digest}")
    read = json.loads(base64.b64decode(json.loads(out.splitlines()[-1])["payload"]))
    assert read["subject"][0]["digest"]["sha256"] == digest[7:]
    return read["predicate"]


def test_a_published_image_proves_what_it_is(desk: Desk) -> None:
    layout = desk.image()
    said = desk.publish(layout)
    assert said["status"] == "published"
    assert desk.tags() == {said["tag"]: layout.digest}
    name = f"{desk.repository}@{layout.digest}"
    desk.cosign("verify", "-a", f"overlay.tag={said['tag']}", name)
    desk.cosign("verify", name, key="two.pub", code=12)
    sbom = statement(desk, layout.digest, "cyclonedx")
    assert sbom["bomFormat"] == "CycloneDX"
    purls = {one.get("purl", "") for one in sbom["components"]}
    assert any(purl.startswith("pkg:pypi/vllm@0.28.0") for purl in purls), purls
    made = statement(desk, layout.digest, "slsaprovenance1")["buildDefinition"]
    named = {one.get("name", one.get("uri")): one.get("digest") for one in
             made["resolvedDependencies"]}  # fmt: skip
    lock = (desk.project / "patches/infernal/lock.toml").read_bytes()
    assert named["patches/infernal/lock.toml"] == {"sha256": sha256(lock)[7:]}
    assert named["base"] == {"sha256": "b" * 64}
    assert named["vllm-overlay"] == {"gitCommit": "c" * 40}
    assert named["vllm 0.28.0"] == {"gitCommit": "2cf0a6915ce544dc493a0990f2ea38d81601128a"}
    wheel = next(one for one in named if one and one.endswith("x86_64.whl"))
    assert named[wheel]["sha256"].startswith("addb0ffd")
    assert [one.tag for one in read_images(desk.project)] == [said["tag"]]
    # and it can be had again, byte for byte
    copy = desk.folder / "copy"
    command = ("oras", "cp", "--no-tty", "--from-plain-http", "--to-oci-layout", name)
    subprocess.run((*command, f"{copy}:x"), check=True, capture_output=True)
    for blob in (layout.folder / "blobs/sha256").iterdir():
        assert (copy / "blobs/sha256" / blob.name).read_bytes() == blob.read_bytes()


def test_again_is_a_no_op_and_much_quicker(desk: Desk) -> None:
    layout = desk.image()
    first = desk.publish(layout)
    content = sorted(desk.oras("repo", "tags", desk.repository).split())
    signature = f"{desk.repository}:sha256-{layout.digest[7:]}.sig"
    before = desk.oras("resolve", signature)
    again = desk.publish(layout, "--date", "20270101")
    assert (again["status"], again["tag"]) == ("unchanged", first["tag"])
    assert again["processes"] < first["processes"]
    assert sorted(desk.oras("repo", "tags", desk.repository).split()) == content
    assert desk.oras("resolve", signature) == before


def test_other_content_under_the_same_tag(desk: Desk) -> None:
    first, second = desk.image("a"), desk.image("b", salt="b")
    tag = desk.publish(first)["tag"]
    error = desk.publish(second, code=27)["error"]
    assert tag.replace("-r1", "-r2") in error["fix"]
    assert desk.tags() == {tag: first.digest}
    taken = desk.publish(second, "--next")["tag"]
    assert desk.tags() == {tag: first.digest, taken: second.digest}


def test_promote(desk: Desk) -> None:
    first, second = desk.image("a"), desk.image("b", salt="b")
    tags = [desk.publish(first)["tag"], desk.publish(second, "--next")["tag"]]
    words = ("infernal", "--key", str(desk.keys / "one.pub"))
    assert desk.run("promote", tags[0], *words)["moved"]
    assert desk.tags()["infernal"] == first.digest
    assert desk.run("promote", tags[1], *words)["before"] == first.digest
    assert desk.tags()["infernal"] == second.digest
    no_key = ("infernal", "--key", str(desk.keys / "one.key"))
    assert "can't be used" in desk.run("promote", tags[0], *no_key, code=28)["error"]["what"]
    wrong = ("infernal", "--key", str(desk.keys / "two.pub"))
    assert desk.run("promote", tags[0], *wrong, code=28)["error"]["kind"] == "signature"
    assert desk.tags()["infernal"] == second.digest
    assert [one["tag"] for one in desk.run("images", "--from", desk.repository)["images"]] == tags


def test_promote_of_an_unsigned_image(desk: Desk) -> None:
    """As somebody could push it who may write to the registry and has no key."""
    ours, other = desk.image("a"), desk.image("b", salt="b")
    tag = desk.publish(ours)["tag"]
    name = f"{desk.repository}:{tag}"
    command = ("oras", "cp", "--no-tty", "--to-plain-http", "--from-oci-layout")
    subprocess.run(
        (*command, f"{other.folder}@{other.digest}", name), check=True, capture_output=True
    )
    words = ("promote", tag, "latest", "--key", str(desk.keys / "one.pub"))
    assert "isn't what was published" in desk.run(*words, code=27)["error"]["what"]
    (desk.project / "images.toml").unlink()
    desk.run("images", "--from", desk.repository)  # who takes the registry's word ...
    assert "isn't signed" in desk.run(*words, code=28)["error"]["what"]  # ... gets no further
    assert "latest" not in desk.tags()


def test_image_diff_between_registry_and_disk(desk: Desk) -> None:
    first = desk.image("a", packages={"vllm": "1.0", "PyYAML": "6.0"})
    effects = {"index-mapping": "0" * 40}
    second = desk.image("b", packages={"vllm": "1.1", "idna": "3"}, effects=effects)
    tag = desk.publish(first)["tag"]
    for name in (tag, f"{desk.repository}:{tag}", f"{desk.repository}@{first.digest}"):
        said = desk.run("image-diff", name, str(second.folder))
        found = {row["name"]: (row["before"], row["after"]) for row in said["differences"]
                 if row["kind"] == "package"}  # fmt: skip
        assert found == {
            "pypi/vllm": ("1.0", "1.1"), "pypi/idna": ("", "3"), "pypi/pyyaml": ("6.0", ""),
        }  # fmt: skip
        patches = [row["name"] for row in said["differences"] if row["kind"] == "patch"]
        assert patches == ["vllm/index-mapping"]
        assert said["unknown"] == []


# --- two at once -----------------------------------------------------------------------------


def _claim(gate: Any, repository: str, tag: str, digest: str, out: Any) -> None:
    registry = Registry(repository=parse_repository(repository), tools=Tools(timeout=60))
    gate.wait()
    try:
        out.put((digest, claim(registry, tag, digest, settle=float(SETTLE)).won))
    except UnavailableError:  # too slow to write: that is an answer too
        out.put((digest, False))


@pytest.mark.slow
def test_of_two_claims_exactly_one_wins(desk: Desk) -> None:
    """Many rounds, two processes each, both let go at once."""
    layouts = [desk.image(name, salt=name) for name in ("a", "b")]
    registry = Registry(repository=parse_repository(desk.repository), tools=Tools())
    for layout in layouts:
        registry.push(layout.folder, layout.digest)
    context = multiprocessing.get_context("fork")

    def race(number: int) -> tuple[str, list[tuple[str, bool]]]:
        gate, out, tag = context.Barrier(2), context.Queue(), f"round-{number}"
        both = [
            context.Process(target=_claim, args=(gate, desk.repository, tag, one.digest, out))
            for one in layouts
        ]
        for process in both:
            process.start()
        told = [out.get(timeout=60) for _ in both]
        for process in both:
            process.join()
        return registry.digest(tag) or "", told

    with ThreadPoolExecutor(3) as pool:
        rounds = list(pool.map(race, range(int(os.environ.get("ROUNDS", "24")))))
    for there, told in rounds:
        won = [digest for digest, has_won in told if has_won]
        assert won == [there], (there, told)


def test_of_two_publishers_exactly_one_gets_the_tag(desk: Desk) -> None:
    layouts = [desk.image(name, salt=name) for name in ("a", "b")]
    both = [desk.start(layout) for layout in layouts]
    ended = [(process.communicate(timeout=120), process.returncode) for process in both]
    codes = sorted(code for _, code in ended)
    assert codes == [0, 27], ended
    tags = desk.tags()
    for layout, ((out, _), code) in zip(layouts, ended, strict=True):
        said = json.loads(out)
        if code == 0:
            assert tags == {said["tag"]: layout.digest}
        else:
            assert "-r2" in said["error"]["fix"]


def test_of_two_publishers_with_next_both_get_one(desk: Desk) -> None:
    layouts = [desk.image(name, salt=name) for name in ("a", "b")]
    both = [desk.start(layout, "--next") for layout in layouts]
    said = [json.loads(process.communicate(timeout=120)[0]) for process in both]
    assert sorted(one["tag"][-2:] for one in said) == ["r1", "r2"]
    assert desk.tags() == {one["tag"]: one["digest"] for one in said}
    assert len(read_images(desk.project)) == 2


# --- killed ----------------------------------------------------------------------------------

# After which start of which program: 0 stands for the first
STAGES = [
    ("oras", "cp", 0), ("cosign", "attest", 0), ("cosign", "attest", 1), ("cosign", "sign", 0),
    ("oras", "tag", 0), ("cosign", "sign", 1),
]  # fmt: skip


def killing(folder: Path, program: str, verb: str, nth: int) -> Path:
    """A folder with a program that does its work and then kills who started it."""
    folder.mkdir()
    real = shutil.which(program)
    script = folder / program
    script.write_text(
        f"""#!/bin/sh
{real} "$@"
code=$?
if [ "$1" = {verb} ]; then
    echo x >> {folder}/count
    [ "$(wc -l < {folder}/count)" -eq {nth + 1} ] && kill -9 $PPID
fi
exit $code
"""
    )
    script.chmod(0o755)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("program", "verb", "nth"), STAGES, ids=lambda value: str(value))
def test_killed_after_each_step_it_is_simply_done_again(
    desk: Desk, program: str, verb: str, nth: int
) -> None:
    layout = desk.image()
    process = desk.start(layout, path=killing(desk.folder / "bin", program, verb, nth))
    _, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, err
    if (program, verb) != ("oras", "tag") and nth == 0 and verb != "sign":
        assert desk.tags() == {}
    assert read_images(desk.project) == ()
    said = desk.publish(layout)
    assert desk.tags() == {said["tag"]: layout.digest}
    name = f"{desk.repository}@{layout.digest}"
    desk.cosign("verify", "-a", f"overlay.tag={said['tag']}", name)
    assert statement(desk, layout.digest, "cyclonedx")["components"]
    assert statement(desk, layout.digest, "slsaprovenance1")["buildDefinition"]
    assert len(read_images(desk.project)) == 1


def test_killed_while_content_goes_up(desk: Desk) -> None:
    """oras and all, with part of a layer sent."""
    big = {"big": os.urandom(96 << 20)}
    layout = make_layout(desk.folder / "big", (big,), labels=None)
    registry = Registry(repository=parse_repository(desk.repository), tools=Tools())
    command = ("oras", "cp", "--no-tty", "--to-plain-http", "--from-oci-layout")
    process = subprocess.Popen(
        (*command, f"{layout.folder}@{layout.digest}", desk.repository),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(0.15)
    process.kill()
    process.wait()
    name = f"{desk.repository}@{layout.digest}"
    assert desk.oras("resolve", name, code=1) == ""
    registry.push(layout.folder, layout.digest)
    assert desk.oras("resolve", name).strip() == layout.digest


# --- faults ----------------------------------------------------------------------------------


def test_no_registry_there(desk: Desk) -> None:
    desk.repository = "127.0.0.1:1/a"
    error = desk.publish(desk.image(), code=6)["error"]
    assert "is up" in error["fix"]


def test_wrong_credentials(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # bcrypt of "secret", made once by htpasswd -B
    line = "ada:$2y$05$c4WoMPo3SXsafkva.HHa6uXQZWr7oboPiC2bT/r7q1BB8I2s0BRqC"
    config = tmp_path / "docker"
    config.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(config))
    with registry(tmp_path / "closed", htpasswd=line) as address:
        desk.repository = f"{address}/a"
        layout = desk.image()
        for auth in ({}, {address: {"auth": base64.b64encode(b"ada:hunter2").decode()}}):
            (config / "config.json").write_text(json.dumps({"auths": auth}))
            error = desk.publish(layout, code=27)["error"]
            assert f"oras login {address}" in error["fix"]
            assert "hunter2" not in json.dumps(error)


def answering(status: int, *, only: str = "") -> Any:
    """Every request gets ``status``, or those of one method; the rest see an empty repository."""

    def respond(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        if not only or request.command == only:
            return status, {}, b""
        if request.path.endswith("/tags/list"):
            return 200, {}, b'{"name":"a","tags":[]}'
        return (200, {}, b"{}") if request.path == "/v2/" else (404, {}, b"")

    return respond


@pytest.mark.parametrize(
    ("status", "only", "code", "fix"),
    [
        (429, "", 6, "fewer requests"),
        (500, "", 6, "its log"),
        (503, "", 6, "its log"),
        (507, "POST", 6, "no room"),
        (403, "POST", 27, "oras login"),
    ],
)
def test_bad_answers(desk: Desk, status: int, only: str, code: int, fix: str) -> None:
    with faulty_registry(answering(status, only=only)) as address:
        desk.repository = f"{address}/a"
        error = desk.publish(desk.image(), "--timeout", "60", code=code)["error"]
    assert fix in error["fix"], error


def test_a_registry_that_never_answers(desk: Desk) -> None:
    ends = threading.Event()

    def respond(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        ends.wait(30)
        return 200, {}, b"{}"

    with faulty_registry(respond) as address:
        desk.repository = f"{address}/a"
        began = time.monotonic()
        error = desk.publish(desk.image(), "--timeout", "1", code=6)["error"]
        assert time.monotonic() - began < 15
        ends.set()
    assert "--timeout" in error["fix"]


def test_a_registry_that_gives_other_bytes(desk: Desk) -> None:
    wanted = "sha256:" + "a" * 64

    def respond(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        body = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": []}).encode()
        return 200, {"Content-Type": MANIFEST, "Docker-Content-Digest": wanted}, body

    with faulty_registry(respond) as address:
        error = desk.run("image-diff", f"{address}/a@{wanted}", f"{address}/a@{wanted}", code=27)
    assert "mismatch" in error["error"]["why"] or "other bytes" in error["error"]["what"]


def test_a_manifest_without_end(desk: Desk) -> None:
    body = b"{" + b" " * (64 << 20)

    def respond(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": MANIFEST, "Docker-Content-Digest": sha256(body)}, body

    with faulty_registry(respond) as address:
        registry = Registry(repository=parse_repository(f"{address}/a"), tools=Tools(timeout=60))
        with pytest.raises(PublishError):
            registry.image(sha256(body))


def test_a_redirect_takes_no_password_along(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registries keep blobs elsewhere, which is all right; their passwords stay with them."""
    seen: list[str | None] = []

    def elsewhere(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        seen.append(request.headers.get("Authorization"))
        return 404, {}, b""

    with faulty_registry(elsewhere) as other:

        def respond(request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
            if not request.headers.get("Authorization"):
                return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""
            where = other.replace("127.0.0.1", "localhost")
            return 307, {"Location": f"http://{where}{request.path}"}, b""

        with faulty_registry(respond) as address:
            config = tmp_path / "docker"
            config.mkdir()
            auth = {address: {"auth": base64.b64encode(b"ada:hunter2").decode()}}
            (config / "config.json").write_text(json.dumps({"auths": auth}))
            monkeypatch.setenv("DOCKER_CONFIG", str(config))
            registry = Registry(repository=parse_repository(f"{address}/a"), tools=Tools())
            assert registry.digest("tag") is None
    assert seen == [None]


def test_plain_http_elsewhere_is_refused_before_anything_is_sent(desk: Desk) -> None:
    """A name that isn't loopback's is spoken to by TLS, which this one doesn't."""
    with faulty_registry(answering(200)) as address:
        port = address.rpartition(":")[2]
        repository = parse_repository(f"{_host_name()}:{port}/a")
        assert not repository.plain_http
        with pytest.raises((PublishError, UnavailableError)) as caught:
            Registry(repository=repository, tools=Tools(timeout=20)).tags()
    assert "--insecure" in caught.value.fix or "up" in caught.value.fix


def _host_name() -> str:
    with contextlib.suppress(OSError):
        name = Path("/etc/hostname").read_text().strip().lower()
        if name and "." in name:
            return name
    return "127.0.0.1.nip.invalid"
