"""Validation of a checkpoint, on the sets of its own recipe, over any number of ranks."""

from pathlib import Path

from windlass.config import RunConfig, check_recipe
from windlass.data.prepare.prepare import open_prepared, other_stream
from windlass.data.stream.evaluation_set import EvaluationSet
from windlass.errors import UserError
from windlass.model.config import architecture_from_hf
from windlass.model.lora.adapter import adapter_of
from windlass.parallel.build import Fill, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.precision.policy import precision_of
from windlass.runtime import start_runtime
from windlass.training.base_model import find_base
from windlass.training.open_data import evaluation_sets
from windlass.training.open_saved import find_checkpoint, open_reader, read_trainer_state
from windlass.training.restore import nothing, weight_tensors, weights_of
from windlass.units import bits_per_byte, perplexity


def evaluate(
    path: Path, *, step: int | None = None, sequences: int | None = None, base: Path | None = None
) -> list[str]:
    """Scores every set of the run on all ranks -> one line per set, on rank 0. `sequences`: per set, instead of the recipe's
    number. `base`: of an adapter, where that has moved. Collective. Raises UserError."""
    if sequences is not None and sequences < 1:
        raise UserError(f"--sequences {sequences}", "at least one sequence is scored", "use 1 or more")
    directory = find_checkpoint(path, step)
    trainer_state = read_trainer_state(directory)
    config = for_evaluation(check_recipe(trainer_state["config"]), sequences)
    prepared = open_prepared(config.data, config.evaluate.sets)
    if prepared.stream != trainer_state["data"]["stream"]:
        raise other_stream(prepared.where)
    with start_runtime() as runtime:
        mesh = make_mesh(config.parallel.layout(runtime.world), runtime.device.type)
        architecture, precision = architecture_from_hf(trainer_state["model"]), precision_of(config.precision)
        adapter = adapter_of(config.adapter, architecture)
        fill: Fill = nothing
        if adapter is not None:
            source = runtime.shared(runtime.first(lambda: find_base(trainer_state, base)))
            assert source is not None
            fill = weights_of(source, architecture)
        parts = (architecture, config.parallel, precision, mesh, runtime.device)
        program = build_program(*parts, fill, adapter=adapter)
        reader = open_reader(directory, runtime.rank, runtime.world, runtime.saving)
        reader.restore_from(directory, weight_tensors(program), what="weights")
        lines = []
        for name, data in evaluation_sets(config, mesh, runtime.device, prepared).items():
            nats = float(program.evaluate(data.batches))
            lines.append(describe(name, trainer_state["step"], nats, data))
        return lines if runtime.rank == 0 else []


def for_evaluation(config: RunConfig, sequences: int | None) -> RunConfig:
    """The run's recipe on whatever ranks are here: parameters sharded, random weights that the checkpoint replaces."""
    watch = config.evaluate if sequences is None else config.evaluate.changed(sequences=sequences)
    return config.changed(evaluate=watch, parallel=ParallelConfig())


def describe(name: str, step: int, nats: float, data: EvaluationSet) -> str:
    """A set's figures in one line; bits per byte only where the tokenizer's bytes are exact."""
    loss = nats / data.num_targets
    power = perplexity(loss)
    text = f"{name}: step {step}, loss {loss:.4f}, perplexity {'n/a' if power is None else f'{power:.4g}'}"
    per_byte = bits_per_byte(nats, data.num_bytes)
    if per_byte is not None:
        text += f", {per_byte:.3f} bits per byte"
    return f"{text}, {data.num_targets:,} targets"
