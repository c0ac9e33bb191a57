"""An order of several sources: `shares` says which source has which position, and the order of that source which sample.

Each source has an order and epochs of its own, and its samples follow it without a gap. A small source with a large share
comes round often, a large one perhaps never: nothing is dropped and nothing ends.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from windlass.data.stream.mixture_shares import Shares
from windlass.data.stream.order import Order


class Mixture:
    """Positions of the stream -> (shard, row), as `Order` does, for shards that belong to several sources. All are there: sources
    are written one behind the other, and the stream takes from each from its first samples on.

    `shard_samples[s]`: samples in shard s; `source_shards[k]`: how many shards source k has, one source behind the other;
    `digests[k]`: of them, kept in checkpoints."""

    def __init__(
        self,
        shard_samples: Sequence[int],
        source_shards: Sequence[int],
        shares: Shares,
        seed: int,
        shuffle_window: int,
        *,
        written: bool = False,
        digests: Sequence[str] = (),
    ):
        assert sum(source_shards) == len(shard_samples) and len(source_shards) == shares.num_sources
        self.num_samples, self.shares, self._digests = int(sum(shard_samples)), shares, list(digests)
        first_epoch = {"first_epoch": "written"} if written else {}
        self._facts = {
            "seed": seed,
            "shuffle_window": shuffle_window,
            **first_epoch,
            "source_shards": list(source_shards),
        }
        self._first_shards = np.cumsum([0, *source_shards]).tolist()
        self._orders = [
            Order(shard_samples[first:end], seed_of(seed, k), shuffle_window, written=written)
            for k, (first, end) in enumerate(zip(self._first_shards, self._first_shards[1:]))
        ]

    def facts(self) -> dict[str, Any]:
        """What this order is a function of, besides the shards, as the run's events keep it (see `ledger`)."""
        return {**self._facts, "shares": self.shares.facts()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: with other shares, a resumed run goes on in each source where it was."""
        return {"shares": {**self.shares.facts(), "sources": self._digests}}

    def take(self, start: int, count: int) -> np.ndarray:
        """Samples start..start+count of the stream -> [count, 2] int64: (shard, row). Any start from the first stage's on."""
        sources_N = self.shares.sources(start, count)
        rows_N2 = np.empty((count, 2), np.int64)
        for k, (first, last) in enumerate(zip(*(self.shares.taken(end).tolist() for end in (start, start + count)))):
            rows_M2 = self._orders[k].take(first, last - first)
            rows_M2[:, 0] += self._first_shards[k]
            rows_N2[sources_N == k] = rows_M2
        return rows_N2


def seed_of(seed: int, source: int) -> int:
    """Sources of equal size must not be permuted alike."""
    return xxhash.xxh64_intdigest(f"{seed} {source}".encode())
