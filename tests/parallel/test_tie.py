"""A tied embedding over two stages: values go one way, gradients the other, on two ranks and on one."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from windlass.parallel.tie import Tie


def ends(first, last):
    """This rank's ends after both directions, `first` and `last` the ranks of embedding and head."""
    rank, group = dist.get_rank(), dist.new_group(list(range(dist.get_world_size())))
    embedding = Parameter(torch.arange(6.0).view(3, 2)) if rank == first else None
    head = Parameter(torch.full((3, 2), -1.0)) if rank == last else None
    tie = Tie(embedding, head, group, first, last)
    tie.spread()
    for end, gradient in ((embedding, 10.0), (head, 0.5)):
        if end is not None:
            end.grad = torch.full((3, 2), gradient)
    tie.collect()
    return [None if end is None else (end.detach(), end.grad) for end in (embedding, head)]


@pytest.mark.parametrize(("world", "first", "last"), [(2, 0, 1), (3, 0, 2), (2, 0, 0)])
def test_the_mirror_takes_the_values_and_gives_its_gradient(ranks, world, first, last):
    results = ranks.run(world, ends, first, last)
    weight, gradient = results[first][0]
    assert weight.equal(torch.arange(6.0).view(3, 2)) and gradient.equal(torch.full((3, 2), 10.5)), "summed, once"
    weight, gradient = results[last][1]
    assert weight.equal(torch.arange(6.0).view(3, 2)) and gradient is None, "nothing is left to be counted twice"
