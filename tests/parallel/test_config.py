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
    assert ("-1 takes what is left" in caught.value.rule) == ("=-1" in caught.value.given)
    ranks, _, legal = caught.value.change.partition(", or ")
    count = int(re.search(r"start (\d+) ranks", ranks)[1])
    assert ParallelConfig(**given).layout(count).world == count
    named = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)x(\d+)", legal)]
    assert len(named) == sum(world % n == 0 for n in range(1, world + 1))
    for replicate, shard in named:
        assert ParallelConfig(replicate=replicate, shard=shard).layout(world).world == world


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


@pytest.mark.parametrize(
    ("given", "named", "said", "remedies"),
    [
        (
            {"zero": 0, "offload": True},
            "parallel.offload=true",
            "no FSDP units",
            [{"zero": 0}, {"zero": 3, "offload": True}],
        ),
        ({"zero": 0, "blocks_per_unit": 2}, "blocks_per_unit=2", "no FSDP units", [{"zero": 2, "blocks_per_unit": 2}]),
        ({"zero": 0, "prefetch": 1}, "prefetch=1", "no FSDP units", [{"zero": 3, "prefetch": 1}]),
        ({"zero": 2, "bucket_mib": 50}, "bucket_mib=50", "buckets are DDP's", [{"zero": 2, "blocks_per_unit": 2}]),
        (
            {"shard": 1, "replicate": 2, "prefetch": 2},
            "prefetch=2",
            "nothing is gathered",
            [{"shard": -1, "prefetch": 2}],
        ),
        (
            {"activation_gib": 2},
            "activation_gib=2.0",
            "leave nothing to choose",
            [{"recompute": "selective", "activation_gib": 2}],
        ),
        (
            {"activation_gib": 2, "recompute": "full"},
            "recompute=full",
            "leave nothing to choose",
            [{"recompute": "full"}],
        ),
    ],
)
def test_a_setting_without_an_effect_is_refused_and_the_remedies_work(given, named, said, remedies):
    with pytest.raises(UserError) as caught:
        ParallelConfig(**given)
    assert named in caught.value.given and said in caught.value.rule
    for remedy in remedies:
        ParallelConfig(**remedy)
        assert "parallel." in caught.value.change


@pytest.mark.parametrize(
    ("given", "blocks", "said", "remedy"),
    [
        ({"blocks_per_unit": 4}, 3, "for a model of 3 blocks", {"blocks_per_unit": 3}),
        ({"prefetch": 4}, 3, "parallel.prefetch=4 for 3 units of 1 blocks", {"prefetch": 3}),
        ({"prefetch": 3, "blocks_per_unit": 2}, 3, "for 2 units of 2 blocks", {"prefetch": 2, "blocks_per_unit": 2}),
    ],
)
def test_units_and_prefetch_stay_within_the_model(given, blocks, said, remedy):
    with pytest.raises(UserError) as caught:
        ParallelConfig(**given).check_blocks(blocks)
    assert said in caught.value.given and f"={next(iter(remedy.values()))} or less" in caught.value.change
    ParallelConfig(**remedy).check_blocks(blocks)


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
        PrecisionConfig(policy="fp8")
