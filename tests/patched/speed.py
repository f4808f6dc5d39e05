"""Measure what DCP adds to the patched backend's step, on a CUDA device: ``speed.py OUT.json``.

Index mapping, masking and LSE handling of :class:`FlashInferMLASparseSM120Impl`, around an
attention kernel that does nothing, for DCP 2, 4, 8 and 1 to 512 tokens of 2048 ids. Beside it:

- upstream's own way with the results of its other sparse backend (the trtllm-gen one), which
  maps indices by the same function and finds empty rows by comparing all ids; its lines are
  looked for in the installed source before they are measured;
- the memory floor: bytes that have to move, at this card's measured copy bandwidth.

Times are medians over replays of a CUDA graph of many steps that go round several sets of
buffers, larger together than the cache where a step's data are large at all. Launches are the
kernels (and fills) of one step outside a graph, as the profiler sees them. A script, not a test.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import device  # before Triton and vLLM, which read the environment
import torch
import vllm.utils.flashinfer as vllm_flashinfer
from device import DEVICE
from layers import make_config, make_impl
from vllm.config import set_current_vllm_config
from vllm.v1.attention.backends.mla import flashinfer_mla_sparse, sparse_utils
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import FlashInferMLASparseMetadata

TOPK = 2048
HEADS = 8  # a rank's, of 64 at TP 8
LATENT = 512
WORLDS = (2, 4, 8)
TOKENS = (1, 4, 16, 64, 128, 256, 512)
REPLAYS = 60
SPILL = 150 << 20  # bytes; more than the cache of any card that this runs on

# How upstream treats (out, lse) of its other sparse backend under DCP
UPSTREAM_LINES = (
    "== -1).all(dim=-1)",
    "out.masked_fill_(empty_rows.view(-1, 1, 1), 0.0)",
    'lse.masked_fill_(empty_rows.view(-1, 1), float("-inf"))',
)


def upstream_lse(ids: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    empty_rows = (ids == -1).all(dim=-1)
    out.masked_fill_(empty_rows.view(-1, 1, 1), 0.0)
    lse.masked_fill_(empty_rows.view(-1, 1), float("-inf"))


class Inputs:
    """Buffers of one step: ids of one request a token, spread over the ranks."""

    def __init__(self, tokens: int, world: int, seed: int) -> None:
        gen = torch.Generator(device=DEVICE).manual_seed(seed)
        context = 32768 * world
        self.ids = torch.randint(
            0, context, (tokens, TOPK), generator=gen, device=DEVICE, dtype=torch.int32
        )
        self.table = torch.randint(
            0, 4096, (tokens, context // 64), generator=gen, device=DEVICE
        ).int()
        self.requests = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
        self.q = torch.zeros(tokens, HEADS * world, 576, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.zeros(tokens, HEADS * world, LATENT, dtype=torch.bfloat16, device=DEVICE)
        self.lse = torch.zeros(tokens, HEADS * world, device=DEVICE)
        self.counts = torch.full((tokens,), TOPK // world, device=DEVICE, dtype=torch.int32)
        self.slots = self.ids.clone()
        self.metadata = FlashInferMLASparseMetadata(
            num_reqs=tokens,
            max_query_len=1,
            max_seq_len=context,
            num_actual_tokens=tokens,
            query_start_loc=torch.arange(tokens + 1, device=DEVICE, dtype=torch.int32),
            slot_mapping=torch.full((tokens,), -1, device=DEVICE),
            block_table=self.table,
            req_id_per_token=self.requests,
            seq_lens=torch.full((tokens,), context, device=DEVICE, dtype=torch.int32),
            num_decodes=tokens,
            num_prefills=0,
            num_decode_tokens=tokens,
            topk_tokens=TOPK,
        )

    def bytes_moved(self, world: int) -> int:
        """Ids in, slots out and counts; block-table entries of the ids that are this rank's."""
        ids = self.ids.numel() * 4
        return 2 * ids + self.ids.numel() // world * 4 + 2 * self.counts.numel() * 4


def index(inputs: Inputs, world: int) -> Any:
    return sparse_utils.triton_filter_and_convert_dcp_index(
        inputs.requests,
        inputs.table,
        inputs.ids,
        dcp_size=world,
        dcp_rank=world - 1,
        BLOCK_SIZE=64,
        NUM_TOPK_TOKENS=TOPK,
        return_valid_counts=True,
    )


