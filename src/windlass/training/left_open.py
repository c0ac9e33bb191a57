"""What a recipe leaves open: its length in steps, `optim.warmup_steps: auto` by that length, and `precision.policy: auto` by the
devices of the ranks, with a warning where a device has no units for the policy. A run that goes on keeps what was chosen."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared
from windlass.errors import UserError
from windlass.hardware import FP16_GAIN, Accelerator, fastest_policy
from windlass.precision.fp8 import check_devices
from windlass.units import counted

FEW_STEPS: Final = 10
"""Fewer teach little: two steps of 300 chats took the validation loss from 7.13 to 6.84, thirty at ten times the rate to 1.39
(a base of 1 M parameters, 2 CPU cores, 2026-11-28)."""


def keep_choices(config: RunConfig, trainer_state: Mapping[str, Any] | None) -> RunConfig:
    """Every `auto` as it was resolved when the checkpoint's run began. Any other value stays. Raises UserError."""
    if trainer_state is None:
        return config
    if config.optim.warmup_steps == "auto":
        warmup_steps = trainer_state["config"]["optim"]["warmup_steps"]
        config = config.changed(optim=config.optim.changed(warmup_steps=warmup_steps))
    return _with_policy(config, trainer_state["config"]["precision"]["policy"])


def with_steps(config: RunConfig, prepared: Prepared) -> RunConfig:
    """The config with its length as a number of steps, and its warm-up. A length in tokens or epochs is rounded up to whole
    steps."""
    run, steps = config.run, config.run.known_steps
    if steps is None:
        assert run.epochs is not None and prepared.is_whole  # training/preflight has waited for it
        sequences = math.ceil(run.epochs * prepared.sets["train"].samples) * config.data.sequences_per_sample
        steps = math.ceil(sequences * config.data.sequence_length / run.tokens_per_step)
    return config.with_steps(steps)


def describe_few_steps(asked: RunConfig, config: RunConfig) -> list[str]:
    """A sentence where a length that was asked for in epochs became few steps: `config` has them. Steps that were asked for are
    meant."""
    run, steps = asked.run, config.run.steps
    if run.epochs is None or steps is None or steps >= FEW_STEPS:
        return []
    return [
        f"run.epochs={run.epochs:g} is {counted(steps, 'step')} here, in which a model learns little: a smaller "
        f"run.tokens_per_step (now {run.tokens_per_step}) makes more steps of the same data"
    ]


def without_missing_fp8(config: RunConfig, devices: Sequence[Accelerator]) -> tuple[RunConfig, list[str]]:
    """For a model that is scored and not trained: bf16 in place of fp8 where the devices or torchao lack it, and a sentence."""
    if config.precision.policy != "fp8":
        return config, []
    try:
        check_devices(devices)
    except UserError as error:
        precision = config.precision.changed(policy="bf16", scaling=None)
        return config.changed(precision=precision), [
            f"{error.given}: scored in bf16, while the run's own validation used fp8"
        ]
    return config, []


def choose_policy(config: RunConfig, devices: Sequence[Accelerator]) -> tuple[RunConfig, list[str]]:
    """`config` without `auto`, and sentences for the user. `devices`: of all ranks. Raises UserError where other settings do not
    go with the policy that is chosen, and where a device, or its packages, lack the one that the recipe asks for."""
    chosen, sentences = config, []
    if config.precision.policy == "auto":
        policy, names = fastest_policy(devices), ", ".join(sorted({device.name for device in devices}))
        try:
            chosen = _with_policy(config, policy)
            chosen.check_layout(chosen.model.shape(chosen.data.tokenizer.train))  # some rules ask for the policy
        except UserError as error:
            given = f"precision.policy=auto, which is {policy} on {names}: {error.given}"
            raise UserError(given, error.rule, error.change) from None
        sentences.append(f"precision.policy=auto: {policy} on {names}")
    if chosen.precision.computed == "fp32" and (faster := fastest_policy(devices)) != "fp32":
        sentences.append(
            f"precision.policy={chosen.precision.policy} multiplies in fp32, without the matrix units of "
            f"{', '.join(sorted({device.name for device in devices}))}; a new run with precision.policy=auto takes {faster} there"
        )
    if chosen.precision.computed == "bf16" and (slow := [one for one in devices if one.lacks_bf16]):
        sentences.append(_warning(chosen.precision.policy, slow, fastest_policy(devices)))
    if chosen.precision.policy == "fp8":
        sentences += check_devices(devices)
    return chosen, sentences


def _warning(policy: str, slow: Sequence[Accelerator], better: str) -> str:
    """About devices without matrix units for bf16; `better`: the policy that all ranks' devices have."""
    names = sorted({f"{one.name} (compute capability {_dotted(one)})" for one in slow})
    cost = f"about {FP16_GAIN} times slower than fp16 (data sheets: T4 65 against 8.1, V100 125 against 15.7 TFLOP/s)"
    if better == "fp32":
        cost = "so that bf16 saves memory and no time"
    return (
        f"warning: precision.policy={policy} on {', '.join(names)}, which has no matrix units for bf16: products run on fp32 "
        f"cores at best, {cost}. A new run with precision.policy=auto takes {better} there"
    )


def _with_policy(config: RunConfig, policy: str) -> RunConfig:
    if config.precision.policy != "auto":
        return config
    return config.changed(precision=config.precision.changed(policy=policy))


def _dotted(device: Accelerator) -> str:
    return ".".join(map(str, device.capability or ()))
