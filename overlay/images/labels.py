"""An image's labels: made from a line and its lock by one function, read back by another.

OCI's standard annotations for people and registries; our own, below ``vllm-overlay.``, say all that
the image claims to be. Reading is strict: what is missing or malformed is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from overlay.errors import ImageError
from overlay.images.kernelkey import Ingredients, kernel_key
from overlay.images.requirements import torch_cuda
from overlay.images.toolkit import MINIMUM_DRIVER
from overlay.lines.line import UPSTREAMS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlay.images.requirements import Requirements
    from overlay.lines.line import Line, Upstream
    from overlay.lines.lock import Lock

NAMESPACE = "vllm-overlay."
FORMAT = "1"
# Labels that aren't plain text
_JSON = ("vllm", "flashinfer", "architectures", "packages", "needs", "is_dirty")

Contents = Literal["full", "small"]
_Hex64 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Version = Annotated[str, Meta(pattern=r"^[0-9][0-9A-Za-z.+!]*\Z")]
_Commit = Annotated[str, Meta(pattern=r"^[0-9a-f]{7,40}\Z")]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Claimed(_Table, frozen=True):
    """What an image claims of one upstream.

    Attributes:
        commit: full id, or as many digits of it as are known (``is_full`` tells).
        trees: id of the patched tree by kind of source.
        patches: names, in order.
    """

    version: _Version
    commit: _Commit
    trees: dict[str, str]
    patches: tuple[str, ...]

    @property
    def is_full(self) -> bool:
        """Whether ``commit`` is the whole id."""
        return len(self.commit) == 40


class Labels(_Table, frozen=True):
    """All that an image claims to be.

    Attributes:
        line, digest: the patched state.
        contents: ``full``, or ``small``: a test's image, without what vLLM and FlashInfer need.
        torch_cuda: CUDA that torch was built with.
        cuda: version of the toolkit that compiles at run time.
        driver: least major version of NVIDIA's driver.
        packages: version of each extra package.
        needs: requirements that were looked for when it was built.
        requirements: SHA-256 of the dependency lock.
        base: reference by digest of the base image.
        kernels: key of everything that can change a kernel.
        source: commit of the project that it was built from; ``is_dirty`` with other changes.
        created: time of that commit, RFC 3339.
    """

    line: str
    digest: _Hex64
    contents: Contents
    vllm: Claimed
    flashinfer: Claimed
    torch: _Version
    torch_cuda: _Version
    cuda: _Version
    architectures: tuple[str, ...]
    python: str
    driver: str
    packages: dict[str, str]
    needs: tuple[str, ...]
    requirements: _Hex64
    base: str
    kernels: str
    source: str
    is_dirty: bool
    created: str

    def upstream(self, upstream: Upstream) -> Claimed:
        """What is claimed of one upstream."""
        return self.vllm if upstream == "vllm" else self.flashinfer


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """The project's state that an image is built from; ``commit`` is "" outside of git."""

    commit: str
    is_dirty: bool
    created: str


def make_labels(
    line: Line,
    lock: Lock,
    requirements: Requirements,
    toolkit: Requirements,
    *,
    contents: Contents,
    base: str,
    source: Source,
) -> Labels:
    """What the image of a line claims.

    Args:
        line: with an image.
        lock: what its patches give.
        requirements: its dependency lock.
        toolkit: the lock of its CUDA toolkit.
        contents: whether dependencies are in it.
        base: reference by digest of the base image.
        source: state of the project.
    """
    settings = line.settings
    assert settings.image is not None  # noqa: S101 - callers look first
    ingredients = Ingredients(
        digest=lock.digest,
        requirements=requirements.sha256,
        torch=settings.torch,
        torch_cuda=torch_cuda(requirements),
        cuda=tuple((one.name, one.version) for one in toolkit.wheels.values()),
        architectures=settings.architectures,
        python=settings.image.python,
        base=base.rpartition("@")[2],
    )
    claimed = {
        upstream: Claimed(
            version=line.pin(upstream).version,
            commit=line.pin(upstream).commit_text,
            trees={kind: tree.patched for kind, tree in lock.upstream(upstream).trees.items()},
            patches=tuple(patch.name for patch in lock.upstream(upstream).patches),
        )
        for upstream in UPSTREAMS
    }
    return Labels(
        line=line.name,
        digest=lock.digest,
        contents=contents,
        vllm=claimed["vllm"],
        flashinfer=claimed["flashinfer"],
        torch=settings.torch,
        torch_cuda=ingredients.torch_cuda,
        cuda=settings.cuda,
        architectures=settings.architectures,
        python=settings.image.python,
        driver=MINIMUM_DRIVER,
        packages={name: one.version for name, one in sorted(settings.image.packages.items())},
        needs=settings.image.needs,
        requirements=requirements.sha256,
        base=base,
        kernels=kernel_key(ingredients),
        source=source.commit,
        is_dirty=source.is_dirty,
        created=source.created,
    )


def write_labels(labels: Labels) -> dict[str, str]:
    """The labels as an image carries them, standard annotations first."""
    vllm, flashinfer = labels.vllm, labels.flashinfer
    name, _, digest = labels.base.partition("@")
    standard = {
        "title": f"vLLM {vllm.version}, line {labels.line}",
        "description": f"vLLM {vllm.version} with {len(vllm.patches)} patches and FlashInfer "
        f"{flashinfer.version} with {len(flashinfer.patches)}; torch {labels.torch} built with "
        f"CUDA {labels.torch_cuda}, CUDA {labels.cuda} to compile with",
        "version": f"{vllm.version}+{labels.line}.o{labels.digest[:8]}",
        "revision": labels.source,
        "created": labels.created,
        "base.name": name,
        "base.digest": digest,
    }
    own: dict[str, Any] = msgspec.to_builtins(labels)
    found = {f"org.opencontainers.image.{key}": text for key, text in standard.items()}
    found[f"{NAMESPACE}format"] = FORMAT
    for key, value in own.items():
        found[NAMESPACE + key] = _json(value) if key in _JSON else value
    return {key: text for key, text in found.items() if text}


def read_labels(found: Mapping[str, str]) -> Labels:
    """What labels claim.

    Raises:
        ImageError: none of ours, of another format, incomplete, or malformed.
    """
    own = {
        key.removeprefix(NAMESPACE): text
        for key, text in found.items()
        if key.startswith(NAMESPACE)
    }
    if own.pop("format", "") != FORMAT:
        raise ImageError(
            "the image has no labels of ours",
            why=f"no label {NAMESPACE}format with the value {FORMAT}",
            fix="name an image that 'vllm-overlay image' built, with this version of it",
        )
    try:
        table = {key: json.loads(text) if key in _JSON else text for key, text in own.items()}
        return msgspec.convert({"source": "", "created": "", **table}, Labels)
    except (ValueError, RecursionError) as error:
        raise ImageError(
            "the image's labels can't be read", why=str(error), fix="build the image anew"
        ) from None


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
