"""The verb ``capability`` on small sources of the real form, and answers where sources are odd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from overlay.errors import CapabilityError
from overlay.kernels.capability import Answer, Phase, Shape, read_capability
from overlay.trees.match import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import Ran
    from tests.support.tiny import Tiny

TYPES = """
enum class ModelType { DSV3_2, DSV4 };
template <ModelType MT> struct KVCacheTraits;
template <> struct KVCacheTraits<ModelType::DSV3_2> { static constexpr int D_QK = 576; };
template <> struct KVCacheTraits<ModelType::DSV4> { static constexpr int D_QK = 512; };
"""
ENTRY = """
#include <types.h>
int bytes_per_token(ModelType mt) { return mt == ModelType::DSV4 ? 584 : 656; }
void SparseMlaSm120PagedAttention(TensorView q) {
  const int num_tokens = q.size(0);
  TVM_FFI_ICHECK_GT(num_tokens, 32) << "decode goes elsewhere; got " << num_tokens;
}
"""
PREFILL = """
#include <types.h>
template <ModelType MT, int NUM_HEADS, int PAGE_BLOCK_SIZE>
void launch(int topk) { kernel<NUM_HEADS><<<1, 1>>>(topk); }
bool sparse_mla_prefill_dispatch(ModelType mt, int num_heads, int topk, int page_block_size,
                                 const uint8_t* extra_KV_cache) {
  if (extra_KV_cache != nullptr || mt != ModelType::DSV4) return false;
#define CASE(H) case H: launch<ModelType::DSV4, H, 64>(topk); return true
  switch (num_heads) { CASE(16); CASE(32); }
  return false;
}
"""
DSV4 = """
#include <types.h>
template <int NUM_HEADS> bool launch(int topk) { kernel<<<1, 1>>>(topk); return true; }
bool launch_sparse_mla_decode_dsv4(ModelType mt, int num_heads, int topk, const int* extra_x) {
  if (mt != ModelType::DSV4) return false;
  if (num_heads == 8) return launch<8>(topk);
  return false;
}
"""
DSV3_2 = """
#include <types.h>
bool launch_sparse_mla_decode_dsv3_2(ModelType mt, int num_heads, int topk) { return false; }
"""
BINDING = """
void SparseMlaSm120DecodeDsv4(TensorView q) { TVM_FFI_ICHECK_EQ(q.ndim(), 3); }
void SparseMlaSm120DecodeDsv3_2(TensorView q) { TVM_FFI_ICHECK_EQ(q.ndim(), 3); }
"""
PYTHON = """
_DECODE_MAX_TOKENS = 32
_TABLE = frozenset({(8, 128), (8, 512), (16, 512)})
def _decode_dsv4_dispatchable(num_tokens, num_heads, topk, d_qk, page_block_size):
    return (
        num_tokens <= _DECODE_MAX_TOKENS
        and d_qk == 512
        and page_block_size == 64
        and (num_heads, topk) in _TABLE
    )
