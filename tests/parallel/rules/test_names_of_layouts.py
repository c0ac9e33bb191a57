"""Other tools' names for a sharding are answered with our setting, and that setting is one we take."""

import re

import pytest

from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.parallel.config import ParallelConfig
from windlass.recipe import apply_override

EIGHT_PER_NODE = "parallel.replicate=-1 parallel.shard=8"
STRATEGIES = {
    "FULL_SHARD": "parallel.zero=3 parallel.shard=-1",
    "SHARD_GRAD_OP": "parallel.zero=2 parallel.shard=-1",
    "HYBRID_SHARD": f"parallel.zero=3 {EIGHT_PER_NODE}",
    "_HYBRID_SHARD_ZERO2": f"parallel.zero=2 {EIGHT_PER_NODE}",
    "NO_SHARD": "parallel.zero=0",
}


def refused(given, section="parallel"):
    """What is said of `given`; the settings it names are put in, and must be a config that is taken."""
    with pytest.raises(UserError) as caught:
        ParallelConfig(**given) if section == "parallel" else check_recipe({section: given})
    tree = {"parallel": {}}
    for override in re.findall(r"parallel\.\w+=[\w-]+", caught.value.change):
        apply_override(tree, override)
    ParallelConfig(**tree["parallel"])
    return caught.value


@pytest.mark.parametrize("key", ["zero", "strategy", "sharding_strategy", "fsdp_sharding_strategy", "fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_sharding_by_name_is_answered_with_ours(key, name):
    error = refused({key: name})
    assert error.given == f"parallel.{key}={name}"
    assert error.change.startswith(f"use {STRATEGIES[name]}"), error.change
    assert "another tool's name" in error.rule


@pytest.mark.parametrize(
    ("word", "zero"),
    [
        ("stage-3", 3),
        ("ZeRO-2", 2),
        ("zero1", 1),
        ("stage 0", 0),
        ("deepspeed_stage_3", 3),
        ("3", 3),
        ("fsdp", 3),
        ("ddp", 0),
    ]
    + [("ShardingStrategy.SHARD_GRAD_OP", 2), ("full_shard", 3), ("hybrid-shard-zero2", 2), ("HSDP", 3)],
)
def test_common_spellings_are_known(word, zero):
    assert f"parallel.zero={zero}" in refused({"zero": word}).change


def test_a_number_in_quotes_is_shown_with_them():
    assert refused({"zero": "3"}).given == 'parallel.zero="3"'


@pytest.mark.parametrize("number", range(1, 6))
def test_numbers_are_those_of_torchs_enumeration(number):
    from torch.distributed.fsdp import ShardingStrategy

    assert STRATEGIES[ShardingStrategy(number).name] in refused({"fsdp_sharding_strategy": number}).change


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ({"reshard_after_forward": True}, "use parallel.zero=3"),
        ({"fsdp_reshard_after_forward": False}, "use parallel.zero=2"),
        ({"cpu_offload": True}, "use parallel.offload=true"),
        ({"fsdp_offload_params": False}, "use parallel.offload=false"),
        ({"zero_stage": 2}, "use parallel.zero=2"),
        ({"bucket_cap_mb": 50}, "use parallel.zero=0 parallel.bucket_mib=50"),
        ({"gradient_checkpointing": True}, "use parallel.recompute=full"),
        ({"mixed_precision": "bf16"}, "use precision.policy=bf16"),
        ({"min_num_params": 1_000_000}, "use nothing, or parallel.blocks_per_unit (a unit is a block)"),
        ({"use_orig_params": True}, "use nothing (FSDP2 keeps every parameter by its own name)"),
        (
            {"zero": "SHARD_GRAD_OP", "cpu_offload": True},
            "use parallel.offload=true; parallel.zero=2 parallel.shard=-1",
        ),
    ],
)
def test_other_settings_have_ours(given, change):
    assert refused(given).change == change


def test_a_whole_section_of_another_tool():
    section = {
        "sharding_strategy": "FULL_SHARD",
        "cpu_offload": False,
        "mixed_precision": "bf16",
        "use_orig_params": True,
    }
    error = refused(section, "fsdp")
    assert error.given.startswith("fsdp.sharding_strategy=FULL_SHARD; fsdp.cpu_offload=false")
    assert error.change.startswith(
        "use parallel.zero=3 parallel.shard=-1; parallel.offload=false; precision.policy=bf16"
    )
    assert refused("full_shard", "fsdp").change == "use parallel.zero=3 parallel.shard=-1"
    assert "see parallel in docs/recipe.md" in refused({"mystery": 1}, "fsdp").change


def test_a_name_that_is_nobodys_is_left_to_the_check_of_keys():
    with pytest.raises(ValueError, match="Extra inputs"):
        ParallelConfig(shards=3)
    with pytest.raises(ValueError, match="zero"):
        ParallelConfig(zero="most")
