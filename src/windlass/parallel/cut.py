"""What tensor parallelism is made of: parameters cut over the ranks of `tp`, the two ways that the stream takes, and norms of
what a rank holds of it.

Legend: B sequences, T positions, S = T/t of them, D hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional

from windlass.model.layers import HeadsNorm, OffsetNorm, offset_norm

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


def cut_if_present(parameter: Tensor | None, mesh: DeviceMesh, placement: Placement) -> nn.Parameter | None:
    return None if parameter is None else cut_parameter(parameter, mesh, placement)


def own(parameter: nn.Parameter | None) -> Tensor:
    """This rank's part of what is cut."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def shared(parameter: nn.Parameter | None) -> Tensor:
    """A parameter that every rank holds whole; its gradient here is one part of a sum over the ranks."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()])


class Norm(nn.Module):
    """RMSNorm or LayerNorm of what this rank holds: its positions, or its heads."""

    def __init__(self, norm: nn.RMSNorm | nn.LayerNorm, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.shape, self.eps = mesh, list(norm.normalized_shape), norm.eps
        self.is_layer_norm, self.adds_one = isinstance(norm, nn.LayerNorm), isinstance(norm, OffsetNorm)
        self.weight = cut_if_present(norm.weight, mesh, WHOLE)
        self.bias = cut_if_present(norm.bias, mesh, WHOLE) if isinstance(norm, nn.LayerNorm) else None

    def forward(self, x: Tensor) -> Tensor:
        weight = shared(self.weight)
        if self.is_layer_norm:
            assert self.eps is not None
            bias = None if self.bias is None else shared(self.bias)
            return functional.layer_norm(x, self.shape, weight, bias, self.eps)
        if self.adds_one:
            return offset_norm(x, weight, self.eps)
        return functional.rms_norm(x, self.shape, weight, self.eps)


class GatheredNorm(Norm):
    """The norm of this rank's positions, and then all positions: [B, S, D] -> [B, T, D]."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        return gather(super().forward(x_BSD), self.mesh)


class Gather(nn.Module):
    """In place of a norm that the family does not have: all positions, [B, S, D] -> [B, T, D]."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh

    def forward(self, x_BSD: Tensor) -> Tensor:
        return gather(x_BSD, self.mesh)


class CutHeadsNorm(nn.Module):
    """RMSNorm over the channels of all heads, of which this rank has some, [B, T, X/t]; one number per token is gathered."""

    def __init__(self, norm: HeadsNorm, mesh: DeviceMesh):
        super().__init__()
        self.mesh, self.size, self.eps = mesh, norm.normalized_shape[0], norm.eps or 0.0
        self.weight = cut_if_present(norm.weight, mesh, BY_ROWS)

    def forward(self, x_BTX: Tensor) -> Tensor:
        wide_BTX = x_BTX.to(torch.promote_types(x_BTX.dtype, torch.float32))
        squares_BTt = gather(wide_BTX.square().sum(-1, keepdim=True), self.mesh, dim=2)
        scale_BT1 = torch.rsqrt(squares_BTt.sum(-1, keepdim=True) / self.size + self.eps)
        return (wide_BTX * scale_BT1 * own(self.weight)).to(x_BTX.dtype)


def gathered(norm: Any, mesh: DeviceMesh) -> nn.Module:
    """What attention and MLP read: all positions, normed where the family norms them."""
    return Gather(mesh) if isinstance(norm, nn.Identity) else GatheredNorm(norm, mesh)


def of_heads(norm: Any, mesh: DeviceMesh) -> nn.Module:
    """The norm of this rank's queries or keys."""
    return CutHeadsNorm(norm, mesh) if isinstance(norm, HeadsNorm) else Norm(norm, mesh)
