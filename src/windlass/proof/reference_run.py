"""The reference that a proof compares the ranks' training with: rows, model and training of one process, in torch and
transformers.

The rows are read by one process, the model is drawn by transformers, proof/reference trains it, and its tensors get our names.
The weights that a recipe without a model begins with are drawn here as whole tensors, with no layout built.
"""

import contextlib
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.config import RunConfig
from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.data.config import DataConfig
from windlass.data.prepare.prepare import Prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.open_order import Opening
from windlass.data.stream.open_stream import open_stream
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.model.families.family_table import to_hf
from windlass.model.init import initialise
from windlass.model.lora.adapter import is_factor
from windlass.model.names import VOCABULARY, stored_tensor
from windlass.optim.config import MuonConfig
from windlass.optim.schedule import learning_rate
from windlass.proof.proxy_adapter import proxy_reference
from windlass.proof.reference import Group, ReferenceSettings, Trace, by_matrix, train_reference
from windlass.proof.reference_preference import Preferred
from windlass.proof.watch import DRAWN_BLOCK, odd

Expected = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ReferenceRun:
    """What one process trains: per step, and by our names without padded rows."""

    losses: Sequence[float]
    norms: Sequence[float]
    gradients: Expected
    first_weights: Expected
    weights: Expected
    evaluations: Sequence[float]
    """Summed nats of the held-out rows, before the first step and after the last."""
    figures: Sequence[Expected]
    """What the program reports of each step besides its loss; empty for most."""
    streams: Mapping[int, torch.Tensor]
    """The residual streams of the first step, as in watch.Seen."""
    targets: Sequence[int]
    """What each step's loss is a mean over: counted targets, or pairs."""
    held_out_targets: int


def global_rows(
    config: RunConfig, prepared: Prepared, with_keys: bool, borders: Sequence[int]
) -> list[dict[str, torch.Tensor]]:
    """The global batch of every step, read by one process."""
    joined = DataConfig.model_validate(config.data.model_dump(by_alias=True) | {"isolate": False})
    opening = Opening(prepared, joined, BatchCut(config.samples_per_step), config.run.seed)
    source = open_stream(opening, with_keys=with_keys)
    assert config.run.steps is not None
    with contextlib.closing(source):
        batches = [source.next()[0] for _ in range(config.run.steps)]
    if config.data.isolate:
        batches = [{**batch, **apart(batch, *prepared.borders("train"))} for batch in batches]
    return [{**batch, **odd(batch, borders)} for batch in batches]


