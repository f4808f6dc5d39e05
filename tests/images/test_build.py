"""Images built by a real engine: true ones in small, and every fault that a build must stop at.

``small`` images hold upstream's real wheels with the line's real patches over them, and nothing of
what those need. The base image is a stand-in made by mmdebstrap. Nothing here needs a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from overlay.cli import main
from overlay.images.contexts import _program, claims_of
from overlay.images.labels import read_labels
from overlay.images.oci import read_layout
from overlay.images.proof import write_claims
from overlay.images.requirements import format_requirements, lock_inputs
from overlay.images.structure import config_problems
from overlay.images.tag import parse_tag
from overlay.images.toolkit import read_toolkit
from overlay.lines.line import read_line
from tests.support.tiny import Tiny, make_tiny

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.images.engine import Engine

ROOT = Path(__file__).parent.parent.parent
LINE = "infernal"
pytestmark = pytest.mark.real  # the cache is the user's


@pytest.fixture(autouse=True)
def _engine(running: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONFIG", "BUILDX_CONFIG"):
        monkeypatch.setenv(name, running.environment[name])


def build(
    out: Path, base: str, *options: str, patches: Path | None = None, line: str = LINE
) -> int:
    where = ("--patches", str(patches or ROOT / "patches"))
    small = ("--contents", "small", "--base", base, "--out", str(out))
    return main([*where, "image", line, *small, *options])


@pytest.fixture(scope="module")
def first(running: Engine, base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """infernal's image in small."""
    out = tmp_path_factory.mktemp("first") / LINE
    with pytest.MonkeyPatch.context() as patch:
        for name in ("DOCKER_HOST", "DOCKER_CONFIG", "BUILDX_CONFIG"):
            patch.setenv(name, running.environment[name])
        assert build(out, base) == 0
    yield out
    shutil.rmtree(out)


