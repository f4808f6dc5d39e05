"""Verbs between images and registries: publish, images, image-diff, promote."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from overlay.app import App, told_with, verb
from overlay.errors import PublishError, SignatureError

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.images.candidate import Candidate
    from overlay.images.imagediff import Facts, ImageDiff
    from overlay.images.imagelist import Published
    from overlay.images.publish import Outcome
    from overlay.images.reference import Reference, Repository
    from overlay.images.registry import Registry
    from overlay.images.signing import Signer


def _reaches_registry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every verb that talks to a registry."""
    function = click.option(
        "--insecure", is_flag=True, help="Plain HTTP for a registry that isn't on this machine."
    )(function)
    return click.option(
        "--timeout", type=click.FloatRange(min=0, min_open=True), default=3600.0,
        show_default=True, help="Seconds that one program (oras, cosign, syft) may take.",
    )(function)  # fmt: skip


@verb(
    short="Put an image into a registry, signed, the tag last",
    examples="""
    vllm-overlay publish infernal --to ghcr.io/owner/vllm --key cosign.key
    vllm-overlay publish dist/images/infernal --to 127.0.0.1:5000/vllm --key cosign.key --next
    vllm-overlay publish infernal --to ghcr.io/owner/vllm --dry-run
    """,
)
@click.argument("image", metavar="LAYOUT|LINE")
@click.option("--to", required=True, metavar="REGISTRY/REPOSITORY", help="Where to.")
@click.option("--key", metavar="KEY", help="Private key: file, env://NAME, or a KMS's address.")
@click.option("--next", "take_next", is_flag=True, help="Where the tag is taken, the next rN.")
@click.option("--date", metavar="YYYYMMDD", help="Date of the tag (default: today, UTC).")
@click.option("--dry-run", is_flag=True, help="Look, and say what would be done.")
@click.option(
    "--settle", type=click.FloatRange(min=1), default=6.0, show_default=True,
    help="Seconds to wait before the tag is read back; the same for all publishers.",
)  # fmt: skip
@_reaches_registry
def publish(
    app: App, image: str, to: str, key: str | None, take_next: bool, date: str | None,
    dry_run: bool, settle: float, timeout: float, insecure: bool,
) -> None:  # fmt: skip
    """Publish the image of LINE, or an OCI layout, to a registry.

    Content first, under its digest, then SBOM, provenance and signature, then the tag. What was
    published already isn't published again. A tag that names other content is never replaced.
    """
    from overlay.images.candidate import read_candidate
    from overlay.images.provenance import make_provenance
    from overlay.images.publish import Wish
    from overlay.images.publish import publish as put
    from overlay.images.reference import parse_repository

    repository = parse_repository(to, insecure=insecure)
    registry = _registry(repository, timeout)
    signer = None if dry_run else _signer(registry, key)
    layout = _layout(app, image)
    with app.report.progress(f"reading {layout}"):
        found = read_candidate(layout, app.line, repository, date or _today())
    wish = Wish(
        image=found.image, tag=found.tag, take_next=take_next, settle=settle,
        provenance=lambda: make_provenance(
            found.line, found.lock, found.labels, _project(app) / "images"
        ),
        recorded=_recorded(app, repository),
    )  # fmt: skip
    done = put(wish, registry, signer, app.report)
    entry = _entry(found, done, repository)
    document = _publish_document(done, entry, registry)
    with told_with(app, document):
        if not dry_run:
            _write_down(app, entry)
    if app.report.as_json:
        app.report.json(document)
    else:
        app.report.table(
            ("status", "tag", "digest", "repository"),
            [(done.status, done.tag, done.digest, str(repository))],
        )


