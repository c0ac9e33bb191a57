"""The door: prepared data and a recipe -> the stream of global batches that a run trains on, with what the recipe asks for.

    order     Order; LaneOrder where hosts read shards of their own; Mixture where sources are mixed; MixedLanes where both;
              WrittenOrder where training begins while data is prepared
    reader    Reader; SkippingReader where shards may be missing (it wraps the order, too)
    batch     collate, which isolates documents if asked to; add_keys, where dropout needs a key per sample; add_sources,
              where sources are mixed
    source    Loader(order, batch) < GrowingStream < SkippingStream, each only where its feature is on

A feature is one object that the others do not know. A new one goes into the layer that it changes, and is named here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from windlass.data.config import DataConfig
from windlass.data.packing import Borders
from windlass.data.prepare.manifest import Prepared
from windlass.data.prepare.prepare import other_stream
from windlass.data.shards.mds import Reader
from windlass.data.stream.batch_source import BatchSource
from windlass.data.stream.collate import add_keys, add_percent, add_sources, batches_of, changed_batches, check_length
from windlass.data.stream.evaluation_set import ChangeBatch, unchanged
from windlass.data.stream.growing_stream import GrowingStream, WrittenOrder, wait_for_first_shard
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.ledger import fingerprint
from windlass.data.stream.loader import BatchCut, Loader, StreamOrder
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_lanes import LaneShares, MixedLanes, spread
from windlass.data.stream.mixture_shares import Shares, Stage
from windlass.data.stream.order import Order
from windlass.data.stream.skipping_stream import (
    OneRank,
    RankAgreement,
    SkippingReader,
    SkippingStream,
    check_limit_on_resume,
)
from windlass.errors import UserError

MOST_NAMED: Final = 3  # sources in an error


def open_stream(
    prepared: Prepared,
    config: DataConfig,
    cut: BatchCut,
    *,
    seed: int,
    with_keys: bool = False,
    change: ChangeBatch = unchanged,
    state: Mapping[str, Any] | None = None,
    ranks: RankAgreement | None = None,
    log: Callable[[str], None] = print,
    device: torch.device | str = "cpu",
) -> BatchSource:
    """The training set as this rank's batches, from where `state` ended (`BatchSource.state` of a checkpoint of this stream).

    with_keys: each row has a key, for dropout. change: what is done to a batch of these samples of the set.
    log: is called while a batch waits for data that is not prepared yet.
    Raises UserError, BadShard.
    """
    state, sequences = state or {}, config.sequences_per_sample
    reader = _open_reader(prepared, config, cut)
    order, written = _order(prepared, config, reader, cut, seed, state, log)
    skipping = None
    if _may_skip(config, state):
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
        make = add_keys(make, seed, sequences)
    if config.mixture and sequences == 1:  # the loss of a pair is no mean over targets
        make = add_sources(make, prepared.sets["train"].source_shards)
    consumed, named = state.get("samples_consumed", 0), _named(prepared, config, reader)
    loader = Loader(skipping or order, reader.shards, make, cut, consumed, device, _limit(config, written), named)
    source: BatchSource = loader
    if written is not None:
        source = GrowingStream(loader, written, state.get("read_from"), log)
    if skipping is not None:
        source = SkippingStream(source, skipping, cut, config.max_bad_shards, ranks or OneRank())
    return source


def _limit(config: DataConfig, written: WrittenOrder | None) -> Callable[[], float]:
    """Seconds that a batch may be waited for, at each wait. A preparation under way has a deadline of its own."""
    return lambda: config.timeout_s if written is None or written.is_complete else math.inf


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


def _order(
    prepared: Prepared,
    config: DataConfig,
    reader: Reader,
    cut: BatchCut,
    seed: int,
    state: Mapping[str, Any],
    log: Callable[[str], None],
) -> tuple[StreamOrder, WrittenOrder | None]:
    """The order; a second time, where it may still grow."""
    samples, window = reader.shard_samples, config.shuffle_window
    is_written = config.order.first_epoch == "written"
    if config.mixture:
        source_shards = prepared.sets["train"].source_shards
        ends = np.cumsum(source_shards).tolist()
        digests = [fingerprint(reader.shards[end - n : end]) for n, end in zip(source_shards, ends)]
        if config.order.lanes > 1:
            _check_lanes(config, reader, source_shards)
            of_lanes, own = _lane_shares(config, digests, cut, state, log), _own(config, cut, state)
            return MixedLanes(samples, source_shards, of_lanes, seed, window, own=own, digests=digests), None
        shares = _shares(config, digests, state, log)
        return Mixture(samples, source_shards, shares, seed, window, written=is_written, digests=digests), None
    if is_written:
        written = WrittenOrder(reader, seed, window, state.get("read_from"), refused=other_stream(prepared.where))
        return written, written
    if config.order.lanes > 1:
        return _lane_order(prepared, config, reader, cut, seed, state), None
    return Order(samples, seed, window), None


def _may_skip(config: DataConfig, state: Mapping[str, Any]) -> bool:
    return bool(config.max_bad_shards or state.get("skipped"))


def _own(config: DataConfig, cut: BatchCut, state: Mapping[str, Any]) -> range | None:
    """What an order in lanes looks up; all of a batch where shards may be left out."""
    return None if _may_skip(config, state) else cut.own


def _lane_order(
    prepared: Prepared, config: DataConfig, reader: Reader, cut: BatchCut, seed: int, state: Mapping[str, Any]
) -> LaneOrder:
    """Raises UserError."""
    lanes, num_shards = config.order.lanes, len(reader.shard_samples)
    if lanes > num_shards:
        raise UserError(
            f"data.order.lanes={lanes}, and {prepared.where}/train has {num_shards} shards",
            "each lane reads shards of its own",
            f"set data.order.lanes={num_shards} or fewer, or prepare with a smaller data.shard_bytes",
        )
    kept_lanes, block = state.get("lanes", (0, 0))
    block = block if kept_lanes == lanes else cut.global_batch // lanes
    return LaneOrder(reader.shard_samples, seed, config.shuffle_window, lanes, block, _own(config, cut, state))


def _check_lanes(config: DataConfig, reader: Reader, source_shards: Sequence[int]) -> None:
    """Raises UserError."""
    starts = np.cumsum([0, *source_shards[:-1]])
    sizes = np.add.reduceat(np.asarray(reader.shard_samples), starts).tolist()
    for label, size in zip(config.labels, sizes, strict=True):
        if size < config.order.lanes:
            raise UserError(
                f"data.order.lanes={config.order.lanes}, and source {label} has {size} samples",
                "each lane has samples of each source of its own",
                f"set data.order.lanes={size} or fewer, or leave the source out",
            )


def _shares(config: DataConfig, digests: Sequence[str], state: Mapping[str, Any], log: Callable[[str], None]) -> Shares:
    """The recipe's; of a run that goes on, each source from where it is."""
    planned = Shares([Stage(*stage) for stage in config.mixture])
    if "shares" not in state:
        return planned
    kept, position = Shares.of(state["shares"]), state["samples_consumed"]
    found = planned.continued(kept, position, _is_same(digests, state))
    if found is not kept:
        _say_change(config, position, found.taken(position).tolist(), log)
    return found


