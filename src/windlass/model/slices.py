"""Which part of a logical tensor this rank holds.

FSDP2 cuts dim 0 as torch.chunk does: pieces of ceil(n / ranks), the last ones shorter or empty. So a rank's part is one
range of global indices per dim. Reading weights and drawing initial ones both ask here, and touch nothing but that
part.
"""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def owned_ranges(tensor: Tensor) -> list[range]:
    """Global indices that the local part covers, one range per dim; the whole of each dim for a plain tensor."""
    ranges = [range(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Replicate):
                continue
            assert type(placement) is Shard, f"{placement}: a part that is no range of indices"
            dim = placement.dim
            ranges[dim] = _chunk(ranges[dim], mesh.size(axis), mesh.get_local_rank(axis))
        assert tuple(map(len, ranges)) == tensor.to_local().shape, (ranges, tensor.to_local().shape)
    return ranges


def local_part(tensor: Tensor) -> Tensor:
    """The elements this rank holds, as a plain tensor that shares their memory."""
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _chunk(whole: range, num_pieces: int, index: int) -> range:
    size = -(-len(whole) // num_pieces)
    return whole[min(index * size, len(whole)) : min((index + 1) * size, len(whole))]