@verb(
    short="List what was published",
    examples="""
    vllm-overlay images
    vllm-overlay images --from ghcr.io/owner/vllm
    vllm-overlay images --json
    """,
)
@click.option(
    "--from", "origin", metavar="REGISTRY/REPOSITORY",
    help="Make its entries of images.toml again, from its tags and labels.",
)  # fmt: skip
@_reaches_registry
def images(app: App, origin: str | None, timeout: float, insecure: bool) -> None:
    """List what was published: images.toml, which 'publish' writes."""
    from overlay.images.imagelist import read_images
    from overlay.images.reference import parse_repository
    from overlay.images.relist import relist

    skipped: list[str] = []
    if origin is None:
        listing = read_images(_project(app))
    else:
        registry = _registry(parse_repository(origin, insecure=insecure), timeout)
        listing, skipped = relist(_project(app), registry, app.report)
    if app.report.as_json:
        rows = msgspec.to_builtins(listing)
        app.report.json({"verb": "images", "images": rows, "skipped": skipped})
        return
    app.report.table(
        ("repository", "tag", "digest", "MB"),
        [(one.repository, one.tag, one.digest, f"{one.size / 1e6:.1f}") for one in listing],
    )


@verb(
    short="What changed between two images",
    name="image-diff",
    examples="""
    vllm-overlay image-diff TAG TAG
    vllm-overlay image-diff ghcr.io/owner/vllm@sha256:... dist/images/infernal
    """,
)
@click.argument("before")
@click.argument("after")
@_reaches_registry
def image_diff(app: App, before: str, after: str, timeout: float, insecure: bool) -> None:
    """Compare two images: published tags, references, or OCI layouts.

    Pins, patches, packages, base, layers, and how much is to download for who has BEFORE.
    """
    from overlay.images.imagediff import compare_images

    old, new = (_facts(app, name, timeout, insecure) for name in (before, after))
    found = compare_images(old, new)
    if app.report.as_json:
        rows = [
            {"kind": row.kind, "name": row.name, "before": row.before, "after": row.after}
            for row in found.rows
        ]
        app.report.json({
            "verb": "image-diff", "before": {"name": old.name, "digest": old.digest},
            "after": {"name": new.name, "digest": new.digest}, "differences": rows,
            "shared_bytes": found.shared, "download_bytes": found.download,
            "unknown": list(found.unknown),
        })  # fmt: skip
        return
    _show_diff(app, found)


@verb(
    short="Let an alias name a published image",
    examples="""
    vllm-overlay promote TAG infernal --key cosign.pub
    vllm-overlay promote TAG latest --key cosign.pub --to ghcr.io/owner/vllm
    """,
)
@click.argument("tag")
@click.argument("alias")
@click.option("--key", required=True, metavar="KEY", help="Public key that it must be signed by.")
@click.option("--to", metavar="REGISTRY/REPOSITORY", help="Where TAG is in several.")
@_reaches_registry
def promote(
    app: App, tag: str, alias: str, key: str, to: str | None, timeout: float, insecure: bool
) -> None:
    """Move ALIAS to the image that was published as TAG, once its signature is verified."""
    from overlay.images.imagelist import find_published, read_images
    from overlay.images.promote import promote as move
    from overlay.images.reference import parse_repository
    from overlay.images.signing import Verifier, checked_key
    from overlay.lines.line import find_lines

    wanted = str(parse_repository(to, insecure=insecure)) if to else ""
    image = find_published(read_images(_project(app)), tag, wanted)
    repository = parse_repository(image.repository, insecure=insecure or image.plain_http)
    registry = _registry(repository, timeout)
    verifier = Verifier(
        repository=repository, tools=registry.tools, key=checked_key(key, private=False)
    )
    done = move(image, alias, registry, verifier, find_lines(app.root))
    listed = {one.digest: one.tag for one in read_images(_project(app))}
    old = listed.get(done.before, done.before) or "nothing"
    if app.report.as_json:
        app.report.json({
            "verb": "promote", "alias": alias, "repository": str(repository), "tag": done.tag,
            "before": done.before, "digest": done.digest, "moved": done.before != done.digest,
        })  # fmt: skip
    elif done.before == done.digest:
        app.report.say(f"{alias} names {tag} already")
    else:
        app.report.say(f"{alias}: from {old} to {tag}")


def _today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")


def _project(app: App) -> Path:
    """The project's top folder, where ``images.toml`` lies."""
    return app.root.absolute().parent


def _registry(repository: Repository, timeout: float) -> Registry:
    from overlay.images.registry import Registry
    from overlay.images.tools import Tools

    return Registry(repository=repository, tools=Tools(timeout=timeout))


