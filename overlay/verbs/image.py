"""Verbs about images: what they install, what they are called, how they are built."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlay.app import App, reaches_sources, told_with, verb

if TYPE_CHECKING:
    from overlay.images.contexts import Inputs
    from overlay.images.labels import Contents, Labels
    from overlay.images.oci import Image
    from overlay.images.proof import Proof
    from overlay.images.requirements import Requirements
    from overlay.images.tag import Tag
    from overlay.lines.line import Line
    from overlay.lines.lock import Lock

_ROOM = {"full": 20_000_000_000, "small": 2_000_000_000}  # bytes; wheels, layers, and a spare


@verb(
    short="Lock what LINE's image installs",
    name="image-lock",
    examples="""
    vllm-overlay image-lock infernal
    vllm-overlay image-lock infernal --check
    vllm-overlay image-lock --cuda 13.3.1
    vllm-overlay image-lock --compile
    """,
)
@click.argument("line", required=False)
@click.option("--cuda", metavar="VERSION", help="Lock this CUDA toolkit instead of a line.")
@click.option("--compile", "tools", is_flag=True, help="Lock the tools of the target 'compile'.")
@click.option("--check", is_flag=True, help="Write nothing; fail where the lock is stale.")
@reaches_sources
def image_lock(app: App, line: str | None, cuda: str | None, tools: bool, check: bool) -> None:
    """Resolve what LINE's image installs into its requirements.lock; commit that file."""
    from overlay.images.toolkit import write_compile, write_toolkit

    if (line is not None) + (cuda is not None) + tools != 1:
        raise click.UsageError("name a line, or say --cuda VERSION, or --compile")
    if line is None:
        images = images_folder(app)
        path = write_toolkit(images, cuda) if cuda is not None else write_compile(images)
        _tell(app, "image-lock", {"path": str(path)}, f"wrote {path}")
        return
    read = app.line(line)
    if check:
        found = checked_requirements(app, read)
        _tell(
            app,
            "image-lock",
            {"line": read.name, "wheels": len(found.wheels), "sha256": found.sha256},
            f"{read.name}: {len(found.wheels)} wheels, as line.toml says",
        )
        return
    _write_lock(app, read)


def _write_lock(app: App, line: Line) -> None:
    from overlay.files import machine_errors, write_atomic
    from overlay.images.requirements import format_requirements, lock_inputs, lock_path
    from overlay.images.resolve import resolve_line
    from overlay.lines.line import UPSTREAMS

    toolkit = _toolkit(app, line)
    wheels = [app.sources.release(line, upstream) for upstream in UPSTREAMS]
    found = resolve_line(line.settings, wheels, toolkit)
    path = lock_path(line)
    text = format_requirements(
        f"What an image of {line.name} installs beside vLLM and FlashInfer.",
        lock_inputs(line.settings, toolkit),
        found,
    )
    changed = not path.exists() or path.read_bytes() != text
    with machine_errors(path, is_cache=False):
        write_atomic(path, text)
    document = {"line": line.name, "path": str(path), "wheels": len(found), "changed": changed}
    _tell(app, "image-lock", document, f"{line.name}: {len(found)} wheels in {path}")


@verb(
    short="Name LINE's image, or read a name",
    examples="""
    vllm-overlay tag infernal
    vllm-overlay tag infernal --date 20261201 --revision 2
    vllm-overlay tag --read infernal-vllm2cf0a69-fie62941a-o0ad8b431-cu133-torch213-20261201-r1
    """,
)
@click.argument("line", required=False)
@click.option("--read", metavar="TAG", help="Say what TAG means, ours or one of the fork's.")
@click.option("--date", metavar="YYYYMMDD", help="Date in the tag (default: today, UTC).")
@click.option("--revision", type=click.IntRange(1, 999_999), default=1, help="N of rN.")
def tag(app: App, line: str | None, read: str | None, date: str | None, revision: int) -> None:
    """Print the tag of LINE's image, or read one."""
    from overlay.images.tag import make_tag, parse_tag

    if (line is None) == (read is None):
        raise click.UsageError("name either a line or --read TAG")
    if read is not None:
        _show_tag(app, parse_tag(read))
        return
    named = app.line(str(line))
    packages = named.settings.image.packages if named.settings.image else {}
    made = make_tag(
        named,
        _lock(named).digest,
        date=date or _today(),
        revision=revision,
        packages=tuple((name, one.version) for name, one in sorted(packages.items())),
    )
    if app.report.as_json:
        app.report.json({"verb": "tag", "line": named.name, "tag": str(made)})
    else:
        app.report.text(str(made))


def _show_tag(app: App, found: Tag) -> None:
    if app.report.as_json:
        document = {**asdict(found), "fork": found.is_forks, "meanings": dict(found.meanings)}
        app.report.json({"verb": "tag", "tag": str(found), **document})
        return
    ids = {"vllm": found.vllm, "flashinfer": found.flashinfer, **dict(found.packages)}
    ids |= {"digest": found.digest} if found.digest else {}
    rows = [(name, text, str(found.meanings[name])) for name, text in ids.items()]
    rows += [
        ("codename", found.codename, ""),
        ("cuda", found.cuda, ""),
        ("torch", found.torch, ""),
        ("date", found.date, ""),
        ("revision", str(found.revision), ""),
    ]
    app.report.table(("part", "value", "is a"), rows)


