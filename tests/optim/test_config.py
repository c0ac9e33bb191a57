"""What a recipe may say about the optimizer."""

import pytest
from pydantic import ValidationError

from windlass.errors import UserError
from windlass.optim.config import OptimConfig


def test_a_decay_fraction_without_wsd_is_refused_and_both_remedies_work():
    with pytest.raises(UserError) as caught:
        OptimConfig(schedule="cosine", decay_fraction=0.3)
    assert caught.value.given == "optim.decay_fraction=0.3 with optim.schedule=cosine"
    assert "no effect" in caught.value.rule and "optim.schedule=wsd" in caught.value.change
    assert OptimConfig(schedule="wsd", decay_fraction=0.3).decay_fraction == 0.3
    OptimConfig(schedule="cosine")


def test_a_default_that_is_written_out_loads_again():
    for config in (OptimConfig(), OptimConfig(schedule="wsd"), OptimConfig(schedule="constant")):
        assert OptimConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", -1e-3),
        ("warmup_steps", -1),
        ("floor", 1.1),
        ("decay_fraction", 0.0),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("epsilon", 0.0),
        ("weight_decay", -0.1),
        ("max_norm", 0.0),
        ("kernel", "loop"),
    ],
)
def test_values_out_of_range_are_refused(key, value):
    with pytest.raises(ValidationError, match=key):
        OptimConfig.model_validate({"schedule": "wsd", key: value})
