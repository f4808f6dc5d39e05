"""Postconditions of the patches to FlashInfer."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from overlay.kernels.capability import Answer, Phase, Shape, read_capability
from tests.static.postconditions import of
from tests.static.source import Missing, cpp_code, cpp_function, cut, neighbours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.static.trees import Pair

PREFILL, LAUNCHER = "csrc/sparse_mla_sm120_prefill.cu", "csrc/sparse_mla_sm120.cu"
_HEADERS = "include/flashinfer/attention/sparse_mla_sm120"
PREFILL_KERNEL, BARRIERS = f"{_HEADERS}/prefill_kernel.cuh", f"{_HEADERS}/arch/barrier.cuh"


@of("sparse-mla-prefill-page-size")
def prefill_refuses_other_than_64_row_pages(pair: Pair) -> None:
    code = cpp_code(pair.flashinfer.text(PREFILL))
    body = cpp_function(code, "sparse_mla_prefill_dispatch")
    guard = re.search(r"if \(page_block_size != (\w+)\) (?:\{ )?return false;", body)
    if guard is None:
        raise Missing("the dispatch never looks at page_block_size")
    assert re.search(rf"constexpr int {guard[1]} = 64;", code)
    assert guard.start() < body.index("dispatch_"), "something is dispatched before the check"


@of("sparse-mla-prefill-page-size")
def flat_addressing_refuses_pages_with_gaps(pair: Pair) -> None:
    body = cpp_function(cpp_code(pair.flashinfer.text(PREFILL)), "dispatch_v32")
    guard = re.search(r"if \(stride_kv_block != [^;]*KV_GMEM_STRIDE\) \{ return false; \}", body)
    assert guard, "the stride between pages is ignored"


@of("sparse-mla-prefill-page-size")
def the_refusal_names_what_is_supported(pair: Pair) -> None:
    code = cpp_code(pair.flashinfer.text(LAUNCHER))
    assert re.search(r"<< sparse_mla_prefill_supported_configs\(\)", code)
    words = re.search(
        r"sparse_mla_prefill_supported_configs\(\) \{(.*?)\}",
        re.sub(r"\s+", " ", pair.flashinfer.text(PREFILL)),
    )
    assert words
    for said in ("page_block_size 64", "8, 16, 32, 64 or 128", "topk 2048", "DSV4"):
        assert said in words[1], said


@of("sparse-mla-prefill-barrier")
def the_tile_handshake_alternates_between_two_barriers(pair: Pair) -> None:
    code = cpp_code(pair.flashinfer.text(PREFILL_KERNEL))
    assert not re.search(r"bar_(sync|arrive)_t<1, BLOCK_THREADS>", code), "one barrier is left"
    uses = re.findall(r"bar_(sync|arrive)_alt<(\d+), (\d+), BLOCK_THREADS>\(ti & 1\)", code)
    assert {kind for kind, _, _ in uses} == {"sync", "arrive"}
    ids = {(even, odd) for _, even, odd in uses}
    assert len(ids) == 1, "the two sides use other barriers"
    ((even, odd),) = ids
    assert even != odd
    # Neither is taken for something else
    assert not re.search(rf"bar_(sync|arrive)_t<({even}|{odd}),", code)


@of("sparse-mla-prefill-barrier")
def the_parity_of_a_tile_chooses_the_barrier(pair: Pair) -> None:
    code = cpp_code(pair.flashinfer.text(BARRIERS))
    for kind in ("arrive", "sync"):
        head = r"template <int ID_EVEN, int ID_ODD, int CNT> [\w ]+"
        assert re.search(rf"{head} bar_{kind}_alt\(int parity\)", code), kind
        body = cpp_function(code, f"bar_{kind}_alt")
        odd, even = (f"bar_{kind}_t<{one}, CNT>();" for one in ("ID_ODD", "ID_EVEN"))
        assert re.sub(r"[{}] ?", "", body).strip() == f"if (parity) {odd} else {even}", kind


def _has_kernels(pair: Pair, heads: int, topk: int, rows: int, extra: tuple[int, int]) -> None:
    """Whether the dispatch, evaluated, starts a kernel of DSV4 that is made for these sizes."""
    phase = Phase.DECODE if rows <= 64 else Phase.PREFILL
    told = read_capability(pair.flashinfer.tree).ask(
        Shape(
            phase=phase, model="dsv4", heads=heads, topk=topk, page=64, rows=rows,
            extra_topk=extra[0], extra_page=extra[1],
        )
    )  # fmt: skip
    assert told.answer is Answer.SUPPORTED, f"{heads} heads, {topk} ids, {rows} rows: {told.why}"


@of("sparse-mla-prefill-8-heads")
def prefill_of_dsv4_has_kernels_for_8_heads(pair: Pair) -> None:
    for topk in (128, 512, 1024, 2048):
        _has_kernels(pair, 8, topk, 96, (0, 0))
    for extra in ((512, 64), (500, 64), (2048, 2), (100, 2)):  # whole tiles, and others
        _has_kernels(pair, 8, 128, 96, extra)


@of("sparse-mla-prefill-8-heads")
def a_padded_row_reads_and_writes_nothing(pair: Pair) -> None:
    body = cpp_function(cpp_code(pair.flashinfer.text(PREFILL_KERNEL)), "prefill_mg_impl")
    assert re.search(r"VALID_HPB = \(?NUM_HEADS < HPB\)? \? NUM_HEADS : HPB;", body)
    loads = re.findall(r"(?:load_q_bf16|quantize_q)_to_smem<MT, MATH_THREADS>\((.*?)\);", body)
    assert len(loads) == 2
    assert all(given.endswith(", VALID_HPB") for given in loads), "rows without a head are read"
    sinks = (
        r"h1 = VALID_HPB == HPB \? h0 \+ 8 : h0;",
        r"if constexpr \(VALID_HPB > 8\) \{ float s1 = __ldg\(cold\.attn_sink \+ h0 \+ 8\)",
    )
    assert any(re.search(form, body) for form in sinks), "a sink is read that isn't there"
    assert "idx < VALID_HPB * STORES_PER_HEAD;" in body, "rows without a head are written"
    written = body.index("out_lse[")
    guard = body.rindex("if (threadIdx.x < ", 0, written)
    assert body[guard:].startswith("if (threadIdx.x < VALID_HPB) {"), "their LSE is written"


@of("sparse-mla-prefill-8-heads")
def eight_heads_take_one_tile(pair: Pair) -> None:
    kernel, launchers = (cpp_code(pair.flashinfer.text(p)) for p in (PREFILL_KERNEL, PREFILL))
    found = {cpp_function(kernel, "prefill_mg_impl")}
    found |= {cpp_function(launchers, f"launch_prefill_mg{end}") for end in ("", "_dual")}
    found.add(cpp_function(launchers, "launch_prefill_mg_dual_fulltile"))
    for body in found:
        tiles = re.search(r"REPLICATE_H = ([^;]+);", body)
        assert tiles
        if tiles[1] == "mg_head_tiles<NUM_HEADS, MG_N_HG_T>()":
            tiles = re.search(r"return ([^;]+);", cpp_function(kernel, "mg_head_tiles"))
            assert tiles
        for heads, groups, expected in ((8, 1, 1), (16, 1, 1), (32, 2, 1), (64, 2, 2), (128, 2, 4)):
            sizes = ("TILE", "MG_HEADS_PER_CTA", "MG_HEADS_PER_CTA_LOCAL")
            given = {"NUM_HEADS": heads, **dict.fromkeys(sizes, groups * 16)}
            assert eval(tiles[1].replace("/", "//"), given) == expected, heads  # noqa: S307


@of("sparse-mla-dsv4-256-ids")
def dsv4_has_kernels_for_256_ids(pair: Pair) -> None:
    for heads in (8, 16, 32, 64, 128):
        for rows in (6, 60, 96):
            _has_kernels(pair, heads, 256, rows, (0, 0))


@of("cubin-version")
def cubins_of_the_same_public_version_are_taken(pair: Pair) -> None:
    ours = "0.6.18rc10+infernal.o1234abcd"
    for installed, taken in (
        ("0.6.18rc10", True), ("0.6.18rc9", False), ("0.6.18", False), ("0.6.18rc10+cu130", False),
        (ours, True),
    ):  # fmt: skip
        assert _cubin_is_taken(pair, ours, installed) is taken, installed
    assert _cubin_is_taken(pair, "0.6.18rc10", "0.6.18rc10")
    assert not _cubin_is_taken(pair, "0.6.18rc10", "0.6.18rc10+other")


def _cubin_is_taken(pair: Pair, ours: str, installed: str) -> bool:
    """Whether FlashInfer of version ``ours`` accepts an installed flashinfer-cubin."""
    functions = neighbours(pair.flashinfer, "_get_cubin_dir")
    given = {
        "os": SimpleNamespace(getenv=lambda *_: None), "pathlib": SimpleNamespace(Path=str),
        "flashinfer_version": ours, "Version": Version, "has_flashinfer_cubin": lambda: True,
        "_VERSION_MISMATCH_HINT": "",
    }  # fmt: skip
    name = "_check_cubin_version" if "_check_cubin_version" in functions else "_get_cubin_dir"
    run: Callable[..., Any] = cut(functions[name], given)  # type: ignore[arg-type]
    try:
        with _installed("flashinfer_cubin", installed):
            run(*((installed,) if name == "_check_cubin_version" else ()))
    except RuntimeError:
        return False
    return True


@contextmanager
def _installed(name: str, version: str) -> Iterator[None]:
    """A fake of an installed package."""
    module = ModuleType(name)
    module.__version__ = version  # type: ignore[attr-defined]
    module.get_cubin_dir = lambda: "cubins"  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
