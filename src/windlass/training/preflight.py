"""Everything that can be refused before something slow or lasting happens; then downloads, and the data, prepared once.

A refused recipe must cost nothing: not another run's prepared shards, not a directory that was not there.
One refusal comes later, since it needs the prepared data: a length in epochs that a changed corpus made shorter than the run
already is.
"""

from windlass.config import RunConfig
from windlass.data.prepare.background import start
from windlass.data.prepare.prepare import Prepared, open_prepared, other_stream, prepare
from windlass.errors import AbsentSource, BadShard, UserError
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.hf import check_weights
from windlass.parallel.build import check_compiler
from windlass.parallel.rules.degrees import check_degree, check_exchange, check_heads
from windlass.parallel.rules.expert import check_experts
from windlass.parallel.schedules import check_torch
from windlass.runtime import Runtime
from windlass.training.drift import begun, check_settings, stream_to_keep
from windlass.training.parameter_rules import rules_of
from windlass.training.pins import fetch_weights, keep_pins, pin_model, pin_tokenizer, told_pins
from windlass.training.recompute import plan_of


def make_ready(config: RunConfig, world: int, device_type: str) -> RunConfig:
    """Prepares the data of a run that may begin on `world` ranks, and fetches what it names of the hub -> the config with the
    commits of hub names. With a first epoch in written order, preparation goes on in the background until this process ends.
    Raises UserError. Rank 0 or the launcher calls it, alone."""
    config.accumulation(config.parallel.layout(world).batch_ranks)
    check_compiler(config.parallel, device_type)
    check_torch(config.parallel.schedule, config.parallel.pp)
    check_exchange(config.parallel.context, config.parallel.context_kind, config.parallel.compile)
    config.data.check_pairs_are_not_trained(config.evaluate.sets)
    check_directory(config)
    keep = None
    capsule = begun(config)
    if capsule is not None:
        config = keep_pins(config, capsule)
        check_settings(capsule, config)
        rules_of(config, architecture_from_hf(capsule["model"]))
        keep = stream_to_keep(capsule, config)
        config = pin_tokenizer(config)
    else:
        config = pin_model(config)
        architecture = config.model.architecture(config.data.tokenizer.train or 1)
        check_model(config, architecture)
        rules_of(config, architecture)
        plan_of(config, architecture, device_type)
        config = pin_tokenizer(config)
        fetch_weights(config)
        if config.model.from_ is not None:
            check_weights(config.model.directory(), architecture)
    if config.data.may_grow and config.run.epochs is None:
        start(config.data, config.evaluate.sets, begun=keep)
        return config
    if config.data.may_grow:
        print(
            "run.epochs: the length of an epoch is known when all is prepared; with run.tokens training begins before"
        )
    _prepare_or_take(config, keep)
    return config


def _prepare_or_take(config: RunConfig, keep: str | None) -> None:
    """Where a source is not here, as on a cluster to which shards were copied, what was prepared of it by the same recipe is
    taken as it lies: there is nothing to compare it with. Raises UserError."""
    try:
        prepare(config.data, config.evaluate.sets, begun=keep)
    except AbsentSource as error:
        try:
            prepared = open_prepared(config.data, config.evaluate.sets)
        except BadShard:
            raise
        except UserError:
            raise error from None
        if keep is not None and prepared.stream != keep:
            raise other_stream(prepared.place) from None
        print(f"{prepared.place} is taken as it was prepared: {error.given}, so whether that has changed is not known")


def make_ready_once(config: RunConfig, runtime: Runtime) -> RunConfig:
    """The same on all ranks of a launcher that has prepared nothing: rank 0 makes ready, then one rank per host fetches the
    weights that rank 0 pinned. Collective."""
    pinned = runtime.shared(runtime.first(lambda: make_ready(config, runtime.world, runtime.device.type)))
    assert pinned is not None
    runtime.first_on_host(lambda: fetch_weights(pinned) if begun(pinned) is None else None)
    return pinned


def prepare_only(config: RunConfig, with_weights: bool = True) -> Prepared:
    """The recipe's data, prepared without a run, and what it names of the hub, fetched: a run then needs no network. A run that
    has begun keeps the stream it began with, and its weights lie in its checkpoints. Raises UserError."""
    capsule = begun(config)
    keep = None
    if capsule is not None:
        config, keep = keep_pins(config, capsule), stream_to_keep(capsule, config)
    elif with_weights:
        config = pin_model(config)
        if config.model.commit is not None:
            check_model(config, config.model.architecture(config.data.tokenizer.train or 1))
    config = pin_tokenizer(config)
    if capsule is None and with_weights:
        fetch_weights(config)
    for line in told_pins(config):
        print(line)
    return prepare(config.data, config.evaluate.sets, begun=keep)


def check_model(config: RunConfig, architecture: Architecture) -> None:
    """What a model refuses of a recipe."""
    config.parallel.check_blocks(architecture.num_layers)
    check_degree(config.parallel.tp, architecture)
    check_heads(config.parallel.context, config.parallel.context_kind, config.parallel.tp, architecture)
    check_experts(
        architecture,
        config.parallel.expert,
        config.parallel.tp,
        config.parallel.compile,
        config.precision.policy,
        config.optim.kind,
        config.parallel.activation_gib,
    )
    if config.data.sequence_length > architecture.max_positions:
        raise UserError(
            f"data.sequence_length={config.data.sequence_length} for a model of {architecture.max_positions} positions",
            "a sequence is no longer than the model's positions",
            f"use data.sequence_length={architecture.max_positions} or less, or a model with more positions",
        )


def check_vocabulary(tokens: int, architecture: Architecture) -> None:
    """A tokenizer that was trained anew may have more entries than the model has rows."""
    if tokens > architecture.vocab_size:
        raise UserError(
            f"a tokenizer of {tokens} entries for a checkpoint of {architecture.vocab_size}",
            "every token has a row in the embedding",
            "use the tokenizer that the run began with: it lies in its checkpoints, under tokenizer/",
        )


def check_directory(config: RunConfig) -> None:
    """A run directory that cannot be one is refused; nothing is made."""
    directory = config.run.directory.absolute()
    place = next(path for path in (directory, *directory.parents) if path.exists())
    if not place.is_dir():
        raise UserError(
            f"run.directory={config.run.directory}: {place} is a file",
            "a run directory is a directory, or can be made",
            "choose another run.directory",
        )
