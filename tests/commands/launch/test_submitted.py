"""What is asked of a recipe before it is submitted, where its base may be on the cluster alone."""

import pytest

from tests import tiny
from windlass.commands.launch.submitted import check_layout_there
from windlass.errors import UserError

BASE = dict.fromkeys(tiny.MODEL) | {"from": "/of/the/cluster"}


def test_the_model_of_the_recipe_is_held_against_the_layout(tmp_path):
    check_layout_there(tiny.recipe(tmp_path, parallel={"zero": 2}), 2)
    with pytest.raises(UserError, match=r"parallel\.tp=2 for a model of 3 query heads"):
        check_layout_there(tiny.recipe(tmp_path, parallel={"tp": 2}), 2)


def test_a_base_that_is_not_here_is_held_against_the_number_of_ranks_alone(tmp_path):
    config = tiny.recipe(tmp_path, model=BASE, parallel={"tp": 2})
    check_layout_there(config, 2)
    with pytest.raises(UserError, match="3 ranks"):
        check_layout_there(config, 3)
