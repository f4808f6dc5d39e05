"""A project with the line ``infernal``, and tiny images that claim to be of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from overlay.images.labels import Claimed, Labels, write_labels
from overlay.images.requirements import lock_path, read_requirements
from overlay.lines.line import UPSTREAMS, read_line
from overlay.lines.lock import read_lock
from overlay.lines.record import canonical
from tests.support.layouts import OS_RELEASE, Layout, dist_info, make_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
LINE = "infernal"
BASE = "docker.io/library/python:3.11-bookworm@sha256:" + "b" * 64


def make_project(folder: Path) -> Path:
    """A folder with ``patches/infernal`` as it is here, and ``images``."""
    shutil.copytree(ROOT / "patches" / LINE, folder / "patches" / LINE)
    (folder / "images").mkdir()
    (folder / "images" / "Dockerfile").write_text("FROM scratch\n")
    return folder


def make_labels(project: Path, **changes: Any) -> Labels:
    """Labels of the line as it is in ``project``, save for ``changes``."""
    line = read_line(project / "patches", LINE)
    lock = read_lock(line)
    assert lock is not None
    claimed = {
        upstream: Claimed(
            version=line.pin(upstream).version,
            commit=line.pin(upstream).commit_text,
            trees={},
            patches=tuple(patch.name for patch in lock.upstream(upstream).patches),
        )
        for upstream in UPSTREAMS
    }
    plain = Labels(
        line=LINE, digest=lock.digest, contents="full", torch="2.13.0", torch_cuda="13.0",
        cuda="13.3.1", architectures=("12.0a",), python="3.11", driver="580", packages={},
        needs=(), requirements=read_requirements(lock_path(line)).sha256, base=BASE,
        kernels="k" * 16, source="c" * 40, is_dirty=False, created="2026-11-30T00:00:00Z",
        **claimed,
    )  # fmt: skip
    return msgspec.structs.replace(plain, **changes)


def make_record(project: Path, **effects: str) -> bytes:
    """A provenance record as wheels carry it; ``effects`` changes a patch's blob by its name."""
    lock = read_lock(read_line(project / "patches", LINE))
    assert lock is not None
    series = {
        upstream: [
            {
                "name": patch.name,
                "effect": [
                    {"path": e.path, "mode": e.mode, "blob": effects.get(patch.name, e.blob)}
                    for e in patch.files
                ],
            }
            for patch in lock.upstream(upstream).patches
        ]
        for upstream in UPSTREAMS
    }
    return canonical({"format": 1, "series": series})


def make_image(
    project: Path,
    folder: Path,
    *,
    salt: str = "",
    packages: Mapping[str, str] | None = None,
    effects: Mapping[str, str] | None = None,
    **changes: Any,
) -> Layout:
    """An image of two layers; ``salt`` makes the last another one."""
    labels = make_labels(project, **changes)
    files = {"salt": salt.encode()}
    for name, version in (packages or {"vllm": "0.28.0+infernal.o1", "PyYAML": "6.0"}).items():
        files |= dist_info(name, version)
    info = next(name for name in files if name.endswith("METADATA")).rpartition("/")[0]
    files[f"{info}/overlay.json"] = make_record(project, **(effects or {}))
    return make_layout(folder, (OS_RELEASE, files), labels=write_labels(labels))
