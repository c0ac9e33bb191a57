"""Which order a recipe asks for, and where it begins: at the first sample, or where a checkpoint ended.

A run that goes on keeps the position of each source, also where its shares or its lanes have changed since.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from windlass.data.config import DataConfig
from windlass.data.prepare.manifest import Prepared
from windlass.data.prepare.prepare import other_stream
from windlass.data.shards.mds import Reader
from windlass.data.stream.growing_stream import WrittenOrder
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.ledger import shards_fingerprint
from windlass.data.stream.loader import BatchCut, StreamOrder
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_lanes import LaneShares, MixedLanes, spread_over_lanes
from windlass.data.stream.mixture_shares import Shares, Stage
from windlass.data.stream.order import Order
from windlass.errors import UserError


@dataclass(frozen=True)
class Opening:
    """What a stream is opened with."""

    prepared: Prepared
    config: DataConfig
    cut: BatchCut
    seed: int
    state: Mapping[str, Any] = field(default_factory=dict)
    """Where it begins: `BatchSource.state` of a checkpoint of this stream; empty at the first start."""
    log: Callable[[str], None] = print
    """Called while a batch waits for data that is not prepared yet, and where shares have changed."""

    @property
    def own(self) -> range | None:
        """What an order in lanes looks up; all of a batch where shards may be left out."""
        return None if may_skip(self.config, self.state) else self.cut.own


def may_skip(config: DataConfig, state: Mapping[str, Any]) -> bool:
    """Whether shards may be left out, or have been."""
    return bool(config.max_bad_shards or state.get("skipped"))


def open_order(opening: Opening, reader: Reader) -> tuple[StreamOrder, WrittenOrder | None]:
    """The order; a second time, where it may still grow. Raises UserError."""
    config, seed, state = opening.config, opening.seed, opening.state
    window = config.shuffle_window
    if config.mixture:
        return _mixed(opening, reader), None
    if config.order.first_epoch == "written":
        written = WrittenOrder(
            reader, seed, window, state.get("read_from"), refused=other_stream(opening.prepared.where)
        )
        return written, written
    if config.order.lanes > 1:
        return _lane_order(opening, reader), None
    return Order(reader.shard_samples, seed, window), None


def _mixed(opening: Opening, reader: Reader) -> StreamOrder:
    config, samples, window = opening.config, reader.shard_samples, opening.config.shuffle_window
    source_shards = opening.prepared.sets["train"].source_shards
    ends = np.cumsum(source_shards).tolist()
    digests = [shards_fingerprint(reader.shards[end - n : end]) for n, end in zip(source_shards, ends)]
    if config.order.lanes > 1:
        _check_lanes(config, reader, source_shards)
        of_lanes = _lane_shares(opening, digests)
        return MixedLanes(samples, source_shards, of_lanes, opening.seed, window, own=opening.own, digests=digests)
    is_written = config.order.first_epoch == "written"
    shares = _shares(opening, digests)
    return Mixture(samples, source_shards, shares, opening.seed, window, written=is_written, digests=digests)


def _lane_order(opening: Opening, reader: Reader) -> LaneOrder:
    """Raises UserError."""
    config, state = opening.config, opening.state
    lanes, num_shards = config.order.lanes, len(reader.shard_samples)
    if lanes > num_shards:
        raise UserError(
            f"data.order.lanes={lanes}, and {opening.prepared.where}/train has {num_shards} shards",
            "each lane reads shards of its own",
            f"set data.order.lanes={num_shards} or fewer, or prepare with a smaller data.shard_bytes",
        )
    kept_lanes, block = state.get("lanes", (0, 0))
    block = block if kept_lanes == lanes else opening.cut.global_batch // lanes
    return LaneOrder(reader.shard_samples, opening.seed, config.shuffle_window, lanes, block, opening.own)


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


def _shares(opening: Opening, digests: Sequence[str]) -> Shares:
    """The recipe's; of a run that goes on, each source from where it is."""
    planned, state = Shares([Stage(*stage) for stage in opening.config.mixture]), opening.state
    if "shares" not in state:
        return planned
    kept, position = Shares.of(state["shares"]), state["samples_consumed"]
    found = planned.continued(kept, position, _is_same(digests, state))
    if found is not kept:
        _log_change(opening, position, found.taken(position).tolist())
    return found


def _lane_shares(opening: Opening, digests: Sequence[str]) -> LaneShares:
    """The shares of each lane. A run that goes on with another number of lanes begins them evenly."""
    config, cut, state = opening.config, opening.cut, opening.state
    planned, lanes = Shares([Stage(*stage) for stage in config.mixture]), config.order.lanes
    block = cut.global_batch // lanes
    if "shares" not in state:
        return LaneShares(planned.stages, lanes, block)
    kept, position, is_same = Shares.of(state["shares"]), state["samples_consumed"], _is_same(digests, state)
    kept_lanes, kept_block = state.get("lanes", (1, cut.global_batch))
    before = LaneShares(kept.stages, kept_lanes, kept_block, state["shares"].get("of_lanes", [kept.facts()["taken"]]))
    now = planned.continued(kept, position, is_same)
    are_changed, are_other_lanes = now is not kept, kept_lanes != lanes
    if not are_changed and not are_other_lanes:
        return before
    # what each lane has given of each source; nothing of a source that is another one now
    given_JK, same = np.zeros((kept_lanes, planned.num_sources), np.int64), np.flatnonzero(is_same)
    given_JK[:, same] = before.taken(position)[:, same]
    if are_changed:
        _log_change(opening, position, given_JK.sum(0).tolist())
    if are_other_lanes:
        return LaneShares(now.from_(position), lanes, block, spread_over_lanes(given_JK.sum(0), lanes))
    return LaneShares(now.from_(position), lanes, kept_block, given_JK.tolist())


def _is_same(digests: Sequence[str], state: Mapping[str, Any]) -> list[bool]:
    return [now == then for now, then in zip(digests, state["shares"]["sources"])]


def _log_change(opening: Opening, position: int, taken: Sequence[int]) -> None:
    goes_on = (f"{label} continues at its sample {n}" for label, n in zip(opening.config.labels, taken, strict=True))
    opening.log(f"the shares change at sample {position}: {', '.join(goes_on)}")
