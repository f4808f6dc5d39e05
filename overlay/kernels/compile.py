"""A FlashInfer tree to its SM120 sparse-MLA module, compiled for one architecture. No GPU.

Sources and flags are what the tree's own generator says (``overlay.kernels.generator``). All paths
are then made relative to one folder, so that neither objects nor cache know where it lies; three
more flags take what is left of chance out of an object, and change no instruction of it:

- ``-objtemp``: intermediate files, whose names reach the symbol table, lie beside the object and
  not under a random name.
- ``--orig_src_path_name``: internal names carry a hash of the source's absolute path, else.
- ``-Xptxas=-v`` says what each kernel takes.

Objects are cached by ccache in its depend mode: the key is the content of every file that went
in. Its preprocessor mode would ask nvcc for the host's view, in which device code may be missing.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from overlay.errors import KernelError
from overlay.files import locked, machine_errors
from overlay.kernels.resources import Kernel, read_kernels
from overlay.kernels.toolchain import PASSES
from overlay.lines.record import canonical, digest
from overlay.trees.objects import blob_id
from overlay.wheels.layout import Shipped, wheel_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlay.kernels.toolchain import Toolchain
    from overlay.trees.store import Store

MODULE = "sparse_mla_sm120"
ARCH = "12.0a"
SM = "sm_120a"
# Another process may be compiling the same tree: as long as a slow machine takes
_WAIT = 3 * 3600.0
_NINJA_FILE, _OUT, _CUDA, _TVM, _PYTHON = "build.ninja", "out", "cuda", "tvm_ffi", "python"
_GENERATOR = Path(__file__).with_name("generator.py")
_LAUNCHER = "nvcc_launcher = \n"
_FLAGS = f"-Xptxas=-v -objtemp -Xcudafe=--orig_src_path_name={MODULE}"
# Variables by which compilers and FlashInfer are told what the recipe here doesn't say
_LOOSE = re.compile(
    r"(FLASHINFER|NVCC|CUDA|CUDAHOSTCXX|TORCH|DEPENDENCIES|SUNPRO|GCC|COMPILER|NINJA)(_|\Z)"
    r"|(CC|CXX|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|LIBRARY_PATH|LD_LIBRARY_PATH|MAX_JOBS)\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A module and what making it took.

    Attributes:
        tree: of FlashInfer, as git names it.
        module: the shared object's bytes.
        kernels: by readable name.
        sources: SHA-256 of each file of FlashInfer that went in, by its path as installed.
        inputs: hash over all that went in: those files, CUDA's and apache-tvm-ffi's headers,
            versions, and the ninja file with its flags.
        seconds, cpu_seconds: of the compile; ``peak_mib`` is of the largest of its processes.
        objects: of each source, ``cached`` or ``compiled``.
    """

    tree: str
    module: bytes
    kernels: dict[str, Kernel]
    sources: dict[str, str]
    inputs: str
    seconds: float
    cpu_seconds: float
    peak_mib: float
    objects: dict[str, str]


def compile_module(
    store: Store, tree: str, tools: Toolchain, cache: Path, *, jobs: int
) -> Compiled:
    """Compile the module of a tree of the store.

    One process at a time compiles a tree; another waits, and then finds its objects cached. One
    that was killed leaves its objects there too, and a folder that the next run clears.

    Args:
        store: FlashInfer's.
        tree: id of the tree.
        tools: what to compile with.
        cache: of the tool; scratch and ccache's folder lie in it.
        jobs: files compiled at a time, half a gigabyte each.

    Raises ``KernelError`` where the generator or a compiler fails.
    """
    folder = cache / "kernels"
    with locked(folder / f"{tree}.lock", timeout=_WAIT), machine_errors(folder):
        root = folder / tree
        shutil.rmtree(root, ignore_errors=True)
        try:
            root.mkdir()
            lay_out(store, tree, root)
            tools.prefix(root / _CUDA)
            (root / _TVM).symlink_to(tools.tvm_ffi)
            (root / _PYTHON).symlink_to(sysconfig.get_path("include"))
            return _compile(root, tree, _generate(root), tools, folder / "ccache", jobs)
        finally:
            shutil.rmtree(root, ignore_errors=True)


def lay_out(store: Store, tree: str, root: Path) -> None:
    """Write those files of a tree that decide or make the module, where a wheel has them.

    Each is checked against its id in the tree.
    """
    listed = store.git.run("ls-tree", "-r", "-z", "--full-tree", tree).split(b"\0")[:-1]
    for entry in listed:
        head, _, raw = entry.partition(b"\t")
        mode, _, oid = head.decode().split()
        ship = wheel_path("flashinfer", os.fsdecode(raw), ())
        if not isinstance(ship, Shipped) or not _wanted(ship.name):
            continue
        found = store.reader.get(oid)
        if not mode.startswith("100") or found is None or blob_id(found[2]) != oid:
            raise KernelError(
                f"{os.fsdecode(raw)} isn't what tree {tree} says",
                why="it is no regular file, or its content is missing or damaged",
                fix=f"delete {store.folder}, and fetch the line anew",
            )
        path = root / ship.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found[2])


def _wanted(name: str) -> bool:
    """Sources and headers, and the code that generates; not what else the package does."""
    parts = name.split("/")
    return parts[1] in ("data", "jit") or (len(parts) == 2 and name.endswith(".py"))


