"""Everything that a run trains with is made here, of what `resolve_run` has decided: the model is laid out and filled, a
checkpoint is put into it, and the stream begins where the checkpoint ends. Each part is made by a file of its own, most of them
in parts/.
"""

import sys
from contextlib import ExitStack
from functools import partial

from windlass.checkpoint.provenance import collect_provenance
from windlass.config import RunConfig
from windlass.parallel.build import NO_HOOKS, BuildHooks
from windlass.parallel.runtime_checks import Replicas, checked_program
from windlass.runtime import Runtime
from windlass.training.announce import announce
from windlass.training.health import open_health
from windlass.training.parts.open_checkpoints import open_checkpoints, open_mirror
from windlass.training.parts.open_data import evaluation_sets, open_source
from windlass.training.parts.open_program import open_program
from windlass.training.parts.open_recorder import open_console, open_recorder
from windlass.training.parts.own_parts import OURS, OwnParts
from windlass.training.parts.reference_scores import reference_scores
from windlass.training.resolve import Resolved, resolve_run
from windlass.training.run import Run
from windlass.training.run_directory import failure_noted
from windlass.training.sizing.out_of_memory import explained, no_room
from windlass.training.start.base_model import base_files, base_of, with_scores_kept
from windlass.training.start.restore import compared_tensors, kept_weights, restore, starting_weights


def _silent(_sentence: str) -> None:
    """What the ranks other than 0 do with sentences for the user."""


def assemble(
    config: RunConfig,
    runtime: Runtime,
    is_prepared: bool = False,
    hooks: BuildHooks = NO_HOOKS,
    own: OwnParts = OURS,
) -> Run:
    """Everything that training `config` needs, on this rank. `is_prepared`: the caller has just prepared the data. Collective.
    Raises UserError before the first step, and then lets go of what it had opened."""
    with (
        failure_noted(config.run.directory, runtime),
        explained(partial(no_room, config, runtime)),
        ExitStack() as opened,
    ):
        resolved = resolve_run(config, runtime, is_prepared, own.room, opened)
        run = _make(resolved, runtime, hooks, own, opened)
        run.opened = opened.pop_all()
        return run


def _make(resolved: Resolved, runtime: Runtime, hooks: BuildHooks, own: OwnParts, opened: ExitStack) -> Run:
    config, trainer_state, prepared, plan, sentences = resolved
    architecture = plan.architecture
    console = open_console(config, runtime)
    base = base_of(config, runtime, trainer_state)
    fill = kept_weights(config, architecture) if trainer_state else starting_weights(config, architecture)
    program, optimizer = open_program(config, runtime, plan, fill, hooks)
    mirror = open_mirror(config, runtime)
    checkpoints = open_checkpoints(config, runtime, console.say, mirror)
    log = console.say if runtime.rank == 0 else _silent
    start = restore(config, checkpoints, program, optimizer, prepared.stream, log)
    for sentence in sentences:
        log(sentence)
    files = base_files(config, is_new=trainer_state is None)
    reference = reference_scores(config, architecture, program, prepared, runtime, start, files, log)
    source = own.stream(open_source(config, architecture, program.mesh, runtime, prepared, start, log, reference))
    opened.callback(source.close)
    recorder = open_recorder(config, runtime, plan, start.step, console, program, optimizer, own.on_event)
    run = Run(
        config=config,
        architecture=architecture,
        runtime=runtime,
        prepared=prepared,
        program=checked_program(program, config.parallel),
        optimizer=optimizer,
        replicas=Replicas(compared_tensors(program, optimizer), program.mesh.dense.device_type),
        objective=own.objective_of(config),
        schedule=own.schedule_of(config),
        source=source,
        sinks=own.sinks,
        evaluation_sets=evaluation_sets(config, program.mesh, runtime.device, prepared, reference),
        checkpoints=checkpoints,
        mirror=mirror,
        recorder=recorder,
        provenance=collect_provenance(sys.argv, runtime.hosts(), parts=own.names(), is_written=runtime.rank == 0),
        base=base,
        base_files=with_scores_kept(files, reference),
        start_step=start.step,
        health=open_health(config, recorder, start.step, start.trainer_state.get("norms", ())),
    )
    announce(run, start.source, plan.rules, plan.recompute, start.drift, own.names())
    return run
