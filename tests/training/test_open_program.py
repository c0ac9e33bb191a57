"""How the optimizer of a run stores, by precision. (Programs and optimizers themselves: tests/training/test_resume*.py.)"""

import pytest
import torch

from tests import tiny
from windlass.optim.elementwise import Storage
from windlass.precision.policy import precision_of
from windlass.training.open_program import storage_of

PURE = {"policy": "bf16-pure"}
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "storage"),
    [
        ({"policy": "fp32"}, Storage(seed=5, gradients=FP32)),
        ({"policy": "bf16"}, Storage(seed=5, gradients=FP32)),
        ({"policy": "bf16", "gradients": "bf16"}, Storage(seed=5, gradients=BF16)),
        ({"policy": "bf16", "states": "bf16"}, Storage(states=BF16, stochastic=True, seed=5, gradients=FP32)),
        ({**PURE, "rounding": "nearest"}, Storage(states=BF16, seed=5, watch_every=7, gradients=BF16)),
        ({**PURE, "rounding": "stochastic"}, Storage(states=BF16, stochastic=True, seed=5, gradients=BF16)),
    ],
)
def test_updates_are_rounded_and_counted_where_the_precision_loses_some(tmp_path, precision, storage):
    config = tiny.recipe(tmp_path, precision=precision, run={"seed": 5}, report={"every_steps": 7})
    assert storage_of(config, precision_of(config.precision), "cpu") == storage


@pytest.mark.parametrize(
    ("device_type", "compile", "is_compiled"), [("cpu", False, False), ("cpu", True, True), ("cuda", False, True)]
)
def test_an_update_is_always_compiled_on_a_gpu(tmp_path, device_type, compile, is_compiled):
    config = tiny.recipe(tmp_path, parallel={"compile": compile})
    assert storage_of(config, precision_of(config.precision), device_type).compiled is is_compiled
