"""Sessions of the project. ``nox -l`` lists them; words after ``--`` go to the session.

Every session runs in its own environment; the project and a session's dependency group are
installed into it, so a fresh machine needs Python, git and a package index, no more.
"""

from __future__ import annotations

import ctypes
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = True
nox.options.reuse_venv = "yes"

DEFAULT_LINE = "infernal"
# Columns of docs/preflight.md: every line, and the FlashInfer that vLLM 0.28.0 itself asks for
MATRIX = "all,infernal@0.6.16.post3"


def _project(session: nox.Session, *groups: str) -> None:
    """Install the project and dependency groups from ``pyproject.toml``."""
    session.install("-e", ".", *nox.project.dependency_groups(_PROJECT, *groups))


_PROJECT = nox.project.load_toml("pyproject.toml")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and types of the code, and the patches of every line."""
    _project(session, "lint", "test")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("vllm-overlay", "lint")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests: unit tests, then those on the real pinned archives.

    ``nox -s tests -- -m 'not real'`` needs no network; other words go to pytest as well.
    """
    _project(session, "test")
    session.run("pytest", "-n", "auto", *(session.posargs or ("-m", "not slow")))


@nox.session
def build(session: nox.Session) -> None:
    """Build a line's wheels into dist/LINE: ``nox -s build -- LINE [--offline ...]``."""
    line, *options = session.posargs or (DEFAULT_LINE,)
    _project(session)
    session.run("vllm-overlay", "wheel", line, *options)
    session.run("vllm-overlay", "inspect", *_wheels(session, line))


@nox.session
def verify(session: nox.Session) -> None:
    """Recompute what lines' locks promise: ``nox -s verify -- LINE [--source git ...]``."""
    line, *options = session.posargs or (DEFAULT_LINE,)
    _project(session)
    session.run("vllm-overlay", "verify", line, *options)


@nox.session(name="wheel-peers", default=False)
def wheel_peers(session: nox.Session) -> None:
    """Show that overlay wheels equal what the upstreams' own builds make (minutes)."""
    _project(session, "test", "wheel-peers")
    session.run("pytest", "-m", "real", "tests/test_wheel_real.py", *session.posargs)


@nox.session(default=False)
def install(session: nox.Session) -> None:
    """Install a line's wheels by pip and uv, import, check: ``nox -s install -- LINE [pip|uv]``.

    Minutes and 5 GB of disk for a while; 8 GB where no find-links folder has a CPU build of torch.
    """
    line, force, installers = _asked(session)
    _project(session, "test", "install")
    only = ("-k", " or ".join(installers)) if installers else ()
    _check(session, "install", line, force, only)


@nox.session(default=False)
def static(session: nox.Session) -> None:
    """Check a line's sources, without torch: ``nox -s static -- LINE [--force] [pytest's words]``.

    Every state of both series, vLLM's calls into FlashInfer, the patches' postconditions, and
    what the wheels require. Seconds.
    """
    line, force, words = _asked(session)
    _project(session, "static")
    _check(session, "static", line, force, words)


