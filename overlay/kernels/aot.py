"""A compiled module to the wheel in which FlashInfer finds it: ``flashinfer-jit-cache``.

It takes the name of upstream's distribution, so that only one of them can be installed, and the
version of the FlashInfer wheel that it belongs to, which it requires to the letter.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlay.files import machine_errors, write_atomic
from overlay.kernels.compile import MODULE, SM
from overlay.lines.line import PROJECTS
from overlay.wheels import distinfo
from overlay.wheels.kernelwheel import BUILT_MEMBER, PACKAGE, PROJECT
from overlay.wheels.rawzip import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.kernels.compile import Compiled

# Not imported: it is the wheel's, and looks for what lies beside it there
_SHIPPED = Path(__file__).with_name("shipped.py")
# The shared object needs no newer C library than where it is built, which no other tag can say
TAG = "py3-none-linux_x86_64"


def write_wheel(
    compiled: Compiled, out: Path, *, public: str, record: bytes, versions: Mapping[str, str]
) -> Path:
    """Write the wheel of a module into a folder and return its path; same input, same bytes.

    Args:
        compiled: from the line's patched tree.
        out: folder, made if need be.
        public: FlashInfer's version upstream.
        record: the line's provenance record.
        versions: of what compiled it.
    """
    version = distinfo.overlay_version(public, record)
    info = f"{PACKAGE}-{version}.dist-info"
    members = {
        f"{PACKAGE}/__init__.py": _SHIPPED.read_bytes(),
        BUILT_MEMBER: _json(built(compiled, version, versions)),
        f"{PACKAGE}/modules/{MODULE}/{MODULE}.so": compiled.module,
        f"{info}/METADATA": _metadata(version),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: vllm-overlay\nRoot-Is-Purelib: false\nTag: {TAG}\n"
        ).encode(),
        f"{info}/{distinfo.RECORD_MEMBER}": record,
    }
    rows = [distinfo.row(name, data) for name, data in members.items()]
    own = f"{info}/RECORD"
    members[own] = distinfo.format_record([*rows, distinfo.Row(own, "", "")])
    with tempfile.TemporaryFile() as file:
        writer = Writer(file.fileno())
        for name, data in members.items():
            executable = name.endswith(".so")
            writer.store(name, data, 0o100755 if executable else 0o100644)
        writer.close()
        file.seek(0)
        whole = file.read()
    path = out / f"{PACKAGE}-{version}-{TAG}.whl"
    with machine_errors(out, is_cache=False):
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, whole)
    return path


def built(compiled: Compiled, version: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """What a wheel says of what it was built from: the member ``built.json``."""
    return {
        "version": version,
        "architectures": [SM.replace("_", "")],
        "modules": [MODULE],
        "tree": compiled.tree,
        "inputs": compiled.inputs,
        "sources": compiled.sources,
        "versions": {k: v for k, v in versions.items() if k not in ("ninja", "ccache")},
    }


def _metadata(version: str) -> bytes:
    return (
        f"Metadata-Version: 2.1\nName: {PROJECT}\nVersion: {version}\n"
        "Summary: SM120 sparse-MLA kernels of a patched FlashInfer, compiled ahead of time\n"
        f"License: Apache-2.0\nRequires-Dist: {PROJECTS['flashinfer']}=={version}\n"
    ).encode()


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
