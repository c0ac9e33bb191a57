"""Where a run continues: its own newest checkpoint, another run's (`run.start_from`), or step 0."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from windlass.adapters.peft_format import load_adapter
from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.commit import committed_steps
from windlass.config import RunConfig
from windlass.model.architecture import Architecture
from windlass.model.init import BLOCK, initialise
from windlass.model.lora.adapter import is_factor
from windlass.model.open_config import model_directory
from windlass.optim.groups import write_copies
from windlass.optim.optimizer import Optimizer
from windlass.parallel.build import Fill
from windlass.parallel.program import Program
from windlass.training.start.drift import check_drift
from windlass.training.start.open_saved import check_trainer_state, nothing, weights_of

STREAM_STATE: Final = ("samples_consumed", "shares", "lanes", "skipped", "read_from")


@dataclass(frozen=True)
class Start:
    """Where the loop begins. `source`: a sentence for the user."""

    step: int
    source: str
    trainer_state: Mapping[str, Any] = field(default_factory=dict)
    """The trainer state in the checkpoint; empty for a new run."""
    drift: tuple[str, ...] = ()
    """Sentences on settings that changed since the checkpoint, and were accepted."""

    def stream_state(self, config: RunConfig, stream: str) -> Mapping[str, Any]:
        """What `open_stream` goes on from. Shards that were left out of another stream are not left out of this one; and where
        `data` may drift, shards are not compared with those of the checkpoint."""
        state = {key: self.trainer_state[key] for key in STREAM_STATE if key in self.trainer_state}
        if state and self.trainer_state["data"]["stream"] != stream:
            state.pop("skipped", None)
        if "data" in config.run.accept_drift:
            state.pop("read_from", None)
        return state


def state_tensors(program: Program, optimizer: Optimizer, is_blank: bool = False) -> dict[str, torch.Tensor]:
    """Everything that is cut over ranks: weights under `model.`, optimizer state under `optimizer.`; and fp16's loss scale
    under `program.`. `is_blank`: all of it will be written, so states that are not there yet are made without zeros."""
    state = {f"optimizer.{name}": value for name, value in optimizer.state_tensors(is_blank).items()}
    scale = {f"program.{name}": value for name, value in program.state_tensors().items()}
    return weight_tensors(program) | state | scale


def compared_tensors(program: Program, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """What ranks that share it must hold alike: all of a checkpoint, and the frozen base of an adapter, which is in none."""
    base = {f"model.{record.name}": record.tensor.detach() for record in program.records() if not record.kept}
    return state_tensors(program, optimizer) | base


def weight_tensors(program: Program) -> dict[str, torch.Tensor]:
    return {
        f"model.{record.name}": record.tensor.detach() for record in program.records() if record.counted and record.kept
    }


def restore(
    config: RunConfig,
    checkpoints: Checkpoints,
    program: Program,
    optimizer: Optimizer,
    stream: str,
    log: Callable[[str], None],
) -> Start:
    """Fills weights and optimizer state in place, and has the host memory of their saves made. `stream`: Prepared.stream.
    Collective. Raises UserError for drift and for a wrong start_from."""
    start = _restore(config, checkpoints, program, optimizer, stream, log)
    write_copies(program.records())
    checkpoints.make_ready(state_tensors(program, optimizer))
    return start


def _restore(
    config: RunConfig,
    checkpoints: Checkpoints,
    program: Program,
    optimizer: Optimizer,
    stream: str,
    log: Callable[[str], None],
) -> Start:
    directory = config.run.directory
    is_begun = bool(committed_steps(directory / "checkpoints"))
    is_written = is_begun or (config.run.start_from is not None and config.run.start_what == "all")
    trainer_state = checkpoints.restore(state_tensors(program, optimizer, is_blank=is_written))
    assert trainer_state is not None or not is_begun, "blank states, and nothing restored"
    if trainer_state is not None:
        return _continue(trainer_state, config, f"from step {trainer_state['step']} of {directory}", stream, log)
    if config.run.start_from is None:
        return Start(0, f"at step 0: {directory} holds no committed checkpoint")
    source = Path(config.run.start_from)
    if config.run.start_what == "weights":
        trainer_state = checkpoints.restore_from(source, weight_tensors(program), what="weights")
        return Start(0, f"at step 0 with the weights of step {trainer_state['step']} of {source}")
    trainer_state = checkpoints.restore_from(source, state_tensors(program, optimizer), what="all")
    return _continue(trainer_state, config, f"from step {trainer_state['step']} of {source}", stream, log)


def _continue(
    trainer_state: dict[str, Any], config: RunConfig, source: str, stream: str, log: Callable[[str], None]
) -> Start:
    check_trainer_state(trainer_state, config.run.directory)
    drift = check_drift(trainer_state, config, stream)
    for sentence in drift:
        log(sentence)
    return Start(trainer_state["step"], source, trainer_state, tuple(drift))


def starting_weights(config: RunConfig, architecture: Architecture) -> Fill:
    """What a new run starts from: drawn from the seed, or read from `model.from`; an adapter's factors drawn, or read from
    `adapter.from`."""
    if config.model.from_ is None:
        return drawn_weights(architecture, config.run.seed)
    read, adapter = weights_of(model_directory(config.model), architecture), config.adapter.from_

    def fill(named: dict[str, torch.Tensor]) -> None:
        read(named)
        if adapter is not None:
            load_adapter(Path(adapter), architecture, named)
            return
        factors = {name: tensor for name, tensor in named.items() if is_factor(name)}
        initialise(factors.items(), architecture, config.run.seed)

    return fill


def drawn_weights(architecture: Architecture, seed: int, block: int = BLOCK) -> Fill:
    """Every weight drawn from the seed, in blocks of `block` elements."""
    return lambda named: initialise(named.items(), architecture, seed, block)


def kept_weights(config: RunConfig, architecture: Architecture) -> Fill:
    """What a checkpoint does not hold of the run that goes on from it: nothing, but for an adapter's base."""
    return nothing if config.adapter.kind == "none" else weights_of(model_directory(config.model), architecture)
