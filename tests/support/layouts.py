"""Tiny OCI layouts, of a few hundred bytes, made without an engine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OS_RELEASE = {"etc/os-release": b'ID=debian\nVERSION_ID="12"\nPRETTY_NAME="Debian 12"\n'}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """An OCI layout on disk: its folder, and the digest of the image in it."""

    folder: Path
    digest: str

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")


def make_layout(
    folder: Path,
    layers: Sequence[Mapping[str, bytes]] = (OS_RELEASE,),
    *,
    labels: Mapping[str, str] | None = None,
    architecture: str = "amd64",
) -> Layout:
    """Write a layout whose layers hold the given files."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        name = hashlib.sha256(data).hexdigest()
        (blobs / name).write_bytes(data)
        return {"digest": f"sha256:{name}", "size": len(data)}

    tars = [_tar(files) for files in layers]
    config = {
        "architecture": architecture,
        "os": "linux",
        "created": "2026-11-30T00:00:00Z",
        "config": {"Labels": dict(labels or {})},
        "rootfs": {
            "type": "layers",
            "diff_ids": [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars],
        },
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            **put(json.dumps(config).encode()),
        },
        "layers": [
            {
                "mediaType": "application/vnd.oci.image.layer.v1.tar+gzip",
                **put(gzip.compress(tar, mtime=0)),
            }
            for tar in tars
        ],
    }
    descriptor = {"mediaType": MANIFEST, **put(json.dumps(manifest).encode())}
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    return Layout(folder=folder, digest=str(descriptor["digest"]))


def dist_info(name: str, version: str) -> dict[str, bytes]:
    """The files by which a Python package is seen to be installed."""
    folder = f"usr/lib/python3/dist-packages/{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    return {f"{folder}/METADATA": metadata.encode(), f"{folder}/RECORD": b""}


def _tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()
