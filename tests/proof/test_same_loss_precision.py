"""test_same_loss in every precision: near fp32's reference by the policy's tolerance, nearer to one process of the same policy.

Unit roundoff u is 2^-8 for bf16 and 2^-11 for fp16, so fp16's tolerances are an eighth of bf16's (3e-3 in loss, 3e-2 in norm).
What is summed over ranks and kept in fp32 agrees with one process of the same policy as fp32 does: the first step's gradients to
1e-6 of a tensor's largest (1.2e-7 seen; a sum in bf16, which hides in the first comparison, is 3.6e-3). From the second step on a
weight that an ulp moved may be cast to the other side: 0 on most CPUs, u/19 of a norm on one that multiplies fp16 itself; u/4 is
allowed. `equal`: the share of the moments' elements that are bit-equal to one process's.
Stochastic rounding with the same noise keeps it near 1 where gradients agree to 1e-7, and at 0.2 where they agree to 2^-8.
"""

import contextlib
import functools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests import cases
from tests.cases import Layout
from tests.marks import quick_once
from windlass.optim import elementwise
from windlass.optim.rounding import ElementPlace, stored_as
from windlass.parallel import ddp
from windlass.precision.loss_scale import LossScale
from windlass.precision.policy import Precision
from windlass.proof.reference import train_reference

FP32, BF16 = "torch.float32", "torch.bfloat16"


@dataclass(frozen=True)
class Row:
    """A policy, what it may be off by, and what is stored in which dtype."""

    policy: str
    loss: float
    norm: float
    apart: float
    """From one process of the same policy, in loss and norm."""
    gradients: float = 1e-6
    """From the same, of the first step."""
    precision: tuple[tuple[str, str], ...] = ()
    equal: float = 0.0
    weights: str = FP32
    moments: str = FP32


ROWS = {
    "bf16": Row("bf16", 3e-3, 3e-2, 2**-8 / 4),
    "fp16": Row("fp16", 4e-4, 4e-3, 2**-11 / 4),
    # moments off by u, at random, move three steps' weights by u x rate: 1e-5 of a weight
    "fp32, bf16 states": Row("fp32", 1e-5, 1e-4, 1e-5, precision=(("states", "bf16"),), equal=0.95, moments=BF16),
    "bf16, bf16 states": Row("bf16", 3e-3, 3e-2, 2**-8 / 4, precision=(("states", "bf16"),), equal=0.95, moments=BF16),
    "fp16, bf16 states": Row("fp16", 4e-4, 4e-3, 2**-11 / 4, precision=(("states", "bf16"),), equal=0.95, moments=BF16),
    # gradients are stored in bf16 after every micro-batch, so layouts with other micro-batches differ by u = 2^-8, and sums of
    # several such gradients, where they cancel, by some u (9.9e-3 seen)
    "bf16-pure": Row("bf16-pure", 3e-3, 3e-2, 2**-8, 2**-6, (), 0.1, BF16, BF16),
    "bf16-pure, nearest": Row("bf16-pure", 3e-3, 3e-2, 2**-8, 2**-6, (("rounding", "nearest"),), 0.1, BF16, BF16),
    "bf16-pure, fp32 products": Row("bf16-pure", 3e-3, 3e-2, 2**-8, 2**-6, (("parameters", "fp32"),), 0.1, BF16, BF16),
    "bf16, bf16 reduction": Row("bf16", 3e-3, 3e-2, 3e-3, 2**-6, (("reduce", "bf16"),)),
    # a micro-batch's loss is rounded by u = 3.9e-3, and so is the divisor of its gradient
    "bf16, bf16 output": Row("bf16", 4e-3, 3e-2, 4e-3, precision=(("output", "bf16"),)),
}
LAYOUTS = {
    "ddp2": Layout(2, zero=0, replicate=2, shard=1),
    "zero3-2": Layout(2, zero=3, replicate=1, shard=2),
    "hsdp2x2": Layout(4, zero=3, replicate=2, shard=2),
}
CELLS = [
    pytest.param(name, layout, marks=() if layout != "hsdp2x2" or name in ("bf16", "bf16-pure") else pytest.mark.long)
    for name in ROWS
    for layout in LAYOUTS
    if not (layout == "ddp2" and "products" in name)  # refused: DDP multiplies what is stored
]


