"""The one door to a laid-out model: forward and backward of a global batch, whatever the layout.

One scaling rule serves every layout. Reductions are plain sums, and each rank differentiates

    (sum of nats over this rank's counted targets) / (count over ALL ranks)

so the sum over ranks is the gradient of the global mean. No world size appears anywhere; ranks with few or no counted targets
need nothing special. A mean of per-rank means would differ by up to 1e-2 in loss with uneven masks.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from windlass.data.batch_fields import Batch
from windlass.model.head.loss import factor_bits
from windlass.model.lora.linear import Linear
from windlass.model.transformer import Decoder
from windlass.parallel.context import cut_rows
from windlass.parallel.ddp import OverlappedSums, sum_gradients, sum_parts
from windlass.parallel.fsdp import Backwards, after_evaluation
from windlass.parallel.invariants import check_gradients
from windlass.parallel.mesh import Mesh
from windlass.parallel.records import NO_MASTERS, Record, local_gradients, parameter_record
from windlass.parallel.routers import Routers
from windlass.precision.fp8_weights import CastWeights
from windlass.precision.loss_scale import LossScale
from windlass.precision.policy import Precision
from windlass.precision.sums import summed

BY_ROW: Final = {"by_row": True}
"""Beside a batch: the model returns each row's nats."""


class Program(Protocol):
    """What the loop, evaluation, checkpoints and objectives may know of a layout."""

    mesh: Mesh

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        """Forward and backward of one global batch, given as this rank's micro-batches of [B, T] tensors. `count`: 0-dim,
        counted targets over all ranks. -> the global mean loss in nats: 0-dim, detached, equal on every rank. It does not include
        the routers' loss, which is trained on too."""
        ...

    def adapt(self, norm: torch.Tensor) -> None:
        """After the update: adapts the next backward to the gradient norm (0-dim, equal on every rank). fp16 sets its loss scale
        from it; other policies do nothing."""
        ...

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """State besides the weights that a checkpoint keeps: 0-dim, equal on every rank."""
        ...

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Forward only. -> the sum of nats over all ranks' counted targets, 0-dim, equal on every rank."""
        ...

    def score(self, batches: Sequence[Batch], adapted: bool = True) -> torch.Tensor:
        """Forward only. -> the log-probability of each row's counted targets in nats, [rows of this rank's batches], at least
        fp32, equal on all ranks that share the rows. With `keys` in the batches dropout drops what `run` will drop. Not
        `adapted`: of the base, without an adapter's factors, and without dropout."""
        ...

    def figures(self) -> dict[str, torch.Tensor]:
        """Further figures of the last global batch to report, equal on every rank (routers.py). Collective; call it on logging
        steps only."""
        ...

    def records(self) -> list[Record]:
        """This rank's parameters, in the order of the model."""
        ...


