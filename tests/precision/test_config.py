"""Every combination of precision settings means something, or is refused with the numbers."""

import pytest

from windlass.errors import UserError, raise_all
from windlass.precision.config import PrecisionConfig

BEST = dict(zero=3, optimizer="adamw", beta2=0.95)


def refused(beside=None, **settings):
    with pytest.raises(UserError) as caught:
        raise_all(PrecisionConfig(**settings).errors_beside(**{**BEST, **(beside or {})}))
    return caught.value


@pytest.mark.parametrize(
    ("settings", "dtypes"),
    [
        ({"policy": "fp64"}, ("fp64", "fp64", "fp64", "fp64")),
        ({"policy": "fp32"}, ("fp32", "fp32", "fp32", "fp32")),
        ({"policy": "bf16"}, ("fp32", "bf16", "fp32", "fp32")),
        ({"policy": "fp16"}, ("fp32", "fp16", "fp32", "fp32")),
        ({"policy": "bf16-pure"}, ("bf16", "bf16", "fp32", "bf16")),
        ({"policy": "fp8"}, ("fp32", "bf16", "fp32", "fp32")),
        ({"policy": "fp8", "scaling": "rowwise", "gradients": "bf16"}, ("fp32", "bf16", "fp32", "fp32")),
        ({"policy": "bf16", "states": "bf16"}, ("fp32", "bf16", "fp32", "bf16")),
        ({"policy": "bf16-pure", "parameters": "fp32"}, ("bf16", "fp32", "fp32", "bf16")),
        ({"policy": "bf16", "reduce": "bf16"}, ("fp32", "bf16", "bf16", "fp32")),
    ],
)
def test_what_is_left_out_is_the_policys(settings, dtypes):
    config = PrecisionConfig(**settings)
    assert list(config.errors_beside(**BEST)) == []
    assert (config.stored, config.computed, config.reduced, config.kept) == dtypes
    assert PrecisionConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("settings", "is_stochastic"),
    [
        ({"policy": "bf16"}, False),
        ({"policy": "bf16", "states": "bf16"}, True),
        ({"policy": "bf16-pure"}, True),
        ({"policy": "bf16-pure", "rounding": "nearest"}, False),
    ],
)
def test_bf16_is_stored_stochastically_unless_asked_otherwise(settings, is_stochastic):
    assert PrecisionConfig(**settings).is_stochastic == is_stochastic


def test_scaling_is_of_fp8_alone_and_tensorwise_where_left_out():
    assert PrecisionConfig(policy="bf16").fp8_scaling is None
    assert PrecisionConfig(policy="fp8").fp8_scaling == "tensorwise"
    assert PrecisionConfig(policy="fp8", scaling="rowwise").fp8_scaling == "rowwise"
    error = refused(policy="bf16", scaling="rowwise")
    assert error.given == "precision.scaling=rowwise with precision.policy=bf16" and "fp8" in error.rule
    assert error.change == "remove precision.scaling, or use precision.policy=fp8"


def test_fp8_beside_an_adapter_is_refused():
    error = refused({"adapter": "lora"}, policy="fp8")
    assert error.given == "precision.policy=fp8 with adapter.kind=lora" and error.change == "use precision.policy=bf16"
    assert list(PrecisionConfig(policy="fp8").errors_beside(**BEST, adapter="none")) == []


def test_fp64_takes_no_other_dtype():
    error = refused(policy="fp64", states="bf16", output="fp32")
    assert "precision.states=bf16 and precision.output=fp32" in error.given and "64 bits" in error.rule
    assert "remove states and output" in error.change
    assert "precision.reduce=fp32" in refused(policy="fp64", reduce="fp32").given


def test_pure_bf16_with_wide_moments_names_the_policy_that_has_fp32_weights():
    error = refused(policy="bf16-pure", states="fp32")
    assert "6 bytes per parameter" in error.rule and "precision.policy=bf16 with precision.states=bf16" in error.change


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("policy", ["fp64", "fp32", "bf16", "fp16"])
def test_rounding_needs_something_that_is_rounded(policy, rounding):
    error = refused(policy=policy, rounding=rounding)
    assert f"precision.rounding={rounding} with precision.policy={policy}" in error.given
    assert "precision.states=bf16 or precision.policy=bf16-pure" in error.change


@pytest.mark.parametrize(
    ("policy", "parameters", "other"),
    [("fp32", "bf16", "bf16-pure or bf16"), ("bf16", "fp32", "fp32"), ("bf16-pure", "fp16", "fp16")],
)
def test_another_dtype_of_products_is_another_policy(policy, parameters, other):
    error = refused(policy=policy, parameters=parameters)
    assert f"precision.parameters={parameters} with precision.policy={policy}" in error.given
    assert f"use precision.policy={other}" in error.change
    PrecisionConfig(policy="bf16", parameters="bf16")  # what the policy says may be said


def test_ddp_cannot_widen_what_it_multiplies():
    error = refused({"zero": 0}, policy="bf16-pure", parameters="fp32")
    assert "parallel.zero=0" in error.given and "parallel.zero=1 or 2" in error.change


def test_a_second_moment_that_would_never_fall_is_refused_with_its_numbers():
    for settings in ({"policy": "bf16-pure"}, {"policy": "fp32", "states": "bf16"}):
        error = refused({"beta2": 0.999}, **settings, rounding="nearest")
        assert "optim.beta2=0.999" in error.given and "0.001" in error.rule and "0.0039" in error.rule
        assert "precision.rounding=stochastic" in error.change
        assert list(PrecisionConfig(**settings, rounding="nearest").errors_beside(**BEST | {"beta2": 0.99})) == []
        assert list(PrecisionConfig(**settings).errors_beside(**BEST | {"beta2": 0.999})) == []


@pytest.mark.parametrize("settings", [{"policy": "bf16-pure"}, {"policy": "bf16", "states": "bf16"}])
def test_another_optimizer_does_not_store_in_bf16(settings):
    error = refused({"optimizer": "muon"}, **settings)
    assert "optim.kind=muon" in error.given and "moments in bf16" in error.given and "optim.kind=adamw" in error.change
    assert list(PrecisionConfig(policy="bf16").errors_beside(**BEST | {"optimizer": "muon"})) == []


def test_gradients_have_a_dtype_of_their_own_beside_fp32_weights_that_are_multiplied_in_bf16():
    assert [PrecisionConfig(policy="bf16", gradients=one).added for one in (None, "fp32", "bf16")] == [
        "fp32",
        "fp32",
        "bf16",
    ]
    assert PrecisionConfig(policy="bf16-pure").added == "bf16"
    for policy in ("fp32", "fp16", "bf16-pure", "auto"):
        error = refused(policy=policy, gradients="bf16")
        assert (
            f"precision.gradients=bf16 with precision.policy={policy}" in error.given and "policy=bf16" in error.change
        )
    assert "optim.kind=adamw" in refused({"optimizer": "muon"}, policy="bf16", gradients="bf16").change
    assert "parallel.offload=false" in refused({"is_offloaded": True}, policy="bf16", gradients="bf16").change
