"""The two upstreams that a line stands on, and the distributions that they publish.

Needs the standard library alone, as all does that looks at an image while it is built.
"""

from __future__ import annotations

from typing import Literal, get_args

Upstream = Literal["vllm", "flashinfer"]
UPSTREAMS: tuple[Upstream, ...] = get_args(Upstream)

PROJECTS: dict[Upstream, str] = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
