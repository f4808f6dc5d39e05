"""vLLM's own MLA attention layer over a sharded, packed cache, on one rank.

Everything but two things is vLLM's: the FlashInfer kernel (see ``launcher``) and
the top-k ids, which the sparse indexer would merge over the ranks with a kernel
that runs on CUDA only.
"""

import contextlib
import sys
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import device
import launcher
import numpy as np
import pins
import reference
import torch
import vllm.utils.flashinfer as vllm_flashinfer
from device import DEVICE
from ranks import meet, model_parallel
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse import (
    FlashInferMLASparseMetadataBuilder,
    FlashInferMLASparseSM120Backend,
)
from vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120 import (
    FlashInferMLASparseSM120Impl,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec

# Pinning host memory asks for an accelerator. Modules hold a copy of the flag.
for module in [m for n, m in sys.modules.items() if n.startswith("vllm.")]:
    if "PIN_MEMORY" in vars(module):
        module.PIN_MEMORY = torch.cuda.is_available()

NOPE = 32
V = 32
SCALE = 0.05
TOPK = 128  # the smallest that FlashInfer has a decode kernel for
PREFILL_TOPK = 2048  # the only one that it has a prefill kernel for


@dataclass(frozen=True)
class Batch:
    """Requests of one step, decodes first, and what each row attends to.

    ``lengths`` counts a request's tokens with those of this step. ``topk`` has one
    list of global positions a row, which may be empty.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    topk: tuple[tuple[int, ...], ...]
    decode_threshold: int = 1
    padded_rows: int = 0

    @property
    def rows(self) -> int:
        return sum(self.queries)


def random_batch(
    lengths: tuple[int, ...],
    queries: tuple[int, ...],
    seed: int = 0,
    most: int = TOPK,
    **kwargs: Any,
) -> Batch:
    """Causal top-k at random: row ``i`` sees positions up to its own, which it attends to."""
    rng = np.random.default_rng(seed)
    topk = []
    for length, query in zip(lengths, queries, strict=True):
        for i in range(query):
            seen = length - query + i + 1
            ids = rng.permutation(seen)[: min(most, seen)]
            if seen > 0 and seen - 1 not in ids:
                ids[0] = seen - 1
            topk.append(tuple(int(g) for g in ids))
    return Batch(lengths, queries, tuple(topk), **kwargs)


@dataclass
class Problem:
    """A batch with its data, the same on every rank."""

    batch: Batch
    heads: int
    block: int = 64
    interleave: int = 1
    gap: int = 0  # rows of other layers between two blocks of the cache
    replicated: bool = False  # each rank projects the queries of all heads itself
    topk: int = TOPK
    seed: int = 0
    kv: list[torch.Tensor] = field(init=False)
    q: torch.Tensor = field(init=False)
    w_uk: torch.Tensor = field(init=False)
    w_uv: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        randn = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
        self.kv = [reference.pack(randn(n, 576)) for n in self.batch.lengths]
        self.q = randn(self.batch.rows, self.heads, NOPE + 64).bfloat16()
        self.w_uk = (randn(self.heads, NOPE, 512) / 6).bfloat16()
        self.w_uv = (randn(self.heads, V, 512) / 20).bfloat16()

    def tables(self, world: int) -> list[list[int]]:
        """Block ids a request, at random among twice as many; 0 is vLLM's null block."""
        span = self.block * world
        counts = [-(-n // span) for n in self.batch.lengths]
        ids = np.random.default_rng(self.seed).permutation(2 * sum(counts)) + 1
        ends = np.cumsum(counts)
        return [ids[e - c : e].tolist() for c, e in zip(counts, ends, strict=True)]

    def expected(self) -> np.ndarray:
        """Float64 attention over the whole requests: ``[rows, heads * V]``."""
        out, row = [], 0
        for packed, query in zip(self.kv, self.batch.queries, strict=True):
            kv = reference.unpack(packed)
            for _ in range(query):
                q = self.q[row].double()
                latent = torch.einsum("hp,hpl->hl", q[:, :NOPE], self.w_uk.double())
                q = torch.cat([latent, q[:, NOPE:]], dim=-1)
                ids = torch.tensor(self.batch.topk[row], dtype=torch.long)
                attended, _ = reference.attend(q, kv[ids], SCALE)
                value = torch.einsum("hl,hvl->hv", attended, self.w_uv.double())
                out.append(value.flatten())
                row += 1
        return torch.stack(out).numpy()


def make_config(
    tp: int = 1,
    dcp: int = 1,
    comm: str = "ag_rs",
    interleave: int = 1,
    model_type: str = "glm_moe_dsa",
    topk: int = TOPK,
    heads: int = 64,
    block: int = 64,
) -> VllmConfig:
    """A config of the sizes given, with just enough of a model in it."""
    parallel = ParallelConfig(
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        dcp_comm_backend=comm,
        cp_kv_cache_interleave_size=interleave,
        # Said, or vLLM would ask for a card a rank (see device.collectives).
        distributed_executor_backend="mp" if tp > 1 else None,
    )
    config = VllmConfig(
        device_config=DeviceConfig(device=DEVICE.type),
        parallel_config=parallel,
        cache_config=CacheConfig(block_size=block, cache_dtype="fp8_ds_mla"),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=2048,
            max_num_seqs=32,
            max_model_len=8192,
            is_encoder_decoder=False,
        ),
        # That pass asks for a model's sizes, and for vLLM's compiled modules.
        compilation_config=CompilationConfig(pass_config={"fuse_allreduce_rms": False}),
    )
    text = SimpleNamespace(
        model_type=model_type,
        index_topk=topk,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=64,
        v_head_dim=V,
    )
    config.model_config = SimpleNamespace(
        hf_config=text,
        hf_text_config=text,
        is_moe=False,
        dtype=torch.bfloat16,
        max_model_len=8192,
        model_arch_config=SimpleNamespace(total_num_attention_heads=heads),
        get_num_attention_heads=lambda parallel: heads // tp,
    )
    return config


def patched_launcher() -> Any:
    """FlashInfer's kernel replaced by the stand-in, as a context; on SM120 only watched."""
    name = "flashinfer_trtllm_batch_decode_with_kv_cache_mla"
    if device.is_sm120():
        return mock.patch.object(
            vllm_flashinfer, name, launcher.watched(getattr(vllm_flashinfer, name))
        )
    return mock.patch.multiple(
        vllm_flashinfer,
        has_flashinfer_sparse_mla_sm120=lambda: True,
        **{name: launcher.trtllm_batch_decode_with_kv_cache_mla},
    )


def make_impl(num_heads: int = 8, **kwargs: Any) -> FlashInferMLASparseSM120Impl:
    """The implementation by itself, under the current config."""
    arguments: dict[str, Any] = {
        "num_heads": num_heads,
        "head_size": 576,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "fp8_ds_mla",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "topk_indices_buffer": torch.full((256, TOPK), -1, dtype=torch.int32, device=DEVICE),
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": 64,
        "qk_head_dim": NOPE + 64,
        "v_head_dim": V,
        "kv_b_proj": None,
    }
    arguments.update(kwargs)
    with patched_launcher(), pins.built_without_groups():
        return FlashInferMLASparseSM120Impl(**arguments)


class KVBProj(torch.nn.Module):
    """``kv_b_proj`` of one rank: a weight, unquantized."""

    def __init__(self, w_uk: torch.Tensor, w_uv: torch.Tensor) -> None:
        super().__init__()
        weight = torch.cat([w_uk, w_uv], dim=1).flatten(0, 1)  # [h * (P + V), L]
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.quant_method = None
        self.params_dtype = torch.bfloat16


def run_layer(
    problem: Problem, config: VllmConfig, rank: int, world: int, **layer_args: Any
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """This rank's ``[rows, heads / world * V]`` and the kernel calls it made.

    The config must be current. ``world`` is TP and DCP size alike: each rank has
    its own heads, and its own part of the cache.
    """
    batch, block = problem.batch, problem.block
    heads = slice(rank * problem.heads // world, (rank + 1) * problem.heads // world)
    num_heads = problem.heads // world
    # Beyond the batch the buffer holds what earlier steps left there.
    stale = torch.Generator().manual_seed(1)
    topk_buffer = torch.randint(0, 300, (512, problem.topk), dtype=torch.int32, generator=stale)
    topk_buffer[: batch.rows] = -1
    for row, ids in enumerate(batch.topk):
        topk_buffer[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    topk_buffer = topk_buffer.to(DEVICE)

    if problem.replicated:
        layer_args["dcp_q_replicate"] = True
    launcher.calls.clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with patched_launcher(), pins.built_without_groups(), DEVICE:
            layer = MLAAttention(
                num_heads=num_heads,
                scale=SCALE,
                qk_nope_head_dim=NOPE,
                qk_rope_head_dim=64,
                v_head_dim=V,
                q_lora_rank=None,
                kv_lora_rank=512,
                kv_b_proj=KVBProj(problem.w_uk[heads], problem.w_uv[heads]).to(DEVICE),
                cache_config=config.cache_config,
                prefix="model.layers.0.self_attn.attn",
                attn_backend=FlashInferMLASparseSM120Backend,
                use_sparse=True,
                topk_indices_buffer=topk_buffer,
                **layer_args,
            )
    finally:
        torch.set_default_dtype(torch.float32)
    layer.process_weights_after_loading(torch.bfloat16)

    spec = MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.uint8)
    builder = FlashInferMLASparseMetadataBuilder(spec, [layer.layer_name], config, DEVICE)
    builder.reorder_batch_threshold = batch.decode_threshold

    # This rank's shard. Rows that hold no token are garbage, as in a real cache.
    tables = problem.tables(world)
    num_blocks = max(max(t, default=0) for t in tables) + 1
    cache = torch.randint(0, 120, (num_blocks, block + problem.gap, 656), dtype=torch.uint8)
    for packed, table in zip(problem.kv, tables, strict=True):
        for g in range(packed.shape[0]):
            if reference.owner(g, world, problem.interleave) == rank:
                slot = reference.slot(g, table, block, world, problem.interleave)
                cache[divmod(slot, block)] = packed[g]
    width = max(len(t) for t in tables)
    block_table = torch.zeros(len(tables), width, dtype=torch.int32)
    for i, table in enumerate(tables):
        block_table[i, : len(table)] = torch.tensor(table, dtype=torch.int32)

    starts = torch.tensor([0, *np.cumsum(batch.queries)], dtype=torch.int32)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    rows = batch.rows + batch.padded_rows
    common = CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(DEVICE),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(batch.lengths),
        num_actual_tokens=rows,
        max_query_len=max(batch.queries),
        max_seq_len=max(batch.lengths),
        block_table_tensor=block_table.to(DEVICE),
        slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=DEVICE),
    )
    metadata = builder.build(0, common)

    all_q = torch.zeros(rows, problem.heads, NOPE + 64, dtype=torch.bfloat16)
    all_q[: batch.rows] = problem.q
    q = all_q[:, heads].contiguous()
    replicated = {"q_dcp_replicated": all_q.to(DEVICE)} if problem.replicated else {}
    output = torch.full((rows, num_heads * V), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    with patched_launcher(), DEVICE:
        layer.forward_impl(
            q.to(DEVICE),
            torch.zeros(rows, 512, dtype=torch.bfloat16),
            torch.zeros(rows, 1, 64, dtype=torch.bfloat16),
            cache.to(DEVICE)[:, :block],
            metadata,
            output=output,
            **replicated,
        )
    return output.float().cpu().numpy(), list(launcher.calls)


def layers_on_rank(
    rank: int, world: int, rendezvous: str, problems: dict[str, Problem], comm: str
) -> dict[str, tuple[np.ndarray, list[tuple[int, int, bool]]]]:
    """:func:`run_layer` for each problem, in one group while all goes well.

    Gives the output and, of each kernel call, its heads, rows, and whether it was
    given counts. The text of an exception that all ranks raise is the answer of its
    problem alone, and they go on in another group. One that not all raise is raised:
    the others wait in a collective, or at the problem's barrier.
    """
    answers: dict[str, Any] = {}
    with contextlib.ExitStack() as group:
        joined = False
        for index, (name, problem) in enumerate(problems.items()):
            config = make_config(
                world,
                world,
                comm,
                problem.interleave,
                topk=problem.topk,
                heads=problem.heads,
                block=problem.block,
            )
            if not joined:
                group.enter_context(
                    model_parallel(rank, world, world, f"{rendezvous}-{index}", config)
                )
                joined = True
            try:
                with set_current_vllm_config(config):
                    out, calls = run_layer(problem, config, rank, world)
                get_tp_group().barrier()
            except Exception:
                answers[name] = traceback.format_exc()
                if not meet(rank, world, f"{rendezvous}-{index}-failed"):
                    raise
                group.close()
                joined = False
                continue
            answers[name] = (
                out,
                [
                    (c["query"].shape[2], c["query"].shape[0], c["seq_lens"] is not None)
                    for c in calls
                ],
            )
    return answers
