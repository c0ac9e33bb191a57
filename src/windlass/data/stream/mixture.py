"""Several sources in fixed shares: which source has which position of the training stream. Arithmetic only, like `order`.

The positions of the stream are dealt out by a pattern that repeats: source k owns c_k of its L slots, so over every L samples the
shares c_k / L are exact. Inside the pattern the slots are spread as evenly as can be: after any n samples source k has had
n c_k / L of them, give or take less than one, so any window of the stream holds its share within two samples. That is Tijdeman's
solution of the chairman assignment problem (Discrete Mathematics 32, 1980): among the sources that may have another slot, the
one goes first that would be late soonest.

Each source has an order and epochs of its own, and its samples follow it without a gap. A small source with a large share
comes round often, a large one perhaps never: nothing is dropped and nothing ends.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from windlass.data.stream.order import Order

LONGEST_PATTERN: Final = 1 << 14
"""Slots of a pattern. Weights with a smaller common denominator are exact; others are off by at most 1 / 2^14 of the stream."""


class Shares(NamedTuple):
    """Of a set whose sources are mixed: the source of each shard, and the weight of each source."""

    shard_sources: list[int]
    weights: list[float]

    def lines(self, names: Sequence[str], shard_samples: Sequence[int], num_samples: int) -> list[str]:
        """Per source what was asked for, what it gets, and how often its samples come in a stream of `num_samples`."""
        slots, asked = slots_of(self.weights), sum(self.weights)
        found = np.bincount(self.shard_sources, shard_samples, len(names))
        return [
            f"{name}: asked {100 * weight / asked:.4g} %, gets {100 * own / sum(slots):.4g} % ({own} of {sum(slots)} samples), "
            f"{num_samples * own / sum(slots) / size:.2f} epochs of {int(size)} samples"
            for name, weight, own, size in zip(names, self.weights, slots, found, strict=True)
        ]


def slots_of(weights: Sequence[float]) -> list[int]:
    """Slots per source of one pattern, at least 1 each; they add up to its length. Weights are positive, of any sum."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = lcm(*(share.denominator for share in shares))
    if length <= LONGEST_PATTERN:
        return [int(share * length) for share in shares]
    slots = [max(1, int(share * LONGEST_PATTERN)) for share in shares]
    largest_rests = sorted(range(len(shares)), key=lambda k: slots[k] - shares[k] * LONGEST_PATTERN)
    for k in largest_rests[: max(0, LONGEST_PATTERN - sum(slots))]:
        slots[k] += 1
    return slots


def pattern_of(slots: Sequence[int]) -> np.ndarray:
    """The source of each slot, [L] int64. Every prefix holds each source within one of its share."""
    length, num_sources = sum(slots), len(slots)
    if num_sources == 1:
        return np.zeros(1, np.int64)
    slots_K = np.asarray(slots, np.int64)
    given_K = np.zeros(num_sources, np.int64)
    pattern_L = np.empty(length, np.int64)
    slack = 2 * num_sources - 2  # all below is multiplied by slack * length, to stay in integers
    for n in range(1, length + 1):
        may_K = (n * slots_K - given_K * length) * slack >= length
        # source k is late once its share runs ahead of it by more than 1 - 1/slack
        late_K = np.where(may_K, ((given_K + 1) * slack - 1) * length // (slots_K * slack), np.iinfo(np.int64).max)
        pattern_L[n - 1] = int(late_K.argmin())
        given_K[pattern_L[n - 1]] += 1
    return pattern_L


class Mixture:
    """Places of the stream -> (shard, row), as `Order` does, for shards that belong to several sources. All are there: sources
    are written one behind the other, and the stream takes from each from its first samples on.

    `shard_samples[s]`: samples in shard s; `shard_sources[s]`: which source it belongs to; `weights[k]`: of source k."""

    def __init__(
        self,
        shard_samples: Sequence[int],
        shard_sources: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle_window: int,
        *,
        written: bool = False,
    ):
        assert len(shard_samples) == len(shard_sources) and set(shard_sources) == set(range(len(weights)))
        self.num_samples = int(sum(shard_samples))
        first_epoch = {"first_epoch": "written"} if written else {}
        self._facts = {"seed": seed, "shuffle_window": shuffle_window, "weights": list(weights), **first_epoch}
        self._slots = slots_of(weights)
        self._pattern_L = pattern_of(self._slots)
        self._before_LK = np.zeros((len(self._pattern_L) + 1, len(weights)), np.int64)  # slots of k before slot l
        np.cumsum(self._pattern_L[:, None] == np.arange(len(weights)), 0, out=self._before_LK[1:])
        self._shards = [np.flatnonzero(np.asarray(shard_sources) == k) for k in range(len(weights))]
        self._orders = [
            Order([shard_samples[shard] for shard in shards.tolist()], _seed(seed, k), shuffle_window, written=written)
            for k, shards in enumerate(self._shards)
        ]

    def facts(self) -> dict[str, Any]:
        """What this order is a function of, besides the shards, as the run's events keep it (see `ledger`)."""
        return {**self._facts, "source_shards": [len(shards) for shards in self._shards]}

    def sources(self, start: int, count: int) -> np.ndarray:
        """The source of places start..start+count, [count] int64."""
        return self._pattern_L[np.arange(start, start + count) % len(self._pattern_L)]

    def taken(self, end: int) -> np.ndarray:
        """Samples of each source among the first `end` places, [K] int64."""
        rounds, rest = divmod(end, len(self._pattern_L))
        return rounds * np.asarray(self._slots, np.int64) + self._before_LK[rest]

    def take(self, start: int, count: int) -> np.ndarray:
        """Places start..start+count of the stream -> [count, 2] int64: (shard, row). Any start >= 0, any count."""
        sources_N = self.sources(start, count)
        places_N2 = np.empty((count, 2), np.int64)
        for k, (first, last) in enumerate(zip(self.taken(start).tolist(), self.taken(start + count).tolist())):
            places_M2 = self._orders[k].take(first, last - first)
            places_M2[:, 0] = self._shards[k][places_M2[:, 0]]
            places_N2[sources_N == k] = places_M2
        return places_N2


def _seed(seed: int, source: int) -> int:
    """Sources of equal size must not be permuted alike."""
    return xxhash.xxh64_intdigest(f"{seed} {source}".encode())


def shares_of(source_shards: Sequence[int], weights: list[float] | None) -> Shares | None:
    """The mixture by `weights` of a set that holds source_shards[k] shards of source k; None without weights."""
    return None if weights is None else Shares([k for k, n in enumerate(source_shards) for _ in range(n)], weights)
