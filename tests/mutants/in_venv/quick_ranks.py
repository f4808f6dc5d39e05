"""A pytest plugin for runs under a defect: ranks are forked from pytest itself.

tests/patched forks them from a server that imports vLLM once more, which takes longer than most
tests do. Here a run is a few tests, and the threads that make forking unsafe are never started
(``OMP_NUM_THREADS=1``). Imported in the patched environment, by its own name alone.
"""

import multiprocessing
import sys
from typing import Any


def pytest_collection_finish() -> None:
    """Replace the way ranks are started, once the tests have imported what does it."""
    ranks: Any = sys.modules.get("ranks")
    if ranks is not None:
        assert callable(ranks._context)
        ranks._context = lambda: multiprocessing.get_context("fork")
