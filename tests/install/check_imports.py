"""Run by the Python of an environment that has both wheels: is what it imports what was recorded?

The standard library and what vLLM brings along are all that it needs. Files first, by their git
blob ids; then ``import flashinfer, vllm`` and every patched module; then whether each installed
distribution has what it requires. Prints one JSON object; the exit code is 1 where a file or an
import is wrong (unmet requirements are reported only: who installed knows which are left out).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# No CUDA device, and Triton interpreted, so that the answer is the same on every machine; nothing
# asked of a network.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")

PROJECTS = {"vllm": "vllm", "flashinfer": "flashinfer-python"}
DELETED = "000000"


def main() -> int:
    found: dict[str, Any] = {"dists": {}, "files": {}, "wrong": {}, "not_shipped": []}
    for upstream, project in PROJECTS.items():
        dist = importlib.metadata.distribution(project)
        text = dist.read_text("overlay.json")
        if text is None:
            found["wrong"][project] = "carries no provenance record"
            continue
        found["dists"][project] = dist.version
        check_files(upstream, Path(str(dist.locate_file(""))), json.loads(text), found)
    if not found["wrong"]:
        import_modules(found)
        found["unmet"] = unmet_requirements()
        found["shared"] = shared_files()
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    return 1 if found["wrong"] else 0


def check_files(upstream: str, root: Path, record: dict[str, Any], found: dict[str, Any]) -> None:
    """Compare the files that the last patch on each path leaves with what is installed."""
    last = {e["path"]: e["blob"] for p in record["series"][upstream] for e in p["effect"]}
    deleted = {
        e["path"] for p in record["series"][upstream] for e in p["effect"] if e["mode"] == DELETED
    }
    for path, blob in last.items():
        name = installed_name(upstream, path)
        if name is None:
            found["not_shipped"].append(path)
            continue
        file = root / name
        there = blob_id(file.read_bytes()) if file.is_file() else None
        if there == (None if path in deleted and set(blob) == {"0"} else blob):
            found["files"][name] = blob
        else:
            found["wrong"][name] = f"blob {there}, recorded is {blob}"


def installed_name(upstream: str, path: str) -> str | None:
    """Where an upstream's path lies below site-packages; None where it isn't part of a wheel."""
    if path.startswith(f"{upstream}/"):
        return path
    if upstream == "flashinfer" and path.startswith(("csrc/", "include/")):
        return f"flashinfer/data/{path}"
    if upstream == "flashinfer" and path.startswith("3rdparty/"):
        return path.replace("3rdparty/", "flashinfer/data/", 1)
    return None


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def import_modules(found: dict[str, Any]) -> None:
    """Import both packages and the patched modules; each must come from the file checked."""
    modules = {name: PROJECTS[name] for name in ("flashinfer", "vllm")}
    wanted = {f"{name}/__init__.py" for name in modules}
    wanted |= {name for name in found["files"] if name.endswith(".py")}
    found["modules"] = {}
    for name in sorted(wanted, key=lambda name: (name.count("/"), name)):
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        began = time.monotonic()
        try:
            origin = importlib.import_module(module).__file__
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found["wrong"][module] = (
                f"import: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
            )
            continue
        top = module.partition(".")[0]
        root = importlib.metadata.distribution(PROJECTS[top]).locate_file("")
        if origin != str(Path(str(root), name)):
            found["wrong"][module] = f"imported from {origin}"
        found["modules"][module] = round(time.monotonic() - began, 2)
    check_versions(found)


def check_versions(found: dict[str, Any]) -> None:
    """Both packages must call themselves what their metadata says; torch is only told."""
    for name, project in PROJECTS.items():
        stated = getattr(sys.modules.get(name), "__version__", None)
        if stated != found["dists"][project]:
            found["wrong"][f"{name}.__version__"] = f"{stated}, not {found['dists'][project]}"
    torch = sys.modules.get("torch")
    found["torch"] = getattr(torch, "__version__", None)
    found["python"] = sys.version.partition(" ")[0]
    if "flashinfer" in found["modules"]:
        # what FlashInfer compiles on demand must be the files that were checked
        env = importlib.import_module("flashinfer.jit.env")
        data = Path(str(importlib.metadata.distribution(PROJECTS["flashinfer"]).locate_file("")))
        if Path(env.FLASHINFER_CSRC_DIR) != data / "flashinfer/data/csrc":
            found["wrong"]["flashinfer.jit"] = f"compiles {env.FLASHINFER_CSRC_DIR}"


def unmet_requirements() -> list[list[str]]:
    """Every ``[distribution, requirement, version found or ""]`` that isn't met, extras aside."""
    from packaging.requirements import Requirement

    unmet = []
    for dist in importlib.metadata.distributions():
        for text in dist.requires or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(wanted.name)
            except importlib.metadata.PackageNotFoundError:
                version = ""
            if not version or not wanted.specifier.contains(version, prereleases=True):
                unmet.append([dist.metadata["Name"], text, version])
    return sorted(unmet)


def shared_files() -> dict[str, list[str]]:
    """Files of ours that other distributions claim as well: whoever came last wrote them."""
    owners: dict[str, set[str]] = {}
    for dist in importlib.metadata.distributions():
        for file in dist.files or ():
            owners.setdefault(file.as_posix(), set()).add(dist.metadata["Name"])
    ours = set(PROJECTS.values())
    return {
        path: sorted(names)
        for path, names in sorted(owners.items())
        if len(names) > 1 and names & ours and "__pycache__" not in path
    }


if __name__ == "__main__":
    sys.exit(main())
