"""Validation of a checkpoint, on any number of ranks."""

import json
from functools import partial

import pytest
import yaml

from tests import tiny
from windlass.errors import UserError


def evaluate(path, **options):
    from windlass.commands.models.evaluate import evaluate as score

    return score(path, **options)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_evaluation_of_a_checkpoint_repeats_the_loss_of_training_on_any_world(run, ranks, world):
    from windlass.report.events import read_events

    lines = ranks.run(world, evaluate, run)
    logged = [line for line in read_events(run / "events.jsonl") if line["kind"] == "validation"][-1]
    assert lines[1:] == [[]] * (world - 1), "rank 0 alone speaks"
    assert f"step {logged['step']}, loss {logged['loss']:.4f}" in lines[0][0].line
    assert f"{logged['bits_per_byte']:.3f} bits per byte" in lines[0][0].line


def test_a_part_of_a_set_is_named_beside_the_whole(run, ranks):
    ((part, *_),) = ranks.run(1, evaluate, run)
    ((whole, *_),) = ranks.run(1, partial(evaluate, sequences=1_000_000), run)
    held = json.loads((run.parent / "data/prepared.json").read_text())["sets"]["validation"]["samples"]
    assert part.line.endswith(f", {part.count:,} targets (6 of {held} samples)") and held > 6
    assert whole.line.endswith(f", {whole.count:,} targets") and whole.count > part.count


def test_one_process_in_bf16_scores_the_weights_of_the_checkpoint(ranks, tmp_path):
    """Its products read copies of them (precision/masters.py)."""
    config = tiny.recipe(tmp_path, precision={"policy": "bf16"}, optim={"learning_rate": 1e-2})
    ranks.run(1, tiny.train, config)
    ((score, *_),) = ranks.run(1, evaluate, config.run.directory)
    first, *_, last = [line["loss"] for line in tiny.lines(config.run.directory) if line["kind"] == "validation"]
    assert score.loss == pytest.approx(last, rel=1e-6) and abs(last - first) > 0.01


def test_a_number_of_sequences_below_one_is_refused(run):
    with pytest.raises(UserError, match="--sequences 0"):
        evaluate(run, sequences=0)


def test_auto_of_a_recipe_is_what_the_devices_here_have(exported, run, ranks, tmp_path):
    """A recipe that `windlass init` wrote has `policy: auto`: fp32 on CPU, as in training."""
    recipe = tmp_path / "recipe.yaml"
    scores = {}
    for policy in ("fp32", "auto", "bf16"):
        override = yaml.safe_load((run / "resolved.yaml").read_text()) | {"precision": {"policy": policy}}
        recipe.write_text(yaml.safe_dump(override))
        ((score, *_),) = ranks.run(1, partial(evaluate, recipe=str(recipe)), exported.directory)
        scores[policy] = score.loss
    assert scores["auto"] == scores["fp32"] != scores["bf16"]
