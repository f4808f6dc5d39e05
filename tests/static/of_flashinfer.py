"""Postconditions of the patches to FlashInfer."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from packaging.version import Version

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
