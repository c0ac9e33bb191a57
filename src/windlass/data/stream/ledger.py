"""Which samples a run has consumed, from its events and the index of its data: a proof by arithmetic.

The order of samples is a function of (seed, position in the stream), so a run need not write down samples. Each start and
resume writes one entry: the stream and its shards as a fingerprint, seed, shuffle window, the shares of a mixture, the
position where it begins, and how many samples a step takes. Lines that a resume made void are left out before
(`report.events.read_events`), since what a killed process did after its checkpoint is in no weights. Then the run is a
list of spans of the stream, and a span expands to (shard, row), if the shards at hand have the fingerprint: theirs are the
hashes of all bytes.

What was left out (`skipping_stream`) is in the events too: which shard from which position on, and global batches that were
passed over whole. So a position of a span is consumed or lost, and both are proved.

The last span ends at the last line written. A process killed between two lines has done at most `report.every_steps`
steps more, which no checkpoint can have missed: a resumed run's next entry says where it really was.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from windlass.data.shards.index import Shard
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_lanes import LaneShares, MixedLanes
from windlass.data.stream.mixture_shares import Shares
from windlass.data.stream.order import Order
from windlass.errors import UserError

RESTARTS = ("start", "resume")


class Span(NamedTuple):
    """Positions start..end of the stream, in samples."""

    start: int
    end: int
    shards: str
    """`shards_fingerprint` of them."""
    seed: int
    shuffle_window: int
    source_shards: tuple[int, ...] = ()
    """The number of shards of each source of a mixture. The shards of one source follow those of the source before."""
    shares: Mapping[str, Any] | None = None
    """`Shares.facts` of the mixture; None without one."""
    lanes: tuple[int, int] | None = None
    """The number of lanes, and the samples of a block."""
    left_out: tuple[tuple[int, int], ...] = ()
    """(shard, position): from that position on its samples count no target."""
    written: bool = False
    """Whether the first epoch is in written order."""
    num_shards: int | None = None
    """In written order: `shards` is the `chain` of the first `num_shards`."""
    is_complete: bool = True
    """Whether these are all that there are."""


def shards_fingerprint(shards: Iterable[Shard]) -> str:
    """xxh3-128 of the hashes and sample counts of all shards, in their order."""
    facts = [(shard.raw.algorithm, shard.raw.digest, shard.num_samples) for shard in shards]
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def chain(shards: Iterable[Shard], before: str = "") -> str:
    """The fingerprint of shards that become more: each is hashed with the hash of those `before` it."""
    for shard in shards:
        before = xxhash.xxh3_128_hexdigest(before.encode() + shards_fingerprint([shard]).encode())
    return before


def waited_s(events: Iterable[Mapping[str, Any]]) -> float:
    """Seconds that the run has waited for data that was still being prepared."""
    return sum(event.get("waited_s", 0.0) for event in events)


def spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """The parts of the stream that a run consumed, in order; `events` are the lines that still count.

    Raises UserError for a run whose events have no entry, or where a resume does not go on where the part before ended.
    """
    found: list[Span] = []
    current: Mapping[str, Any] | None = None
    begun_step = last_step = passed = 0
    left_out: dict[int, int] = {}
    for event in (*events, {"kind": "resume", "step": None}):
        if event["kind"] in RESTARTS:
            if current is not None:
                step = last_step if event["step"] is None else event["step"]
                end = current["samples_consumed"] + (step - begun_step) * current["samples_per_step"] + passed
                found.append(_span(current, end, left_out))
                _check_joint(event.get("data"), end, step)
            current, begun_step, passed = event.get("data"), event["step"], 0
            left_out = dict((current or {}).get("left_out", ()))
            if current is None and event["step"] is not None:
                rule = "each start and resume writes which data it reads from where"
                raise UserError(
                    f"the {event['kind']} at step {event['step']} has no `data`", rule, "train with this version"
                )
        if (lost := event.get("left_out")) is not None:
            left_out[lost["shard"]] = lost["from_sample"]
        passed += event.get("passed", {}).get("samples", 0)
        if event["kind"] == "data" and current is not None:
            current = {**current, **{key: event[key] for key in ("num_shards", "shards", "is_complete")}}
        last_step = event["step"]
    return [span for span in found if span.end > span.start]


def span_before(events: Iterable[Mapping[str, Any]], end: int, num_samples: int) -> Span:
    """The `num_samples` samples before `end`, of the stream that the last start or resume in `events` reads. Raises UserError
    where there is none."""
    current: Mapping[str, Any] | None = None
    left_out: dict[int, int] = {}
    for event in events:
        if event["kind"] in RESTARTS:
            current = event.get("data")
            left_out = dict((current or {}).get("left_out", ()))
        elif event["kind"] == "data" and current is not None:
            current = {**current, **{key: event[key] for key in ("num_shards", "shards", "is_complete")}}
        if (lost := event.get("left_out")) is not None:
            left_out[lost["shard"]] = lost["from_sample"]
    if current is None:
        raise UserError("the run has no start in its events", "each start writes which data it reads", "train first")
    return _span({**current, "samples_consumed": end - num_samples}, end, left_out)


def samples_before(entry: Mapping[str, Any], end: int, num_samples: int, shards: Sequence[Shard]) -> list[str]:
    """`shard/row` of the samples among the `num_samples` that end at `end`, in order, of a stream whose `entry` this is
    (see BatchSource). Without those of shards that are left out; none where a source of one's own has an entry of other data."""
    if "shards" not in entry:
        return []
    span = _span({**entry, "samples_consumed": end - num_samples}, end, dict(entry.get("left_out", ())))
    try:
        return [f"{shard}/{row}" for shard, row in consumed_samples([span], shards)]
    except UserError:  # this explains what has happened: it must not end the run
        return []


