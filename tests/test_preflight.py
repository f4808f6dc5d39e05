"""Preflight: recipes against what the lines' own sources say, and what becomes of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from overlay.app import App
from overlay.cli import main
from overlay.errors import CapabilityError, UnknownError, UnsupportedError
from overlay.kernels import refusals as rules
from overlay.kernels.bringers import Bringers, Brought, bare
from overlay.kernels.capability import Answer, Capability, Phase, Shape, Told
from overlay.kernels.memory import memory
from overlay.kernels.owncheck import own_check
from overlay.kernels.preflight import Outcome, Preflight, Trees, complain, preflight
from overlay.kernels.preflightpicture import END, START, draw_svg, markdown
from overlay.kernels.recipe import Recipe, Serve, find_recipes, read_recipe
from overlay.kernels.refusals import Reader, refusals, uses_second_runner
from overlay.kernels.shapes import derive
from overlay.report import Reporter
from overlay.sources.releases import known_pins, pin_release, with_pin
from overlay.trees.match import Entry
from overlay.trees.pipeline import apply_line
from overlay.trees.store import StoredTree
from tests.support.carrying import Memory
from tests.support.releases import add_flashinfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlay.lines.line import Line
    from tests.support.tiny import Tiny

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "images" / "recipes"
LINES = ["eldritch", "infernal", "next"]
BEFORE = "0.6.16.post3"  # FlashInfer without prefill kernels for 8 heads
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
DSV4 = Path(rules.DSV4).name


def recipe(name: str, *settings: str) -> Recipe:
    return read_recipe(FOLDER, name, settings)


# --- without sources: a fake FlashInfer, and vLLM's checks written small -------------------


class FakeFlashInfer:
    """Stands in for a FlashInfer tree: decode from 8 heads on, prefill from ``fewest`` on."""

    models = ("dsv3_2", "dsv4", "glm_nsa")
    decode_max_rows = 64

    def __init__(self, fewest: int = 16, unknown: int = 0) -> None:
        self.fewest, self.unknown = fewest, unknown

    def ask(self, shape: Shape) -> Told:
        if shape.heads == self.unknown:
            return Told(answer=Answer.UNKNOWN, why="odd", where="a.cu:2")
        good = shape.phase is Phase.DECODE or shape.heads >= self.fewest
        return Told(
            answer=Answer.SUPPORTED if good else Answer.UNSUPPORTED, why="so", where="a.cu:1"
        )


class FakeBringers:
    def find(self, line: Line, shape: Shape) -> Brought:
        assert line.name == "infernal"
        # A model without top-k asks for no kernel that anybody has, in either phase
        assert shape.phase is Phase.PREFILL or shape.topk == 0
        return Brought(release="0.9", not_asked=("0.8",))


VLLM = {
    rules.REGISTRY: """
class AttentionBackendEnum(Enum):
    FLASHINFER_MLA_SPARSE_SM120 = 1
    FLASHINFER_MLA_SPARSE_DSV4 = 2
    OTHER = 3
""",
    rules.SM120: """
class FlashInferMLASparseSM120Backend:
    def supports_combination(cls, kv_cache_dtype):
        if not has_flashinfer_sparse_mla_sm120():
            return "no"
        if kv_cache_dtype not in (None, "auto", "fp8"):
            return "kv"
        if index_topk is None:
            return "none"
        if int(index_topk) != 2048:
            return "other"
""",
    rules.SM120_IMPL: """
_SUPPORTED_NUM_HEADS = (8, 16, 32, 64, 128)
class FlashInferMLASparseSM120Impl:
    can_return_lse_for_decode = True
""",
    rules.DSV4: """
class DeepseekV4FlashInferMLASparseBackend:
    def supports_combination(cls, kv_cache_dtype, device_capability):
        if device_capability.major == 10:
            if kv_cache_dtype not in (None, "bfloat16"):
                return "kv"
        if device_capability.major == 12:
            if kv_cache_dtype not in ("fp8", "fp8_ds_mla"):
                return "kv"
class DeepseekV4FlashInferSM120Attention:
    def __init__(self):
        if not has_flashinfer_sparse_mla_sm120_config(self.padded_heads, required_topk):
            raise RuntimeError
