"""Validation of a checkpoint, on the sets of its own recipe, over any number of ranks."""

from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.config import check_recipe
from windlass.data.prepare import open_prepared
from windlass.jobs.assemble import evaluation_sets, lay_out
from windlass.jobs.saved import find_checkpoint, open_reader, read_capsule
from windlass.jobs.restore import weight_tensors
from windlass.model.config import architecture_from_hf
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.runtime import start_runtime
from windlass.units import bits_per_byte, perplexity


@dataclass(frozen=True)
class Score:
    """Of one set: nats per target; bits per byte where the tokenizer's bytes are exact, else None."""

    name: str
    step: int
    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    num_targets: int


def evaluate(path: Path, *, step: int | None = None, sequences: int | None = None) -> list[Score]:
    """Scores every set of the run. `sequences`: per set, instead of the recipe's number. Collective."""
    runtime = start_runtime()
    directory = find_checkpoint(path, step)
    capsule = read_capsule(directory)
    config = check_recipe(capsule["config"])
    if sequences is not None:
        config = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"sequences": sequences})})
    config = config.model_copy(update={"parallel": ParallelConfig(zero=3)})
    mesh = make_mesh(config.parallel.layout(runtime.world), runtime.device.type)
    program = lay_out(config, architecture_from_hf(capsule["model"]), mesh, runtime.device)
    open_reader(directory, runtime.rank, runtime.world, runtime.saving).restore_from(
        directory, weight_tensors(program), what="weights"
    )
    prepared = open_prepared(config.data, config.evaluate.sets)
    scores = []
    for name, data in evaluation_sets(config, mesh, runtime.device, prepared).items():
        nats = float(program.evaluate(data.batches))
        loss = nats / data.num_targets
        per_byte = bits_per_byte(nats, data.num_bytes) if data.num_bytes else None
        scores.append(Score(name, capsule["step"], loss, perplexity(loss), per_byte, data.num_targets))
    runtime.close()
    return scores
