"""Which part of a tensor a rank holds, for plain tensors and for every way FSDP2 cuts."""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from windlass.ranks.owned_part import local_part, owned_ranges


def parts(shape):
    """On each rank of 2 x 2: (ranges, equal to the whole there) for rows, rows and columns, and rows cut twice."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    found = []
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Replicate()]):
        tensor = distribute_tensor(whole, mesh, placements)
        ranges = owned_ranges(tensor)
        index = tuple(slice(part.start, part.stop) for part in ranges)
        found.append((ranges, torch.equal(whole[index], local_part(tensor))))
    return found


def test_a_plain_tensor_is_owned_as_a_whole():
    tensor = torch.nn.Parameter(torch.ones(3, 4))
    assert owned_ranges(tensor) == [range(3), range(4)]
    assert local_part(tensor).data_ptr() == tensor.data_ptr() and not local_part(tensor).requires_grad


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 2), (1, 3)])
def test_the_local_part_is_that_range_of_the_whole(ranks, shape):
    per_rank = ranks.run(4, parts, shape)
    assert all(equal for found in per_rank for _, equal in found)
    for number, copies in ((0, 2), (1, 1), (2, 1), (3, 4)):
        owned = sum(len(ranges[0]) * len(ranges[1]) for ranges in (found[number][0] for found in per_rank))
        assert owned == copies * shape[0] * shape[1]


def outside():
    tensor = distribute_tensor(torch.arange(8.0).view(4, 2), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    return owned_ranges(tensor)


def test_a_rank_outside_of_the_mesh_holds_nothing(ranks):
    found = ranks.run(3, outside)
    assert found == [[range(2), range(2)], [range(2, 4), range(2)], [range(0), range(0)]]
