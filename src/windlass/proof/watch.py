"""What ranks do for a proof: the twin's real training, watched, and the weights that a new run draws.

`windlass train` itself trains the twin: assemble, the loop, the loader, checkpoints. Around the program stands a watcher that
notes what passes through the door; around the loader one that takes targets away, unevenly: whole rows, beginnings of rows, and
places within them, and puts tokens in whose rows of the vocabulary lie at a rank's edge; by a rule that looks at the row's own
tokens alone, so that it is the same in every layout.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from windlass.config import RunConfig
from windlass.model import init, loss
from windlass.model.architecture import Architecture
from windlass.model.attention import unfused
from windlass.model.loss import IGNORED
from windlass.optim.rules import frozen_names
from windlass.parallel.build import build_program
from windlass.parallel.mesh import make_mesh
from windlass.parallel.program import Batch, Program
from windlass.parallel.records import Record
from windlass.precision.policy import precision_of
from windlass.runtime import Stop, start_runtime
from windlass.training.assemble import assemble, starting_weights
from windlass.training.loop import loop
from windlass.training.parameter_rules import rules_of

CHUNK_LOGITS: Final = 3_000  # of the head at a time: seven tokens, fewer than any micro-batch has
PIECE_WEIGHTS: Final = 200  # of attention's weights at a time, where they are materialised
DRAWN_BLOCK: Final = 100  # drawn weights at a time: less than any matrix has
MASKS: Final = 5  # kinds of rows: one counts nothing, one loses a part of its beginning, the others single places


@dataclass
class Seen:
    """What one rank saw of a training. Lists have an entry per step; tensors are whole, by our names, padded rows and all."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step, before the clip."""
    first_weights: dict[str, torch.Tensor]
    """After the first step: of a mistake in an update only the tensors that it touches differ here."""
    weights: dict[str, torch.Tensor]
    """After the last step."""
    rows: list[dict[str, torch.Tensor]]
    """What the loader gave this rank, micro-batches joined."""
    batch_rank: int
    """Its place on the batch axes."""
    figures: list[dict[str, torch.Tensor]] = field(default_factory=list)


class Watcher:
    """A program that notes what goes through it."""

    def __init__(self, program: Program, seen: Seen):
        self._program, self._seen = program, seen
        self.mesh = program.mesh

    def run(self, batches: Sequence[Batch], count: torch.Tensor) -> torch.Tensor:
        if len(self._seen.losses) == 1:
            self._seen.first_weights = self.weights()
        loss = self._program.run(batches, count)
        if not self._seen.losses:
            graded = [record for record in self.records() if record.counted and record.tensor.grad is not None]
            self._seen.gradients = {r.name: whole(r.tensor.grad) for r in graded if r.tensor.grad is not None}
        self._seen.losses.append(float(loss))
        return loss

    def weights(self) -> dict[str, torch.Tensor]:
        """Collective."""
        return {record.name: whole(record.tensor) for record in self.records() if record.counted}

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

    def records(self) -> list[Record]:
        return self._program.records()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole tensor of a sharded one. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def take_targets(ids_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """`targets_BT` with fewer of them, as the row's own ids say."""
    length = ids_BT.shape[1]
    places_T = torch.arange(length)
    kind_B1 = (ids_BT * (places_T + 1)).sum(1, keepdim=True) % MASKS
    begins_BT = (kind_B1 == 1) & (places_T < length // 2)
    holes_BT = (kind_B1 > 2) & ((ids_BT + places_T) % 3 == 0)
    return targets_BT.masked_fill((kind_B1 == 0) | begins_BT | holes_BT, IGNORED)


def borders_of(architecture: Architecture, tp: int) -> list[int]:
    """The first and the last row of the vocabulary that each tensor rank has, where a slice that is off by one shows; and the
    padding's, which gets no gradient where it is read."""
    rows = architecture.padded_vocab_size // tp
    edges = [(first, min(first + rows, architecture.vocab_size) - 1) for first in range(0, tp * rows, rows)]
    pad = [] if architecture.pad_row is None else [architecture.pad_row]
    return [row for first, last in edges if first <= last for row in (first, last)] + pad


def odd(batch: Batch, borders: Sequence[int]) -> Batch:
    """ids and targets of a batch with `borders` at every fourth place, and targets taken away; by what each row itself holds."""
    ids_BT = batch["input_ids"]
    table = torch.tensor(borders)
    place_BT = ids_BT.sum(1, keepdim=True) + torch.arange(ids_BT.shape[1])

    def with_borders(old_BT: torch.Tensor, place_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(place_BT % 4 == 0, table[place_BT // 4 % len(table)], old_BT)

    targets_BT = with_borders(batch["targets"], place_BT + 1)
    targets_BT = targets_BT.masked_fill(batch["targets"] == IGNORED, IGNORED)
    return {"input_ids": with_borders(ids_BT, place_BT), "targets": take_targets(ids_BT, targets_BT)}


def train_twin(config: RunConfig, borders: Sequence[int]) -> Seen:
    """On every rank: `config` trained by the real loop, watched. What is done in pieces is done in several."""
    with (
        mock.patch.object(loss, "CHUNK_LOGITS", CHUNK_LOGITS),
        mock.patch.object(unfused, "PIECE_WEIGHTS", PIECE_WEIGHTS),
        contextlib.redirect_stdout(io.StringIO()),
        start_runtime() as runtime,
    ):
        run = assemble(config, runtime, is_prepared=True)
        mesh = run.program.mesh
        place = (
            mesh.coordinate["replicate"] * mesh.layout.shard + mesh.coordinate["shard"]
        )  # not asked of what is proved
        seen = Seen([], [], [], {}, {}, {}, [], place)
        run.program = watcher = Watcher(run.program, seen)
        following = run.source.next

        def next_batches() -> list[Batch]:
            batches = following()
            batches = [{**batch, **odd(batch, borders)} for batch in batches]
            seen.rows.append({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
            return batches

        run.source.next = next_batches  # type: ignore[method-assign]
        with Stop(runtime) as stop:
            loop(run, stop)
        seen.weights = watcher.weights()
        return seen


def draw(config: RunConfig, architecture: Architecture) -> dict[str, torch.Tensor]:
    """On every rank: the weights that a run of `config` begins with where no model is given, whole, by our names."""
    drawing = config.model_copy(update={"model": config.model.model_copy(update={"from_": None})})
    with mock.patch.object(init, "BLOCK", DRAWN_BLOCK), start_runtime() as runtime:
        mesh = make_mesh(config.parallel.layout(runtime.world), runtime.device.type)
        parts = (architecture, config.parallel, precision_of(config.precision), mesh, runtime.device)
        frozen = frozen_names(rules_of(config, architecture))
        program = build_program(*parts, starting_weights(drawing, architecture), frozen)
        return {record.name: whole(record.tensor) for record in program.records() if record.counted}
