"""Sessions of the project. ``nox -l`` lists them; words after ``--`` go to the session.

Every session runs in its own environment; the project and a session's dependency group are
installed into it, so a fresh machine needs Python, git and a package index, no more.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2024.10"
nox.options.sessions = ["lint", "tests"]
nox.options.error_on_external_run = True
nox.options.reuse_venv = "yes"

DEFAULT_LINE = "infernal"


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
    line, *installers = session.posargs or (DEFAULT_LINE,)
    _project(session, "test", "install")
    only = ("-k", " or ".join(installers)) if installers else ()
    env = {"OVERLAY_INSTALL_LINE": line}
    session.run("pytest", "--log-cli-level=INFO", "tests/test_install.py", *only, env=env)


@nox.session(default=False)
def cpu(session: nox.Session) -> None:
    """Check what a line's patches do, on a CPU: ``nox -s cpu -- LINE [pytest's words]``.

    Both wheels in an environment of their own; vLLM's own layers, groups and kernels over
    gloo, with FlashInfer's device kernel replaced by a reference. Minutes, and 5 GB of disk.
    """
    line, *words = session.posargs or (DEFAULT_LINE,)
    _project(session, "install")
    session.run("vllm-overlay", "wheel", line)
    folder = Path(session.virtualenv.location, f"patched-{line}")
    torch = tomllib.loads(Path("patches", line, "line.toml").read_text())["torch"]
    session.run("python", "-m", "tests.support.installers", folder, torch, *_wheels(session, line))
    python = str(folder / "bin" / "python")
    session.run(python, "-m", "pytest", "tests/patched", *words, external=True)


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """Measure apply and wheel against git am, quilt, a plain copy and vLLM's own build.

    Needs quilt; with ``-- --precompiled`` it makes vLLM's precompiled build too (minutes).
    """
    _project(session, *(("test", "wheel-peers") if session.posargs else ()))
    session.run("vllm-overlay", "fetch", DEFAULT_LINE)
    session.run("python", "benchmarks/apply.py", DEFAULT_LINE)
    session.run("python", "benchmarks/wheel.py", DEFAULT_LINE, *session.posargs)


def _wheels(session: nox.Session, line: str) -> list[str]:
    found = sorted(Path("dist", line).glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not found:
        session.error(f"no wheels in dist/{line}")
    return [str(path) for path in found[-2:]]
