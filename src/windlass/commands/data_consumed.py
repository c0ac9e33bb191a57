"""`windlass data consumed`: which samples a run has consumed, proved from its events and the shards themselves.

The order is arithmetic and hashes identify the shards, so the positions that the events name expand to (shard, row), one by one;
samples lost with a bad shard are counted apart. The digest is that of the list: two runs that print the same digest have consumed
the same samples in the same order, whatever they ran on.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from windlass.config import RunConfig, load_recipe
from windlass.data.prepare.manifest import open_prepared
from windlass.data.stream.ledger import Span, consumed_samples, lost, span_before, spans
from windlass.errors import UserError
from windlass.report.events import read_events

RECIPE_NAME = "resolved.yaml"


def consumed(run_directory: Path, list_to: Path | None = None) -> Iterator[str]:
    """Lines to print. `list_to`: a file for the list, a line `shard row` per sample. Raises UserError where the run has no events
    or no recipe, or its data is not what it read."""
    found = spans(read_events(run_directory / "events.jsonl"))
    recipe = run_directory / RECIPE_NAME
    if not recipe.is_file():
        rule = "a run that has begun has its recipe there, which names its data"
        raise UserError(f"{recipe} does not exist", rule, "give the directory of a run")
    config = load_recipe(recipe)
    shards = open_prepared(config.data, config.evaluate.sets).shards("train").shards
    for part in found:
        yield f"samples {part.start:,} to {part.end:,} of the stream{_left_out(part)}"
    starts = np.cumsum([0, *(shard.num_samples for shard in shards)])
    times_N = np.zeros(int(starts[-1]), np.int64)
    digest, num_consumed = xxhash.xxh3_128(), 0
    with open(list_to or "/dev/null", "w") as file:
        for shard, row in consumed_samples(found, shards):
            line = f"{shard} {row}\n"
            digest.update(line.encode())
            file.write(line)
            times_N[starts[shard] + row] += 1
            num_consumed += 1
    yield f"consumed: {num_consumed:,} samples, xxh3-128 of their list {digest.hexdigest()}"
    num_lost = 0
    for shard, row in lost(found, shards):
        times_N[starts[shard] + row] += 1
        num_lost += 1
    if num_lost:
        yield f"lost: {num_lost:,} samples, whose turn came when their shard was left out"
    yield f"of {len(times_N):,} samples each had its turn {_times(times_N)}"


def batch_before(config: RunConfig, end: int) -> str:
    """The samples of the global batch that ends at position `end` of the stream, in one line; what is wrong where they cannot be
    said: this explains a failure and is none."""
    try:
        span = span_before(read_events(config.run.directory / "events.jsonl"), end, count := config.samples_per_step)
        shards = open_prepared(config.data, config.evaluate.sets).shards("train").shards
        rows = " ".join(f"{shard}/{row}" for shard, row in consumed_samples([span], shards))
    except UserError as error:
        return f"its batch is not known: {error.given}"
    return f"its batch: samples {end - count:,} to {end:,} of the stream, shard/row {rows}"


def _left_out(part: Span) -> str:
    names = [f"shard {shard} left out from {since:,} on" for shard, since in part.left_out if since < part.end]
    return "".join(f", {name}" for name in names)


def _times(times_N: np.ndarray) -> str:
    """How often, and how many of each where that differs."""
    values, counts = np.unique(times_N, return_counts=True)
    if len(values) == 1:
        return f"{values[0]} times"
    least, most = int(values[0]), int(values[-1])
    return f"{least} to {most} times ({int(counts[0]):,} the least, {int(counts[-1]):,} the most)"
