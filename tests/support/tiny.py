"""A whole line in small: two real repositories, their sdists and wheels, and a patches folder.

Everything is of the real form, made by plain git, tarfile and zipfile; only small. The package
index is a find-links folder, which pip's own configuration names (``PIP_FIND_LINKS``).
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import pytest

VERSIONS = {"vllm": "1.2.3", "flashinfer": "4.5.6rc7"}
PROJECTS = {"vllm": "vllm", "flashinfer": "flashinfer_python"}
TRAILERS = "Upstream-Status: Pending\nRemove-When: upstream does it itself\n"

VLLM_FILES = {
    "vllm/__init__.py": b"from vllm._version import __version__\n",
    "vllm/one.py": b"".join(b"one = %d\n" % i for i in range(40)),
    "vllm/two.py": b"two = 2\n",
    "vllm/old.py": b"old = True\n",
    "csrc/kernel.cu": b"// kernel\n",
    "docs/guide.md": b"# Guide\n",
}
FLASHINFER_FILES = {
    "flashinfer/__init__.py": b"from flashinfer._build_meta import __version__\n",
    "csrc/prefill.cu": b"".join(b"// line %d\n" % i for i in range(30)),
    "include/a.h": b"#pragma once\n",
}


def git(folder: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """Plain git with a fixed identity and clock."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_NAME": "Ada" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "ada@example.invalid" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_DATE": "1700000000 +0000" for who in ("AUTHOR", "COMMITTER")},
    }
    return subprocess.run(
        ("git", *arguments), cwd=folder, env=env, input=stdin, capture_output=True, check=True
    ).stdout


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """The line ``tiny`` and what it was made from.

    Attributes:
        root: folder above ``patches``.
        index: the find-links folder.
        repos: a git repository with a working tree for each upstream.
    """

    root: Path
    index: Path
    repos: dict[str, Path]

    @property
    def patches(self) -> Path:
        return self.root / "patches"

    @property
    def folder(self) -> Path:
        return self.patches / "tiny"

    def series(self, upstream: str) -> list[str]:
        path = self.folder / upstream / "series"
        return path.read_text().split() if path.exists() else []

    def add_patch(
        self,
        upstream: str,
        name: str,
        files: Mapping[str, bytes | None],
        *,
        trailers: str = TRAILERS,
        subject: str = "",
    ) -> Path:
        """Commit ``files`` onto the upstream's repository; the patch goes to the series' end."""
        repo = self.repos[upstream]
        for path, data in files.items():
            target = repo / path
            if data is None:
                target.unlink()
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
        git(repo, "add", "-A", "-f")
        message = f"{subject or 'area: ' + name.replace('-', ' ')}\n\nThe reason.\n\n{trailers}"
        git(repo, "commit", "-q", "-F", "-", stdin=message.encode())
        mail = git(
            repo, "format-patch", "--zero-commit", "--no-signature", "--full-index",
            "--no-numbered", "--binary", "--no-stat", "-1", "--stdout",
        )  # fmt: skip
        folder = self.folder / upstream
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.patch"
        path.write_bytes(mail)
        with (folder / "series").open("a") as series:
            series.write(f"{name}.patch\n")
        return path

    def edit(self, old: str, new: str, file: str = "line.toml") -> None:
        """Replace text in a file of the line; it must be there."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, (old, text)
        path.write_text(text.replace(old, new))


def make_tiny(root: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Make the line below ``root`` and point pip's configuration at its index."""
    index = root / "index"
    index.mkdir(parents=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    repos = {
        "vllm": _repo(root / "vllm", VLLM_FILES, VERSIONS["vllm"]),
        "flashinfer": _repo(root / "flashinfer", FLASHINFER_FILES, VERSIONS["flashinfer"]),
    }
    tiny = Tiny(root=root, index=index, repos=repos)
    tiny.folder.mkdir(parents=True)
    pins = "".join(_pin(tiny, upstream) for upstream in repos)
    (tiny.folder / "line.toml").write_text(
        f"""format = 1
summary = "a line in small"
python = ["3.11", "3.12"]
torch = "2.13.0"
cuda = "13.3.1"
architectures = ["12.0a"]

[requirements.flashinfer-python]
upstream = "==4.5.5"
line = "=={VERSIONS["flashinfer"]}"
{pins}"""
    )
    return tiny


def _repo(folder: Path, files: Mapping[str, bytes], version: str) -> Path:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main", "--template=")
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "Release")
    git(folder, "tag", "-a", "-m", "release", f"v{version}")
    return folder


def _pin(tiny: Tiny, upstream: str) -> str:
    repo, version = tiny.repos[upstream], VERSIONS[upstream]
    commit = git(repo, "rev-parse", "HEAD").decode().strip()
    tree = git(repo, "rev-parse", "HEAD^{tree}").decode().strip()
    files = VLLM_FILES if upstream == "vllm" else FLASHINFER_FILES
    generated = {"PKG-INFO": b"Metadata-Version: 2.1\n", **_version_file(upstream, commit)}
    sdist = _sdist(tiny.index, upstream, {**files, **generated})
    wheel = _wheel(tiny.index, upstream, commit)
    names = ", ".join(f'"{name}"' for name in generated)
    return f"""
[{upstream}]
version = "{version}"
repository = "{repo.as_uri()}"
tag = "v{version}"
commit = "{commit}"
tree = "{tree}"
sources = ["archive", "git"]
generated = [{names}]
sdist = {{ file = "{sdist.name}", sha256 = "{_sha256(sdist)}" }}
wheel = {{ file = "{wheel.name}", sha256 = "{_sha256(wheel)}" }}
"""


def _version_file(upstream: str, commit: str) -> dict[str, bytes]:
    version = VERSIONS[upstream]
    if upstream == "flashinfer":
        text = f'"""Build."""\n__version__ = "{version}"\n__git_commit__ = "{commit}"\n'
        return {"flashinfer/_build_meta.py": text.encode()}
    numbers = ", ".join(version.split("."))
    text = (
        f"__version__ = version = '{version}'\n"
        f"__version_tuple__ = version_tuple = ({numbers})\n\n"
        f"__commit_id__ = commit_id = 'g{commit[:9]}'\n"
    )
    return {"vllm/_version.py": text.encode()}


def make_sdist(path: Path, top: str, files: Mapping[str, bytes]) -> Path:
    """An sdist with ``files`` below the folder ``top``."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return path


def _sdist(index: Path, upstream: str, files: Mapping[str, bytes]) -> Path:
    top = f"{PROJECTS[upstream]}-{VERSIONS[upstream]}"
    return make_sdist(index / f"{top}.tar.gz", top, files)


def _wheel(index: Path, upstream: str, commit: str) -> Path:
    project, version = PROJECTS[upstream], VERSIONS[upstream]
    if upstream == "vllm":
        files = {name: data for name, data in VLLM_FILES.items() if name.startswith("vllm/")}
        requires = "Requires-Dist: flashinfer-python==4.5.5\nRequires-Dist: torch==2.13.0\n"
    else:
        files = {
            name if name.startswith("flashinfer/") else f"flashinfer/data/{name}": data
            for name, data in FLASHINFER_FILES.items()
        }
        requires = ""
    info = f"{project}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.4\nName: {project.replace('_', '-')}\nVersion: {version}\n"
    files = {
        **files,
        **_version_file(upstream, commit),
        f"{info}/METADATA": f"{metadata}{requires}\nA description\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={_record_hash(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    path = index / f"{project}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
