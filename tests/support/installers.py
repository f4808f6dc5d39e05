"""pip and uv as a user drives them, on the package index that the machine's pip is set up for.

Neither is told anything about an index that the machine's configuration doesn't say: pip reads
it by itself, uv gets it in its own variables.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from overlay.sources.pipconfig import read_pip_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

UNUSABLE_ON_CPU = {
    "nvidia-cutlass-dsl": "where it is, flashinfer 0.6 asks for a GPU's properties on import",
    "torchaudio": "the index's build loads CUDA libraries",
    "torchcodec": "the index's build loads CUDA libraries",
    "torchvision": "the index's build has no operators for a CPU build of torch",
}
"""What breaks an import beside a CPU build of torch, and how; everything else is installed."""

NEED_CUTLASS_DSL = ("nvidia-cudnn-frontend", "quack-kernels", "tokenspeed-mla")
"""pip can't be told to do without a package that another one requires: these would bring it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished command: whether it went well, and all it said."""

    ok: bool
    output: str

    def check(self) -> Done:
        """Return itself; the test fails where the command did."""
        assert self.ok, self.output[-4000:]
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a resolver chose for a project: its version and the file's SHA-256 ("" unknown)."""

    version: str
    sha256: str


class Installer(Protocol):
    """What the tests ask of both."""

    def dropped(self) -> frozenset[str]:
        """Projects that ``install_on_cpu`` leaves out."""

    def install(self, python: Path, *arguments: str) -> Done:
        """Install into an environment, arguments as the installer takes them."""

    def install_on_cpu(self, python: Path, wheels: Sequence[Path], folder: Path) -> None:
        """Install wheels and what they require but ``dropped``; ``folder`` is scratch."""

    def resolve(self, python: Path, folder: Path, *arguments: str) -> Mapping[str, Chosen] | str:
        """What would be chosen for arguments in an empty environment, or the refusal's text."""

    def complaints(self, python: Path) -> list[str]:
        """Lines in which the installer names a requirement that isn't met."""