def _signer(registry: Registry, key: str | None) -> Signer:
    from overlay.images.signing import Signer, checked_key, read_password
    from overlay.images.tools import find

    for program in ("oras", "cosign", "syft"):  # before anything is read or sent
        find(program)
    if key is None:
        raise SignatureError(
            "publishing needs a key: what isn't signed can't be promoted",
            fix="say --key cosign.key ('cosign generate-key-pair' makes it), or --dry-run",
        )
    checked = checked_key(key, private=True)
    asks = not checked.partition("://")[1] and sys.stdin.isatty()
    password = read_password(
        prompt=(lambda: click.prompt(f"Password of {key}", hide_input=True, err=True))
        if asks
        else None
    )
    return Signer(
        repository=registry.repository, tools=registry.tools, key=checked, password=password
    )


def _layout(app: App, name: str) -> Path:
    """A folder that is a layout, else the one that a line's image was built into."""
    from overlay.lines.line import CODENAME

    given = Path(name)
    if (given / "oci-layout").is_file() or not CODENAME.match(name):
        return given
    folder = _project(app) / "dist" / "images" / app.line(name).name
    if not (folder / "oci-layout").is_file():
        raise PublishError(
            f"{name} has no image in {folder}", fix=f"build it: nox -s image -- {name}"
        )
    return folder


def _recorded(app: App, repository: Repository) -> frozenset[str]:
    from overlay.images.imagelist import read_images

    return frozenset(
        one.tag for one in read_images(_project(app)) if one.repository == str(repository)
    )


def _entry(found: Candidate, done: Outcome, repository: Repository) -> Published:
    from overlay.images.imagelist import Published
    from overlay.images.reference import is_loopback
    from overlay.images.tag import parse_tag

    documents = len((found.image.folder / "blobs/sha256" / done.digest[7:]).read_bytes())
    layers = sum(layer.size for layer in found.image.layers)
    return Published(
        repository=str(repository),
        tag=done.tag,
        digest=done.digest,
        line=found.line.name,
        overlay=found.lock.digest,
        date=parse_tag(done.tag).date,
        size=documents + int(found.image.manifest["config"]["size"]) + layers,
        plain_http=repository.plain_http and not is_loopback(repository),
    )


def _write_down(app: App, entry: Published) -> None:
    from overlay.images.imagelist import record

    record(_project(app), [entry])


def _publish_document(done: Outcome, entry: Published, registry: Registry) -> dict[str, Any]:
    return {
        "verb": "publish",
        "status": done.status,
        "repository": entry.repository,
        "tag": done.tag,
        "digest": done.digest,
        "reference": registry.repository.at(done.digest),
        "line": entry.line,
        "size": entry.size,
        "seconds": done.seconds,
        "processes": registry.tools.started,
    }


def _facts(app: App, name: str, timeout: float, insecure: bool) -> Facts:
    """What a layout, a reference or a published tag says of itself."""
    from overlay.images.imagediff import facts_of_layout, facts_of_remote
    from overlay.images.oci import read_layout

    folder = Path(name)
    if (folder / "oci-layout").is_file():
        with app.report.progress(f"reading {name}"):
            return facts_of_layout(name, read_layout(folder))
    where = _reference(app, name, insecure)
    registry = _registry(where.repository, timeout)
    digest = where.digest or registry.digest(where.tag)
    if digest is None:
        raise PublishError(
            f"no such image: {where}", fix="see 'vllm-overlay images', or name a layout's folder"
        )
    return facts_of_remote(name, registry, digest)


def _reference(app: App, name: str, insecure: bool) -> Reference:
    from overlay.images.imagelist import find_published, read_images
    from overlay.images.reference import Reference, parse_reference, parse_repository

    if "/" in name:
        return parse_reference(name, insecure=insecure)
    found = find_published(read_images(_project(app)), name)
    repository = parse_repository(found.repository, insecure=insecure or found.plain_http)
    return Reference(repository=repository, digest=found.digest)


def _show_diff(app: App, found: ImageDiff) -> None:
    app.report.table(
        ("what", "name", "before", "after"),
        [(row.kind, row.name, row.before, row.after) for row in found.rows],
    )
    for text in found.unknown:
        app.report.say(f"not compared: {text}")
    app.report.say(
        "the same image"
        if not found.rows
        else f"to download for who has the first: {found.download} bytes; "
        f"shared: {found.shared} bytes"
    )
