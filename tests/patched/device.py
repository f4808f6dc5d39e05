"""Where the checks run: on a CPU, or with ``OVERLAY_DEVICE=cuda`` on a CUDA device.

Imported before Triton and vLLM, which read the environment that is set here. On a CUDA
device kernels are compiled. The ranks of a group have a card each, and NCCL, where there
are that many; else they share one card, and :func:`collectives` names the one stand-in
that this takes.
"""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

ON_CUDA = os.environ.get("OVERLAY_DEVICE", "cpu") == "cuda"
if ON_CUDA:
    os.environ.pop("TRITON_INTERPRET", None)
    # Ranks are forked from a process that has imported vLLM (see ranks). A process that
    # has asked the driver anything can't pass CUDA on, so both ask elsewhere.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "12.0a")
    # Buffers that ranks write to each other's memory: compiled, and a card each.
    for name in ("A2A", "Q_GATHER", "KV_GATHER"):
        os.environ.setdefault(f"VLLM_USE_DIRECT_DCP_{name}", "0")
else:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
COLLECTIVES = (
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
)


def describe() -> str:
    """The device in words."""
    if not ON_CUDA:
        return "a CPU, kernels interpreted"
    major, minor = torch.cuda.get_device_capability()
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    return f"{count} x {name} (sm_{major}{minor}), kernels compiled"


def is_sm120() -> bool:
    """Whether FlashInfer's own SM120 kernels can run."""
    return ON_CUDA and torch.cuda.get_device_capability()[0] == 12


def take_card(rank: int, world: int) -> tuple[int, str]:
    """Make a rank's card current. Gives the local rank for vLLM, and the backend."""
    if not ON_CUDA:
        return rank, "gloo"
    own = torch.cuda.device_count() >= world
    card = rank if own else 0
    torch.cuda.set_device(card)
    return card, "nccl" if own else "gloo"


@contextlib.contextmanager
def collectives(backend: str) -> Iterator[None]:
    """Let vLLM's groups work for ranks that share a card; a stand-in, by name.

    NCCL takes one rank a card, and gloo takes CUDA tensors for some collectives only. So
    vLLM's group coordinators get the communicator that it has for other devices, which
    calls ``torch.distributed``, and the collectives there are staged through the host.
    """
    if not ON_CUDA or backend != "gloo":
        yield
        return
    from vllm.platforms import current_platform

    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    with contextlib.ExitStack() as stack:
        patch = mock.patch.object(
            type(current_platform), "get_device_communicator_cls", staticmethod(lambda: base)
        )
        stack.enter_context(patch)
        for name in COLLECTIVES:
            staged = _staged(getattr(torch.distributed, name))
            stack.enter_context(mock.patch.object(torch.distributed, name, staged))
        yield


class _Done:
    """The handle of a collective that has ended."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _staged(collective):
    """A collective of CUDA tensors by way of host copies, written back in place."""

    def call(*arguments, async_op: bool = False, **keywords):
        given = [a for a in (*arguments, *keywords.values()) if isinstance(a, torch.Tensor)]
        if not any(tensor.is_cuda for tensor in given):
            return collective(*arguments, async_op=async_op, **keywords)
        copies = {id(tensor): tensor.cpu().contiguous() for tensor in given}
        host = [copies.get(id(a), a) for a in arguments]
        collective(*host, **{k: copies.get(id(a), a) for k, a in keywords.items()})
        # The first tensor is the output of all of them.
        given[0].copy_(copies[id(given[0])])
        return _Done() if async_op else None

    return call
