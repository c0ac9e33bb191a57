"""A model on disk: a run directory, one of its checkpoints (perhaps copied elsewhere), or a Hugging Face directory."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.index import read_index
from windlass.checkpoint.manifest import TRAINER_STATE, step_name
from windlass.checkpoint.restore import candidates
from windlass.checkpoint.sealed_json import bad, unseal
from windlass.checkpoint.store import committed_steps
from windlass.checkpoint.verify import Checkpoint
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.hf import check_weights, load_weights, stored_sizes
from windlass.model.open_config import StoredSizes, architecture_within, read_hf_config
from windlass.model.transformer import Decoder

REQUIRED: Final = {"step": int, "model": dict, "config": dict, "data": dict}


@dataclass(frozen=True)
class SavedModel:
    """A model in memory, on one device. `step` and `trainer_state` are of the checkpoint; a Hugging Face directory has none."""

    model: Decoder
    architecture: Architecture
    tokenizer_directory: Path
    directory: Path
    step: int | None
    trainer_state: dict[str, Any]


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """The trainer state of one checkpoint directory, verified, whose model is no larger than the weights beside it. Raises
    BadCheckpoint, and UserError for a model that is."""
    checkpoint = Checkpoint.open(directory)
    trainer_state: Any = unseal(checkpoint.read(TRAINER_STATE), TRAINER_STATE).get("trainer_state")
    check_trainer_state(trainer_state, directory)
    weights = [tensor.shape for name, tensor in read_index(checkpoint).items() if name.startswith("model.")]
    architecture_within(trainer_state["model"], StoredSizes(len(weights), sum(map(math.prod, weights))), directory)
    return dict(trainer_state)


def check_trainer_state(trainer_state: Any, where: Path) -> None:
    """Raises BadCheckpoint where a part is missing that every run writes."""
    if not isinstance(trainer_state, dict):
        raise bad(f"{TRAINER_STATE} of {where} holds a {type(trainer_state).__name__}", "a trainer state is one object")
    for key, kind in REQUIRED.items():
        if not isinstance(trainer_state.get(key), kind):
            raise bad(f"{TRAINER_STATE} of {where} has no {key}", f"a trainer state has {', '.join(REQUIRED)}")


def find_checkpoint(path: Path, step: int | None) -> Path:
    """The checkpoint directory that `path` and `step` name; step None: the newest. Raises UserError."""
    if step is None:
        return candidates(path)[0]
    steps = committed_steps(path / "checkpoints")
    if step not in steps:
        raise UserError(
            f"step {step} of {path}",
            "only committed checkpoints can be read",
            f"choose one of: {', '.join(map(str, sorted(steps))) or 'none there'}",
        )
    return path / "checkpoints" / step_name(step)


def open_reader(directory: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> Checkpoints:
    """For reading only: what the run that owns `directory` is writing meanwhile is not touched."""
    group = group if world > 1 else None
    return Checkpoints(directory.parent, CheckpointConfig(), run_id="reader", rank=rank, world=world, group=group)


def open_saved(path: Path, step: int | None = None, dtype: torch.dtype = torch.float32) -> SavedModel:
    """The model at `path` on the CPU, in `dtype`. Raises UserError where there is none, BadCheckpoint where it is damaged."""
    if (path / "config.json").is_file():
        architecture = architecture_within(read_hf_config(path), stored_sizes(path), path)
        check_weights(path, architecture)  # before memory is taken for them
        model = _empty(architecture, dtype)
        load_weights(path, architecture, dict(model.named_parameters()))
        return SavedModel(model, architecture, path, path, None, {})
    directory = find_checkpoint(path, step)
    trainer_state = read_trainer_state(directory)
    architecture = architecture_from_hf(trainer_state["model"])
    model = _empty(architecture, dtype)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    open_reader(directory, 0, 1, None).restore_from(directory, tensors, what="weights")
    return SavedModel(model, architecture, directory / "tokenizer", directory, trainer_state["step"], trainer_state)


def _empty(architecture: Architecture, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        model = Decoder(architecture).to(dtype)
    model.to_empty(device="cpu")
    model.tie()
    return model.eval()