def steps(impl: Any, cache: torch.Tensor, world: int) -> dict[str, Callable[[Inputs], object]]:
    """What is measured, by name; each takes the buffers of one step."""

    def forward(inputs: Inputs, size: int) -> object:
        impl.dcp_world_size, impl.dcp_rank = size, size - 1
        impl.need_to_return_lse_for_decode = size > 1
        impl.topk_indices_buffer = inputs.ids
        return impl.forward_mqa(inputs.q, cache, inputs.metadata, None)

    def upstream(inputs: Inputs) -> object:
        slots, _ = index(inputs, world)
        return upstream_lse(slots, inputs.out, inputs.lse)

    found: dict[str, Callable[[Inputs], object]] = {
        "one_rank": lambda inputs: forward(inputs, 1),
        "patched": lambda inputs: forward(inputs, world),
        "patched_index": lambda inputs: index(inputs, world),
        "upstream": upstream,
        "upstream_lse": lambda inputs: upstream_lse(inputs.slots, inputs.out, inputs.lse),
    }
    mask = getattr(sparse_utils, "mask_empty_rows_", None)
    if mask is not None:  # not on a pin whose kernel answers -inf by itself
        found["patched_mask"] = lambda inputs: mask(inputs.out, inputs.lse, inputs.counts)
    return found


def launches(step: Callable[[Inputs], object], inputs: Inputs) -> list[str]:
    """Names of the kernels and fills of one step."""
    step(inputs)
    torch.cuda.synchronize()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(inputs)
        torch.cuda.synchronize()
    return [
        event.name[:80]
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Sync" not in event.name
    ]


def microseconds(step: Callable[[Inputs], object], sets: list[Inputs]) -> float:
    """Median time of a step inside a graph that goes through all sets of buffers."""
    rounds = max(1, 32 // len(sets))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            step(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for inputs in sets:
                step(inputs)
    times = []
    for replay in range(REPLAYS + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= 5:
            times.append(start.elapsed_time(end) * 1000 / (rounds * len(sets)))
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes a second of a copy within the card, read and written."""
    source = torch.zeros(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return 2 * source.numel() / statistics.median(times)


def measure(tokens: int, world: int, bandwidth: float) -> dict[str, Any]:
    first = Inputs(tokens, world, 0)
    size = first.ids.numel() * 8 + first.out.numel() * 2
    sets = [first, *(Inputs(tokens, world, seed) for seed in range(1, min(32, SPILL // size + 2)))]
    cache = torch.zeros(8, 64, 656, dtype=torch.uint8, device=DEVICE)
    config = make_config(topk=TOPK, heads=HEADS)
    with set_current_vllm_config(config), _no_kernel():
        impl = make_impl(num_heads=HEADS, topk_indices_buffer=first.ids)
        found: dict[str, Any] = {"tokens": tokens, "dcp": world, "heads": HEADS * world}
        found["launches"], found["us"] = {}, {}
        for name, step in steps(impl, cache, world).items():
            found["launches"][name] = launches(step, first)
            found["us"][name] = round(microseconds(step, sets), 2)
    moved = first.bytes_moved(world)
    found["us"]["memory_floor"] = round(moved / bandwidth * 1e6, 2)
    found["bytes"] = moved
    found["added_launches"] = len(found["launches"]["patched"]) - len(found["launches"]["one_rank"])
    found["added_us"] = round(found["us"]["patched"] - found["us"]["one_rank"], 2)
    return found


def _no_kernel() -> Any:
    """FlashInfer's kernel replaced by nothing at all; buffers keep what they hold."""
    return mock.patch.multiple(
        vllm_flashinfer,
        flashinfer_trtllm_batch_decode_with_kv_cache_mla=lambda **call: call["out"],
        has_flashinfer_sparse_mla_sm120=lambda: True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options = parser.parse_args()
    if not device.ON_CUDA:
        sys.exit("error: needs a CUDA device and OVERLAY_DEVICE=cuda")
    source = Path(flashinfer_mla_sparse.__file__).read_text()
    missing = [line for line in UPSTREAM_LINES if line not in source]
    if missing:
        sys.exit(f"error: upstream's backend has no longer: {missing}")
    bandwidth = copy_bandwidth()
    document = {
        "device": device.describe(),
        "torch": torch.__version__,
        "topk": TOPK,
        "copy_bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "rows": [
            measure(tokens, world, bandwidth) for world in WORLDS for tokens in options.tokens
        ],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["rows"]:
        us = row["us"]
        sys.stdout.write(
            f"dcp {row['dcp']} tokens {row['tokens']:4}: {row['added_launches']:+} launches, "
            f"{row['added_us']:+} us; patched {us['patched']}, upstream {us['upstream']}, "
            f"floor {us['memory_floor']} us\n"
        )


if __name__ == "__main__":
    main()
