"""The training stream in lanes: an order of which each host reads its own part of the shards. Arithmetic only, like `order`.

In the plain order a window's samples are spread over the whole batch, so every host reads every shard once per epoch. With
`lanes` the shards of an epoch are shuffled and dealt out to as many lanes; a lane has windows of its own, and the
stream takes a block from each in turn. Three lanes, with blocks of 2 and a global batch of 6:

    position   0 1 | 2 3 | 4 5 || 6 7 | 8 9 | 10 11 ||        a rank's slice of a batch is a slice of its own lanes,
    lane       0 0 | 1 1 | 2 2 || 0 0 | 1 1 |  2  2 ||        on any number of ranks that divides their number

A block is the global batch by the lanes. So of H hosts each reads S / H of S shards per epoch. All lanes stop at the same block;
what is left of each, at most a shard and a block more than of the shortest, comes last, lane by lane. Every sample comes once
per epoch and follows from (seed, position, lanes, block). With another global batch the stream stays, and hosts read more shards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from windlass.data.stream.order import Windows, permutation


class LaneOrder:
    """Positions of the stream -> (shard, row), as `Order`. `own`: of each call's positions those that this rank reads; the others
    are -1, and cost nothing. All, if not given."""

    def __init__(
        self,
        shard_samples: Sequence[int],
        seed: int,
        shuffle_window: int,
        lanes: int,
        block: int,
        own: range | None = None,
    ):
        assert 1 <= lanes <= len(shard_samples) and block >= 1
        self.seed, self.shuffle_window, self.lanes, self.block = seed, shuffle_window, lanes, block
        self._shard_samples, self._own, self._epoch = np.asarray(shard_samples, np.int64), own, -1
        self.num_samples = int(self._shard_samples.sum())

    def facts(self) -> dict[str, Any]:
        """What this order is a function of, besides the shards, as the run's events keep it (see `ledger`)."""
        return {"seed": self.seed, "shuffle_window": self.shuffle_window, "lanes": [self.lanes, self.block]}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: a run that goes on with another global batch keeps its block."""
        return {"lanes": [self.lanes, self.block]}

    def _enter_epoch(self, epoch: int) -> None:
        shards, first = permutation(self.seed, epoch, 0, len(self._shard_samples)), 1
        self._epoch, self._windows = epoch, list[Windows]()
        for lane in range(self.lanes):
            own = shards[lane :: self.lanes]
            self._windows.append(Windows(self.seed, epoch, own, self._shard_samples, self.shuffle_window, first))
            first += -(-len(own) // self.shuffle_window)
        self._samples = np.array([windows.num_samples for windows in self._windows])
        self._even = int(self._samples.min()) // self.block * self.block  # of each lane, block by block
        self._ends = self._even * self.lanes + np.cumsum(self._samples - self._even)  # of each lane's rest

    def take(self, start: int, count: int) -> np.ndarray:
        """Positions start..start+count of the stream -> [count, 2] int64: (shard, row). Any start >= 0 and count."""
        own = range(count) if self._own is None else self._own
        assert own.stop <= count
        rows_N2 = np.full((count, 2), -1, np.int64)
        at = own.start
        while at < own.stop:
            epoch, position = divmod(start + at, self.num_samples)
            if epoch != self._epoch:
                self._enter_epoch(epoch)
            num = min(own.stop - at, self.num_samples - position)
            self._fill(rows_N2[at : at + num], position)
            at += num
        return rows_N2

    def _fill(self, rows_N2: np.ndarray, position: int) -> None:
        """The rows from `position` of this epoch on. Of a stretch of the stream, a lane's samples are a stretch of the lane."""
        positions_N = np.arange(position, position + len(rows_N2))
        even = self._even * self.lanes
        blocks_N = positions_N // self.block
        rest_N = np.minimum(np.searchsorted(self._ends, positions_N, "right"), self.lanes - 1)
        lanes_N = np.where(positions_N < even, blocks_N % self.lanes, rest_N)
        inside_N = np.where(
            positions_N < even,
            blocks_N // self.lanes * self.block + positions_N % self.block,
            positions_N - self._ends[rest_N] + self._samples[rest_N],
        )
        for lane in np.unique(lanes_N):
            is_lane_N = lanes_N == lane
            inside_M = inside_N[is_lane_N]
            rows_N2[is_lane_N] = self._windows[lane].take(int(inside_M[0]), len(inside_M))
