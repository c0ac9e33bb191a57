"""test_same_loss turns red for each of the classic mistakes of summing over ranks, planted in the ranks one at a time.

A comparison that stays green under one of these would prove nothing about it. Each is undone before the rank's next case.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from tests import cases
from tests.cases import Layout
from tests.marks import quick_once
from tests.proof import test_same_loss
from tests.proof.test_same_loss import reference  # noqa: F401  the fixture
from windlass.parallel import ddp, program
from windlass.parallel.fsdp import before_micro_batch
from windlass.parallel.mesh import Mesh
from windlass.proof.pool import RankFailed


def _counts(change):
    """Counts are treated with `change(mesh, count)`; losses are summed as they should be."""
    return mock.patch.object(Mesh, "sum_over_batch", change)


def mean_of_means():
    """Every rank divides by its own count; the mean over ranks follows."""
    return _counts(lambda mesh, count: count * mesh.batch_group.size())


def dropped_count():
    """The count of one rank is taken for that of all."""
    return _counts(lambda mesh, count: count)


def dropped_gradient_ddp():
    """The hook hands every rank its own gradient back."""

    def keep(group, bucket):
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return mock.patch.object(ddp, "_sum_bucket", keep)


def dropped_gradient_hsdp():
    """Shards are summed inside a replica, and never over the replicas; counts and losses (0-dim) are."""
    send = dist.all_reduce
    return mock.patch.object(
        dist, "all_reduce", lambda t, *args, **kwargs: send(t, *args, **kwargs) if not t.dim() else None
    )


def silenced_hsdp():
    """FSDP2 is told not to all-reduce: it then hands out no gradient at all."""

    def before(model, is_last, zero):
        before_micro_batch(model, is_last, zero)
        model.set_requires_all_reduce(False)

    return mock.patch.object(program, "before_micro_batch", before)


def averaged_ddp():
    """torch's own reduction, which divides by the number of ranks."""
    return mock.patch.object(DistributedDataParallel, "register_comm_hook", lambda *args: None)


def averaged_fsdp():
    """FSDP2's own reduction, which divides by the number of ranks."""
    return mock.patch.object(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None)


def no_no_sync():
    """Every micro-batch sums what has been summed before."""
    return mock.patch.object(DistributedDataParallel, "no_sync", lambda self: contextlib.nullcontext())


def clipped_by_the_shard():
    """Each rank scales by the norm of what it holds, and reports the true norm."""
    clip = cases.clip_gradients

    def local(records, max_norm, parts):
        mine = [getattr(record.tensor.grad, "_local_tensor", record.tensor.grad).clone() for record in records]
        norm = clip(records, max_norm, parts)
        factor = (max_norm / (torch.nn.utils.get_total_norm(mine) + 1e-6)).clamp(max=1.0)
        for record, gradient in zip(records, mine, strict=True):
            getattr(record.tensor.grad, "_local_tensor", record.tensor.grad).copy_(gradient * factor)
        return norm

    return mock.patch.object(cases, "clip_gradients", local)


def stepped_elsewhere():
    """The optimizer steps its own copy on the host, from the true gradients, and the copy never goes back."""
    make = cases.make_optimizer

    def over_copies(records, *rest):
        copies = [replace(record, tensor=torch.nn.Parameter(record.tensor.detach().clone())) for record in records]
        optimizer = make(copies, *rest)
        step = optimizer.step

        def step_copies(norm):
            for record, copy in zip(records, copies, strict=True):
                copy.tensor.grad, record.tensor.grad = record.tensor.grad, None
            step(norm)

        optimizer.step = step_copies
        return optimizer

    return mock.patch.object(cases, "make_optimizer", over_copies)


def last_micro_batch_only():
    """What earlier micro-batches left on the host is overwritten and not added to."""

    def before(model, is_last, zero):
        model.zero_grad()
        before_micro_batch(model, is_last, zero)

    return mock.patch.object(program, "before_micro_batch", before)


def nothing():
    """The control: the same road without a mutation."""
    return contextlib.nullcontext()


DDP = Layout(2, zero=0, replicate=2, shard=1)
ZERO2 = Layout(2, zero=2, replicate=1, shard=2)
ZERO3 = Layout(2, zero=3, replicate=1, shard=2)
HSDP = Layout(4, zero=3, replicate=2, shard=2, micro_batch=1)
ZERO1 = Layout(2, zero=1, replicate=1, shard=2)
OFFLOAD = Layout(2, zero=3, replicate=1, shard=2, sharding=(("offload", True),))

RED = [
    (mean_of_means, DDP),
    (mean_of_means, ZERO3),
    (mean_of_means, HSDP),
    (dropped_count, DDP),
    (dropped_count, ZERO3),
    (dropped_gradient_ddp, DDP),
    (dropped_gradient_hsdp, HSDP),
    (averaged_ddp, DDP),
    (averaged_fsdp, ZERO2),
    (averaged_fsdp, HSDP),
    (no_no_sync, DDP),
    (clipped_by_the_shard, ZERO3),
    (clipped_by_the_shard, HSDP),
    (averaged_fsdp, ZERO1),
    (clipped_by_the_shard, OFFLOAD),
    (last_micro_batch_only, OFFLOAD),
    (stepped_elsewhere, OFFLOAD),
]


def name_of(value):
    if callable(value):
        return value.__name__
    return "-".join([f"zero{value.zero}", f"{value.replicate}x{value.shard}", *(name for name, _ in value.sharding)])


@pytest.mark.parametrize("case", [DDP, ZERO3, HSDP, ZERO1, OFFLOAD], ids=name_of)
def test_without_a_mutation_the_comparison_is_green(ranks, reference, case):  # noqa: F811
    test_same_loss.run(cases.Mutating(ranks, nothing), reference, "qwen3", True, case)


@pytest.mark.parametrize("policy", ["fp64", pytest.param("fp32", marks=pytest.mark.long)])
@pytest.mark.parametrize(("mutation", "case"), quick_once(RED), ids=name_of)
def test_the_comparison_turns_red(ranks, reference, mutation, case, policy):  # noqa: F811
    with pytest.raises(AssertionError) as caught:
        case = Layout(**{**vars(case), "policy": policy})
        test_same_loss.run(cases.Mutating(ranks, mutation), reference, "qwen3", True, case)
    assert not isinstance(caught.value, RankFailed), "the ranks trained on; it is the comparison that finds it"


def test_a_silenced_all_reduce_is_stopped_by_the_census_of_gradients(ranks, reference):  # noqa: F811
    with pytest.raises(RankFailed, match=r"BadLayout: .* parameters got no gradient in the first step"):
        test_same_loss.run(cases.Mutating(ranks, silenced_hsdp), reference, "qwen3", True, HSDP)
