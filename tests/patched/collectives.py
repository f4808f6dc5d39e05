"""Which collectives a rank enters, in order, and which one it never comes out of."""

import contextlib
import functools
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator

FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)
"""Of torch.distributed."""

METHODS = (
    "all_gather",
    "all_gatherv",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_object_list",
    "broadcast_tensor_dict",
    "gather",
    "reduce_scatter",
    "reduce_scatterv",
)
"""Of vLLM's group coordinator, which need not go by torch.distributed."""


class Collective(NamedTuple):
    """One collective that a rank entered; ``shape`` and ``dtype`` are the first tensor's."""

    op: str
    group: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...] | None
    dtype: str | None

    def __str__(self) -> str:
        what = f" of {self.dtype} {list(self.shape)}" if self.shape is not None else ""
        return f"{self.op}{what} in {self.group}"


@dataclass
class Trace:
    """What one rank did."""

    entered: list[Collective] = field(default_factory=list)
    inside: list[Collective] = field(default_factory=list)
    answer: Any = None
    error: str = ""
    done: bool = False
    moved: float = 0.0

    def ops(self) -> set[str]:
        return {one.op for one in self.entered}


def _group_name(group: Any) -> str:
    """The coordinator's name of a process group: creation gives it the same on every rank."""
    for name, reference in parallel_state._groups.items():
        coordinator = reference()
        if coordinator is not None and group is coordinator.cpu_group:
            return f"{name} (cpu)"
        if coordinator is not None and group is coordinator.device_group:
            return name
    return str(group.group_name)


def _describe(op: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Collective:
    given = (*arguments, *keywords.values())
    tensor = next((a for a in given if isinstance(a, torch.Tensor)), None)
    if isinstance(arguments[0] if arguments else None, GroupCoordinator):
        name, ranks = arguments[0].unique_name, arguments[0].ranks
    else:
        groups = [a for a in given if isinstance(a, torch.distributed.ProcessGroup)]
        group = groups[0] if groups else torch.distributed.group.WORLD
        name, ranks = _group_name(group), torch.distributed.get_process_group_ranks(group)
    shape, dtype = (None, None) if tensor is None else (tuple(tensor.shape), str(tensor.dtype))
    return Collective(op, name, tuple(ranks), shape, dtype)


class _Handle:
    """A collective that was only started: its rank comes out of it when it has waited."""

    def __init__(self, work: Any, out: Callable[[], None]) -> None:
        self._work, self._out = work, out

    def wait(self, *arguments: Any, **keywords: Any) -> Any:
        result = self._work.wait(*arguments, **keywords)
        self._out()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def recorded(trace: Trace) -> Iterator[None]:
    """Keep in ``trace`` every collective of more than one rank."""

    def recording(op: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*arguments: Any, **keywords: Any) -> Any:
            one = _describe(op, arguments, keywords)
            if len(one.ranks) == 1:
                return collective(*arguments, **keywords)
            trace.entered.append(one)
            trace.inside.append(one)
            trace.moved = time.monotonic()
            result = collective(*arguments, **keywords)
            # Not when it raises: that is where the rank was.
            out = functools.partial(trace.inside.remove, one)
            if hasattr(result, "wait"):
                return _Handle(result, out)
            out()
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.distributed, FUNCTIONS), (GroupCoordinator, METHODS)):
            for name in names:
                wrapped = recording(name, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def follow(
    work: Mapping[str, Callable[[], Any]],
    within: contextlib.AbstractContextManager[Any],
    quiet_s: float,
) -> dict[str, Trace]:
    """Do each piece of work in turn, until one raises or no collective is entered for long.

    It is done in a thread, which is left behind when it waits for ever.
    """
    traces = {name: Trace() for name in work}

    def run() -> None:
        current = next(iter(traces.values()))
        try:
            with within:
                for name, function in work.items():
                    current = traces[name]
                    current.moved = time.monotonic()
                    with recorded(current):
                        current.answer = function()
                    current.done = True
        except BaseException:
            current.error = traceback.format_exc()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        moved = max(trace.moved for trace in traces.values())
        # Groups are made before; a rank that gave up then would break its peers'.
        if moved and time.monotonic() - moved > quiet_s:
            break
    return traces


def disagreement(traces: list[Trace]) -> str:
    """What keeps the ranks from being in step, "" if nothing does.

    Any two ranks must enter the collectives of the groups that both are in in the same
    order, with the same shapes and types, and every rank must come out of all of them.
    """
    found = []
    for (a, first), (b, second) in combinations(enumerate(traces), 2):
        mine = [one for one in first.entered if b in one.ranks]
        theirs = [one for one in second.entered if a in one.ranks]
        for step, (one, other) in enumerate(zip_longest(mine, theirs)):
            if one != other:
                found.append(
                    f"step {step}: rank {a} enters {one or 'nothing'}, "
                    f"rank {b} enters {other or 'nothing'}"
                )
                break
    for rank, trace in enumerate(traces):
        if trace.inside:
            found.append(f"rank {rank} waits in {trace.inside[-1]}")
        if trace.error or not trace.done:
            found.append(f"rank {rank}: {trace.error or 'did not end'}")
    return "\n".join(found)
