"""The part of a build that a line has of its own, as a bake file beside ``docker-bake.hcl``.

Generated, so outside of git: arguments, labels and named contexts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from overlay.images.contexts import CONTEXTS
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


def make_bake(labels: Labels, contexts: Path, *, images: Path) -> dict[str, Any]:
    """The bake file of an image.

    Args:
        labels: what it will claim.
        contexts: folder with one folder a named context.
        images: folder of the Dockerfile.
    """
    arguments = {
        "BASE_IMAGE": labels.base,
        "PYTHON": labels.python,
        "CUDA_PREFIX": cuda_prefix(labels.cuda),
        "KERNEL_KEY": labels.kernels,
        "ARCHITECTURES": " ".join(labels.architectures),
        "VERSION": f"{labels.vllm.version}+{labels.line}.o{labels.digest[:8]}",
        "SOURCE_DATE_EPOCH": str(EPOCH),
    }
    names = [name for name in (*CONTEXTS, "source") if (contexts / name).is_dir()]
    return {
        "target": {
            "common": {
                "context": str(images),
                "args": arguments,
                "contexts": {name: str(contexts / name) for name in names},
            },
            "image": {"labels": write_labels(labels)},
        }
    }


def write_bake(labels: Labels, contexts: Path, *, images: Path) -> Path:
    """Write ``bake.json`` into the folder of the contexts."""
    path = contexts / BAKE_FILE
    document = make_bake(labels, contexts, images=images)
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    return path
