"""A recipe resolved against its files and devices: what a job works with is made here, once, for all jobs.

What can be refused is refused before anything slow starts: the layout and the batch are checked against the world first, then
data is prepared (by rank 0, once), then the model is shaped, laid out and filled, and last a checkpoint is put into it.
"""

import fcntl
import json
import math
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from windlass.checkpoint.probe import probe_shared_storage
from windlass.checkpoint.provenance import collect_provenance
from windlass.checkpoint.state import Checkpoints
from windlass.config import RunConfig, to_yaml
from windlass.data.evaluation import EvaluationSet, evaluation_set
from windlass.data.loader import Loader
from windlass.data.prepare import Prepared, open_prepared, other_stream
from windlass.errors import UserError
from windlass.hardware import find_device
from windlass.jobs.drift import begun, check_length, check_settings, stream_to_keep
from windlass.jobs.objective import Pretrain
from windlass.jobs.ready import check_model, check_vocabulary, make_ready
from windlass.jobs.restore import restore
from windlass.jobs.run import Run
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.flops import count_parameters, flops_per_token
from windlass.model.hf import load_weights
from windlass.model.init import initialise
from windlass.optim.adamw import AdamW
from windlass.parallel.build import Fill, build_program
from windlass.parallel.census import check_optimizer
from windlass.parallel.mesh import Mesh, make_mesh
from windlass.parallel.precision import precision_of
from windlass.report.console import Console
from windlass.report.events import EventLog
from windlass.report.metrics import Recorder
from windlass.runtime import Runtime, redirect_output
from windlass.units import format_count


def assemble(config: RunConfig, runtime: Runtime, is_prepared: bool) -> Run:
    """Everything that training `config` needs, on this rank. Collective. Raises UserError before the first step."""
    layout = config.parallel.layout(runtime.world)
    accumulation = config.accumulation(layout.batch_ranks)
    if not is_prepared:
        runtime.first(lambda: make_ready(config, runtime.world, runtime.device.type))
    prepared = open_prepared(config.data, config.evaluate.sets)
    config = with_steps(config, prepared)
    capsule = begun(config)
    if capsule is not None:
        check_continuation(capsule, config, prepared)
    architecture = architecture_from_hf(capsule["model"]) if capsule is not None else shape_of(config, prepared)
    check_model(config, architecture)
    check_vocabulary(prepared.vocab_size, architecture)
    lease = open_directory(config.run.directory, runtime)
    restore_output = redirect_output(config.run.directory, runtime.rank)
    console = Console(sys.stdout, total_steps=config.run.steps or 0, device=_device_word(runtime))
    mesh = make_mesh(layout, runtime.device.type)
    fill = nothing if capsule is not None else starting_weights(config, architecture)
    precision = precision_of(config.precision)
    program = build_program(architecture, config.parallel, precision, mesh, runtime.device, fill)
    optimizer = AdamW(program.records(), config.optim)
    check_optimizer(optimizer.torch_optimizer, program.records())
    checkpoints = open_checkpoints(config, runtime, console)
    start = restore(config, checkpoints, program, optimizer, console.say if runtime.rank == 0 else _silent)
    loader = open_loader(config, mesh, runtime.device, prepared, accumulation, start.samples_consumed)
    log = EventLog(config.run.directory / "events.jsonl") if runtime.rank == 0 else None
    recorder = open_recorder(config, runtime, architecture, log, start.step)
    sets = evaluation_sets(config, mesh, runtime.device, prepared)
    run = Run(
        config=config,
        architecture=architecture,
        runtime=runtime,
        prepared=prepared,
        program=program,
        optimizer=optimizer,
        objective=Pretrain(),
        loader=loader,
        evaluation_sets=sets,
        checkpoints=checkpoints,
        recorder=recorder,
        provenance=collect_provenance(sys.argv, runtime.hosts()),
        lease=lease,
        restore_output=restore_output,
        start_step=start.step,
    )
    announce(run, accumulation, start.source)
    return run


def check_continuation(capsule: dict[str, Any], config: RunConfig, prepared: Prepared) -> None:
    """Drift is refused before any tensor is touched, so that a setting is named and not a shape. Raises UserError."""
    check_settings(capsule, config)
    check_length(capsule, config)
    if stream_to_keep(capsule, config) not in (None, prepared.stream):
        raise other_stream(prepared.directory)


def with_steps(config: RunConfig, prepared: Prepared) -> RunConfig:
    """The config with its length as a number of steps. A length in tokens or epochs is rounded up to whole steps."""
    run = config.run
    if run.steps is not None:
        return config
    tokens = run.tokens
    if tokens is None:
        assert run.epochs is not None
        tokens = math.ceil(run.epochs * prepared.sets["train"].samples) * config.data.sequence_length
    return config.with_steps(math.ceil(tokens / run.tokens_per_step))


def shape_of(config: RunConfig, prepared: Prepared) -> Architecture:
    architecture = config.model.architecture(prepared.vocab_size)
    if config.model.from_ is None:  # a new model learns the end of a text from this tokenizer, whatever its preset says
        architecture = replace(architecture, eos_token_id=prepared.eos_id)
    return architecture


