"""A Docker engine and a registry of our own on loopback, for as long as a test runs.

Everything of theirs lies in one folder: sockets, images, layers, logs. At the end both processes
are stopped and the folder goes, mounts included, so that nothing of a run stays on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# What stands in for the public hub's image of that name: Debian with the line's Python
BASE = "library/debian:bookworm-slim"
_BASE_PACKAGES = "python3,python3-venv,ca-certificates"
_PATIENCE = 60.0  # seconds; an engine starts in 2, on a busy machine in 20


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and registry.

    Attributes:
        folder: of all that is theirs.
        host: what ``DOCKER_HOST`` is to be.
        registry: ``127.0.0.1:PORT``, plain HTTP. The engine's mirror of the public hub, too.
    """

    folder: Path
    host: str
    registry: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which ``docker`` and ``buildx`` reach this engine and no other."""
        return {
            **os.environ,
            "DOCKER_HOST": self.host,
            "DOCKER_CONFIG": str(self.folder / "client"),
            "BUILDX_CONFIG": str(self.folder / "buildx"),
        }

    def docker(self, *arguments: str) -> str:
        """Run the client; its output."""
        return subprocess.run(
            ("docker", *arguments),
            env=self.environment, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip


@contextmanager
def registry(folder: Path, *, htpasswd: str = "") -> Iterator[str]:
    """A registry that keeps what it has in ``folder``; its address.

    Args:
        folder: is made where it is not there.
        htpasswd: a line of that form; who has no name and password in it is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    address = f"127.0.0.1:{_free_port()}"
    settings: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "warn"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "content")}},
        "http": {"addr": address},
    }
    if htpasswd:
        (folder / "htpasswd").write_text(htpasswd + "\n")
        settings["auth"] = {"htpasswd": {"realm": "test", "path": str(folder / "htpasswd")}}
    (folder / "registry.yml").write_text(json.dumps(settings))  # JSON is YAML
    argv = ("docker-registry", "serve", str(folder / "registry.yml"))
    with _process(argv, folder / "registry.log", lambda: _answers(address)):
        yield address


@contextmanager
def engine(cache: Path) -> Iterator[Engine]:
    """Start an engine and its registry, with the stand-in for the base image in it.

    Args:
        cache: where the stand-in's archive is kept between runs: it takes 25 seconds to make.
    """
    # A socket's path may have 107 bytes, which a test's own folder would exceed
    folder = Path(tempfile.mkdtemp(prefix="engine-"))
    try:
        with registry(folder / "registry") as address, _dockerd(folder, address) as host:
            running = Engine(folder=folder, host=host, registry=address)
            running.docker("import", str(_base_archive(cache)), f"{address}/{BASE}")
            running.docker("push", "--quiet", f"{address}/{BASE}")
            yield running
    finally:
        _unmount(folder)
        shutil.rmtree(folder)


@contextmanager
def _dockerd(folder: Path, mirror: str) -> Iterator[str]:
    settings = {
        "features": {"containerd-snapshotter": True},  # or there is no export as an OCI layout
        "registry-mirrors": [f"http://{mirror}"],
        "data-root": str(folder / "data"),
        "exec-root": str(folder / "exec"),
        "pidfile": str(folder / "pid"),
        "hosts": [f"unix://{folder}/docker.sock"],
    }
    (folder / "daemon.json").write_text(json.dumps(settings))
    host = f"unix://{folder}/docker.sock"

    def up() -> bool:
        argv = ("docker", "--host", host, "version")
        return subprocess.run(argv, capture_output=True, check=False).returncode == 0

    argv = ("dockerd", "--config-file", str(folder / "daemon.json"))
    with _process(argv, folder / "dockerd.log", up):
        yield host


@contextmanager
def _process(argv: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[None]:
    """A process of its own group from when it is ready, stopped whatever happens."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not ready():
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{argv[0]} did not come up:\n{tail}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/v2/", timeout=2).close()
    except urllib.error.HTTPError as error:
        return error.code == 401  # it is there, and wants to know who asks
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def _base_archive(cache: Path) -> Path:
    kept = cache / "base-bookworm.tar"
    if not kept.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            made = Path(scratch, "base.tar")
            subprocess.run(
                ("mmdebstrap", "--quiet", "--variant=minbase",
                 f"--include={_BASE_PACKAGES}", "bookworm", str(made)),
                check=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            made.replace(kept)
    return kept


def _unmount(folder: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    below = [line.split()[1] for line in mounts if line.split()[1].startswith(f"{folder}/")]
    for place in sorted(below, reverse=True):
        subprocess.run(("umount", "--lazy", place), check=False)