def _span(current: Mapping[str, Any], end: int, left_out: Mapping[int, int]) -> Span:
    mixture = tuple(current.get("source_shards", ())), current.get("shares")
    facts = current["shards"], current["seed"], current["shuffle_window"]
    return Span(
        current["samples_consumed"],
        end,
        *facts,
        *mixture,
        lanes=tuple(current["lanes"]) if "lanes" in current else None,
        left_out=tuple(left_out.items()),
        written=current.get("first_epoch") == "written",
        num_shards=current.get("num_shards"),
        is_complete=current.get("is_complete", True),
    )


def _check_joint(following: Mapping[str, Any] | None, end: int, step: int) -> None:
    if following is not None and following["samples_consumed"] != end:
        given = (
            f"the resume at step {step} begins at sample {following['samples_consumed']}, the part before ends at {end}"
        )
        raise UserError(
            given, "a run goes on where its checkpoint ended", "see whether events.jsonl was changed by hand"
        )


def consumed_samples(found: Iterable[Span], shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """(shard, row) of every sample consumed, in order. Raises UserError when `shards` are not those of the run."""
    return (row for row, is_lost in _rows(found, shards) if not is_lost)


def lost(found: Iterable[Span], shards: Sequence[Shard]) -> Iterator[tuple[int, int]]:
    """(shard, row) of every sample whose turn came while its shard was left out, in order. Raises as `consumed_samples`."""
    return (row for row, is_lost in _rows(found, shards) if is_lost)


def _rows(found: Iterable[Span], shards: Sequence[Shard]) -> Iterator[tuple[tuple[int, int], bool]]:
    for span in found:
        own = shards if span.num_shards is None else shards[: span.num_shards]
        counts = [shard.num_samples for shard in own]
        here = shards_fingerprint(own) if span.num_shards is None else chain(own)
        if span.shards != here:
            given = f"the run consumed samples {span.start} to {span.end} from shards {span.shards}, these are {here}"
            raise UserError(given, "samples are proved with the very shards that were read", "give the run's own data")
        order = _order(span, counts)
        since_S = np.full(len(counts), np.iinfo(np.int64).max)
        for shard, since in span.left_out:
            since_S[shard] = since
        for start in range(span.start, span.end, 1 << 16):
            rows_N2 = order.take(start, min(1 << 16, span.end - start))
            is_lost_N = start + np.arange(len(rows_N2)) >= since_S[rows_N2[:, 0]]
            yield from zip(map(tuple, rows_N2.tolist()), is_lost_N.tolist())


def _order(span: Span, counts: list[int]) -> Order | LaneOrder | Mixture | MixedLanes:
    if span.lanes is not None and span.shares is not None:
        of_lanes = LaneShares(Shares.of(span.shares).stages, *span.lanes, span.shares["of_lanes"])
        return MixedLanes(counts, span.source_shards, of_lanes, span.seed, span.shuffle_window)
    if span.lanes is not None:
        return LaneOrder(counts, span.seed, span.shuffle_window, *span.lanes)
    if span.shares is not None:
        shares = Shares.of(span.shares)
        return Mixture(counts, span.source_shards, shares, span.seed, span.shuffle_window, written=span.written)
    order = Order(counts, span.seed, span.shuffle_window, written=span.written, is_complete=span.is_complete)
    if order.end is not None and span.end > order.end:
        given = f"the run consumed samples up to {span.end}, and says which shards there were up to {order.end}"
        raise UserError(given, "each logged step says which shards there are", "see whether events.jsonl was changed")
    return order
