"""The FlashInfer that is installed ships the patched SM120 sources, and is as taken for.

Its kernels are compiled on the machine that serves, from these sources.
"""

import importlib.machinery
import inspect
import re
import sys
import types
from pathlib import Path

import launcher
import pins
import pytest
import reference
import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla
from flashinfer.jit import env
from flashinfer.mla import _core
from flashinfer.mla import _sparse_mla_sm120 as sparse
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm120

CSRC = env.FLASHINFER_CSRC_DIR
INCLUDE = env.FLASHINFER_INCLUDE_DIR / "flashinfer/attention/sparse_mla_sm120"
TRAITS = (INCLUDE / "model/kv_cache_traits.cuh").read_text()
if not pins.FLASHINFER_0_7:
    PREFILL = (CSRC / "sparse_mla_sm120_prefill.cu").read_text()
    PREFILL_KERNEL = (INCLUDE / "prefill_kernel.cuh").read_text()
    ENTRY = (CSRC / "sparse_mla_sm120.cu").read_text()
in_0_6 = pytest.mark.skipif(pins.FLASHINFER_0_7, reason="FlashInfer 0.7 has other sources")
in_0_7 = pytest.mark.skipif(not pins.FLASHINFER_0_7, reason="FlashInfer 0.6 has other sources")
OURS = (pins.FLASHINFER.public, f"{pins.FLASHINFER.public}+line.o1234abcd")


def function(source: str, name: str) -> str:
    """The text of a C++ function that is defined in ``source``."""
    found = re.search(rf"^[^\n;]*\b{name}\((?:[^;{{]|\n)*?\)\s*{{.*?^}}", source, re.M | re.S)
    assert found, name
    return found[0]


def in_words(numbers) -> str:
    *most, last = numbers
    return f"{', '.join(map(str, most))} or {last}"


@in_0_6
def test_prefill_refuses_pages_of_other_than_64_rows():
    dispatch = function(PREFILL, "sparse_mla_prefill_dispatch")
    check = "if (page_block_size != kPageBlockSize) return false;"
    assert check in dispatch
    assert dispatch.index(check) < dispatch.index("extra_KV_cache != nullptr")
    assert re.search(r"constexpr int kPageBlockSize = 64;", PREFILL)


@in_0_6
def test_prefill_refuses_pages_that_are_not_end_to_end():
    dispatch = function(PREFILL, "dispatch_v32")
    assert dispatch.index("stride_kv_block !=") < dispatch.index("launch_prefill_sg")


@in_0_6
def test_error_names_what_is_supported():
    text = function(PREFILL, "sparse_mla_prefill_supported_configs")
    for word in ("DSV3_2", "GLM_NSA", "DSV4", "page_block_size 64", "64 or 2"):
        assert word in text
    error = ENTRY[ENTRY.index("Unsupported sparse-MLA prefill configuration") :]
    assert "sparse_mla_prefill_supported_configs()" in error


@in_0_6
def test_the_words_match_the_tables():
    text = function(PREFILL, "sparse_mla_prefill_supported_configs")
    single = function(PREFILL, "dispatch_dsv4_single")
    topks = sorted({int(k) for k in re.findall(r"topk == (\d+)", single)})
    assert tuple(topks) == pins.DSV4_PREFILL_TOPK
    assert f"topk {in_words(topks)}" in text
    heads = sorted({int(h) for h in re.findall(r"case (\d+):", single)})
    assert tuple(heads) == pins.DSV4_PREFILL_HEADS
    assert f"num_heads {in_words(heads)}" in text
    assert f"num_heads {in_words(launcher.HEADS)}" in text


@in_0_6
def test_the_stand_in_prefills_what_the_dispatch_has():
    dispatch = function(PREFILL, "dispatch_v32")
    (topk,) = re.findall(r"if \(topk != (\d+)\) return false;", dispatch)
    assert (int(topk),) == launcher.PREFILL_TOPK
    heads = re.findall(r"case (\d+):|num_heads [!=]= (\d+)", dispatch)
    assert sorted(int(a or b) for a, b in heads) == list(launcher.HEADS)
    assert tuple(sorted(sparse._KV_SCALE_FORMATS, key=len)) == launcher.SCALE_FORMATS