def test_it_is_what_it_claims(first: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    code = main(["--patches", str(ROOT / "patches"), "inspect", "--image", str(first), "--json"])
    found = json.loads(capfd.readouterr().out)
    assert (code, found["problems"]) == (0, [])
    assert found["effects"] >= 5
    assert set(found["distributions"]) == {"vllm", "flashinfer-python"}


def test_user_entry_point_paths_and_versions(first: Path) -> None:
    image = read_layout(first)
    labels = read_labels(image.labels)
    assert list(config_problems(image, labels)) == []
    assert labels.contents == "small"
    assert image.config["config"]["ExposedPorts"] == {"8000/tcp": {}}
    modes = {e.path: (e.kind, e.mode) for e in image.files() if e.path in ("cache", "home/vllm")}
    assert modes == {"cache": ("folder", 0o755), "home/vllm": ("folder", 0o755)}


def test_nothing_of_the_build_stays_in_it(first: Path, running: Engine) -> None:
    paths = {entry.path.split("/")[0] for entry in read_layout(first).files()}
    assert paths.isdisjoint({"wheels", "proof", "changes", "apply_overlay.py", "install.sh"})
    assert (
        running.docker("image", "ls", "--quiet", "--all").split()
        == running.docker(
            "image", "ls", "--quiet", "--all", "--filter", "reference=*/library/debian"
        ).split()
    )
    assert running.docker("ps", "--all", "--quiet") == ""
    assert not list(first.parent.glob(".*.part")) + list(first.parent.glob(".*.context"))


def test_the_record_says_where_time_and_bytes_went(first: Path) -> None:
    record = json.loads(first.with_name(f"{LINE}.json").read_text())
    assert record["digest"] == read_layout(first).digest
    assert sum(layer["size"] for layer in record["layers"]) == record["size"]
    assert any(name.startswith("upstream") for name in record["steps"])


def test_another_build_without_the_cache_gives_the_same_digest(
    first: Path, base: str, tmp_path: Path
) -> None:
    assert build(tmp_path / "again", base, "--no-cache", "--quiet") == 0
    assert read_layout(tmp_path / "again").digest == read_layout(first).digest


def test_a_change_of_one_patch_is_one_thin_layer(first: Path, base: str, tmp_path: Path) -> None:
    """Of a project in which one of vLLM's Python files has one more line."""
    project = tmp_path / "project"
    for name in ("patches", "images"):
        shutil.copytree(ROOT / name, project / name)
    (tmp_path / "one.diff").write_text(ONE_LINE)
    patches = project / "patches"
    argv = ["--patches", str(patches), "new", LINE, "vllm", "one-line", "--subject", "one: line"]
    author = ("--author", "Ada <ada@example.invalid>")
    assert main([*argv, "--from", str(tmp_path / "one.diff"), *author]) == 0
    assert main(["--patches", str(patches), "lock", LINE]) == 0
    assert build(tmp_path / "other", base, "--quiet", patches=patches) == 0
    old, new = read_layout(first), read_layout(tmp_path / "other")
    differing = [
        (ours.size, theirs.size)
        for ours, theirs in zip(new.layers, old.layers, strict=True)
        if ours.digest != theirs.digest
    ]
    assert len(differing) == 1
    assert new.layers[-1].digest != old.layers[-1].digest
    assert differing[0][0] < 1_000_000


def test_it_is_pushed_pulled_run_and_proven_inside(
    first: Path, running: Engine, tmp_path: Path
) -> None:
    target = f"{running.registry}/test/vllm:one"
    argv = ("skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false")
    subprocess.run((*argv, f"oci:{first}", f"docker://{target}"), check=True)
    assert main(["--patches", str(ROOT / "patches"), "inspect", "--image", target]) == 0
    running.docker("pull", "--quiet", target)
    try:
        assert (
            main(
                [
                    "--patches",
                    str(ROOT / "patches"),
                    "inspect",
                    "--image",
                    f"docker-daemon:{target}",
                ]
            )
            == 0
        )
        _program(tmp_path / "proof")
        claims = claims_of(read_labels(read_layout(first).labels))
        (tmp_path / "proof" / "claims.json").write_bytes(write_claims(claims))
        said = running.docker(
            "run", "--rm", "--network=none", "--entrypoint=python3", "--env=PYTHONPATH=/proof",
            f"--volume={tmp_path / 'proof'}:/proof:ro", target,
            "-s", "-m", "overlay.images.proof", "/proof/claims.json", "/opt/vllm",
        )  # fmt: skip
        assert "0 problems" in said
        user = running.docker("run", "--rm", "--entrypoint=id", target, "-u")
        assert user.strip() == "1000"
    finally:
        running.docker("image", "rm", target)


def test_it_is_published_signed_promoted_and_told_apart(
    first: Path,
    running: Engine,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The way of a release, on the true image in small."""
    monkeypatch.setenv("COSIGN_PASSWORD", "correct horse")
    subprocess.run(
        ("cosign", "generate-key-pair", "--output-key-prefix", str(tmp_path / "key")),
        check=True, capture_output=True,
    )  # fmt: skip
    shutil.copytree(ROOT / "patches", tmp_path / "project" / "patches")
    shutil.copytree(ROOT / "images", tmp_path / "project" / "images")
    repository = f"{running.registry}/release/vllm"

    def say(verb: str, *words: str) -> dict[str, Any]:
        capfd.readouterr()
        where = ("--patches", str(tmp_path / "project" / "patches"))
        code = main([*where, verb, *words, "--json"])
        out, err = capfd.readouterr()
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    to = (str(first), "--to", repository, "--key", str(tmp_path / "key.key"), "--settle", "2")
    done = say("publish", *to)
    digest, tag = read_layout(first).digest, done["tag"]
    assert done["digest"] == digest
    assert parse_tag(tag).codename == LINE
    assert say("publish", *to)["tag"] == tag
    assert [image["tag"] for image in say("images")["images"]] == [tag]

    public = ("--key", str(tmp_path / "key.pub"))
    argv = ("cosign", "verify", *public, "--insecure-ignore-tlog=true", "--allow-insecure-registry")
    subprocess.run((*argv, f"{repository}@{digest}"), check=True, capture_output=True)
    say("promote", tag, LINE, *public, "--to", repository)
    assert say("inspect", "--image", f"{repository}:{LINE}")["problems"] == []
    same = say("image-diff", f"{repository}:{LINE}", str(first))
    assert (same["differences"], same["download_bytes"]) == ([], 0)


# --- what stops a build, on a line in small ------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """The line ``tiny`` with an image."""
    tiny = make_tiny(tmp_path / "project", monkeypatch)
    tiny.add_patch("vllm", "first", {"vllm/two.py": b"two = 22\n"})
    shutil.copytree(ROOT / "images", tiny.root / "images")
    with (tiny.folder / "line.toml").open("a") as file:
        file.write(f'\n[image]\nbase = "x@sha256:{"0" * 64}"\npython = "3.11"\n')
    line = read_line(tiny.patches, "tiny")
    toolkit = read_toolkit(tiny.root / "images", line.settings.cuda)
    locked = [*toolkit.wheels.values()]  # any; a small image has none of them
    text = format_requirements("Test.", lock_inputs(line.settings, toolkit), locked)
    (tiny.folder / "requirements.lock").write_bytes(text)
    assert main(["--patches", str(tiny.patches), "lock", "tiny"]) == 0
    return tiny


def refused(
    tiny: Tiny, base: str, capfd: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str]:
    out = tiny.root / "out" / "tiny"
    capfd.readouterr()
    code = build(out, base, *options, patches=tiny.patches, line="tiny")
    said = capfd.readouterr().err
    left = {path.name for path in out.parent.glob("*")} | {p.name for p in out.parent.glob(".*")}
    assert left <= {".tiny.lock"}
    return code, said


def rebuilt_with(tiny: Tiny, old: str, new: str) -> None:
    path = tiny.root / "images" / "Dockerfile"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


APPLY = "python3 -I /apply_overlay.py /changes /opt/vllm/lib/python3.*/site-packages; \\\n"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("", "vLLM 1.2.3 is upstream's own build, without a patch: a resolver preferred it"),
        (
            APPLY + "    echo 'two = 3' > /opt/vllm/lib/python3.11/site-packages/vllm/two.py; \\\n",
            "vllm/two.py differs from its hash in RECORD",
        ),
        (
            APPLY + "    touch /opt/vllm/lib/python3.11/site-packages/more.pth; \\\n",
            "more.pth came from no wheel",
        ),
    ],
    ids=["overlay-not-applied", "file-changed", "file-added"],
)
def test_a_build_that_is_not_the_patched_state_fails(
    project: Tiny, base: str, capfd: pytest.CaptureFixture[str], step: str, message: str
) -> None:
    rebuilt_with(project, APPLY, step)
    code, said = refused(project, base, capfd)
    assert code == 25
    assert message in said


def test_no_step_of_a_build_has_a_network(project: Tiny, base: str) -> None:
    rebuilt_with(project, APPLY, APPLY + '    test "$(ls /sys/class/net)" = lo; \\\n')
    out = project.root / "out" / "tiny"
    assert build(out, base, patches=project.patches, line="tiny") == 0


def test_a_base_with_another_python_fails(
    project: Tiny, base: str, capfd: pytest.CaptureFixture[str]
) -> None:
    toolkit = read_toolkit(project.root / "images", "13.3.1")
    project.edit('python = "3.11"\n', 'python = "3.12"\n')
    line = read_line(project.patches, "tiny")
    text = format_requirements("", lock_inputs(line.settings, toolkit), [*toolkit.wheels.values()])
    (project.folder / "requirements.lock").write_bytes(text)
    code, said = refused(project, base, capfd)
    assert code == 25
    assert "the base image's Python is Python 3.11" in said


def test_a_floating_base_is_refused(project: Tiny, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = refused(project, "debian:bookworm-slim", capfd)
    assert code == 25
    assert "names no image by its digest" in said


def test_a_base_that_is_not_there(
    project: Tiny, running: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = refused(project, f"{running.registry}/library/none@sha256:{'1' * 64}", capfd)
    assert code == 26
    assert "the base image can't be had" in said
    assert "--base" in said


def test_no_engine(
    project: Tiny, base: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{project.root}/none.sock")
    code, said = refused(project, base, capfd)
    assert code == 26
    assert "no Docker engine that answers" in said
    assert "systemctl start docker" in said


def test_no_space_for_the_layout(
    project: Tiny, base: str, capfd: pytest.CaptureFixture[str]
) -> None:
    small = project.root / "out"
    small.mkdir()
    mounted = subprocess.run(
        ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(small)), check=False
    )
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        code, said = refused(project, base, capfd)
        assert code == 26
        assert "GB are free" in said
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("overlay.verbs.image._ROOM", {"small": 0})
            code, said = refused(project, base, capfd)
        assert code == 26
        assert "is full" in said
    finally:
        subprocess.run(("umount", "--lazy", str(small)), check=True)


def test_an_export_that_is_interrupted_leaves_what_was_there(
    project: Tiny, base: str, running: Engine
) -> None:
    out = project.root / "out" / "tiny"
    assert build(out, base, patches=project.patches, line="tiny") == 0
    before = read_layout(out).digest
    argv = (
        sys.executable, str(ROOT / "build.py"), "--patches", str(project.patches), "image", "tiny",
        "--contents", "small", "--base", base, "--no-cache", "--out", str(out),
    )  # fmt: skip
    process = subprocess.Popen(argv, env={**os.environ}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "upstream" in line and "RUN" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=90)[1]
    assert process.returncode == 130, said
    assert "interrupted" in said
    assert read_layout(out).digest == before
    assert {path.name for path in out.parent.iterdir()} == {"tiny", "tiny.json", ".tiny.lock"}
    assert running.docker("ps", "--all", "--quiet") == ""


ONE_LINE = """\
diff --git a/vllm/attention_marker.py b/vllm/attention_marker.py
new file mode 100644
index 0000000000000000000000000000000000000000..0cfbf08886fca9a91cb753ec8734c84fcbe52c9f
--- /dev/null
+++ b/vllm/attention_marker.py
@@ -0,0 +1 @@
+2
"""
