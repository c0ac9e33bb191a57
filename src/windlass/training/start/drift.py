"""What differs between a checkpoint and the run that would continue it, or between the ranks of a run: named before step 1,
refused unless accepted.

A setting that changes what is trained, the files behind the data, and the tokenizer must be what they were. The number of
steps may grow: the run prints that, with what it does to the learning rate, because the schedule is a function of it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.restore import candidates
from windlass.config import RunConfig, check_recipe
from windlass.data.prepare.prepare import other_stream
from windlass.errors import BadCheckpoint, UserError, raise_all
from windlass.mistakes import check_is_recipe
from windlass.model.config import architecture_from_hf
from windlass.model.names import hugging_face_names
from windlass.optim.config import OptimConfig
from windlass.optim.rules import frozen_names
from windlass.optim.schedule import learning_rate
from windlass.runtime import Runtime
from windlass.safe_text import printable, without_secrets
from windlass.settings import judged
from windlass.training.start.open_saved import read_trainer_state
from windlass.training.start.parameter_rules import rules_of
from windlass.version import __version__


@dataclass(frozen=True)
class Drift:
    """A setting that differs between a checkpoint and the run that would continue it."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        changes = _changes(self.key, self.then, self.now)
        return printable("; ".join(f"{key}: {then} in the checkpoint, {now} now" for key, then, now in changes))


