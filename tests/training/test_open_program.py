"""How the optimizer of a run stores, by precision. (Programs and optimizers themselves: tests/training/test_resume*.py.)"""

import pytest
import torch

from tests import tiny
from windlass.optim.elementwise import Storage
from windlass.precision.policy import precision_of
from windlass.training.open_program import storage_of

PURE = {"policy": "bf16-pure"}


@pytest.mark.parametrize(
    ("precision", "storage"),
    [
        ({"policy": "fp32"}, Storage(states=None, stochastic=False, seed=5, watch_every=0)),
        ({"policy": "bf16"}, Storage(states=None, stochastic=False, seed=5, watch_every=0)),
        ({"policy": "bf16", "states": "bf16"}, Storage(states=torch.bfloat16, stochastic=True, seed=5, watch_every=0)),
        ({**PURE, "rounding": "nearest"}, Storage(states=torch.bfloat16, stochastic=False, seed=5, watch_every=7)),
        ({**PURE, "rounding": "stochastic"}, Storage(states=torch.bfloat16, stochastic=True, seed=5, watch_every=0)),
    ],
)
def test_updates_are_rounded_and_counted_where_the_precision_loses_some(tmp_path, precision, storage):
    config = tiny.recipe(tmp_path, precision=precision, run={"seed": 5}, report={"every_steps": 7})
    assert storage_of(config, precision_of(config.precision)) == storage
