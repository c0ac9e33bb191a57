"""Everything that can be refused before something slow or lasting happens; then downloads, and the data, prepared once.

A refused recipe must cost nothing: not another run's prepared shards, not a directory that was not there. Later comes what
needs the prepared data (its faults; a length in epochs that a changed corpus made shorter than the run already is), and what is
tried on all ranks: a run directory that they share, and sizes that fit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from windlass.config import RunConfig
from windlass.data.lint.findings import Finding
from windlass.data.lint.lint import BEFORE_TRAINING, lint
from windlass.data.prepare.background import start
from windlass.data.prepare.prepare import Prepared, open_prepared, other_stream, planned, prepare
from windlass.data.tokenize.tokenizer import num_entries
from windlass.errors import AbsentSource, BadShard, UserError
from windlass.hardware import Accelerator
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.hf import check_weights, stored_sizes
from windlass.model.open_config import architecture_of, architecture_within, fewer_rows, model_directory, read_hf_config
from windlass.parallel.activations import check_budget
from windlass.parallel.build import check_device, check_tensor_hosts
from windlass.report.sinks.follow import check_packages
from windlass.runtime import Runtime
from windlass.safe_text import say
from windlass.training.interruptible import interruptible
from windlass.training.left_open import choose_policy, keep_choices
from windlass.training.parts.open_checkpoints import check_saved_is_there, fetch_run
from windlass.training.run_directory import try_run_directory
from windlass.training.start.base_model import check_adapter, complete_adapter, reads_weights
from windlass.training.start.drift import begun, check_drift, new_paths, stream_to_keep
from windlass.training.start.model_plan import workload
from windlass.training.start.parameter_rules import rules_of
from windlass.training.start.pins import fetch_base_weights, keep_pins, pin_lines, pin_model, pin_tokenizer

SHOWN: Final = 3  # errors that a refusal names; `windlass data lint` prints all
RUNS_OF_REMOTE: Final = 2  # shards of a store that are fetched before step 0, at most twice as many


class Ready(NamedTuple):
    """A run that may begin. `config`: with the commits of hub names. `prepared`: its data, opened; None where it grows."""

    config: RunConfig
    prepared: Prepared | None


def make_ready(config: RunConfig, world: int, device_type: str, devices: Sequence[Accelerator] = ()) -> Ready:
    """Prepares the data of a run that may begin on `world` ranks, and fetches what it names of the hub. With a first epoch in
    written order, preparation goes on in the background until this process ends. `devices`: of all ranks, where they are known.
    Raises UserError, and Interrupted where a signal comes. Rank 0 calls it, alone."""
    with interruptible(config.run.directory):
        return _make_ready(config, world, device_type, devices)


def _make_ready(config: RunConfig, world: int, device_type: str, devices: Sequence[Accelerator]) -> Ready:
    check_device(config.parallel, device_type)
    config, architecture, trainer_state = check_run(config, world, device_type, fetches=True)
    if devices:
        choose_policy(config, devices)  # what it refuses; resolve chooses once more, and prints it
    try_run_directory(config.run.directory.absolute())
    if reads_weights(trainer_state):
        fetch_base_weights(config)
    if trainer_state is None:
        if config.model.from_ is not None:
            check_weights(model_directory(config.model), architecture)
            check_new_rows(config, architecture)
        if config.adapter.from_ is not None:
            check_adapter(config, architecture)
    keep = None if trainer_state is None else stream_to_keep(trainer_state, config)
    if config.prepares_beside:
        start(config.data, config.evaluate.sets, begun=keep)
        return Ready(config, None)
    if config.data.may_grow:
        print(
            "run.epochs: the length of an epoch is known when all is prepared; with run.tokens training begins before"
        )
    return Ready(config, _prepare_or_take(config, keep))


def check_run(
    config: RunConfig, world: int, device_type: str, fetches: bool = False
) -> tuple[RunConfig, Architecture, dict[str, Any] | None]:
    """Refuses what can be refused of a run on `world` ranks before weights are fetched and data is prepared; nothing is written
    but the hub's cache, and with `fetches` what a store holds of this run -> the recipe with the commits of hub names, its model,
    and the trainer state that it would go on from. Raises UserError."""
    if config.objective.kind != "dpo":
        config.data.check_pairs_are_not_trained(config.evaluate.sets)
    check_run_directory(config)
    check_packages(config.report.sinks)
    if fetches:
        fetch_run(config)
    check_saved_is_there(config.run.directory)  # else a new run would replace the data of the one that is lost
    trainer_state = begun(config)
    config = complete_adapter(config, trainer_state)
    if trainer_state is not None:
        config = keep_choices(keep_pins(config, trainer_state), trainer_state)
        _refuse_drift(trainer_state, config)
        if reads_weights(trainer_state):  # a base that has moved to a hub name has no pin yet
            config = pin_model(config)
        architecture = architecture_from_hf(trainer_state["model"])
    else:
        config = pin_tokenizer(pin_model(config))
        if config.model.from_ is not None and config.model.commit is None:  # a directory, with its weights
            source = model_directory(config.model)
            architecture_within(read_hf_config(source), stored_sizes(source), source)
        architecture = architecture_of(config.model, num_entries(config.data.tokenizer) or 1)
    config.check_layout(architecture, world, here=True)
    rules = rules_of(config, architecture)
    if trainer_state is None:
        check_budget(workload(config, architecture, rules, world, device_type))
    return pin_tokenizer(config), architecture, trainer_state


def _refuse_drift(trainer_state: dict[str, Any], config: RunConfig) -> None:
    """Raises one UserError for all drift. The data is looked at only where something else has drifted: `prepare` looks at it
    anyway, and refuses what is not the checkpoint's. A changed path that matches no file is the error then."""
    try:
        check_drift(trainer_state, config, None)
    except UserError:
        stream = None
        try:
            stream = planned(pin_tokenizer(config).data, config.evaluate.sets).stream
        except AbsentSource as absent:  # one that the checkpoint names may be gone on purpose; another is mistyped
            if any(f"`path: {path}`" in absent.given for path in new_paths(trainer_state, config)):
                raise absent from None
        except UserError:  # what cannot be planned says nothing of drift
            pass
        check_drift(trainer_state, config, stream)