@in_0_6
def test_prefills_tiles_take_two_barriers_in_turn():
    """One barrier may be arrived at twice in a phase, and then hangs the kernel."""
    handshakes = re.findall(r"bar_(?:arrive|sync)_\w+<1, .*", PREFILL_KERNEL)
    sync, arrive = (f"bar_{word}_alt<1, 5, BLOCK_THREADS>(ti & 1);" for word in ("sync", "arrive"))
    assert sorted(handshakes) == [arrive] * 2 + [sync] * 3


@in_0_7
def test_the_stand_in_prefills_what_the_plan_has():
    plan = (INCLUDE / "execution/attention_plan.h").read_text()
    heads = function(plan, "visit_prefill_heads")
    assert sorted({int(h) for h in re.findall(r"HEAD\((\d+)\)", heads)}) == list(launcher.HEADS)
    resolve = function(
        (CSRC / "sparse_mla_sm120/attention_resolve.cu").read_text(), "resolve_attention"
    )
    assert "m.topk % 64 == 0" in resolve
    # Pages: any size, but laid end to end; a row whose count is 0 is told by its sum.
    assert "!inline_scale || m.page_stride_bytes == size_t(m.page_size)" in resolve
    for model in ("DSV3_2", "GLM_NSA"):
        assert f"model == ModelType::{model}" in function(plan, "runtime_page")


@in_0_7
def test_rows_without_entries_get_minus_infinity():
    """In decode's merge and in each of the prefill kernels."""
    merge = (INCLUDE / "execution/merge.cuh").read_text()
    assert "(total_sum > 0.f) ? (log2f(total_sum) + gmax) : -INFINITY" in merge
    for name, count in (("sg", 2), ("mg", 1), ("swapab", 1)):
        kernel = (INCLUDE / f"kernels/fp8_prefill/prefill_{name}.cuh").read_text()
        assert kernel.count("-INFINITY") == count
        assert len(re.findall(r"il\S* = [^;]*> 0\.f \? [^;]*: 0\.f;", kernel)) >= count
    scale = function((INCLUDE / "common/lse.cuh").read_text(), "scale_output_lse")
    assert "scale * lse" in scale


