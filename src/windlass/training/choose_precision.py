"""`precision.policy: auto` resolved by the devices of the ranks, and a warning where a device has no units for the policy."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.config import RunConfig
from windlass.hardware import FP16_GAIN, Accelerator, fastest_policy


def keep_policy(config: RunConfig, trainer_state: Mapping[str, Any]) -> RunConfig:
    """`auto` as it was resolved when the checkpoint's run began. Any other policy stays. Raises UserError."""
    return _with_policy(config, trainer_state["config"]["precision"]["policy"])


def choose_policy(config: RunConfig, devices: Sequence[Accelerator]) -> tuple[RunConfig, list[str]]:
    """`config` without `auto`, and sentences for the user. `devices`: of all ranks. Raises UserError where other settings do not
    go with the policy that is chosen."""
    chosen, sentences = _with_policy(config, fastest_policy(devices)), []
    if chosen is not config:
        names = ", ".join(sorted({device.name for device in devices}))
        sentences.append(f"precision.policy=auto: {chosen.precision.policy} on {names}")
    slow = sorted({f"{one.name} (compute capability {_dotted(one)})" for one in devices if one.lacks_bf16})
    if slow and chosen.precision.computed == "bf16":
        sentences.append(
            f"warning: precision.policy={chosen.precision.policy} on {', '.join(slow)}, which has no matrix units for bf16: "
            f"products run on fp32 cores at best, about {FP16_GAIN} times slower than fp16 (data sheets: T4 65 against 8.1, V100 "
            "125 against 15.7 TFLOP/s). A new run with precision.policy=auto takes fp16 there"
        )
    return chosen, sentences


def _with_policy(config: RunConfig, policy: str) -> RunConfig:
    if config.precision.policy != "auto":
        return config
    chosen = config.changed(precision=config.precision.changed(policy=policy))
    chosen.check_layout(chosen.model.shape(chosen.data.tokenizer.train))
    return chosen


def _dotted(device: Accelerator) -> str:
    return ".".join(map(str, device.capability or ()))
