"""What ranks do for a proof: they train the proxy model for real, watched, and draw the weights that a new run begins with.

`windlass train` itself trains the proxy model: assemble, the loop, the loader, checkpoints. A watcher wraps the program and notes
what passes through; hooks on the blocks note the residual stream; a wrapper of the batch source takes targets away, unevenly:
whole rows, beginnings of rows, single positions; and puts in tokens whose rows of the vocabulary are at a rank's edge. The rule
looks at the row's own tokens alone, so it is the same in every layout. All of this is passed in as arguments.
"""

import contextlib
import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from windlass.config import RunConfig
from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.data.shards.index import Shard
from windlass.data.stream.batch_source import BatchSource
from windlass.model.architecture import Architecture
from windlass.model.chunks import Chunks
from windlass.model.transformer import Decoder
from windlass.optim.rules import frozen_names
from windlass.parallel.build import BuildHooks, Parallelism, build_program
from windlass.parallel.mesh import make_mesh
from windlass.parallel.program import Program
from windlass.parallel.records import Record
from windlass.parallel.runtime_checks import hash_of
from windlass.precision.policy import precision_of
from windlass.ranks.stopping import Stop
from windlass.runtime import start_runtime
from windlass.signals import Signals
from windlass.training.assemble import assemble
from windlass.training.loop import loop
from windlass.training.start.parameter_rules import rules_of
from windlass.training.start.restore import drawn_weights

DRAWN_BLOCK: Final = 100  # drawn weights at a time: less than any matrix has
EMBEDDED: Final = -1  # the number of the stream before the first layer
MASKS: Final = 5  # kinds of rows: one counts nothing, one loses a part of its beginning, the others single positions


@dataclass
class Seen:
    """What one rank saw of a training. Lists have an entry per step; tensors are whole, by our names, padded rows and all."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    gradients: dict[str, torch.Tensor]
    """The gradients of the first step, before the clip."""
    first_weights: dict[str, torch.Tensor]
    """After the first step: of a mistake in an update only the tensors that it touches differ here."""
    weights: dict[str, torch.Tensor]
    """After the last step."""
    rows: list[dict[str, torch.Tensor]]
    """What the batch source gave this rank, micro-batches joined."""
    batch_rank: int
    """The rank's coordinate on the batch axes."""
    figures: list[dict[str, torch.Tensor]] = field(default_factory=list)
    streams: dict[int, torch.Tensor] = field(default_factory=dict)
    """The residual stream of the first step: per layer that this rank has, the sum and the sum of squares of its part of the
    stream behind that layer; EMBEDDED: before the first."""
    touched: list[str] = field(default_factory=list)
    """Tensors of an adapter's frozen base, as far as this rank has it, that have other bits after training."""


class Watcher:
    """A program that records its losses, gradients, norms and figures."""

    def __init__(self, program: Program, seen: Seen, streams: "Streams"):
        self._program, self._seen, self._streams = program, seen, streams
        self.mesh = program.mesh

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        if len(self._seen.losses) == 1:
            self._seen.first_weights = self.weights()
        self._streams.is_open = not self._seen.losses
        loss = self._program.run(batches, count)
        self._streams.is_open = False
        if not self._seen.losses:
            graded = [record for record in self.records() if record.counted and record.tensor.grad is not None]
            self._seen.gradients = {r.name: whole(r.tensor.grad) for r in graded if r.tensor.grad is not None}
        self._seen.losses.append(float(loss))
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        """The whole weights: those trained beside an adapter's frozen base, else all. Collective."""
        return {record.name: whole(record.tensor) for record in self.records() if record.counted and record.kept}

    def adapt(self, norm: torch.Tensor) -> None:
        self._seen.norms.append(float(norm))
        self._program.adapt(norm)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return self._program.state_tensors()

    def evaluate(self, batches: Sequence[Batch]) -> torch.Tensor:
        nats = self._program.evaluate(batches)
        self._seen.evaluations.append(float(nats))
        return nats

    def figures(self) -> dict[str, torch.Tensor]:
        figures = self._program.figures()
        self._seen.figures.append(figures)
        return figures

    def score(self, batches: Sequence[Batch], adapted: bool = True) -> torch.Tensor:
        return self._program.score(batches, adapted)

    def records(self) -> list[Record]:
        return self._program.records()


