import os
from pathlib import Path

import pytest
import torch.distributed as dist

from windlass.ranks.tree import Tree, children_of, parent_of

LAZY = "TORCH_GLOO_LAZY_INIT"


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7, 8, 13, 16, 64, 1000, 1024])
def test_every_rank_has_one_parent_and_few_peers(world):
    parents = [parent_of(rank) for rank in range(world)]
    below = [(rank, child) for rank in range(world) for child in children_of(rank, world)]
    assert sorted(child for _, child in below) == list(range(1, world))
    assert all(parents[child] == rank for rank, child in below) and parents[0] is None
    most = (world - 1).bit_length()
    assert max(len(children_of(rank, world)) + (rank > 0) for rank in range(world)) == most
    for rank in range(world):
        depth, at = 0, rank
        while at:
            depth, at = depth + 1, parents[at]
        assert depth <= most


def test_most_edges_stay_inside_a_host():
    inside = sum(parent_of(rank) // 8 == rank // 8 for rank in range(1, 1024))
    assert inside == 1023 - (1024 // 8 - 1)


def exchanged(group=None):
    tree = Tree(group or dist.group.WORLD)
    rank, world = tree.rank, tree.world
    tree.barrier()
    joined = tree.reduce([rank], lambda lower, higher: lower + higher)
    led = tree.reduce(rank, max, lambda most: ("the most of", world, most))
    return tree.gather(rank * 10), led, tree.broadcast(f"from {rank}"), joined, tree.reduce(rank, max)


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_values_go_up_and_down(ranks, world):
    everyone = list(range(world))  # in their order: what is below a rank are the ranks behind it
    for rank, found in enumerate(ranks.run(world, exchanged)):
        gathered = [10 * one for one in range(world)] if rank == 0 else None
        assert found == (gathered, ("the most of", world, world - 1), "from 0", everyone, world - 1)


def exchanged_within_a_part():
    """In two groups whose first ranks are not rank 0 of the world."""
    rank = dist.get_rank()
    odd, even = dist.new_group([1, 3]), dist.new_group([2, 4])
    return None if rank == 0 else exchanged(odd if rank % 2 else even)


def test_a_group_counts_its_own_ranks(ranks):
    found = ranks.run(5, exchanged_within_a_part)
    assert [each[2] for each in found[1:]] == ["from 0"] * 4
    assert found[1][0] == found[2][0] == [0, 10] and found[3][0] is None


def test_one_rank_sends_nothing():
    tree, value = Tree(None), object()
    assert tree.broadcast(value) is value and tree.gather(1) == [1]
    assert tree.reduce(3, max) == 3 and tree.reduce(3, max, str) == "3"


def num_sockets():
    links = Path("/proc/self/fd").iterdir()
    return sum(os.readlink(link).startswith("socket:") for link in links if link.exists() or link.is_symlink())


def sockets_held(is_lazy):
    """Sockets of this rank that a group of its own adds: as made, and after the traffic of the tree."""
    was = os.environ.pop(LAZY, None)
    if is_lazy:
        os.environ[LAZY] = "1"
    dist.barrier()
    before = num_sockets()
    dist.barrier()
    group = dist.new_group(backend="gloo")
    try:
        dist.barrier()
        made = num_sockets() - before
        dist.barrier()
        exchanged(group)
        dist.barrier()
        return made, num_sockets() - before
    finally:
        os.environ.pop(LAZY, None)
        if was is not None:
            os.environ[LAZY] = was


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts in /proc")
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_group_holds_a_socket_to_listen_and_one_per_peer_of_the_tree(ranks, world):
    found = ranks.run(world, sockets_held, True)
    peers = [len(children_of(rank, world)) + (rank > 0) for rank in range(world)]
    assert found == [(1, 1 + number) for number in peers]
    all_pairs = ranks.run(world, sockets_held, False)
    assert all(made >= world - 1 for made, _ in all_pairs), "gloo without the setting connects all pairs"
