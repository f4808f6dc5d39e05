"""Puts an image into a registry: content first, then what proves it, the tag last.

Content, SBOM, provenance and signature go up under the image's digest, where nobody looks for
them by accident. Only when all of it was read back does the tag appear, by ``claim``; only when
the claim is won is the image signed under that tag, which is what ``promote`` asks for. Each step
looks at what is there already, so that a publication that died anywhere is simply done again.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from overlay.errors import ImageError, PublishError, SignatureError
from overlay.images.claim import SETTLE, claim, settled
from overlay.images.sbom import make_sbom
from overlay.images.signing import Verifier, as_document, key_file
from overlay.images.tag import Tag, parse_tag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from overlay.images.oci import Image
    from overlay.images.registry import Registry
    from overlay.images.signing import Signer, Statement
    from overlay.report import Reporter

Status = Literal["published", "unchanged", "would publish"]
_MAX_TRIES = 20  # revisions that others may take before our eyes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be published.

    Attributes:
        image: as it lies on disk, its blobs verified.
        tag: made from the image's labels; date and revision are the first that are tried.
        provenance: makes the SLSA predicate, once it is needed.
        take_next: where the tag is taken, take the next free revision.
        recorded: tags that ``images.toml`` lists for this repository.
        settle: seconds, as in ``claim``.
    """

    image: Image
    tag: Tag
    provenance: Callable[[], dict[str, Any]]
    take_next: bool = False
    recorded: frozenset[str] = frozenset()
    settle: float = SETTLE


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of it.

    Attributes:
        status: ``unchanged`` where the same content had been published already.
        tag: the tag that names the image.
        digest: of the image.
        seconds: by step.
    """

    status: Status
    tag: str
    digest: str
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count the seconds of a step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - began, 3)


def publish(wish: Wish, registry: Registry, signer: Signer | None, report: Reporter) -> Outcome:
    """Publish an image; without a signer, say what would be done.

    Raises:
        PublishError: the tag names other content, or somebody else was faster.
    """
    digest = wish.image.digest
    outcome = Outcome(status="published", tag=str(wish.tag), digest=digest)
    with outcome.step("look"):
        before, tag = _look(wish, registry)
    if signer is None:
        outcome.status = "unchanged" if before else "would publish"
        outcome.tag = before or str(tag)
        return outcome
    public = signer.public_key()
    with key_file(public) as key:
        verifier = Verifier(repository=registry.repository, tools=registry.tools, key=key)
        _upload(wish, registry, signer, verifier, report, outcome)
        if before:
            outcome.status, outcome.tag = "unchanged", before
            _confirm_earlier(wish, registry, before)
        else:
            outcome.tag = str(_take(wish, tag, registry, report, outcome))
        with outcome.step("sign"):
            _sign(signer, verifier, digest, outcome.tag)
    return outcome


def taken(tag: Tag, there: str, proposed: Tag, digest: str) -> PublishError:
    """The refusal where a tag names other content."""
    return PublishError(
        f"{tag} is published already, with other content",
        why=f"there {there}, here {digest}",
        fix=f"--next publishes this as {proposed}; a published tag is never replaced",
    )


def _look(wish: Wish, registry: Registry) -> tuple[str, Tag]:
    """The tag under which the content is published already, or ""; and the one to take."""
    digest = wish.image.digest
    of_line = _of_same_line(wish.tag, registry.tags())
    for one in reversed(of_line):
        if registry.digest(str(one)) == digest:
            return str(one), wish.tag
    if wish.tag not in of_line:
        return "", wish.tag
    proposed = _next(wish.tag, of_line)
    if not wish.take_next:
        there = registry.digest(str(wish.tag)) or "nothing any more"
        raise taken(wish.tag, there, proposed, digest)
    return "", proposed


def _of_same_line(tag: Tag, tags: tuple[str, ...]) -> list[Tag]:
    """Published tags of the same line, digest and pins, oldest first."""
    found = [one for each in tags if (one := read_tag(each)) and _stem(one) == _stem(tag)]
    return sorted(found, key=lambda one: (one.date, one.revision))


def read_tag(text: str) -> Tag | None:
    """A tag of ours; None for aliases, signatures, and what others put there."""
    try:
        parsed = parse_tag(text)
    except ImageError:
        return None
    return None if parsed.is_forks else parsed


def _stem(tag: Tag) -> Tag:
    """What the line says of a tag: all but date and revision, which belong to publishing."""
    return replace(tag, date="", revision=1)


def _next(tag: Tag, of_line: list[Tag]) -> Tag:
    used = [one.revision for one in of_line if one.date == tag.date]
    return replace(tag, revision=max([0, *used]) + 1)


def _upload(
    wish: Wish,
    registry: Registry,
    signer: Signer,
    verifier: Verifier,
    report: Reporter,
    outcome: Outcome,
) -> None:
    """Content, SBOM, provenance, signature: what isn't there, and then all of it verified."""
    digest = wish.image.digest
    size = sum(layer.size for layer in wish.image.layers)
    with outcome.step("push"), report.progress(f"pushing {size / 1e6:.1f} MB at most"):
        registry.push(wish.image.folder, digest)
    statements: dict[Statement, Callable[[], dict[str, Any]]] = {
        "cyclonedx": lambda: make_sbom(
            wish.image.folder, wish.tag.codename, digest,
            str(wish.image.config.get("created") or ""), registry.tools,
        ),
        "slsaprovenance1": wish.provenance,
    }  # fmt: skip
    for kind, make in statements.items():
        with outcome.step(kind):
            if not _has(verifier, digest, kind):
                report.say(f"attaching {kind}")
                _attach(signer, digest, kind, make())
                verifier.statement(digest, kind)
    with outcome.step("sign"):
        _sign(signer, verifier, digest, None)


