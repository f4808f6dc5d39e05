"""Every state of both series compiles, and names nothing that isn't there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.static.trees import State, Trees

# Undefined, redefined, unused names: what a hunk leaves behind that went somewhere else
RULES = ("F401", "F811", "F821", "F841")

_COMPILE = """
import json, sys
for name, source in json.load(sys.stdin):
    try:
        compile(source.encode("utf-8", "surrogateescape"), name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def _sources(trees: Trees) -> Iterator[tuple[str, bytes]]:
    """Each Python file that a patch touched, as the patch left it, under a name of its own."""
    for state in trees.states():
        for path in state.touched:
            source = state.after.get(path)
            assert source is not None, f"{state.patch} left no {path}"
            yield f"{state.upstream}/{state.patch}/{path}", source


def _interpreter(minor: str) -> str | None:
    """A Python of that minor version: this one, or one on the PATH that runs and says so."""
    if minor == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    found = shutil.which(f"python{minor}")
    if found is None:
        return None
    argv = (found, "-I", "-c", _VERSION)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return found if done.stdout.strip() == minor else None


def test_every_state_compiles_on_a_real_python(
    minor: str, trees: Trees, record_property: Callable[[str, object], None]
) -> None:
    python = _interpreter(minor)
    if python is None:
        pytest.skip(f"no Python {minor} on this machine; its syntax is checked by ruff alone")
    sources = [
        [name, source.decode("utf-8", "surrogateescape")] for name, source in _sources(trees)
    ]
    done = subprocess.run(
        (python, "-I", "-W", "ignore", "-c", _COMPILE),
        input=json.dumps(sources), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    record_property("compiled by a real Python", f"{minor}: {len(sources)} files")


@pytest.fixture(scope="module")
def found(trees: Trees, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ruff says of each file in each state and on the bare pin, by Python version.

    Files of one state lie in one folder: ruff reads folders, and its answer for a file doesn't
    depend on others.
    """
    folder = tmp_path_factory.mktemp("states")
    for name, source in _sources(trees):
        _write(folder / name, source)
    for state in trees.states():
        for path in state.touched:
            if (source := state.base.get(path)) is not None:
                _write(folder / state.upstream / "+base" / path, source)
    try:
        return {minor: _ruff(folder, minor) for minor in trees.line.settings.python}
    finally:
        shutil.rmtree(folder)


def _write(path: Path, source: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(source)


def _ruff(folder: Path, minor: str) -> dict[str, Counter[tuple[str, str]]]:
    """Findings by file: (rule, message) with how often. Lines are left out, since they move."""
    argv = (
        sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--no-respect-gitignore",
        "--quiet", "--exit-zero", "--output-format=json", f"--select={','.join(RULES)}",
        f"--target-version=py{minor.replace('.', '')}", str(folder),
    )  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    findings: dict[str, Counter[tuple[str, str]]] = {}
    for one in json.loads(done.stdout):
        name = Path(one["filename"]).relative_to(folder.resolve()).as_posix()
        what = (one["code"] or "invalid-syntax", one["message"])
        findings.setdefault(name, Counter())[what] += 1
    return findings


def _state(trees: Trees, patch_name: str) -> State:
    (state,) = (s for s in trees.states() if f"{s.upstream}/{s.patch}" == patch_name)
    return state


def test_syntax_is_of_every_python(patch_name: str, trees: Trees, found: dict[str, Any]) -> None:
    """Ruff's own rules for what each version allows, base files' faults included."""
    state = _state(trees, patch_name)
    faults = {
        (minor, path, message)
        for minor, findings in found.items()
        for path in state.touched
        for code, message in findings.get(f"{patch_name}/{path}", ())
        if code not in RULES
    }
    assert not faults


def test_no_name_is_undefined_or_unused(
    patch_name: str, trees: Trees, found: dict[str, Any]
) -> None:
    """Nothing that the file of the bare pin didn't have."""
    state = _state(trees, patch_name)
    for minor, findings in found.items():
        for path in state.touched:
            now = findings.get(f"{patch_name}/{path}", Counter())
            before = findings.get(f"{state.upstream}/+base/{path}", Counter())
            assert not now - before, (minor, path)


def test_what_is_looked_for_is_found(tmp_path: Path, trees: Trees) -> None:
    """A check that can't fail is none: faults put into a file are seen, on each version."""
    good = b"import os\n\nprint(os.name)\n"
    bad = b"import os\nimport sys\n\n\ndef f():\n    left = 1\n    print(undefined)\n"
    newer = b"type X = int\n"  # syntax of 3.12
    for name, source in (("good.py", good), ("bad.py", bad), ("newer.py", newer)):
        _write(tmp_path / name, source)
    for minor in trees.line.settings.python:
        findings = _ruff(tmp_path, minor)
        assert "good.py" not in findings
        assert {code for code, _ in findings["bad.py"]} == {"F401", "F821", "F841"}
        assert ("newer.py" in findings) == (int(minor.partition(".")[2]) < 12)
