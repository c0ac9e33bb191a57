"""How the optimizer of a run stores, by precision. (Programs and optimizers themselves: tests/training/test_resume*.py.)"""

import pytest
import torch

from tests import tiny
from windlass.optim.elementwise import Storage
from windlass.precision.policy import precision_of
from windlass.training.parts import open_program
from windlass.training.parts.open_program import storage_of

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
    ("device_type", "has_triton", "settings", "is_compiled"),
    [
        ("cpu", True, {}, False),
        ("cpu", False, {"parallel": {"compile": True}}, True),
        ("cuda", True, {}, True),
        ("cuda", False, {}, False),
        ("cuda", True, {"optim": {"kernel": "foreach"}}, False),
        ("cuda", True, {"parallel": {"offload": True}}, False),
    ],
)
def test_an_update_is_compiled_on_a_gpu_that_can(tmp_path, monkeypatch, device_type, has_triton, settings, is_compiled):
    monkeypatch.setattr(open_program, "has_triton", lambda: has_triton)
    monkeypatch.setattr(open_program.shutil, "which", lambda name: f"/usr/bin/{name}")
    config = tiny.recipe(tmp_path, **settings)
    assert storage_of(config, precision_of(config.precision), device_type).compiled is is_compiled
