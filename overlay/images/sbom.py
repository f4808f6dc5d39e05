"""The list of what an image holds: CycloneDX, made by syft from the layers themselves."""

from __future__ import annotations

import json
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from overlay.errors import MachineError, PublishError
from overlay.images.tools import HAD_FROM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.images.tools import Tools


def make_sbom(layout: Path, name: str, digest: str, created: str, tools: Tools) -> dict[str, Any]:
    """The CycloneDX document of the image in an OCI layout; the same content, the same document.

    Args:
        layout: folder with that one image.
        name: of the image, for people.
        digest: of its manifest.
        created: when the image was made, as its configuration says it; "" where it doesn't.
        tools: runs syft.
    """
    with tempfile.TemporaryDirectory(prefix="overlay-sbom-") as folder:
        # An empty configuration, and a folder without one: syft would read the user's
        Path(folder, "syft.yaml").write_text("{}\n")
        answer = tools.run(
            "syft", "scan", f"oci-dir:{layout.absolute()}", "--quiet", "--config", "syft.yaml",
            "--source-name", name, "--source-version", digest, "--output", "cyclonedx-json",
            cwd=Path(folder),
        )  # fmt: skip
    if answer.code:
        if "no space left" in answer.said:
            raise MachineError(
                f"syft has no room to unpack {layout}", why=answer.said,
                fix="free some, or set TMPDIR to a folder on another disk",
            )  # fmt: skip
        raise PublishError(f"syft can't read {layout}", why=answer.said, fix=HAD_FROM["syft"])
    try:
        document = json.loads(answer.out)
        return _settled(document, digest, created)
    except (ValueError, KeyError, TypeError) as error:
        raise PublishError(
            f"syft wrote no CycloneDX document for {layout}", why=str(error), fix=HAD_FROM["syft"]
        ) from None


def packages(sbom: Mapping[str, Any]) -> dict[str, str]:
    """Version of each package of a CycloneDX document, by ``pypi/vllm`` and the like.

    A package that is there in several versions has them all, with commas.
    """
    found: dict[str, set[str]] = {}
    for component in sbom.get("components") or ():
        purl = str(component.get("purl") or "")
        if not purl.startswith("pkg:"):
            continue
        kind, _, rest = purl.removeprefix("pkg:").partition("/")
        name = unquote(rest.partition("?")[0].rpartition("@")[0].rpartition("/")[2])
        if kind == "pypi":
            name = canonicalize_name(name)
        found.setdefault(f"{kind}/{name}", set()).add(str(component.get("version") or ""))
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}


def _settled(document: dict[str, Any], digest: str, created: str) -> dict[str, Any]:
    """Without what differs from run to run: its number and its time."""
    metadata = {key: value for key, value in document["metadata"].items() if key != "timestamp"}
    if created:
        metadata["timestamp"] = created
    number = uuid.uuid5(uuid.NAMESPACE_URL, f"https://cyclonedx.org/bom/{digest}")
    return {**document, "serialNumber": f"urn:uuid:{number}", "metadata": metadata}