def starting_weights(config: RunConfig, architecture: Architecture) -> Fill:
    """What a new run starts from: drawn from the seed, or read from `model.from`."""
    source = config.model.from_
    if source is None:
        return lambda named: initialise(named.items(), architecture, config.run.seed)
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
    config: RunConfig, runtime: Runtime, architecture: Architecture, log: EventLog | None, start_step: int
) -> Recorder:
    device = find_device(runtime.device_name())
    assert config.run.steps is not None
    return Recorder(
        log,
        Console(sys.stdout, total_steps=config.run.steps, device=_device_word(runtime)) if log else None,
        every_steps=config.report.every_steps,
        total_steps=config.run.steps,
        tokens_per_step=config.run.tokens_per_step,
        num_devices=runtime.world,
        flops_per_token=flops_per_token(architecture, config.data.sequence_length).causal,
        peak_flops=device.peak_flops if device and config.precision.policy == "bf16" else None,
        gather_max=runtime.max_over_ranks,
        memory=runtime.memory_bytes,
        start_step=start_step,
    )


def open_loader(
    config: RunConfig, mesh: Mesh, device: torch.device, prepared: Prepared, accumulation: int, consumed: int
) -> Loader:
    return Loader(
        prepared.set_directory("train"),
        sequence_length=config.data.sequence_length,
        micro_batch=config.run.micro_batch,
        accumulation=accumulation,
        batch_rank=mesh.batch_rank,
        batch_ranks=mesh.layout.batch_ranks,
        seed=config.run.seed,
        shuffle_window=config.data.shuffle_window,
        consumed=consumed,
        device=device,
    )


def evaluation_sets(
    config: RunConfig, mesh: Mesh, device: torch.device, prepared: Prepared
) -> dict[str, EvaluationSet]:
    """Every validation set, cut over the batch axes; `validation` comes first."""
    return {
        name: evaluation_set(
            prepared.set_directory(name),
            num_sequences=config.evaluate.sequences,
            micro_batch=config.run.micro_batch,
            batch_rank=mesh.batch_rank,
            batch_ranks=mesh.layout.batch_ranks,
            token_bytes_V=prepared.token_bytes(name),
            device=device,
        )
        for name in ("validation", *config.evaluate.sets)
    }


def open_directory(directory: Path, runtime: Runtime) -> BinaryIO | None:
    """The run directory, made, seen by all ranks, and locked by rank 0 until the file is closed. Collective, all ranks raise
    alike; nothing is written for a recipe that was refused before."""
    lease = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run.directory={directory} cannot be made: {error.strerror}",
            "a run needs a directory to write to",
            "choose another run.directory",
        ) from None
    if runtime.world > 1:
        probe_shared_storage(directory, runtime.rank, runtime.world, runtime.control)
    if runtime.rank == 0:
        lease = hold(directory)
    if not runtime.agree(lease is not None):
        raise UserError(
            f"run.directory={directory} is in use by another process",
            "one run writes to a run directory at a time",
            "wait for the other run, stop it, or choose another run.directory",
        )
    return lease


def hold(directory: Path) -> BinaryIO | None:
    """A lock that lasts until the file is closed (by the kernel, on any death of the process); None if another has it."""
    lease = (directory / ".lock").open("wb")
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lease.close()
        return None
    return lease


def announce(run: Run, accumulation: int, source: str) -> None:
    """What was derived, told before step 1, and written: recipe.yaml as given, resolved.yaml, and the first event."""
    if run.runtime.rank != 0:
        return
    config, layout, architecture = run.config, run.program.mesh.layout, run.architecture
    derived = {
        "parameters": f"{format_count(count_parameters(architecture))} ({count_parameters(architecture):,})",
        "ranks": f"{layout.world} on {run.runtime.device_name()}",
        "layout": f"replicate {layout.replicate} x shard {layout.shard}, zero {config.parallel.zero}",
        "global batch": f"{config.sequences_per_step} sequences = {config.run.micro_batch} per micro-batch "
        f"x {accumulation} micro-batches x {layout.batch_ranks} ranks",
        "length": f"{run.total_steps} steps, {format_count(run.total_steps * config.run.tokens_per_step)} tokens, "
        f"{run.total_steps * config.sequences_per_step / run.loader.num_samples:.2f} epochs",
        "vocabulary": f"{architecture.vocab_size}, padded to {architecture.padded_vocab_size}",
        "starts": source,
    }
    width = max(map(len, derived))
    for name, value in derived.items():
        print(f"  {name:<{width}}  {value}", flush=True)
    header = "".join(f"# {name}: {value}\n" for name, value in derived.items())
    (config.run.directory / "recipe.yaml").write_text(config.recipe)
    (config.run.directory / "resolved.yaml").write_text(header + to_yaml(config))
    run.recorder.event(
        "resume" if run.start_step else "start",
        run.start_step,
        derived=derived,
        provenance=_brief(run.provenance),
        baselines=run.baselines(),
    )


def _brief(record: dict[str, Any]) -> dict[str, Any]:
    """Provenance without diff and packages, for the event log; the checkpoints hold all of it."""
    git = {key: record["git"][key] for key in ("commit", "branch")} if record["git"] else None
    return {**{key: record[key] for key in ("argv", "hosts", "platform", "python")}, "git": git}


def _device_word(runtime: Runtime) -> str:
    return "GPU" if runtime.device.type == "cuda" else "process"


def _silent(_sentence: str) -> None:
    """What the ranks other than 0 do with sentences for the user."""