""",
    rules.INDEXER: """
        if self.dcp_world_size > 1 and self.cp_kv_cache_interleave_size > 1:
            raise NotImplementedError(
                "DCP sparse indexer currently supports only ")
        if self.dcp_world_size > 1 and self.compress_ratio > 1:
            raise NotImplementedError(
                "DCP is not supported with sparse indexer KV compression ")
""",
    rules.CP: """
    assert layer_impl.supports_mtp_with_cp_non_trivial_interleave_size, (
    assert layer_impl.need_to_return_lse_for_decode, (
""",
    rules.PARALLEL: "            if tp % dcp != 0:\n",
    rules.WARMUP: "            if _uses_v2_model_runner(runner) and runner.max_num_reqs >= 2:\n",
    rules.CONFIG: """
DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset(
    {
        "DeepseekV4ForCausalLM",
    }
)
class VllmConfig:
    def use_v2_model_runner(self) -> bool:
        use = envs.VLLM_USE_V2_MODEL_RUNNER
        if use is not None:
            return use
        if self.speculative_config.method == "dspark":
            return True
        if not self._is_default_v2_model_runner_model():
            return False
        return True

    def other(self) -> bool:
        return False
""",
}
PAIRS = [(heads, topk) for heads in (8, 16, 32) for topk in (128, 512)]
DISPATCH = f"_DECODE_DSV4_DISPATCH = frozenset({PAIRS})\n"


def tree(files: dict[str, str]) -> Memory:
    return Memory({p.encode(): Entry(mode=0o100644, data=t.encode()) for p, t in files.items()})


def fake_trees(
    flashinfer: FakeFlashInfer | None = None, vllm: dict[str, str] | None = None
) -> Trees:
    made: Any = object.__new__(Trees)  # without a line's sources
    made.line = App(report=Reporter(), patches=ROOT / "patches").line("infernal")
    made.vllm = tree(VLLM if vllm is None else vllm)
    made.flashinfer = tree({"flashinfer/mla/_sparse_mla_sm120.py": DISPATCH})
    made.capability = Capability(flashinfer or FakeFlashInfer(), version="fake")
    made.edge, made.draft_step, made.bringers = 64, 64, FakeBringers()
    kept: Trees = made
    return kept


def judged(trees: Trees, name: str, *settings: str) -> Preflight:
    return preflight(trees, name, recipe(name, *settings))


def test_seed_000_fails_with_shape_rows_table_and_ways_out() -> None:
    found = judged(fake_trees(), "dsv4-dspark-tp8")
    assert found.outcome is Outcome.UNSUPPORTED
    expected = "prefill table: dsv4, 8 heads, topk 512, page 64, 66 to 96 rows (target)"
    assert found.reason == expected
    assert found.own.answer == "passes"  # it looks at the decode table alone
    assert found.brought == "FlashInfer 0.9 has it; not asked: 0.8"
    assert [way.partition(" ")[0] for way in found.ways_out] == [
        "max_num_seqs=10", "no", "tp=2", "tp=4",
    ]  # fmt: skip
    complaint = complain([found])
    assert isinstance(complaint, UnsupportedError)
    assert expected in complaint.why
    assert "max_num_seqs=10" in complaint.fix


def test_a_way_out_is_named_only_where_it_is_one() -> None:
    """With other kernels for prompts too, no number of requests helps."""
    found = judged(fake_trees(), "dsv4-dspark-tp8", "prompts=kernel")
    assert [way.partition(" ")[0] for way in found.ways_out] == ["tp=2", "tp=4"]


def test_with_the_kernels_it_is_fine() -> None:
    found = judged(fake_trees(FakeFlashInfer(fewest=8)), "dsv4-dspark-tp8")
    assert (found.outcome, found.reason, found.ways_out) == (Outcome.FINE, "", ())
    assert complain([found]) is None


def test_what_isnt_understood_is_not_fine() -> None:
    found = judged(fake_trees(FakeFlashInfer(unknown=8)), "dsv4-dspark-tp8")
    assert found.outcome is Outcome.UNKNOWN
    complaint = complain([found])
    assert isinstance(complaint, UnknownError)
    # One that surely can't is worse than one that isn't known
    bad = judged(fake_trees(), "dsv4-dspark-tp8")
    assert isinstance(complain([found, bad]), UnsupportedError)


def test_an_answer_for_some_rows_is_none_for_all() -> None:
    class Fake(FakeFlashInfer):
        def ask(self, shape: Shape) -> Told:
            told = super().ask(shape)
            return replace(told, answer=Answer.UNKNOWN) if shape.rows == 72 else told

    found = judged(fake_trees(Fake(fewest=8)), "dsv4-dspark-tp8")
    assert found.outcome is Outcome.UNKNOWN


def test_the_own_check_is_answered_from_the_table() -> None:
    trees, read = fake_trees(), recipe("dsv4-dspark-tp8")
    told = own_check(trees.vllm, trees.flashinfer, read, derive(read), trees.capability)
    assert (told.answer, told.where.rpartition("/")[2]) == ("passes", f"{DSV4}:12")
    read = recipe("dsv4-dspark-tp8", "topk=")  # the draft is 192 wide
    told = own_check(trees.vllm, trees.flashinfer, read, derive(read), trees.capability)
    assert told.answer == "refuses"
    assert "8 heads x 192" in told.what
    computed = tree({"flashinfer/mla/_sparse_mla_sm120/_policy.py": "_DECODE_DSV4_DISPATCH = X(1)"})
    told = own_check(trees.vllm, computed, read, derive(read), trees.capability)
    assert told.answer == "passes"  # so says the module itself
    odd = Capability(FakeFlashInfer(unknown=8), version="")
    assert own_check(trees.vllm, computed, read, derive(read), odd).answer == "unknown"
    assert own_check(tree({}), computed, read, derive(read), odd).answer == "unknown"


# A rule, the recipe that it refuses, the file that its check is in, and what it says
RULES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "no such backend": (("backend=NONE",), rules.REGISTRY, "has no backend NONE"),
    "index_topk": (("index_topk=512",), rules.SM120, "must be 2048"),
    "no indexer": (("index_topk=",), rules.SM120, "no top-k indexer"),
    "KV type": (("kv_cache_dtype=bfloat16",), rules.SM120, "none of auto, fp8"),
    "ranks": (("dcp=8", "tp=4"), rules.PARALLEL, "TP 4 is no multiple of DCP 8"),
    "heads": (("heads=24",), rules.SM120_IMPL, "12 gathered heads"),
    "interleave": (("interleave=64",), rules.INDEXER, "interleave_size 64"),
    "drafts": (("interleave=64", "method=mtp", "tokens=3"), rules.CP, "and 3 drafts"),
    "runner": ((f"serve.environment.{RUNNER}=0",), rules.WARMUP, "never runs the warmup"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_check_is_quoted_where_it_stands(rule: str) -> None:
    settings, path, says = RULES[rule]
    found = refusals(tree(VLLM), recipe("glm-tp8-dcp4", *settings))
    ours = [f for f in found if says in f.what]
    assert len(ours) == 1
    assert ours[0].answer == "refused"
    where, _, line = ours[0].where.rpartition(":")
    assert where == path
    assert VLLM[path].splitlines()[int(line) - 1].strip() == ours[0].quote


@pytest.mark.parametrize("rule", RULES)
def test_a_check_that_cant_be_found_says_nothing(rule: str) -> None:
    settings, path, _ = RULES[rule]
    without = {name: text for name, text in VLLM.items() if name != path}
    read = recipe("glm-tp8-dcp4", *settings)
    found = refusals(tree(without), read)
    assert [f.where for f in found if f.answer == "unknown"].count(path) >= 1 or rule == "heads"
    outcome = preflight(fake_trees(FakeFlashInfer(fewest=8), without), "x", read).outcome
    assert outcome is not Outcome.FINE


def test_the_good_recipe_is_refused_by_nothing() -> None:
    assert refusals(tree(VLLM), recipe("glm-tp8-dcp4")) == ()
    assert refusals(tree(VLLM), recipe("dsv4-dspark-tp8")) == ()


def test_kv_types_are_of_the_branch_for_this_card() -> None:
    found = refusals(tree(VLLM), recipe("dsv4-dspark-tp8", "kv_cache_dtype=bfloat16"))
    assert [f.what for f in found] == ["kv_cache_dtype bfloat16 is none of fp8, fp8_ds_mla"]
    assert found[0].where == f"{rules.DSV4}:8"


def test_deepseek_v4_with_dcp_is_refused_and_says_so_before_kernels() -> None:
    found = judged(fake_trees(), "dsv4-mtp2-tp8-dcp8")
    assert found.outcome is Outcome.REFUSED
    assert found.reason == f"DeepSeek-V4 with DCP 8 ({rules.INDEXER}:7)"


def test_a_flag_of_the_implementation_lifts_a_refusal() -> None:
    flag = "    supports_mtp_with_cp_non_trivial_interleave_size = True\n"
    lifted = {**VLLM, rules.SM120_IMPL: VLLM[rules.SM120_IMPL] + flag}
    lifted[rules.INDEXER] = "or self.cp_kv_cache_interleave_size % self.compress_ratio != 0\n"
    read = recipe("glm-tp8-dcp4", "interleave=64", "method=mtp", "tokens=3")
    assert refusals(tree(lifted), read) == ()


def test_an_unknown_backend_of_the_registry_is_unknown() -> None:
    found = refusals(tree(VLLM), recipe("glm-tp8", "backend=OTHER"))
    assert [f.answer for f in found] == ["unknown"]


@pytest.mark.parametrize(
    ("name", "given", "second"),
    [
        ("glm-tp8", "1", True),
        ("glm-tp8", "0", False),
        ("glm-tp8", None, False),
        ("dsv4-layers-tp8", None, True),
        ("dsv4-dspark-mtp0-tp8", None, True),
    ],
)
def test_which_runner(name: str, given: str | None, second: bool) -> None:
    environment = {} if given is None else {RUNNER: given}
    read = msgspec.structs.replace(recipe(name), serve=Serve(environment=environment))
    assert uses_second_runner(Reader(tree(VLLM)), read) is second
    assert uses_second_runner(Reader(tree({})), read) is None


def matrix(*names: str) -> tuple[list[Preflight], dict[str, Recipe]]:
    read = {name: recipe(name) for name in names}
    return [preflight(fake_trees(), name, each) for name, each in read.items()], read


def test_the_matrix_is_drawn_the_same_each_time() -> None:
    found, _ = matrix("dsv4-dspark-tp8", "dsv4-dspark-mtp0-tp8", "dsv4-mtp2-tp8-dcp8")
    drawn = draw_svg(found)
    assert drawn == draw_svg(found)
    for word in (b">no kernel<", b">fine<", b">refused<", b"dsv4-mtp2-tp8-dcp8", b">infernal<"):
        assert word in drawn


def test_the_matrix_goes_between_its_marks() -> None:
    found, read = matrix("dsv4-dspark-tp8", "glm-tp8-dcp2")
    page = f"before\n{START}\nold\n{END}\nafter\n"
    text = markdown(found, read, page)
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "old" not in text
    assert "| unsupported |" in text
    assert markdown(found, read, text) == text
    held = memory(read["glm-tp8-dcp2"]).cards[1].tokens
    assert f"{held} tokens" in text


# --- who brings a kernel: releases and a patch of the line ``tiny``, a fake reads them ------


class FakeKernels(FakeFlashInfer):
    """Of a tiny tree: prefill kernels for 8 heads where ``csrc/prefill.cu`` has the word."""


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the fake in place of the reading of FlashInfer's sources; what it read."""
    read: list[str] = []

    def fake(tree: StoredTree, *, version: str = "") -> Capability:
        entry = tree.get(b"csrc/prefill.cu")
        assert entry is not None
        read.append(hashlib.sha256(entry.data).hexdigest())
        if b"line x" in entry.data:
            return Capability(FakeKernels(fewest=8), version=version)
        if b"none" in entry.data:
            raise CapabilityError("none")
        return Capability(FakeKernels(), version=version)

    monkeypatch.setattr("overlay.kernels.bringers.read_capability", fake)
    return read


MISSING = Shape(phase=Phase.PREFILL, model="dsv4", heads=8, topk=512, page=64, rows=96)


def at_hand(tiny: Tiny, *versions: str) -> tuple[App, Line]:
    """The line ``tiny``, with FlashInfer releases in the cache."""
    app = App(report=Reporter(quiet=True), patches=tiny.patches)
    line = app.line("tiny")
    apply_line(line, app.sources)
    for version in versions:
        pin = pin_release(app.sources, "flashinfer", version)
        apply_line(with_pin(bare(line), "flashinfer", pin), app.sources, upstreams=["flashinfer"])
    return app, line


def test_the_patch_that_adds_it_is_named(tiny: Tiny, reading: list[str]) -> None:
    app, line = at_hand(tiny)
    found = Bringers(app.sources, tiny.patches).find(line, MISSING)
    assert found == Brought(patch="tiny/flashinfer/check")
    assert str(found) == "the patch tiny/flashinfer/check adds it"
    assert len(reading) == len(set(reading)) == 2


def test_the_first_release_that_has_it_is_named(tiny: Tiny, reading: list[str]) -> None:
    (tiny.folder / "flashinfer" / "series").write_text("")
    good, other = b"// line x\n", b"// line y\n"
    add_flashinfer(tiny, "4.0", {"csrc/prefill.cu": good})  # before the pin
    add_flashinfer(tiny, "4.6", {"csrc/prefill.cu": b"none"})
    add_flashinfer(tiny, "4.7", {"csrc/prefill.cu": other})
    add_flashinfer(tiny, "4.8rc1", {"csrc/prefill.cu": good})  # no final release
    add_flashinfer(tiny, "4.8", {"csrc/prefill.cu": good})
    add_flashinfer(tiny, "4.9", {"csrc/prefill.cu": good})
    app, line = at_hand(tiny, "4.0", "4.6", "4.7", "4.8rc1", "4.8", "4.9")
    bringers = Bringers(app.sources, tiny.patches)
    assert bringers.find(line, MISSING) == Brought(release="4.8")
    before = list(reading)
    assert bringers.find(line, replace(MISSING, rows=80)) == Brought(release="4.8")
    assert reading == before  # no tree is read twice


def test_what_isnt_in_the_cache_is_not_asked(tiny: Tiny, reading: list[str]) -> None:
    (tiny.folder / "flashinfer" / "series").write_text("")
    add_flashinfer(tiny, "4.6", {"csrc/prefill.cu": b"// line x\n"})
    add_flashinfer(tiny, "4.7", {"csrc/prefill.cu": b"// line x\n"})
    app, line = at_hand(tiny, "4.7")
    found = Bringers(app.sources, tiny.patches).find(line, MISSING)
    assert found == Brought(release="4.7", not_asked=("4.6",))
    assert str(found) == "FlashInfer 4.7 has it; not asked: 4.6"
    assert str(Brought()) == "no release or patch at hand has it"
    assert len(reading) == 1


# --- the lines ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trees() -> Callable[[str], Trees]:
    """Trees of ``LINE`` or ``LINE@FLASHINFER``, each read once."""
    app = App(report=Reporter(quiet=True), patches=ROOT / "patches")
    made: dict[str, Trees] = {}
    bringers = Bringers(app.sources, app.root)

    def get(word: str) -> Trees:
        if word not in made:
            name, _, version = word.partition("@")
            line = app.line(name)
            if version:
                known = known_pins(app.root, "flashinfer")
                pin = pin_release(app.sources, "flashinfer", version, known=known)
                line = with_pin(bare(line), "flashinfer", pin)
            made[word] = Trees(line, app.sources, bringers)
        return made[word]

    return get


def patched(app: App, line: Line) -> StoredTree:
    """The patched vLLM tree of a line alone."""
    state = apply_line(line, app.sources, upstreams=["vllm"])["vllm"]
    return StoredTree(state.store.reader, state.tree.tree)


@pytest.mark.real
def test_seed_000_on_the_flashinfer_that_failed(trees: Callable[[str], Trees]) -> None:
    found = judged(trees(f"infernal@{BEFORE}"), "dsv4-dspark-tp8")
    assert found.outcome is Outcome.UNSUPPORTED
    assert found.reason == "prefill table: dsv4, 8 heads, topk 512, page 64, 66 to 96 rows (target)"
    assert found.own.answer == "passes"
    missing = [j for j in found.judged if j.brought is not None]
    assert {j.asked.who for j in missing} == {"target", "draft"}
    assert all("csrc/sparse_mla_sm120_prefill.cu" in j.told.where for j in missing)
    # The line's own pin is at hand, and has it; nothing between was said to have it unasked
    assert all(j.brought and (j.brought.release or j.brought.not_asked) for j in missing)
    assert found.ways_out[0].startswith("max_num_seqs=10 ")
    assert found.ways_out[1].startswith("no drafts")
    without = judged(trees(f"infernal@{BEFORE}"), "dsv4-dspark-mtp0-tp8")
    assert without.outcome is Outcome.FINE


@pytest.mark.real
def test_seed_000_on_infernal(trees: Callable[[str], Trees]) -> None:
    found = judged(trees("infernal"), "dsv4-dspark-tp8")
    assert found.outcome is Outcome.FINE
    assert {j.told.answer for j in found.judged} == {Answer.SUPPORTED}


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("rule", sorted(set(RULES) - {"interleave", "drafts"}))
def test_the_pinned_checks_refuse(trees: Callable[[str], Trees], line: str, rule: str) -> None:
    settings, path, says = RULES[rule]
    found = refusals(trees(line).vllm, recipe("glm-tp8-dcp4", *settings))
    assert [(f.answer, f.where.rpartition(":")[0]) for f in found if says in f.what] == [
        ("refused", path)
    ]


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
def test_interleave_with_drafts_is_lifted_by_the_patch_on_next_alone(
    trees: Callable[[str], Trees], line: str
) -> None:
    read = recipe("glm-tp8-dcp4", "interleave=64", "method=mtp", "tokens=3")
    found = refusals(trees(line).vllm, read)
    if line != "next":
        assert [f.where.rpartition(":")[0] for f in found] == [rules.INDEXER, rules.CP]
        return
    assert found == ()
    app = App(report=Reporter(quiet=True), patches=ROOT / "patches")
    whole = app.line("next")
    kept = tuple(p for p in whole.series["vllm"] if p.name != "mtp-interleave")
    without = patched(app, replace(whole, series={**whole.series, "vllm": kept}))
    found = refusals(without, read)
    assert [(f.answer, f.where.rpartition(":")[0]) for f in found] == [("refused", rules.CP)]


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
def test_without_the_patches_dcp_is_refused(line: str) -> None:
    app = App(report=Reporter(quiet=True), patches=ROOT / "patches")
    whole = app.line(line)
    unpatched = patched(app, replace(whole, series={"vllm": (), "flashinfer": ()}))
    found = refusals(unpatched, recipe("glm-tp8-dcp4"))
    assert [(f.answer, f.where.rpartition(":")[0]) for f in found] == [("refused", rules.CP)]


@pytest.mark.real
@pytest.mark.parametrize("line", LINES)
def test_deepseek_v4_with_dcp_on_the_lines(trees: Callable[[str], Trees], line: str) -> None:
    found = judged(trees(line), "dsv4-mtp2-tp8-dcp8")
    assert found.outcome is Outcome.REFUSED
    assert f"({rules.INDEXER}:" in found.reason


@pytest.mark.real
@pytest.mark.parametrize(("line", "width"), [("eldritch", 256), ("infernal", 192), ("next", 192)])
def test_a_draft_is_as_wide_as_the_lines_vllm_makes_it(
    trees: Callable[[str], Trees], line: str, width: int
) -> None:
    shapes = trees(line).shapes(recipe("dsv4-dspark-tp4-draft"))
    assert {a.shape.topk for a in shapes.asked if a.who == "draft"} == {width}


def test_a_width_that_cant_be_found_is_unknown() -> None:
    odd = fake_trees(FakeFlashInfer(fewest=8))
    odd.draft_step = None
    assert judged(odd, "dsv4-dspark-tp8").outcome is Outcome.FINE  # the recipe says it
    found = judged(odd, "dsv4-dspark-tp8", "topk=", "sliding_window=448")  # 512 wide, as if
    assert found.outcome is not Outcome.FINE
    assert [f.answer for f in found.refused] == ["unknown"]


@pytest.mark.real
def test_a_flashinfer_without_the_kernels_says_so(trees: Callable[[str], Trees]) -> None:
    with pytest.raises(CapabilityError, match="no sparse-MLA kernels"):
        trees("eldritch@0.6.13")


@pytest.mark.real
@pytest.mark.parametrize("word", [*LINES, f"infernal@{BEFORE}"])
def test_the_page_says_what_is_so(trees: Callable[[str], Trees], word: str) -> None:
    page = (ROOT / "docs" / "preflight.md").read_text()
    table = page.partition(START)[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    heads, _, *rows = [row.strip("| ").split(" | ") for row in table]
    names = [row[0].partition(":")[0] for row in rows]
    assert names == find_recipes(FOLDER)
    for name, row in zip(names, rows, strict=True):
        assert row[heads.index(word)] == judged(trees(word), name).outcome, name


# --- the command --------------------------------------------------------------------------


def invoke(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capfd.readouterr()
    code = main(["--patches", str(ROOT / "patches"), *arguments])
    out, err = capfd.readouterr()
    return code, out, err


def test_shapes_prints_the_derivation(capfd: pytest.CaptureFixture[str]) -> None:
    code, out, _ = invoke(capfd, "shapes", "dsv4-dspark-tp8")
    assert code == 0
    assert "16 requests x (1 + 5 drafts) = 96 rows > 64: the prefill table" in out
    assert "target\tsparse\tprefill\tdsv4\t8\t512\t64\t-\t66 " in out
    code, out, _ = invoke(capfd, "shapes", "dsv4-dspark-tp8", "--set", "max_num_seqs=10", "--json")
    assert code == 0
    document = json.loads(out)
    assert {each["shape"]["phase"] for each in document["asked"]} == {"decode"}
    assert document["memory"]["parts"][0]["formula"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("shapes", "dsv4"), 21, "there is no recipe"),
        (("shapes", "glm-tp8", "--set", "tpp=4"), 21, "did you mean 'tp'?"),
        (("shapes", "glm-tp8", "--recipes", "nowhere"), 21, "no folder nowhere"),
        (("preflight", "infernal"), 2, "name recipes, or say --all"),
        (("preflight", "infernal", "glm-tp8", "--all"), 2, "name recipes, or say --all"),
        (("preflight", "copper", "glm-tp8"), 3, "there is no line 'copper'"),
        (("preflight", "infernal", "glm-tp8", "--out", "x.pdf"), 2, "ends in none of"),
        (("preflight", "infernal", "glm-tp8", "--out", "no/x.md"), 2, "no folder"),
    ],
)
def test_what_is_asked_wrongly(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int, says: str
) -> None:
    got, _, err = invoke(capfd, *arguments)
    assert (got, says in err) == (code, True), err


@pytest.mark.real
def test_exit_codes_tell_fine_from_unsupported(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = invoke(capfd, "preflight", "infernal", "dsv4-dspark-tp8", "--json")
    assert code == 0, err
    assert json.loads(out)["found"][0]["outcome"] == "fine"
    svg, page = tmp_path / "m.svg", tmp_path / "m.md"
    arguments = ("infernal", "dsv4-dspark-tp8", "dsv4-dspark-mtp0-tp8", "--flashinfer", BEFORE)
    outs = ("--out", str(svg), "--out", str(page), "--json")
    code, out, _ = invoke(capfd, "preflight", *arguments, *outs)
    assert code == 22
    document = json.loads(out)
    assert [each["outcome"] for each in document["found"]] == ["unsupported", "fine"]
    assert document["error"]["kind"] == "unsupported"
    assert svg.read_bytes().startswith(b"<svg ")
    assert "| unsupported |" in page.read_text()
    code, out, _ = invoke(capfd, "preflight", *arguments)
    assert code == 22
    assert len(out.splitlines()) == 2


@pytest.mark.real
def test_sources_that_arent_understood_have_an_exit_code_of_their_own(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(tree: StoredTree, *, version: str) -> Capability:
        del tree
        return Capability(None, version=version, trouble="written anew")

    monkeypatch.setattr("overlay.kernels.preflight.read_capability", fake)
    code, out, err = invoke(capfd, "preflight", "infernal", "glm-tp8-dcp4")
    assert code == 23
    assert "written anew" in out
    assert "isn't known" in err
