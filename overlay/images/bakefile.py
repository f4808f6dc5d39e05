"""The part of a build that a line has of its own, as a bake file beside ``docker-bake.hcl``.

Generated, so outside of git: arguments, labels and named contexts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from overlay.images.contexts import COMPILE, CONTEXTS
from overlay.images.labels import write_labels

if TYPE_CHECKING:
    from pathlib import Path

    from overlay.images.labels import Labels

EPOCH = 315532800
"""Time of every file in an image: 1980-01-01, the first that a wheel can state.

Not that of a commit: a layer would then differ from the same layer of the last revision.
"""

BAKE_FILE = "bake.json"


def cuda_prefix(cuda: str) -> str:
    """Where an image has its CUDA toolkit."""
    return f"/opt/cuda-{'.'.join(cuda.split('.')[:2])}"


def make_bake(
    labels: Labels, contexts: Path, *, images: Path, source: Path | None = None
) -> dict[str, Any]:
    """The bake file of an image.

    Args:
        labels: what it will claim.
        contexts: folder with one folder a named context.
        images: folder of the Dockerfile.
        source: of the target ``compile``: patched vLLM, and what its cmake would fetch.
    """
    arguments = {
        "BASE_IMAGE": labels.base,
        "PYTHON": labels.python,
        "CUDA_PREFIX": cuda_prefix(labels.cuda),
        "KERNEL_KEY": labels.kernels,
        "ARCHITECTURES": " ".join(labels.architectures),
        "SOURCE_DATE_EPOCH": str(EPOCH),
    }
    folders = {name: contexts / name for name in CONTEXTS}
    if source is not None:
        folders |= {COMPILE: contexts / COMPILE, "source": source}
    return {
        "target": {
            "common": {
                "context": str(images),
                "args": arguments,
                "contexts": {name: str(folder) for name, folder in folders.items()},
            },
            "image": {"labels": write_labels(labels)},
        }
    }


def write_bake(labels: Labels, contexts: Path, *, images: Path, source: Path | None = None) -> Path:
    """Write ``bake.json`` into the folder of the contexts."""
    path = contexts / BAKE_FILE
    document = make_bake(labels, contexts, images=images, source=source)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return path
