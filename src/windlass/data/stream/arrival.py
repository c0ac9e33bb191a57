"""The stream of a run whose first epoch is the order of arrival: what it may read, and the proof of what it has read.

Shards may still be written. A global batch is read when all places up to its end can be told, which is the same moment for every
rank (`growing` waits for it). The proof is a chain: the hash over the shards 0 .. n, which no later shard changes. A checkpoint
keeps the n that its samples can come from and the chain there; a run that goes on compares it with what lies there then, in an
unfinished preparation or a finished one, on this host or another.
"""

from typing import Any, NamedTuple

from windlass.data.packing import Borders
from windlass.data.shards.growing import GrowingFolder
from windlass.data.shards.mds import Reader
from windlass.data.stream.ledger import chain
from windlass.data.stream.order import Order
from windlass.errors import UserError


class Past(NamedTuple):
    """What a checkpoint has read: so many shards, and their chain. `refused`: what is raised where they are others."""

    num_shards: int
    shards: str
    refused: UserError


class Arrival:
    """Used by the thread that reads ahead; others may ask for `known`."""

    def __init__(self, reader: Reader, seed: int, shuffle_window: int, past: Past | None = None):
        self._reader = reader
        self._source = reader.source if isinstance(reader.source, GrowingFolder) else None
        self.order = Order(
            reader.shard_samples,
            seed,
            shuffle_window,
            arrival=True,
            is_complete=self._source is None or self._source.is_complete,
        )
        self._chains = [""]  # [n]: of the first n shards
        self._past = past
        self._link()

    def _link(self) -> None:
        for shard in self._reader.shards[len(self._chains) - 1 : len(self._reader.shard_samples)]:
            self._chains.append(chain([shard], self._chains[-1]))
        if self._past is None or (self._past.num_shards >= len(self._chains) and not self.order.is_complete):
            return
        if self._past.num_shards >= len(self._chains) or self._chains[self._past.num_shards] != self._past.shards:
            raise self._past.refused
        self._past = None

    def wait_for(self, end: int) -> bool:
        """Until all places before `end` can be told -> whether they could not at once. Raises UserError, BadShard."""
        if self._source is None or self.order.is_complete:
            return False
        source = self._source

        def is_enough() -> bool:
            self._grow(source)
            return self._past is None and (self.order.end is None or end <= self.order.end)

        if is_enough():
            return False
        source.read()
        if is_enough():
            return False
        source.wait_for(is_enough)
        self._grow(source)
        return True

    def _grow(self, source: GrowingFolder) -> None:
        is_complete = source.is_complete  # asked first: the shards are all there then
        if self.order.is_complete or (len(source.shards) == len(self._reader.shard_samples) and not is_complete):
            return
        self._reader.grow()
        self.order.grow(self._reader.shard_samples, is_complete)
        self._link()

    def read_before(self, place: int) -> dict[str, Any]:
        """The shards that the places before `place` can come from, as a checkpoint keeps them."""
        num_shards = self.order.shards_before(place)
        return {"num_shards": num_shards, "shards": self._chains[num_shards]}

    def known(self) -> dict[str, Any]:
        """All that are there, for the events of a run."""
        is_complete, num_shards = self.order.is_complete, len(self._chains) - 1
        return {"num_shards": num_shards, "shards": self._chains[num_shards], "is_complete": is_complete}

    def borders(self, borders: Borders, end: int) -> Borders:
        """`borders` with room for the documents of any sample before `end`. A power of two, so that shapes seldom change, and
        of the place alone, so that all ranks find the same."""
        if self._source is None:
            return borders
        most = self._source.journal.most_documents[self.order.shards_before(end) - 1]
        return borders._replace(max_documents=1 << (most - 1).bit_length())