"""
FILES = {
    "include/types.h": TYPES,
    "csrc/sparse_mla_sm120.cu": ENTRY,
    "csrc/sparse_mla_sm120_prefill.cu": PREFILL,
    "csrc/sparse_mla_sm120_decode_dsv4.cu": DSV4,
    "csrc/sparse_mla_sm120_decode_dsv3_2.cu": DSV3_2,
    "csrc/sparse_mla_sm120_jit_binding.cu": BINDING,
    "flashinfer/mla/_sparse_mla_sm120.py": PYTHON,
}


class Files:
    """A tree of texts."""

    def __init__(self, **changes: str | None) -> None:
        self.files: dict[bytes, bytes] = {}
        for path, text in FILES.items():
            changed = next((v for k, v in changes.items() if path.endswith(f"_{k}.cu")), text)
            changed = changes.get("python", text) if path.endswith(".py") else changed
            if changed is not None:
                self.files[path.encode()] = changed.encode()

    def get(self, path: bytes) -> Entry | None:
        data = self.files.get(path)
        return None if data is None else Entry(mode=0o100644, data=data)

    def is_folder(self, path: bytes, *, without: object = ()) -> bool:
        return any(name.startswith(path + b"/") for name in self.files)


def shape(phase: Phase = Phase.PREFILL, **sizes: Any) -> Shape:
    usual = {"model": "dsv4", "heads": 16, "topk": 512, "page": 64}
    usual["rows"] = 96 if phase is Phase.PREFILL else 8
    return Shape(phase=phase, **(usual | sizes))


def test_answers_with_reason_and_place() -> None:
    found = read_capability(Files(), version="x")
    assert (found.models, found.decode_max_rows) == (("dsv3_2", "dsv4"), 32)
    told = found.ask(shape())
    assert (told.answer, told.where) == (
        Answer.SUPPORTED, "csrc/sparse_mla_sm120_prefill.cu:9",
    )  # fmt: skip
    told = found.ask(shape(heads=8))
    assert (told.answer, told.where) == (
        Answer.UNSUPPORTED, "csrc/sparse_mla_sm120_prefill.cu:10",
    )  # fmt: skip
    assert "returns false" in told.why
    told = found.ask(shape(rows=32))
    assert told.why.startswith("decode goes elsewhere; got: TVM_FFI_ICHECK_GT")
    assert told.where == "csrc/sparse_mla_sm120.cu:6"
    told = found.ask(shape(page=128))
    assert told.answer is Answer.UNSUPPORTED
    assert "PAGE_BLOCK_SIZE 64, asked for 128" in told.why
    assert "because extra_KV_cache != nullptr" in found.ask(shape(extra_topk=9, extra_page=2)).why
    assert found.ask(shape(model="other")).answer is Answer.UNSUPPORTED


@pytest.mark.parametrize(
    "sizes", [{"heads": 0}, {"topk": 2**31}, {"page": -64}, {"rows": 0}, {"extra_topk": 64}]
)
def test_sizes_that_no_call_has(sizes: dict[str, int]) -> None:
    told = read_capability(Files()).ask(shape(**sizes))
    assert (told.answer, told.why) == (Answer.UNSUPPORTED, "no call has such sizes")


def test_decode_needs_the_table_and_the_launcher() -> None:
    found = read_capability(Files())
    assert found.ask(shape(Phase.DECODE, heads=8)).answer is Answer.SUPPORTED
    assert found.ask(shape(Phase.DECODE, heads=8, rows=33)).answer is Answer.UNSUPPORTED
    assert found.ask(shape(Phase.DECODE, heads=8, topk=64)).answer is Answer.UNSUPPORTED
    told = found.ask(shape(Phase.DECODE, heads=16))  # in the table, and never instantiated
    assert told.answer is Answer.UNSUPPORTED
    assert told.where.startswith("csrc/sparse_mla_sm120_decode_dsv4.cu")
    assert found.ask(shape(Phase.DECODE, heads=8, model="dsv3_2")).answer is Answer.UNSUPPORTED


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prefill": PREFILL.replace("num_heads)", "heads_of(num_heads))")}, "calls 'heads_of'"),
        ({"prefill": PREFILL.replace("mt != ", "topk < LEAST || mt != ")}, "depends on 'LEAST'"),
        ({"prefill": PREFILL.replace("const uint8_t* e", "int mode, const uint8_t* e").replace(
            "if (", "if (mode == 3 || ")}, "depends on 'mode'"),
        ({"prefill": PREFILL.replace("launch<ModelType::DSV4, H, 64>(topk); ", "")},
         "returns true and starts nothing"),
        ({"prefill": PREFILL.replace("H, 64>", "H, PAGES>")}, "PAGE_BLOCK_SIZE isn't known"),
        ({"prefill": PREFILL.replace("switch (", "switch ((")}, ""),
        ({"prefill": PREFILL + "bool sparse_mla_prefill_dispatch() { return true; }"},
         "2 functions"),
        ({"prefill": PREFILL + "#if 1\n"}, "can't be preprocessed"),
        ({"prefill": PREFILL.replace("#include <types.h>", "")}, "no enum ModelType"),
        ({"python": "def ("}, "no Python"),
        ({"python": PYTHON.replace("= 32", "= limit()")}, "calls 'limit'"),
        ({"prefill": None}, "neither"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_unknown(changes: dict[str, str | None], why: str) -> None:
    found = read_capability(Files(**changes))
    told = found.ask(shape())
    assert told.answer is Answer.UNKNOWN
    assert why in told.why


def test_a_tree_without_kernels_says_so() -> None:
    empty = Files()
    empty.files = {b"csrc/other.cu": b""}
    with pytest.raises(CapabilityError, match=r"FlashInfer 0\.6\.13 has no sparse-MLA kernels"):
        read_capability(empty, version="0.6.13")


def test_the_verb(run: Callable[..., Ran], tiny: Tiny) -> None:
    bare = run("capability", "tiny")
    assert bare.code == 20
    assert "has no sparse-MLA kernels" in bare.err
    tiny.add_patch("flashinfer", "kernels", {p: t.encode() for p, t in FILES.items()})
    told = run("capability", "tiny", "--json")
    assert told.code == 0, told.err
    assert told.json["patched"] is True
    families = {(f["phase"], f["model"]): f for f in told.json["families"]}
    assert families["prefill", "dsv4"]["blocks"] == [
        {"phase": "prefill", "model": "dsv4", "heads": [16, 32], "pages": [64],
         "topk": told.json["asked"]["topk"], "extra_topk": 0, "extra_page": 0}
    ]  # fmt: skip
    assert [b["topk"] for b in families["decode", "dsv4"]["blocks"]] == 4 * [[128, 512]]
    assert families["decode", "dsv3_2"]["blocks"] == []
    plain = run("capability", "tiny")
    assert "prefill\tdsv4\t16 32\t" in plain.out
    assert "prefill\tdsv3_2\tnone\t" in plain.out
    released = run("capability", "tiny", "--flashinfer", "4.5.6rc7")
    assert released.code == 20  # the patch brought them


def test_the_verb_shows_what_is_unknown(run: Callable[..., Ran], tiny: Tiny) -> None:
    odd = FILES | {"csrc/sparse_mla_sm120_prefill.cu": PREFILL.replace("mt != ", "mt != odd + ")}
    tiny.add_patch("flashinfer", "kernels", {p: t.encode() for p, t in odd.items()})
    told = run("capability", "tiny")
    assert told.code == 0
    assert "prefill\tdsv4\tunknown\t" in told.out
    assert "depends on 'odd'" in told.out
    tiny.add_patch("flashinfer", "gone", {"csrc/sparse_mla_sm120_prefill.cu": None})
    told = run("capability", "tiny")
    assert told.code == 20
    assert "can't be read" in told.err
