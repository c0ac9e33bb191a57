"""The one door to a laid-out model: forward and backward of a global batch, whatever the layout.

One scaling rule serves every layout. Reductions are plain sums, and what is differentiated is

    (sum of nats over this rank's counted targets) / (count over ALL ranks)

so the sum over ranks is the gradient of the global mean. No world size appears anywhere; ranks with few or no counted targets
need nothing special. A mean of per-rank means would differ by up to 1e-2 in loss with uneven masks.
"""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windlass.parallel.census import check_gradients
from windlass.parallel.fsdp import after_evaluation, before_micro_batch
from windlass.parallel.mesh import Mesh
from windlass.parallel.precision import Precision
from windlass.parallel.records import Record

Batch = dict[str, torch.Tensor]


class Program(Protocol):
    """What the loop, evaluation, checkpoints and objectives may know of a layout."""

    mesh: Mesh

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one global batch, given as this rank's micro-batches of [B, T] tensors. `count`: 0-dim,
        counted targets over all ranks. -> the global mean loss in nats: 0-dim, detached, equal on every rank."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Forward only. -> the sum of nats over all ranks' counted targets, 0-dim, equal on every rank."""
        ...

    def records(self) -> list[Record]:
        """This rank's parameters, in the order of the model."""
        ...


class ShardedProgram:
    """One decoder per rank: a single process, DDP, ZeRO-2, ZeRO-3 or HSDP. `model` has parallel/build's techniques applied;
    `caller` is what forward is called on (DDP's wrapper, or the model)."""

    def __init__(self, model: nn.Module, caller: nn.Module, mesh: Mesh, precision: Precision, zero: int):
        self.model, self.caller, self.mesh = model, caller, mesh
        self._precision, self._zero = precision, zero
        self._device_type = mesh.dense.device_type
        self._gradients_checked = False
        self._records = [Record(name, p, torch.Size(p.shape)) for name, p in model.named_parameters()]

    def records(self) -> list[Record]:
        return self._records

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            before_micro_batch(self.model, is_last, self._zero)
            with self._silent_unless(is_last):
                loss = self._forward(batch) / count
                loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a global batch has at least one micro-batch"
        if not self._gradients_checked:
            check_gradients(self._records)
            self._gradients_checked = True
        return self.mesh.sum_over_loss(total)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self.model.eval()
        total = torch.stack([self._forward(batch) for batch in batches]).sum()
        after_evaluation(self.model)
        self.model.train()
        return self.mesh.sum_over_loss(total)

    def _forward(self, batch: Batch) -> torch.Tensor:
        with self._autocast():
            return self.caller(**batch)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """FSDP2 casts by itself; the other layouts (zero: 0) compute through autocast."""
        return self._precision.autocast(self._device_type) if self._zero == 0 else contextlib.nullcontext()

    def _silent_unless(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        if isinstance(self.caller, DistributedDataParallel) and not is_last:
            return self.caller.no_sync()
        return contextlib.nullcontext()
