"""This rank's micro-batches of the global batches, read ahead by one thread.

Global batch k is the next slice of the stream of `windlass.data.stream.order`: [c, c + G) with c the samples consumed so far
and G = micro_batch * accumulation * batch_ranks sequences. It may cross the border of an epoch; nothing is dropped.
Rank r of the batch axes takes the contiguous piece [c + r*G/R, c + (r+1)*G/R) and cuts it into its micro-batches, in
order. So the concatenation over ranks is the same sequence of samples for every world size and every accumulation,
and ranks that share a place on the batch axes (tensor, pipeline, context) read the same samples by construction.

The state is one number, `consumed`. A run that goes on with another G goes on at the same place of the same stream. (And
`skipped`, where the run may leave out bad shards: see `skip`; and `read_from`, where the first epoch is by arrival.)

The shift happens here, once: a sample stores T+1 ids; input_ids = ids[:-1], targets = labels[1:].

Speed (measured by benchmarks/loader.py, results beside it): thousands of times what a GPU asks for, so one thread is
enough. A failure in the thread is raised by `next()`; an epoch is never cut short.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from windlass.data.packing import NOT_COUNTED, Borders, isolate
from windlass.data.shards.growing import GrowingFolder
from windlass.data.shards.index import REPAIR, Shard
from windlass.data.shards.mds import Reader, ShardSource
from windlass.data.stream import ledger
from windlass.data.stream.arrival import Arrival, Past
from windlass.data.stream.batch_source import Batch, Event
from windlass.data.stream.mixture import Mixture, Shares
from windlass.data.stream.order import Order
from windlass.data.stream.skip import Complaint, SkipRule, Skips, blank
from windlass.errors import BadShard, UserError
from windlass.units import format_duration

TELL_EVERY_S = 10.0  # while the next batch waits for shards that are not written yet
NEWS_FROM_S = 1.0  # shorter waits are told when they add up to it
BATCHES_AHEAD = 2  # global batches read ahead; one would do, the second hides the opening of a shard
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


class _Read(NamedTuple):
    """This rank's part of a global batch. Where shards may be left out also the shard of each of its samples, [G], and what this
    rank could not read. By arrival also which shards the stream can come from up to its end, and whether those were awaited."""

    batches: list[Batch]
    shards_G: np.ndarray
    found: dict[int, Complaint]
    read_from: dict[str, Any] | None = None
    had_to_wait: bool = False


def check_length(reader: Reader, sequence_length: int, spare: int = 0) -> None:
    """Raises UserError when the samples on disk are not `sequence_length` + 1 ids long. `spare` shards need not be readable: they
    are met by all ranks when their turn comes."""
    for number in range(min(1 + spare, len(reader.shards))):
        try:
            stored = len(reader.read(number, 0)[0]) - 1
            break
        except BadShard:
            if spare == 0:
                raise
    else:
        return
    if stored != sequence_length:
        raise UserError(
            f"sequence_length {sequence_length}, but the samples in {reader.source.where} hold {stored} targets each",
            "samples are cut to length when data is prepared",
            f"prepare again with sequence_length {sequence_length}, or train with {stored}",
        )


def collate(
    reader: Reader | Skips, places_N2: np.ndarray, rows: int, sequence_length: int, borders: Borders | None = None
) -> Batch:
    """The samples at `places_N2` as one batch of `rows` rows; rows without a sample hold id 0 and count no target.

    Returns input_ids and targets, [rows, T] int64; with `borders` documents are isolated: also `documents`, [rows, M] int64.
    """
    input_ids_BL = np.zeros((rows, sequence_length + 1), np.int64)
    labels_BL = np.full((rows, sequence_length + 1), NOT_COUNTED, np.int64)
    for row, (shard, sample) in enumerate(places_N2.tolist()):
        ids, labels = reader.read(shard, sample)
        if len(ids) != sequence_length + 1:
            given = f"sample {sample} of {reader.name(shard)} holds {len(ids)} ids"
            raise BadShard(given, f"every sample of this set holds {sequence_length + 1}", REPAIR)
        input_ids_BL[row], labels_BL[row] = ids, labels
    parts = {"input_ids": input_ids_BL[:, :-1], "targets": labels_BL[:, 1:]}
    if borders is not None:
        parts["documents"], parts["targets"] = isolate(input_ids_BL, labels_BL, borders)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


def sample_keys(seed: int, start: int, count: int) -> torch.Tensor:
    """[count] int64: a key for each of the places start..start+count of the stream, for what is random per sample (dropout).

    Two rounds of SplitMix64 (Steele et al. 2014). The place says epoch and step, so a sample has another key each time it comes;
    no rank, batch or world enters.
    """
    with np.errstate(over="ignore"):  # integers that wrap, on purpose
        places = np.uint64(start) + np.arange(count, dtype=np.uint64)
        return torch.from_numpy(_splitmix(_splitmix(np.uint64(seed)) + places * _GOLDEN).view(np.int64))


def _splitmix(x: Any) -> Any:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Loader:
    """`next()` gives this rank's `accumulation` micro-batches of the next global batch, for ever."""

    def __init__(
        self,
        source: str | Path | ShardSource,
        *,
        sequence_length: int,
        micro_batch: int,
        accumulation: int,
        batch_rank: int,
        batch_ranks: int,
        seed: int,
        shuffle_window: int,
        consumed: int = 0,
        with_keys: bool = False,
        borders: Borders | None = None,
        shares: Shares | None = None,
        skip_rule: SkipRule | None = None,
        arrival: bool = False,
        past: Past | None = None,
        tell: Callable[[str], None] = lambda _sentence: None,
        device: torch.device | str = "cpu",
    ):
        assert 0 <= batch_rank < batch_ranks and micro_batch >= 1 and accumulation >= 1 and consumed >= 0
        self.consumed = consumed
        self.global_batch = micro_batch * accumulation * batch_ranks
        self.wait_s = 0.0
        self._sequence_length, self._micro_batch, self._accumulation = sequence_length, micro_batch, accumulation
        self._batch_rank, self._device = batch_rank, torch.device(device)
        self._facts: dict[str, Any] = dict(seed=seed, shuffle_window=shuffle_window, shares=shares, arrival=arrival)
        self._seed, self._pin = seed if with_keys else None, self._device.type == "cuda"
        windows = 1 if shares is None else len(shares.weights)  # of a mixture each source has a window open
        max_mapped = 2 * windows * shuffle_window + 2
        if isinstance(source, GrowingFolder):
            source.wait_for(lambda: len(source.shards) > 0)
        self._reader = Reader(Path(source) if isinstance(source, str) else source, max_mapped)
        check_length(self._reader, sequence_length, 0 if skip_rule is None else skip_rule.limit)
        self._skips = None if skip_rule is None else Skips(self._reader, sequence_length, skip_rule)
        self._borders = borders
        samples = self._reader.shard_samples
        self._arrival = Arrival(self._reader, seed, shuffle_window, past) if arrival and shares is None else None
        self._order: Order | Mixture = self._arrival.order if self._arrival else Order(samples, seed, shuffle_window)
        if shares is not None:
            self._order = Mixture(samples, shares.shard_sources, shares.weights, seed, shuffle_window, arrival=arrival)
        self.read_from = None if past is None else {"num_shards": past.num_shards, "shards": past.shards}
        self._tell, self._waited_s = tell, 0.0
        self._told_of: dict[str, Any] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-loader")
        self._ahead: deque[Future[_Read]] = deque()
        self._read_start = consumed
        for _ in range(BATCHES_AHEAD):
            self._read_ahead()

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self._order.num_samples

    @property
    def shards(self) -> Sequence[Shard]:
        """What is read: sizes, hashes, numbers of samples."""
        return self._reader.shards

    def _read_ahead(self) -> None:
        self._ahead.append(self._thread.submit(self._batches, self._read_start))
        self._read_start += self.global_batch

    def _batches(self, start: int) -> _Read:
        rows = self._micro_batch
        per_rank = rows * self._accumulation
        first = self._batch_rank * per_rank
        shards_G, borders, read_from, had_to_wait = np.empty(0, np.int64), self._borders, None, False
        if self._arrival is not None:
            end = start + self.global_batch  # of all ranks, so that all wait alike
            had_to_wait = self._arrival.wait_for(end)
            read_from = self._arrival.read_before(end)
            borders = None if borders is None else self._arrival.borders(borders, end)
        if self._skips is None:
            places_N2 = self._order.take(start + first, per_rank)
        else:
            places_G2 = self._order.take(start, self.global_batch)
            places_N2, shards_G = places_G2[first : first + per_rank], places_G2[:, 0]
        pieces = [places_N2[at : at + rows] for at in range(0, per_rank, rows)]
        reader = self._reader if self._skips is None else self._skips
        batches = [collate(reader, piece, rows, self._sequence_length, borders) for piece in pieces]
        found = {} if self._skips is None else self._skips.found_in(places_N2[:, 0])
        if self._seed is not None:
            for batch, keys_B in zip(
                batches, sample_keys(self._seed, start + first, per_rank).split(rows), strict=True
            ):
                batch["keys"] = keys_B
        if self._pin:
            batches = [_each(batch, torch.Tensor.pin_memory) for batch in batches]
        return _Read(batches, shards_G, found, read_from, had_to_wait)

    def next(self) -> list[Batch]:
        """Micro-batches of {input_ids, targets}, [micro_batch, T] int64 on the device, and `keys` [micro_batch] where
        they were asked for. Raises what the thread met. Collective where shards may be left out."""
        start_s = time.perf_counter()
        while True:
            read = self._front()  # stays in front when it raises, so that every later call raises it too
            is_left = self._skips is None or self._without_lost(read, self._skips)
            self._ahead.popleft()
            self._read_ahead()
            self.consumed += self.global_batch
            self.read_from = read.read_from
            if is_left:
                break
        self.wait_s = time.perf_counter() - start_s
        self._waited_s += self.wait_s if read.had_to_wait else 0.0
        if self._device.type == "cpu":
            return read.batches
        return [_each(batch, lambda tensor: tensor.to(self._device, non_blocking=True)) for batch in read.batches]

    def _front(self) -> _Read:
        """The next global batch. While it waits for shards that are not written yet, that is told."""
        front = self._ahead[0]
        while (
            self._arrival is not None and not self._arrival.order.is_complete and not wait([front], TELL_EVERY_S).done
        ):
            self._tell(f"waiting for data: {len(self.shards)} shards are written, and the next batch needs more")
        return front.result()

    def _without_lost(self, read: _Read, skips: Skips) -> bool:
        """Takes out what all ranks agree to leave out -> whether anything is left of the global batch."""
        lost_G = skips.settle(self.consumed, read.shards_G, read.found)
        rows = self._micro_batch
        first = self._batch_rank * rows * self._accumulation
        for number, batch in enumerate(read.batches):
            blank(batch, lost_G[first + number * rows : first + (number + 1) * rows])
        return not lost_G.all()

    @property
    def skipped(self) -> list[list[int]]:
        """[shard, place from which on it is left out], of every such shard: the rest of the state."""
        return [] if self._skips is None else [list(item) for item in self._skips.since.items()]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the stream."""
        return {"samples_consumed": self.consumed, "skipped": self.skipped, "read_from": self.read_from}

    def entry(self) -> dict[str, Any]:
        """What a start or resume writes under `data`."""
        facts = {**self._facts, "consumed": self.consumed, "skipped": self.skipped, "known": self.new_shards()}
        return ledger.entry(self.shards, **facts, samples_per_step=self.global_batch)

    def drain_events(self, is_log_step: bool) -> list[Event]:
        """What was left out since the last call, how long a preparation was waited for, and on logging steps new shards."""
        events = [Event("incident", fields) for fields in self.news()]
        if is_log_step and (known := self.new_shards()) is not None:
            events.append(Event("data", known))
        return events

    def news(self) -> list[dict[str, Any]]:
        """What was left out since the last call, and how long a preparation was waited for, as the fields of incidents."""
        news = [] if self._skips is None else self._skips.news()
        if self._waited_s >= NEWS_FROM_S:
            what = f"waited {format_duration(self._waited_s)} for data that was still being prepared"
            news.append({"what": what, "waited_s": self._waited_s})
            self._waited_s = 0.0
        return news

    def new_shards(self) -> dict[str, Any] | None:
        """By arrival: all shards that are known, where more are since the last call, as the fields of an event."""
        known = None if self._arrival is None else self._arrival.known()
        is_new, self._told_of = known != self._told_of, known
        return known if is_new else None

    def close(self) -> None:
        """Stops the thread and waits for it. May be called twice; `next()` must not follow."""
        if isinstance(self._reader.source, GrowingFolder):
            self._reader.source.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return {name: change(tensor) for name, tensor in batch.items()}
