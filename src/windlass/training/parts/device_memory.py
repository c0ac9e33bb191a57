"""The memory of a rank's device: what may be used of it, and what fills it, by kind, for step lines.

Parameters, gradients and optimizer states are counted from the tensors that are there. The rest of the peak is what a step needs
beside them: activations, the gathered weights of a layer, buffers of collectives, and on a CPU the process itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from windlass.optim.optimizer import Optimizer
from windlass.parallel.program import Program
from windlass.plan.sizes import StepSize
from windlass.ranks.owned_part import local_tensor
from windlass.runtime import Runtime

KINDS: Final = ("parameters", "gradients", "states")
HEADROOM: Final = 0.06
"""Share of a device that is left free: NCCL's buffers, holes of the allocator. One H200 without NCCL: the allocator held 0.02 to
3 GiB more than was allocated at the peak, of 62 to 127 (gpu-headline.json)."""


@dataclass(frozen=True)
class Room:
    """A device's memory, as the choice of sizes sees it."""

    limit_bytes: int
    """What a step may take at its peak; equal on all ranks."""
    peak: Callable[[StepSize], int]
    """Called after a trial of a size: the bytes that it took at its peak. Raises torch.OutOfMemoryError where it did not fit."""


FindRoom = Callable[[Runtime], Room | None]
"""None: sizes are not chosen by memory. Collective."""


def device_room(runtime: Runtime) -> Room | None:
    """The smallest of all ranks' GPUs; None on CPUs, whose memory is the host's. Collective."""
    if runtime.device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(runtime.device)
    there = free + torch.cuda.memory_reserved(runtime.device)
    least = -runtime.max_over_ranks(-float(there))
    return Room(int(least * (1 - HEADROOM)), lambda _size: int(runtime.memory_bytes()))


def gradient_bytes(parameter: torch.Tensor) -> int:
    """Bytes of this rank's part of the parameter's gradient, once there is one."""
    return local_bytes(parameter) // parameter.element_size() * (parameter.grad_dtype or parameter.dtype).itemsize


def local_bytes(tensor: torch.Tensor) -> int:
    """Bytes of this rank's part of a tensor."""
    local = local_tensor(tensor)
    return int(local.numel() * local.element_size())


def standing_bytes(program: Program, optimizer: Optimizer, device: torch.device) -> tuple[int, ...]:
    """Bytes of each of KINDS that `device` keeps between a backward and the update."""
    here = [record for record in program.records() if record.tensor.device.type == device.type]
    parameters = [one for record in here for one in (record.tensor, *record.copies)]
    trained = [record.tensor for record in here if record.tensor.requires_grad]
    kept = [state for state in optimizer.state_tensors().values() if state.device.type == device.type]
    return sum(map(local_bytes, parameters)), sum(map(gradient_bytes, trained)), sum(map(local_bytes, kept))


class MemoryParts:
    """What fills the memory of the largest rank, for step lines: KINDS, then what a step needs beside them (on a CPU with the
    process), and on CUDA what torch's allocator holds beyond its peak. KINDS are counted once, after the first step, on the rank
    whose peak is largest then: they do not change, so a line costs at most one number that is sent. All but the cache add up to
    the peak."""

    def __init__(self, runtime: Runtime, standing: Callable[[], tuple[int, ...]]):
        self._runtime, self._standing = runtime, standing
        self._largest: tuple[int, ...] | None = None
        self._is_cuda = runtime.device.type == "cuda"

    def of(self, peak: float) -> dict[str, int]:
        """`peak`: bytes of the rank with the most. Collective, on logging steps."""
        if self._largest is None:
            own = (int(self._runtime.memory_bytes()), *self._standing())
            self._largest = max(self._runtime.gathered(own))[1:]
        rest = max(0, int(peak) - sum(self._largest))
        parts = {**dict(zip(KINDS, self._largest, strict=True)), "activations" if self._is_cuda else "process": rest}
        if self._is_cuda:
            reserved = torch.cuda.max_memory_reserved(self._runtime.device) - self._runtime.memory_bytes()
            parts["cache"] = int(self._runtime.max_over_ranks(reserved))
        return parts