class DecoderProgram:
    """What the programs of all layouts share. `parts`: this rank's decoders, laid out. `masters`: masters.py's, by name."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        mesh: Mesh,
        precision: Precision,
        records: list[Record],
        masters: Mapping[str, nn.Parameter] = NO_MASTERS,
    ):
        self.mesh, self._precision = mesh, precision
        self._device = next(parts[0].parameters()).device
        self._decoders, self._routers = parts, Routers(parts, mesh)
        self._loss_scale = LossScale(self._device) if precision.is_scaled else None
        modules = [named for part in parts for named in part.named_modules()]
        linears = {f"{name}.weight": module for name, module in modules if isinstance(module, Linear)}
        self._linears = list(linears.values())
        self._weights = CastWeights(linears, masters, precision.compute)
        self._records = [replace(record, codes=self._weights.codes.get(record.name)) for record in records]
        self._gradients_checked = False

    def records(self) -> list[Record]:
        return self._records

    def figures(self) -> dict[str, torch.Tensor]:
        return self._routers.figures() | source_losses(self._decoders, self.mesh)

    def _begin(self, count: torch.Tensor) -> None:
        """A global batch of `count` counted targets begins."""
        self._weights.cast()
        self._routers.begin(count, self._loss_scale)
        for part in self._decoders:
            part.source_losses.begin()

    def adapt(self, norm: torch.Tensor) -> None:
        if self._loss_scale is not None:
            self._loss_scale.adapt(norm)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {} if self._loss_scale is None else self._loss_scale.state_tensors()

    def _factor(self, count: torch.Tensor) -> torch.Tensor | None:
        """1 / count for the head, which multiplies by it in its gradient's own pass. None in fp16, where a probability / count
        may be 0: there the loss is divided and scaled."""
        return None if self._loss_scale is not None else factor_bits(count, self._precision.compute)


def source_losses(parts: Sequence[Decoder], mesh: Mesh) -> dict[str, torch.Tensor]:
    """`source_losses`: the nats and the counted targets of each source in the last global batch, [S, 2] fp64. Empty where the
    batches do not say their sources. Collective."""
    found = [part.source_losses.sums_S2 for part in parts if part.source_losses.sums_S2 is not None]
    if not found:
        return {}
    sums_S2 = mesh.sum_over_loss(torch.stack(found).sum(0))
    if mesh.pp_group.size() > 1:  # the last stage has them
        dist.all_reduce(sums_S2, group=mesh.pp_group)
    return {"source_losses": sums_S2}


@contextlib.contextmanager
def scoring(parts: Sequence[Decoder], batches: Sequence[Batch], adapted: bool) -> Iterator[Sequence[Batch]]:
    """Yields the batches that `score` runs, with `parts` set up for it. Not `adapted`: factors are multiplied by 0 inside."""
    linear: list[Any] = [m for part in parts for m in part.modules() if getattr(m, "lora_A", None) is not None]
    scales = [module.scale for module in linear]
    if not adapted:
        batches = [{name: tensor for name, tensor in batch.items() if name != "keys"} for batch in batches]
        for module in linear:
            module.scale = 0.0
    for part in parts:
        part.train("keys" in batches[0])
    try:
        yield batches
    finally:
        for module, scale in zip(linear, scales, strict=True):
            module.scale = scale
        for part in parts:
            after_evaluation(part)
            part.train()


class ShardedProgram(DecoderProgram):
    """One decoder per rank: a single process, DDP, ZeRO-1 to 3 or HSDP. `model` has parallel/build's techniques applied.
    `replicas`: what sums gradients over them during backward. `bucket_mib`: of gradients that nothing has summed when backward
    ends (zero 0 beside tensor ranks). `base`: parameters that no checkpoint keeps. `masters`: masters.py's, by name."""

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        precision: Precision,
        zero: int,
        replicas: OverlappedSums | None = None,
        bucket_mib: float | None = None,
        base: Collection[str] = (),
        masters: Mapping[str, nn.Parameter] = NO_MASTERS,
    ):
        records = [parameter_record(name, p, base, masters) for name, p in model.named_parameters()]
        super().__init__([model], mesh, precision, records, masters)
        self.model, self._has_masters = model, bool(masters)
        self._sender = Backwards(model, zero) if replicas is None else replicas
        self._bucket_mib = bucket_mib

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        self._begin(count)
        for product in summed(self._linears):
            product.begin()
        total: torch.Tensor | None = None
        factor = self._factor(count)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            self._sender.before(is_last)
            loss = self._forward(batch) / count if factor is None else self._forward(batch, factor=factor)
            (loss if self._loss_scale is None else loss * self._loss_scale.scale).backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a global batch has at least one micro-batch"
        if not self._gradients_checked:
            for product in summed(self._linears):
                product.end()
            check_gradients(self._records)
            self._gradients_checked = True
        self._sender.finish()
        if self._bucket_mib is not None:
            sum_gradients(self._records, self.mesh, self._bucket_mib, self._precision.reduce)
        elif self._has_masters:
            sum_parts(self._records)
        if self._loss_scale is not None:
            self._loss_scale.unscale(local_gradients(self._records))
        return self.mesh.sum_over_loss(total)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._weights.cast()
        self.model.eval()
        total = torch.stack([self._forward(batch) for batch in batches]).sum()
        after_evaluation(self.model)
        self.model.train()
        return self.mesh.sum_over_loss(total)

    @torch.no_grad()
    def score(self, batches: Sequence[Batch], adapted: bool = True) -> torch.Tensor:
        self._weights.cast()
        with scoring([self.model], batches, adapted) as given:
            nats = torch.cat([self._forward(batch, **BY_ROW) for batch in given])
        return -self.mesh.sum_over_context(nats)

    def _forward(self, batch: Batch, **how: Any) -> torch.Tensor:
        return self._precision.as_output(self.model(**cut_rows(batch, self.mesh), **how))
