"""Shards that cannot be read, left out of a run: a few, agreed by all ranks, remembered by its checkpoints.

By default a bad shard ends the run with its name. `data.max_bad_shards` lets a run leave out that many. The order does not
change: a position of the stream whose sample is in such a shard becomes a row of ids 0 that counts no target. So shapes and the
positions of all other samples stay, and a mean is over the targets that are left.

Agreement. A shard may be bad for one rank alone: another host has a good copy in its cache, or has mapped it before. So before a
global batch is used, all ranks of the run, those of one pipeline too, join the complaints they met in it: 8 bytes are
all-reduced, and complaints are gathered only if there are any. A skipped shard is out from the first position of the global batch
in which any rank met it, and stays out even if it is repaired: otherwise the stream would depend on timing.

The state is one position per shard, `since`. With it the stream is a function of (seed, samples consumed) as before. A global
batch whose samples are all lost is passed over: the samples are consumed, no step is spent on them, and no mean is over nothing.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.data.shards.index import REPAIR, Shard
from windlass.data.shards.mds import Reader
from windlass.data.stream.batch_source import BatchSource, Event
from windlass.data.stream.loader import BatchCut, StreamOrder
from windlass.errors import BadShard, UserError

Complaint = tuple[str, str]
"""What was found of a shard, and what it should be."""


class RankAgreement(Protocol):
    """What a `Runtime` offers to agree by. Both calls are collective."""

    def max_over_ranks(self, value: float) -> float:
        """The largest of all ranks' values."""

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, in their order."""


class OneRank:
    """The `RankAgreement` of a process that reads alone."""

    def max_over_ranks(self, value: float) -> float:
        return value

    def gathered(self, value: Any) -> list[Any]:
        return [value]


class Met(NamedTuple):
    """The shard of each sample of a global batch, [G], and this rank's complaints about those it read."""

    shards_G: np.ndarray
    found: dict[int, Complaint]


