"""A recipe resolved against its files and devices: everything that a run trains with is made here.

What can be refused is refused before anything slow starts: the layout and the batch are checked against the world first, then
data is prepared (by rank 0, once), then the model is shaped, laid out and filled, and last a checkpoint is put into it.
"""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from windlass.checkpoint.provenance import collect_provenance
from windlass.config import RunConfig
from windlass.data.prepare.prepare import open_prepared
from windlass.data.stream.batch_source import BatchSource
from windlass.errors import UserError, exit_code_of
from windlass.hardware import find_device
from windlass.model.architecture import Architecture
from windlass.model.families.family import Family
from windlass.model.flops import flops_per_token
from windlass.model.lora.adapter import adapter_of
from windlass.objectives.kept_scores import SCORES
from windlass.objectives.objective import Objective, objective_of
from windlass.optim.optimizer import Optimizer
from windlass.optim.rules import Rules, frozen_names
from windlass.optim.schedule import learning_rate
from windlass.output import redirected_output
from windlass.parallel.build import UNWATCHED, Probe
from windlass.parallel.program import Program
from windlass.parallel.runtime_checks import Replicas, checked
from windlass.precision.fp8 import check_devices
from windlass.report.console import Console
from windlass.report.events import EventLog, first_validations
from windlass.report.metrics import Recorder
from windlass.report.sinks.sink import Sink
from windlass.runtime import Runtime
from windlass.status import note_failure
from windlass.training.announce import announce
from windlass.training.base_model import base_files, base_of, complete_adapter
from windlass.training.drift import begun, check_hosts, check_ranks
from windlass.training.health import open_health
from windlass.training.left_open import choose_policy, keep_choices, with_steps
from windlass.training.open_data import evaluation_sets, open_source
from windlass.training.open_program import open_program
from windlass.training.preflight import Ready, check_data, make_ready_once, plan_model
from windlass.training.reference_scores import reference_scores
from windlass.training.restore import compared_tensors, kept_weights, restore, starting_weights
from windlass.training.run import Run
from windlass.training.run_directory import locked_directory, open_checkpoints, open_mirror
from windlass.training.sizing.choose_sizes import choose_sizes
from windlass.training.sizing.out_of_memory import MemoryParts, explained, no_room, standing_bytes
from windlass.training.sizing.probe import FindRoom, room_of

SINKS: Final = (
    "a list of objects with numbers(), flush() and close(); tensorboard, wandb and trackio are names in report.sinks"
)


def _has(part: Any, *methods: str) -> bool:
    return all(callable(getattr(part, name, None)) for name in methods) and not isinstance(part, type)


@dataclass(frozen=True)
class Own:
    """What a script brings of its own; see `train`."""

    objective: Objective | None = None
    source: Callable[[BatchSource], BatchSource] | None = None
    schedule: Callable[[int, int], float] | None = None
    family: type[Family] | None = None
    sinks: Sequence[Sink] = ()
    on_event: Callable[[dict[str, Any]], None] | None = None
    room: FindRoom = room_of
    """What sizes are chosen by, where the recipe leaves them open: no part of the run either."""

    def __post_init__(self) -> None:
        """Raises UserError for what is no such part, before anything is made."""
        is_family = self.family is None or (isinstance(self.family, type) and issubclass(self.family, Family))
        sinks = (
            list(self.sinks) if isinstance(self.sinks, Sequence) and not isinstance(self.sinks, str) else [self.sinks]
        )
        found = (
            (
                "objective",
                self.objective,
                _has(self.objective, "weigh", "figures"),
                "an object with weigh() and figures()",
            ),
            ("source", self.source, callable(self.source), "a function of the stream of batches"),
            ("schedule", self.schedule, callable(self.schedule), "a function of the completed steps and all steps"),
            ("family", self.family, is_family, "a class that is derived from windlass.model.families.family.Family"),
            ("on_event", self.on_event, callable(self.on_event), "a function of a line of events.jsonl"),
            *(("sinks", one, _has(one, "numbers", "flush", "close"), SINKS) for one in sinks),
        )
        for name, part, is_one, wanted in found:
            if part is not None and not is_one:
                raise UserError(
                    f"train({name}={part!r:.80})",
                    f"{name} is {wanted}",
                    "give one (docs/howto/own-parts.md has an example), or leave it out for what the recipe says",
                )

    def names(self) -> dict[str, str]:
        """Of the parts that are not windlass's, by what they are; on_event sees the run, and is no part of it."""
        parts = {"objective": self.objective, "source": self.source, "schedule": self.schedule, "family": self.family}
        names = {kind: _name(part) for kind, part in parts.items() if part is not None}
        return names | ({"sinks": ", ".join(map(_name, self.sinks))} if self.sinks else {})

    def stream(self, source: BatchSource) -> BatchSource:
        if self.source is None:
            return source
        found = self.source(source)
        if not _has(found, "next", "state", "entry", "drain_events", "close"):
            raise UserError(
                f"the source {_name(self.source)} returns {found!r:.80}",
                "what is read instead of the stream of batches has its methods: next, state, entry, drain_events, close",
                "return the stream that it was called with, or an object around it (docs/howto/own-parts.md)",
            )
        return found

    def rate(self, step: int, total_steps: int) -> float:
        """The learning rate by `schedule`. Raises UserError for a number that cannot be one."""
        assert self.schedule is not None
        rate = float(self.schedule(step, total_steps))
        if not 0 <= rate < math.inf:
            raise UserError(
                f"the schedule {_name(self.schedule)} gives {rate} after {step} of {total_steps} steps",
                "a learning rate is a number from 0",
                "correct the function that train(schedule=...) is called with",
            )
        return rate


