"""A model on disk: a run directory, one of its checkpoints (perhaps copied elsewhere), a Hugging Face directory, or an adapter's
directory as PEFT writes it, beside its base.

`find_saved` says which of them a path is, and reads no weights; `open_saved` makes the model of it on the CPU. Who lays it out
over ranks takes the first and fills what it has made.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from windlass.adapters.config import AdapterConfig
from windlass.adapters.peft_config import CONFIG as ADAPTER_CONFIG
from windlass.adapters.peft_config import completed, read_config
from windlass.adapters.peft_format import load_adapter
from windlass.checkpoint.checkpoints import Checkpoints
from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.config import CheckpointConfig
from windlass.checkpoint.index import read_tensor_index
from windlass.checkpoint.manifest import MANIFEST, TRAINER_STATE, step_name, step_of
from windlass.checkpoint.restore import candidates
from windlass.checkpoint.sealed_json import bad, unseal
from windlass.checkpoint.verify import Checkpoint
from windlass.config import check_recipe
from windlass.errors import UserError, nearest_entry
from windlass.hub import client as hub
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.hf import check_weights, load_weights, stored_sizes
from windlass.model.lora.adapter import Adapter, adapter_of, frozen_base, is_factor
from windlass.model.open_config import StoredSizes, architecture_within, read_hf_config
from windlass.model.transformer import Decoder
from windlass.parallel.build import Fill, store
from windlass.precision.policy import uniform
from windlass.report.events import read_events
from windlass.safe_text import say
from windlass.training.start.base_model import find_base, other_base

REQUIRED: Final = {"step": int, "model": dict, "config": dict, "data": dict}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What is at a path. `step` and `trainer_state` are of the checkpoint; Hugging Face's directories and PEFT's have none."""

    directory: Path
    architecture: Architecture
    tokenizer_directory: Path
    step: int | None = None
    trainer_state: dict[str, Any] = field(default_factory=dict)
    adapter: Adapter | None = None
    base: Path | None = None
    """With an adapter: where its frozen base is read from."""

    @property
    def has_learned_answers(self) -> bool:
        """Whether its run learned conversations or pairs, which its tokenizer's chat template writes."""
        sources = self.trainer_state.get("config", {}).get("data", {}).get("sources", ())
        return any(source.get("format") in ("chat", "preference") for source in sources)


@dataclass(frozen=True, kw_only=True)
class SavedModel(Saved):
    """A model in memory, on one device."""

    model: Decoder


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """The trainer state of one checkpoint directory, verified, whose model is no larger than the weights beside it. Raises
    BadCheckpoint, and UserError for a model that is."""
    checkpoint = Checkpoint.open(directory)
    trainer_state: Any = unseal(checkpoint.read(TRAINER_STATE), TRAINER_STATE).get("trainer_state")
    check_trainer_state(trainer_state, directory)
    if "base" not in trainer_state:  # else the files of the base are compared, when they are opened
        weights = [tensor.shape for name, tensor in read_tensor_index(checkpoint).items() if name.startswith("model.")]
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
        raise _no_step(path, step, steps)
    return path / "checkpoints" / step_name(step)


def step_in(path: Path, step: int | None) -> int | None:
    """The step of the checkpoint that `find_saved` reads; None for the directories of Hugging Face and PEFT."""
    if step is not None or any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return step
    return step_of(find_checkpoint(path, None).name)


def _no_step(path: Path, step: int, steps: Sequence[int]) -> UserError:
    """Whether there was a checkpoint of `step`, and which settings say that it goes; `steps`: those that are there."""
    given, rule = f"step {step} of {path}", "only committed checkpoints can be read"
    change = f"choose one of: {', '.join(map(str, sorted(steps))) or 'none there'}"
    log = path / "events.jsonl"
    lines = read_events(log) if steps and log.is_file() else []
    if any((line["kind"], line["step"]) == ("checkpoint", step) for line in lines):
        keep = check_recipe(read_trainer_state(candidates(path)[0])["config"]).checkpoint
        given += " was saved, and deleted when newer ones were there"
        rule = (
            f"a run keeps its newest checkpoints (checkpoint.keep_last={keep.keep_last}), those of the lowest validation loss "
            f"(checkpoint.keep_best={keep.keep_best}) and the steps of checkpoint.keep_steps"
        )
        change += f"; in the next run checkpoint.keep_steps=[{step}] keeps it"
    return UserError(given, rule, change)


