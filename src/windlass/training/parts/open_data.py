"""The batches of a run: the training stream and its validation sets, cut over the batch axes of the mesh."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared
from windlass.data.stream.batch_source import BatchSource
from windlass.data.stream.evaluation_set import ChangeBatch, EvaluationSet, evaluation_set, unchanged
from windlass.data.stream.ledger import shards_fingerprint
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.open_order import Opening
from windlass.data.stream.open_stream import open_stream
from windlass.model.architecture import Architecture
from windlass.objectives.kept_scores import ReferenceScores, with_scores
from windlass.objectives.objective import Objective
from windlass.parallel.mesh import Mesh
from windlass.parallel.program import Program
from windlass.runtime import Runtime
from windlass.training.start.restore import Start


def open_source(
    config: RunConfig,
    architecture: Architecture,
    mesh: Mesh,
    runtime: Runtime,
    prepared: Prepared,
    start: Start,
    log: Callable[[str], None],
    reference: ReferenceScores | None = None,
) -> BatchSource:
    """The training stream, cut over the batch axes, from where the run starts; a pair with its `reference` scores."""
    cut = replace(
        batch_cut(config, mesh), accumulation=config.accumulation(mesh.layout.batch_ranks), world_rank=runtime.rank
    )
    state = start.stream_state(config, prepared.stream)
    return open_stream(
        Opening(prepared, config.data, cut, config.run.seed, state, log),
        with_keys=bool(architecture.dropout or config.adapter.dropout),
        change=_adding(reference, "train", prepared),
        ranks=runtime,
        device=runtime.device,
    )


def batch_cut(config: RunConfig, mesh: Mesh) -> BatchCut:
    """This rank's part of a round of micro-batches, one on each batch rank."""
    micro_batch = config.micro_batch // config.data.sequences_per_sample
    return BatchCut(micro_batch, batch_rank=mesh.batch_rank, batch_ranks=mesh.layout.batch_ranks)


def evaluation_sets(
    config: RunConfig,
    mesh: Mesh,
    device: torch.device,
    prepared: Prepared,
    reference: ReferenceScores | None = None,
) -> dict[str, EvaluationSet]:
    """Every validation set, cut over the batch axes; `validation` comes first, where there is one."""
    return {
        name: evaluation_set(
            prepared,
            config.data,
            name,
            batch_cut(config, mesh),
            config.evaluate.sequences,
            change=_adding(reference, name, prepared),
            device=device,
        )
        for name in config.data.evaluated(config.evaluate.sets)
    }


def evaluate_set(
    data: EvaluationSet, labels: Sequence[str], objective: Objective, program: Program
) -> tuple[float, int, dict[str, Any]]:
    """The summed loss of a set, how many of the objective's unit it has, and further figures: `source_losses`, the mean of each
    source by its label, where several are scored apart. Collective."""
    if not data.of_sources:
        batches, count = objective.weigh(data.batches, program)
        total = float(program.evaluate(batches))
        return total, int(count), {key: value.tolist() for key, value in objective.figures().items()}
    totals, losses = [], {}
    for source, its_batches in data.of_sources:
        batches, count = objective.weigh(data.batches[its_batches], program)
        totals.append((float(program.evaluate(batches)), int(count)))
        if totals[-1][1]:
            losses[labels[source]] = totals[-1][0] / totals[-1][1]
    return sum(total for total, _ in totals), sum(count for _, count in totals), {"source_losses": losses}


def by_source(config: RunConfig, sums_S2: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The mean loss of each source of the training set, by its label, from nats and counted targets; without those that have
    none."""
    return {
        label: nats / count for label, (nats, count) in zip(labels_of(config, "train"), sums_S2, strict=True) if count
    }


def labels_of(config: RunConfig, name: str) -> list[str]:
    """What the sources of a set are called; behind a name that several have the number of the source, from 1."""
    sources = config.data.sources if name == "train" else config.data.sources_of(name, config.evaluate.sets)
    labels = [source.label for source in sources]
    return [label if labels.count(label) == 1 else f"{label}, {number}" for number, label in enumerate(labels, 1)]


def _adding(reference: ReferenceScores | None, name: str, prepared: Prepared) -> ChangeBatch:
    if reference is None:
        return unchanged
    shards = prepared.shards(name).shards
    scores_N2 = reference.of(name, sum(shard.num_samples for shard in shards), shards_fingerprint(shards))
    return lambda batch, samples: with_scores(batch, scores_N2, samples)