class Streams:
    """Adds up the residual stream per layer while `is_open`, in hooks on the blocks: build_program calls `attach`.

    Each element of the stream is on one rank in every layout (rows over the batch axes, positions over context and tp, layers
    over stages), so what the ranks note sums to what one process has."""

    def __init__(self, sums: dict[int, torch.Tensor]):
        self._sums, self.is_open = sums, False

    def attach(self, part: Decoder) -> None:
        for index, block in part.model.layers.items():
            block.register_forward_hook(functools.partial(self._note, int(index)))

    def _note(self, layer: int, _block: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not self.is_open:
            return
        self._add(layer, output if isinstance(output, torch.Tensor) else output[0])
        if layer == 0:
            self._add(EMBEDDED, inputs[0])

    def _add(self, layer: int, stream: torch.Tensor) -> None:
        stream = stream.detach()
        sums = torch.stack((stream.sum(), stream.square().sum()))
        self._sums[layer] = self._sums[layer] + sums if layer in self._sums else sums


class WatchedSource:
    """A batch source whose batches are made odd, and noted; the rest is the wrapped source's."""

    def __init__(self, source: BatchSource, seen: Seen, borders: Sequence[int]):
        self._source, self._seen, self._borders = source, seen, borders
        self.state, self.entry, self.close = source.state, source.entry, source.close
        self.drain_events = source.drain_events

    def next(self) -> list[Batch]:
        batches = [{**batch, **odd(batch, self._borders)} for batch in self._source.next()]
        self._seen.rows.append({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
        return batches

    @property
    def consumed(self) -> int:
        return self._source.consumed

    @property
    def wait_s(self) -> float:
        return self._source.wait_s

    @property
    def shards(self) -> Sequence[Shard]:
        return self._source.shards


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor of a sharded one. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def take_targets(ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """`targets_BT` with some masked; which ones depends on the row's ids."""
    length = ids_BT.shape[1]
    positions_T = torch.arange(length)
    kind_B1 = (ids_BT * (positions_T + 1)).sum(1, keepdim=True) % MASKS
    begins_BT = (kind_B1 == 1) & (positions_T < length // 2)
    holes_BT = (kind_B1 > 2) & ((ids_BT + positions_T) % 3 == 0)
    return targets_BT.masked_fill((kind_B1 == 0) | begins_BT | holes_BT, NOT_COUNTED)


def vocabulary_borders(architecture: Architecture, tp: int) -> list[int]:
    """The first and the last row of the vocabulary that each tensor rank has, where a slice that is off by one shows; and the
    padding's, which gets no gradient where it is read."""
    rows = architecture.padded_vocab_size // tp
    edges = [(first, min(first + rows, architecture.vocab_size) - 1) for first in range(0, tp * rows, rows)]
    pad = [] if architecture.pad_row is None else [architecture.pad_row]
    return [row for first, last in edges if first <= last for row in (first, last)] + pad


def odd(batch: Batch, borders: Sequence[int]) -> Batch:
    """ids and targets of a batch with `borders` at every fourth position, and targets taken away; by what each row itself holds.
    Without borders unchanged: pairs, whose kept scores are of the rows as they are."""
    if not borders:
        return {}
    ids_BT = batch["input_ids"]
    table = torch.tensor(borders)
    numbers_BT = ids_BT.sum(1, keepdim=True) + torch.arange(ids_BT.shape[1])

    def with_borders(old_BT: torch.Tensor, numbers_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(numbers_BT % 4 == 0, table[numbers_BT // 4 % len(table)], old_BT)

    targets_BT = with_borders(batch["targets"], numbers_BT + 1)
    targets_BT = targets_BT.masked_fill(batch["targets"] == NOT_COUNTED, NOT_COUNTED)
    return {"input_ids": with_borders(ids_BT, numbers_BT), "targets": take_targets(ids_BT, targets_BT)}


def train_proxy(config: RunConfig, borders: Sequence[int], chunks: Chunks) -> Seen:
    """On every rank: `config` trained by the real loop, watched; what is done in chunks is done in `chunks`."""
    seen = Seen([], [], [], {}, {}, {}, [], 0)
    streams = Streams(seen.streams)
    hooks = BuildHooks(chunks, streams.attach)
    with (
        contextlib.redirect_stdout(io.StringIO()),
        start_runtime() as runtime,
        assemble(config, runtime, is_prepared=True, hooks=hooks) as run,
    ):
        mesh = run.program.mesh  # its coordinates, not the property that the loader uses: that is proved here
        seen.batch_rank = mesh.coordinate["replicate"] * mesh.layout.shard + mesh.coordinate["shard"]
        watcher = Watcher(run.program, seen, streams)
        held = {record.name: int(hash_of(record.tensor)) for record in run.program.records() if not record.kept}
        source = WatchedSource(run.source, seen, borders)
        loop(replace(run, program=watcher, source=source), Stop(runtime.tree, runtime.store, runtime.device, Signals()))
        seen.weights = watcher.weights()
        base = [record for record in run.program.records() if not record.kept]
        return replace(
            seen, touched=[record.name for record in base if int(hash_of(record.tensor)) != held[record.name]]
        )


def draw(config: RunConfig, architecture: Architecture) -> dict[str, torch.Tensor]:
    """On every rank: the weights that a run of `config` begins with where no model is given, whole, by our names."""
    with start_runtime() as runtime:
        mesh = make_mesh(config.parallel.layout(runtime.world), runtime.device.type)
        parallelism = Parallelism(config.parallel, precision_of(config.precision), mesh, runtime.device)
        fill = drawn_weights(architecture, config.run.seed, DRAWN_BLOCK)
        program = build_program(architecture, parallelism, fill, frozen_names(rules_of(config, architecture)))
        return {record.name: whole(record.tensor) for record in program.records() if record.counted}