@verb(
    short="Build LINE's image",
    examples="""
    vllm-overlay image infernal
    vllm-overlay image infernal --print
    vllm-overlay image infernal --contents small --base debian@sha256:...
    vllm-overlay image infernal --print --compile work/compile
    """,
)
@click.argument("line")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the OCI layout (default: dist/images/LINE).",
)
@click.option(
    "--contents",
    type=click.Choice(("full", "small")),
    default="full",
    help="'small', for tests: without what vLLM and FlashInfer need.",
)
@click.option(
    "--kernels",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Wheel of FlashInfer's kernels, compiled ahead of time (see 'kernels').",
)
@click.option("--base", metavar="IMAGE@sha256:...", help="Another base image, by digest.")
@click.option("--no-cache", is_flag=True, help="Take no step over from earlier builds.")
@click.option(
    "--compile",
    "tree",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="With --print, for the target 'compile': folder with 'vllm' and 'deps'.",
)
@click.option("--print", "only_print", is_flag=True, help="Prepare, and print the command instead.")
@reaches_sources
def image(
    app: App,
    line: str,
    out: Path | None,
    contents: Contents,
    kernels: Path | None,
    base: str | None,
    no_cache: bool,
    only_print: bool,
    tree: Path | None,
) -> None:
    """Build LINE's image into a folder, an OCI layout, that 'publish' takes.

    Beside it LINE.json says how long each step took and how large each layer is.
    """
    import shutil

    from overlay.files import locked, machine_errors
    from overlay.images.bakefile import write_bake
    from overlay.images.build import bake_command, build_image
    from overlay.images.contexts import write_contexts
    from overlay.images.engine import check_room, find_builder

    if tree is not None and not only_print:
        raise click.UsageError("--compile goes with --print")
    read = app.line(line)
    folder = (out or app.root.absolute().parent / "dist" / "images" / line).absolute()
    builder = None if only_print else find_builder()
    if builder is not None:
        check_room(folder, _ROOM[contents])
    place = folder.with_name(f"{folder.name}.context" if only_print else f".{folder.name}.context")
    with locked(folder.with_name(f".{folder.name}.lock")):
        try:
            inputs = _inputs(app, read, contents, kernels, base, compiling=tree is not None)
            with machine_errors(place, is_cache=False):
                shutil.rmtree(place, ignore_errors=True)
                write_contexts(inputs, place, app.sources)
                generated = write_bake(
                    inputs.labels, place, images=images_folder(app),
                    source=tree.absolute() if tree else None,
                )  # fmt: skip
            files = (images_folder(app) / "docker-bake.hcl", generated)
            if builder is None:
                command = bake_command(files, "compile" if tree else "image")
                document = {"line": line, "command": command, "bake": str(generated)}
                _tell(app, "image", document, " ".join(command))
                return
            made = build_image(files, folder, builder=builder, no_cache=no_cache, report=app.report)
        finally:
            if not only_print:
                shutil.rmtree(place, ignore_errors=True)
    _show_image(app, line, folder, made)


def _inputs(
    app: App,
    line: Line,
    contents: Contents,
    kernels: Path | None,
    base: str | None,
    *,
    compiling: bool,
) -> Inputs:
    from overlay.images.checkout import project_source
    from overlay.images.contexts import Inputs
    from overlay.images.labels import make_labels
    from overlay.images.requirements import read_requirements
    from overlay.images.toolkit import COMPILE_LOCK
    from overlay.lines.lock import check_lock, read_lock
    from overlay.trees.pipeline import apply_line
    from overlay.wheels.linewheels import build_wheels

    requirements = checked_requirements(app, line)
    toolkit = _toolkit(app, line)
    patched = apply_line(line, app.sources)
    lock = check_lock(line, patched, read_lock(line))
    wheels = app.root.absolute().parent / "dist" / line.name
    built = build_wheels(line, patched, app.sources, wheels, app.report)
    assert line.settings.image is not None  # noqa: S101 - _toolkit() looked
    labels = make_labels(
        line,
        lock,
        requirements,
        toolkit,
        contents=contents,
        base=_checked_base(base or line.settings.image.base),
        source=project_source(app.root.absolute().parent),
    )
    return Inputs(
        line=line, labels=labels, requirements=requirements, toolkit=toolkit, built=built,
        kernels=kernels,
        compiling=read_requirements(images_folder(app) / COMPILE_LOCK) if compiling else None,
    )  # fmt: skip


