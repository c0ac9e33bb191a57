"""The console and the metrics of a run: what is printed, and what becomes events.jsonl."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from windlass.config import RunConfig
from windlass.hardware import find_device
from windlass.model.flops import flops_per_token
from windlass.optim.optimizer import Optimizer
from windlass.optim.rules import frozen_names
from windlass.parallel.program import Program
from windlass.report.console import Console
from windlass.report.events import EventLog, past_validations
from windlass.report.metrics import Recorder
from windlass.report.recorded_run import Gauges, ModelFlops, RecordedRun
from windlass.runtime import Runtime
from windlass.training.parts.device_memory import MemoryParts, standing_bytes
from windlass.training.start.model_plan import ModelPlan


def open_console(config: RunConfig, runtime: Runtime) -> Console:
    """The one console of a run: two on a terminal would print over each other's progress line."""
    assert config.run.steps is not None
    device = "GPU" if runtime.device.type == "cuda" else "process"
    return Console(sys.stdout, total_steps=config.run.steps, device=device)


def open_recorder(
    config: RunConfig,
    runtime: Runtime,
    plan: ModelPlan,
    start_step: int,
    console: Console,
    program: Program,
    optimizer: Optimizer,
    on_event: Callable[[dict[str, Any]], None] | None,
) -> Recorder:
    """Rank 0 alone writes and prints. `on_event` is called with each line of events.jsonl."""
    log = EventLog(config.run.directory / "events.jsonl", console.say, on_event) if runtime.rank == 0 else None
    device, flops_of = find_device(runtime.device_name()), (plan.architecture, config.data.sequence_length)
    peak = device.peak_flops if device and config.precision.computed in ("bf16", "fp16") else None
    memory_parts = MemoryParts(runtime, partial(standing_bytes, program, optimizer, runtime.device)).of
    assert config.run.steps is not None
    return Recorder(
        log,
        console if log else None,
        RecordedRun(
            total_steps=config.run.steps,
            tokens_per_step=config.run.tokens_per_step,
            num_devices=runtime.world,
            start_step=start_step,
            unit=config.objective.unit,
            begun_s=runtime.begun_s,
        ),
        ModelFlops(flops_per_token(*flops_of, frozen_names(plan.rules), plan.adapter).causal, peak),
        Gauges(runtime.max_over_ranks, runtime.memory_bytes, memory_parts),
        every_steps=config.report.every_steps,
        past_validations=past_validations(config.run.directory / "events.jsonl") if log and start_step else {},
    )
