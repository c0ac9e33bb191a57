"""Clipping by the global norm: torch's own on one process, whatever the layout."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.parallel.tiny import batch, each, full, make_program
from windlass.optim.clip import clip_divisor, divide_gradients, gradient_norm

LAYOUTS = {
    "one": (1, 3, 1, 1),
    "ddp2": (2, 0, 2, 1),
    "zero2": (2, 2, 1, 2),
    "zero3-2": (2, 3, 1, 2),
    "zero3-4": (4, 3, 1, 4),
    "hsdp2x2": (4, 3, 2, 2),
}


@dataclass
class Held:
    """A parameter as the clip sees it."""

    tensor: torch.nn.Parameter
    counted: bool = True


def held(gradient, counted=True):
    parameter = torch.nn.Parameter(gradient.detach() * 0)
    parameter.grad = gradient
    return Held(parameter, counted)


def clip(records, max_norm, pp_group):
    norm = gradient_norm(records, pp_group)
    divide_gradients([record.tensor for record in records], clip_divisor(norm, max_norm))
    return norm


def clip_beside_torch(layout, max_norm):
    """(our norm, torch's), and the largest difference between the gradients that the two leave, on one rank."""
    program = make_program(*layout, "fp64")
    program.run([batch(program.mesh.batch_rank)], torch.tensor(8.0 * layout[0]))
    records = program.records()
    plain = [held(full(record.tensor.grad)).tensor for record in records]
    expected = torch.nn.utils.clip_grad_norm_(plain, max_norm)
    norm = clip(records, max_norm, program.mesh.pp_group)
    assert norm.dim() == 0 and type(norm) is torch.Tensor
    worst = max((full(r.tensor.grad) - p.grad).abs().max().item() for r, p in zip(records, plain, strict=True))
    return norm.item(), expected.item(), worst


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:-1], pytest.param("hsdp2x2", marks=pytest.mark.long)])
def test_norm_and_gradients_are_torchs_of_one_process(ranks, layout):
    calls = [partial(clip_beside_torch, LAYOUTS[layout], max_norm) for max_norm in (0.3, 1e6)]
    for results in zip(*ranks.run(LAYOUTS[layout][0], each, *calls), strict=True):
        for norm, expected, worst in results:
            assert norm == pytest.approx(expected, rel=1e-12) and norm > 0.3
            assert worst <= 1e-14
            assert norm == results[0][0], "the same number on every rank"


def narrow_norm(layout):
    """Of bf16 gradients -> (norm, its dtype, dtype of the gradients, norm in fp64)."""
    program = make_program(*layout, "bf16-pure")
    program.run([batch(program.mesh.batch_rank)], torch.tensor(8.0 * layout[0]))
    exact = torch.stack([full(r.tensor.grad).double().norm() for r in program.records()]).norm().item()
    norm = gradient_norm(program.records(), program.mesh.pp_group)
    return norm.item(), str(norm.dtype), {str(r.tensor.grad.dtype) for r in program.records()}, exact


@pytest.mark.parametrize("layout", ["one", "ddp2", "zero3-2"])
def test_the_norm_of_bf16_gradients_is_no_bf16_number(ranks, layout):
    for norm, kind, gradients, exact in ranks.run(LAYOUTS[layout][0], narrow_norm, LAYOUTS[layout]):
        assert (kind, gradients) == ("torch.float32", {"torch.bfloat16"})
        assert norm == pytest.approx(exact, rel=1e-6)


def over_pipeline_stages():
    """Two ranks with other parameters each; the squares are summed over `pp_group`."""
    gradient = torch.full((3,), 1.0 + 2 * dist.get_rank())
    records = [held(gradient.clone()), held(torch.zeros(2))]
    norm = clip(records, 1.0, dist.group.WORLD)
    return norm.item(), records[0].tensor.grad.tolist()


def test_stages_sum_their_squares(ranks):
    norm = (3 * 1 + 3 * 9) ** 0.5
    for rank, (seen, clipped) in enumerate(ranks.run(2, over_pipeline_stages)):
        assert seen == pytest.approx(norm)
        assert clipped == pytest.approx([(1 + 2 * rank) / norm] * 3, rel=1e-5)


def several_meshes():
    """Plain, sharded and replicated gradients in one model, a second copy of a tied one, and one without gradient."""
    mesh = init_device_mesh("cpu", (2,))
    values = torch.arange(1.0, 7.0)
    records = [
        held(values.clone()),
        held(distribute_tensor(values, mesh, [Shard(0)])),
        held(distribute_tensor(values, mesh, [Replicate()])),
        held(values.clone(), counted=False),
        Held(torch.nn.Parameter(torch.ones(2))),
    ]
    alone = dist.new_subgroups(group_size=1)[0]
    norm = clip(records, 1.0, alone)
    return norm.item(), [full(record.tensor.grad).tolist() for record in records[:4]], records[4].tensor.grad


def test_each_kind_counts_once_and_all_are_scaled(ranks):
    values = torch.arange(1.0, 7.0)
    norm = (3 * values.square().sum()).sqrt().item()
    for seen, clipped, missing in ranks.run(2, several_meshes):
        assert seen == pytest.approx(norm, rel=1e-6) and missing is None
        assert clipped == [pytest.approx((values / norm).tolist(), rel=1e-5)] * 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_gives_a_norm_that_is_not(ranks, bad):
    assert ranks.run(1, norm_with, bad) == [False]


def norm_with(bad):
    records = [held(torch.tensor([1.0, bad])), held(torch.ones(3))]
    norm = clip(records, 1.0, dist.group.WORLD)
    return bool(torch.isfinite(norm))


def norm_of_ranks_of_which_one_trains_nothing():
    """Rank 0 has a frozen parameter alone, of a dtype whose norm is taken in fp32; rank 1 a gradient of norm 5."""
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16), requires_grad=dist.get_rank() == 1)
    if dist.get_rank() == 1:
        parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    norm = clip([Held(parameter)], 1.0, dist.group.WORLD)
    return norm.item(), norm.dtype


def test_a_rank_that_trains_nothing_adds_nothing(ranks):
    assert ranks.run(2, norm_of_ranks_of_which_one_trains_nothing) == [(5.0, torch.float32)] * 2
