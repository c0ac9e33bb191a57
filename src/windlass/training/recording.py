"""What a run prints and records: one console for the terminal, events.jsonl and the figures in it, and the alarms."""

import sys

from windlass.config import RunConfig
from windlass.hardware import find_device
from windlass.model.architecture import Architecture
from windlass.model.flops import flops_per_token
from windlass.model.lora.adapter import adapter_of
from windlass.optim.rules import Rules, frozen_names
from windlass.report.console import Console
from windlass.report.events import EventLog, first_validations
from windlass.report.metrics import Recorder
from windlass.runtime import Runtime
from windlass.training.health import Health


def open_console(config: RunConfig, runtime: Runtime) -> Console:
    """The one console of a run: two on a terminal would print over each other's progress line."""
    assert config.run.steps is not None
    device = "GPU" if runtime.device.type == "cuda" else "process"
    return Console(sys.stdout, total_steps=config.run.steps, device=device)


def open_recorder(
    config: RunConfig, runtime: Runtime, architecture: Architecture, start_step: int, rules: Rules, console: Console
) -> Recorder:
    log = EventLog(config.run.directory / "events.jsonl", console.say) if runtime.rank == 0 else None
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
        start_step=start_step,
        unit=config.objective.unit,
        first_validations=first_validations(config.run.directory / "events.jsonl") if log and start_step else {},
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
