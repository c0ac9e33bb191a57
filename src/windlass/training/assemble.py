"""A recipe resolved against its files and devices: what a job works with is made here, once, for all jobs.

What can be refused is refused before anything slow starts: the layout and the batch are checked against the world first, then
data is prepared (by rank 0, once), then the model is shaped, laid out and filled, and last a checkpoint is put into it.
"""

import math
import sys
from collections.abc import Callable

import torch

from windlass.checkpoint.provenance import collect_provenance
from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared, open_prepared
from windlass.data.stream.arrival import Past
from windlass.data.stream.evaluation_set import EvaluationSet, evaluation_set
from windlass.data.stream.loader import Loader
from windlass.data.stream.mixture import shares_of
from windlass.data.stream.skip import SkipRule
from windlass.model.architecture import Architecture
from windlass.objectives.pretrain import Pretrain
from windlass.parallel.build import UNWATCHED, Probe
from windlass.parallel.mesh import Mesh
from windlass.parallel.runtime_checks import checked
from windlass.runtime import Runtime, redirect_output
from windlass.training.announce import announce
from windlass.training.arrival import past_of
from windlass.training.base_model_files import base_files
from windlass.training.drift import begun
from windlass.training.open_program import open_program
from windlass.training.preflight import check_data, make_ready_once, plan_model
from windlass.training.recording import open_console, open_health, open_recorder
from windlass.training.restore import nothing, restore, starting_weights
from windlass.training.run import Run
from windlass.training.run_directory import open_checkpoints, open_directory
from windlass.training.skips import skip_rule


def _silent(_sentence: str) -> None:
    """What the ranks other than 0 do with sentences for the user."""


def assemble(config: RunConfig, runtime: Runtime, is_prepared: bool, probe: Probe = UNWATCHED) -> Run:
    """Everything that training `config` needs, on this rank. Collective. Raises UserError before the first step."""
    config.parallel.layout(runtime.world)  # refused before anything slow
    if not is_prepared:
        config = make_ready_once(config, runtime)
    prepared = open_prepared(config.data, config.evaluate.sets)
    trainer_state = begun(config := with_steps(config, prepared))
    notes = check_data(trainer_state, config, prepared, runtime)
    architecture, rules, recompute = plan_model(config, trainer_state, prepared, runtime.device.type)
    run_lock = open_directory(config.run.directory, runtime)
    restore_output = redirect_output(config.run.directory, runtime.rank)
    console = open_console(config, runtime)
    fill = nothing if trainer_state else starting_weights(config, architecture)
    program, optimizer = open_program(config, runtime, architecture, rules, recompute.kinds, fill, probe)
    checkpoints = open_checkpoints(config, runtime, console.say)
    log = console.say if runtime.rank == 0 else _silent
    start = restore(config, checkpoints, program, optimizer, log)
    for sentence in notes:
        log(sentence)
    mesh = program.mesh
    limits = skip_rule(config, runtime, prepared, start), past_of(trainer_state, config, prepared)
    source = open_loader(config, architecture, mesh, runtime.device, prepared, start.samples_consumed, *limits, log)
    recorder = open_recorder(config, runtime, architecture, start.step, rules, console)
    run = Run(
        config=config,
        architecture=architecture,
        runtime=runtime,
        prepared=prepared,
        program=checked(program, optimizer.state_tensors, config.parallel),
        optimizer=optimizer,
        objective=Pretrain(),
        source=source,
        evaluation_sets=evaluation_sets(config, mesh, runtime.device, prepared),
        checkpoints=checkpoints,
        recorder=recorder,
        provenance=collect_provenance(sys.argv, runtime.hosts()),
        base=base_files(config, is_new=trainer_state is None),
        run_lock=run_lock,
        restore_output=restore_output,
        start_step=start.step,
        health=open_health(config, recorder, start.step),
    )
    announce(run, start.source, rules, recompute)
    return run


def with_steps(config: RunConfig, prepared: Prepared) -> RunConfig:
    """The config with its length as a number of steps. A length in tokens or epochs is rounded up to whole steps."""
    run = config.run
    if run.steps is not None:
        return config
    tokens = run.tokens
    if tokens is None:
        assert run.epochs is not None and prepared.is_whole  # training/preflight has waited for it
        tokens = math.ceil(run.epochs * prepared.sets["train"].samples) * config.data.sequence_length
    return config.with_steps(math.ceil(tokens / run.tokens_per_step))


def open_loader(
    config: RunConfig,
    architecture: Architecture,
    mesh: Mesh,
    device: torch.device,
    prepared: Prepared,
    consumed: int,
    rule: SkipRule | None = None,
    past: Past | None = None,
    tell: Callable[[str], None] = _silent,
) -> Loader:
    return Loader(
        prepared.shards("train", may_lack=0 if rule is None else rule.limit),
        sequence_length=config.data.sequence_length,
        micro_batch=config.run.micro_batch,
        accumulation=config.accumulation(mesh.layout.batch_ranks),
        batch_rank=mesh.batch_rank,
        batch_ranks=mesh.layout.batch_ranks,
        seed=config.run.seed,
        shuffle_window=config.data.shuffle_window,
        consumed=consumed,
        with_keys=bool(architecture.dropout),
        borders=prepared.borders("train") if config.data.isolate else None,
        shares=shares_of(prepared.sets["train"].source_shards, config.data.weights),
        skip_rule=rule,
        arrival=config.data.order.first_epoch == "arrival",
        past=past,
        tell=tell,
        device=device,
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
