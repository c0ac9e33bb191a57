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
from windlass.config import check_recipe
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.hf import check_weights, load_weights, stored_sizes
from windlass.model.lora.adapter import Adapter, adapter_of, frozen_base
from windlass.model.open_config import StoredSizes, architecture_within, read_hf_config
from windlass.model.transformer import Decoder
from windlass.parallel.build import store
from windlass.precision.policy import uniform
from windlass.training.base_model import find_base

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
    adapter: Adapter | None = None
    base: Path | None = None
    """With an adapter: where its frozen base was read from."""


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """The trainer state of one checkpoint directory, verified, whose model is no larger than the weights beside it. Raises
    BadCheckpoint, and UserError for a model that is."""
    checkpoint = Checkpoint.open(directory)
    trainer_state: Any = unseal(checkpoint.read(TRAINER_STATE), TRAINER_STATE).get("trainer_state")
    check_trainer_state(trainer_state, directory)
    if "base" not in trainer_state:  # else the files of the base are compared, when they are opened
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


def open_saved(
    path: Path, step: int | None = None, dtype: torch.dtype = torch.float32, base: Path | None = None
) -> SavedModel:
    """The model at `path` on the CPU, in `dtype`; of a run with an adapter beside its base, which is at `base` if it has moved.
    Raises UserError where there is none, BadCheckpoint where it is damaged."""
    if (path / "config.json").is_file():
        architecture = architecture_within(read_hf_config(path), stored_sizes(path), path)
        check_weights(path, architecture)  # before memory is taken for them
        model = empty(architecture, dtype)
        load_weights(path, architecture, dict(model.named_parameters()))
        return SavedModel(model, architecture, path, path, None, {})
    directory = find_checkpoint(path, step)
    trainer_state = read_trainer_state(directory)
    architecture = architecture_from_hf(trainer_state["model"])
    adapter, source = None, None
    if "base" in trainer_state:
        source = find_base(trainer_state, base)
        architecture_within(trainer_state["model"], stored_sizes(source), source)
        adapter = adapter_of(check_recipe(trainer_state["config"]).adapter, architecture)
    elif base is not None:
        raise UserError(
            f"--base {base} with {directory}",
            "this checkpoint holds the whole model: it has no base",
            "leave --base out",
        )
    model = empty(architecture, dtype, adapter)
    trained = dict(model.named_parameters())
    if source is not None:
        frozen = frozen_base(architecture, adapter)
        load_weights(source, architecture, {name: trained.pop(name) for name in frozen})
    tensors = {f"model.{name}": parameter.detach() for name, parameter in trained.items()}
    open_reader(directory, 0, 1, None).restore_from(directory, tensors, what="weights")
    tokenizer, at = directory / "tokenizer", trainer_state["step"]
    return SavedModel(model, architecture, tokenizer, directory, at, trainer_state, adapter, source)


def empty(architecture: Architecture, dtype: torch.dtype, adapter: Adapter | None = None) -> Decoder:
    """The model on the CPU, with memory and without values."""
    with torch.device("meta"):
        model = Decoder(architecture, adapter=adapter)
    store(model, uniform(dtype), frozen_base(architecture, adapter))
    model.to_empty(device="cpu")
    model.tie()
    return model.eval()
