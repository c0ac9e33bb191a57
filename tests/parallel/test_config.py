"""The layout that a recipe asks for, and what a world of ranks makes of it."""

import re

import pytest

from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.precision.config import PrecisionConfig


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
    assert caught.value.given.endswith(f"on {world} ranks") and product in caught.value.rule
    shown = caught.value.given.removesuffix(f" on {world} ranks").split(", ")
    assert {f"parallel.{axis}={size}" for axis, size in given.items() if axis != "zero"} <= set(shown), (
        "as they were given"
    )
    assert ("-1 takes the remaining ranks" in caught.value.rule) == ("=-1" in caught.value.given)
    ranks, _, legal = caught.value.change.partition(", or ")
    count = int(re.search(r"start (\d+) ranks", ranks)[1])
    assert ParallelConfig(**given).layout(count).world == count
    named = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)x(\d+)", legal)]
    assert len(named) == sum(world % n == 0 for n in range(1, world + 1))
    for replicate, shard in named:
        assert ParallelConfig(replicate=replicate, shard=shard).layout(world).world == world


def test_values_are_those_listed():
    for key, value in (
        ("zero", 4),
        ("recompute", "some"),
        ("schedule", "dualpipe"),
        ("context_kind", "ring"),
        ("shard", -2),
    ):
        with pytest.raises(ValueError, match=key):
            ParallelConfig(**{key: value})
    with pytest.raises(ValueError, match="policy"):
        PrecisionConfig(policy="fp4")


@pytest.mark.parametrize(
    ("given", "stage"), [({}, 3), ({"pp": 2}, 1), ({"zero": "auto"}, 3), ({"zero": "auto", "pp": 2}, 1)]
)
def test_a_stage_that_is_not_chosen_yet_is_what_it_is_left_out(given, stage):
    config = ParallelConfig(**given)
    assert config.zero_stage == stage and config.layout(8).batch_ranks == 8 // config.pp
    assert [ParallelConfig(zero=number).zero_stage for number in (0, 1, 2, 3)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "stage", "replicate", "shard"),
    [
        ({}, 0, 8, 1),
        ({"replicate": 2}, 0, 8, 1),
        ({"replicate": -1}, 0, 8, 1),
        ({}, 1, 1, 8),
        ({"replicate": 2}, 2, 2, 4),
        ({"shard": 4, "replicate": -1}, 3, 2, 4),
    ],
)
def test_a_chosen_stage_is_on_the_same_ranks(given, stage, replicate, shard):
    config = ParallelConfig(zero="auto", **given)
    for one in (config.with_zero(stage), ParallelConfig(**config.with_zero(stage).model_dump())):
        layout = one.layout(8)
        assert (one.zero, layout.replicate, layout.shard) == (stage, replicate, shard)
        assert layout.batch_ranks == config.layout(8).batch_ranks
