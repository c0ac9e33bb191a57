"""A recipe resolved against its files and devices: what a job works with is made here, once, for all jobs.

What can be refused is refused before anything slow starts: the layout and the batch are checked against the world first, then
data is prepared (by rank 0, once), then the model is shaped, laid out and filled, and last a checkpoint is put into it.
"""

import json
import math
import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.provenance import collect_provenance
from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared, open_prepared, other_stream
from windlass.data.stream.batch_source import BatchSource
from windlass.data.stream.evaluation_set import EvaluationSet, evaluation_set
from windlass.data.stream.loader import BatchCut
from windlass.data.stream.open_stream import open_stream
from windlass.hardware import find_device
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.flops import flops_per_token
from windlass.model.hf import load_weights
from windlass.model.init import BLOCK, initialise
from windlass.objectives.pretrain import Pretrain
from windlass.optim.elementwise import Storage
from windlass.optim.optimizer import Optimizer, make_optimizer
from windlass.optim.rules import Rules, frozen_names
from windlass.parallel.build import UNWATCHED, Fill, Probe, build_program
from windlass.parallel.invariants import check_optimizer
from windlass.parallel.mesh import Mesh, make_mesh
from windlass.parallel.program import Program
from windlass.parallel.runtime_checks import checked
from windlass.precision.policy import Precision, precision_of
from windlass.report.console import Console
from windlass.report.events import EventLog
from windlass.report.metrics import Recorder
from windlass.runtime import Runtime, redirect_output
from windlass.training.announce import announce
from windlass.training.base_model_files import base_files
from windlass.training.drift import begun, check_length, stream_to_keep
from windlass.training.health import Health
from windlass.training.parameter_rules import rules_of
from windlass.training.preflight import check_before_training, check_vocabulary, make_ready_once, plan_of
from windlass.training.restore import Start, restore
from windlass.training.run import Run
from windlass.training.run_directory import open_directory


def _silent(_sentence: str) -> None:
    """What the ranks other than 0 do with sentences for the user."""


def assemble(config: RunConfig, runtime: Runtime, is_prepared: bool, probe: Probe = UNWATCHED) -> Run:
    """Everything that training `config` needs, on this rank. Collective. Raises UserError before the first step."""
    layout = config.parallel.layout(runtime.world)
    if not is_prepared:
        config = make_ready_once(config, runtime)
    prepared = open_prepared(config.data, config.evaluate.sets)
    trainer_state = begun(config := with_steps(config, prepared))
    notes = check_data(trainer_state, config, prepared, runtime)
    architecture = architecture_from_hf(trainer_state["model"]) if trainer_state else shape_of(config, prepared)
    rules = rules_of(config, architecture)
    recompute = plan_of(config, architecture, rules, runtime.device.type)
    check_vocabulary(prepared.vocab_size, architecture)
    run_lock = open_directory(config.run.directory, runtime)
    restore_output = redirect_output(config.run.directory, runtime.rank)
    console = Console(sys.stdout, total_steps=config.run.steps or 0, device=_device_word(runtime))
    mesh, precision = make_mesh(layout, runtime.device.type), precision_of(config.precision)
    fill = nothing if trainer_state else starting_weights(config, architecture)
    parts = (architecture, config.parallel, precision, mesh, runtime.device)
    program = build_program(*parts, fill, frozen_names(rules), recompute.kinds, probe)
    optimizer = optimizer_of(config, program, rules, precision)
    checkpoints = open_checkpoints(config, runtime, console)
    tell = console.say if runtime.rank == 0 else _silent
    start = restore(config, checkpoints, program, optimizer, tell)
    for sentence in notes:
        tell(sentence)
    source = open_source(config, architecture, mesh, runtime, prepared, start, tell)
    recorder = open_recorder(config, runtime, architecture, start.step, rules, console)
    hosts = runtime.hosts()
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
        provenance=collect_provenance(sys.argv, hosts) if runtime.rank == 0 else {},  # only rank 0's is written
        base=base_files(config, is_new=trainer_state is None),
        run_lock=run_lock,
        restore_output=restore_output,
        start_step=start.step,
        health=open_health(config, recorder, start.step),
    )
    announce(run, start.source, rules, recompute)
    return run


def check_data(
    trainer_state: dict[str, Any] | None, config: RunConfig, prepared: Prepared, runtime: Runtime
) -> list[str]:
    """What is to be said of the data: a new run's warnings, or what a run that goes on accepts. Raises UserError. Collective."""
    if trainer_state is None:
        return check_before_training(prepared, config, runtime)
    return check_continuation(trainer_state, config, prepared)


