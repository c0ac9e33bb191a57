"""What is run for a proof: the twin's real training on ranks, watched; the same on one process of torch and transformers.

`windlass train` itself trains the twin: assemble, the loop, the loader, checkpoints. Around the program stands a watcher that
notes what passes through the door; around the loader one that takes targets away, unevenly: whole rows, beginnings of rows, and
places within them, and puts tokens in whose rows of the vocabulary lie at a rank's edge; by a rule that looks at the row's own
tokens alone, so that it is the same in every layout.
"""

import contextlib
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from windlass.config import RunConfig
from windlass.data.loader import Loader
from windlass.data.mds import Reader
from windlass.data.packing import isolate
from windlass.data.prepare import Prepared
from windlass.jobs.assemble import assemble
from windlass.jobs.reference import Group, Settings, Trace, by_matrix, train_reference
from windlass.jobs.train import loop
from windlass.model import attention_unfused as unfused
from windlass.model import loss
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.loss import IGNORED
from windlass.model.names import VOCABULARY, stored_as
from windlass.optim.config import MuonConfig
from windlass.optim.schedule import learning_rate
from windlass.parallel.program import Batch, Program
from windlass.parallel.records import Record
from windlass.runtime import Stop, start_runtime

CHUNK_LOGITS: Final = 3_000  # of the head at a time: seven tokens, fewer than any micro-batch has
PIECE_WEIGHTS: Final = 200  # of attention's weights at a time, where they are materialised
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
    """The first and the last row of the vocabulary that each tensor rank has: where a slice that is off by one shows."""
    rows = architecture.padded_vocab_size // tp
    edges = [(first, min(first + rows, architecture.vocab_size) - 1) for first in range(0, tp * rows, rows)]
    return [row for first, last in edges if first <= last for row in (first, last)]


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
        following = run.loader.next

        def next_batches() -> list[Batch]:
            batches = following()
            batches = [{**batch, **odd(batch, borders)} for batch in batches]
            seen.rows.append({name: torch.cat([batch[name] for batch in batches]) for name in batches[0]})
            return batches

        run.loader.next = next_batches  # type: ignore[method-assign]
        with Stop(runtime) as stop:
            loop(run, stop)
        seen.weights = watcher.weights()
        return seen


def global_rows(
    config: RunConfig, prepared: Prepared, with_keys: bool, borders: Sequence[int]
) -> list[dict[str, torch.Tensor]]:
    """The global batch of every step, read by one process."""
    loader = Loader(
        prepared.shards("train"),
        sequence_length=config.data.sequence_length,
        micro_batch=config.sequences_per_step,
        accumulation=1,
        batch_rank=0,
        batch_ranks=1,
        seed=config.run.seed,
        shuffle_window=config.data.shuffle_window,
        with_keys=with_keys,
        borders=prepared.borders("train") if config.data.isolate else None,
    )
    assert config.run.steps is not None
    with contextlib.closing(loader):
        batches = [loader.next()[0] for _ in range(config.run.steps)]
    return [{**batch, **odd(batch, borders)} for batch in batches]


def held_out_rows(config: RunConfig, prepared: Prepared) -> list[dict[str, torch.Tensor]]:
    """The rows that are scored, read one by one from the shards."""
    borders = prepared.borders("validation") if config.data.isolate else None
    rows = []
    for ids_S, labels_S in itertools.islice(Reader(prepared.shards("validation")), config.evaluate.sequences):
        row = {"input_ids": ids_S[None, :-1], "targets": labels_S[None, 1:]}
        if borders is not None:
            row["documents"], row["targets"] = isolate(ids_S[None], labels_S[None], borders)
        rows.append({name: torch.from_numpy(values.astype(np.int64)) for name, values in row.items()})
    return rows


def positions_of(starts_BM: torch.Tensor, length: int) -> torch.Tensor:
    """[B, T] positions that begin anew at each document, counted apart from the model's own borders."""
    rows = []
    for starts in starts_BM.tolist():
        edges = [start for start in starts if start < length]
        spans = zip(edges, [*edges[1:], length], strict=True)
        rows.append([place - start for start, end in spans for place in range(start, end)])
    return torch.tensor(rows)


def has_reference(config: RunConfig, architecture: Architecture) -> str | None:
    """Why torch and transformers alone cannot train this twin, or None where they can."""
    optim = config.optim
    if architecture.dropout:
        return "dropout, whose masks transformers draws otherwise"
    if optim.kind == "muon" and (architecture.family == "gpt2" or optim.muon != MuonConfig()):
        return "Muon with other settings than torch's own has, or on GPT-2's fused matrices"
    return None


def reference(
    config: RunConfig,
    directory: Path,
    rows: Sequence[dict[str, torch.Tensor]],
    held_out: Sequence[dict[str, torch.Tensor]],
) -> Trace:
    """The twin trained by torch and transformers on one process."""
    optim, steps = config.optim, config.run.steps
    assert steps is not None
    settings = Settings(
        [learning_rate(step, steps, optim) for step in range(steps)],
        optim.beta1,
        optim.beta2,
        optim.epsilon,
        optim.weight_decay,
        optim.max_norm,
        [Group(group.names, group.learning_rate_scale, group.weight_decay, group.frozen) for group in optim.groups],
        muon=optim.kind == "muon",
    )
    batches, scored = ([_batch(row) for row in some] for some in (rows, held_out))
    return train_reference(directory, batches, torch.float64, settings, scored)


def _batch(row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """As the reference takes one."""
    ids = row["input_ids"]
    more = (positions_of(row["documents"], ids.shape[1]),) if "documents" in row else ()
    return (ids, row["targets"], *more)


def by_our_names(tensors: dict[str, torch.Tensor], architecture: Architecture) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors, cut and turned as ours are. Those that are not there (frozen ones) are left out."""
    tensors, ours = by_matrix(tensors), {}
    for name in parameter_shapes(architecture):
        where = stored_as(name, architecture)
        if where.name in tensors:
            tensor = tensors[where.name].T if where.transposed else tensors[where.name]
            ours[name] = tensor.chunk(where.parts)[where.part]
    return ours


def trimmed(tensors: dict[str, torch.Tensor], architecture: Architecture) -> dict[str, torch.Tensor]:
    """Without the padded rows of the vocabulary."""
    rows = architecture.vocab_size
    return {name: tensor[:rows] if name in VOCABULARY else tensor for name, tensor in tensors.items()}


def write_model(directory: Path, architecture: Architecture) -> None:
    """A random model of transformers' own making, in fp64; norms and biases are moved off 1 and 0, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = dict(architecture.to_hf())
    generator = torch.Generator().manual_seed(5)
    with torch.random.fork_rng(devices=[]):  # transformers draws from the process's own generator
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(directory)
