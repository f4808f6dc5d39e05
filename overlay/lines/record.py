"""The provenance record: what a patched state is made of, and the digest that names it.

Canonical JSON of pins, effects and requirement overrides. Messages and trailers are not in it:
rewording a reason changes no wheel. Wheels carry the record, so one version never has two
contents.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from overlay.lines.line import UPSTREAMS, Line, Pin, Upstream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.trees.apply import PatchedTree

RECORD_FORMAT = 1


def make_record(line: Line, trees: Mapping[Upstream, PatchedTree]) -> bytes:
    """The record of a line whose series gave ``trees``."""
    document: dict[str, Any] = {
        "format": RECORD_FORMAT,
        "line": line.name,
        "pins": {upstream: _pin(line.pin(upstream)) for upstream in UPSTREAMS},
        "series": {
            upstream: [
                {
                    "name": patch.name,
                    "effect": [
                        {"path": effect.path, "mode": effect.mode, "blob": effect.blob}
                        for effect in patch.effects
                    ],
                }
                for patch in trees[upstream].patches
            ]
            for upstream in UPSTREAMS
        },
        "requirements": {
            project: requirement.line for project, requirement in line.settings.requirements.items()
        },
    }
    return canonical(document)


def canonical(document: object) -> bytes:
    """One spelling of a JSON document: sorted keys, no white space, UTF-8."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(record: bytes) -> str:
    """SHA-256 of a record, in hex."""
    return hashlib.sha256(record).hexdigest()


def _pin(pin: Pin) -> dict[str, str]:
    return {
        "version": pin.version,
        "commit": pin.commit_text,
        "sdist_sha256": pin.sdist.sha256,
        "wheel_sha256": pin.wheel.sha256,
    }
