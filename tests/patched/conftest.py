"""Checks of a patched vLLM and FlashInfer that are installed, without a GPU.

Run ``pytest tests/patched`` in an environment that has both. The tests fail on the
bare pin and hold on the patched tree; DOMAIN numbers are in the tests themselves.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# Before Triton is imported: with no CUDA device its kernels run interpreted.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest
import torch
from layers import make_config
from vllm.config import set_current_vllm_config


@pytest.fixture
def config():
    """A config of one rank, current."""
    config = make_config()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
