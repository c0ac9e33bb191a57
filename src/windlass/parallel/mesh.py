"""The ranks as a grid with named axes, and the groups that sums run over.

    ranks.view(pp, replicate, shard, context, tp)          tp innermost: its ranks talk most, so they are neighbours

Parameters live on one root mesh, *dense* = (pp, replicate, fsdp, tp) with fsdp = shard x context: context ranks hold other
tokens of the same samples, so they may share the parameters too. torch (2.11 to 2.13) has no public call that flattens axes,
hence a root mesh of its own. Samples are cut along the *batch axes* (replicate, shard); tokens differ along the *loss axes*
(batch axes and context), so counts and losses are summed over those.

Every axis is always there, size 1 included. Groups are made here, by all ranks in the same order, and handed out as
arguments: nobody reads a global.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.parallel.config import Layout

AXES: Final = ("pp", "replicate", "shard", "context", "tp")


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the grid."""

    layout: Layout
    dense: DeviceMesh
    coordinate: dict[str, int]
    loss_group: dist.ProcessGroup
    """Ranks that hold other tokens: counts, losses and gradients are summed over it."""
    parts: dist.ProcessGroup
    """Ranks that hold other parameters of the same model: the pipeline's. Asked for every step, hence not cut anew out of
    `dense` each time (measured by benchmarks/overhead.py: 600 calls and 3 scalar reads)."""

    @property
    def fsdp(self) -> DeviceMesh:
        """(replicate, fsdp): HSDP. With one replica the fsdp axis alone: on two axes FSDP2 would call an all-reduce over a
        group of one rank for every unit (counted in tests/parallel/test_fsdp)."""
        return self.dense["replicate", "fsdp"] if self.layout.replicate > 1 else self.dense["fsdp"]

    @property
    def batch_rank(self) -> int:
        """This rank's place along the batch axes: which part of each global batch it reads."""
        return self.coordinate["replicate"] * self.layout.shard + self.coordinate["shard"]

    def sum_over_loss(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (0-dim, this rank's part) summed over the loss axes; sent: 8 bytes. Nothing is sent on one rank."""
        if self.loss_group.size() > 1:
            dist.all_reduce(value, group=self.loss_group)
        return value


def make_mesh(layout: Layout, device_type: str) -> Mesh:
    """Called by all ranks of an initialised default group of `layout.world` ranks. `device_type`: "cpu" or "cuda"."""
    world, rank = dist.get_world_size(), dist.get_rank()
    assert layout.world == world, (layout, world)
    sizes = [getattr(layout, axis) for axis in AXES]
    ranks = torch.arange(world).view(sizes)
    place = (ranks == rank).nonzero()[0].tolist()
    fsdp = layout.shard * layout.context
    dense = init_device_mesh(
        device_type, (layout.pp, layout.replicate, fsdp, layout.tp), mesh_dim_names=("pp", "replicate", "fsdp", "tp")
    )
    loss_group = _group(ranks, "replicate", "shard", "context")
    return Mesh(layout, dense, dict(zip(AXES, place)), loss_group, dense["pp"].get_group())


def _group(ranks: torch.Tensor, *axes: str) -> dist.ProcessGroup:
    """This rank's group along `axes` of the grid. Collective: every rank makes every group."""
    inside = [AXES.index(axis) for axis in axes]
    outside = [index for index in range(len(AXES)) if index not in inside]
    rows = ranks.permute(outside + inside).flatten(len(outside)).flatten(0, len(outside) - 1)
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist())
    assert isinstance(group, dist.ProcessGroup)
    return group
