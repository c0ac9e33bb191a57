"""The batches of a run: the training stream and its validation sets, cut over the batch axes of the mesh."""

from collections.abc import Callable

import torch

from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared
from windlass.data.stream.batch_source import BatchSource
from windlass.data.stream.evaluation_set import EvaluationSet, evaluation_set
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.open_stream import open_stream
from windlass.model.architecture import Architecture
from windlass.parallel.mesh import Mesh
from windlass.runtime import Runtime
from windlass.training.restore import Start


def open_source(
    config: RunConfig,
    architecture: Architecture,
    mesh: Mesh,
    runtime: Runtime,
    prepared: Prepared,
    start: Start,
    log: Callable[[str], None],
) -> BatchSource:
    """The training stream, cut over the batch axes, from where the run starts."""
    batch_ranks = mesh.layout.batch_ranks
    return open_stream(
        prepared,
        config.data,
        BatchCut(config.run.micro_batch, config.accumulation(batch_ranks), mesh.batch_rank, batch_ranks),
        seed=config.run.seed,
        with_keys=bool(architecture.dropout or config.adapter.dropout),
        state=start.stream_state(config, prepared.stream),
        ranks=runtime,
        log=log,
        device=runtime.device,
    )


def evaluation_sets(
    config: RunConfig, mesh: Mesh, device: torch.device, prepared: Prepared
) -> dict[str, EvaluationSet]:
    """Every validation set, cut over the batch axes; `validation` comes first."""
    return {
        name: evaluation_set(
            prepared.shards(name),
            num_sequences=config.evaluate.sequences,
            micro_batch=config.run.micro_batch,
            batch_rank=mesh.batch_rank,
            batch_ranks=mesh.layout.batch_ranks,
            token_bytes_V=prepared.token_bytes(name),
            borders=prepared.borders(name) if config.data.isolate else None,
            device=device,
            name=name,
        )
        for name in ("validation", *config.evaluate.sets)
    }