def case_of(name, layout):
    row = ROWS[name]
    return Layout(**{**vars(layout), "policy": row.policy, "precision": row.precision})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory, and fp32's reference."""
    directory = cases.write_model(tmp_path_factory.mktemp("precision"), "qwen3", True)
    return directory, train_reference(directory, cases.global_batches(), torch.float32, cases.SETTINGS)


@pytest.fixture(scope="module")
def alone(ranks, model):
    """One process of a policy; `zero`: under DDP's autocast or FSDP2's casts, which multiply other things in fp32."""

    @functools.cache
    def train(name, zero):
        layout = Layout(1, zero=zero, replicate=1, shard=1)
        return ranks.run(1, cases.train_layout, str(model[0]), case_of(name, layout))[0]

    return train


def furthest(result, other):
    """{"losses": ..., "norms": ...}: the largest relative difference of a step."""
    return {
        key: max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(result[key], other[key], strict=True))
        for key in ("losses", "norms")
    }


def furthest_gradient(ours, theirs):
    """Of all elements, relative to the largest of its tensor (to 1/1000 of the model's largest where that is more)."""
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in theirs.values())
    return max(float((ours[n] - theirs[n]).abs().max()) / max(float(theirs[n].abs().max()), floor) for n in theirs)


def equal_share(one, two):
    same = sum(int((one[name] == two[name]).sum()) for name in two)
    return same / sum(value.numel() for value in two.values())


def bias(moments, exact):
    """By how much the mean second moment is off."""
    total = [sum(v.double().sum().item() for n, v in found.items() if n.endswith("_sq")) for found in (moments, exact)]
    return total[0] / total[1] - 1


def check(results, trace, single, row):
    off = furthest(results[0], {"losses": trace.losses, "norms": trace.norms})
    assert off["losses"] <= row.loss and off["norms"] <= row.norm, ("against fp32's reference", off)
    gradients = furthest_gradient(results[0]["gradients"], single["gradients"])
    assert gradients <= row.gradients, ("first gradients, against one process of the same policy", gradients)
    apart = furthest(results[0], single)
    assert max(apart.values()) <= row.apart, ("against one process of the same policy", apart)
    if row.equal:
        share = equal_share(results[0]["moments"], single["moments"])
        assert share >= row.equal, ("moments bit-equal to one process's", share)
    for result in results:
        assert result["losses"] == results[0]["losses"] and result["norms"] == results[0]["norms"]
        assert result["dtypes"] == {"weights": {row.weights}, "gradients": {row.weights}, "moments": {row.moments}}


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_every_policy(ranks, model, alone, name, layout):
    directory, trace = model
    case = case_of(name, LAYOUTS[layout])
    results = ranks.run(case.world, cases.train_layout, str(directory), case)
    check(results, trace, alone(name, case.zero), ROWS[name])


@pytest.mark.parametrize("layout", ["ddp2", "zero3-2"])
def test_bf16_moments_are_right_on_the_mean(ranks, model, layout):
    case = case_of("fp32, bf16 states", LAYOUTS[layout])
    rounded = ranks.run(2, cases.train_layout, str(model[0]), case)[0]
    exact = ranks.run(2, cases.train_layout, str(model[0]), Layout(**{**vars(case), "precision": ()}))[0]
    assert abs(bias(rounded["moments"], exact["moments"])) <= 5e-4
    cut = ranks.run(2, cases.train_mutated, truncated_moments, str(model[0]), case)[0]
    assert bias(cut["moments"], exact["moments"]) < -2e-3, "mutation: rounded down instead"


# ---- mutations: each turns its row red


def reduced_in_bf16():
    """Sums over ranks lose what bf16 loses."""
    narrow = torch.bfloat16
    original = Precision.fsdp

    def fsdp(self):
        return type(original(self))(param_dtype=self.compute, reduce_dtype=narrow)

    return mock.patch.object(Precision, "fsdp", fsdp)


