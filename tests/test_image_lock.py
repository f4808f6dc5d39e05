"""Requirements, labels and the kernels' key; and what lint says of a line's image."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import ImageError, LineError
from overlay.images.kernelkey import Ingredients, cache_environment, kernel_key
from overlay.images.labels import NAMESPACE, Source, make_labels, read_labels, write_labels
from overlay.images.linelint import lock_faults, settings_faults
from overlay.images.requirements import (
    Locked,
    format_requirements,
    lock_inputs,
    lock_path,
    read_requirements,
    stale_inputs,
    torch_cuda,
)
from overlay.images.resolve import _tags, _wheel
from overlay.images.toolkit import read_toolkit
from overlay.lines.line import find_lines, read_line
from overlay.lines.lock import read_lock

if TYPE_CHECKING:
    from overlay.images.labels import Labels
    from overlay.lines.line import Line

ROOT = Path(__file__).parent.parent
LINES = find_lines(ROOT / "patches")
SHA = "5" * 64
TORCH = Locked(name="torch", version="2.13.0", file="torch-2.13.0-py3-none-any.whl", sha256=SHA)


def line_of(name: str = "infernal") -> Line:
    return read_line(ROOT / "patches", name)


def labels_of(name: str = "infernal") -> Labels:
    line = line_of(name)
    lock, image = read_lock(line), line.settings.image
    assert lock is not None
    assert image is not None
    return make_labels(
        line, lock, read_requirements(lock_path(line)),
        read_toolkit(ROOT / "images", line.settings.cuda),
        contents="full", base=image.base,
        source=Source(commit="c" * 40, is_dirty=False, created="2026-12-01T00:00:00Z"),
    )  # fmt: skip


# --- requirements.lock -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LINES)
def test_every_line_is_locked_as_it_is_now(name: str) -> None:
    line = line_of(name)
    read = read_requirements(lock_path(line))
    toolkit = read_toolkit(ROOT / "images", line.settings.cuda)
    assert list(stale_inputs(read, lock_inputs(line.settings, toolkit))) == []
    assert read.wheels["torch"].version == line.settings.torch
    assert torch_cuda(read).startswith("13.0.")
    # The compiler that wheels bring is the toolkit's
    assert read.wheels["nvidia-cuda-nvcc"] == toolkit.wheels["nvidia-cuda-nvcc"]
    assert "://" not in lock_path(line).read_text()


def test_a_lock_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "requirements.lock"
    other = replace(TORCH, name="numpy", version="2.0", file="numpy-2.0-py3-none-any.whl")
    path.write_bytes(format_requirements("Words.", {"python": "3.11"}, [TORCH, other]))
    read = read_requirements(path)
    assert list(read.wheels.values()) == [other, TORCH]
    assert read.inputs == {"python": "3.11"}
    assert read.pip_text() == f"{other}\n{TORCH}\n"


@pytest.mark.parametrize(
    "line",
    [
        "torch",
        "torch==2.13.0",
        f"torch>=2.13.0 --hash=sha256:{SHA}  # torch-2.13.0-py3-none-any.whl",
        f"torch==2.13.0 --hash=sha256:{SHA[1:]}  # torch-2.13.0-py3-none-any.whl",
        f"torch==2.13.0 --hash=sha256:{SHA}  # ../torch-2.13.0-py3-none-any.whl",
        f"torch==2.13.0 --hash=sha256:{SHA}  # torch-2.12.0-py3-none-any.whl",
        f"--index-url=https://example.invalid torch==2.13.0 --hash=sha256:{SHA}",
        f"{TORCH}\n{TORCH}",
    ],
)
def test_a_lock_of_another_form_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "requirements.lock"
    path.write_text(f"{line}\n")
    with pytest.raises(LineError, match=r"requirements\.lock:"):
        read_requirements(path)


def test_pips_own_choice_among_wheels_is_taken() -> None:
    def wheel(tag: str) -> dict[str, Any]:
        return {"url": f"https://x.invalid/x-1.0-{tag}.whl", "hashes": {"sha256": SHA}}

    names = (
        "py3-none-any",
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
    )
    package = {"name": "x", "version": "1.0", "wheels": [wheel(name) for name in names]}
    assert _wheel(package, _tags("3.11")).file.endswith("manylinux_2_28_x86_64.whl")
    newer = {"name": "x", "version": "1.0", "wheels": [wheel("cp311-cp311-manylinux_2_39_x86_64")]}
    with pytest.raises(ImageError, match="no wheel for the base"):
        _wheel(newer, _tags("3.11"))


# --- lint --------------------------------------------------------------------------------------


def copied(tmp_path: Path, old: str = "", new: str = "") -> Line:
    """infernal in another place, with one thing changed in line.toml."""
    (tmp_path / "images").mkdir()
    folder = tmp_path / "patches" / "infernal"
    folder.mkdir(parents=True)
    (tmp_path / "images" / "cuda-13.3.lock").write_bytes(
        (ROOT / "images" / "cuda-13.3.lock").read_bytes()
    )
    source = ROOT / "patches" / "infernal"
    (folder / "requirements.lock").write_bytes((source / "requirements.lock").read_bytes())
    text = (source / "line.toml").read_text()
    assert old in text
    (folder / "line.toml").write_text(text.replace(old, new) if old else text)
    return read_line(tmp_path / "patches", "infernal")


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('torch = "2.13.0"', 'torch = "2.12.0"', "torch"),
        ('python = "3.11"', 'python = "3.12"', "python"),
        ("1c95e874f4", "1c95e874f5", "flashinfer"),
    ],
)  # fmt: skip
def test_a_lock_of_another_line_toml_is_an_error(
    tmp_path: Path, old: str, new: str, key: str
) -> None:
    line = copied(tmp_path)
    assert list(lock_faults(line.folder, line.settings)) == []
    text = (line.folder / "line.toml").read_text()
    assert old in text
    (line.folder / "line.toml").write_text(text.replace(old, new))
    changed = read_line(line.folder.parent, "infernal")
    ((is_hint, what, fix),) = lock_faults(changed.folder, changed.settings)
    assert not is_hint
    assert f"{key}: it was made from" in what
    assert fix == "run 'vllm-overlay image-lock infernal'"


def test_a_missing_lock_is_a_hint(tmp_path: Path) -> None:
    line = copied(tmp_path)
    (line.folder / "requirements.lock").unlink()
    ((is_hint, *_),) = lock_faults(line.folder, line.settings)
    assert is_hint


@pytest.mark.parametrize(
    ("addition", "fault"),
    [
        ("", ""),
        ('[image.packages.b12x]\nversion = "1.5.1"\nfile = "b12x-1.5.1-py3-none-any.whl"\n', ""),
        (
            '[image.packages.b12x]\nversion = "1.5.2"\nfile = "b12x-1.5.1-py3-none-any.whl"\n',
            "no wheel of b12x 1.5.2",
        ),
        (
            '[image.packages.B12X]\nversion = "1.5.1"\nfile = "b12x-1.5.1-py3-none-any.whl"\n',
            "write its name as b12x",
        ),
    ],
)
def test_extra_packages_are_checked(tmp_path: Path, addition: str, fault: str) -> None:
    extra = f'{addition}sha256 = "{SHA}"\n' if addition else ""
    last = 'needs = ["nvidia-cutlass-dsl>=4.6"]\n'
    line = copied(tmp_path, last, last + extra)
    found = list(settings_faults((line.folder / "line.toml").read_text(), line.settings))
    assert [what for _, what in found if fault and fault in what] == [w for _, w in found]
    assert bool(found) == bool(fault)


def test_the_image_comes_last_in_line_toml(tmp_path: Path) -> None:
    line = copied(tmp_path)
    text = (line.folder / "line.toml").read_text() + "\n[requirements.x]\nupstream = '>1'\n"
    assert [key for key, _ in settings_faults(text, line.settings)] == ["image"]


# --- labels and key ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINES)
def test_labels_are_read_back(name: str) -> None:
    labels = labels_of(name)
    assert read_labels(write_labels(labels)) == labels
    assert labels.vllm.is_full == (name != "next")  # next's pin knows an abbreviation only
    assert labels.driver == "580"


def test_labels_say_both_cudas() -> None:
    labels = write_labels(labels_of())
    text = labels["org.opencontainers.image.description"]
    assert "built with CUDA 13.0.3, CUDA 13.3.1 to compile with" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", "2"),
        ("format", None),
        ("digest", "0ad8b431"),
        ("digest", None),
        ("vllm", "{}"),
        ("vllm", "{"),
        ("contents", "medium"),
        ("is_dirty", "maybe"),
        ("surprise", "x"),
    ],
)
def test_labels_of_another_form_are_refused(key: str, value: str | None) -> None:
    labels = write_labels(labels_of())
    labels.pop(NAMESPACE + key, None)
    if value is not None:
        labels[NAMESPACE + key] = value
    with pytest.raises(ImageError):
        read_labels(labels)


INGREDIENTS = Ingredients(
    digest="1" * 64, requirements="2" * 64, torch="2.13.0", torch_cuda="13.0.3",
    cuda=(("nvidia-cuda-nvcc", "13.3.73"),), architectures=("12.0a",), python="3.11",
    base="sha256:" + "3" * 64,
)  # fmt: skip


@pytest.mark.parametrize("field", list(asdict(INGREDIENTS)))
def test_every_ingredient_changes_the_key(field: str) -> None:
    value = getattr(INGREDIENTS, field)
    other = (*value, *value) if isinstance(value, tuple) else f"{value}0"
    assert kernel_key(replace(INGREDIENTS, **{field: other})) != kernel_key(INGREDIENTS)


def test_a_change_of_flashinfer_alone_changes_the_key() -> None:
    labels = labels_of()
    line = line_of()
    lock = read_lock(line)
    assert lock is not None
    # The digest covers both upstreams' pins and patches: see overlay.lines.record
    other = replace(INGREDIENTS, digest="4" * 64)
    assert kernel_key(other) != kernel_key(INGREDIENTS)
    assert labels.kernels in next(iter(cache_environment(labels.kernels).values()))


def test_all_caches_lie_below_the_key() -> None:
    dockerfile = (ROOT / "images" / "Dockerfile").read_text()
    for name, path in cache_environment("${KERNEL_KEY}").items():
        assert f"{name}={path}" in dockerfile
