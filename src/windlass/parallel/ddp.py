"""DDP: every rank keeps the whole model; gradients are summed by one all-reduce per bucket, while backward still runs.

The picture, for N ranks: rank r computes g_r from its part of the batch; after backward every rank holds sum_r g_r.

    kept per rank    P parameters, P gradients, 2P optimizer states (AdamW): 16 P bytes in fp32; 18 P in bf16 and fp16
                     with the copies that products read, nearly 17 P in fp8; 8 P in bf16-pure. Where `precision.reduce`
                     is another dtype than gradients are kept in, also the buckets as they are sent, until backward
                     ends: 4 P in bf16-pure
    sent per step    an all-reduce per bucket, r P bytes together, r of `precision.reduce` (4; 2 in bf16); a ring moves
                     2 (N-1)/N of that per rank (reduce-scatter, then all-gather); accumulation adds none:
                     only the last micro-batch sends

A bucket is one tensor, of which the gradients are views. It ends with the gradient that fills `bucket_mib` MiB, counted as sent.
Buckets are filled from the model's end, where backward begins.

Why the gradient is right: the differentiated loss is (sum over this rank's targets) / (count over all ranks), so a plain sum
over ranks is the gradient of the global mean. torch's own DDP divides by the world size instead (a mean of means). A bucket that
was sent before the last micro-batch would be summed again: wrong by a factor, not just slow.

Why not torch's wrapper: under bf16, fp16 and fp8 the gradients of the micro-batches are added up in fp32, in those of masters
(precision/masters.py), which it does not see. What serves them serves all policies.

Beside tensor ranks and under a pipeline this does not work: it knows whole tensors only, and no backward that is cut in two.
There `sum_gradients` copies gradients into buckets after the last backward, where no work hides the sums, two buckets at a time.
Before that `sum_parts` sums over `tp`, once per step, what every tensor rank holds whole (norms, row biases, positions). Masters
without replicas need that sum alone.

Source: Li et al., PyTorch Distributed, arXiv 2006.15704.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from windlass.errors import BadLayout
from windlass.parallel.mesh import Mesh
from windlass.parallel.records import Record, in_buckets, local_gradients
from windlass.precision.masters import Slot

IN_FLIGHT: Final = 2
"""Buckets that are sent at once after backward: one on the way while the next is copied."""


class OverlappedSums:
    """Gradients, summed over the replicas while backward still runs.

    Every rank sends its buckets in one order, each once the last micro-batch of a step has added its last gradient. Kept between
    steps: a gradient of every trained parameter.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, reduce: torch.dtype):
        """`dtype`: of the gradients, which are this rank's sums over micro-batches. `reduce`: of the sums over ranks."""
        self._group, self._dtype, self._reduce = group, dtype, reduce
        self._buckets: list[torch.Tensor] = []
        self._num_members: list[int] = []
        self._num_missing: list[int] = []
        """Gradients that each bucket waits for; empty before the last micro-batch."""
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []

    def fill(self, model: nn.Module, bucket_mib: float) -> dict[str, Slot]:
        """Makes the buckets of all that is trained -> the slots of its gradients, by name. The slots are not kept here: each
        knows this object, and memory in a cycle is freed late."""
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        trained.reverse()
        slots: dict[str, Slot] = {}
        for members in in_buckets((parameter.numel() * self._reduce.itemsize for _, parameter in trained), bucket_mib):
            slots |= self._add_bucket(dict(trained[members]))
        return slots

    def _add_bucket(self, members: Mapping[str, torch.Tensor]) -> dict[str, Slot]:
        sizes = [one.numel() for one in members.values()]
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=next(iter(members.values())).device)
        added = partial(self._added, len(self._buckets))
        self._buckets.append(flat)
        self._num_members.append(len(members))
        parts = zip(members.items(), flat.split(sizes), strict=True)
        return {name: Slot(total.view_as(parameter), added) for (name, parameter), total in parts}

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
        if len(self._sent) < len(self._buckets):
            raise BadLayout(
                f"{sum(map(bool, self._num_missing))} of {len(self._buckets)} buckets are missing a gradient",
                "every trainable parameter takes part in the loss: with zero 0 a bucket waits for all of its gradients",
                "report it with the recipe; until it is fixed, use parallel.zero=3, which has no buckets",
            )
        for bucket in self._buckets:
            work, sums = self._sent.pop(0)
            work.wait()
            if sums is not bucket:
                bucket.copy_(sums)


def keep_in(slots: Mapping[str, Slot], model: nn.Module) -> None:
    """Lets autograd add the gradients of these parameters up in their slots. (masters.py does it for masters.)"""
    for name, parameter in model.named_parameters():
        if name in slots:
            parameter.register_post_accumulate_grad_hook(partial(_keep_in, slots[name]))


def _keep_in(slot: Slot, parameter: torch.Tensor) -> None:
    """Moves the first gradient of a step to its slot, where autograd adds the later ones to it."""
    if parameter.grad is not slot.total:
        assert parameter.grad is not None
        slot.total.copy_(parameter.grad)
        parameter.grad = slot.total
    slot.added()


def sum_gradients(records: Sequence[Record], mesh: Mesh, bucket_mib: float, reduce: torch.dtype) -> None:
    """In place, once all backwards of a step are done: parts of sums over `tp` (Partial) first, then all over the replicas."""
    sum_parts(records)
    if mesh.loss_group.size() > 1:
        sum_over_replicas(local_gradients(records), mesh.loss_group, bucket_mib, reduce)


def sum_parts(records: Sequence[Record]) -> None:
    """In place: gradients that are parts of a sum over `tp` (Partial) become the sum."""
    for record in records:
        parameter, gradient = record.tensor, record.tensor.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def sum_over_replicas(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup, bucket_mib: float, reduce: torch.dtype
) -> None:
    """In place: plain sums in `reduce`, one all-reduce per bucket. At most IN_FLIGHT buckets are copied at once."""
    sent: deque[tuple[dist.Work, torch.Tensor, Sequence[torch.Tensor]]] = deque()
    for chosen in in_buckets((one.numel() * reduce.itemsize for one in gradients), bucket_mib):
        if len(sent) == IN_FLIGHT:
            _take(*sent.popleft())
        bucket = gradients[chosen]
        flat = torch.cat([one.flatten() for one in bucket]).to(reduce)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        sent.append((work, flat, bucket))
    while sent:
        _take(*sent.popleft())


def _take(work: dist.Work, flat: torch.Tensor, members: Sequence[torch.Tensor]) -> None:
    """A bucket's sums, back to the gradients it was copied from."""
    work.wait()
    for one, summed in zip(members, flat.split([one.numel() for one in members]), strict=True):
        one.copy_(summed.view_as(one))
