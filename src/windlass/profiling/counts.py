"""Operators and blocking reads of one step: what `windlass advise` knows of a step besides its time.

torch's profiler counts them on the host alone, so a GPU is not waited for, and compiled graphs stay what they are. A read is the
operator under `item()`, `float(tensor)` and `if tensor:`; on a GPU the host waits there until all work before it is done. What
`tolist()` and `.cpu()` copy is not counted.
"""

from typing import Any, Final

import torch
from torch.autograd.profiler import profile

READ: Final = "aten::_local_scalar_dense"
OWN: Final = "aten::_fused_"
"""Optimizer kernels: the CPU's read the number of the step, which is on the host."""


class StepCounts:
    """Counts from its making to `stop`. Raises RuntimeError where torch's profiler is in use already."""

    def __init__(self) -> None:
        if torch.autograd._profiler_enabled():
            raise RuntimeError("torch's profiler is in use")
        self._profile = profile(use_kineto=True)
        self._profile.__enter__()

    def stop(self) -> dict[str, int]:
        """-> `operators` (those of the lowest level and those that call them) and `reads`."""
        self._profile.__exit__(None, None, None)
        assert self._profile.kineto_results is not None
        events = sorted(self._profile.kineto_results.events(), key=lambda event: event.start_ns())
        operators = sum(event.name().startswith("aten::") for event in events)
        return {"operators": operators, "reads": _reads(events)}


def _reads(events: list[Any]) -> int:
    """Blocking reads outside of an optimizer's kernel. `events` in the order of their starts."""
    found = 0
    own_ends: dict[int, int] = {}  # thread -> where its newest kernel ends
    for event in events:
        if event.name().startswith(OWN):
            own_ends[event.start_thread_id()] = event.end_ns()
        found += event.name() == READ and event.start_ns() > own_ends.get(event.start_thread_id(), 0)
    return found
