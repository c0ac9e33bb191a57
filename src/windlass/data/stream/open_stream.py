"""The door: prepared data and a recipe -> the stream of global batches that a run trains on, with what the recipe asks for.

    order     Order; LaneOrder where hosts read shards of their own; Mixture where sources are mixed; MixedLanes where both;
              WrittenOrder where training begins while data is prepared
    reader    Reader; SkippingReader where shards may be missing (it wraps the order, too)
    batch     collate, which isolates documents if asked to; add_keys, where dropout needs a key per sample; add_percent, where
              answers have weights; add_sources, where sources are mixed; changed_batches, where pairs bring their scores
    source    Loader(order, batch) < GrowingStream < SkippingStream, each only where its feature is on

A feature is one object that the loader does not know. A new one goes into the layer that it changes, and is named here.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from windlass.data.config import DataConfig
from windlass.data.packing import Borders
from windlass.data.prepare.manifest import Prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.batch_source import BatchSource
from windlass.data.stream.collate import add_keys, add_percent, add_sources, batches_of, changed_batches, check_length
from windlass.data.stream.evaluation_set import ChangeBatch, unchanged
from windlass.data.stream.growing_stream import GrowingStream, WrittenOrder, wait_for_first_shard
from windlass.data.stream.loader import BatchCut, Loader
from windlass.data.stream.open_order import Opening, may_skip, open_order
from windlass.data.stream.skipping_stream import (
    OneRank,
    RankAgreement,
    SkippingReader,
    SkippingStream,
    check_limit_on_resume,
)

MOST_NAMED: Final = 3  # sources in an error


def open_stream(
    opening: Opening,
    *,
    with_keys: bool = False,
    change: ChangeBatch = unchanged,
    ranks: RankAgreement | None = None,
    device: torch.device | str = "cpu",
) -> BatchSource:
    """The training set as this rank's batches, from where `opening.state` ended.

    with_keys: each row has a key, for dropout. change: what is done to a batch of these samples of the set. ranks: who agree on
    shards that are left out.
    Raises UserError, BadShard.
    """
    prepared, config, cut, state = opening.prepared, opening.config, opening.cut, opening.state
    reader, sequences = _open_reader(prepared, config, cut), config.sequences_per_sample
    order, written = open_order(opening, reader)
    skipping = None
    if may_skip(config, state):
        since = dict(state.get("skipped", ()))
        check_limit_on_resume(since, config.max_bad_shards, reader)
        skipping = SkippingReader(order, reader, sequences * (config.sequence_length + 1), since)
    borders = _borders(prepared, written) if config.isolate else None
    make = batches_of(skipping or reader, config.sequence_length, borders, sequences)
    is_growing_chat = config.order.first_epoch == "written" and any(one.format == "chat" for one in config.sources)
    if reader.has_percent or is_growing_chat:  # rows with weights may still come
        make = add_percent(make, skipping or reader)
    if change is not unchanged:
        make = changed_batches(make, change, reader.shard_samples)
    if with_keys:
        make = add_keys(make, opening.seed, sequences)
    if config.mixture and sequences == 1:  # the loss of a pair is no mean over targets
        make = add_sources(make, prepared.sets["train"].source_shards)
    consumed, named = state.get("samples_consumed", 0), _named(prepared, config, reader)
    loader = Loader(skipping or order, reader.shards, make, cut, consumed, device, config.timeout_s, named)
    source: BatchSource = loader
    if written is not None:
        source = GrowingStream(loader, written, state.get("read_from"), opening.log)
    if skipping is not None:
        source = SkippingStream(source, skipping, cut, config.max_bad_shards, ranks or OneRank())
    return source


def _named(prepared: Prepared, config: DataConfig, reader: Reader) -> Callable[[int], str]:
    """The name of a shard, by its number, where its storage does not answer; and of the source that it holds: of all sources,
    where they are not mixed by weights."""

    def name(shard: int) -> str:
        ends = np.cumsum(prepared.sets["train"].source_shards)
        held = [config.labels[int(np.searchsorted(ends, shard, "right"))]] if config.mixture else config.labels
        sources = ", ".join(held[:MOST_NAMED]) + f" and {len(held) - MOST_NAMED} more" * (len(held) > MOST_NAMED)
        return f"{reader.shards[shard].stored.name} of {prepared.where} (source {sources})"

    return name


def _open_reader(prepared: Prepared, config: DataConfig, cut: BatchCut) -> Reader:
    windows = len(config.sources) if config.mixture else 1  # each source has a window open
    if config.order.lanes > 1:  # and each lane that this rank's part of a batch touches
        windows *= -(-len(cut.own) * config.order.lanes // cut.global_batch) + 1
    source = wait_for_first_shard(prepared.shards("train"))
    reader = Reader(source, max_mapped=2 * windows * config.shuffle_window + 2)
    check_length(reader, config.sequence_length, config.max_bad_shards, config.sequences_per_sample)
    return reader


def _borders(prepared: Prepared, written: WrittenOrder | None) -> Callable[[], Borders]:
    borders = prepared.borders("train")
    return lambda: borders if written is None else written.borders(borders)