@nox.session(default=False)
def cpu(session: nox.Session) -> None:
    """Check what a line's patches do, on a CPU: ``nox -s cpu -- LINE [--force] [pytest's words]``.

    Both wheels in an environment of their own; vLLM's own layers, groups and kernels over
    gloo, with FlashInfer's device kernel replaced by a reference. Minutes, and 5 GB of disk.
    """
    line, force, words = _asked(session)
    _project(session, "install")
    if not force and not words and _unchanged(session, "cpu", line):
        return  # before minutes are spent on the environment
    session.run("vllm-overlay", "wheel", line)
    folder = Path(session.virtualenv.location, f"patched-{line}")
    torch = tomllib.loads(Path("patches", line, "line.toml").read_text())["torch"]
    session.run("python", "-m", "tests.support.installers", folder, torch, *_wheels(session, line))
    _check(session, "cpu", line, True, words, python=folder / "bin" / "python")


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """Check a line's patches on a CUDA device: ``nox -s gpu -- LINE [--force] [pytest's words]``.

    As ``cpu``, with kernels compiled, CUDA graphs, and on SM120 FlashInfer's own kernel. Minutes,
    and 12 GB of disk. For a machine without a network there is ``vllm-overlay bundle``.
    """
    line, force, words = _asked(session)
    _project(session, "install")
    if not force and not words and _unchanged(session, "gpu", line):
        return
    if not _cuda_devices():
        session.error(
            "no CUDA device here: the gpu session needs one. For a machine that has one but no "
            f"network, pack 'vllm-overlay bundle {line}'; without one there is 'nox -s cpu'"
        )
    session.run("vllm-overlay", "wheel", line)
    folder = Path(session.virtualenv.location, f"patched-{line}")
    torch = tomllib.loads(Path("patches", line, "line.toml").read_text())["torch"]
    make = ("python", "-m", "tests.support.installers", "--cuda")
    session.run(*make, folder, torch, *_wheels(session, line))
    _check(session, "gpu", line, True, words, python=folder / "bin" / "python")


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Put known defects into a line's trees: ``nox -s mutants -- LINE [--force] [pytest's words]``.

    One at a time, and each must be noticed by ``static`` or ``cpu``; docs/mutants.md gets the
    table. Both wheels in an environment of their own, as for ``cpu``. A quarter of an hour.
    """
    line, force, words = _asked(session)
    _project(session, "install", "static")
    if force or words or not _unchanged(session, "mutants", line):
        session.run("vllm-overlay", "wheel", line)
        folder = Path(session.virtualenv.location, f"patched-{line}")
        torch = tomllib.loads(Path("patches", line, "line.toml").read_text())["torch"]
        make = ("python", "-m", "tests.support.installers")
        session.run(*make, folder, torch, *_wheels(session, line))
        _check(session, "mutants", line, True, words, python=folder / "bin" / "python")
    session.run("python", "-m", "tests.mutants.table")


@nox.session(default=False)
def kernels(session: nox.Session) -> None:
    """Compile a line's SM120 module, without a GPU: ``nox -s kernels -- LINE [--force] [words]``.

    CUDA's compiler comes from wheels (160 MB). The wheel goes into dist/LINE/kernels; that it is
    what it says, and that FlashInfer takes it and no other, is shown beside a CPU build of torch.
    Minutes, fewer with a filled cache, and 3 GB of disk for a while.
    """
    line, force, words = _asked(session)
    _project(session, "test", "install", "kernels")
    session.run("vllm-overlay", "kernels", line)
    _check(session, "kernels", line, force, words)
    session.run("pytest", "tests/test_capability_real.py", "-k", "sm_120a")


@nox.session(default=False)
def image(session: nox.Session) -> None:
    """Build a line's image into dist/images/LINE: ``nox -s image -- LINE [--contents small ...]``.

    Needs Docker 26 or newer with buildx. Downloads 4 GB once, and takes 20 GB of disk for a while;
    see docs/images.md. Other words go to ``vllm-overlay image``.
    """
    line, *words = session.posargs or (DEFAULT_LINE,)
    _project(session)
    session.run("vllm-overlay", "image", line, *words)


@nox.session(name="image-compile", default=False)
def image_compile(session: nox.Session) -> None:
    """Configure vLLM's compile build in the target ``compile``, and build one source of it.

    As ``image-check`` does, with the line's whole dependencies: 4 GB of downloads, 25 GB of disk
    for a while, a quarter of an hour.
    """
    _project(session, "test")
    session.run("bash", "tests/images/provision.sh", external=True)
    session.run("pytest", "tests/images/test_compile.py", *session.posargs)


@nox.session(name="image-lint", default=False)
def image_lint(session: nox.Session) -> None:
    """Check the Dockerfile, its scripts and the bake file. Seconds, no engine.

    ``docker buildx bake --print`` needs Docker's client alone; without it that is left out.
    """
    _project(session, "test", "image-lint")
    scripts = (*Path("images").glob("*.sh"), Path("tests/images/provision.sh"))
    session.run("hadolint", "images/Dockerfile")
    session.run("shellcheck", *map(str, scripts))
    session.run("pytest", "tests/test_image_bake.py", *session.posargs)


@nox.session(name="image-check", default=False)
def image_check(session: nox.Session) -> None:
    """Build a true image in small, prove, publish and promote it: ``-- [pytest's words]``.

    On a bare Debian 12 it installs an engine and what else it needs, as root; it starts an engine
    and registries of its own on loopback, and takes them down. Minutes, and 5 GB for a while.
    ``-- -m slow`` runs what it leaves out: many publishers at once, and some that are killed.
    """
    _project(session, "test", "publish")
    session.run("bash", "tests/images/provision.sh", external=True)
    session.run("pytest", "tests/images", *(session.posargs or ("-m", "not slow")))


@nox.session(default=False)
def preflight(session: nox.Session) -> None:
    """Put every recipe to every line's sources; docs/preflight.md and .svg get the matrix.

    ``-- LINE[@FLASHINFER],... [options]`` asks others and writes nothing. No card, no build; it
    fails where vLLM or FlashInfer has changed what it serves, which the page then shows.
    """
    _project(session)
    if session.posargs:
        session.run("vllm-overlay", "preflight", *session.posargs, "--all")
        return
    outs = ("--out", "docs/preflight.svg", "--out", "docs/preflight.md")
    before = Path("docs/preflight.md").read_bytes()
    # Some recipes are there to be refused: what matters is that the page stays as it is
    codes = (0, 22, 23)
    session.run("vllm-overlay", "preflight", MATRIX, "--all", *outs, success_codes=codes)
    if Path("docs/preflight.md").read_bytes() != before:
        session.error("docs/preflight.md has changed: look at what 'git diff' says, and commit it")


@nox.session(default=False)
def publish(session: nox.Session) -> None:
    """Publish a line's image: ``nox -s publish -- LINE --to REGISTRY/REPOSITORY --key KEY``.

    What ``nox -s image -- LINE`` built goes up by digest, signed, the tag last. Needs oras and
    cosign; see docs/publishing.md. Other words go to ``vllm-overlay publish``.
    """
    line, *words = session.posargs or (DEFAULT_LINE,)
    _project(session, "publish")
    session.run("vllm-overlay", "publish", line, *words)


@nox.session(default=False)
def series(session: nox.Session) -> None:
    """Import, apply and export series of Debian's, held against git: ``-- [pytest's words]``.

    Needs apt (any Debian or Ubuntu machine; no root), and beside the cache 5 GB for sources.
    Minutes; the first time half an hour. ``-- -k grub2`` takes one package.
    """
    _project(session, "test")
    session.run("pytest", "tests/series", *session.posargs)


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """Measure apply, frontier and wheel against git am, quilt, a plain copy, vLLM's own build.

    Needs quilt; with ``-- --precompiled`` it makes vLLM's precompiled build too (minutes).
    """
    _project(session, *(("test", "wheel-peers") if session.posargs else ()))
    session.run("vllm-overlay", "fetch", DEFAULT_LINE)
    session.run("python", "benchmarks/apply.py", DEFAULT_LINE)
    session.run("python", "benchmarks/frontier.py")
    session.run("python", "benchmarks/wheel.py", DEFAULT_LINE, *session.posargs)


def _wheels(session: nox.Session, line: str) -> list[str]:
    found = sorted(Path("dist", line).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        session.error(f"no wheels in dist/{line}")
    return [str(path) for path in found[-2:]]


def _asked(session: nox.Session) -> tuple[str, bool, tuple[str, ...]]:
    """Line, whether to run what has passed already, and further words."""
    words = [word for word in session.posargs if word != "--force"]
    line, *rest = words or (DEFAULT_LINE,)
    return line, "--force" in session.posargs, tuple(rest)


def _unchanged(session: nox.Session, name: str, line: str) -> bool:
    """Whether a receipt says that a check passed on this very line; says so."""
    out = session.run("vllm-overlay", "check", name, line, "--due", "--quiet", silent=True)
    answer = str(out or "").strip()
    session.log(answer)
    return answer.rpartition("\n")[2].startswith("unchanged")


def _check(
    session: nox.Session,
    name: str,
    line: str,
    force: bool,
    words: tuple[str, ...],
    *,
    python: Path | None = None,
) -> None:
    """Run a check on a line, which leaves a receipt, unless it has a passing one.

    ``words`` go to pytest; they ask for a run of their own, which isn't the whole check.
    """
    if not force and not words and _unchanged(session, name, line):
        return
    options = ("--python", str(python)) if python else ()
    session.run("vllm-overlay", "check", name, line, "--force", *options, "--", *words)


def _cuda_devices() -> int:
    """How many CUDA devices the driver has; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if ready else 0
