"""Weights that are gathered in eight bits: products read the same bits, and a byte less of each is sent."""

import math
from functools import partial

import pytest
import torch

from tests.parallel.test_fsdp import Sizes
from tests.parallel.tiny import batch, each, make_program
from tests.precision.test_fp8 import WIDE
from windlass.parallel import program as program_module
from windlass.precision.config import PrecisionConfig
from windlass.ranks.owned_part import local_tensor

TARGETS = 8


@torch.no_grad()
def move(program, step):
    """Other weights, the largest number of each among them."""
    for record in program.records():
        record.tensor.mul_(1.3 if step % 2 else 0.7)


def trained(world, is_cast_before, settings, scaling):
    """On a rank, over two steps with other weights before each call: what the program returns and of gradients, the
    bytes of all gathers, and the name and shape of its parameters."""
    real = program_module.CastWeights
    if not is_cast_before:
        program_module.CastWeights = lambda linears, computed: real([], computed)
    try:
        program = make_program(world, model=WIDE, policy="fp8", precision={"scaling": scaling}, **settings)
    finally:
        program_module.CastWeights = real
    found = []
    with Sizes() as sizes:
        for step in range(2):
            batches = [batch(2 * step), batch(2 * step + 1)]
            found.append(program.evaluate(batches))
            move(program, 1)
            found.append(program.score(batches))
            move(program, 2 + step)
            found.append(program.run(batches, torch.tensor(2.0 * TARGETS * world)))
            for record in program.records():
                found.append(local_tensor(record.tensor.grad))
                record.tensor.grad = None
            move(program, step)
    shapes = {record.name: tuple(record.logical_shape) for record in program.records()}
    return found, sizes.bytes["allgather_base"], shapes


@pytest.mark.parametrize(
    ("world", "settings", "scaling", "num_in_fp8", "gathers"),
    [
        # gathers of a block in a step: two forwards in each of three calls, and two backwards
        (2, {"zero": 3, "shard": 2}, "tensorwise", 21, 8),
        (2, {"zero": 2, "shard": 2}, "tensorwise", 21, 3),
        (2, {"zero": 1, "shard": 2, "recompute": "selective"}, "tensorwise", 21, 3),
        (2, {"zero": 3, "shard": 2}, "rowwise", 0, 8),
        (3, {"zero": 3, "shard": 3}, "tensorwise", 6, 8),  # gate and up have 48 rows, the others 32 or 16
        (4, {"zero": 3, "shard": 2, "replicate": 2}, "tensorwise", 21, 8),
        (4, {"zero": 2, "shard": 2, "pp": 2, "schedule": "1f1b"}, "tensorwise", 14, 3),  # of the first stage
    ],
)
def test_the_same_bits_and_a_byte_less_per_weight(ranks, world, settings, scaling, num_in_fp8, gathers):
    policy = PrecisionConfig(policy="fp8", scaling=scaling)
    calls = (partial(trained, world, is_before, settings, scaling) for is_before in (True, False))
    found = ranks.run(world, each, *calls)
    for (before, few, shapes), (after, many, _) in found:
        assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [True] * len(after)
        in_fp8 = policy.gathered_in_fp8(shapes, settings["shard"], is_offloaded=False)
        assert many - few == 2 * gathers * sum(math.prod(shapes[name]) for name in in_fp8)
    shapes = found[0][0][2]
    assert len(policy.gathered_in_fp8(shapes, settings["shard"], is_offloaded=False)) == num_in_fp8


def test_nothing_is_gathered_in_fp8_from_one_rank_from_the_host_or_by_another_policy():
    shapes = {
        "model.layers.0.mlp.up_proj.weight": (32, 16),
        "lm_head.weight": (32, 16),
        "model.layers.0.norm.weight": (32,),
    }
    policy = PrecisionConfig(policy="fp8")
    assert policy.gathered_in_fp8(shapes, 2, is_offloaded=False) == ["model.layers.0.mlp.up_proj.weight"]
    assert policy.gathered_in_fp8(shapes, 1, is_offloaded=False) == []
    assert policy.gathered_in_fp8(shapes, 2, is_offloaded=True) == []
    assert PrecisionConfig(policy="bf16").gathered_in_fp8(shapes, 2, is_offloaded=False) == []