def _prepare_or_take(config: RunConfig, keep: str | None) -> Prepared:
    """Where a source is not here, as on a cluster to which shards were copied, what was prepared of it by the same recipe is
    taken as it is: there is nothing to compare it with. Raises UserError."""
    try:
        return prepare(config.data, config.evaluate.sets, begun=keep)
    except AbsentSource as error:
        try:
            prepared = open_prepared(config.data, config.evaluate.sets)
        except BadShard:
            raise
        except UserError:
            raise error from None
        if keep is not None and prepared.stream != keep:
            raise other_stream(prepared.where) from None
        say(
            f"{prepared.where} is used as it was prepared: {error.given}, so windlass cannot check whether that has changed"
        )
        return prepared


def make_ready_once(config: RunConfig, runtime: Runtime, is_prepared: bool = False) -> tuple[RunConfig, Prepared]:
    """`make_ready` for all ranks: rank 0 makes ready, unless the caller has (`is_prepared`), and one rank per host fetches the
    weights that rank 0 pinned; then all open the data. Collective."""
    ready = None
    if config.parallel.async_tp:
        check_tensor_hosts(config.parallel, runtime.hosts())
    if not is_prepared:
        devices = runtime.accelerators()
        ready = runtime.first(lambda: make_ready(config, runtime.world, runtime.device.type, devices))
        pinned = runtime.shared(None if ready is None else ready.config)
        assert pinned is not None
        runtime.first_on_host(lambda: fetch_base_weights(pinned) if reads_weights(begun(pinned)) else None)
        config = pinned
    opened = None if ready is None else ready.prepared
    return config, opened or open_prepared(config.data, config.evaluate.sets, looks=runtime.rank == 0)


