"""Debian's source packages: fetched from the machine's own mirror, as base trees and series."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.patches.diff import EXECUTABLE, REGULAR, SYMLINK
from overlay.sources.archive import Member

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlay.trees.store import Commit, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source package on disk: its version and its verified files."""

    name: str
    version: str
    files: tuple[Path, ...]

    @property
    def origs(self) -> dict[str, Path]:
        """Upstream's archives by the folder that they become; "" is the main one."""
        found = {}
        for path in self.files:
            if match := re.search(r"\.orig(?:-([a-z0-9-]+))?\.tar\.(?:gz|xz|bz2)\Z", path.name):
                found[match[1] or ""] = path
        return found

    def unpack_patches(self, folder: Path) -> Path:
        """``debian/patches`` below ``folder``."""
        (archive,) = (path for path in self.files if ".debian.tar." in path.name)
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        return folder / "debian" / "patches"

    def members(self) -> Iterator[Member]:
        """Every file of the unpatched tree."""
        for below, path in sorted(self.origs.items()):
            with tarfile.open(path) as tar:
                yield from _members(tar, below)

    def base(self, store: Store) -> Commit:
        """The unpatched tree as a base commit of ``store``."""
        key = hashlib.sha256(f"{self.name} {self.version}".encode()).hexdigest()
        ref = f"refs/overlay/base/{key}"
        return store.find(ref) or store.import_tree(
            self.members(), ref=ref, message=f"{self.name} {self.version}\n", expect={}
        )


def _members(tar: tarfile.TarFile, below: str) -> Iterator[Member]:
    seen: set[bytes] = set()
    for info in tar:
        path = info.name.encode("utf-8", "surrogateescape").removeprefix(b"./").partition(b"/")[2]
        if below:
            path = below.encode() + b"/" + path
        if info.issym():
            data, mode = info.linkname.encode("utf-8", "surrogateescape"), SYMLINK
        elif info.isfile() or info.islnk():
            stream = tar.extractfile(info)
            assert stream is not None
            data, mode = stream.read(), EXECUTABLE if info.mode & 0o100 else REGULAR
        else:
            continue
        # git holds no file of its own; upstreams that ship one don't patch it
        if path and path not in seen and b".git" not in path.split(b"/"):
            seen.add(path)
            yield Member(path=path, mode=mode, data=data)


class Mirror:
    """The archive that the machine's own apt is configured for, read without root.

    Everything lies below ``folder``: lists, sources, and an apt configuration.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for part in ("state/lists/partial", "cache/archives/partial", "sources"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "sources.list").write_text("".join(f"{line}\n" for line in _entries()))
        (folder / "apt.conf").write_text(
            f'Dir::State "{folder}/state";\nDir::Cache "{folder}/cache";\n'
            f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "-";\n'
            'APT::Sandbox::User "";\n'
        )
        self._updated = False

    def fetch(self, name: str) -> Source:
        """A package's source: the ``.dsc`` as the signed index has it, the rest as the ``.dsc``."""
        if not self._updated:
            self._apt("apt-get", "update", "-q", cwd=self.folder)
            self._updated = True
        # Where nothing was downloaded it lists every file, with the hash from the signed index
        listed = self._apt(
            "apt-get", "source", "-qq", "--print-uris", "--download-only", name, cwd=self.folder
        )
        hashes = dict(
            re.findall(r"^'[^']*' (\S+) \d+ SHA256:([0-9a-f]{64})$", listed, re.MULTILINE)
        )
        (dsc,) = (self.folder / "sources" / file for file in hashes if file.endswith(".dsc"))
        if not all((dsc.parent / file).exists() for file in hashes):
            self._apt("apt-get", "source", "-q", "--download-only", name, cwd=dsc.parent)
        assert _sha256(dsc) == hashes[dsc.name], dsc
        stated = re.search(r"^Checksums-Sha256: *\n((?: .*\n)+)", dsc.read_text(), re.MULTILINE)
        version = re.search(r"^Version: (\S+)", dsc.read_text(), re.MULTILINE)
        assert stated is not None, dsc
        assert version is not None, dsc
        files = []
        for line in stated[1].splitlines():
            sha256, _, file = line.split()
            assert _sha256(dsc.parent / file) == sha256, file
            files.append(dsc.parent / file)
        return Source(name=name, version=version[1], files=tuple(files))

    def _apt(self, *command: str, cwd: Path) -> str:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, check=False,
            env={**os.environ, "APT_CONFIG": str(self.folder / "apt.conf"), "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entries() -> Sequence[str]:
    """``deb-src`` lines for Debian's own archive, as the machine has it for binaries."""
    form = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)"
    out = subprocess.run(
        ("apt-get", "indextargets", "--format", form, "Created-By: Packages"),
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    keys = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    signed = f"[signed-by={keys}] " if keys.exists() else ""
    found = []
    for line in out.splitlines():
        url, release, component, origin = line.split("|")
        if origin == "Debian" and component == "main" and "-" not in release:
            found.append(f"deb-src {signed}{url} {release} main")
    assert found, "apt on this machine knows no archive of Debian"
    return list(dict.fromkeys(found))
