"""Further releases of the line ``tiny``: sdists of the real form in its index.

Their wheels are only listed, so they are empty here; nothing but their hash is ever looked at.
"""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from tests.support.tiny import FLASHINFER_FILES, VLLM_FILES, git, make_sdist

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.tiny import Tiny

ONE = VLLM_FILES["vllm/one.py"]
WHEEL = "vllm-{}-cp38-abi3-manylinux_2_28_x86_64.whl"


def add_release(
    tiny: Tiny,
    version: str,
    changes: Mapping[str, bytes | None] | None = None,
    *,
    commit: str = "0a1b2c3d4",
    lacks: str = "",
) -> None:
    """Offer vLLM ``version``: the pin's files with ``changes``.

    ``commit`` is what it states, and ``lacks`` leaves out its ``sdist`` or its ``wheel``.
    """
    stated = f"__version__ = version = '{version}'\n\n__commit_id__ = commit_id = 'g{commit}'\n"
    files = {
        **VLLM_FILES, **(changes or {}), "vllm/_version.py": stated.encode(), "PKG-INFO": b"x\n",
    }  # fmt: skip
    kept = {name: data for name, data in files.items() if data is not None}
    if lacks != "sdist":
        make_sdist(tiny.index / f"vllm-{version}.tar.gz", f"vllm-{version}", kept)
    if lacks != "wheel":
        (tiny.index / WHEEL.format(version)).write_bytes(version.encode())
    shutil.rmtree(f"{os.environ['VLLM_OVERLAY_CACHE']}/releases", ignore_errors=True)


def add_flashinfer(tiny: Tiny, version: str, changes: Mapping[str, bytes]) -> None:
    """Offer FlashInfer ``version``."""
    top = f"flashinfer_python-{version}"
    stated = f'__version__ = "{version}"\n__git_commit__ = "{"c" * 40}"\n'
    files = {**FLASHINFER_FILES, **changes, "flashinfer/_build_meta.py": stated.encode()}
    make_sdist(tiny.index / f"{top}.tar.gz", top, {**files, "PKG-INFO": b"x\n"})
    (tiny.index / f"{top}-py3-none-any.whl").write_bytes(b"wheel")


def make_history(tiny: Tiny, folder: Path) -> Path:
    """A clone of vLLM's repository as it was at the pin, for commits to be added."""
    head = git(tiny.repos["vllm"], "rev-parse", "v1.2.3^{commit}").decode().strip()
    git(folder.parent, "clone", "-q", str(tiny.repos["vllm"]), str(folder))
    git(folder, "reset", "-q", "--hard", head)
    return folder


def commit(clone: Path, subject: str, files: Mapping[str, bytes | None]) -> str:
    """Change files of a clone and commit; the id."""
    for name, data in files.items():
        path = clone / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if data is None else path.write_bytes(data)
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", subject)
    return git(clone, "rev-parse", "HEAD").decode().strip()


def files_at(clone: Path) -> dict[str, bytes | None]:
    """All files of a clone's HEAD, and None for those of the pin that it lacks."""
    names = git(clone, "ls-files").decode().split()
    return dict.fromkeys(VLLM_FILES) | {name: (clone / name).read_bytes() for name in names}
