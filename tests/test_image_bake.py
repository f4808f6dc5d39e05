"""The bake files: values of the line, and nothing that floats."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.images.bakefile import make_bake
from overlay.images.contexts import COMPILE, CONTEXTS
from overlay.images.labels import read_labels, write_labels
from overlay.images.structure import ENTRYPOINT, HEALTHCHECK, USER
from tests.test_image_lock import LINES, labels_of

if TYPE_CHECKING:
    from overlay.images.labels import Labels

IMAGES = Path(__file__).parent.parent / "images"
DOCKERFILE = (IMAGES / "Dockerfile").read_text()


def generated(labels: Labels, folder: Path) -> dict[str, Any]:
    for name in CONTEXTS:
        (folder / name).mkdir(parents=True)
    return make_bake(labels, folder, images=IMAGES)


@pytest.mark.parametrize("name", LINES)
def test_a_line_gives_all_that_the_dockerfile_asks_for(name: str, tmp_path: Path) -> None:
    labels = labels_of(name)
    common = generated(labels, tmp_path)["target"]["common"]
    asked = set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    assert asked - {"TARGETS", "MAX_JOBS"} <= common["args"].keys()
    assert common["args"]["BASE_IMAGE"] == labels.base
    assert all(Path(folder).is_dir() for folder in common["contexts"].values())
    asked = set(re.findall(r"from=([\w-]+)", DOCKERFILE))
    stages = set(re.findall(r" AS (\w+)$", DOCKERFILE, re.MULTILINE))
    assert asked - stages == {*CONTEXTS, COMPILE, "source"}
    assert stages.isdisjoint(CONTEXTS)  # a context would replace the stage of its name


def test_labels_go_through_the_bake_file_unharmed(tmp_path: Path) -> None:
    labels = labels_of()
    found = generated(labels, tmp_path)["target"]["image"]["labels"]
    assert found == write_labels(labels)
    assert read_labels(found) == labels
    assert not any("${" in text or "%{" in text for text in found.values())


def test_nothing_floats() -> None:
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)[0] == "${BASE_IMAGE}"
    stages = set(re.findall(r" AS (\w+)$", DOCKERFILE, re.MULTILINE)) | {"scratch"}
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)[1:]) <= stages
    assert "# syntax=" not in DOCKERFILE
    assert not re.search(r"apt-get|curl|wget|git clone|ADD ", DOCKERFILE)
    runs = re.findall(r"^RUN (?:.*\\\n)*.*", DOCKERFILE, re.MULTILINE)
    (compiling,) = [run for run in runs if not run.startswith("RUN --network=none ")]
    assert compiling.endswith("bash /compile.sh /source /build /out")  # sccache's shared backend
    for labels in map(labels_of, LINES):
        assert re.search(r"@sha256:[0-9a-f]{64}$", labels.base)


def test_the_dockerfile_sets_what_the_proof_asks_for() -> None:
    assert f"USER {USER}\n" in DOCKERFILE
    assert f"ENTRYPOINT {json.dumps(ENTRYPOINT)}\n" in DOCKERFILE
    assert f"CMD {json.dumps(HEALTHCHECK[1:])}\n" in DOCKERFILE


@pytest.mark.skipif(shutil.which("docker") is None, reason="no Docker client")
@pytest.mark.parametrize("target", ["image", "compile"])
def test_buildx_reads_the_bake_files(target: str, tmp_path: Path) -> None:
    path = tmp_path / "bake.json"
    path.write_text(json.dumps(generated(labels_of(), tmp_path / "contexts")))
    argv = ("docker", "buildx", "bake", "--file", str(IMAGES / "docker-bake.hcl"))
    done = subprocess.run(
        (*argv, "--file", str(path), "--print", target),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["target"][target]
    assert found["args"]["KERNEL_KEY"] == labels_of().kernels
    assert set(found["contexts"]) == set(CONTEXTS)
