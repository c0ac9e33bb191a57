import pytest
from pydantic import ValidationError

from windlass.checkpoint.config import CheckpointConfig


def test_async_is_spelled_async_in_a_recipe():
    assert CheckpointConfig.model_validate({"async": False}).async_ is False
    assert CheckpointConfig().async_ is True


@pytest.mark.parametrize(
    "settings",
    [
        {"every_steps": 0},
        {"every_steps": -1},
        {"every_steps": 2.5},
        {"every_minutes": 0},
        {"every_minutes": float("inf")},
        {"every_minutes": float("nan")},
        {"keep_last": 0},
        {"keep_best": -1},
        {"keep_steps": [-1]},
        {"keep_steps": 5},
        {"keep_step": [5]},
        {"async": "perhaps"},
    ],
)
def test_nonsense_is_refused_and_names_its_key(settings):
    with pytest.raises(ValidationError) as caught:
        CheckpointConfig.model_validate(settings)
    assert next(iter(settings)) in str(caught.value)


def test_step_zero_may_be_kept():
    assert CheckpointConfig(keep_steps=[0]).keep_steps == [0]
