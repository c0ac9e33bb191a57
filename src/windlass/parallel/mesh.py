"""The ranks as a grid with named axes, and the groups that sums run over.

    ranks.view(pp, replicate, shard, context, tp)          tp innermost: its ranks send most, so they are neighbours

Parameters live on one root mesh, *dense* = (pp, replicate, fsdp, tp) with fsdp = shard x context: context ranks hold other
tokens of the same samples, so they may share the parameters too. torch (2.11 to 2.13) has no public call that flattens axes,
hence a root mesh of its own. Samples are cut along the *batch axes* (replicate, shard): counts of whole rows are summed over
those. Tokens differ along the *loss axes* (batch axes and context): losses are summed over those. Experts that are dealt out
over ranks (`expert`, inside fsdp) live on a third root mesh, *expert* = (pp, replicate, expert_fsdp, expert, tp).

Every axis always exists, at size 1 too. All ranks make the groups here, in the same order, and pass them on as arguments:
no code reads a global.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.parallel.config import MeshLayout

AXES: Final = ("pp", "replicate", "shard", "context", "tp")


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the grid."""

    layout: MeshLayout
    dense: DeviceMesh
    coordinate: dict[str, int]
    loss_group: dist.ProcessGroup
    """Ranks that hold other tokens: losses and gradients are summed over it."""
    batch_group: dist.ProcessGroup
    """Ranks that read other rows: counts of whole rows are summed over it."""
    context: DeviceMesh | None
    """Ranks that share each row; None where every rank has whole rows."""
    expert: DeviceMesh | None
    """(pp, replicate, expert_fsdp, expert, tp), where experts live that are dealt out; None where they are not."""
    pp_group: dist.ProcessGroup
    """Ranks that hold other parameters of the same model: the pipeline's. Needed in every step, hence not sliced from
    `dense` each time (measured by benchmarks/overhead.py: 600 calls and 3 scalar reads)."""

    @property
    def fsdp(self) -> DeviceMesh:
        """(replicate, fsdp): HSDP. With one replica the fsdp axis alone: on two axes FSDP2 would call an all-reduce over a
        group of one rank for every unit (counted in tests/parallel/test_fsdp)."""
        return self.dense["replicate", "fsdp"] if self.layout.replicate > 1 else self.dense["fsdp"]

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The axes over which FSDP2 cuts experts that are dealt out: (replicate, expert_fsdp)."""
        if self.expert is None:
            return None
        return self.expert["replicate", "expert_fsdp"] if self.layout.replicate > 1 else self.expert["expert_fsdp"]

    @property
    def batch_rank(self) -> int:
        """This rank's position along the batch axes: which part of each global batch it reads."""
        return self.coordinate["replicate"] * self.layout.shard + self.coordinate["shard"]

    def axes_of_groups(self) -> dict[str, str]:
        """Name of each of this rank's process groups -> the axes it runs over: "fsdp", or "fsdp, loss" where both are one."""
        meshes = [self.dense, *([self.expert] if self.expert is not None else [])]
        groups = [(axis, mesh.get_group(axis)) for mesh in meshes for axis in mesh.mesh_dim_names or ()]
        groups += [("context", self.context.get_group())] if self.context is not None else []
        groups += [("loss", self.loss_group), ("batch", self.batch_group)]
        found: dict[str, list[str]] = {}
        for axis, group in groups:
            axes = found.setdefault(group.group_name, [])
            if group.size() > 1 and axis not in axes and not (axis == "batch" and "loss" in axes):
                axes.append(axis)
        return {name: ", ".join(axes) for name, axes in found.items() if axes}

    def sum_over_loss(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (of this rank's tokens) summed over the loss axes; of a loss, 8 bytes are sent, and none on one rank."""
        return _sum(value, self.loss_group)

    def sum_over_context(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (of this rank's positions of its rows) summed over the ranks that share these rows."""
        return value if self.context is None else _sum(value, self.context.get_group())

    def sum_over_batch(self, value: torch.Tensor) -> torch.Tensor:
        """`value` (0-dim, of the whole rows this rank reads) summed over the batch axes; as above. Context ranks read the same
        rows, and count them once."""
        return _sum(value, self.batch_group)


def _sum(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() > 1:
        dist.all_reduce(value, group=group)
    return value


def make_mesh(layout: MeshLayout, device_type: str) -> Mesh:
    """Called by all ranks of an initialised default group of `layout.world` ranks. `device_type`: "cpu" or "cuda"."""
    return _make_mesh(layout, device_type, torch.arange(layout.world))


def make_silent_mesh(layout: MeshLayout, device_type: str) -> Mesh:
    """A mesh whose groups send nothing, for what counts or tries a layout: torch's "fake" ones, which allocate as real ones
    do. (They are in torch.testing, and have no public name.) Collective.

    Its ranks are in reverse, so that no part of it equals a part of the real mesh. DTensor keeps what it finds out about an
    operator, with the mesh, and takes it for every mesh that is equal: after a trial on an equal one the run's norms were sums
    over the silent groups, each rank's own, and clipping was wrong without a sign.
    """
    import torch.testing._internal.distributed.fake_pg  # registers the backend

    return _make_mesh(layout, device_type, torch.arange(layout.world).flip(0), "fake")


def _make_mesh(layout: MeshLayout, device_type: str, order_W: torch.Tensor, backend: str | None = None) -> Mesh:
    world, rank = dist.get_world_size(), dist.get_rank()
    assert layout.world == world, (layout, world)
    sizes = [getattr(layout, axis) for axis in AXES]
    ranks = order_W.view(sizes)
    coordinates = (ranks == rank).nonzero()[0].tolist()
    fsdp = layout.shard * layout.context
    dense = _root(device_type, order_W, backend, pp=layout.pp, replicate=layout.replicate, fsdp=fsdp, tp=layout.tp)
    loss_group = batch_group = _group(ranks, backend, "replicate", "shard", "context")
    context = None
    if layout.context > 1:
        batch_group = _group(ranks, backend, "replicate", "shard")
        name = None if backend is None else (backend,)  # a name of its own, since a group's ranks have one order
        context = DeviceMesh.from_group(_group(ranks, backend, "context"), device_type, mesh_dim_names=name)
    pp_group = dense["pp"].get_group()
    expert = _expert_mesh(layout, device_type, order_W, backend)
    return Mesh(layout, dense, dict(zip(AXES, coordinates)), loss_group, batch_group, context, expert, pp_group)


def _root(device_type: str, order_W: torch.Tensor, backend: str | None, **sizes: int) -> DeviceMesh:
    """All ranks, in their order, along the axes of these names and sizes."""
    names, shape = tuple(sizes), tuple(sizes.values())
    if backend is None:
        return init_device_mesh(device_type, shape, mesh_dim_names=names)
    override: Any = ((backend, None),) * len(names)
    return DeviceMesh(device_type, order_W.view(shape), mesh_dim_names=names, backend_override=override)


def _expert_mesh(layout: MeshLayout, device_type: str, order_W: torch.Tensor, backend: str | None) -> DeviceMesh | None:
    """The mesh's ranks in their order, by the axes of experts: expert is the inner part of fsdp, so its ranks are neighbours."""
    if layout.expert == 1:
        return None
    expert_fsdp = layout.shard * layout.context // layout.expert
    sizes = {"pp": layout.pp, "replicate": layout.replicate, "expert_fsdp": expert_fsdp}
    return _root(device_type, order_W, backend, **sizes, expert=layout.expert, tp=layout.tp)


def _group(ranks: torch.Tensor, backend: str | None, *axes: str) -> dist.ProcessGroup:
    """This rank's group along `axes` of the grid. Collective: every rank makes every group."""
    inside = [AXES.index(axis) for axis in axes]
    outside = [index for index in range(len(AXES)) if index not in inside]
    rows = ranks.permute(outside + inside).flatten(len(outside)).flatten(0, len(outside) - 1)
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), backend=backend)
    assert isinstance(group, dist.ProcessGroup)
    return group
