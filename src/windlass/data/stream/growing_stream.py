"""The stream of a run whose first epoch is in written order: what it may read yet, and the proof of what it has read.

Shards may still be written. A global batch is read when all positions up to its end are known, which is the same moment for
every rank (`GrowingFolder` waits for it). The proof is a chain: the hash over the shards 0 .. n, which no later shard changes. A
checkpoint keeps the n that its samples can come from, and the chain there. A run that goes on compares it with the shards it
finds, in an unfinished preparation or a finished one, on this host or another.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from windlass.data.batch_fields import Batch
from windlass.data.packing import Borders
from windlass.data.shards.growing import GrowingFolder
from windlass.data.shards.index import Shard
from windlass.data.shards.mds import Reader, ShardSource
from windlass.data.stream.batch_source import Event
from windlass.data.stream.ledger import chain
from windlass.data.stream.loader import Loader
from windlass.data.stream.order import Order
from windlass.errors import UserError
from windlass.units import format_duration

LOG_EVERY_S: Final = 10.0  # while the next batch waits for shards that are not written yet
WAITED_FROM_S: Final = 1.0  # shorter waits are logged when they add up to it


def wait_for_first_shard(source: ShardSource) -> ShardSource:
    """Returns `source` once it has a shard. Raises UserError, BadShard."""
    if isinstance(source, GrowingFolder):
        source.wait_for(lambda: len(source.shards) > 0)
    return source


class WrittenOrder:
    """An `Order` whose first epoch is in written order. `take` waits for shards that are not written yet.

    The loader's thread uses it. Other threads may call `known` and `read_before`.
    """

    def __init__(
        self, reader: Reader, seed: int, shuffle_window: int, read_from: Mapping[str, Any] | None, refused: UserError
    ):
        """`read_from`: what the checkpoint has read, by its `read_before`. `refused` is raised where the shards are others."""
        self._reader = reader
        self._source = reader.source if isinstance(reader.source, GrowingFolder) else None
        is_complete = self._source is None or self._source.is_complete
        self._order = Order(reader.shard_samples, seed, shuffle_window, written=True, is_complete=is_complete)
        self._chains = [""]  # [n]: of the first n shards
        self._read_from, self._refused = read_from, refused
        self._end = 0
        self.waited_for: set[int] = set()
        """Starts of the global batches whose shards were not all there when their turn came to be read."""
        self._extend_chains()

    @property
    def is_complete(self) -> bool:
        """Whether all shards are known."""
        return self._order.is_complete

    def facts(self) -> dict[str, Any]:
        return self._order.facts()

    def state(self) -> dict[str, Any]:
        return self._order.state()

    def take(self, start: int, count: int) -> np.ndarray:
        """What `Order.take` gives, once all positions up to the end are known. Raises UserError, BadShard."""
        self._end = start + count
        if self._wait_for(self._end):
            self.waited_for.add(start)
        return self._order.take(start, count)

    def _extend_chains(self) -> None:
        for shard in self._reader.shards[len(self._chains) - 1 : len(self._reader.shard_samples)]:
            self._chains.append(chain([shard], self._chains[-1]))
        if self._read_from is None:
            return
        num_shards = self._read_from["num_shards"]
        if num_shards >= len(self._chains) and not self.is_complete:
            return
        if num_shards >= len(self._chains) or self._chains[num_shards] != self._read_from["shards"]:
            raise self._refused
        self._read_from = None

    def _wait_for(self, end: int) -> bool:
        """Returns when all positions before `end` are known, and whether that took a wait."""
        if self._source is None or self.is_complete:
            return False
        source = self._source

        def is_enough() -> bool:
            self._grow(source)
            return self._read_from is None and (self._order.end is None or end <= self._order.end)

        if is_enough():
            return False
        source.read()
        if is_enough():
            return False
        source.wait_for(is_enough)
        self._grow(source)
        return True

    def _grow(self, source: GrowingFolder) -> None:
        is_complete = source.is_complete  # read first: if it is true, all shards are listed
        if self.is_complete or (len(source.shards) == len(self._reader.shard_samples) and not is_complete):
            return
        self._reader.grow()
        self._order.grow(self._reader.shard_samples, is_complete)
        self._extend_chains()

    def read_before(self, position: int) -> dict[str, Any]:
        """The shards that the positions before `position` can come from, as a checkpoint keeps them."""
        num_shards = self._order.shards_before(position)
        return {"num_shards": num_shards, "shards": self._chains[num_shards]}

    def known(self) -> dict[str, Any]:
        """All shards that are known, for the run's events."""
        is_complete, num_shards = self.is_complete, len(self._chains) - 1
        return {"num_shards": num_shards, "shards": self._chains[num_shards], "is_complete": is_complete}

    def borders(self, borders: Borders) -> Borders:
        """`borders` with room for the documents of any sample up to the end of the global batch last taken.

        The room is a power of two, so that shapes seldom change, and follows from the position alone, so that all ranks agree.
        """
        if self._source is None:
            return borders
        most = self._source.journal.most_documents[self._order.shards_before(self._end) - 1]
        return borders._replace(max_documents=1 << (most - 1).bit_length())

    def close(self) -> None:
        """Ends a wait that is under way."""
        if self._source is not None:
            self._source.close()


class GrowingStream:
    """A loader over a `WrittenOrder`: logs waits and new shards, and keeps what has been read for the checkpoint."""

    def __init__(
        self, loader: Loader, order: WrittenOrder, read_from: Mapping[str, Any] | None, log: Callable[[str], None]
    ):
        self.wait_s = 0.0
        self._loader, self._order, self._log = loader, order, log
        self._read_from = read_from
        self._waited_s = 0.0
        self._logged: dict[str, Any] | None = None

    @property
    def consumed(self) -> int:
        return self._loader.consumed

    @property
    def shards(self) -> Sequence[Shard]:
        return self._loader.shards

    def next(self) -> list[Batch]:
        """The loader's next batch. Logs a line every `LOG_EVERY_S` while it waits for shards that are not written yet."""
        start_s, start = time.perf_counter(), self.consumed
        while not self._order.is_complete and not self._loader.is_ready(LOG_EVERY_S):
            self._log(f"waiting for data: {len(self.shards)} shards are written, and the next batch needs more")
        batches = self._loader.next()
        self.wait_s = time.perf_counter() - start_s
        if start in self._order.waited_for:
            self._order.waited_for.remove(start)
            self._waited_s += self.wait_s
        self._read_from = self._order.read_before(self.consumed)
        return batches

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: also the shards that the samples so far can come from."""
        return {**self._loader.state(), "read_from": self._read_from}

    def entry(self) -> dict[str, Any]:
        """The loader's entry, with a chain over the shards that are known instead of a hash over all."""
        self._logged = self._order.known()
        return {**self._loader.entry(), **self._logged}

    def drain_events(self, is_log_step: bool) -> list[Event]:
        """How long the run waited for data; and on logging steps all known shards, where there are more than last time."""
        events = self._loader.drain_events(is_log_step)
        if self._waited_s >= WAITED_FROM_S:
            what = f"waited {format_duration(self._waited_s)} for data that was still being prepared"
            events.append(Event("incident", {"what": what, "waited_s": self._waited_s}))
            self._waited_s = 0.0
        if is_log_step and (known := self._order.known()) != self._logged:
            self._logged = known
            events.append(Event("data", known))
        return events

    def close(self) -> None:
        self._order.close()
        self._loader.close()
