"""Every way vLLM merges partial results reads the LSE in the declared base."""

import math
from types import SimpleNamespace
from unittest import mock

import layers
import pins
import pytest
import ranks
import torch
from device import DEVICE


def merge(config, comm, out, lse, base_on_e):
    """As the layer merges one row of a request of four tokens."""
    if pins.dcp_merge is None:
        from vllm.distributed.parallel_state import get_dcp_group
        from vllm.v1.attention.ops.common import cp_lse_ag_out_rs
        from vllm.v1.attention.ops.dcp_alltoall import dcp_a2a_lse_reduce

        function = {"ag_rs": cp_lse_ag_out_rs, "a2a": dcp_a2a_lse_reduce}[comm]
        return function(out, lse, get_dcp_group(), is_lse_base_on_e=base_on_e)
    manager = pins.dcp_merge.MLADCPManager(
        vllm_config=config,
        device=DEVICE,
        num_heads=8,
        query_head_dim=576,
        output_head_dim=512,
        query_dtype=torch.bfloat16,
        output_dtype=torch.bfloat16,
        padded_num_heads=None,
        is_lse_base_on_e=base_on_e,
        use_pcp=False,
    )
    return manager.combine(
        out,
        lse,
        seq_lens=torch.tensor([4], dtype=torch.int32, device=DEVICE),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
    )


def merge_on_rank(rank, world, rendezvous, comm, base_on_e):
    """Rank 0 holds three quarters of the weight and says 1, the other says 0."""
    config = layers.make_config(world, world, comm)
    with ranks.model_parallel(rank, world, world, rendezvous, config):
        impl = layers.make_impl(num_heads=8)
        base_on_e = impl.lse_base_on_e if base_on_e is None else base_on_e
        out = torch.full((1, 8 * world, 512), 1.0 - rank).bfloat16()
        lse = torch.full((1, 8 * world), math.log2(3.0 if rank == 0 else 1.0))
        merged = merge(config, comm, out.to(DEVICE), lse.to(DEVICE), base_on_e)
    assert merged.shape == (1, 8, 512)
    return float(merged.min()), float(merged.max())


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_shares_of_three_to_one_merge_to_three_quarters(comm):
    for low, high in ranks.run(merge_on_rank, 2, comm, None):
        assert low == high == pytest.approx(0.750, abs=0.003)


@pytest.mark.parametrize("comm", ["ag_rs", "a2a"])
def test_the_wrong_base_would_show(comm):
    for low, _ in ranks.run(merge_on_rank, 2, comm, True):
        assert low == pytest.approx(0.830, abs=0.003)


class FakeWorkspace:
    """Symmetric buffers of four rows, which refuse a larger batch as the kernels do."""

    max_num_tokens = 4

    def __init__(self):
        self.base_on_e = None

    def lse_reduce(self, out, lse, is_lse_base_on_e, seq_lens, query_start_loc):
        assert out.shape[0] <= 4, "token count exceeds symmetric buffer capacity"
        self.base_on_e = is_lse_base_on_e
        return "direct"

    def gather(self, query):
        assert query.shape[0] <= 4, "token count exceeds symmetric buffer capacity"
        return "direct"


@pytest.fixture
def manager():
    if pins.dcp_merge is None:
        pytest.skip("vLLM 0.26 has no direct workspaces")
    workspace = FakeWorkspace()
    group = SimpleNamespace(world_size=2, all_gather=lambda query, dim: "group")
    with mock.patch.multiple(
        pins.dcp_merge,
        get_dcp_group=lambda: group,
        get_dcp_workspace_max_num_tokens=lambda config: 4,
        get_direct_dcp_a2a_workspace=lambda *args: workspace,
        get_direct_dcp_q_gather_workspace=lambda *args: workspace,
        dcp_a2a_lse_reduce=lambda *args, **kwargs: ("group", kwargs),
    ):
        manager = pins.dcp_merge.MLADCPManager(
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(num_ubatches=1, dcp_comm_backend="a2a"),
                kernel_config=SimpleNamespace(enable_jit_warmup=False),
            ),
            device=torch.device("cpu"),
            num_heads=8,
            query_head_dim=576,
            output_head_dim=512,
            query_dtype=torch.bfloat16,
            output_dtype=torch.bfloat16,
            padded_num_heads=None,
            is_lse_base_on_e=False,
            use_pcp=False,
        )
        yield SimpleNamespace(manager=manager, workspace=workspace)


def combine(manager, rows):
    return manager.combine(
        torch.empty(rows, 16, 512),
        torch.empty(rows, 16),
        seq_lens=torch.tensor([rows]),
        query_start_loc=torch.tensor([0, rows]),
    )


def test_batches_that_fit_use_the_direct_buffers(manager):
    assert combine(manager.manager, 4) == "direct"
    assert manager.workspace.base_on_e is False
    assert manager.manager.query_gather(torch.empty(4, 8, 576)) == "direct"


def test_larger_batches_use_the_group(manager):
    name, kwargs = combine(manager.manager, 5)
    assert name == "group"
    assert kwargs["is_lse_base_on_e"] is False
    assert kwargs["seq_lens"].tolist() == [5]
    assert manager.manager.query_gather(torch.empty(5, 8, 576)) == "group"
