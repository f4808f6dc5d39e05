"""What ranks are forked from on a CUDA device: vLLM imported, and CUDA not yet touched.

FlashInfer asks for the card's capability while it is imported, by way of torch, which starts
CUDA; a process that has CUDA running can't be forked. Here it is answered by vLLM's platform,
which asks NVML.
"""

from unittest import mock

import device  # noqa: F401 - before Triton and vLLM, which read the environment
import torch
from vllm.platforms import current_platform


def _capability(card: object = None) -> tuple[int, int]:
    found = current_platform.get_device_capability()
    return found.major, found.minor


with mock.patch.object(torch.cuda, "get_device_capability", _capability):
    import layers  # noqa: F401
    import ranks  # noqa: F401

if torch.cuda.is_initialized():
    raise RuntimeError("importing vLLM has started CUDA: ranks can't be forked from here")
