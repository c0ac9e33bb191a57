"""Killed and resumed is bit-equal where more is kept than weights and fp32 moments: noise, bf16 moments, the loss scale."""

import functools
import json
from unittest import mock

import pytest

from tests import tiny
from tests.training.test_resume import WORLD, assert_same_state
from windlass.precision import loss_scale as scaler
from windlass.proof.pool import RankFailed
from windlass.training.open_saved import open_saved

POLICIES = {
    "fp16": {"policy": "fp16"},
    "bf16-pure": {"policy": "bf16-pure"},
    "bf16 states": {"policy": "bf16", "states": "bf16"},
}


def train(config, kill=None):
    """With a loss scale that overflows at first, and grows every third good step."""
    with mock.patch.object(scaler, "FIRST_SCALE", 2.0**20), mock.patch.object(scaler, "GROWTH_STEPS", 3):
        return tiny.train(config, kill)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("resume-precision")


@pytest.fixture(scope="module")
def whole(base, ranks):
    """whole(policy) -> the directory of its run that was never killed."""

    @functools.cache
    def make(name):
        config = tiny.recipe(base, f"whole-{name}", precision=POLICIES[name])
        ranks.run(WORLD, train, config)
        return config.run.directory

    return make


@pytest.mark.parametrize("name", ["fp16", "bf16-pure", pytest.param("bf16 states", marks=pytest.mark.long)])
def test_killed_and_resumed_is_bit_equal(base, ranks, whole, name):
    config = tiny.recipe(base, f"killed-{name}", precision=POLICIES[name])
    with pytest.raises(RankFailed, match="died with exit code -9"):
        ranks.run(WORLD, train, config, (1, 8))
    ranks.run(WORLD, train, config)
    assert tiny.losses(config.run.directory) == tiny.losses(whole(name))
    assert_same_state(config.run.directory, whole(name))


def step_lines(directory):
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "step"}


def test_fp16_skips_while_its_scale_falls_and_trains_in_between(whole):
    lines = step_lines(whole("fp16"))
    skipped = [step for step, line in lines.items() if line["skipped"]]
    assert skipped[0] == 1 and 2 <= len(skipped) <= 5, skipped
    assert all(line["gradient_norm"] is None for step, line in lines.items() if step in skipped)
    assert all(4 < line["loss"] < 7 for line in lines.values()), "in nats, whatever the scale"
    assert lines[10]["loss"] < lines[1]["loss"]
    assert '"incident"' not in (whole("fp16") / "events.jsonl").read_text(), "an overflow of the scale is no incident"


def test_a_checkpoint_of_bf16_weights_is_read_by_every_other_job(whole):
    saved = open_saved(whole("bf16-pure"))
    assert saved.step == tiny.STEPS
    assert all(parameter.isfinite().all() for parameter in saved.model.parameters())
