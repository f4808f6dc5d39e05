"""Tiny wheels, provenance records and effects for tests of what is done with wheels."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import zipfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

METADATA = """\
Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: a: colon, and Ünicode
Classifier: Programming Language :: Python :: 3.11
Requires-Dist: torch==2.13.0
Requires-Dist: Flashinfer_Python==0.6.16.post3
Requires-Dist: lark[all]<2,>=1.2
License: folded
  version: 3
Provides-Extra: bench
Requires-Dist: pandas; extra == "bench"

Version: this line is of the description
"""
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def canonical(record: Mapping[str, Any]) -> bytes:
    """A provenance record in canonical form, fields that aren't given left empty."""
    full = {
        "format": 1,
        "line": "infernal",
        "pins": {},
        "series": {"vllm": [], "flashinfer": []},
        "requirements": {},
        **record,
    }
    return json.dumps(full, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def effect(path: str, data: bytes | None, mode: str = "100644") -> dict[str, str]:
    """What a patch makes of a path, as the record says it."""
    if data is None:
        return {"path": path, "mode": "000000", "blob": "0" * 40}
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    return {"path": path, "mode": mode, "blob": blob.hexdigest()}


def record_line(path: str, data: bytes) -> tuple[str, str, str]:
    """One line of RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return path, f"sha256={digest}", str(len(data))


def record_text(lines: list[tuple[str, str, str]]) -> bytes:
    """A RECORD."""
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue().encode()


def info_files(name: str = "vllm", version: str = "0.28.0") -> dict[str, bytes]:
    """The files of a dist-info folder, RECORD left out."""
    info = f"{name}-{version}.dist-info"
    return {
        f"{info}/METADATA": METADATA.format(name=name.replace("_", "-"), version=version).encode(),
        f"{info}/WHEEL": WHEEL.encode(),
        f"{info}/licenses/LICENSE": b"free\n",
    }


def make_wheel(
    folder: Path,
    files: Mapping[str, bytes],
    *,
    name: str = "vllm",
    version: str = "0.28.0",
    tags: str = "py3-none-any",
    record: bytes | None = None,
) -> Path:
    """Write a wheel with the standard library; ``record`` replaces the right RECORD."""
    path = folder / f"{name}-{version}-{tags}.whl"
    own = f"{name}-{version}.dist-info/RECORD"
    content = {**files, **info_files(name, version)}
    if record is None:
        lines = [record_line(file, data) for file, data in content.items()]
        record = record_text([*lines, (own, "", "")])
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, data in {**content, own: record}.items():
            info = zipfile.ZipInfo(file, (2026, 8, 25, 1, 2, 4))
            info.external_attr = (0o100755 if file.endswith(".sh") else 0o100644) << 16
            packed = zipfile.ZIP_STORED if file.endswith(".bin") else zipfile.ZIP_DEFLATED
            info.compress_type = packed
            archive.writestr(info, data)
    return path


def sha256(path: Path) -> str:
    """Of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
