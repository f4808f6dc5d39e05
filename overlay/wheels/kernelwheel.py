"""What a wheel of compiled kernels says of its sources, held against an installed FlashInfer."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from overlay.errors import WheelError

if TYPE_CHECKING:
    from pathlib import Path

# FlashInfer looks for this package; upstream's own kernels come under the same name
PROJECT = "flashinfer-jit-cache"
PACKAGE = "flashinfer_jit_cache"
BUILT_MEMBER = f"{PACKAGE}/built.json"


def differing_sources(document: bytes, site: Path) -> list[str]:
    """Files of an installed FlashInfer that aren't those which installed kernels were made of.

    Args:
        document: ``built.json``, as installed; untrusted.
        site: folder in which both packages lie.

    Raises ``WheelError`` for a document that isn't one of ours.
    """
    try:
        sources = json.loads(document)["sources"]
        wanted = {str(name): str(of) for name, of in sources.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WheelError(f"{BUILT_MEMBER} can't be read", why=repr(error)) from None
    differing = []
    for name, of in sorted(wanted.items()):
        inside = name.startswith("flashinfer/") and ".." not in name.split("/")
        path = site / name
        data = path.read_bytes() if inside and path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != of:
            differing.append(name)
    return differing