def _name(part: object) -> str:
    return getattr(part, "__name__", type(part).__name__)


def _log_all(log: Callable[[str], None], *sentences: str) -> None:
    for sentence in sentences:
        log(sentence)


def _silent(_sentence: str) -> None:
    """What the ranks other than 0 do with sentences for the user."""


def assemble(
    config: RunConfig, runtime: Runtime, is_prepared: bool = False, probe: Probe = UNWATCHED, own: Own = Own()
) -> Run:
    """Everything that training `config` needs, on this rank. `is_prepared`: the caller has just prepared the data. Collective.
    Raises UserError before the first step, and then lets go of what it had opened."""
    try:
        with explained(partial(no_room, config, runtime)), ExitStack() as opened:
            config.parallel.layout(runtime.world)  # refused before anything slow
            check_ranks(config, runtime)
            if config.precision.policy == "fp8":
                check_devices(runtime.accelerators())
            run = _assemble(config, runtime, is_prepared, probe, own, opened)
            run.sinks = own.sinks
            run.opened = opened.pop_all()
            return run
    except Exception as error:
        if runtime.rank == 0:
            note_failure(config.run.directory, exit_code_of(error))
        raise


def _assemble(config: RunConfig, runtime: Runtime, is_prepared: bool, probe: Probe, own: Own, opened: ExitStack) -> Run:
    config, prepared = Ready(config, None) if is_prepared else make_ready_once(config, runtime)
    prepared = prepared or open_prepared(config.data, config.evaluate.sets)
    on_hosts = check_hosts(prepared.stream, runtime)
    trainer_state = begun(config)
    config = complete_adapter(with_steps(keep_choices(config, trainer_state), prepared), trainer_state)
    config, choices = choose_policy(config, runtime.accelerators())
    choices += check_data(trainer_state, config, prepared, runtime)
    plan = plan_model(config, trainer_state, prepared, runtime)
    opened.enter_context(locked_directory(config.run.directory, runtime))
    opened.enter_context(redirected_output(config.run.directory, runtime.rank))
    config, plan, said = choose_sizes(config, trainer_state, plan, runtime, own.room)
    architecture, adapter, rules, recompute = plan
    console = open_console(config, runtime)
    base = base_of(config, runtime, trainer_state)
    fill = kept_weights(config, architecture) if trainer_state else starting_weights(config, architecture)
    program, optimizer = open_program(config, runtime, architecture, rules, recompute.kinds, fill, probe, adapter)
    mirror = open_mirror(config, runtime)
    checkpoints = open_checkpoints(config, runtime, console.say, mirror)
    log = console.say if runtime.rank == 0 else _silent
    start = restore(config, checkpoints, program, optimizer, prepared.stream, log)
    _log_all(log, *on_hosts, *choices, *said)
    files = base_files(config, is_new=trainer_state is None)
    reference = reference_scores(config, architecture, program, prepared, runtime, start, files, log)
    source = own.stream(open_source(config, architecture, program.mesh, runtime, prepared, start, log, reference))
    opened.callback(source.close)
    recorder = open_recorder(config, runtime, architecture, start.step, rules, console, program, optimizer, own)
    run = Run(
        config=config,
        architecture=architecture,
        runtime=runtime,
        prepared=prepared,
        program=checked(program, config.parallel),
        optimizer=optimizer,
        replicas=Replicas(compared_tensors(program, optimizer), program.mesh.dense.device_type),
        objective=own.objective or objective_of(config.objective),
        schedule=own.rate if own.schedule else partial(learning_rate, config=config.optim),
        source=source,
        evaluation_sets=evaluation_sets(config, program.mesh, runtime.device, prepared, reference),
        checkpoints=checkpoints,
        mirror=mirror,
        recorder=recorder,
        provenance=collect_provenance(sys.argv, runtime.hosts(), is_written=runtime.rank == 0),
        base=base,
        base_files=files if reference is None else {**files, SCORES: reference.to_bytes()},
        start_step=start.step,
        health=open_health(config, recorder, start.step, start.trainer_state.get("norms", ())),
    )
    announce(run, start.source, rules, recompute, start.drift, own.names())
    return run


def open_console(config: RunConfig, runtime: Runtime) -> Console:
    """The one console of a run: two on a terminal would print over each other's progress line."""
    assert config.run.steps is not None
    device = "GPU" if runtime.device.type == "cuda" else "process"
    return Console(sys.stdout, total_steps=config.run.steps, device=device)


def open_recorder(
    config: RunConfig,
    runtime: Runtime,
    architecture: Architecture,
    start_step: int,
    rules: Rules,
    console: Console,
    program: Program,
    optimizer: Optimizer,
    own: Own,
) -> Recorder:
    log = EventLog(config.run.directory / "events.jsonl", console.say, own.on_event) if runtime.rank == 0 else None
    device = find_device(runtime.device_name())
    assert config.run.steps is not None
    return Recorder(
        log,
        console if log else None,
        every_steps=config.report.every_steps,
        total_steps=config.run.steps,
        tokens_per_step=config.run.tokens_per_step,
        num_devices=runtime.world,
        flops_per_token=flops_per_token(
            architecture, config.data.sequence_length, frozen_names(rules), adapter_of(config.adapter, architecture)
        ).causal,
        peak_flops=device.peak_flops if device and config.precision.computed in ("bf16", "fp16") else None,
        gather_max=runtime.max_over_ranks,
        memory=runtime.memory_bytes,
        memory_parts=MemoryParts(runtime, partial(standing_bytes, program, optimizer, runtime.device)).of,
        start_step=start_step,
        unit=config.objective.unit,
        first_validations=first_validations(config.run.directory / "events.jsonl") if log and start_step else {},
    )
