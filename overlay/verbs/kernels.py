"""The verb ``kernels``: a line's SM120 module, compiled, looked into, and put into a wheel."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from overlay.app import App, reaches_sources, verb
from overlay.errors import KernelError

if TYPE_CHECKING:
    from overlay.kernels.compile import Compiled
    from overlay.kernels.resources import Kernel
    from overlay.kernels.toolchain import Toolchain


@verb(
    short="Compile LINE's SM120 kernels, without a GPU",
    examples="""
    vllm-overlay kernels infernal
    vllm-overlay kernels infernal --no-bare --jobs 1
    vllm-overlay kernels infernal --json
    """,
)
@click.argument("line")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for the wheel (default: dist/LINE/kernels beside the patches folder).",
)
@click.option(
    "--jobs", "-j", type=click.IntRange(1, 256), default=len(os.sched_getaffinity(0)),
    show_default=True, help="Files compiled at a time; each may take half a gigabyte.",
)  # fmt: skip
@click.option("--bare/--no-bare", default=True, help="Compare with the bare pin (the default).")
@click.option("--all", "every", is_flag=True, help="Show every kernel, not those that differ.")
@click.option("--cache/--no-cache", default=True, help="Keep objects by content, with ccache.")
@reaches_sources
def kernels(
    app: App, line: str, out: Path | None, jobs: int, bare: bool, every: bool, cache: bool
) -> None:
    """Compile the sparse-MLA module of LINE's patched FlashInfer for sm_120a.

    CUDA's compiler comes from wheels: 'nox -s kernels -- LINE' installs them. The wheel that is
    written holds the module where FlashInfer finds it, so that nothing is compiled at the first
    request; it is refused beside any other FlashInfer. The table has the kernels that the patches
    change; --all and --json have every one.
    """
    from overlay.kernels.aot import write_wheel
    from overlay.kernels.compile import ARCH, compile_module
    from overlay.kernels.toolchain import find_toolchain
    from overlay.lines.lock import check_lock, read_lock
    from overlay.lines.record import make_record
    from overlay.trees.apply import refuse_bad
    from overlay.trees.pipeline import apply_line

    read = app.line(line)
    if ARCH not in read.settings.architectures:
        raise KernelError(
            f"line {line} doesn't serve {ARCH}",
            why=f"line.toml has architectures {', '.join(read.settings.architectures)}",
        )
    tools = find_toolchain(read.settings.cuda, cached=cache)
    patched = apply_line(read, app.sources)
    for upstream, one in patched.items():
        refuse_bad(one.tree, line, upstream)
    digest = check_lock(read, patched, read_lock(read)).digest
    state = patched["flashinfer"]
    trees = {"patched": state.tree.tree} | ({"bare": state.tree.base.tree} if bare else {})
    made: dict[str, Compiled] = {}
    for name, tree in trees.items():
        with app.report.progress(f"compile {name} FlashInfer {read.settings.flashinfer.version}"):
            made[name] = compile_module(state.store, tree, tools, app.cache, jobs=jobs)
    wheel = write_wheel(
        made["patched"],
        out or app.root.absolute().parent / "dist" / line / "kernels",
        public=read.settings.flashinfer.version,
        record=make_record(read, {u: one.tree for u, one in patched.items()}),
        versions=tools.versions,
    )
    if out is None:  # keep the default folder installable by *.whl
        for earlier in wheel.parent.glob(f"*+{line}.o*.whl"):
            if earlier != wheel:
                earlier.unlink()
    if app.report.as_json:
        app.report.json(
            {"verb": "kernels", "line": line, "digest": digest, **_document(made, tools, wheel)}
        )
        return
    app.report.table(
        ("kernel", *_FIELDS), [*_rows(made, every), *map(_totals, made, made.values())]
    )
    _tell(app, made, wheel)


def _document(made: dict[str, Compiled], tools: Toolchain, wheel: Path) -> dict[str, Any]:
    from overlay.kernels.compile import SM

    return {
        "architecture": SM,
        "versions": tools.versions,
        "states": {name: _state(one) for name, one in made.items()},
        "wheel": {"path": str(wheel), "sha256": _sha256(wheel.read_bytes())},
    }


def _rows(made: dict[str, Compiled], every: bool) -> list[tuple[str, ...]]:
    patched = made["patched"].kernels
    bare = made["bare"].kernels if "bare" in made else patched
    return [
        (name, _change(before, after), *(_cell(before, after, f) for f in _FIELDS.values()))
        for name in sorted(bare.keys() | patched.keys())
        for before, after in [(bare.get(name), patched.get(name))]
        if every or before != after
    ]


def _tell(app: App, made: dict[str, Compiled], wheel: Path) -> None:
    from overlay.kernels.compile import SM

    for name, one in made.items():
        cached = sum(of == "cached" for of in one.objects.values())
        app.report.say(
            f"{name}: {len(one.kernels)} kernels for {SM} in {one.seconds} s, {one.cpu_seconds} s "
            f"of CPU time, {one.peak_mib:.0f} MiB at most in one process; {cached} of "
            f"{len(one.objects)} objects cached"
        )
    app.report.say(f"wrote {wheel}")


_FIELDS = {
    "registers": "registers",
    "stack": "stack",
    "spill stores": "spill_stores",
    "spill loads": "spill_loads",
    "shared": "shared",
    "instructions": "instructions",
}


def _change(before: Kernel | None, after: Kernel | None) -> str:
    if before is None or after is None:
        return "dropped" if after is None else "added"
    return "" if before == after else "changed"


def _cell(before: Kernel | None, after: Kernel | None, field: str) -> str:
    values = [str(getattr(one, field)) for one in (before, after) if one is not None]
    return " -> ".join(dict.fromkeys(values))


def _totals(name: str, one: Compiled) -> tuple[str, ...]:
    """The greatest count of registers, and the sums of all else."""
    found = one.kernels.values()
    most = max(kernel.registers for kernel in found)
    sums = [sum(getattr(k, field) for k in found) for field in list(_FIELDS.values())[1:]]
    return (f"{name}, {len(found)} kernels", "", f"at most {most}", *map(str, sums))


def _state(one: Compiled) -> dict[str, Any]:
    return {
        "tree": one.tree,
        "inputs": one.inputs,
        "seconds": one.seconds,
        "cpu_seconds": one.cpu_seconds,
        "peak_mib": one.peak_mib,
        "objects": one.objects,
        "module": {"sha256": _sha256(one.module), "bytes": len(one.module)},
        "sources": one.sources,
        "kernels": msgspec.to_builtins(one.kernels),
    }


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