def held_out_rows(config: RunConfig, prepared: Prepared) -> list[dict[str, torch.Tensor]]:
    """The rows that are scored, read one by one from the shards."""
    rows = []
    sequences = config.data.sequences_per_sample
    samples = itertools.islice(Reader(prepared.shards("validation")), config.evaluate.sequences // sequences)
    for ids_S, labels_S in samples:
        ids, targets = (torch.from_numpy(values.astype(np.int64)).view(sequences, -1) for values in (ids_S, labels_S))
        ids, targets = ids[:, :-1], targets[:, 1:]
        row = {"input_ids": ids, "targets": targets}
        rows.append({**row, **apart(row, *prepared.borders("validation"))} if config.data.isolate else row)
    return rows


def apart(batch: Batch, end_of_text: int, num_documents: int) -> Batch:
    """`documents` and `targets` of rows whose documents are isolated, token by token: written a second time, apart from
    data/packing. A document begins behind an end of text if a target is left to learn, and no end of text predicts."""
    ids, targets = batch["input_ids"].tolist(), batch["targets"].tolist()
    documents = []
    for row, wanted in zip(ids, targets, strict=True):
        last = max((at for at, target in enumerate(wanted) if target != NOT_COUNTED), default=0)
        found = [0, *(at for at in range(1, last + 1) if row[at - 1] == end_of_text)]
        documents.append(found + [len(row)] * (num_documents - len(found)))
    targets_BT = batch["targets"].masked_fill(batch["input_ids"] == end_of_text, NOT_COUNTED)
    return {"documents": torch.tensor(documents), "targets": targets_BT}


def positions_of(starts_BM: torch.Tensor, length: int) -> torch.Tensor:
    """[B, T] positions that begin anew at each document, counted apart from the model's own borders."""
    rows = []
    for starts in starts_BM.tolist():
        edges = [start for start in starts if start < length]
        spans = zip(edges, [*edges[1:], length], strict=True)
        rows.append([at - start for start, end in spans for at in range(start, end)])
    return torch.tensor(rows)


def counted_per_batch(rows: Sequence[Batch], is_preference: bool = False) -> list[int]:
    """What a loss is a mean over, of each batch: targets that count, or pairs."""
    if is_preference:
        return [int((batch["targets"] != NOT_COUNTED).any(1).view(-1, 2).all(1).sum()) for batch in rows]
    return [int((batch["targets"] != NOT_COUNTED).sum()) for batch in rows]


def counted_behind_borders(batch: Batch) -> int:
    """Counted targets of a row's second document and later ones."""
    positions_T = torch.arange(batch["targets"].shape[1])
    return int(((batch["targets"] != NOT_COUNTED) & (positions_T >= batch["documents"][:, 1:2])).sum())


def counted_in_rest(batch: Batch, micro_batch: int, chunk: int, context: int) -> int:
    """Counted targets of the tokens that are left when each rank cuts its micro-batch into chunks; summed over the ranks."""
    total = 0
    for targets_BT in batch["targets"].split(micro_batch):
        slices = targets_BT.tensor_split(2 * context, dim=1)
        for rank in range(context):
            mine_N = torch.cat((slices[rank], slices[-1 - rank]), 1).flatten()
            total += int((mine_N[len(mine_N) // chunk * chunk :] != NOT_COUNTED).sum())
    return total


def drawn(config: RunConfig, architecture: Architecture) -> dict[str, torch.Tensor]:
    """The weights that a new model begins with, each tensor drawn whole."""
    shapes = parameter_shapes(architecture)
    tensors = {name: torch.empty(shape, dtype=torch.float64) for name, shape in shapes.items()}
    initialise(tensors.items(), architecture, config.run.seed, DRAWN_BLOCK)
    return tensors


def drops(config: RunConfig, architecture: Architecture) -> bool:
    """Whether training drops anything, and so needs a key per sample."""
    return bool(architecture.dropout or config.adapter.dropout)


def has_reference(config: RunConfig, architecture: Architecture) -> str | None:
    """Why torch and transformers alone cannot train this proxy model, or None where they can."""
    optim = config.optim
    names = [name for group in optim.groups if group.effect for name in group.names]
    if architecture.num_experts and any(".experts." in name for name in names):
        return "optim.groups that name experts, whose gate and up are one parameter in transformers"
    if drops(config, architecture):
        return "dropout, whose masks transformers cannot reproduce"
    if architecture.family == "gpt2" and config.adapter.kind != "none" and names:
        return "optim.groups beside an adapter of GPT-2, whose query, key and value are one module in transformers"
    if optim.kind == "muon" and (architecture.family == "gpt2" or optim.muon != MuonConfig()):
        return "Muon with other settings than torch's own has, or on GPT-2's fused matrices"
    return None


def reference(
    config: RunConfig,
    architecture: Architecture,
    directory: Path,
    rows: Sequence[dict[str, torch.Tensor]],
    held_out: Sequence[dict[str, torch.Tensor]],
) -> Trace:
    """The proxy model trained by torch and transformers on one process."""
    optim, steps = config.optim, config.run.steps
    assert steps is not None
    settings = ReferenceSettings(
        [learning_rate(step, steps, optim) for step in range(steps)],
        optim.beta1,
        optim.beta2,
        optim.epsilon,
        optim.weight_decay,
        optim.max_norm,
        [Group(group.names, group.learning_rate_scale, group.weight_decay, group.frozen) for group in optim.groups],
        muon=optim.kind == "muon",
        adapter=proxy_reference(config, architecture),
        preference=_preferred(config),
    )
    batches, scored = ([_batch(row) for row in some] for some in (rows, held_out))
    return train_reference(directory, batches, torch.float64, settings, scored)


def _preferred(config: RunConfig) -> Preferred | None:
    given = config.objective
    if given.kind != "dpo":
        return None
    numbers = given.preference_beta, given.label_smoothing or 0.0, given.preference_margin
    return Preferred(given.preference_loss, *numbers, of_base=not config.keeps_reference)


def _batch(row: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """A row in the form that the reference takes."""
    ids = row["input_ids"]
    more = (positions_of(row["documents"], ids.shape[1]),) if "documents" in row else ()
    return (ids, row["targets"], *more)


def by_our_names(tensors: dict[str, torch.Tensor], architecture: Architecture) -> dict[str, torch.Tensor]:
    """Hugging Face's tensors, cut and turned as ours are. Those that are not there (frozen ones) are left out."""
    tensors, ours = by_matrix(tensors), {}
    for name, (rows, *_) in parameter_shapes(architecture).items():
        where = stored_tensor(name, architecture)
        if where.name in tensors:
            tensor = tensors[where.name].T if where.transposed else tensors[where.name]
            ours[name] = tensor[where.first : where.first + rows]
    return ours | {name: tensor for name, tensor in tensors.items() if is_factor(name)}


def trimmed(tensors: dict[str, torch.Tensor], architecture: Architecture) -> dict[str, torch.Tensor]:
    """Without the padded rows of the vocabulary."""
    rows = architecture.vocab_size
    return {name: tensor[:rows] if name in VOCABULARY else tensor for name, tensor in tensors.items()}


def write_model(directory: Path, architecture: Architecture) -> None:
    """A random model of transformers' own making, in fp64; norms and biases are moved off 1 and 0, so that they matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = dict(to_hf(architecture))
    generator = torch.Generator().manual_seed(5)
    with torch.random.fork_rng(devices=[]):  # transformers draws from the process's own generator
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        model.save_pretrained(directory)
