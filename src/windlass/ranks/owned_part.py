"""Which part of a tensor this rank holds.

FSDP2 and tensor parallelism cut a dim as torch.chunk does: pieces of ceil(n / ranks), the last ones shorter or empty. Where both
cut the same dim, tensor ranks cut first and FSDP2 cuts each of their pieces, though its axis comes first in the mesh: torch
calls that placement _StridedShard. So a rank's part is one range of global indices per dim in every layout. Reading weights,
drawing initial ones and saving all take their ranges from here. (torch 2.13's compute_local_shape_and_global_offset gives other
ranges where both cut a dim and tensor ranks do not divide it.)
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def owned_ranges(tensor: Tensor) -> list[range]:
    """Global indices that the local part covers, one range per dim; the whole of each dim for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return [range(size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:  # a rank outside of the tensor's mesh
        return [range(0)] * tensor.dim()
    ranges = ranges_at(tensor, coordinate)
    assert tuple(map(len, ranges)) == tensor.to_local().shape, (ranges, tensor.to_local().shape)
    return ranges


def ranges_at(tensor: DTensor, coordinate: Sequence[int]) -> list[range]:
    """The `owned_ranges` of the rank at `coordinate` of the tensor's mesh."""
    ranges = [range(size) for size in tensor.shape]
    for axis, dim in cutting_axes(tensor):
        ranges[dim] = _chunk(ranges[dim], tensor.device_mesh.size(axis), coordinate[axis])
    return ranges


def cutting_axes(tensor: DTensor) -> list[tuple[int, int]]:
    """(mesh axis, dim) of every cut, in the order in which they are made."""
    first, second = [], []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is Shard:
            first.append((axis, placement.dim))
        else:
            assert isinstance(placement, _StridedShard), f"{placement}: a part that is no range of indices"
            second.append((axis, placement.dim))
    return first + second


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """The elements this rank holds, as a plain tensor that shares their memory and that autograd does not see."""
    return local_tensor(tensor.detach())


def _chunk(whole: range, num_pieces: int, index: int) -> range:
    size = -(-len(whole) // num_pieces)
    return whole[min(index * size, len(whole)) : min((index + 1) * size, len(whole))]
