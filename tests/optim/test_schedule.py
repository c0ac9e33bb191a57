"""The learning rate of a step, against numbers worked out by hand."""

import itertools

import pytest

from windlass.optim.config import OptimConfig
from windlass.optim.schedule import learning_rate

HALF = 2**-0.5  # cos(pi/4)

# 12 steps, 4 of them warm-up: the 8 after it are at p = 1/8 ... 1
TABLES = {
    "cosine to 0": (
        dict(learning_rate=2.0, warmup_steps=4, floor=0.0),
        {0: 0.5, 1: 1.0, 3: 2.0, 5: 1 + HALF, 7: 1.0, 9: 1 - HALF, 11: 0.0, 12: 0.0, 15: 0.0, 100: 0.0},
    ),
    "cosine to a tenth": (
        dict(learning_rate=2.0, warmup_steps=4, floor=0.1),
        {0: 0.5, 3: 2.0, 5: 1.1 + 0.9 * HALF, 7: 1.1, 9: 1.1 - 0.9 * HALF, 11: 0.2, 12: 0.2, 23: 0.2},
    ),
    "wsd": (
        dict(learning_rate=2.0, warmup_steps=4, floor=0.1, schedule="wsd", decay_fraction=1 / 3),
        {0: 0.5, 3: 2.0, 4: 2.0, 7: 2.0, 8: 1.55, 9: 1.1, 10: 0.65, 11: 0.2, 12: 0.2, 99: 0.2},
    ),
    "linear": (
        dict(learning_rate=2.0, warmup_steps=4, floor=0.1, schedule="linear"),
        {0: 0.5, 3: 2.0, 4: 1.775, 7: 1.1, 11: 0.2, 12: 0.2, 99: 0.2},
    ),
    "constant": (
        dict(learning_rate=2.0, warmup_steps=4, floor=0.1, schedule="constant"),
        {0: 0.5, 2: 1.5, 3: 2.0, 11: 2.0, 99: 2.0},
    ),
    "no warm-up": (
        dict(learning_rate=2.0, warmup_steps=0, floor=0.5, schedule="wsd", decay_fraction=1.0),
        {0: 2 - 1 / 12, 5: 1.5, 11: 1.0, 12: 1.0},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_rates_are_those_of_the_table(name):
    settings, table = TABLES[name]
    config = OptimConfig(**settings)
    assert {step: learning_rate(step, 12, config) for step in table} == pytest.approx(table, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("warmup", [0, 1, 4, 12])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_it_rises_in_warm_up_and_never_again(schedule, warmup):
    config = OptimConfig(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup, floor=0.05)
    rates = [learning_rate(step, 12, config) for step in range(40)]
    assert all(0 < rate <= 3e-4 * (1 + 1e-12) for rate in rates), "no update at 0, none over the peak"
    assert all(later > earlier for earlier, later in itertools.pairwise(rates[:warmup]))
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[max(0, warmup - 1) :]))
    assert len(set(rates[11:])) == 1, "clamped past the end"


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear", "constant"])
def test_one_step_is_a_run(schedule):
    config = OptimConfig(learning_rate=1.0, schedule=schedule, floor=0.1).within(1)
    assert learning_rate(0, 1, config) == (1.0 if schedule == "constant" else pytest.approx(0.1))


@pytest.mark.parametrize(
    ("steps", "given", "warmup"),
    [
        (1, {}, 0),
        (49, {}, 0),
        (50, {}, 1),
        (2_549, {}, 50),
        (100_000, {}, 2000),
        (10**7, {}, 2000),
        (10**7, {"warmup_steps": 7}, 7),
        (10**7, {"warmup_steps": 0}, 0),
        (1000, {"schedule": "wsd", "decay_fraction": 0.99}, 10),
        (1000, {"schedule": "wsd", "decay_fraction": 1.0}, 0),
    ],
)
def test_warm_up_is_derived_from_the_length(steps, given, warmup):
    assert OptimConfig(**given).within(steps).warmup_steps == warmup
