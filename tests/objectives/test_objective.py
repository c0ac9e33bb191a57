"""Which objective a recipe asks for."""

import pytest

from windlass.objectives.config import ObjectiveConfig
from windlass.objectives.objective import objective_of
from windlass.objectives.preference import Preference
from windlass.objectives.pretrain import Pretrain


@pytest.mark.parametrize(
    ("kind", "made", "unit"),
    [("pretrain", Pretrain, "targets"), ("sft", Pretrain, "targets"), ("dpo", Preference, "pairs")],
)
def test_each_kind(kind, made, unit):
    config = ObjectiveConfig(kind=kind)
    objective = objective_of(config)
    assert type(objective) is made and config.unit == unit
    assert objective.figures() == {}, "nothing was weighed"