def reduced_in_bf16_by_ddp():
    summed = ddp._sum_bucket_in

    def sum_bucket(group, bucket):
        return summed((group, torch.bfloat16), bucket)

    return mock.patch.object(ddp, "_sum_bucket", sum_bucket)


def unscaling_forgotten():
    return mock.patch.object(LossScale, "unscale", lambda self, gradients: None)


def scaled_per_micro_batch():
    """Unscaled once more than scaled, as if each micro-batch had been."""
    unscale = LossScale.unscale

    def twice(self, gradients):
        unscale(self, gradients)
        unscale(self, gradients)

    return mock.patch.object(LossScale, "unscale", twice)


def truncated_moments():
    def cut(value, dtype, noise):
        return stored_as(value, dtype, None if noise is None else torch.zeros_like(noise))

    return mock.patch.object(elementwise, "stored_as", cut)


def local_noise():
    """Every rank counts its own elements from 0."""
    return mock.patch.object(elementwise, "place_of", lambda tensor: ElementPlace(0, 1, 1))


def forgotten_correction():
    """Moments are taken for what they are at the end."""
    constants = elementwise.ElementwiseAdamW._constants

    def without(self, group, step):
        counter, (skip, shrink, size, root, *rest) = constants(self, group, step)
        return counter, (skip, shrink, size, torch.ones_like(root), *rest)

    return mock.patch.object(elementwise.ElementwiseAdamW, "_constants", without)


def averaged():
    """torch's own reductions, which divide by the number of ranks."""
    both = contextlib.ExitStack()
    both.enter_context(mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None))
    both.enter_context(mock.patch.object(DistributedDataParallel, "register_comm_hook", lambda *args: None))
    return both


def nothing():
    return contextlib.nullcontext()


RED = [
    (reduced_in_bf16, "bf16", "zero3-2", "one process"),
    (reduced_in_bf16, "fp16", "zero3-2", "one process"),
    (reduced_in_bf16, "bf16, bf16 states", "hsdp2x2", "one process"),
    (reduced_in_bf16_by_ddp, "bf16", "ddp2", "one process"),
    (unscaling_forgotten, "fp16", "ddp2", "fp32's reference"),
    (unscaling_forgotten, "fp16, bf16 states", "zero3-2", "fp32's reference"),
    (scaled_per_micro_batch, "fp16", "zero3-2", "fp32's reference"),
    (truncated_moments, "bf16, bf16 states", "zero3-2", "one process"),
    (truncated_moments, "fp16, bf16 states", "zero3-2", "one process"),
    (truncated_moments, "fp32, bf16 states", "ddp2", "one process"),
    (local_noise, "fp32, bf16 states", "zero3-2", "one process"),
    (local_noise, "bf16, bf16 states", "hsdp2x2", "one process"),
    (averaged, "bf16, bf16 reduction", "ddp2", "fp32's reference"),
    (averaged, "bf16, bf16 reduction", "zero3-2", "fp32's reference"),
    (averaged, "bf16, bf16 output", "zero3-2", "fp32's reference"),
    (forgotten_correction, "bf16-pure", "ddp2", "one process|fp32's reference"),
    (forgotten_correction, "bf16-pure, nearest", "zero3-2", "one process|fp32's reference"),
    (forgotten_correction, "bf16-pure, fp32 products", "zero3-2", "one process|fp32's reference"),
]


def test_without_a_mutation_the_mutated_road_is_green(ranks, model, alone):
    case = case_of("bf16", LAYOUTS["zero3-2"])
    results = ranks.run(2, cases.train_mutated, nothing, str(model[0]), case)
    check(results, model[1], alone("bf16", 3), ROWS["bf16"])


@pytest.mark.parametrize(
    ("mutation", "name", "layout", "found_by"),
    quick_once(RED),
    ids=lambda value: getattr(value, "__name__", str(value)[:20]),
)
def test_the_comparison_turns_red(ranks, model, alone, mutation, name, layout, found_by):
    directory, trace = model
    case = case_of(name, LAYOUTS[layout])
    results = ranks.run(case.world, cases.train_mutated, mutation, str(directory), case)
    with pytest.raises(AssertionError, match=found_by):
        check(results, trace, alone(name, case.zero), ROWS[name])
