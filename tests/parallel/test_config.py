"""The layout that a recipe asks for, and what a world of ranks makes of it."""

import re

import pytest

from windlass.errors import UserError
from windlass.parallel.config import LATER, ParallelConfig, PrecisionConfig


@pytest.mark.parametrize(
    ("given", "world", "replicate", "shard"),
    [
        ({}, 1, 1, 1),
        ({}, 8, 1, 8),
        ({"zero": 0}, 1, 1, 1),
        ({"zero": 0}, 8, 8, 1),
        ({"zero": 0, "shard": -1}, 4, 4, 1),
        ({"zero": 0, "replicate": 4}, 4, 4, 1),
        ({"zero": 0, "replicate": -1, "shard": 1}, 4, 4, 1),
        ({"zero": 2, "replicate": 2}, 8, 2, 4),
        ({"replicate": -1}, 8, 8, 1),
        ({"replicate": -1, "shard": 4}, 24, 6, 4),
        ({"replicate": 3, "shard": 8}, 24, 3, 8),
    ],
)
def test_open_sizes_follow_from_the_world(given, world, replicate, shard):
    config = ParallelConfig(**given)
    for one in (config, ParallelConfig(**config.model_dump())):
        layout = one.layout(world)
        assert (layout.replicate, layout.shard, layout.world) == (replicate, shard, world)
        assert layout.batch_ranks == world


@pytest.mark.parametrize(
    ("given", "world", "product"),
    [
        ({"replicate": 2, "shard": 3}, 8, "2 x 3 = 6"),
        ({"replicate": 3}, 8, "3 x 2 = 6"),
        ({"replicate": -1, "shard": 3}, 8, "2 x 3 = 6"),
        ({"shard": 4}, 8, "1 x 4 = 4"),
        ({"shard": 4, "replicate": -1}, 2, "1 x 4 = 4"),
        ({"zero": 0, "replicate": 1}, 2, "1 x 1 = 1"),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world_name_those_that_do(given, world, product):
    with pytest.raises(UserError) as caught:
        ParallelConfig(**given).layout(world)
    assert f"on {world} ranks" in caught.value.given and product in caught.value.rule
    ranks, _, legal = caught.value.change.partition(", or ")
    count = int(re.search(r"start (\d+) ranks", ranks)[1])
    assert ParallelConfig(**given).layout(count).world == count
    named = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)x(\d+)", legal)]
    assert len(named) == sum(world % n == 0 for n in range(1, world + 1))
    for replicate, shard in named:
        assert ParallelConfig(replicate=replicate, shard=shard).layout(world).world == world


@pytest.mark.parametrize("axis", LATER)
def test_axes_of_later_versions_are_refused(axis):
    with pytest.raises(UserError) as caught:
        ParallelConfig(**{axis: 2})
    assert caught.value.given == f"parallel.{axis}=2" and f"remove parallel.{axis}" in caught.value.change


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ({"zero": 0, "shard": 2}, "nothing is cut along shard", {"replicate": 2, "zero": 0}),
        ({"replicate": -1, "shard": -1}, "only one axis can take what is left", {"replicate": -1, "shard": 2}),
        ({"shard": 0}, "at least 1 rank", {"shard": -1}),
        ({"replicate": 0}, "at least 1 rank", {"replicate": 1}),
    ],
)
def test_contradictions_are_refused_and_the_remedy_works(given, said, remedy):
    with pytest.raises(UserError, match=said):
        ParallelConfig(**given)
    assert ParallelConfig(**remedy).layout(2).world == 2


def test_values_are_those_listed():
    for key, value in (
        ("zero", 1),
        ("recompute", "some"),
        ("schedule", "gpipe"),
        ("context_kind", "ring"),
        ("shard", -2),
    ):
        with pytest.raises(ValueError, match=key):
            ParallelConfig(**{key: value})
    with pytest.raises(ValueError, match="policy"):
        PrecisionConfig(policy="fp16")
