"""What fills a device that has run out of memory, by kind, with what each change to the recipe frees.

Parameters, gradients and optimizer states are counted from the tensors that are there. The rest of the peak is what a step needs
beside them: activations, the gathered weights of a layer, buffers of collectives, and on a CPU the process itself. It grows with
the micro-batch, so half of one frees at most half of it.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.model.lora.adapter import BLOCK
from windlass.parallel.activations import Kept
from windlass.parallel.config import MeshLayout, ParallelConfig
from windlass.parallel.records import Record
from windlass.runtime import Runtime
from windlass.training.parts.device_memory import local_bytes
from windlass.units import format_bytes

# of the allocators of CUDA and of the CPU, of the driver, and of cuBLAS
PHRASES: Final = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
ASKED: Final = re.compile(r"ried to allocate ([\d.]+ \w+)")
NAMED: Final = 4
"""Changes in a message."""


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of one rank's device. `peak`: the most that was allocated at once."""

    parameters: int
    gradients: int
    states: int
    peak: int
    by_nf4: int = 0
    """What the matrices of an adapter's frozen base would give back in four bits."""

    @property
    def rest(self) -> int:
        return max(0, self.peak - self.parameters - self.gradients - self.states)

    def __str__(self) -> str:
        kinds = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer states": self.states,
            "activations and buffers": self.rest,
        }
        listed = sorted(kinds.items(), key=lambda kind: -kind[1])
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in listed)


def device_bytes(
    records: Sequence[Record], states: Iterable[torch.Tensor], peak: float, device: torch.device, can_quantize: bool
) -> DeviceBytes:
    """What `device` holds of them. `can_quantize`: whether frozen matrices may be stored in four bits, and are not yet."""
    here = [record for record in records if record.tensor.device.type == device.type]
    parameters = [record.tensor for record in here]
    frozen = [record for record in here if can_quantize and not record.tensor.requires_grad]
    matrices = [r.tensor for r in frozen if ".layers." in r.name and r.name.endswith("_proj.weight")]
    return DeviceBytes(
        parameters=sum(map(local_bytes, [*parameters, *(copy for r in here for copy in r.copies)])),
        gradients=sum(local_bytes(p.grad) for p in parameters if p.grad is not None),
        states=sum(local_bytes(state) for state in states if state.device.type == device.type),
        peak=int(peak),
        by_nf4=sum(int(local_bytes(p) * (1 - (0.5 + 2 / BLOCK) / p.element_size())) for p in matrices),
    )


@contextlib.contextmanager
def explained(explain: Callable[[BaseException], UserError]) -> Iterator[None]:
    """What is done inside raises `explain(error)` where it runs out of memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # CUDA's is a RuntimeError too
        if not is_out_of_memory(error):
            raise
        raise explain(error) from error


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(phrase in str(error) for phrase in PHRASES)


def asked(error: BaseException) -> str:
    """`; 2.00 GiB more were asked for`, or '' where the error does not say."""
    found = ASKED.search(str(error))
    return f"; {found[1]} more were asked for" if found else ""


def remedies(
    held: DeviceBytes,
    config: ParallelConfig,
    layout: MeshLayout,
    kept: Sequence[Kept],
    *,
    micro_batch: int,
    least: int,
    can_adapt: bool,
    can_offload: bool,
) -> list[str]:
    """Changes to the recipe with what each frees, the most first. `kept`: by the blocks of a whole model for one micro-batch.
    `least`: the smallest micro-batch. `can_adapt`: whether all parameters of a model are trained that an adapter may be trained
    beside; `can_offload`: whether the device has a host with memory of its own."""
    found: dict[str, float] = {}
    half = micro_batch // 2 if micro_batch % 2 == 0 and (micro_batch // 2) % least == 0 else least
    if half < micro_batch:
        found[f"run.micro_batch={half} frees up to"] = held.rest * (1 - half / micro_batch)
    is_counted = layout.pp == layout.tp == layout.context == 1 and config.activation_gib is None
    if config.recomputes != "full" and is_counted:
        now = sum(block.selective if config.recomputes == "selective" else block.none for block in kept)
        found["parallel.recompute=full frees about"] = now - sum(block.full for block in kept)
    found |= _by_cutting(held, config, layout)
    if can_offload and not config.offload and config.zero_stage > 0:
        found["parallel.offload=true, which is slower, frees"] = held.parameters + held.gradients + held.states
    if can_adapt:
        found["adapter.kind=lora frees nearly"] = held.gradients + held.states
    found["adapter.base=nf4 frees"] = held.by_nf4
    first = sorted((change for change in found.items() if change[1] > 0), key=lambda change: -change[1])
    return [f"{change} {format_bytes(size)}" for change, size in first[:NAMED]]


def _by_cutting(held: DeviceBytes, config: ParallelConfig, layout: MeshLayout) -> dict[str, float]:
    """What parameters, gradients and states give back where they are cut over more ranks."""
    everything = held.parameters + held.gradients + held.states
    ranks = layout.replicate * layout.shard
    if config.zero_stage == 3 and layout.replicate == 1:
        return {f"parallel.shard={2 * ranks} on twice the ranks frees": everything / 2}
    if ranks == 1:
        return {"parallel.shard=2 on two ranks frees": everything / 2}
    if config.zero_stage == 3:
        return {f"parallel.replicate=1 and parallel.shard={ranks} frees": everything * (1 - layout.shard / ranks)}
    whole = held.parameters + held.gradients * (config.zero_stage < 2) + held.states * (config.zero_stage < 1)
    return {f"parallel.zero=3 with parallel.shard={ranks} frees": whole * (1 - 1 / ranks)}


def no_room(config: RunConfig, runtime: Runtime, error: BaseException) -> UserError:
    """A model that does not fit before its first step."""
    cut = "parallel.shard over more ranks (zero 3)"
    base = ", adapter.base=nf4" if config.adapter.kind == "lora" and config.adapter.base == "plain" else ""
    return UserError(
        f"rank {runtime.rank} ran out of memory on {runtime.device_name()} before the first step{asked(error)}",
        "a rank's part of parameters and optimizer states fits into the memory of its device",
        f"cut it smaller: {cut}, parallel.tp, parallel.pp{base}; or take a smaller model",
    )
