"""What tensor parallelism is made of: parameters cut over the ranks of `tp`, and the two ways that the stream takes.

Legend: B sequences, T positions, S = T/t of them, D hidden size.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

WHOLE, BY_ROWS, BY_COLUMNS = Replicate(), Shard(0), Shard(1)


def gather(x_BSD: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """All ranks' positions, or parts of another `dim` -> [B, T, D]. Backward: this rank's part of the sum of gradients."""
    x_BTD = DTensor.from_local(x_BSD, mesh, [Shard(dim)], run_check=False).redistribute(placements=[Replicate()])
    return x_BTD.to_local(grad_placements=[Partial()])


def scatter(part_BTD: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of all ranks' parts, this rank's positions of it -> [B, S, D]. Backward: all positions' gradients."""
    x_BSD = DTensor.from_local(part_BTD, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(1)])
    return x_BSD.to_local(grad_placements=[Shard(1)])


def cut_parameter(parameter: Tensor, mesh: DeviceMesh, *placements: Placement) -> nn.Parameter:
    """The parameter's shape, cut by a placement for each axis of `mesh`; on meta, as the parameter is."""
    shape = list(parameter.shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= mesh.size(axis)
    local = torch.empty(shape, dtype=parameter.dtype, device="meta")
    stride = parameter.stride()
    placed = DTensor.from_local(local, mesh, placements, run_check=False, shape=parameter.shape, stride=stride)
    return nn.Parameter(placed, requires_grad=parameter.requires_grad)


def cut(parameter: Tensor | None, mesh: DeviceMesh, placement: Placement) -> nn.Parameter | None:
    return None if parameter is None else cut_parameter(parameter, mesh, placement)


def own(parameter: nn.Parameter | None) -> Tensor:
    """This rank's part of what is cut."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def shared(parameter: nn.Parameter | None) -> Tensor:
    """A parameter that every rank holds whole; its gradient here is one part of a sum over the ranks."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()])