def _changes(key: str, then: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """What differs: of two lists of as many sections (sources, groups, stages) their settings one by one."""
    is_list = isinstance(then, list) and isinstance(now, list) and len(then) == len(now)
    if is_list and all(isinstance(one, Mapping) for one in (*then, *now)):
        for number, (old, new) in enumerate(zip(then, now)):
            before, after = dict(_flat(old)), dict(_flat(new))
            names = [name for name in before | after if before.get(name) != after.get(name)]
            yield from ((f"{key}[{number}].{name}", before.get(name), after.get(name)) for name in names)
    else:
        yield key, _given(then), _given(now)


def _given(value: Any) -> Any:
    """The keys that have a value, in a section or in each of a list of sections (sources, groups)."""
    if isinstance(value, list):
        return [_given(one) for one in value]
    return {key: one for key, one in sorted(value.items()) if one is not None} if isinstance(value, Mapping) else value


OF_A_HOST = ("data.cache.", "hub.cache", "launch.")
"""How keys begin that each host may have of its own: disks, and how its ranks are started."""
BASE_KEYS = ("model.from", "model.revision", "model.commit")
"""Where the frozen base of an adapter is: base_model compares the files there with those that the run began beside."""
FREE = (
    "launch",
    # steps, tokens and epochs are judged by themselves below: they move the schedule
    *(
        f"run.{key}"
        for key in ("directory", "steps", "tokens", "epochs", "micro_batch", "deterministic", "flash_attention")
    ),
    *(f"run.{key}" for key in ("start_from", "start_what", "accept_drift")),
    "adapter.from",
    "data.directory",
    "data.cache",
    "data.compression",
    "data.workers",
    "data.max_bad_shards",
    "data.timeout_s",
    "data.order.deadline_s",
    "parallel",
    "optim.max_skips",
    "checkpoint",
    "evaluate",
    "report",
    "hub",
)
"""What may change on resume without a word: layout, micro-batch and everything that only watches."""
TENSORS = ("adapter.kind", "adapter.rank", "adapter.targets", "adapter.also_train")
"""Settings that decide which tensors a checkpoint holds, and their shapes."""


def drift(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Drift]:
    """Settings that change what is trained and differ between two dumped configs."""
    old, new = dict(_flat(then)), dict(_flat(now))
    keys = [key for key in old | new if not any(key == free or key.startswith(free + ".") for free in FREE)]
    return [Drift(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def check_ranks(config: RunConfig, runtime: Runtime) -> None:
    """Raises UserError, on all ranks alike, where a rank has another recipe, torch or windlass than rank 0: each host reads
    copies of its own. Collective."""
    own = {"torch": metadata.version("torch"), "windlass": __version__, **dict(_flat(config.kept()))}
    own = {key: value for key, value in own.items() if not key.startswith(OF_A_HOST)}
    digests = runtime.gathered(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    hosts, facts = runtime.hosts(), runtime.gathered(own)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    theirs, first = facts[rank], facts[0]
    other = [key for key in first | theirs if first.get(key) != theirs.get(key)]
    raise UserError(
        f"rank {rank} on {hosts[rank]} has {other[0]} {theirs.get(other[0])}, rank 0 on {hosts[0]} has {first.get(other[0])}"
        + (f"; also different: {', '.join(other[1:])}" if other[1:] else ""),
        "all ranks of a run train by one recipe, with one torch and one windlass",
        "give all hosts the same recipe, overrides, variables and environment",
    )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def newest_trainer_state(path: Path) -> dict[str, Any] | None:
    """The trainer state of the newest readable checkpoint that `path` names; None where all are damaged (restoring says why)."""
    for directory in candidates(path):
        try:
            return read_trainer_state(directory)
        except BadCheckpoint:
            continue
    return None


def begun(config: RunConfig) -> dict[str, Any] | None:
    """The trainer state that training would go on from: the run's own newest, or that of `start_from` with all of its state."""
    check_is_recipe("prepare", config)  # the first that a preparation asks of it
    if committed_steps(config.run.directory / "checkpoints"):
        return newest_trainer_state(config.run.directory)
    if config.run.start_from is not None:
        # a wrong path is refused here, whatever is taken from it
        trainer_state = newest_trainer_state(Path(config.run.start_from))
        return trainer_state if config.run.start_what == "all" else None
    return None


def check_drift(trainer_state: dict[str, Any], config: RunConfig, stream: str | None) -> list[str]:
    """Sentences on settings, length and data that changed since the checkpoint, and may. Raises one UserError for all that may
    not. `stream`: that of the data as it is now (Prepared.stream); None where it is not known yet, and not judged."""
    found, now = drift(_then(trainer_state), config.kept()), config.run.known_steps
    lengths = [] if now is None else list(judged(_length_errors(trainer_state, config, now)))
    is_other = stream is not None and stream != trainer_state["data"]["stream"]
    is_refused = is_other and stream_to_keep(trainer_state, config) is not None
    streams = [other_stream(config.data.directory)] if is_refused else []
    raise_all([*_setting_errors(trainer_state, config, found), *lengths, *streams])
    return [
        *(f"{'moved base' if item.key in moves_of(trainer_state) else 'accepted drift'}: {item}" for item in found),
        *([] if now is None else _longer(trainer_state, config, now)),
        *(
            ["accepted drift: data: other documents or another tokenizer than the checkpoint's; the position goes on"]
            if is_other
            else []
        ),
    ]


def _then(trainer_state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the checkpoint. A key that windlass has gained since has its default there: new keys do not change the
    format of checkpoints, and a run goes on after an upgrade. A fresh signature is no drift."""
    try:
        return RunConfig.model_validate(trainer_state["config"], context="").kept()
    except (ValidationError, UserError):  # a setting of it is none any more
        return dict(without_secrets(trainer_state["config"]))


def moves_of(trainer_state: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that may change since what they name is compared by its bytes."""
    return BASE_KEYS if "base" in trainer_state else ()


def _setting_errors(trainer_state: dict[str, Any], config: RunConfig, found: list[Drift]) -> list[UserError]:
    accepted, moves = set(config.run.accept_drift), moves_of(trainer_state)
    model = [item for item in found if item.key.startswith("model.") and item.key not in moves]
    tensors = [item for item in found if item.key in TENSORS]
    if any(item.key == "adapter.kind" for item in tensors):  # the rest of the section comes and goes with it
        tensors = [item for item in found if item.key.startswith("adapter.")]
    state = [item for item in found if item.key.startswith(("optim.kind", "optim.groups", "precision."))]
    errors = list(judged(_state_errors(trainer_state, config))) if state and not tensors else []
    elsewhere = [*model, *tensors, *(state if errors else ())]
    refused = [item for item in found if item.key not in (*accepted, *moves) and item not in elsewhere]
    if tensors:
        errors = [_tensor_error(trainer_state, config, tensors)]
    if model:
        error = UserError(
            "; ".join(map(str, model)),
            "a run keeps its model: the checkpoint's weights have its shape and were trained with its formulas",
            "put the old value back, or begin another run.directory with run.start_from",
        )
        errors = [error, *errors]
    if refused:
        errors.append(
            UserError(
                "; ".join(map(str, refused)),
                "a resumed run trains with the settings of its checkpoint",
                f"put the old value{'s' if len(refused) > 1 else ''} back, use another run.directory, or accept with "
                f"'run.accept_drift=[{', '.join(item.key for item in refused)}]'",
            )
        )
    return errors


def _tensor_error(trainer_state: dict[str, Any], config: RunConfig, changed: list[Drift]) -> UserError:
    """Where the model would have other tensors than the checkpoint: that cannot be accepted."""
    merge = " --merge" if "base" in trainer_state else ""
    return UserError(
        "; ".join(map(str, changed)),
        "a run keeps its adapter: the checkpoint holds the tensors that this trains, and no others",
        f"put the old value{'s' if len(changed) > 1 else ''} back, or begin another run.directory; to begin with the weights of "
        f"this run: windlass export {config.run.directory} TARGET{merge}, then model.from=TARGET",
    )


def _state_errors(trainer_state: dict[str, Any], config: RunConfig) -> Iterator[UserError]:
    """Where the optimizer would keep other state than the checkpoint holds: that cannot be accepted."""
    architecture, then = architecture_from_hf(trainer_state["model"]), check_recipe(trainer_state["config"])
    was, is_now = (frozen_names(rules_of(recipe, architecture)) for recipe in (then, config))
    stored, is_stored = ((one.precision.stored, one.precision.kept) for one in (then, config))
    if then.optim.kind != config.optim.kind:
        given = f"optim.kind: {then.optim.kind} in the checkpoint, {config.optim.kind} now"
    elif stored != is_stored:
        given = "precision: weights in {} and moments in {} in the checkpoint, {} and {} now".format(
            *stored, *is_stored
        )
    elif was != is_now:
        given = (
            f"optim.groups: {len(is_now - was)} parameters are frozen that were trained, {len(was - is_now)} are trained "
            f"that were frozen; the first is {hugging_face_names(architecture)[min(was ^ is_now)][0]}"
        )
    else:
        return
    yield UserError(
        given,
        "a resumed run keeps its optimizer's state, and the checkpoint holds the state of the parameters that were trained then",
        f"put the old value back, or begin another run.directory with run.start_from={config.run.directory}, whose weights it "
        "takes; all optimizer state starts over there",
    )


def new_paths(trainer_state: dict[str, Any], config: RunConfig) -> list[str]:
    """Paths of the recipe's sources that the checkpoint does not name."""
    named = json.dumps(trainer_state["config"]["data"])
    return [path for source in config.data.named().values() for path in source.paths if json.dumps(path) not in named]


def stream_to_keep(trainer_state: dict[str, Any], config: RunConfig) -> str | None:
    """The training stream that must not be replaced; None where drift of the data is accepted."""
    return None if "data" in config.run.accept_drift else trainer_state["data"]["stream"]


def _length_errors(trainer_state: dict[str, Any], config: RunConfig, now: int) -> Iterator[UserError]:
    """`now`: the steps of the run that goes on."""
    before, step = trainer_state["total_steps"], trainer_state["step"]
    if now < step or (now < before and "run.steps" not in config.run.accept_drift):
        yield UserError(
            f"run.steps={now}, and the checkpoint has done {step} of {before}",
            "a run may become longer; it may become shorter only if that is accepted, and never shorter than the steps done",
            f"set run.steps to {before} or more, or to {step} or more with 'run.accept_drift=[run.steps]'",
        )


def _longer(trainer_state: dict[str, Any], config: RunConfig, now: int) -> list[str]:
    """A sentence on a run of another length, and its learning rate."""
    before, step = trainer_state["total_steps"], trainer_state["step"]
    if now == before:
        return []
    old_rate = learning_rate(step, before, OptimConfig.model_validate(trainer_state["config"]["optim"]))
    new_rate = learning_rate(step, now, config.optim)
    return [
        f"drift: run.steps {before} in the checkpoint, {now} now: the {config.optim.schedule} schedule is stretched; "
        f"the learning rate of step {step + 1} becomes {new_rate:.3g} (was to be {old_rate:.3g})"
    ]
