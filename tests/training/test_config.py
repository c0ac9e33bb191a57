"""The section `run` of a recipe."""

import pytest
from pydantic.fields import FieldInfo

from windlass.checkpoint.config import CheckpointConfig
from windlass.errors import UserError
from windlass.optim.config import OptimConfig
from windlass.training.config import RunSettings

LEAST = {"directory": "runs/x", "tokens_per_step": 64}


def refused(**run):
    with pytest.raises(UserError) as caught:
        RunSettings(**LEAST, **run)
    return caught.value


def test_start_what_alone_is_refused():
    assert "run.start_what=all without run.start_from" in refused(steps=1, start_what="all").given
    assert RunSettings(**LEAST, steps=1, start_what="all", start_from="runs/y").start_what == "all"


def test_a_run_has_one_length():
    assert refused().given == "run has none of steps, tokens, epochs"
    assert refused(steps=1, epochs=2.0).given == "run has steps and epochs"
    assert RunSettings(**LEAST, tokens=128).steps is None


def test_accepted_drift_names_keys_of_a_recipe():
    """A mistyped one accepts nothing, and the resume is refused with the text of before."""
    section = {"optim": OptimConfig, "checkpoint": CheckpointConfig}
    sections = {name: FieldInfo(annotation=kind) for name, kind in section.items()}
    known = ["data", "optim.learning_rate", "checkpoint.async", "optim.muon.momentum", "model.rope_theta"]
    run = RunSettings(
        **LEAST, steps=1, accept_drift=[*known, "optim.lerning_rate", "learning_rate", "checkpoint.async_"]
    )
    given = [error.given for error in run.errors_beside(sections, False, None)]
    assert given == [f"run.accept_drift=[{one}]" for one in run.accept_drift[5:]]
    first = next(run.errors_beside(sections, False, None))
    assert "no key of a recipe" in first.rule and first.change.startswith("did you mean `optim.learning_rate`? ")
