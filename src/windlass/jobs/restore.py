"""Where a run continues: its own newest checkpoint, another run's (`run.start_from`), or step 0. Drift is named before step 1.

A setting that changes what is trained and differs from the checkpoint's is refused, unless `run.accept_drift` names it. The
number of steps may grow: that is told, with what it does to the learning rate, because the schedule is a function of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint.restore import candidates
from windlass.checkpoint.state import Checkpoints
from windlass.checkpoint.store import committed_steps
from windlass.config import RunConfig, drift
from windlass.errors import BadCheckpoint, UserError
from windlass.jobs.saved import read_capsule
from windlass.optim.adamw import AdamW
from windlass.optim.schedule import learning_rate
from windlass.parallel.program import Program

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Start:
    """Where the loop begins. `source`: a sentence for the user."""

    step: int
    samples_consumed: int
    source: str


def state_tensors(program: Program, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Everything that is cut over ranks: weights under `model.`, optimizer state under `optimizer.`."""
    state = {f"optimizer.{name}": value for name, value in optimizer.state_tensors().items()}
    return weight_tensors(program) | state


def weight_tensors(program: Program) -> dict[str, torch.Tensor]:
    return {f"model.{record.name}": record.tensor.detach() for record in program.records() if record.counted}


def restore(config: RunConfig, checkpoints: Checkpoints, program: Program, optimizer: AdamW, tell: Tell) -> Start:
    """Fills weights and optimizer state in place. Collective. Raises UserError for drift and for a wrong start_from."""
    directory = config.run.directory
    if committed_steps(directory / "checkpoints"):
        _check_newest(directory, config)
    capsule = checkpoints.restore(state_tensors(program, optimizer))
    if capsule is not None:
        return _continue(capsule, config, f"from step {capsule['step']} of {directory}", tell)
    if config.run.start_from is None:
        return Start(0, 0, f"at step 0: {directory} holds no committed checkpoint")
    source = Path(config.run.start_from)
    if config.run.start_what == "weights":
        capsule = checkpoints.restore_from(source, weight_tensors(program), what="weights")
        return Start(0, 0, f"at step 0 with the weights of step {capsule['step']} of {source}")
    _check_newest(source, config)
    capsule = checkpoints.restore_from(source, state_tensors(program, optimizer), what="all")
    return _continue(capsule, config, f"from step {capsule['step']} of {source}", tell)


def _check_newest(path: Path, config: RunConfig) -> None:
    """Drift against the newest readable capsule, before any tensor is touched: so that a setting is named, and not a shape."""
    for directory in candidates(path):
        try:
            capsule = read_capsule(directory)
        except BadCheckpoint:
            continue  # restoring says why, puts it aside and takes the next older
        _check_drift(capsule, config)
        return


def _continue(capsule: dict[str, Any], config: RunConfig, source: str, tell: Tell) -> Start:
    for sentence in _check_drift(capsule, config):
        tell(sentence)
    generator = bytearray.fromhex(capsule["generator"])
    torch.set_rng_state(torch.frombuffer(generator, dtype=torch.uint8))
    return Start(capsule["step"], capsule["samples_consumed"], source)


def _check_drift(capsule: dict[str, Any], config: RunConfig) -> list[str]:
    """Sentences on drift that is allowed. Raises UserError on drift that is not."""
    accepted = set(config.run.accept_drift)
    found = drift(capsule["config"], config.model_dump(mode="json", by_alias=True))
    refused = [item for item in found if item.key not in accepted]
    if refused:
        raise UserError(
            "; ".join(map(str, refused)),
            "a resumed run trains with the settings of its checkpoint",
            f"put the old value{'s' if len(refused) > 1 else ''} back, use another run.directory, or accept with "
            f"run.accept_drift=[{', '.join(item.key for item in refused)}]",
        )
    sentences = [f"accepted drift: {item}" for item in found]
    before, now, step = capsule["total_steps"], config.run.steps, capsule["step"]
    assert now is not None
    if now < step or (now < before and "run.steps" not in accepted):
        raise UserError(
            f"run.steps={now}, and the checkpoint has done {step} of {before}",
            "a run may become longer; it becomes shorter only where that is accepted, and never shorter than what is done",
            f"set run.steps to {before} or more, or to {step} or more with run.accept_drift=[run.steps]",
        )
    if now != before:
        old_rate = learning_rate(step, before, config.optim)
        new_rate = learning_rate(step, now, config.optim)
        sentences.append(
            f"drift: run.steps {before} in the checkpoint, {now} now: the {config.optim.schedule} schedule is stretched; "
            f"the learning rate of step {step + 1} becomes {new_rate:.3g} (was to be {old_rate:.3g})"
        )
    return sentences