def _generate(root: Path) -> str:
    """The ninja file that the tree's own generator writes, with relative paths."""
    env = _sealed() | {
        "FLASHINFER_WORKSPACE_BASE": str(root),
        "FLASHINFER_CUDA_ARCH_LIST": ARCH,
        "FLASHINFER_EXTRA_CUDAFLAGS": _FLAGS,
        "CUDA_HOME": str(root / _CUDA),
    }
    argv = (sys.executable, "-I", "-B", str(_GENERATOR), str(root))
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    path = Path(done.stdout.strip() or "nothing")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if done.returncode or text.count(_LAUNCHER) != 1:
        raise KernelError(
            "this FlashInfer's own generator doesn't say how its module is compiled",
            why=done.stderr.strip()[-2000:] or text[:2000],
            fix="see overlay/kernels/generator.py, which runs it",
        )
    for long, short in (
        (f"{path.parent.resolve()}/", f"{_OUT}/"),
        (f"{root.resolve()}/", ""),
        (f"{root}/", ""),
        (str((root / _TVM).readlink()), _TVM),
        (str((root / _PYTHON).readlink()), _PYTHON),
    ):
        text = text.replace(long, short)
    return text


def _compile(
    root: Path, tree: str, ninja: str, tools: Toolchain, ccache: Path, jobs: int
) -> Compiled:
    (root / _OUT).mkdir()
    launched = ninja.replace(_LAUNCHER, f"{_LAUNCHER[:-1]}{tools.ccache or ''}\n")
    (root / _NINJA_FILE).write_text(launched, encoding="utf-8")
    stats = root / "ccache.stats"
    env = _sealed() | {
        "CCACHE_DIR": os.environ.get("CCACHE_DIR", str(ccache)),
        "CCACHE_DEPEND": "1",
        "CCACHE_NOHASHDIR": "1",  # no object says where it was made
        "CCACHE_COMPILERCHECK": "content",
        "CCACHE_EXTRAFILES": os.pathsep.join(f"{_CUDA}/{name}" for name in PASSES),
        "CCACHE_SLOPPINESS": "",
        "CCACHE_STATSLOG": str(stats),
    }
    argv = (str(tools.ninja), "-v", "-j", str(jobs), "-f", _NINJA_FILE)
    started = time.monotonic()
    log, cpu, peak = _run(argv, root, env)
    seconds = time.monotonic() - started
    module = root / _OUT / f"{MODULE}.so"
    sources, inputs = _inputs(root, tools, ninja)
    return Compiled(
        tree=tree,
        module=module.read_bytes(),
        kernels=read_kernels(log, module, root / _CUDA / "bin" / "cuobjdump", SM),
        sources=sources,
        inputs=inputs,
        seconds=round(seconds, 1),
        cpu_seconds=round(cpu, 1),
        peak_mib=round(peak / 1024, 1),
        objects=_objects(ninja, stats),
    )


def _run(argv: Sequence[str], root: Path, env: Mapping[str, str]) -> tuple[str, float, int]:
    """What a command said, its CPU seconds, and the KiB of the largest of its processes."""
    path = root / "log"
    with path.open("wb") as log:
        process = subprocess.Popen(argv, cwd=root, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(process.pid, 0)  # the whole family's, unlike Popen's wait
        except BaseException:
            process.terminate()  # ninja ends its own
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
    said = path.read_text(encoding="utf-8", errors="replace")
    if process.returncode:
        raise KernelError(
            f"compiling {MODULE} failed",
            why=_complaint(said),
            fix="if it is a patch, 'bisect' finds which; if memory ran out, try --jobs 1",
        )
    return said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss


def _complaint(said: str) -> str:
    lines = [line for line in said.splitlines() if not line.startswith(("ptxas info", "    "))]
    at = next((i for i, line in enumerate(lines) if re.search(r"error|FAILED", line)), -20)
    return "\n".join(line[:300] for line in lines[at:][:20])


def _inputs(root: Path, tools: Toolchain, ninja: str) -> tuple[dict[str, str], str]:
    """Hashes of FlashInfer's files that went in, and one over all that went in."""
    argv = (str(tools.ninja), "-f", _NINJA_FILE, "-t", "deps")
    listed = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = {
        posixpath.normpath(line.strip()) for line in listed.splitlines() if line.startswith("    ")
    }
    # what is absolute belongs to the host's compiler, which its version stands for
    hashes = {
        path: hashlib.sha256((root / path).read_bytes()).hexdigest()
        for path in sorted(paths)
        if not path.startswith("/")
    }
    sources = {path: of for path, of in hashes.items() if path.startswith("flashinfer/")}
    if not sources:
        raise KernelError("ninja doesn't say which files went into the module")
    versions = {name: of for name, of in tools.versions.items() if name not in ("ninja", "ccache")}
    return sources, digest(canonical({"files": hashes, "ninja": ninja, "versions": versions}))


def _objects(ninja: str, stats: Path) -> dict[str, str]:
    """Of each source, whether its object came out of the cache."""
    found = re.findall(r"^build \S+: (?:cuda_)?compile (\S+)$", ninja, re.M)
    text = stats.read_text(encoding="utf-8") if stats.exists() else ""
    hit = {
        block.partition("\n")[0].strip()
        for block in text.split("# ")
        if "direct_cache_hit" in block
    }
    return {
        path.removeprefix("flashinfer/data/"): "cached" if path in hit else "compiled"
        for path in found
    }


def _sealed() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not _LOOSE.match(name)}