def check_continuation(trainer_state: dict[str, Any], config: RunConfig, prepared: Prepared) -> list[str]:
    """Drift is refused before any tensor is touched, so that a setting is named and not a shape (preflight has checked the other
    settings). -> sentences on data whose drift is accepted. Raises UserError."""
    check_length(trainer_state, config)
    if trainer_state["data"]["stream"] == prepared.stream:
        return []
    if stream_to_keep(trainer_state, config) is not None:
        raise other_stream(prepared.place)
    return ["accepted drift: data: other documents or another tokenizer than the checkpoint's; the position goes on"]


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


def shape_of(config: RunConfig, prepared: Prepared) -> Architecture:
    architecture = config.model.architecture(prepared.vocab_size)
    if config.model.from_ is None:  # a new model learns the end of a text from this tokenizer, whatever its preset says
        architecture = replace(architecture, eos_token_id=prepared.eos_id)
    return architecture


def starting_weights(config: RunConfig, architecture: Architecture, block: int = BLOCK) -> Fill:
    """What a new run starts from: drawn from the seed in blocks of `block` elements, or read from `model.from`."""
    if config.model.from_ is None:
        return lambda named: initialise(named.items(), architecture, config.run.seed, block)
    source = config.model.directory()
    return lambda named: load_weights(source, architecture, named)


def nothing(_named: dict[str, torch.Tensor]) -> None:
    """For weights that a checkpoint replaces whole."""


def open_checkpoints(config: RunConfig, runtime: Runtime, console: Console) -> Checkpoints:
    file = config.run.directory / "run.json"
    if runtime.rank == 0 and not file.exists():
        draft = file.with_suffix(".draft")
        draft.write_text(json.dumps({"run_id": secrets.token_hex(8)}))
        draft.replace(file)  # whole or not there, however the process ends
    if runtime.world > 1:
        torch.distributed.barrier(group=runtime.control)
    return Checkpoints(
        config.run.directory / "checkpoints",
        config.checkpoint,
        run_id=json.loads(file.read_text())["run_id"],
        rank=runtime.rank,
        world=runtime.world,
        group=runtime.saving if runtime.world > 1 else None,
        tell=console.say,
    )


def open_recorder(
    config: RunConfig, runtime: Runtime, architecture: Architecture, start_step: int, rules: Rules, console: Console
) -> Recorder:
    log = EventLog(config.run.directory / "events.jsonl") if runtime.rank == 0 else None
    device = find_device(runtime.device_name())
    assert config.run.steps is not None
    return Recorder(
        log,
        console if log else None,
        every_steps=config.report.every_steps,
        total_steps=config.run.steps,
        tokens_per_step=config.run.tokens_per_step,
        num_devices=runtime.world,
        flops_per_token=flops_per_token(architecture, config.data.sequence_length, frozen_names(rules)).causal,
        peak_flops=device.peak_flops if device and config.precision.computed in ("bf16", "fp16") else None,
        gather_max=runtime.max_over_ranks,
        memory=runtime.memory_bytes,
        start_step=start_step,
    )


def optimizer_of(config: RunConfig, program: Program, rules: Rules, precision: Precision) -> Optimizer:
    """Made after sharding, which replaces every parameter; that it holds the program's own is checked."""
    storage = storage_of(config, precision)
    optimizer = make_optimizer(program.records(), config.optim, rules, precision.compute, storage)
    check_optimizer(optimizer.param_groups, program.records())
    return optimizer


def storage_of(config: RunConfig, precision: Precision) -> Storage:
    """How the optimizer stores. Updates that round to nothing are counted where they can: bf16 weights, to the nearest."""
    rounded = config.precision.is_rounded
    can_lose = precision.stored == torch.bfloat16 and not precision.is_stochastic
    return Storage(
        states=precision.states if rounded else None,
        stochastic=precision.is_stochastic,
        seed=config.run.seed,
        compiled=config.parallel.compile,
        watch_every=config.report.every_steps if can_lose else 0,
    )


def open_health(config: RunConfig, recorder: Recorder, start_step: int) -> Health:
    advice = (
        "lower optim.learning_rate or raise optim.warmup_steps (run.accept_drift=[optim.learning_rate] goes on from the last "
        "checkpoint, which is of finite weights), or look at the data of the steps named"
    )
    is_scaled = config.precision.computed == "fp16"
    if is_scaled:
        advice += "; or use precision.policy=bf16, whose range is that of fp32"
    return Health(
        config.optim.max_skips,
        start_step,
        incident=lambda step, what: recorder.event("incident", step, what=what),
        advice=advice,
        skips_are_normal=is_scaled,
    )


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
        with_keys=bool(architecture.dropout),
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


def _device_word(runtime: Runtime) -> str:
    return "GPU" if runtime.device.type == "cuda" else "process"
