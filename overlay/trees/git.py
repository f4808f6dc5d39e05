"""The one door to git: a bare repository driven through GitPython, in a sealed environment.

Sealed means that no configuration, hook, attribute, locale or ``GIT_*`` variable of the user
can change a byte or an id that comes out. Only a fetch lets the user's proxy, certificates
and SSH in, since what it brings is checked against full ids.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlay.errors import GitError, MachineError
from overlay.files import write_atomic

# GitPython runs git when it is imported: with the user's configuration, and with an ImportError
# when that git is broken. Give it none; every call here names the program.
_given = {key: os.environ.get(key) for key in ("GIT_PYTHON_REFRESH", "GIT_PYTHON_GIT_EXECUTABLE")}
os.environ.update(GIT_PYTHON_REFRESH="quiet", GIT_PYTHON_GIT_EXECUTABLE=os.devnull)
try:
    import git
finally:
    for _key, _value in _given.items():
        del os.environ[_key]
        if _value is not None:
            os.environ[_key] = _value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The oldest git with every switch used here ('cat-file --batch-command -z', 'merge-tree
# --write-tree'); GIT_CONFIG_GLOBAL, on which the seal stands, came with 2.32.
MIN_GIT = (2, 38)

# What a user may say about reaching a server. It can't change content: ids are checked.
_NETWORK_VARIABLES = (
    "GIT_SSL_CAINFO", "GIT_SSL_CAPATH", "GIT_SSL_CERT", "GIT_SSL_KEY", "GIT_SSH",
    "GIT_SSH_COMMAND", "GIT_SSH_VARIANT", "GIT_PROXY_COMMAND", "GIT_ASKPASS",
)  # fmt: skip

_CONFIG = (
    ("core.hooksPath", os.devnull),  # hooks run programs and can change refs
    ("core.attributesFile", os.devnull),  # attributes change diffs and line ends
    ("core.excludesFile", os.devnull),
    ("core.logAllRefUpdates", "false"),  # reflogs keep dead objects alive and cost writes
    ("core.quotePath", "true"),  # one spelling of a path in diffs, on every machine
    ("gc.auto", "0"),  # 'cache gc' alone collects: a running apply must not lose objects
    ("maintenance.auto", "false"),
    ("fetch.fsckObjects", "true"),  # what a server sends is untrusted
    ("fetch.writeCommitGraph", "false"),
    ("advice.detachedHead", "false"),
    ("user.useConfigOnly", "true"),  # never invent an identity from the host's name
)


class Git:
    """A bare repository. ``processes`` counts the children that this object started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = 0

    def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        ok: Sequence[int] = (0,),
        env: Mapping[str, str] | None = None,
        network: bool = False,
    ) -> bytes:
        """Standard output of one git command; ``GitError`` when its exit code is not in ``ok``."""
        process = self.open(*arguments, env=env, network=network)
        out, err = process.communicate(stdin)
        code = int(process.returncode)
        if code not in ok:
            raise GitError(
                f"git {_command(arguments)} failed with exit code {code}",
                why=err.decode(errors="replace").strip(),
                fix=_damaged(self.folder),
            )
        return bytes(out)

    def open(
        self, *arguments: str, env: Mapping[str, str] | None = None, network: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start a git command with pipes to all three streams."""
        check_git(self.folder.parent / "git-checked")
        options = [*_CONFIG, ("protocol.allow", "user" if network else "never")]
        switches = [part for key, value in options for part in ("-c", f"{key}={value}")]
        self.processes += 1
        with _unsealed_variables_removed():
            process: Any = git.cmd.Git(str(self.folder)).execute(
                [_git(), *switches, *arguments],
                as_process=True,
                istream=subprocess.PIPE,
                env={**_sealed(network), "GIT_DIR": str(self.folder), **(env or {})},
            )
        popen: subprocess.Popen[bytes] = process.proc
        # GitPython's wrapper kills the child when it is collected; the caller owns it now.
        process.proc = None
        return popen


def _damaged(folder: Path) -> str:
    return f"if it stays so, delete {folder}: all in it can be made again"


def _command(arguments: Sequence[str]) -> str:
    """The command among arguments that may start with ``-c NAME=VALUE``."""
    rest = list(arguments)
    while len(rest) > 2 and rest[0] == "-c":
        del rest[:2]
    return rest[0]


class ObjectReader:
    """Reads objects of one repository through one ``git cat-file --batch`` process."""

    def __init__(self, git: Git) -> None:
        self._git = git
        self._process: subprocess.Popen[bytes] | None = None

    def get(self, name: str) -> tuple[str, str, bytes] | None:
        """Id, type and content of an object named by id or ref; None when there is none."""
        if self._process is None:
            self._process = self._git.open("cat-file", "--batch")
        assert self._process.stdin is not None  # noqa: S101 - both are pipes
        assert self._process.stdout is not None  # noqa: S101
        try:
            self._process.stdin.write(name.encode() + b"\n")
            self._process.stdin.flush()
            head = self._process.stdout.readline()
        except BrokenPipeError:
            head = b""
        if head.endswith((b" missing\n", b" ambiguous\n")):
            return None
        try:
            oid, kind, text = head.decode().split()
            size = int(text)
        except ValueError:
            raise self._stopped(head) from None
        data = self._process.stdout.read(size)
        if self._process.stdout.read(1) != b"\n":
            raise self._stopped(head)
        return oid, kind, data

    def _stopped(self, head: bytes) -> GitError:
        assert self._process is not None  # noqa: S101 - get() started it
        assert self._process.stderr is not None  # noqa: S101
        self._process.kill()  # it may live on, out of step with us; only then its errors end
        why = self._process.stderr.read().decode(errors="replace").strip()
        return GitError(
            "git cat-file stopped",
            why=why or f"{self._git.folder}: it said {head!r}",
            fix=_damaged(self._git.folder),
        )

    def close(self) -> None:
        """End the process; reading again starts another."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
            self._process.wait()
            self._process = None


def git_version() -> tuple[int, ...]:
    """Version of the git on the PATH, as numbers."""
    with _unsealed_variables_removed():
        env = {**os.environ, **_sealed(network=False)}
    command = (_git(), "version")
    try:
        out = subprocess.run(command, capture_output=True, check=False, env=env).stdout
    except OSError as error:
        raise MachineError(f"can't run {_git()}: {error.strerror}", fix="install git") from None
    found = re.search(rb"(\d+)\.(\d+)(?:\.(\d+))?", out)
    if found is None:
        raise MachineError(f"{_git()} does not say its version", fix="install git")
    return tuple(int(number) for number in found.groups() if number)


@cache
def check_git(stamp: Path) -> None:
    """Refuse a git that is missing or too old.

    ``stamp`` remembers which program was found new enough, so that the answer costs a process
    only once a machine.
    """
    status = Path(_git()).stat()
    identity = f"{_git()} {status.st_size} {status.st_mtime_ns}\n"
    with contextlib.suppress(OSError):
        if stamp.read_text() == identity:
            return
    version = git_version()
    if version < MIN_GIT:
        have, need = (".".join(map(str, numbers)) for numbers in (version, MIN_GIT))
        raise MachineError(
            f"git {have} is too old: {need} or newer is needed",
            why=f"found as {_git()}",
            fix="install a newer git and put it first on the PATH",
        )
    with contextlib.suppress(OSError):  # a read-only cache costs a process a run, no more
        write_atomic(stamp, identity.encode())


@cache
def _git() -> str:
    found = shutil.which("git")
    if found is None:
        raise MachineError("git is not installed", fix="install git and put it on the PATH")
    return found


def _sealed(network: bool) -> dict[str, str]:
    env = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",  # refs/replace would swap content under an id
        "GIT_TERMINAL_PROMPT": "0",  # CI must fail, not wait
        "GIT_OPTIONAL_LOCKS": "0",
        "LC_ALL": "C.UTF-8",
        "LANGUAGE": "C",
        "TZ": "UTC",
    }
    if network:
        env |= {key: os.environ[key] for key in _NETWORK_VARIABLES if key in os.environ}
    return env


@contextlib.contextmanager
def _unsealed_variables_removed() -> Any:
    """GitPython hands the whole environment on; take git's own variables out meanwhile."""
    taken = {
        key: os.environ.pop(key)
        for key in list(os.environ)
        if key.startswith("GIT_") and not key.startswith("GIT_PYTHON_")
    }
    try:
        yield
    finally:
        os.environ.update(taken)
