"""Settings of a layout that contradict each other, or have no effect, are refused with remedies that work."""

import pytest

from tests.parallel.tiny import MODEL
from windlass.errors import UserError
from windlass.model.config import ModelConfig
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.check_layout import OtherSettings, check_layout
from windlass.parallel.rules.effects import fp8_errors, unit_errors


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ({"zero": 0, "shard": 2}, "nothing is sharded", {"replicate": 2, "zero": 0}),
        ({"replicate": -1, "shard": -1}, "only one axis can take the remaining ranks", {"replicate": -1, "shard": 2}),
        ({"shard": 0}, "at least 1 rank", {"shard": -1}),
        ({"replicate": 0}, "at least 1 rank", {"replicate": 1}),
    ],
)
def test_contradictions_are_refused_and_the_remedy_works(given, said, remedy):
    with pytest.raises(UserError, match=said):
        check_layout(ParallelConfig(**given))
    check_layout(ParallelConfig(**remedy), world=2)


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
        ({"async_tp": True}, "parallel.tp=1", "there are none", [{}, {"async_tp": True, "tp": 2}]),
        (
            {"async_tp": True, "tp": 2, "compile": False},
            "parallel.compile=false",
            "it is torch.compile",
            [{"tp": 2, "compile": False}, {"async_tp": True, "tp": 2, "compile": True}, {"async_tp": True, "tp": 2}],
        ),
        ({"zero": "auto", "bucket_mib": 50}, "zero=auto", "auto may choose", [{"zero": 0, "bucket_mib": 50}]),
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
        check_layout(ParallelConfig(**given))
    assert named in caught.value.given and said in caught.value.rule
    for remedy in remedies:
        check_layout(ParallelConfig(**remedy))
        assert "parallel." in caught.value.change


@pytest.mark.parametrize(
    ("given", "beside_pp"), [({"zero": 0, "offload": True}, {"offload": True}), ({"zero": 0, "shard": 2}, {"shard": 2})]
)
def test_the_stages_named_are_those_that_the_layout_can_have(given, beside_pp):
    for pp, stages in ((1, (2, 3)), (2, (1, 2))):
        with pytest.raises(UserError) as caught:
            check_layout(ParallelConfig(pp=pp, **given))
        assert f"parallel.zero={stages[0]} or {stages[1]}" in caught.value.change
        for stage in stages:
            check_layout(ParallelConfig(pp=pp, zero=stage, **beside_pp))


@pytest.mark.parametrize(
    ("given", "named", "remedy"),
    [
        ({"tp": 2}, "parallel.tp=2", {"tp": 1}),
        ({"context": 4}, "parallel.context=4", {"context": 1}),
        ({"tp": 2, "context": 4}, "parallel.tp=2 and parallel.context=4", {"tp": 1, "context": 1}),
        ({"pp": 2, "zero": 0, "schedule": "zbv"}, "parallel.schedule=zbv", {"pp": 2, "schedule": "1f1b"}),
    ],
)
def test_layouts_with_other_scales_are_refused_beside_fp8(given, named, remedy):
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(**given), others=OtherSettings(policy="fp8"))
    assert caught.value.given == f"{named} with precision.policy=fp8"
    assert all(f"parallel.{key}={value}" in caught.value.change for key, value in remedy.items() if key != "pp")
    assert not list(fp8_errors(ParallelConfig(**remedy), "fp8"))
    assert not list(fp8_errors(ParallelConfig(**given), "bf16"))


def test_a_model_without_a_matrix_that_fp8_multiplies_is_refused():
    odd = {
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 40,
    }
    even = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    unfit, partly = (ModelConfig.model_validate({**MODEL, **odd, **more}).architecture() for more in ({}, even))
    with pytest.raises(UserError) as caught:
        check_layout(ParallelConfig(), unfit, others=OtherSettings(policy="fp8"))
    assert caught.value.given == "precision.policy=fp8 for matrices of 40 x 40, 40 x 72, 72 x 40"
    assert "multiples of 16" in caught.value.rule and "precision.policy=bf16" in caught.value.change
    check_layout(ParallelConfig(), unfit, others=OtherSettings(policy="bf16"))
    check_layout(ParallelConfig(), partly, others=OtherSettings(policy="fp8"))


@pytest.mark.parametrize(
    ("given", "blocks", "said", "remedy"),
    [
        ({"blocks_per_unit": 4}, 3, "for a model of 3 blocks", {"blocks_per_unit": 3}),
        ({"prefetch": 4}, 3, "parallel.prefetch=4 for 3 units of 1 blocks", {"prefetch": 3}),
        ({"prefetch": 3, "blocks_per_unit": 2}, 3, "for 2 units of 2 blocks", {"prefetch": 2, "blocks_per_unit": 2}),
    ],
)
def test_units_and_prefetch_stay_within_the_model(given, blocks, said, remedy):
    (error,) = unit_errors(ParallelConfig(**given), blocks)
    assert said in error.given and f"={next(iter(remedy.values()))} or less" in error.change
    assert not list(unit_errors(ParallelConfig(**remedy), blocks))
