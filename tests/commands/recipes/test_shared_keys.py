"""What transformers' keys say in files of other tools: the floor of the rate, intervals as shares of the steps."""

import pytest

from tests.commands.recipes.test_import_recipe import AXOLOTL, of


@pytest.mark.parametrize(
    ("more", "floor"),
    [
        ({"cosine_min_lr_ratio": 0.1}, 0.1),
        ({"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.2}}, 0.2),
        ({"lr_scheduler_kwargs": {"min_lr": 1e-5}, "learning_rate": 2e-4}, 0.05),
        ({}, 0.0),
    ],
)
def test_the_floor_of_the_learning_rate(more, floor):
    found = of({**AXOLOTL, **more})
    assert found.tree["optim"]["floor"] == pytest.approx(floor) and len(found.left) == 1  # the warm-up


def test_a_floor_that_is_none_and_arguments_of_a_schedule_that_are_unknown_are_named():
    found = of({**AXOLOTL, "lr_scheduler_kwargs": {"min_lr_rate": 3, "num_cycles": 2}})
    assert found.tree["optim"]["floor"] == 0
    assert [given for given, _ in found.left][1:] == ["num_cycles of lr_scheduler_kwargs: 2", "a floor of 3"]


@pytest.mark.parametrize(
    ("key", "ours"), [("save_steps", "checkpoint"), ("eval_steps", "evaluate"), ("logging_steps", "report")]
)
def test_a_share_of_the_steps_is_that_many_steps(key, ours):
    assert of({**AXOLOTL, "max_steps": 400, key: 0.1}).tree[ours]["every_steps"] == 40
