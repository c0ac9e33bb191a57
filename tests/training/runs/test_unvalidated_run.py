"""Runs that hold nothing out: they train, report and end as others do, and what needs a validation loss is refused."""

import pytest

from tests import tiny
from windlass.commands.models.evaluate import evaluate
from windlass.errors import UserError
from windlass.report.events import read_events
from windlass.training.loop import train

NONE = {"validation": "none"}


def test_a_run_without_a_validation_set_trains_and_none_can_be_evaluated(tmp_path):
    config = tiny.recipe(tmp_path, run={"steps": 3}, data=NONE)
    train(config)
    kinds = [line["kind"] for line in read_events(config.run.directory / "events.jsonl")]
    assert kinds.count("step") == 3 and kinds[-1] == "end" and "validation" not in kinds
    assert (config.run.directory / "report.html").is_file()
    with pytest.raises(UserError) as caught:
        evaluate(config.run.directory)
    assert caught.value.given == "data.validation: none and no evaluate.sets"


def test_sets_of_their_own_are_still_scored(tmp_path):
    sets = {"sets": {"again": {"path": str(tiny.write_corpus(tmp_path / "corpus"))}}}
    config = tiny.recipe(tmp_path, run={"steps": 2}, optim={"warmup_steps": 0}, data=NONE, evaluate=sets)
    train(config)
    lines = [line for line in read_events(config.run.directory / "events.jsonl") if line["kind"] == "validation"]
    assert {line["name"] for line in lines} == {"again"} and len(lines) == 2
    assert [score.name for score in evaluate(config.run.directory)] == ["again"]


def test_the_best_checkpoints_need_a_validation_loss(tmp_path):
    with pytest.raises(UserError) as caught:
        tiny.recipe(tmp_path, data=NONE, checkpoint={"keep_best": 1, "every_steps": 5})
    assert caught.value.given == "checkpoint.keep_best=1 with data.validation: none and no evaluate.sets"
