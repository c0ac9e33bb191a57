"""A rank's own bytes: its shard of every tensor, and copies of them that training cannot reach.

Copies live in host buffers that are kept between saves: no page faults after the first save, pinned beside a GPU so
that the copies run at the link's speed and together. Bytes kept per rank: its shards, once. Copying 192 MiB takes
about 50 ms on a CPU.
"""

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class LocalPlanner(DefaultSavePlanner):
    """DCP's planner over live tensors, whose bytes come from `local`: name -> this rank's shard or a copy of it."""

    def __init__(self, local: dict[str, torch.Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._local = local

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return self._local[index.fqn]


class Staging:
    """Owns the buffers. One set: the save that uses them must be over before the next `copy`."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def copy(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """name -> a host copy of this rank's shard. Complete when it returns."""
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        for name, shard in shards.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != shard.shape or buffer.dtype != shard.dtype:
                pinned = shard.device.type != "cpu"
                self._buffers[name] = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name].copy_(shard, non_blocking=True)
        if any(shard.device.type != "cpu" for shard in shards.values()):
            torch.accelerator.synchronize()
        return {name: self._buffers[name] for name in shards}
