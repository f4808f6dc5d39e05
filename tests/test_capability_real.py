"""What the reader says of FlashInfer's real sources, against those sources themselves, run."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from overlay.errors import CapabilityError
from overlay.kernels.capability import Answer, Capability, Phase, Shape, read_capability
from overlay.lines.line import read_line
from overlay.report import Reporter
from overlay.sources.releases import known_pins, pin_release, with_pin
from overlay.sources.source import Sources
from overlay.trees.pipeline import apply_line
from overlay.trees.store import StoredTree, cache_folder
from tests.support.hostcode import MODELS, HostResolver, HostTables, unpack
from tests.support.modulecode import ModuleResolver, toolkit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.real

PATCHES = Path(__file__).parent.parent / "patches"
RELEASES = (
    "0.6.14", "0.6.15", "0.6.15.post1", "0.6.16", "0.6.16.post1", "0.6.16.post2", "0.6.16.post3",
    "0.6.16.post4", "0.6.17", "0.6.18", "0.6.18.post1", "0.7.0", "0.7.1", "0.7.2.post1", "0.7.4",
)  # fmt: skip
# One of each form that the sources have had, and what the lines make of them
TABLES = ("0.6.14", "0.6.18.post1", "0.7.0", "eldritch", "infernal")
RESOLVERS = ("0.7.1", "0.7.4", "next")

HEADS = (1, 2, 7, 8, 12, 16, 17, 24, 32, 48, 64, 96, 128, 129)
TOPK = (64, 100, 128, 192, 256, 512, 576, 1024, 2048, 4096)
PAGES = (1, 16, 32, 64, 128, 256)
EXTRAS = ((0, 0), (64, 64), (100, 64), (512, 2), (512, 32))
ROWS = {Phase.DECODE: (64, 1, 65), Phase.PREFILL: (96, 1, 64, 65)}


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(cache=cache_folder(), report=Reporter(quiet=True))


def tree_of(sources: Sources, name: str) -> tuple[str, str]:
    """Tree id and version: of a line as it is patched, or of a bare release."""
    if not name[0].isdigit():
        line = read_line(PATCHES, name)
        patched = apply_line(line, sources, upstreams=("flashinfer",))["flashinfer"]
        assert not patched.tree.bad
        return patched.tree.tree, line.pin("flashinfer").version
    line = read_line(PATCHES, "infernal")
    pin = pin_release(sources, "flashinfer", name, known=known_pins(PATCHES, "flashinfer"))
    base = sources.base(with_pin(line, "flashinfer", pin), "flashinfer", {})
    return base.commit.tree, pin.version


def read(sources: Sources, name: str) -> Capability:
    tree, version = tree_of(sources, name)
    return read_capability(StoredTree(sources.store("flashinfer").reader, tree), version=version)


def grid(pages: Sequence[int] = PAGES) -> Iterator[Shape]:
    """All sizes with one another at one count of rows, and heads with top-k at the others."""
    for model, phase in product(MODELS, Phase):
        usual, *others = ROWS[phase]
        for heads, topk, page, (extra_topk, extra_page) in product(HEADS, TOPK, pages, EXTRAS):
            yield Shape(
                phase=phase, model=model, heads=heads, topk=topk, page=page,
                extra_topk=extra_topk, extra_page=extra_page, rows=usual,
            )  # fmt: skip
        for heads, topk, rows in product(HEADS, TOPK, others):
            yield Shape(phase=phase, model=model, heads=heads, topk=topk, page=64, rows=rows)


def compare(capability: Capability, truth: list[bool], shapes: list[Shape]) -> None:
    wrong = []
    for shape, served in zip(shapes, truth, strict=True):
        told = capability.ask(shape)
        if told.answer is not (Answer.SUPPORTED if served else Answer.UNSUPPORTED):
            wrong.append((shape, served, told))
    assert not wrong, f"{len(wrong)} of {len(shapes)}: {wrong[:3]}"
    # A truth that is the same everywhere would prove nothing
    for model, phase in product(MODELS, Phase):
        said = {
            t for s, t in zip(shapes, truth, strict=True) if (s.model, s.phase) == (model, phase)
        }
        assert said == {True, False}, (model, phase)


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_tables_are_what_the_compiled_dispatch_does(
    name: str, sources: Sources, tmp_path: Path
) -> None:
    unpack(sources.store("flashinfer"), tree_of(sources, name)[0], tmp_path)
    shapes = list(grid())
    compare(read(sources, name), HostTables(tmp_path).ask(shapes), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESOLVERS)
def test_resolver_is_what_its_compiled_self_says(
    name: str, sources: Sources, tmp_path: Path
) -> None:
    unpack(sources.store("flashinfer"), tree_of(sources, name)[0], tmp_path)
    shapes = list(grid(PAGES[::3]))  # it takes any page alike, and ten times as long to read
    compare(read(sources, name), HostResolver(tmp_path).ask(shapes), shapes)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESOLVERS)
def test_resolver_is_what_the_module_for_sm_120a_says(
    name: str, sources: Sources, tmp_path: Path
) -> None:
    cuda = toolkit()
    if cuda is None:
        pytest.skip("cuda-toolkit[nvcc,cccl] and apache-tvm-ffi aren't installed")
    unpack(sources.store("flashinfer"), tree_of(sources, name)[0], tmp_path)
    shapes = list(grid(PAGES[::3]))
    compare(read(sources, name), ModuleResolver(tmp_path, cuda).ask(shapes), shapes)


@pytest.mark.parametrize("version", RELEASES)
def test_every_final_release_is_understood(version: str, sources: Sources) -> None:
    found = read(sources, version)
    assert found.trouble == ""
    assert found.decode_max_rows == 64
    assert {"dsv3_2", "dsv4", "glm_nsa"} <= set(found.models)
    for model, (phase, rows) in product(found.models, ((Phase.DECODE, 64), (Phase.PREFILL, 96))):
        for heads, topk in ((8, 512), (16, 2048), (24, 1024)):
            told = found.ask(
                Shape(phase=phase, model=model, heads=heads, topk=topk, page=64, rows=rows)
            )
            assert told.answer is not Answer.UNKNOWN, told
            assert told.where


def test_before_there_were_kernels(sources: Sources) -> None:
    with pytest.raises(CapabilityError, match=r"FlashInfer 0\.6\.13 has no sparse-MLA kernels"):
        read(sources, "0.6.13")


@pytest.mark.parametrize(
    ("name", "answer"),
    [("0.6.16.post3", Answer.UNSUPPORTED), ("0.6.18", Answer.SUPPORTED),
     ("infernal", Answer.SUPPORTED), ("0.6.14", Answer.UNSUPPORTED),
     ("eldritch", Answer.SUPPORTED)],
)  # fmt: skip
def test_the_shape_that_died_in_graph_capture(name: str, answer: Answer, sources: Sources) -> None:
    """8 heads with 512 ids and 16 * (1 + 5) rows, which is above the limit of decode."""
    shape = Shape(phase=Phase.PREFILL, model="dsv4", heads=8, topk=512, page=64, rows=96)
    told = read(sources, name).ask(shape)
    assert told.answer is answer, told
    assert told.where.startswith("csrc/sparse_mla_sm120_prefill.cu:")


def test_pages_that_no_check_refuses_are_refused_all_the_same(sources: Sources) -> None:
    """0.6's prefill never looks at the page size; its kernels are for pages of 64."""
    shape = Shape(phase=Phase.PREFILL, model="dsv4", heads=16, topk=512, page=256, rows=96)
    bare, patched = (read(sources, name).ask(shape) for name in ("0.6.18", "infernal"))
    assert bare.answer is patched.answer is Answer.UNSUPPORTED
    assert "no check, but launch_prefill_mg" in bare.why
    assert "page_block_size != kPageBlockSize" in patched.why
