"""Everything that can be refused before something slow or lasting happens; then the data, prepared once.

A refused recipe must cost nothing: not another run's prepared shards, not a directory that was not there.
One refusal comes later, since it needs the prepared data: a length in epochs that a changed corpus made shorter than the run
already is.
"""

from windlass.config import RunConfig
from windlass.data.prepare import Prepared, prepare
from windlass.errors import UserError
from windlass.jobs.drift import begun, check_settings, stream_to_keep
from windlass.model.architecture import Architecture, refuse_dropout
from windlass.parallel.build import check_compiler


def make_ready(config: RunConfig, world: int, device_type: str) -> Prepared:
    """The prepared data of a run that may begin on `world` ranks. Raises UserError. Rank 0 or the launcher calls it, alone."""
    config.accumulation(config.parallel.layout(world).batch_ranks)
    check_compiler(config.parallel, device_type)
    check_directory(config)
    keep = None
    capsule = begun(config)
    if capsule is not None:
        check_settings(capsule, config)
        keep = stream_to_keep(capsule, config)
    else:
        check_model(config, config.model.architecture(config.data.tokenizer.train or 1))
    return prepare(config.data, config.evaluate.sets, begun=keep)


def check_model(config: RunConfig, architecture: Architecture) -> None:
    """What a model refuses of a recipe."""
    refuse_dropout(architecture)
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