def _checked_base(base: str) -> str:
    import re

    from overlay.errors import ImageError

    if re.fullmatch(r"[a-z0-9][a-z0-9./:_-]*@sha256:[0-9a-f]{64}", base) is None:
        raise ImageError(
            f"{base!r} names no image by its digest",
            why="a tag can name another image tomorrow",
            fix="write it as NAME@sha256:DIGEST; 'docker buildx imagetools inspect NAME:TAG' "
            "says the digest",
        )
    return base


def _show_image(app: App, line: str, folder: Path, made: Image) -> None:
    if app.report.as_json:
        layers = [{"digest": one.digest, "size": one.size} for one in made.layers]
        app.report.json(
            {
                "verb": "image",
                "line": line,
                "path": str(folder),
                "digest": made.digest,
                "size": sum(one.size for one in made.layers),
                "layers": layers,
            }
        )
        return
    app.report.table(
        ("layer", "size"),
        [(one.digest[7:19], f"{one.size / 1e6:.3f} MB") for one in made.layers],
    )
    app.report.say(f"{line}: {made.digest} in {folder}")


def inspect_image(app: App, name: str, *, insecure: bool) -> None:
    """Prove an image against its labels; for the verb ``inspect``."""
    from overlay.images.contexts import claims_of
    from overlay.images.labels import read_labels
    from overlay.images.obtain import obtained
    from overlay.images.proof import prove
    from overlay.images.site import PREFIX, read_image_site
    from overlay.images.structure import config_problems

    with obtained(name, scratch=app.cache / "images", insecure=insecure) as found:
        labels = read_labels(found.labels)
        with app.report.progress(f"read {len(found.layers)} layers"):
            site = read_image_site(found.files(PREFIX))
        proof = prove(site, claims_of(labels), more=config_problems(found, labels))
        proof = _against_upstreams(app, proof)
        digest = found.digest
    document = {
        "verb": "inspect",
        "image": name,
        "digest": digest,
        "line": labels.line,
        "contents": labels.contents,
        "files": proof.files,
        "effects": proof.effects,
        "distributions": dict(sorted(proof.distributions.items())),
        "problems": [asdict(problem) for problem in proof.problems],
        "notes": [asdict(note) for note in proof.notes],
    }
    error = proof.error(name)
    if error is None and app.report.as_json:
        app.report.json(document)
    elif not app.report.as_json:
        _show_proof(app, name, labels, proof)
    with told_with(app, document):
        if error is not None:
            raise error


def _against_upstreams(app: App, proof: Proof) -> Proof:
    """Hold unpatched files against upstream's wheels too, where the cache has them."""
    from dataclasses import replace

    from overlay.verbs.look import against_upstream

    looked = [against_upstream(app, one, rows) for one, rows in proof.upstreams]
    return replace(
        proof,
        problems=(*proof.problems, *(p for one in looked for p in one.problems)),
        notes=(*proof.notes, *(note for one in looked for note in one.notes)),
    )


def _show_proof(app: App, name: str, labels: Labels, proof: Proof) -> None:
    checked = f"{proof.files} files, {proof.effects} patched"
    result = f"{len(proof.problems)} problems" if proof.problems else "as recorded"
    app.report.table(
        ("image", "line", "digest", "checked", "result"),
        [(name, labels.line, labels.digest, checked, result)],
    )
    for note in proof.notes:
        app.report.say(f"note: {note.what}")


def _lock(line: Line) -> Lock:
    from overlay.errors import LockError
    from overlay.lines.lock import read_lock

    found = read_lock(line)
    if found is None:
        raise LockError(f"{line.name} has no lock", fix=f"run 'vllm-overlay lock {line.name}'")
    return found


def _today() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y%m%d")


def images_folder(app: App) -> Path:
    """Where Dockerfile, bake file and the toolkits' locks lie."""
    return app.root.absolute().parent / "images"


def checked_requirements(app: App, line: Line) -> Requirements:
    """The line's lock, when it is of the line as it is now."""
    from overlay.errors import LockError
    from overlay.images.requirements import (
        lock_inputs,
        lock_path,
        read_requirements,
        stale_inputs,
    )

    toolkit = _toolkit(app, line)
    read = read_requirements(lock_path(line))
    faults = list(stale_inputs(read, lock_inputs(line.settings, toolkit)))
    if faults:
        raise LockError(
            f"{line.name}'s {lock_path(line).name} is of another state of the line",
            why="\n".join(faults),
            fix=f"run 'vllm-overlay image-lock {line.name}', look at 'git diff', commit",
        )
    return read


def _toolkit(app: App, line: Line) -> Requirements:
    from overlay.errors import LineError
    from overlay.images.toolkit import read_toolkit

    if line.settings.image is None:
        raise LineError(
            f"{line.name} has no [image] in line.toml",
            why="base and Python of its image are said there",
            fix="add it; another line's is a pattern",
        )
    return read_toolkit(images_folder(app), line.settings.cuda)


def _tell(app: App, name: str, document: dict[str, Any], said: str) -> None:
    if app.report.as_json:
        app.report.json({"verb": name, **document})
    else:
        app.report.say(said)
