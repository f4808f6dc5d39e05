"""Where an image comes from: an SLSA v1 provenance predicate.

It names everything that went in, by hash: both pins, the base image, the revision of this project,
and every file of the line's folder, locks and patches among them. Who publishes vouches for it
with a signature; no hermetic builder does, which SLSA counts as build level 1.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

from overlay.lines.line import PROJECTS, UPSTREAMS
from overlay.lines.record import canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from overlay.images.labels import Labels
    from overlay.lines.line import Line, Upstream
    from overlay.lines.lock import Lock

BUILD_TYPE = "urn:vllm-overlay:image:1"
LOCAL_BUILDER = "urn:vllm-overlay:builder:local"
_PROJECT = "urn:vllm-overlay:source"


def make_provenance(line: Line, lock: Lock, labels: Labels, images: Path) -> dict[str, Any]:
    """The predicate of an image of ``line``.

    Args:
        line: in the state that the image was built from.
        lock: of that state.
        labels: of the image.
        images: the project's folder of that name: Dockerfile and toolkit locks.
    """
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {
                "line": line.name,
                "platform": "linux/amd64",
                "contents": labels.contents,
            },
            "internalParameters": {
                "digest": lock.digest,
                "requirements": labels.requirements,
                "patches": {upstream: dict(_effects(lock, upstream)) for upstream in UPSTREAMS},
            },
            "resolvedDependencies": [
                *(one for upstream in UPSTREAMS for one in _pin(line, upstream)),
                *_base(labels),
                *_project(labels),
                *_files(line.folder, f"patches/{line.name}", line.folder.rglob("*")),
                *_files(images, "images", images.glob("*")),
            ],
        },
        "runDetails": {
            "builder": {"id": builder()},
            "metadata": {"startedOn": labels.created} if labels.created else {},
        },
    }


def effect_id(effects: Iterable[Mapping[str, str]]) -> str:
    """What a patch does, as one hash: of paths, modes and blob ids, message aside."""
    plain = [{key: one[key] for key in ("path", "mode", "blob")} for one in effects]
    return hashlib.sha256(canonical(plain)).hexdigest()


def builder() -> str:
    """Who builds: on GitHub the workflow's file at its commit, elsewhere no more than a word."""
    workflow = os.environ.get("GITHUB_WORKFLOW_REF")
    if os.environ.get("GITHUB_ACTIONS") == "true" and workflow:
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{workflow}"
    return LOCAL_BUILDER


def _pin(line: Line, upstream: Upstream) -> Iterator[dict[str, Any]]:
    """Commit, archive and wheel of an upstream."""
    pin = line.pin(upstream)
    commit: dict[str, Any] = {"uri": f"git+{pin.repository}", "name": f"{upstream} {pin.version}"}
    if pin.commit:
        yield {**commit, "digest": {"gitCommit": pin.commit}}
    else:
        yield {**commit, "annotations": {"abbreviation": pin.abbreviation}}
    for file in (pin.sdist, pin.wheel):
        uri = f"pkg:pypi/{PROJECTS[upstream]}@{pin.version}?file_name={file.file}"
        yield {"uri": uri, "digest": {"sha256": file.sha256}}


def _base(labels: Labels) -> Iterator[dict[str, Any]]:
    name, _, digest = labels.base.partition("@")
    algorithm, _, value = digest.partition(":")
    if value:
        yield {"uri": f"oci://{name}", "name": "base", "digest": {algorithm: value}}


def _project(labels: Labels) -> Iterator[dict[str, Any]]:
    if labels.source:
        dirty = {"annotations": {"changed": "not all that was built from is in this commit"}}
        one = {"uri": _PROJECT, "name": "vllm-overlay", "digest": {"gitCommit": labels.source}}
        yield one | (dirty if labels.is_dirty else {})


def _effects(lock: Lock, upstream: Upstream) -> Iterator[tuple[str, str]]:
    for patch in lock.upstream(upstream).patches:
        rows = ({"path": e.path, "mode": e.mode, "blob": e.blob} for e in patch.files)
        yield patch.name, effect_id(rows)


def _files(folder: Path, name: str, paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Files by their hashes; a link is none."""
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink() and not path.name.startswith("."):
            where = f"{name}/{path.relative_to(folder).as_posix()}"
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield {"name": where, "digest": {"sha256": digest}}