def open_reader(directory: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> Checkpoints:
    """For reading only: what the run that owns `directory` is writing meanwhile is not touched."""
    group = group if world > 1 else None
    return Checkpoints(directory.parent, CheckpointConfig(), run_id="reader", rank=rank, world=world, group=group)


def find_saved(path: Path, step: int | None = None, base: Path | None = None) -> Saved:
    """What `path` is; `base`: where the base of an adapter is, if it has moved. Fetches what an adapter's directory names of the
    hub. Raises UserError where there is no model, BadCheckpoint where it is damaged."""
    is_model, is_adapter = (path / "config.json").is_file(), (path / ADAPTER_CONFIG).is_file()
    if (is_model or is_adapter) and step is not None:
        raise UserError(f"step {step} of {path}", "only a run has steps", "leave --step out, or give the run directory")
    if is_adapter:
        return _find_adapter(path, base)
    if is_model:
        _refuse_base(base, path)
        architecture = architecture_within(read_hf_config(path), stored_sizes(path), path)
        check_weights(path, architecture)  # before memory is taken for them
        return Saved(directory=path, architecture=architecture, tokenizer_directory=path)
    if not any(one.exists() for one in (path / MANIFEST, path / "checkpoints")) and not committed_steps(path):
        what = "does not exist" if not path.exists() else "is empty" if _is_empty(path) else "holds no model"
        raise UserError(
            f"{path} {what}",
            "a model is a run directory, one of its checkpoints, a Hugging Face directory (config.json) or an adapter's "
            f"directory ({ADAPTER_CONFIG})",
            f"{nearest_entry(path)}correct the path",
        )
    directory = find_checkpoint(path, step)
    trainer_state = read_trainer_state(directory)
    architecture = architecture_from_hf(trainer_state["model"])
    adapter, source = None, None
    if "base" in trainer_state:
        source = find_base(trainer_state, base)
        architecture_within(trainer_state["model"], stored_sizes(source), source)
        adapter = adapter_of(check_recipe(trainer_state["config"]).adapter, architecture)
    else:
        _refuse_base(base, directory)
    return Saved(
        directory=directory,
        architecture=architecture,
        tokenizer_directory=directory / "tokenizer",
        step=trainer_state["step"],
        trainer_state=trainer_state,
        adapter=adapter,
        base=source,
    )


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _refuse_base(base: Path | None, path: Path) -> None:
    if base is not None:
        raise UserError(f"--base {base} with {path}", "the whole model is there: it has no base", "leave --base out")


def _find_adapter(path: Path, moved: Path | None) -> Saved:
    """An adapter as PEFT writes it; `moved`: where the user says that its base is. Raises UserError."""
    try:
        given = read_config(path)
        config = completed(AdapterConfig.model_validate({"kind": "lora", "from": str(path)}))
    except UserError as error:  # which speaks to a recipe
        change = "give another adapter, or the whole model: windlass export RUN TARGET --merge"
        raise UserError(error.given.removeprefix("adapter.from="), error.rule, change) from None
    source = moved if moved is not None else _base_of(path, given)
    if not (source / "config.json").is_file():
        raise UserError(
            f"the base of {path} is not at {source}: there is no config.json",
            "an adapter holds only factors; its base is read from the path that adapter_config.json names",
            "say where it is now: --base DIR",
        )
    architecture = architecture_within(read_hf_config(source), stored_sizes(source), source)
    check_weights(source, architecture)
    if warning := other_base(path, source):
        say(warning, sys.stderr)
    tokenizer = path if (path / hub.TOKENIZER[0]).is_file() else source
    return Saved(
        directory=path,
        architecture=architecture,
        tokenizer_directory=tokenizer,
        adapter=adapter_of(config, architecture),
        base=source,
    )


def _base_of(path: Path, given: Mapping[str, Any]) -> Path:
    """The directory that an adapter_config.json names, or its repository of the hub, fetched as training fetches it."""
    name, revision = given.get("base_model_name_or_path"), given.get("revision")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{path / ADAPTER_CONFIG} has base_model_name_or_path: {name!r}",
            "an adapter holds only factors and names its base",
            "say where that is: --base DIR",
        )
    if not hub.is_hub_name(name):
        return Path(name).expanduser()
    commit = hub.resolve_commit(name, revision)
    hub.fetch_config(name, commit)
    hub.fetch_weights(name, commit)
    if not (path / hub.TOKENIZER[0]).is_file():
        hub.fetch_tokenizer(name, commit)
    return hub.locate(name, commit, "base_model_name_or_path")


def open_saved(
    path: Path, step: int | None = None, dtype: torch.dtype = torch.float32, base: Path | None = None
) -> SavedModel:
    """The model at `path` on the CPU, in `dtype`, an adapter beside its base (see find_saved)."""
    saved = find_saved(path, step, base)
    model = empty(saved.architecture, dtype, saved.adapter)
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
    stored_weights(saved)(parameters)
    if saved.step is not None:
        frozen = frozen_base(saved.architecture, saved.adapter)
        tensors = {f"model.{name}": value.detach() for name, value in parameters.items() if name not in frozen}
        open_reader(saved.directory, 0, 1, None).restore_from(saved.directory, tensors, what="weights")
    return SavedModel(model=model, **vars(saved))


def stored_weights(saved: Saved) -> Fill:
    """What is not in a checkpoint of ours: a Hugging Face directory's weights, an adapter's base, and PEFT's factors."""
    source = saved.base if saved.base is not None else saved.directory
    if saved.step is not None:
        return nothing if saved.base is None else weights_of(source, saved.architecture)

    def fill(named: dict[str, torch.Tensor]) -> None:
        weights_of(source, saved.architecture)(named)
        if saved.adapter is not None:
            load_adapter(saved.directory, saved.architecture, named)

    return fill


def weights_of(source: Path, architecture: Architecture) -> Fill:
    """Reads the model's own parameters from a Hugging Face directory, and leaves an adapter's factors alone."""
    return lambda named: load_weights(
        source, architecture, {name: tensor for name, tensor in named.items() if not is_factor(name)}
    )


def nothing(_named: dict[str, torch.Tensor]) -> None:
    """For weights that a checkpoint replaces whole."""


def empty(architecture: Architecture, dtype: torch.dtype, adapter: Adapter | None = None) -> Decoder:
    """The model on the CPU, with memory and without values."""
    with torch.device("meta"):
        model = Decoder(architecture, adapter=adapter)
    store(model, uniform(dtype), frozen_base(architecture, adapter))
    model.to_empty(device="cpu")
    model.tie()
    return model.eval()
