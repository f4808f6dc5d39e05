"""Checks of a patched vLLM and FlashInfer that are installed.

Run ``pytest tests/patched`` in an environment that has both: without a GPU, or with
``OVERLAY_DEVICE=cuda`` on a CUDA device. The tests fail on the bare pin and hold on
the patched tree; DOMAIN numbers are in the tests themselves.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# A kernel library that vLLM imports would start to compile itself in each process.
os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")

import device  # before Triton and vLLM, which read the environment
import pytest
import torch
from layers import make_config
from vllm.config import set_current_vllm_config


def pytest_configure() -> None:
    if device.ON_CUDA and not torch.cuda.is_available():
        raise pytest.UsageError("OVERLAY_DEVICE=cuda, but torch finds no CUDA device here")


def pytest_report_header() -> str:
    return f"on {device.describe()}"


@pytest.fixture
def config():
    """A config of one rank, current."""
    config = make_config()
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
