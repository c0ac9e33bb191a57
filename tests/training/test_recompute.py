"""A budget of activations in a recipe: refused before anything is made, chosen, told, and the losses stay what they were."""

import re

import pytest

from tests import tiny
from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.training.loop import train
from windlass.training.recompute import describe_recompute, plan_of


def recipe(base, name, **parallel):
    return tiny.recipe(base, name, parallel=parallel, run={"steps": 2, "micro_batch": 2}, evaluate={"every_steps": 2})


def architecture_of(config):
    return config.model.architecture(300)


def test_a_budget_that_cannot_be_met_is_refused_before_anything_is_made(tmp_path):
    config = recipe(tmp_path, "run", recompute="selective", activation_gib=1e-6)
    with pytest.raises(UserError, match=r"micro-batches of 2 x 16 tokens") as caught:
        train(config)
    assert not config.run.directory.exists() and not (tmp_path / "data").exists()
    gib = re.search(r"parallel.activation_gib=([\d.e-]+)", caught.value.change)[1]
    assert plan_of(recipe(tmp_path, "run", recompute="selective", activation_gib=gib), architecture_of(config), "cpu")


def test_a_budget_is_told_and_changes_no_loss(tmp_path, capsys):
    plain = recipe(tmp_path, "plain")
    train(plain)
    assert "activations" not in capsys.readouterr().out
    budget = recipe(tmp_path, "budget", recompute="selective", activation_gib=90_000 / (1 << 30))
    train(budget)
    line = "recompute in 2 blocks: 1 none, 1 selective; they keep 82.5 KiB per micro-batch"
    assert f"activations   {line}" in capsys.readouterr().out
    assert f"# activations: {line}" in (budget.run.directory / "resolved.yaml").read_text()
    assert tiny.losses(budget.run.directory) == tiny.losses(plain.run.directory)


def test_without_a_budget_the_word_is_told(tmp_path):
    config = recipe(tmp_path, "run", recompute="full")
    assert describe_recompute(config, architecture_of(config), "cpu") == {"activations": "recompute full"}
    config = recipe(tmp_path, "run")
    assert describe_recompute(config, architecture_of(config), "cpu") == {}
    assert check_recipe(config.model_dump(by_alias=True)).parallel == config.parallel
