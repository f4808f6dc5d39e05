"""What an image's configuration has to say: user, entry point, paths, health check.

Read from the configuration alone. ``images/Dockerfile`` writes it; these are the values that users
and the proof rely on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlay.images.bakefile import cuda_prefix
from overlay.images.kernelkey import cache_environment
from overlay.images.site import PREFIX
from overlay.wheels.inspect import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlay.images.labels import Labels
    from overlay.images.oci import Image

USER = "1000:1000"
ENTRYPOINT = ["vllm", "serve"]
HEALTHCHECK = ["CMD", "python3", "-I", "/opt/healthcheck.py"]
# Python would take code from there in place of what is installed
_REDIRECTING = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "LD_PRELOAD", "LD_LIBRARY_PATH")


def config_problems(image: Image, labels: Labels) -> Iterator[Problem]:
    """Everything in which a configuration isn't as the Dockerfile makes it."""
    config: dict[str, Any] = image.config.get("config", {})
    expected = {
        "User": USER,
        "Entrypoint": ENTRYPOINT,
        "StopSignal": "SIGTERM",
        "WorkingDir": "/home/vllm",
    }
    for key, value in expected.items():
        if config.get(key) != value:
            yield _problem(key, config.get(key), value)
    test = (config.get("Healthcheck") or {}).get("Test")
    if test != HEALTHCHECK:
        yield _problem("Healthcheck", test, HEALTHCHECK)
    yield from _environment_problems(image, labels)


def _environment_problems(image: Image, labels: Labels) -> Iterator[Problem]:
    environment = image.environment
    expected = {
        **cache_environment(labels.kernels),
        "CUDA_HOME": cuda_prefix(labels.cuda),
        "VIRTUAL_ENV": f"/{PREFIX}",
    }
    for name, value in expected.items():
        if environment.get(name) != value:
            yield _problem(name, environment.get(name), value)
    if not environment.get("PATH", "").startswith(f"/{PREFIX}/bin:"):
        yield _problem("PATH", environment.get("PATH"), f"/{PREFIX}/bin first")
    for name in _REDIRECTING:
        if environment.get(name):
            what = f"the image sets {name}: other code than what is installed could run"
            yield Problem("config", name, what)


def _problem(key: str, found: object, expected: object) -> Problem:
    return Problem("config", key, f"the image's {key} is {found!r}, not {expected!r}")
