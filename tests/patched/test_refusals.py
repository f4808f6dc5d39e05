"""DeepSeek-V4 with decode context parallelism: which check of vLLM's refuses it, and when.

No configuration check does, on any of the pins: ``VllmConfig`` takes the model with DCP. The
first to refuse is ``SlidingWindowSpec.max_memory_usage_bytes`` (vllm/v1/kv_cache_interface.py),
as the engine core plans the KV cache (``get_kv_cache_configs``): every layer of the model has a
sliding window, which can't be sharded. The weights are loaded by then, but no warmup, no
autotuning and none of their collectives has begun, so no rank is left waiting. An engine with
its hybrid KV cache manager switched off plans full attention, and comes to the second check: the
constructor of the indexer's metadata builder (vllm/v1/attention/backends/mla/indexer.py), when
the KV cache is set up on each rank.
"""

import inspect
import json
import traceback
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import vllm.v1.attention.backends.mla.indexer as indexer
from device import DEVICE
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.models import registry

try:  # 0.33
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    from vllm.v1.core import kv_cache_utils as planning

WORLD = 8
RATIOS = [0, 0, 4, 128]  # of KV compression, by layer; 0 is a sliding window alone

# What DeepSeek-V4-Flash's own file says, with fewer layers.
HF_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": len(RATIOS),
    "compress_ratios": RATIOS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "sliding_window": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 65536,
    "vocab_size": 129280,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model's configuration as vLLM reads it; from this folder, for there is no network."""
    folder = tmp_path_factory.mktemp("deepseek-v4")
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    try:
        import vllm.models.deepseek_v4.attention  # noqa: F401
    except ImportError as error:
        pytest.skip(f"vLLM's DeepSeek-V4 model can't be imported here: {error}")
    # It would look at the model's class in a process of its own, which takes seconds.
    with mock.patch.object(registry, "_run_in_subprocess", lambda look: look()):
        config = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, max_model_len=8192, dtype="bfloat16"
        )
    assert config.architectures == ["DeepseekV4ForCausalLM"]
    assert config.use_mla
    return config


def make_config(model, dcp: int, interleave: int = 1) -> VllmConfig:
    """The whole configuration, at TP 8: it isn't refused."""
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig(device=DEVICE.type),
        parallel_config=ParallelConfig(
            tensor_parallel_size=WORLD,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=interleave,
            distributed_executor_backend="mp",
        ),
        cache_config=CacheConfig(block_size=256, cache_dtype="fp8_ds_mla"),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=2048,
            max_num_seqs=32,
            max_model_len=8192,
            is_encoder_decoder=False,
        ),
        compilation_config=CompilationConfig(pass_config={"fuse_allreduce_rms": False}),
    )
    # As on a CUDA device; other platforms do without.
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


def cache_layers(config: VllmConfig) -> dict:
    """What of the model holds KV: vLLM's own modules, without the rest of it."""
    from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
    from vllm.models.deepseek_v4.compressor import CompressorStateCache
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    cache, layers = config.cache_config, {}
    for index, ratio in enumerate(RATIOS):
        name = f"layers.{index}"
        layers[f"{name}.swa"] = DeepseekV4SWACache(
            head_dim=512, window_size=128, dtype=torch.uint8, prefix=f"{name}.swa",
            cache_config=cache,
        )  # fmt: skip
        if ratio == 0:
            continue
        state = CompressorStateCache(
            state_dim=2048 if ratio == 4 else 1024, dtype=torch.float32, compress_ratio=ratio,
            prefix=f"{name}.state",
        )  # fmt: skip
        layers[f"{name}.state"] = state
        # Its constructor makes CUDA events; the cache is described by these.
        layer = SimpleNamespace(
            compress_ratio=ratio, head_dim=512, kv_cache_dtype="fp8_ds_mla",
            kv_cache_torch_dtype=torch.uint8,
        )  # fmt: skip
        layer.get_kv_cache_spec = DeepseekV4Attention.get_kv_cache_spec.__get__(layer)
        layers[name] = layer
        if ratio == 4:
            layers[f"{name}.indexer"] = DeepseekV4IndexerCache(
                head_dim=132, dtype=torch.uint8, prefix=f"{name}.indexer", cache_config=cache,
                compress_ratio=ratio,
            )  # fmt: skip
    return layers


def specs(config: VllmConfig) -> dict:
    with set_current_vllm_config(config):
        return {
            name: layer.get_kv_cache_spec(config) for name, layer in cache_layers(config).items()
        }


def plan(config: VllmConfig) -> list:
    """What the engine core does with the ranks' layers: a KV cache configuration a rank."""
    mine = specs(config)
    of_ranks, memory = [mine] * WORLD, [2**33] * WORLD
    if not hasattr(planning, "get_global_kv_cache_groups"):
        return planning.get_kv_cache_configs(config, of_ranks, memory)
    layouts = indexer.DeepseekV4IndexerBackend.supported_kv_cache_layouts()
    config.cache_config.kv_cache_layout = layouts[0].name
    groups = planning.get_global_kv_cache_groups(config, of_ranks)
    return planning.get_kv_cache_configs(config, of_ranks, memory, groups)


def test_without_dcp_it_is_planned(model):
    assert len(plan(make_config(model, 1))) == WORLD


@pytest.mark.parametrize("interleave", [1, 4, 256])
@pytest.mark.parametrize("dcp", [2, 8])
def test_planning_the_kv_cache_refuses(model, dcp, interleave):
    config = make_config(model, dcp, interleave)
    with pytest.raises(AssertionError, match=r"DCP not support sliding window\.") as caught:
        plan(config)
    check = traceback.extract_tb(caught.tb)[-1]
    assert check.filename.endswith("vllm/v1/kv_cache_interface.py")
    assert check.name == "max_memory_usage_bytes"


@pytest.mark.parametrize("dcp", [1, 8])
def test_the_indexer_refuses(model, dcp):
    config = make_config(model, dcp)
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    spec = specs(config)["layers.2.indexer"]
    builder = indexer.DeepseekV4IndexerBackend.get_builder_cls()
    takes_width = "block_table_width" in inspect.signature(builder).parameters
    width = {"block_table_width": 8} if takes_width else {}
    group = SimpleNamespace(world_size=dcp, rank_in_group=0)
    refused = pytest.raises(
        NotImplementedError,
        match=r"DCP (is not supported )?with sparse indexer KV compression \(compress_ratio=4\)",
    )
    with (
        set_current_vllm_config(config),
        mock.patch.object(indexer, "get_dcp_group", return_value=group),
        mock.patch.object(indexer, "num_compute_units", return_value=1),
        refused if dcp > 1 else nullcontext(),
    ):
        builder(spec, ["layers.2.indexer"], config, DEVICE, **width)
