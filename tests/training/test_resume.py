"""A run that was killed and started again is the run that was never killed: bit for bit on the same layout, and with the same
samples in the same order on any other."""

import itertools
import json
import random

import pytest

from tests import tiny
from windlass.checkpoint.keep import Difference, diff
from windlass.proof.pool import RankFailed

WORLD = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def whole(base, ranks):
    """The runs never killed, by kernel: (directory, results)."""
    runs = {}
    for kernel in ("fused", "foreach"):
        config = tiny.recipe(base, f"whole-{kernel}", optim={"kernel": kernel})
        runs[kernel] = (config.run.directory, ranks.run(WORLD, tiny.train, config))
    return runs


def checkpoint(directory, step=tiny.STEPS):
    return directory / "checkpoints" / f"step-{step:08d}"


def assert_same_state(one, two):
    difference = diff(checkpoint(one), checkpoint(two))
    assert difference == Difference(same=difference.same) and difference.same > 0, difference


QUICK = {("fused", True, 0), ("foreach", False, 0)}  # both kernels, both ways of saving
KILLED = list(itertools.product(("fused", "foreach"), (True, False), (0, 1)))


@pytest.mark.parametrize(
    ("kernel", "background", "trial"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.long) for cell in KILLED],
)
def test_killed_and_resumed_is_bit_equal(base, ranks, whole, kernel, background, trial):
    draw = random.Random(f"{kernel}{background}{trial}")
    step, victim = draw.randint(1, tiny.STEPS), draw.randrange(WORLD)
    config = tiny.recipe(
        base, f"killed-{kernel}-{background}-{trial}", optim={"kernel": kernel}, checkpoint={"async": background}
    )
    with pytest.raises(RankFailed, match="died with exit code -9"):
        ranks.run(WORLD, tiny.train, config, (victim, step))
    ranks.run(WORLD, tiny.train, config)
    expected, _ = whole[kernel]
    assert tiny.losses(config.run.directory) == tiny.losses(expected), f"killed rank {victim} at step {step}"
    assert_same_state(config.run.directory, expected)


@pytest.mark.parametrize("world", [1, 4])
def test_another_world_reads_the_same_samples_and_loses_the_same(base, ranks, whole, world):
    config = tiny.recipe(base, f"moved-{world}")
    with pytest.raises(RankFailed):
        ranks.run(WORLD, tiny.train, config, (0, 8))
    resumed = ranks.run(world, tiny.train, config)
    directory, results = whole["fused"]
    expected, got = tiny.losses(directory), tiny.losses(config.run.directory)
    assert got.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert abs(got[step][0] - loss) <= 1e-5 and abs(got[step][1] - norm) <= 1e-5, step
    num_steps = len(resumed[0]["rows"])
    assert num_steps in (tiny.STEPS - 6, tiny.STEPS - 3), "it went on from step 6, or from 3 if 6 was not committed yet"
    order = [sum((result["rows"][step] for result in results), []) for step in range(tiny.STEPS)][-num_steps:]
    assert [sum((result["rows"][step] for result in resumed), []) for step in range(num_steps)] == order


GPT2 = {
    **dict.fromkeys(tiny.QWEN3_KEYS),
    "family": "gpt2",
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 64,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}


@pytest.fixture(scope="module")
def dropped(base, ranks):
    """The directory of a run with dropout, never killed."""
    config = tiny.recipe(base, "dropped", model=GPT2)
    ranks.run(WORLD, tiny.train, config)
    return config.run.directory


def test_with_dropout_too_killed_and_resumed_is_bit_equal(base, ranks, dropped):
    config = tiny.recipe(base, "dropped-killed", model=GPT2)
    with pytest.raises(RankFailed):
        ranks.run(WORLD, tiny.train, config, (1, 5))
    ranks.run(WORLD, tiny.train, config)
    assert tiny.losses(config.run.directory) == tiny.losses(dropped)
    assert_same_state(config.run.directory, dropped)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 4])
def test_with_dropout_too_another_world_loses_the_same(base, ranks, dropped, world):
    config = tiny.recipe(base, f"dropped-moved-{world}", model=GPT2)
    with pytest.raises(RankFailed):
        ranks.run(WORLD, tiny.train, config, (0, 8))
    ranks.run(world, tiny.train, config)
    expected, got = tiny.losses(dropped), tiny.losses(config.run.directory)
    assert got.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert abs(got[step][0] - loss) <= 1e-5 and abs(got[step][1] - norm) <= 1e-5, step


def test_dropout_is_told_before_step_1_and_changes_the_losses(base, ranks, dropped):
    first = json.loads((dropped / "events.jsonl").read_text().splitlines()[0])
    told = first["derived"]["dropout"]
    assert told.startswith("resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1") and "model.attn_pdrop=0.0" in told
    config = tiny.recipe(base, "undropped", model={**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    ranks.run(WORLD, tiny.train, config)
    with_dropout, without = tiny.losses(dropped), tiny.losses(config.run.directory)
    assert all(abs(with_dropout[step][0] - without[step][0]) > 1e-6 for step in without)
    first = json.loads((config.run.directory / "events.jsonl").read_text().splitlines()[0])
    assert "dropout" not in first["derived"]


def test_a_finished_run_started_again_does_nothing(base, ranks):
    config = tiny.recipe(base, "again", run={"steps": 3})
    first = ranks.run(1, tiny.train, config)[0]
    before = tiny.losses(config.run.directory)
    again = ranks.run(1, tiny.train, config)[0]
    assert (first["step"], again["step"], again["rows"]) == (3, 3, [])
    assert tiny.losses(config.run.directory) == before