def scratch_0_7(rows: int, heads: int, topk: int) -> list[int]:
    """Bytes of the three parts that a decode plan asks for: partial outputs and LSEs, the LSE."""
    resolve = (CSRC / "sparse_mla_sm120/attention_resolve.cu").read_text()
    plan = (INCLUDE / "execution/attention_plan.h").read_text()
    for text, rule in (
        (plan, "return heads == 8 ? 8 : (heads + 15) / 16 * 16;"),
        (resolve, "const size_t slots = size_t(m.tokens) * p.scratch_heads * p.chunk_capacity;"),
        (resolve, "p.partial_bytes = slots * format.value_dim * sizeof(__nv_bfloat16);"),
        (resolve, "p.lse_bytes = slots * sizeof(float);"),
    ):
        assert rule in text
    slots = rows * (heads if heads == 8 else -(-heads // 16) * 16) * -(-topk // sparse._BI)
    return [slots * 512 * 2, slots * 4, rows * heads * 4]


def test_the_reference_packs_as_the_kernels_read():
    if not pins.FLASHINFER_0_7:  # 0.7 asks its compiled module
        assert sparse._BPT_DSV3_2 == reference.BYTES_PER_TOKEN
    for line in (
        r"\[0:512\) +FP8 E4M3 nope \(4 tiles . 128\)",
        r"\[512:528\) 4 . FP32 scale",
        r"\[528:656\) BF16 rope \(64 elements",
    ):
        assert re.search(line, TRAITS), line


def test_the_stand_in_takes_what_the_pinned_entry_takes():
    """``launcher`` may not accept an argument that FlashInfer does not."""
    real = inspect.signature(trtllm_batch_decode_with_kv_cache_mla).parameters
    fake = inspect.signature(launcher.trtllm_batch_decode_with_kv_cache_mla).parameters
    for name, parameter in fake.items():
        if name == "return_lse_base" and not pins.LSE_BASE_ARGUMENT:
            continue  # the stand-in refuses it
        assert name in real
        if parameter.default is not inspect.Parameter.empty:
            assert real[name].default == parameter.default
    served = sparse._DECODE_DSV3_2_DISPATCH
    assert set(launcher.HEADS) == {h for h, _ in served}
    assert launcher.MAX_DECODE_ROWS == sparse._DECODE_MAX_TOKENS
    if pins.FLASHINFER_0_7:
        assert (128, 1) in served
        assert (24, 100) in served
        assert (129, 2048) not in served
    else:
        assert set(launcher.DECODE_TOPK) == {k for _, k in served}
        assert sparse._DECODE_DSV3_2_PAGE_BLOCK_SIZE == 64


@pytest.mark.parametrize("name", ["_SUPPORTED_NUM_HEADS", "_MAX_DECODE_ROWS", "_SPLIT_SIZE"])
def test_vllm_holds_flashinfers_numbers(name):
    expected = {
        "_SUPPORTED_NUM_HEADS": launcher.HEADS,
        "_MAX_DECODE_ROWS": launcher.MAX_DECODE_ROWS,
        "_SPLIT_SIZE": sparse._BI,
    }
    assert getattr(flashinfer_mla_sparse_sm120, name) == expected[name]


@pytest.mark.parametrize("heads", launcher.HEADS)
@pytest.mark.parametrize("topk", [128, 2048])
def test_vllms_scratch_is_what_flashinfer_carves(heads, topk):
    """Not a byte less than its largest decode call takes out of the buffer, nor more."""
    need = flashinfer_mla_sparse_sm120._decode_scratch_bytes(heads, 512, topk)
    if pins.FLASHINFER_0_7:
        sizes = scratch_0_7(64, heads, topk)
        assert sum(sizes) == need
        assert all(size % 16 == 0 for size in sizes)  # aligned, without gaps
        return
    call = {"num_tokens": 64, "num_heads": heads, "d_v": 512, "topk": topk, "extra_topk": 0}
    for size, enough in ((need, True), (need - 1, False)):
        buffer = torch.empty(size, dtype=torch.int8, device="meta")
        taken = _core._sparse_mla_decode_workspace(buffer, **call)
        assert all(view is not None for view in taken) == enough


def cubins(monkeypatch, ours: str, theirs: str) -> Path:
    """The cubin folder that a FlashInfer of version ``ours`` takes from ``theirs``."""
    fake = types.ModuleType("flashinfer_cubin")
    fake.__spec__ = importlib.machinery.ModuleSpec(fake.__name__, None)
    fake.__version__ = theirs
    fake.get_cubin_dir = lambda: "cubins"
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(env, "flashinfer_version", ours)
    for name in ("FLASHINFER_CUBIN_DIR", "FLASHINFER_DISABLE_VERSION_CHECK"):
        monkeypatch.delenv(name, raising=False)
    return env._get_cubin_dir()


@pytest.mark.parametrize("ours", OURS)
def test_cubins_of_the_same_public_version_are_taken(monkeypatch, ours):
    assert cubins(monkeypatch, ours, OURS[0]) == Path("cubins")


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize(
    "theirs", ["0.6.18", "0.6.18rc1", "0.7.2", f"{OURS[0]}1", f"{OURS[0]}+other"]
)
def test_cubins_of_another_version_are_refused(monkeypatch, ours, theirs):
    """0.6 raises, 0.7 goes on without them."""
    if pins.FLASHINFER_0_7:
        assert cubins(monkeypatch, ours, theirs) == env.FLASHINFER_CACHE_DIR / "cubins"
        return
    with pytest.raises(RuntimeError, match="does not match"):
        cubins(monkeypatch, ours, theirs)


@in_0_7
def test_the_report_on_an_environment_has_the_same_rule():
    from flashinfer.collect_env import _kernel_package_matches

    for ours in OURS:
        assert _kernel_package_matches("flashinfer-cubin", OURS[0], ours)
        assert not _kernel_package_matches("flashinfer-cubin", f"{OURS[0]}1", ours)
    assert not _kernel_package_matches("flashinfer-jit-cache", f"{OURS[0]}+cu130", OURS[1])


def test_kernels_compiled_from_other_sources_are_refused(monkeypatch):
    fake = types.ModuleType("flashinfer_jit_cache")
    fake.__spec__ = importlib.machinery.ModuleSpec(fake.__name__, None)
    fake.__version__ = f"{OURS[0]}+cu130"
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(env, "flashinfer_version", OURS[1])
    monkeypatch.delenv("FLASHINFER_DISABLE_VERSION_CHECK", raising=False)
    if pins.FLASHINFER_0_7:
        fake.get_jit_cache_providers = None  # would be called
        assert env._get_aot_providers() == ()
        return
    with pytest.raises(RuntimeError, match="does not match"):
        env._get_aot_dir()