def run(*argv: str, env: Mapping[str, str] | None = None) -> Done:
    done = subprocess.run(
        argv,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Done(ok=done.returncode == 0, output=done.stdout)


def make_venv(folder: Path) -> Path:
    """An environment with nothing in it, not even pip; path of its interpreter."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder)).check()
    return folder / "bin" / "python"


class Pip:
    """The pip that runs the tests, pointed at an environment."""

    def dropped(self) -> frozenset[str]:
        return frozenset((*UNUSABLE_ON_CPU, *NEED_CUTLASS_DSL))

    def _run(self, python: Path, *arguments: str) -> Done:
        argv = (sys.executable, "-m", "pip", "--python", str(python), *arguments)
        return run(*argv, env={"PIP_PROGRESS_BAR": "off", "NO_COLOR": "1", "PIP_NO_INPUT": "1"})

    def install(self, python: Path, *arguments: str) -> Done:
        return self._run(python, "install", *arguments)

    def install_on_cpu(self, python: Path, wheels: Sequence[Path], folder: Path) -> None:
        wanted = folder / "requirements.txt"
        lines = requirements_of(wheels, without=self.dropped())
        wanted.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self.install(python, "--requirement", str(wanted)).check()
        before = fingerprints(python)
        self.install(python, "--no-deps", *map(str, wheels)).check()
        after = fingerprints(python)
        assert {name: after.get(name) for name in before} == before, "pip touched other packages"

    def resolve(self, python: Path, folder: Path, *arguments: str) -> Mapping[str, Chosen] | str:
        report = folder / "report.json"
        # fast-deps: metadata only, where the index gives it or serves parts of files
        options = ("--dry-run", "--ignore-installed", "--use-feature=fast-deps")
        done = self.install(python, *options, "--report", str(report), *arguments)
        if not done.ok:
            return done.output
        document = json.loads(report.read_text(encoding="utf-8"))
        return {
            canonicalize_name(one["metadata"]["name"]): Chosen(
                version=one["metadata"]["version"],
                sha256=one["download_info"]
                .get("archive_info", {})
                .get("hashes", {})
                .get("sha256", ""),
            )
            for one in document["install"]
        }

    def complaints(self, python: Path) -> list[str]:
        return [line for line in self._run(python, "check").output.splitlines() if line.strip()]


class Uv:
    """uv, told the index configuration of pip unless it has one of its own."""

    def __init__(self) -> None:
        import uv

        self._uv = uv.find_uv_bin()
        self._env = uv_environment(os.environ)

    def dropped(self) -> frozenset[str]:
        return frozenset(UNUSABLE_ON_CPU)

    def _run(self, *arguments: str) -> Done:
        return run(self._uv, "--color=never", "--no-progress", *arguments, env=self._env)

    def install(self, python: Path, *arguments: str) -> Done:
        return self._run("pip", "install", "--python", str(python), *arguments)

    def install_on_cpu(
        self, python: Path, wheels: Sequence[Path], folder: Path, *overridden: str
    ) -> None:
        overrides = folder / "overrides.txt"
        # uv's way to say "without": a marker that never holds
        lines = [f'{name} ; python_version < "3"\n' for name in sorted(self.dropped())]
        lines += [f"{requirement}\n" for requirement in overridden]
        overrides.write_text("".join(lines), encoding="utf-8")
        self.install(python, "--override", str(overrides), *map(str, wheels)).check()

    def resolve(self, python: Path, folder: Path, *arguments: str) -> Mapping[str, Chosen] | str:
        source, lock = folder / "wanted.in", folder / "pylock.toml"
        names = [argument for argument in arguments if not argument.startswith("-")]
        options = [argument for argument in arguments if argument.startswith("-")]
        source.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
        lock.unlink(missing_ok=True)  # or uv would prefer what it says
        given = (str(source), "--output-file", str(lock), "--format", "pylock.toml", *options)
        done = self._run("pip", "compile", "--quiet", "--python", str(python), *given)
        if not done.ok:
            return done.output
        packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
        return {
            one["name"]: Chosen(version=one["version"], sha256=_sha256(one)) for one in packages
        }

    def complaints(self, python: Path) -> list[str]:
        output = self._run("pip", "check", "--python", str(python)).output
        return [line for line in output.splitlines() if line.startswith("The package ")]


def uv_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """pip's configuration in uv's words; what ``environ`` says to uv already stands."""
    config = read_pip_config()
    said = {
        "UV_DEFAULT_INDEX": " ".join(config.index_urls),
        "UV_INDEX": " ".join(config.extra_index_urls),
        "UV_FIND_LINKS": ",".join(config.find_links),
        "UV_NO_INDEX": "1" if config.no_index else "",
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip's rule: all indexes count alike
        "SSL_CERT_FILE": config.cert or "",
    }
    return {name: value for name, value in said.items() if value and name not in environ}


def requirements_of(wheels: Sequence[Path], *, without: frozenset[str]) -> list[str]:
    """What wheels require, extras aside, except one another and ``without``."""
    found: list[str] = []
    own: set[str] = set()
    for wheel in wheels:
        metadata = wheel_metadata(wheel)
        own.add(canonicalize_name(metadata["name"]))
        found += metadata["requires_dist"]
    kept = []
    for text in found:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(wanted.name) not in own | without:
            kept.append(text)
    return kept


def wheel_metadata(wheel: Path) -> Mapping[str, Any]:
    """METADATA of a wheel, as packaging parses it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        raw, _ = parse_email(archive.read(name))
    return raw


def fingerprints(python: Path) -> dict[str, list[Any]]:
    """Each installed distribution: version, and identity and time of its METADATA file."""
    done = run(str(python), "-I", "-c", _FINGERPRINTS).check()
    found: dict[str, list[Any]] = json.loads(done.output)
    return found


_FINGERPRINTS = """
import json, os
from importlib.metadata import distributions
found = {}
for dist in distributions():
    stat = os.stat(dist._path / "METADATA")
    found[dist.metadata["Name"]] = [dist.version, stat.st_ino, stat.st_mtime_ns]
print(json.dumps(found))
"""


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder, each counted once."""
    seen = {(s.st_dev, s.st_ino): s.st_size for f in folder.rglob("*") if (s := f.lstat())}
    return sum(seen.values())


def _sha256(package: Mapping[str, Any]) -> str:
    """The hash of the file, where a pylock.toml leaves one to choose."""
    files = [package["archive"]] if "archive" in package else package.get("wheels", [])
    return str(files[0].get("hashes", {}).get("sha256", "")) if len(files) == 1 else ""


def main(folder: str, torch: str, *wheels: str, cuda: bool = False) -> None:
    """Make an environment with wheels and pytest: ``[--cuda] FOLDER TORCH_VERSION WHEEL...``.

    For a CPU, unless ``--cuda`` asks for everything that the wheels require.
    """
    shutil.rmtree(folder, ignore_errors=True)
    python, uv = make_venv(Path(folder)), Uv()
    if cuda:
        uv.install(python, f"torch=={torch}", "pytest", *wheels).check()
        return
    at_hand = cpu_torch(torch, read_pip_config().find_links)
    uv.install(python, f"torch=={at_hand}", "pytest").check()
    uv.install_on_cpu(python, [Path(w) for w in wheels], Path(folder), f"torch=={at_hand}")


def cpu_torch(wanted: str, find_links: Sequence[str]) -> str:
    """The torch to check a line with on a CPU: ``wanted``, or the newest CPU build at hand.

    The index has CUDA builds (gigabytes); a find-links folder may hold a CPU build, of another
    version. The receipt says which torch was used.
    """
    tags = set(sys_tags())
    built = {
        version
        for folder in find_links
        for wheel in Path(folder).glob("torch-*.whl")
        for _, version, _, of in [parse_wheel_filename(wheel.name)]
        if version.local == "cpu" and tags & of
    }
    if not built or any(version.public == wanted for version in built):
        return wanted
    return str(max(built))


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--cuda"]
    main(*words, cuda="--cuda" in sys.argv)
