"""Signatures and signed statements of an image, by cosign with a key pair.

Nothing is sent to a transparency log or to any other service: a key is a file, a variable
(``env://NAME``) or a KMS's address, and signatures lie beside the image, in its repository.
"""

from __future__ import annotations

import base64
import json
import os
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from overlay.errors import SignatureError
from overlay.images.tools import PASSWORD, failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from overlay.images.reference import Repository
    from overlay.images.tools import Answer, Tools

Statement = Literal["cyclonedx", "slsaprovenance1"]
PREDICATES: dict[Statement, str] = {
    "cyclonedx": "https://cyclonedx.org/bom",
    "slsaprovenance1": "https://slsa.dev/provenance/v1",
}
TAG_KEY = "overlay.tag"  # annotation: the tag that an image was signed for
_KMS = re.compile(r"(?:awskms|azurekms|gcpkms|hashivault|k8s)://[A-Za-z0-9][^\s]*\Z")
_VARIABLE = re.compile(r"env://([A-Za-z_][A-Za-z0-9_]*)\Z")
_NO_SIGNATURE, _OTHER_KEY = 10, 12  # cosign's exit codes
_NO_STATEMENT = re.compile(r"no matching attestations|none of the attestations matched")
_BAD_KEY = "loading public key"
_MAX_STATEMENT = 256 << 20
_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """Signs images of one repository with a private key.

    Attributes:
        key: path, ``env://NAME``, or a KMS's address.
        password: of the key; the empty one where it has none.
    """

    repository: Repository
    tools: Tools
    key: str
    password: str

    def public_key(self) -> bytes:
        """The public half, PEM; also the way to find out whether the key can be used."""
        answer = self._cosign("public-key", "--key", self.key)
        if answer.code:
            raise SignatureError(
                f"the signing key {self.key} can't be used",
                why=answer.said,
                fix=f"give its password in {PASSWORD}; 'cosign generate-key-pair' makes a key",
            )
        return answer.out

    def sign(self, digest: str, tag: str | None) -> None:
        """Sign an image, as the one that ``tag`` names. Done again, it changes nothing."""
        words = ["--key", self.key, "--tlog-upload=false", "--yes"]
        words += ["-a", f"{TAG_KEY}={tag}"] if tag else []
        answer = self._cosign("sign", *words, *_http(self.repository), self.repository.at(digest))
        if answer.code:
            raise failure(f"can't sign {digest}", answer, self.repository.host)

    def attest(self, digest: str, kind: Statement, predicate: Path) -> None:
        """Attach a signed statement; an earlier one of its kind is replaced."""
        words = ("--key", self.key, "--tlog-upload=false", "--yes", "--replace", "--type", kind)
        name = self.repository.at(digest)
        answer = self._cosign(
            "attest", *words, "--predicate", str(predicate), *_http(self.repository), name
        )
        if answer.code:
            raise failure(f"can't attach {kind} to {digest}", answer, self.repository.host)

    def _cosign(self, *argv: str) -> Answer:
        secrets = {PASSWORD: self.password}
        if named := _VARIABLE.match(self.key):
            secrets[named.group(1)] = os.environ.get(named.group(1), "")
        limit = min(_SECONDS, self.tools.timeout)
        return self.tools.run("cosign", *argv, secrets=secrets, timeout=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """Verifies images of one repository by a public key.

    Attributes:
        key: path of the public key, or a KMS's address.
    """

    repository: Repository
    tools: Tools
    key: str

    def verify(self, digest: str, tag: str | None = None) -> None:
        """Refuse an image that the key hasn't signed, or not for ``tag``."""
        words = ("-a", f"{TAG_KEY}={tag}") if tag else ()
        name = self.repository.at(digest)
        answer = self._cosign("verify", *words, name)
        if not answer.code:
            return
        if _BAD_KEY in answer.said:
            raise SignatureError(
                f"the key {self.key} can't be used",
                why=answer.said,
                fix="give the public half of a key pair, as 'cosign generate-key-pair' wrote it",
            )
        if answer.code == _NO_SIGNATURE:
            raise SignatureError(
                f"{name} isn't signed", why=answer.said, fix="publish it with a key first"
            )
        if answer.code == _OTHER_KEY and tag and "annotation" in answer.said:
            raise SignatureError(
                f"{name} is signed, but not as {tag}",
                why="the tag names another image than the one that was published under it",
                fix="find out who moved the tag; 'images --from' shows what is signed",
            )
        if answer.code == _OTHER_KEY:
            raise SignatureError(
                f"{name} isn't signed by {self.key}",
                why=answer.said,
                fix="give the public half of the key that it was published with (--key)",
            )
        raise failure(f"can't verify {name}", answer, self.repository.host)

    def statement(self, digest: str, kind: Statement) -> dict[str, Any]:
        """The predicate of a signed statement about this very image."""
        name = self.repository.at(digest)
        answer = self._cosign("verify-attestation", "--type", kind, name)
        if answer.code and (_NO_STATEMENT.search(answer.said) or answer.code == _OTHER_KEY):
            raise SignatureError(
                f"{name} has no {kind} statement signed by {self.key}", why=answer.said,
                fix="publish it again: what is missing is added",
            )  # fmt: skip
        if answer.code:
            raise failure(f"can't verify the {kind} statement of {name}", answer,
                          self.repository.host)  # fmt: skip
        return _predicate(answer.out, digest, kind)

    def _cosign(self, verb: str, *argv: str) -> Answer:
        words = ("--key", self.key, "--insecure-ignore-tlog=true", *_http(self.repository))
        limit = min(_SECONDS, self.tools.timeout)
        return self.tools.run("cosign", verb, *words, *argv, timeout=limit)


def downloaded(
    repository: Repository, tools: Tools, digest: str, kind: Statement
) -> dict[str, Any] | None:
    """The predicate of a statement that nobody has verified; None where there is none."""
    words = ("--predicate-type", PREDICATES[kind], *_http(repository))
    limit = min(_SECONDS, tools.timeout)
    answer = tools.run("cosign", "download", "attestation", *words, repository.at(digest),
                       timeout=limit)  # fmt: skip
    if answer.code:
        return None
    try:
        return _predicate(answer.out, digest, kind)
    except SignatureError:
        return None


def checked_key(key: str, *, private: bool) -> str:
    """``key`` if it is a file, an address of a KMS, or for a private key a variable."""
    if _KMS.match(key):
        return key
    variable = _VARIABLE.match(key)
    if private and variable:
        if not os.environ.get(variable.group(1)):
            raise SignatureError(
                f"the key {key} can't be used", why=f"{variable.group(1)} isn't set",
                fix="set it to the private key, as 'cosign generate-key-pair' wrote it",
            )  # fmt: skip
        return key
    path = Path(key)
    if "://" in key or not path.is_file():
        raise SignatureError(
            f"no such key: {key}",
            fix="name its file; 'cosign generate-key-pair' makes cosign.key and cosign.pub",
        )
    return str(path.absolute())


@contextmanager
def key_file(pem: bytes) -> Iterator[str]:
    """Path of a file with a public key, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="overlay-key-") as folder:
        path = Path(folder, "cosign.pub")
        path.write_bytes(pem)
        yield str(path)


def _http(repository: Repository) -> tuple[str, ...]:
    return ("--allow-http-registry",) if repository.plain_http else ()


def _predicate(lines: bytes, digest: str, kind: Statement) -> dict[str, Any]:
    """The last statement of its kind about ``digest`` among DSSE envelopes, one a line."""
    found: dict[str, Any] | None = None
    for line in lines[:_MAX_STATEMENT].splitlines():
        try:
            statement = json.loads(base64.b64decode(json.loads(line)["payload"]))
            about = {each["digest"]["sha256"] for each in statement["subject"]}
            if statement["predicateType"] == PREDICATES[kind] and about == {digest[7:]}:
                found = dict(statement["predicate"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    if found is None:
        raise SignatureError(f"the {kind} statement of {digest} is about something else")
    return found


def read_password(*, prompt: Any) -> str:
    """The key's password: of the environment, else asked for on a terminal, else empty."""
    given = os.environ.get(PASSWORD)
    return str(prompt()) if given is None and prompt is not None else given or ""


def as_document(statement: Mapping[str, Any]) -> bytes:
    """A predicate as it is written for cosign."""
    return json.dumps(statement, indent=1, sort_keys=True).encode()
