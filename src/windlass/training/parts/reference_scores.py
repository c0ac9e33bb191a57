"""The scores of a preference run's pairs under the model that it began with: from its checkpoint, from a file beside the data,
or computed before step 0."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from windlass.config import RunConfig
from windlass.data.files import write_durably
from windlass.data.prepare.manifest import SCORES_NAME
from windlass.data.prepare.prepare import Prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.evaluation_set import batches_in_order
from windlass.data.stream.ledger import shards_fingerprint
from windlass.model.architecture import Architecture
from windlass.objectives.kept_scores import ReferenceScores, identity, score_pairs
from windlass.parallel.program import Program
from windlass.runtime import Runtime
from windlass.training.parts.open_data import batch_cut
from windlass.training.start.base_model import began_with, kept_scores
from windlass.training.start.restore import Start


def reference_scores(
    config: RunConfig,
    architecture: Architecture,
    program: Program,
    prepared: Prepared,
    runtime: Runtime,
    start: Start,
    files: Mapping[str, bytes | Path],
    log: Callable[[str], None],
) -> ReferenceScores | None:
    """The kept scores of all pairs under the model that the run began with; None where the objective needs none, or reads them
    off the base of its adapter. A run that goes on has them in `files`, of its checkpoint; where its objective had no reference
    it gets none later, as nothing says whether it began as its base. Collective. Raises UserError."""
    if not config.objective.has_reference:
        return None
    if start.trainer_state:  # not by the recipe's start_from and adapter.from, which may have changed since
        return kept_scores(start.trainer_state, files, config.run.start_from or config.run.directory)
    if not config.keeps_reference:
        return None
    pairs = {name: shards_fingerprint(prepared.shards(name).shards) for name in _sets(config)}
    facts = {
        "weights": runtime.shared(runtime.first(lambda: began_with(config))),
        "model": repr(architecture),  # the same weights compute something else with another rope or window
        "stream": prepared.stream,
        "precision": config.precision.model_dump(mode="json"),
        "sets": pairs,
    }
    began = identity(facts)
    file = (prepared.directory if prepared.remote is None else config.run.directory) / SCORES_NAME.format(began)
    found = runtime.shared(runtime.first(lambda: _read(file, began)))
    if found is not None:
        log(f"reference scores: {file}")
        return found
    scores = ReferenceScores(began, {name: _scored(name, config, program, prepared, log) for name in pairs}, pairs)
    runtime.first(lambda: _keep(file, scores.to_bytes(), log))
    return scores


def _sets(config: RunConfig) -> tuple[str, ...]:
    return ("train", *config.data.evaluated(config.evaluate.sets))


def _scored(
    name: str, config: RunConfig, program: Program, prepared: Prepared, log: Callable[[str], None]
) -> np.ndarray:
    reader, cut = Reader(prepared.shards(name)), batch_cut(config, program.mesh)
    rounds = batches_in_order(reader, np.arange(reader.num_samples), cut, config.data.sequence_length, sequences=2)
    device = program.records()[0].tensor.device
    on_device = ((first, count, {key: x.to(device) for key, x in batch.items()}) for first, count, batch in rounds)
    return score_pairs(name, on_device, reader.num_samples, program, log)


def _read(file: Path, began: str) -> ReferenceScores | None:
    try:
        found = ReferenceScores.parse(file.read_bytes())
    except OSError:
        return None
    return found if found is not None and found.began_with == began else None


def _keep(file: Path, data: bytes, log: Callable[[str], None]) -> None:
    """Another run on this data may read them; that it cannot be written, on a read-only disk, ends no run."""
    try:
        write_durably(file, data)
    except OSError as error:
        log(f"{file} is not written ({error}); the scores are kept in the checkpoints of this run")
