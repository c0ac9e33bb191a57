"""The section `objective` of a recipe."""

import pytest
from pydantic import ValidationError

from windlass.objectives.config import ObjectiveConfig


def test_other_objectives_are_refused_by_name():
    assert ObjectiveConfig().kind == "pretrain"
    with pytest.raises(ValidationError, match="'pretrain'"):
        ObjectiveConfig(kind="dpo")
