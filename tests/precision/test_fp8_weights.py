"""Weights that are cast ahead: products read the same bits as of those they cast themselves, and a byte less of each is sent."""

import contextlib
import math
from functools import partial
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.test_fsdp import Sizes
from tests.parallel.tiny import batch, each, make_program
from tests.precision.test_fp8 import WIDE
from windlass.optim.groups import write_copies
from windlass.parallel import build, program
from windlass.precision.config import PrecisionConfig
from windlass.precision.fp8_weights import CastWeights, cast_to, compiled_cast
from windlass.precision.masters import COMPILED_FROM
from windlass.ranks.owned_part import local_tensor

DEEP = WIDE | {"num_hidden_layers": 4}
TARGETS = 8


@torch.no_grad()
def scale_weights(records, factor):
    for record in records:
        record.tensor.mul_(factor)
    write_copies(records)


def trained(world, is_cast_ahead, settings, scaling):
    """On a rank, over two steps with other weights before each call: what the program returns, gradients, the bytes of all
    gathers, and the shape of each of its parameters."""
    with contextlib.ExitStack() as stack:
        if not is_cast_ahead:
            stack.enter_context(
                mock.patch.object(program, "CastWeights", lambda *_: CastWeights({}, {}, torch.bfloat16))
            )
            stack.enter_context(mock.patch.object(build, "keep_in_fp8", list))
        made = make_program(world, model=DEEP, policy="fp8", precision={"scaling": scaling}, **settings)
    records, found = made.records(), []
    with Sizes() as sizes:
        for step in range(2):
            batches = [batch(2 * step), batch(2 * step + 1)]
            found.append(made.evaluate(batches))
            scale_weights(records, 1.3)
            found.append(made.score(batches))
            scale_weights(records, 0.7)
            found.append(made.run(batches, torch.tensor(2.0 * TARGETS * world)))
            for record in records:
                found.append(local_tensor(record.tensor.grad).clone())
                record.tensor.grad = None
            scale_weights(records, 1.1)
    shapes = {record.name: tuple(record.logical_shape) for record in records}
    return found, sizes.bytes["allgather_base"], shapes


@pytest.mark.parametrize(
    ("world", "settings", "scaling", "num_in_fp8", "gathers"),
    [
        # gathers of a block in a step: two forwards in each of three calls, and two backwards
        (2, {"zero": 3, "shard": 2}, "tensorwise", 28, 8),
        (2, {"zero": 2, "shard": 2}, "tensorwise", 28, 3),
        (2, {"zero": 1, "shard": 2, "recompute": "selective"}, "tensorwise", 28, 3),
        (2, {"zero": 3, "shard": 2}, "rowwise", 0, 8),
        (3, {"zero": 3, "shard": 3}, "tensorwise", 8, 8),  # gate and up have 48 rows, the others 32 or 16
        (4, {"zero": 3, "shard": 2, "replicate": 2}, "tensorwise", 28, 8),
        (4, {"zero": 2, "shard": 2, "pp": 2, "schedule": "1f1b"}, "tensorwise", 21, 3),  # of the first stage
        (2, {"zero": 3, "shard": 2, "offload": True}, "tensorwise", 0, 8),
        # beside masters nothing is gathered
        (1, {}, "tensorwise", 28, 0),
        (1, {}, "rowwise", 0, 0),
        (2, {"zero": 0, "replicate": 2}, "tensorwise", 28, 0),
        (2, {"pp": 2, "schedule": "zbv"}, "tensorwise", 14, 0),
    ],
)
def test_the_same_bits_and_a_byte_less_per_weight(ranks, world, settings, scaling, num_in_fp8, gathers):
    policy, shards = PrecisionConfig(policy="fp8", scaling=scaling), settings.get("shard", 1)
    calls = (partial(trained, world, is_ahead, settings, scaling) for is_ahead in (True, False))
    found = ranks.run(world, each, *calls)
    for (ahead, few, shapes), (by_products, many, _) in found:
        assert len(ahead) == len(by_products)
        assert [
            index for index, (one, other) in enumerate(zip(ahead, by_products)) if not torch.equal(one, other)
        ] == []
        names = policy.cast_ahead(shapes, shards, settings.get("offload", False))
        assert many - few == 2 * gathers * sum(math.prod(shapes[name]) for name in names)
    assert len(policy.cast_ahead(found[0][0][2], shards, settings.get("offload", False))) == num_in_fp8


@pytest.mark.filterwarnings("ignore")  # the compiler's own, on caches and torch.jit
def test_a_compiled_cast_has_the_same_bits():
    """Among them numbers halfway between two of eight bits once they are rounded to sixteen, and not before."""
    rows = torch.randn(COMPILED_FROM, generator=torch.Generator().manual_seed(7)).mul_(0.02)
    rows[:1024] = (17 + 2 * torch.arange(1024) % 16) / 16 * (1 + 2.0**-9) / 64
    scale = torch.tensor(448 / rows.abs().max().item())
    found = [torch.empty_like(rows, dtype=torch.float8_e4m3fn) for _ in range(2)]
    for codes, cast in zip(found, (cast_to, compiled_cast())):
        cast(codes, rows, scale, torch.bfloat16)
    assert torch.equal(*(codes.view(torch.uint8) for codes in found))
    assert not torch.equal(found[0].view(torch.uint8), (rows * scale).to(torch.float8_e4m3fn).view(torch.uint8))


class Casts(TorchDispatchMode):
    """Casts to eight bits of tensors of these shapes."""

    def __init__(self, shapes):
        super().__init__()
        self.number, self._shapes = 0, shapes

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_cast = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if is_cast and result.dtype == torch.float8_e4m3fn != args[-1].dtype:
            self.number += tuple(result.shape) in self._shapes
        return result


def casts_of_a_step(micro_batches, scaling):
    """On one rank: casts of weights, or of their transposes."""
    made = make_program(1, model=DEEP, policy="fp8", precision={"scaling": scaling})
    shapes = {tuple(record.logical_shape) for record in made.records() if "_proj" in record.name}
    flat = {(math.prod(shape),) for shape in shapes}
    with Casts(shapes | {shape[::-1] for shape in shapes} | flat) as casts:
        made.run([batch(index) for index in range(micro_batches)], torch.tensor(1.0 * TARGETS * micro_batches))
    return casts.number


def test_no_micro_batch_casts_a_weight(ranks):
    cases = [(micro_batches, scaling) for scaling in ("tensorwise", "rowwise") for micro_batches in (1, 3)]
    (found,) = ranks.run(1, each, *(partial(casts_of_a_step, *case) for case in cases))
    assert found == [28, 28, 2 * 28, 3 * 2 * 28], "rowwise products cast each weight forward and backward"


def test_offloaded_weights_and_those_of_another_policy_are_not_cast_ahead():
    shapes = {"model.layers.0.mlp.up_proj.weight": (32, 16), "lm_head.weight": (32, 16), "model.norm.weight": (32,)}
    policy = PrecisionConfig(policy="fp8")
    assert policy.cast_ahead(shapes, 2, is_offloaded=False) == ["model.layers.0.mlp.up_proj.weight"]
    assert policy.cast_ahead(shapes, 3, is_offloaded=False) == []
    assert policy.cast_ahead(shapes, 2, is_offloaded=True) == []
    assert PrecisionConfig(policy="bf16").cast_ahead(shapes, 2, is_offloaded=False) == []
