"""DDP: every rank keeps the whole model; gradients are summed by one all-reduce per bucket, while backward still runs.

The picture, for N ranks: rank r computes g_r from its part of the batch; after backward every rank holds sum_r g_r.

    kept per rank    P parameters, P gradients, 2P optimizer states (AdamW): 16 P bytes in fp32, 18 P in 16 bits with the copies
                     that products read
    sent per step    an all-reduce per bucket, P x 4 bytes together; a ring moves 2 (N-1)/N of that per rank (reduce-
                     scatter, then all-gather); accumulation adds none (only the last micro-batch sends)

A bucket is closed by the gradient that fills its `bucket_mib` MiB. (torch closes the first at 1 MiB, but only where no size is
given.) In the first step all is one bucket for torch's wrapper, which learns the order in which gradients arrive, and cuts by it.

Why the gradient is right: the differentiated loss is (sum over this rank's targets) / (count over all ranks), so a plain sum
over ranks is the gradient of the global mean. torch's DDP divides by the world size instead (a mean of means); the hook below
replaces that. Without no_sync a gradient that was already summed would be summed again: wrong by a factor, not just slow.

Under bf16, fp16 and fp8 the gradients of the micro-batches are added up in fp32, in those of masters (precision/masters.py),
which torch's wrapper does not see. `OverlappedSums` sends those: a bucket is one tensor, of which the gradients are views.

Beside tensor ranks and under a pipeline neither works: both know whole tensors only, and no backward that is cut in two. There
`sum_gradients` sends the same buckets after the last backward, where no work hides them. Before them `sum_parts` sums over `tp`,
once per step, what every tensor rank holds whole (norms, row biases, positions); beside masters without replicas it is all that
is left to sum.

Source: Li et al., PyTorch Distributed, arXiv 2006.15704.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from windlass.parallel.mesh import Mesh
from windlass.parallel.records import Record, local_gradients
from windlass.precision.masters import Place
from windlass.units import MIB


def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum without dividing. DDP checks that the argument is called `bucket`."""
    gradients = bucket.buffer()
    work = dist.all_reduce(gradients, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: gradients)  # summed in place; a group that sends nothing has no value


def _sum_bucket_in(
    chosen: tuple[dist.ProcessGroup, torch.dtype], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The sum of a bucket in another dtype: bf16 gradients summed in fp32, or fp32 ones sent in bf16."""
    group, reduce = chosen
    gradients = bucket.buffer()
    sent = gradients.to(reduce)
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda _: gradients.copy_(sent))


def apply_ddp(model: nn.Module, mesh: Mesh, device: torch.device, bucket_mib: float, reduce: torch.dtype) -> nn.Module:
    """The module to call in place of `model`; `model` itself on one rank. Parameter names stay those of `model`. `reduce`: the
    dtype of the sums."""
    group = mesh.loss_group  # replicate x context: nothing is cut along shard
    if group.size() == 1:
        return model
    device_ids = [device] if device.type == "cuda" else None
    wrapper = DistributedDataParallel(
        model, device_ids=device_ids, process_group=group, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True
    )
    if reduce == next(model.parameters()).dtype:
        wrapper.register_comm_hook(group, _sum_bucket)
    else:
        wrapper.register_comm_hook((group, reduce), _sum_bucket_in)
    return wrapper


class OverlappedSums:
    """The gradients of masters, summed over the replicas while backward still runs.

    Buckets are filled from the model's end, where backward begins, and sent in that order on every rank, each once the last
    micro-batch of a step has added its last gradient. Kept between steps: a gradient of every trained parameter.
    """

    def __init__(self, group: dist.ProcessGroup, reduce: torch.dtype):
        """`reduce`: the dtype of sums over ranks. Those of a rank are in fp32, as masters are."""
        self._group, self._reduce = group, reduce
        self._buckets: list[torch.Tensor] = []
        self._num_members: list[int] = []
        self._num_missing: list[int] = []
        """Gradients that each bucket waits for; empty before the last micro-batch."""
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def fill(self, trained: Mapping[str, torch.Tensor], bucket_mib: float) -> dict[str, Place]:
        """Makes the buckets -> the places of all gradients. `trained`: parameters by name, in the order of the model. (The places
        are not kept here: they know this object, and memory in a cycle is freed late.)"""
        places: dict[str, Place] = {}
        members: list[str] = []
        for index, name in enumerate(reversed(list(trained))):
            members.append(name)
            filled = sum(trained[one].numel() for one in members) * torch.float32.itemsize >= bucket_mib * MIB
            if filled or index == len(trained) - 1:
                places |= self._add_bucket({one: trained[one] for one in members})
                members = []
        return places

    def _add_bucket(self, members: Mapping[str, torch.Tensor]) -> dict[str, Place]:
        sizes = [one.numel() for one in members.values()]
        flat = torch.empty(sum(sizes), dtype=torch.float32, device=next(iter(members.values())).device)
        added = partial(self._added, len(self._buckets))
        self._buckets.append(flat)
        self._num_members.append(len(members))
        parts = zip(members.items(), flat.split(sizes), strict=True)
        return {name: Place(total.view_as(parameter), added) for (name, parameter), total in parts}

    def before(self, is_last: bool) -> None:
        """Before each backward of a step."""
        assert not self._sent, "the step before did not finish"
        self._num_missing = list(self._num_members) if is_last else []

    def _added(self, bucket: int) -> None:
        if not self._num_missing:
            return
        assert self._num_missing[bucket], "more gradients than parameters"
        self._num_missing[bucket] -= 1
        while len(self._sent) < len(self._buckets) and not self._num_missing[len(self._sent)]:
            sums = self._buckets[len(self._sent)].to(self._reduce)
            work = dist.all_reduce(sums, group=self._group, async_op=True)
            assert work is not None
            self._sent.append((work, sums))

    def finish(self) -> None:
        """After the last backward: gradients are the sums over all replicas."""
        assert len(self._sent) == len(self._buckets), "a trained parameter got no gradient"
        self._num_missing = []
        for bucket in self._buckets:
            work, sums = self._sent.pop(0)
            work.wait()
            if sums is not bucket:
                bucket.copy_(sums)


def sum_gradients(records: Sequence[Record], mesh: Mesh, bucket_mib: float, reduce: torch.dtype) -> None:
    """In place, once all backwards of a step are done: parts of sums over `tp` (Partial) first, then all over the replicas."""
    sum_parts(records)
    if mesh.loss_group.size() > 1:
        sum_over_replicas(local_gradients(records), mesh.loss_group, int(bucket_mib * MIB), reduce)


def sum_parts(records: Sequence[Record]) -> None:
    """In place: gradients that are parts of a sum over `tp` (Partial) become the sum."""
    for record in records:
        parameter, gradient = record.tensor, record.tensor.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def sum_over_replicas(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: int, reduce: torch.dtype
) -> None:
    """In place: plain sums in `reduce`, one all-reduce per bucket, which the gradient that fills it closes."""
    bucket: list[torch.Tensor] = []
    pending = []
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        filled = sum(one.numel() * one.element_size() for one in bucket) >= bucket_bytes
        if filled or index == len(gradients) - 1:
            flat = torch.cat([one.flatten() for one in bucket]).to(reduce)
            pending.append((dist.all_reduce(flat, group=group, async_op=True), flat, bucket))
            bucket = []
    for work, flat, members in pending:
        assert work is not None
        work.wait()
        for one, summed in zip(members, flat.split([one.numel() for one in members]), strict=True):
            one.copy_(summed.view_as(one))
