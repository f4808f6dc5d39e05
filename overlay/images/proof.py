"""Proves that what an image has installed is what its labels claim.

The same checks run while the image is built, on disk, and at any time later, on its layers. As a
program (``python -m overlay.images.proof CLAIMS PREFIX``) it needs the standard library and the
package packaging alone; nothing of the image is imported or run.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.metadata import parse_email
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from overlay.errors import ImageError, WheelError
from overlay.images.site import Distribution, SiteFiles, read_disk_site, rows_of
from overlay.lines.upstreams import PROJECTS, UPSTREAMS
from overlay.wheels.distinfo import RECORD_MEMBER, unpadded
from overlay.wheels.inspect import Problem, inspect_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from overlay.images.site import Site
    from overlay.lines.upstreams import Upstream
    from overlay.wheels.distinfo import Row
    from overlay.wheels.inspect import Inspection

PREFIX_OF_PROBLEMS = "proof: "
_NAMES: dict[Upstream, str] = {"vllm": "vLLM", "flashinfer": "FlashInfer"}
_KERNELS, _CUBINS = "flashinfer-jit-cache", "flashinfer-cubin"
# Upstream's FlashInfer and others install this build script, which nothing imports; the last wins
_NOBODYS = {"build_backend.py"}
# The RECORD of this wheel is wrong about two of its own files.
# What the pinned wheel (2.0.4) holds, by SHA-256
_MISSTATED = {
    "PyNvVideoCodec/PyNvVideoCodec_121.cpython-311-x86_64-linux-gnu.so":
        "0cf717968e62167fc7ea57e9d90b0d2e69233a941930fab69607ae6646fdf851",
    "PyNvVideoCodec/PyNvVideoCodec_130.cpython-311-x86_64-linux-gnu.so":
        "a9ffef1a47ebe449375c7bef523c27eda9532c00868714672bc6d683940eff95",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What of an image's labels can be held against its content.

    Attributes:
        versions: of both upstreams, public part.
        commits: of both, as far as they are known.
        patches: names by upstream, in order.
    """

    line: str
    digest: str
    contents: str
    versions: Mapping[str, str]
    commits: Mapping[str, str]
    patches: Mapping[str, Sequence[str]]
    torch: str
    torch_cuda: str
    packages: Mapping[str, str]
    needs: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found.

    Attributes:
        files: that were held against a hash.
        effects: patched paths whose content was held against the record.
        distributions: version by name.
        upstreams: of vLLM and FlashInfer what their own records say, and the rows of RECORD.
    """

    files: int
    effects: int
    distributions: Mapping[str, str]
    upstreams: tuple[tuple[Inspection, Mapping[str, Row]], ...]
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]

    def error(self, label: str) -> ImageError | None:
        """The problems as one error, or None where there are none."""
        if not self.problems:
            return None
        shown = [problem.what for problem in self.problems[:20]]
        more = len(self.problems) - len(shown)
        return ImageError(
            f"{label} isn't what it claims to be",
            why="\n".join(shown + ([f"and {more} more"] if more else [])),
            fix="find out which step of the build, or who, changed it; don't run it",
        )


def prove(site: Site, claims: Claims, *, more: Iterable[Problem] = ()) -> Proof:
    """Hold an image's packages against its labels. All problems are found, not only the first.

    Args:
        site: what is installed.
        claims: what the labels say.
        more: problems that are known already.
    """
    check = _Check(site, claims)
    check.problems += more
    check.run()
    return Proof(
        files=check.hashed,
        effects=check.effects,
        distributions={one.name: one.version for one in check.found},
        upstreams=tuple(check.inspected),
        problems=tuple(check.problems),
        notes=tuple(check.notes),
    )


class _Check:
    def __init__(self, site: Site, claims: Claims) -> None:
        self.site, self.claims = site, claims
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.found: list[Distribution] = []
        self.inspected: list[tuple[Inspection, Mapping[str, Row]]] = []
        self.hashed = self.effects = 0

    def say(self, kind: str, path: str, what: str) -> None:
        self.problems.append(Problem(kind, path, what))

    def run(self) -> None:
        self._find()
        shared = self._claimed_twice()
        for upstream in UPSTREAMS:
            self._upstream(upstream)
        for one in self.found:
            if one.name not in PROJECTS.values():
                self._content(one, shared)
        self._unlisted()
        self._kernels()
        self._torch()
        self._needs()

    def one(self, name: str) -> Distribution | None:
        return next((one for one in self.found if one.name == name), None)

    # --- what is installed -------------------------------------------------------------------

    def _find(self) -> None:
        for info in self.site.infos():
            try:
                raw, _ = parse_email(self.site.texts[f"{info}/METADATA"])
                name, version = canonicalize_name(raw["name"]), raw["version"]
                rows = rows_of(self.site, info)
            except (KeyError, WheelError) as error:
                self.say("metadata", info, f"{info} can't be read: {error}")
                continue
            self.found.append(Distribution(name=name, version=version, info=info, rows=rows))
        for project, count in Counter(one.name for one in self.found).items():
            if count > 1:
                versions = " and ".join(one.version for one in self.found if one.name == project)
                self.say("twice", "", f"{project} is installed {count} times: {versions}")

    def _claimed_twice(self) -> set[str]:
        """Paths that several wheels bring. Where they differ, the last one to come has won."""
        claims: dict[str, list[tuple[Distribution, str]]] = defaultdict(list)
        for one in self.found:
            for path, row in one.rows.items():
                claims[path].append((one, row.hash))
        shared = {path: all_ for path, all_ in claims.items() if len(all_) > 1}
        for path, all_ in shared.items():
            names = " and ".join(f"{one.name} {one.version}" for one, _ in all_)
            if len({hash_ for _, hash_ in all_}) == 1:
                continue
            if path in _NOBODYS:
                self.notes.append(Problem("shared", path, f"{names} both install {path}"))
                continue
            self.say("claimed-twice", path, f"{names} both install {path}, with other content each")
        return set(shared)

    def _unlisted(self) -> None:
        listed = {path for one in self.found for path in one.rows}
        for path in self.site.files:
            if path in listed or path.startswith("../"):
                continue
            if path.endswith(".pyc"):
                what = "is compiled Python, which would be run in place of its source"
            else:
                what = "came from no wheel: no RECORD lists it"
            self.say("unlisted", path, f"{path} {what}")

    def _content(self, one: Distribution, shared: set[str]) -> None:
        for path, row in one.rows.items():
            if not row.hash or path in shared:
                continue
            seen = self.site.files.get(path)
            algorithm, _, value = row.hash.partition("=")
            if seen is None or seen.kind != "file":
                self.say("missing", path, f"{path} of {one.name} is missing")
            elif algorithm != "sha256":
                self.say("weak", path, f"the RECORD of {one.name} has a {algorithm} for {path}")
            elif unpadded(seen.sha256) != value and seen.sha256.hex() != _MISSTATED.get(path):
                self.say("content", path, f"{path} isn't what {one.name} {one.version} installed")
            self.hashed += 1

    # --- the two upstreams ---------------------------------------------------------------------

    def _upstream(self, upstream: Upstream) -> None:
        name, project = _NAMES[upstream], PROJECTS[upstream]
        one = self.one(project)
        if one is None:
            self.say("not-installed", "", f"{name} is not installed at all")
            return
        public = self.claims.versions[upstream]
        expected = f"{public}+{self.claims.line}.o{self.claims.digest[:8]}"
        if one.version == Version(one.version).public:
            self.say(
                "upstreams-build", "",
                f"{name} {one.version} is upstream's own build, without a patch: a resolver "
                f"preferred it to {expected}",
            )  # fmt: skip
            return
        if one.version != expected:
            self.say("other-state", "", f"{name} is {one.version}; the labels say {expected}")
        files = SiteFiles(self.site, one.rows)
        found = inspect_files(Path(project), one.name, one.version, one.info, files)
        self.inspected.append((replace(found, problems=()), one.rows))
        self.hashed += found.files
        self.effects += found.effects
        nobodys = [p for p in found.problems if p.path in _NOBODYS and p.kind == "content"]
        self.problems += [p for p in found.problems if p not in nobodys]
        self.notes += nobodys
        if found.record is not None:
            self._record(upstream, found.record)

    def _record(self, upstream: Upstream, record: Mapping[str, Any]) -> None:
        """The record inside the wheel against the labels; its digest is in the version."""
        name = _NAMES[upstream]
        patches = [patch["name"] for patch in record["series"][upstream]]
        if patches != list(self.claims.patches[upstream]):
            said = ", ".join(self.claims.patches[upstream]) or "none"
            has = ", ".join(patches) or "none"
            self.say("patches", "", f"{name} has the patches {has}; the labels say {said}")
        pin = record.get("pins", {}).get(upstream, {})
        if pin.get("commit") != self.claims.commits[upstream]:
            self.say(
                "commit", "",
                f"{name} stands on {pin.get('commit')}; the labels say "
                f"{self.claims.commits[upstream]}",
            )  # fmt: skip

    # --- what could be used in place of patched sources ----------------------------------------

    def _kernels(self) -> None:
        flashinfer = self.one(PROJECTS["flashinfer"])
        ours = flashinfer.version if flashinfer else ""
        aot, cubins = self.one(_KERNELS), self.one(_CUBINS)
        if aot is not None and aot.version != ours:
            self.say(
                "shadowed", "",
                f"{_KERNELS} {aot.version} holds kernels compiled ahead of time from other "
                f"sources than FlashInfer {ours}; they would be used in place of the patched ones",
            )  # fmt: skip
        elif aot is not None and flashinfer is not None and not self._same_record(aot, flashinfer):
            self.say(
                "shadowed", "",
                f"{_KERNELS} {aot.version} does not carry the record that FlashInfer {ours} does: "
                "nothing says that its kernels are those of the patched sources",
            )  # fmt: skip
        if cubins is not None and _public(cubins.version) != _public(ours):
            self.say(
                "shadowed", "",
                f"{_CUBINS} {cubins.version} holds binaries for another FlashInfer than {ours}",
            )  # fmt: skip

    def _same_record(self, one: Distribution, other: Distribution) -> bool:
        records = [self.site.texts.get(f"{d.info}/{RECORD_MEMBER}") for d in (one, other)]
        return records[0] is not None and records[0] == records[1]

    # --- torch, and what else has to be there ----------------------------------------------------

    def _torch(self) -> None:
        torch = self.one("torch")
        if self.claims.contents != "full":
            if torch is not None:
                self.say("torch", "", f"torch {torch.version} is in an image that claims none")
            return
        if torch is None:
            self.say("torch", "", "torch is not installed")
            return
        if torch.version != self.claims.torch:
            self.say(
                "torch", "",
                f"torch {torch.version} is installed; the line's is {self.claims.torch}: a "
                "resolver replaced it",
            )  # fmt: skip
        text = self.site.texts.get("torch/version.py", b"").decode("utf-8", "replace")
        cuda = re.search(r"^cuda[^=\n]*= '([0-9.]+)'", text, re.MULTILINE)
        expected = ".".join(self.claims.torch_cuda.split(".")[:2])
        if cuda is None or cuda[1] != expected:
            built = f"with CUDA {cuda[1]}" if cuda else "without CUDA"
            self.say(
                "torch", "torch/version.py", f"torch was built {built}; the labels say {expected}"
            )

    def _needs(self) -> None:
        if self.claims.contents != "full":
            return
        wanted = [f"{name}=={version}" for name, version in self.claims.packages.items()]
        for text in (*self.claims.needs, *wanted):
            requirement = Requirement(text)
            one = self.one(canonicalize_name(requirement.name))
            if one is None:
                self.say("needs", "", f"the line doesn't run without {text}, which is missing")
            elif not requirement.specifier.contains(one.version, prereleases=True):
                self.say("needs", "", f"the line needs {text}; {one.version} is installed")


def _public(version: str) -> str:
    try:
        return Version(version).public
    except InvalidVersion:
        return ""


def write_claims(claims: Claims) -> bytes:
    """Claims as a file that this program reads."""
    return (json.dumps(asdict(claims), indent=1, sort_keys=True) + "\n").encode()


def main(claims: str, prefix: str) -> int:
    """Prove an environment on disk; one line a problem on standard error, exit code 25."""
    read = Claims(**json.loads(Path(claims).read_bytes()))
    found = prove(read_disk_site(Path(prefix)), read)
    lines = [f"{PREFIX_OF_PROBLEMS}{problem.what}\n" for problem in found.problems]
    sys.stderr.write("".join(lines))
    sys.stdout.write(
        f"{found.files} files and {found.effects} effects of patches held against hashes, "
        f"{len(lines)} problems\n"
    )
    return ImageError.exit_code if lines else 0


def _run(arguments: Sequence[str]) -> Iterator[int]:
    try:
        yield main(*arguments)
    except ImageError as error:
        sys.stderr.write(f"{PREFIX_OF_PROBLEMS}{error.what}\n")
        yield error.exit_code


if __name__ == "__main__":
    sys.exit(next(_run(sys.argv[1:])))
