"""Several sources in fixed shares, in lanes: each host reads its own part of every source. Arithmetic only, like `order`.

The stream takes a block from each lane in turn (`lane_order`), and a lane is a mixture of its own (`mixture`): it has the shares
of the whole, and a part of each source. With one pattern for the whole stream a lane might have no slot of a source at all. So
each lane has one, and begins it elsewhere, lane j of J behind j / J of it: a batch holds the shares too, within two samples in
what was measured. Two lanes, blocks of 2, three times as much of a as of b (a a b a):

    position     0 1 | 2 3 || 4 5 | 6 7 ||
    lane         0 0 | 1 1 || 0 0 | 1 1 ||
    source       a a | b a || b a | a a ||
    its sample   0 1 | 0 0 || 0 2 | 1 2 ||        of the lane's part

In each epoch of a source the samples of its shuffled shards, one shard behind the other, are cut into as many equal
parts as there are lanes, to the sample; a lane permutes its part inside windows of shards. So of H hosts each reads S / H of S
shards per epoch, and two more per lane, where parts meet. Every sample comes once per epoch of its lane, and a source's epochs in
two lanes begin less than a round of the pattern apart.
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from windlass.data.stream.mixture import seed_of
from windlass.data.stream.mixture_shares import Shares, Stage
from windlass.data.stream.order import Windows, permutation


class LaneShares:
    """The shares of each lane. `stages`: at positions of the stream. `taken_JK`: samples that each lane has had of each source
    before the first; none, if not given."""

    def __init__(
        self, stages: Sequence[Stage], lanes: int, block: int, taken_JK: Sequence[Sequence[int]] | None = None
    ):
        assert lanes >= 1 and block >= 1
        self.lanes, self.block, self._stages = lanes, block, list(stages)
        taken: Sequence[Sequence[int] | None] = [None] * lanes if taken_JK is None else taken_JK
        self.of = [Shares(self._in_lane(lane), taken[lane], Fraction(lane, lanes)) for lane in range(lanes)]

    def index(self, position: int, lane: int) -> int:
        """How many positions of the lane come before `position`."""
        rounds, rest = divmod(position, self.block * self.lanes)
        return rounds * self.block + min(max(rest - lane * self.block, 0), self.block)

    def taken(self, position: int) -> np.ndarray:
        """Samples that each lane has had of each source before `position`, [J, K] int64."""
        return np.stack([shares.taken(self.index(position, lane)) for lane, shares in enumerate(self.of)])

    def facts(self) -> dict[str, Any]:
        """The shares as JSON."""
        first_JK = [shares.facts()["taken"] for shares in self.of]
        stages = [[start, list(weights)] for start, weights in self._stages]
        taken = np.sum(first_JK, 0).tolist()
        return {"lanes": [self.lanes, self.block], "shares": {"stages": stages, "taken": taken, "of_lanes": first_JK}}

    def _in_lane(self, lane: int) -> list[Stage]:
        """At indices of the lane, without those that end before the lane's next position."""
        found = {self.index(stage.start, lane): stage.weights for stage in self._stages}
        return [Stage(start, weights) for start, weights in found.items()]


class LanePart:
    """What a lane has of a source, epoch after epoch: an equal part of its shuffled samples."""

    def __init__(self, shard_samples: np.ndarray, seed: int, shuffle_window: int, lane: int, lanes: int):
        total = int(shard_samples.sum())
        self._first, self._end = total * lane // lanes, total * (lane + 1) // lanes
        self._shard_samples, self._seed, self._shuffle_window = shard_samples, seed, shuffle_window
        self._number, self._epoch = 1 + lane * (len(shard_samples) + 1), -1

    def take(self, start: int, count: int) -> np.ndarray:
        """The lane's samples start..start+count -> [count, 2] int64: (shard of the source, row)."""
        size, parts = self._end - self._first, [np.empty((0, 2), np.int64)]
        while count > 0:
            epoch, position = divmod(start, size)
            if epoch != self._epoch:
                self._enter_epoch(epoch)
            parts.append(self._windows.take(position, min(count, size - position)))
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def _enter_epoch(self, epoch: int) -> None:
        shards_S = permutation(self._seed, epoch, 0, len(self._shard_samples))
        ends_S = np.cumsum(self._shard_samples[shards_S])
        own = slice(np.searchsorted(ends_S, self._first, "right"), np.searchsorted(ends_S, self._end, "left") + 1)
        begins_N = ends_S[own] - self._shard_samples[shards_S[own]]
        first_rows_N = np.maximum(self._first - begins_N, 0)
        rows = first_rows_N, np.minimum(ends_S[own], self._end) - begins_N - first_rows_N
        given = shards_S[own], self._shard_samples, self._shuffle_window, self._number, rows
        self._epoch, self._windows = epoch, Windows(self._seed, epoch, *given)


class MixedLanes:
    """Positions of the stream -> (shard, row), as `Mixture`. `own`: of each call's positions those that this rank reads; the
    others are -1, and cost nothing. All, if not given. Each source has as many samples as there are lanes, or more."""

    def __init__(
        self,
        shard_samples: Sequence[int],
        source_shards: Sequence[int],
        shares: LaneShares,
        seed: int,
        shuffle_window: int,
        *,
        own: range | None = None,
        digests: Sequence[str] = (),
    ):
        assert sum(source_shards) == len(shard_samples)
        self.num_samples, self._shares, self._own, self._digests = int(sum(shard_samples)), shares, own, list(digests)
        self._facts = {"seed": seed, "shuffle_window": shuffle_window, "source_shards": list(source_shards)}
        self._first_shards = np.cumsum([0, *source_shards]).tolist()
        sizes = np.asarray(shard_samples, np.int64)
        self._parts = [
            [
                LanePart(sizes[first:end], seed_of(seed, k), shuffle_window, lane, shares.lanes)
                for lane in range(shares.lanes)
            ]
            for k, (first, end) in enumerate(pairwise(self._first_shards))
        ]

    def facts(self) -> dict[str, Any]:
        """What this order is a function of, besides the shards, as the run's events keep it (see `ledger`)."""
        return {**self._facts, **self._shares.facts()}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: a resumed run goes on in each source and lane where it was."""
        facts = self._shares.facts()
        return {**facts, "shares": {**facts["shares"], "sources": self._digests}}

    def take(self, start: int, count: int) -> np.ndarray:
        """Samples start..start+count of the stream -> [count, 2] int64: (shard, row). Any start from the first stage's on."""
        own = range(count) if self._own is None else self._own
        assert own.stop <= count
        rows_N2, first = np.full((count, 2), -1, np.int64), start + own.start
        lanes_N = np.arange(first, start + own.stop) // self._shares.block % self._shares.lanes
        for lane in np.unique(lanes_N).tolist():
            at_M = np.flatnonzero(lanes_N == lane)  # which are a stretch of the lane
            shares, index = self._shares.of[lane], self._shares.index(first, lane)
            sources_M, taken_K = shares.sources(index, len(at_M)), shares.taken(index)
            for k in np.unique(sources_M).tolist():
                own_L = at_M[sources_M == k]
                found_L2 = self._parts[k][lane].take(int(taken_K[k]), len(own_L))
                found_L2[:, 0] += self._first_shards[k]
                rows_N2[own.start + own_L] = found_L2
        return rows_N2


def spread_over_lanes(taken_K: np.ndarray, lanes: int) -> list[list[int]]:
    """What each lane has had of each source, where only the sums are known: [J][K]."""
    found: list[list[int]] = np.diff(np.arange(lanes + 1)[:, None] * taken_K // lanes, axis=0).tolist()
    return found