def _lane_shares(
    config: DataConfig, digests: Sequence[str], cut: BatchCut, state: Mapping[str, Any], log: Callable[[str], None]
) -> LaneShares:
    """The same for each lane. A run that goes on with another number of lanes begins them evenly."""
    planned, lanes = Shares([Stage(*stage) for stage in config.mixture]), config.order.lanes
    block = cut.global_batch // lanes
    if "shares" not in state:
        return LaneShares(planned.stages, lanes, block)
    kept, position, is_same = Shares.of(state["shares"]), state["samples_consumed"], _is_same(digests, state)
    kept_lanes, kept_block = state.get("lanes", (1, cut.global_batch))
    before = LaneShares(kept.stages, kept_lanes, kept_block, state["shares"].get("of_lanes", [kept.facts()["taken"]]))
    found = planned.continued(kept, position, is_same)
    if found is kept and kept_lanes == lanes:
        return before
    given_JK, same = np.zeros((kept_lanes, planned.num_sources), np.int64), np.flatnonzero(is_same)
    given_JK[:, same] = before.taken(position)[:, same]
    if found is not kept:
        _say_change(config, position, given_JK.sum(0).tolist(), log)
    if kept_lanes != lanes:
        return LaneShares(found.from_(position), lanes, block, spread(given_JK.sum(0), lanes))
    return LaneShares(found.from_(position), lanes, kept_block, given_JK.tolist())


def _is_same(digests: Sequence[str], state: Mapping[str, Any]) -> list[bool]:
    return [now == then for now, then in zip(digests, state["shares"]["sources"])]


def _say_change(config: DataConfig, position: int, taken: Sequence[int], log: Callable[[str], None]) -> None:
    goes_on = (f"{label} continues at its sample {n}" for label, n in zip(config.labels, taken, strict=True))
    log(f"the shares change at sample {position}: {', '.join(goes_on)}")


def _borders(prepared: Prepared, written: WrittenOrder | None) -> Callable[[], Borders]:
    borders = prepared.borders("train")
    return lambda: borders if written is None else written.borders(borders)