class SkippingReader:
    """An order and a reader in one, for a loader: a sample that cannot be read is a row that counts nothing, and is noted down.

    The loader's thread calls `take` and `read`; the thread that takes the batches calls `met`, and alone changes `since`.
    """

    def __init__(self, order: StreamOrder, reader: Reader, num_ids: int, since: Mapping[int, int]):
        """`num_ids`: of a sample."""
        self.since = dict(since)
        self.reader = reader
        self._order = order
        self._nothing = np.zeros(num_ids, np.int32), np.full(num_ids, NOT_COUNTED, np.int32)
        self._bad: dict[int, Complaint] = {}
        self._met: dict[int, Met] = {}
        self._found: dict[int, Complaint] = {}  # of the global batch that is being read

    def facts(self) -> dict[str, Any]:
        return self._order.facts()

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def take(self, start: int, count: int) -> np.ndarray:
        rows_N2 = self._order.take(start, count)
        self._found = {}
        self._met[start] = Met(rows_N2[:, 0], self._found)
        return rows_N2

    def name(self, number: int) -> str:
        return self.reader.name(number)

    def read(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `row` of shard `number`, or ids 0 that are not counted where the shard is out or cannot be read."""
        if number not in self.since and number not in self._bad:
            try:
                ids, labels = self.reader.read(number, row)
                if len(ids) == len(self._nothing[0]):
                    return ids, labels
                given = f"sample {row} of {self.name(number)} holds {len(ids)} ids"
                self._bad[number] = (given, f"every sample of this set holds {len(self._nothing[0])}")
            except BadShard as error:
                self._bad[number] = (error.given, error.rule)
        if number in self._bad:
            self._found[number] = self._bad[number]
        return self._nothing

    def ends(self, number: int, row: int) -> np.ndarray | None:
        """The ends that the reader gives; a sample that is left out is one document."""
        is_out = number in self.since or number in self._bad
        return np.zeros(len(self._nothing[0]), bool) if is_out else self.reader.ends(number, row)

    def percent(self, number: int, row: int) -> np.ndarray | None:
        """The shares that the reader gives; what is left out has no target."""
        is_out = number in self.since or number in self._bad
        return None if is_out else self.reader.percent(number, row)

    def met(self, start: int) -> Met:
        """What was met in the global batch that begins at `start`, which has been read."""
        return self._met[start]

    def forget(self, start: int) -> None:
        del self._met[start]


class SkippingStream:
    """A batch source without the rows that any rank cannot read. `next()` is collective."""

    def __init__(self, source: BatchSource, reader: SkippingReader, cut: BatchCut, limit: int, ranks: RankAgreement):
        """`source` reads through `reader`. Raises UserError where the run has left out more than `limit` shards already."""
        self.consumed, self.wait_s = source.consumed, 0.0
        self._source, self._reader, self._cut, self._limit, self._ranks = source, reader, cut, limit, ranks
        self._batches: list[Batch] | None = None  # stays where agreeing raises, so that every later call raises it too
        self._events: list[Event] = []

    @property
    def shards(self) -> Sequence[Shard]:
        return self._source.shards

    def next(self) -> list[Batch]:
        """The next global batch that is not lost whole. Raises BadShard, on all ranks, when more than `limit` shards are bad."""
        start_s = time.perf_counter()
        while True:
            if self._batches is None:
                self._batches = self._source.next()
            batches, lost_G = self._batches, self._agree(self.consumed)
            self._reader.forget(self.consumed)
            self._batches = None
            self.consumed += self._cut.global_batch
            for at, batch in zip(self._cut.starts(), batches, strict=True):
                blank(batch, lost_G[at : at + self._cut.micro_batch])
            if not lost_G.all():
                break
        self.wait_s = time.perf_counter() - start_s
        return batches

    def _agree(self, start: int) -> np.ndarray:
        """Which rows of the global batch that begins at `start` are lost, [G] bool, on all ranks alike."""
        since, met = self._reader.since, self._reader.met(start)
        new = {number: complaint for number, complaint in self._joined(met.found).items() if number not in since}
        if new:
            self._check_limit(new)
        for number in sorted(new):
            since[number] = start
            self._events.append(self._left_out(number, start, new[number]))
        lost_G = np.isin(met.shards_G, list(since))
        if lost_G.all():
            what = f"all {len(lost_G)} samples from position {start} on are in shards that are left out: passed over"
            passed = {"from_sample": start, "samples": len(lost_G)}
            self._events.append(Event("incident", {"what": what, "passed": passed}))
        return lost_G

    def _joined(self, found: dict[int, Complaint]) -> dict[int, Complaint]:
        """The complaints of all ranks, the same on each; of several about one shard the first rank's. Collective."""
        if not self._ranks.max_over_ranks(len(found)):
            return {}
        joined: dict[int, Complaint] = {}
        for of_rank in self._ranks.gathered(found):
            joined = of_rank | joined
        return joined

    def _check_limit(self, new: dict[int, Complaint]) -> None:
        reader = self._reader.reader
        total, of = len(self._reader.since) + len(new), len(reader.shards)
        if total <= self._limit and total < of:
            return
        complaints = "; ".join(f"{given} ({rule})" for given, rule in new.values())
        raise BadShard(
            f"{total} of {of} shards of {reader.source.where} cannot be read; now {complaints}",
            f"a run leaves out data.max_bad_shards={self._limit} at most, and never all",
            f"{REPAIR}; or set data.max_bad_shards to {total} or more: the run goes on from its last checkpoint",
        )

    def _left_out(self, number: int, start: int, complaint: Complaint) -> Event:
        reader, (given, rule) = self._reader.reader, complaint
        samples = reader.shard_samples[number]
        what = (
            f"{reader.name(number)} is left out from sample {start} on, {len(self._reader.since)} of "
            f"data.max_bad_shards={self._limit}; its {samples} samples per epoch count no target: {given}; {rule}"
        )
        fields = {"what": what, "left_out": {"shard": number, "from_sample": start, "samples": samples}}
        return Event("incident", fields)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: also [shard, position from which on it is left out], of every such shard."""
        skipped = [list(item) for item in self._reader.since.items()]
        return {**self._source.state(), "samples_consumed": self.consumed, "skipped": skipped}

    def entry(self) -> dict[str, Any]:
        skipped = [list(item) for item in self._reader.since.items()]
        return {**self._source.entry(), **({"left_out": skipped} if skipped else {})}

    def drain_events(self, is_log_step: bool) -> list[Event]:
        """Incidents of shards left out and of global batches passed over, then the source's events."""
        events, self._events = self._events, []
        return events + self._source.drain_events(is_log_step)

    def close(self) -> None:
        self._source.close()


def check_limit_on_resume(since: Mapping[int, int], limit: int, reader: Reader) -> None:
    """Raises UserError where a run has left out more shards than it now may."""
    if len(since) > limit:
        raise UserError(
            f"data.max_bad_shards={limit}, and the checkpoint has left out {len(since)} "
            f"({', '.join(map(reader.name, since))})",
            "a shard that was left out stays out, or the stream would change",
            f"set data.max_bad_shards to {len(since)} or more, or begin another run.directory",
        )


def blank(batch: Batch, lost_N: np.ndarray) -> None:
    """Clears the rows of the samples that are lost, in place: this rank could perhaps read them. Such a row is one document."""
    if not lost_N.any():
        return
    rows = np.flatnonzero(np.repeat(lost_N, len(batch["input_ids"]) // len(lost_N)))
    batch["input_ids"][rows], batch["targets"][rows] = 0, NOT_COUNTED
    if "documents" in batch:
        batch["documents"][rows] = batch["input_ids"].shape[1]
        batch["documents"][rows, 0] = 0
