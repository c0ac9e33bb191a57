"""The section `run` of a recipe."""

import pytest

from windlass.errors import UserError
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