def prepare_only(config: RunConfig, with_weights: bool = True, is_join: bool = False) -> Prepared:
    """The recipe's data, prepared without a run, and what it names of the hub, fetched: a run then needs no network. A run that
    has begun keeps the stream it began with; its weights are in its checkpoints, but for an adapter's base. `is_join`: the data
    is encoded in parts, which are joined. Raises UserError."""
    trainer_state = begun(config)
    keep = None
    if trainer_state is not None:
        config, keep = keep_pins(config, trainer_state), stream_to_keep(trainer_state, config)
    reads = with_weights and reads_weights(trainer_state)
    if reads:
        config = pin_model(config)
    config, model = pin_tokenizer(config), config.model.from_
    if trainer_state is None and (reads or model is None or Path(model).is_dir()):
        config.check_layout(architecture_of(config.model, num_entries(config.data.tokenizer) or 1))
    if reads:
        fetch_base_weights(config)
    for line in pin_lines(config):
        say(line)
    return prepare(config.data, config.evaluate.sets, begun=keep, is_join=is_join)


def check_run_directory(config: RunConfig) -> None:
    """A run directory that cannot be one is refused; nothing is made."""
    directory = config.run.directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise UserError(
            f"run.directory={config.run.directory}: {existing} is a file",
            "a run directory is a directory, or can be made",
            "choose another run.directory",
        )


def check_before_training(prepared: Prepared, config: RunConfig, runtime: Runtime) -> list[str]:
    """Warnings, a line each, of what can be looked at within seconds. Collective. Raises UserError where there are errors,
    BadShard where a shard cannot be read and none may be left out."""
    findings: list[Finding] = []
    notes: list[str] = []
    if runtime.rank == 0:
        limits = BEFORE_TRAINING if prepared.remote is None else BEFORE_TRAINING._replace(runs=RUNS_OF_REMOTE)
        try:
            model = model_directory(config.model) if config.model.from_ is not None else None
            findings = lint(prepared, limits, model=model, is_isolated=config.data.isolate).findings
        except BadShard as error:
            if config.data.max_bad_shards == 0:
                raise
            notes = [f"the data was not looked at for faults before training: {error.given}"]
    findings, notes = runtime.shared((findings, notes))
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        more = f"; and {len(errors) - SHOWN} more errors" if len(errors) > SHOWN else ""
        raise UserError(
            f"the data in {prepared.where} is wrong: " + "; ".join(f.line for f in errors[:SHOWN]) + more,
            "training begins on data without errors of `windlass data lint`",
            f"{errors[0].change}; all of them: windlass data lint RECIPE",
        )
    return notes + [finding.line for finding in findings]


def check_data(
    trainer_state: dict[str, Any] | None, config: RunConfig, prepared: Prepared, runtime: Runtime
) -> list[str]:
    """Warnings on a new run's data; a run that goes on has the data that it began with. Raises UserError. Collective."""
    if trainer_state is None:
        return check_before_training(prepared, config, runtime)
    check_drift(trainer_state, config, prepared.stream)  # before any tensor is touched; restoring says what is accepted
    return []


def check_new_rows(config: RunConfig, architecture: Architecture) -> None:
    """Raises UserError for an adapter beside a base that gets rows here: no file has that base."""
    rows = fewer_rows(model_directory(config.model), architecture.vocab_size)
    if rows is not None and config.adapter.kind != "none":
        raise UserError(
            f"model.vocab_size={architecture.vocab_size} with a base of {rows} rows, and an adapter",
            "an adapter belongs to a base that is in files, where other tools load it from",
            f"write that base once (transformers: model.resize_token_embeddings({architecture.vocab_size})), name it as "
            "model.from, and train its new rows by adapter.also_train=['*embed_tokens*', '*lm_head*']; or adapter.kind=none",
        )