def _has(verifier: Verifier, digest: str, kind: Statement) -> bool:
    try:
        verifier.statement(digest, kind)
    except SignatureError:
        return False
    return True


def _attach(signer: Signer, digest: str, kind: Statement, predicate: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="overlay-statement-") as folder:
        path = Path(folder, f"{kind}.json")
        path.write_bytes(as_document(predicate))
        signer.attest(digest, kind, path)


def _sign(signer: Signer, verifier: Verifier, digest: str, tag: str | None) -> None:
    """Sign, unless that is done, and read it back."""
    try:
        verifier.verify(digest, tag)
    except SignatureError:
        signer.sign(digest, tag)
        verifier.verify(digest, tag)


def _take(wish: Wish, tag: Tag, registry: Registry, report: Reporter, outcome: Outcome) -> Tag:
    """Claim the tag; where another publisher was faster, the next one, if that was asked for."""
    digest = wish.image.digest
    for _ in range(_MAX_TRIES):
        with outcome.step("tag"):
            done = claim(registry, str(tag), digest, settle=wish.settle)
        if done.won:
            return tag
        proposed = _next(tag, [*_of_same_line(wish.tag, registry.tags()), tag])
        if not wish.take_next:
            raise PublishError(
                f"another publisher has taken {tag} in the meantime",
                why=f"it names {done.digest or 'nothing'}, this one is {digest}, which isn't "
                "published under any tag",
                fix=f"--next publishes this as {proposed}",
            )
        report.say(f"{tag} was taken by another publisher; trying {proposed}")
        tag = proposed
    raise PublishError(
        f"others were faster {_MAX_TRIES} times", why=f"last tried: {tag}", fix="run it again later"
    )


def _confirm_earlier(wish: Wish, registry: Registry, tag: str) -> None:
    """A tag that nobody was told of may be in dispute still: wait until it can't be."""
    if tag in wish.recorded:
        return
    now = settled(registry, tag, wish.image.digest, settle=wish.settle)
    if not now.won:
        raise PublishError(
            f"another publisher has taken {tag} in the meantime",
            why=f"it names {now.digest or 'nothing'}, this one is {wish.image.digest}",
            fix="run it again: it proposes the next free tag",
        )
