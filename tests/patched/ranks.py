"""Run a function on every rank of a DCP group: real processes, vLLM's groups.

Over gloo; over NCCL where every rank has a CUDA device to itself.
"""

import contextlib
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device

HERE = Path(__file__).parent
TIMEOUT_S = 300
MEET_S = 60


def _context() -> multiprocessing.context.BaseContext:
    # A fork server that has imported vLLM once: seconds a rank saved, and no fork
    # of a process that has threads.
    paths = [str(HERE), *(p for p in sys.path if p)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preload"] if device.ON_CUDA else ["ranks", "layers"])
    return context


@contextlib.contextmanager
def model_parallel(rank: int, world: int, dcp: int, rendezvous: str, config: Any) -> Iterator[None]:
    """vLLM's model parallel groups, with ``tp == world``."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    torch.set_num_threads(1)
    local_rank, backend = device.take_card(rank, world)
    with set_current_vllm_config(config), device.collectives(backend):
        parallel_state.init_distributed_environment(
            world_size=world,
            rank=rank,
            local_rank=local_rank,
            distributed_init_method=f"file://{rendezvous}",
            backend=backend,
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=world,
            decode_context_model_parallel_size=dcp,
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def meet(rank: int, world: int, place: str) -> bool:
    """Whether all ranks come to a place, without their group: a peer may be waiting in it."""
    Path(f"{place}-{rank}").touch()
    end = time.monotonic() + MEET_S
    while not (met := all(Path(f"{place}-{peer}").exists() for peer in range(world))):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return met


def _main(
    function: Callable[..., Any],
    rank: int,
    world: int,
    rendezvous: str,
    arguments: tuple[Any, ...],
    results: Any,
) -> None:
    try:
        results.put((rank, function(rank, world, rendezvous, *arguments), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """``[function(rank, world, rendezvous, *arguments) for each rank]``, at once.

    The results must pickle; tensors go as numpy arrays.
    """
    context = _context()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder) / "store")
        workers = [
            context.Process(
                target=_main,
                args=(function, rank, world, rendezvous, arguments, results),
                daemon=True,
            )
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        try:
            answers: dict[int, Any] = {}
            errors: dict[int, str] = {}
            while len(answers) + len(errors) < world and not errors:
                try:
                    rank, answer, error = results.get(timeout=TIMEOUT_S)
                except queue.Empty:
                    missing = set(range(world)) - answers.keys()
                    raise TimeoutError(f"no answer from ranks {missing}") from None
                if error is None:
                    answers[rank] = answer
                else:
                    errors[rank] = error
            if errors:
                raise RuntimeError("\n".join(f"rank {r}:\n{e}" for r, e in errors.items()))
            return [answers[rank] for rank in range(world)]
        finally:
            for worker in workers:
                if worker.exitcode is None:
                    worker.join(timeout=1 if errors else 20)
                if worker.is_alive():
                    worker.terminate()
