"""The FlashInfer that is installed ships the patched SM120 prefill dispatch.

Its kernels are compiled on the machine that serves, from these sources.
"""

import inspect
import re

import launcher
import pytest
from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla
from flashinfer.jit import env
from flashinfer.mla import _sparse_mla_sm120 as sparse

PREFILL = (env.FLASHINFER_CSRC_DIR / "sparse_mla_sm120_prefill.cu").read_text()
ENTRY = (env.FLASHINFER_CSRC_DIR / "sparse_mla_sm120.cu").read_text()


def function(source: str, name: str) -> str:
    """The text of a C++ function that is defined in ``source``."""
    found = re.search(rf"^[^\n;]*\b{name}\((?:[^;{{]|\n)*?\)\s*{{.*?^}}", source, re.M | re.S)
    assert found, name
    return found[0]


def test_prefill_refuses_pages_of_other_than_64_rows():
    dispatch = function(PREFILL, "sparse_mla_prefill_dispatch")
    check = "if (page_block_size != kPageBlockSize) return false;"
    assert check in dispatch
    assert dispatch.index(check) < dispatch.index("extra_KV_cache != nullptr")
    assert re.search(r"constexpr int kPageBlockSize = 64;", PREFILL)


def test_prefill_refuses_pages_that_are_not_end_to_end():
    dispatch = function(PREFILL, "dispatch_v32")
    assert dispatch.index("stride_kv_block !=") < dispatch.index("launch_prefill_sg")


def test_error_names_what_is_supported():
    text = function(PREFILL, "sparse_mla_prefill_supported_configs")
    for word in ("DSV3_2", "GLM_NSA", "DSV4", "page_block_size 64", "64 or 2"):
        assert word in text
    error = ENTRY[ENTRY.index("Unsupported sparse-MLA prefill configuration") :]
    assert "sparse_mla_prefill_supported_configs()" in error


def test_the_words_match_the_tables():
    text = function(PREFILL, "sparse_mla_prefill_supported_configs")
    single = function(PREFILL, "dispatch_dsv4_single")
    topks = sorted({int(k) for k in re.findall(r"topk == (\d+)", single)})
    assert topks == [128, 192, 256, 512, 1024, 2048]
    assert "128, 192, 256, 512, 1024 or 2048" in text
    heads = sorted({int(h) for h in re.findall(r"case (\d+):", single)})
    assert heads == [8, 16, 32, 64, 128]
    assert "8, 16, 32, 64 or 128" in text


def test_the_stand_in_takes_what_the_pinned_entry_takes():
    """``launcher`` may not accept an argument that FlashInfer does not."""
    real = inspect.signature(trtllm_batch_decode_with_kv_cache_mla).parameters
    fake = inspect.signature(launcher.trtllm_batch_decode_with_kv_cache_mla).parameters
    for name, parameter in fake.items():
        assert name in real
        if parameter.default is not inspect.Parameter.empty:
            assert real[name].default == parameter.default
    assert set(launcher.HEADS) == {h for h, _ in sparse._DECODE_DSV3_2_DISPATCH}
    assert set(launcher.DECODE_TOPK) == {k for _, k in sparse._DECODE_DSV3_2_DISPATCH}
    assert launcher.MAX_DECODE_ROWS == sparse._DECODE_MAX_TOKENS
    assert sparse._DECODE_DSV3_2_PAGE_BLOCK_SIZE == 64


@pytest.mark.parametrize("name", ["_SUPPORTED_NUM_HEADS", "_MAX_DECODE_ROWS"])
def test_vllm_holds_flashinfers_numbers(name):
    from vllm.v1.attention.backends.mla import flashinfer_mla_sparse_sm120 as module

    expected = {
        "_SUPPORTED_NUM_HEADS": launcher.HEADS,
        "_MAX_DECODE_ROWS": launcher.MAX_DECODE_ROWS,
    }
    assert getattr(module, name) == expected[name]
