"""Pipeline parallelism: ranks hold consecutive stages of the decoder, and micro-batches flow through them.

    rank 0: blocks 0-3    hidden [B, T, D] ->   rank 1: blocks 4-7   ->  ...  ->  rank P-1: blocks, norm, head, loss
                          <- its gradient

A global batch is M micro-batches (accumulation). parallel.schedule sets the order of a rank's forwards and backwards
(rules/schedules.py), stages.py cuts the model, tie.py keeps a tied embedding one. P ranks, S stages:

    kept per rank    parameters, gradients and states of its own stages; activations of up to M (gpipe) or P (1f1b)
                     micro-batches, rank p of interleaved-1f1b of 3 P - 1 - 2 p in one of its two stages each (of the
                     zero-bubble schedules: not derived, and a budget of activations is refused there); under FSDP
                     its stages' parameters gathered through the step, and gradients: whole until the last micro-batch
                     (zero 1), or the rank's shard and one unit's whole ones (zero 2; of all units of a stage for a moment,
                     where the schedule cuts backward in two)
    sent per step    2 M messages (hidden, its gradient) of B T D / tp elements over every border between stages on two ranks:
                     S - 1 borders, zbv S - 2, since its middle two stages are on one rank;
                     2 V D elements where a tied embedding's ends are on two ranks; the loss, 1 element, to all stages
    over replicas    zero 0: one all-reduce per `bucket_mib` of gradients after the last backward; zero 1: FSDP2's, one
                     reduce-scatter and one all-reduce per unit; zero 2: M reduce-scatters per unit; 16 bits on one replica
                     and shard: none (masters.py)

FSDP2 sends as it does without a pipeline (fsdp.Backwards): in backward, or, where the schedule cuts it in two, after the half
that computes a micro-batch's gradients of the weights.

Why the gradient is right: every micro-batch's loss is (sum of nats)/(count over all ranks and micro-batches), so gradients
add up, and nothing is divided by M (`scale_grads=False`; torch's default would). Only the last stage has a loss; the others
add a zero of its dtype, so that the reported loss is one number on all ranks.

Never reshard after forward: a zero-bubble schedule then loses the gradients of whole stages, without an error. A schedule is
made for one number and shape of micro-batches; another shape gets another schedule. Evaluation has its own forward-only loop:
torch's asserts on V schedules.

Source: Huang et al., arXiv 1811.06965; torch.distributed.pipelining.

Legend: B sequences, T positions, D hidden size, V rows of the vocabulary.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from windlass.data.batch_fields import Batch
from windlass.model.transformer import Decoder
from windlass.parallel.config import ParallelConfig
from windlass.parallel.context import cut_rows
from windlass.parallel.ddp import sum_gradients, sum_parts
from windlass.parallel.fsdp import Backwards, after_evaluation
from windlass.parallel.invariants import check_gradients
from windlass.parallel.mesh import Mesh
from windlass.parallel.program import BY_ROW, DecoderProgram, scoring
from windlass.parallel.records import NO_MASTERS, Record, local_gradients, parameter_record
from windlass.parallel.rules.schedules import KINDS
from windlass.parallel.stages import Stages
from windlass.parallel.tie import EMBEDDING, HEAD, Tie
from windlass.precision.masters import hand_over_rest
from windlass.precision.policy import Precision

if TYPE_CHECKING:  # it loads 216 modules, dynamo among them, for which nothing without pp has a use
    from torch.distributed.pipelining.stage import PipelineStage


class PipelineProgram(DecoderProgram):
    """`parts`: this rank's stages, laid out (build.py), in the order of `stages.of_rank`. `base`: parameters that no checkpoint
    keeps. `masters`: masters.py's, by name."""

    def __init__(
        self,
        parts: Sequence[Decoder],
        stages: Stages,
        mesh: Mesh,
        precision: Precision,
        config: ParallelConfig,
        base: Collection[str] = (),
        masters: Mapping[str, Parameter] = NO_MASTERS,
    ):
        group: dist.ProcessGroup = mesh.dense["pp"].get_group()
        self._tie = _tie(parts, stages, group, masters)
        mirror = self._tie.head if self._tie else None
        named = [named for part in parts for named in part.named_parameters()]
        records = [parameter_record(name, p, base, masters) for name, p in named if p is not mirror]
        super().__init__(parts, mesh, precision, records, masters)
        self.parts, self.stages = list(parts), stages
        self._config, self._group, self._masters = config, group, masters
        self._rank = mesh.coordinate["pp"]
        self._part_of = dict(zip(stages.of_rank(self._rank), self.parts, strict=True))
        self._backwards = {stage: Backwards(part, config.zero_stage) for stage, part in self._part_of.items()}
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._count: torch.Tensor | None = None

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        if self._tie is not None:
            self._tie.spread()
        self._count = count
        self._begin(count)
        batches = [cut_rows(batch, self.mesh) for batch in batches]
        losses: list[torch.Tensor] = []
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}  # step() cuts it again
        ids = whole.pop("input_ids")
        inputs = (ids,) if 0 in self._part_of else ()
        factor = self._factor(count)
        if factor is not None:
            whole["factor"] = factor.expand(len(batches))  # one per micro-batch
        target = ids if self._is_last else None  # passed to loss_fn, which does not use it
        schedule = self._schedule(len(batches), batches[0]["input_ids"].shape)
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False, **whole)
        self._reduce()
        total = torch.zeros((), dtype=self._loss_dtype, device=self._device)
        if losses:
            total += torch.stack([loss.detach() for loss in losses]).sum()
        if self._loss_scale is not None:
            total /= self._loss_scale.scale  # a power of two: exact
            self._loss_scale.unscale(local_gradients(self._records))
        return self._sum(total)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        if self._tie is not None:
            self._tie.spread()
        self._weights.cast()
        for part in self.parts:
            part.eval()
        total = torch.zeros((), dtype=self._loss_dtype, device=self._device)
        for batch in batches:
            out = self._forward(cut_rows(batch, self.mesh))
            if self._is_last:
                total += self._precision.as_output(out)
        for part in self.parts:
            after_evaluation(part)
            part.train()
        return self._sum(total)

    @torch.no_grad()
    def score(self, batches: Sequence[Batch], adapted: bool = True) -> torch.Tensor:
        if self._tie is not None:
            self._tie.spread()
        self._weights.cast()
        found = []
        with scoring(self.parts, batches, adapted) as given:
            for batch in given:
                out = self._forward(cut_rows(batch, self.mesh), **BY_ROW)
                empty = torch.zeros(len(batch["input_ids"]), dtype=self._loss_dtype, device=self._device)
                found.append(self._precision.as_output(out) if self._is_last else empty)
        nats = self.mesh.sum_over_context(torch.cat(found))
        dist.all_reduce(nats, group=self._group)
        return -nats

    @property
    def _is_last(self) -> bool:
        return len(self.stages.owners) - 1 in self._part_of

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self._precision.compute, torch.float32)

    def _hidden(self, shape_BT: torch.Size, device: torch.device) -> torch.Tensor:
        """An empty [B, T, D] as one stage hands it to the next, T/tp of it where tp cuts the stream."""
        rows, positions = shape_BT
        shape = (rows, positions // self.mesh.layout.tp, self.parts[0].arch.hidden_size)
        return torch.empty(shape, dtype=self._precision.compute, device=device)

    def _schedule(self, num_micro: int, shape_BT: torch.Size) -> Any:
        """Made once per number and shape of micro-batches: a stage keeps buffers of one shape, and another would hang."""
        key = (num_micro, shape_BT)
        if key not in self._schedules:
            kind = KINDS[self._config.schedule]
            made = [self._stage(stage, part, shape_BT) for stage, part in self._part_of.items()]
            from torch.distributed import pipelining

            schedule: Callable[..., Any] = getattr(pipelining, kind.torch)
            stages = made[0] if kind.stages_per_rank == 1 else made
            self._schedules[key] = schedule(stages, num_micro, loss_fn=self._divide, scale_grads=False)
        return self._schedules[key]

    def _stage(self, stage: int, part: Decoder, shape_BT: torch.Size) -> "PipelineStage":
        """With shapes and dtypes given, torch does not run the model once more to find them."""
        last = len(self.stages.owners) - 1
        hidden_BTD = self._hidden(shape_BT, torch.device("meta")).requires_grad_()
        ids_BT = torch.empty(shape_BT, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=self._loss_dtype, device="meta").requires_grad_()
        from torch.distributed.pipelining.stage import PipelineStage

        made = PipelineStage(
            SendsItself(part),
            stage,
            last + 1,
            self._device,
            input_args=(ids_BT if stage == 0 else hidden_BTD,),
            output_args=(loss if stage == last else hidden_BTD,),
            group=self._group,
        )
        backward, backward_of_weights = made.backward_one_chunk, made.backward_weight_one_chunk
        sender = self._backwards[stage]

        def send_in_it(*args: Any, **kwargs: Any) -> None:
            sender.before(kwargs["last_backward"])
            backward(*args, **kwargs)

        def send_after_it(*args: Any, **kwargs: Any) -> None:
            sender.hold()
            backward_of_weights(*args, **kwargs)
            sender.after_weights(kwargs["last_backward"])
            hand_over_rest(self._masters, part)

        made.backward_one_chunk = send_in_it  # type: ignore[method-assign]
        made.backward_weight_one_chunk = send_after_it  # type: ignore[method-assign]
        return made

    def _divide(self, nats: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        """The loss of one micro-batch that backward starts from, which the head has divided but for fp16."""
        assert self._count is not None
        loss = self._precision.as_output(nats)
        return loss if self._loss_scale is None else loss / self._count * self._loss_scale.scale

    def _reduce(self) -> None:
        """Sums what remains once all backwards are done: replicas without FSDP, and the ends of a tied embedding."""
        if not self._gradients_checked:
            mirror = self._tie.head_sum if self._tie else None
            ends = [] if mirror is None else [Record(HEAD, mirror, torch.Size(mirror.shape), counted=False)]
            check_gradients([*self._records, *ends])
            self._gradients_checked = True
        if self._tie is not None:
            self._tie.collect()
        if self._config.zero_stage == 0:
            sum_gradients(self._records, self.mesh, self._config.bucket_mib, self._precision.reduce)
        elif self._masters:
            sum_parts(self._records)

    def _sum(self, total: torch.Tensor) -> torch.Tensor:
        """Over all ranks: the last stage's figure, equal on every stage."""
        total = self.mesh.sum_over_loss(total)
        dist.all_reduce(total, group=self._group)
        return total

    def _forward(self, batch: Batch, **how: Any) -> torch.Tensor:
        """One micro-batch through this rank's stages -> the output of the last."""
        held_by, given = self.stages.owners, dict(batch)
        out = given.pop("input_ids")
        shape_BT = out.shape
        for stage, part in self._part_of.items():
            if stage > 0 and held_by[stage - 1] != self._rank:
                out = self._hidden(shape_BT, self._device)
                dist.recv(out, group=self._group, group_src=held_by[stage - 1])
            out = part(out, **given, **how)
            if stage + 1 < len(held_by) and held_by[stage + 1] != self._rank:
                assert out.dtype == self._hidden(shape_BT, torch.device("meta")).dtype
                dist.send(out.contiguous(), group=self._group, group_dst=held_by[stage + 1])
        return out


class SendsItself(nn.Module):
    """A stage whose FSDP units send in backward. Of a module that is one of FSDP's, torch's stage switches off what each backward
    sends, and sends all of it after the last, beside no computation; it does not look inside this one."""

    def __init__(self, part: Decoder):
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.part(*args, **kwargs)
        return out


def _tie(
    parts: Sequence[Decoder], stages: Stages, group: dist.ProcessGroup, masters: Mapping[str, Parameter]
) -> Tie | None:
    if not parts[0].arch.tied:
        return None
    named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    return Tie(named.get(EMBEDDING), named.get(HEAD), group, stages.owners[0], stages.owners[-1], masters)
