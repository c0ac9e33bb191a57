"""Several sources in fixed shares: which source has which position of the training stream. Arithmetic only, like `order`.

The positions of the stream are dealt out by a pattern that repeats: source k owns c_k of its L slots, so over every L samples the
shares c_k / L are exact. Inside the pattern the slots are spread as evenly as can be: after any n samples source k has had
n c_k / L of them, give or take less than one, so any window of the stream holds its share within two samples. That is Tijdeman's
solution of the chairman assignment problem (Discrete Mathematics 32, 1980): among the sources that may have another slot, the
one goes first that would be late soonest.

Shares may change along the stream, at positions that are known (the recipe's `data.stages`) or where a run resumed with other
weights. From there on the stream has another pattern, and each source continues after the samples that it has already given:

    stage        | weights 3 : 1           | weights 1 : 1         |
    position     | 0 1 2 3 4 5 6 7         | 8 9 10 11             |
    source       | a b a a a b a a         | a b  a  b             |
    its sample   | 0 0 1 2 3 1 4 5         | 6 2  7  3             |
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import Any, Final, NamedTuple, Self

import numpy as np

LONGEST_PATTERN: Final = 1 << 14
"""Slots of a pattern. Weights with a smaller common denominator are exact; others are off by at most 1 / 2^14 of the stream."""


class Stage(NamedTuple):
    """A part of the stream with the same shares throughout."""

    start: int
    """Position of its first sample."""
    weights: tuple[float, ...]
    """The weight of each source; weights may add up to any sum; 0: the stage has none of that source."""


class _Pattern:
    """The slots of one stage."""

    def __init__(self, weights: Sequence[float]):
        self.slots_K = np.asarray(slots_of(weights), np.int64)
        self._pattern_L = pattern_of(self.slots_K.tolist())
        self._before_LK = np.zeros((len(self._pattern_L) + 1, len(weights)), np.int64)  # slots of k before slot l
        np.cumsum(self._pattern_L[:, None] == np.arange(len(weights)), 0, out=self._before_LK[1:])

    def sources(self, start: int, count: int) -> np.ndarray:
        return self._pattern_L[np.arange(start, start + count) % len(self._pattern_L)]

    def taken(self, end: int) -> np.ndarray:
        rounds, rest = divmod(end, len(self._pattern_L))
        return rounds * self.slots_K + self._before_LK[rest]


@lru_cache(maxsize=64)  # lanes have the same ones
def _pattern(weights: tuple[float, ...]) -> _Pattern:
    return _Pattern(weights)


class _Turned(NamedTuple):
    """A pattern from slot `first` on."""

    pattern: _Pattern
    first: int

    def sources(self, start: int, count: int) -> np.ndarray:
        return self.pattern.sources(self.first + start, count)

    def taken(self, end: int) -> np.ndarray:
        return self.pattern.taken(self.first + end) - self.pattern.taken(self.first)


class Shares:
    """The source of every position from the first stage's on. `taken`: samples of each source before that; none, if not given.
    `turn`: the part of its pattern that each stage begins behind."""

    def __init__(self, stages: Sequence[Stage], taken: Sequence[int] | None = None, turn: Fraction = Fraction(0)):
        assert stages and all(len(stage.weights) == len(stages[0].weights) for stage in stages)
        assert all(one.start < two.start for one, two in pairwise(stages))
        self.stages, self.num_sources = list(stages), len(stages[0].weights)
        patterns = [_pattern(tuple(stage.weights)) for stage in stages]
        self._patterns = [_Turned(one, int(turn * int(one.slots_K.sum()))) for one in patterns]
        self._taken = [np.zeros(self.num_sources, np.int64) if taken is None else np.asarray(taken, np.int64)]
        for pattern, stage, following in zip(self._patterns, stages, stages[1:]):
            self._taken.append(self._taken[-1] + pattern.taken(following.start - stage.start))

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """From what `facts` gave."""
        return cls([Stage(start, tuple(weights)) for start, weights in facts["stages"]], facts["taken"])

    def facts(self) -> dict[str, Any]:
        """The shares as JSON."""
        return {"stages": [[start, list(weights)] for start, weights in self.stages], "taken": self._taken[0].tolist()}

    def _pieces(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(stage, first, last): start..end cut at the borders of stages, as positions in each."""
        assert start >= self.stages[0].start
        ends = [stage.start for stage in self.stages[1:]] + [max(end, self.stages[-1].start)]
        for number, (stage, stage_end) in enumerate(zip(self.stages, ends)):
            first, last = max(start, stage.start), min(end, stage_end)
            if first < last:
                yield number, first - stage.start, last - stage.start

    def sources(self, start: int, count: int) -> np.ndarray:
        """The source of positions start..start+count, [count] int64."""
        parts = [
            self._patterns[k].sources(first, last - first) for k, first, last in self._pieces(start, start + count)
        ]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def taken(self, end: int) -> np.ndarray:
        """Samples of each source among the first `end` positions, [K] int64."""
        number = self._stage_at(end)
        return self._taken[number] + self._patterns[number].taken(end - self.stages[number].start)

    def _stage_at(self, position: int) -> int:
        assert position >= self.stages[0].start
        return max(number for number, stage in enumerate(self.stages) if stage.start <= position)

    def from_(self, position: int) -> list[Stage]:
        """The stages that are left at `position`; the first begins there."""
        number = self._stage_at(position)
        return [Stage(position, self.stages[number].weights), *self.stages[number + 1 :]]

    def continued(self, before: "Shares", position: int, is_same: Sequence[bool]) -> "Shares":
        """These shares, for a stream that had those of `before` up to `position`: each source continues after the samples that it
        has already given. A new source, and one whose samples have changed (not is_same[k], k a source of both), starts at its
        first sample. `before` itself where nothing has changed."""
        ours, theirs = self.from_(position), before.from_(position)
        if (
            self.num_sources == before.num_sources
            and all(is_same)
            and list(map(_slots, ours)) == list(map(_slots, theirs))
        ):
            return before
        given = [n if same else 0 for n, same in zip(before.taken(position).tolist(), is_same)]
        given = given[: self.num_sources]
        return Shares(ours, given + [0] * (self.num_sources - len(given)))

    def lines(self, names: Sequence[str], source_samples: Sequence[int], end: int) -> list[str]:
        """Per source what was asked for and what it gets in each stage, and how often its samples come in a stream of `end`
        samples."""
        taken = self.taken(end).tolist()
        return [
            f"{name}: {'; '.join(self._in_stages(k, end))}, {taken[k] / size:.2f} epochs of {size} samples"
            for k, (name, size) in enumerate(zip(names, source_samples, strict=True))
        ]

    def _in_stages(self, source: int, end: int) -> Iterator[str]:
        for (start, weights), (pattern, _) in zip(self.stages, self._patterns):
            own, total = int(pattern.slots_K[source]), int(pattern.slots_K.sum())
            asked = 100 * weights[source] / sum(weights)
            where = f"from sample {start}{' (not reached)' * (start >= end)} " if start else ""
            yield f"{where}asked {asked:.4g} %, gets {100 * own / total:.4g} % ({own} of {total} samples)"


def _slots(stage: Stage) -> tuple[int, list[int]]:
    return stage.start, slots_of(stage.weights)


def slots_of(weights: Sequence[float]) -> list[int]:
    """Slots per source of one pattern, at least 1 for each weight over 0; they add up to its length. Weights are of any sum."""
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = lcm(*(share.denominator for share in shares))
    if length <= LONGEST_PATTERN:
        return [int(share * length) for share in shares]
    slots = [max(int(share > 0), int(share * LONGEST_PATTERN)) for share in shares]
    largest_rests = sorted(np.flatnonzero(slots).tolist(), key=lambda k: slots[k] - shares[k] * LONGEST_PATTERN)
    for k in largest_rests[: max(0, LONGEST_PATTERN - sum(slots))]:
        slots[k] += 1
    return slots


def pattern_of(slots: Sequence[int]) -> np.ndarray:
    """The source of each slot, [L] int64. Every prefix holds each source within one of its share."""
    given = np.flatnonzero(slots)  # sources that have slots
    length, num_sources = sum(slots), len(given)
    if num_sources == 1:
        return given
    slots_K = np.asarray(slots, np.int64)[given]
    given_K = np.zeros(num_sources, np.int64)
    pattern_L = np.empty(length, np.int64)
    slack = 2 * num_sources - 2  # all below is multiplied by slack * length, to stay in integers
    for n in range(1, length + 1):
        may_K = (n * slots_K - given_K * length) * slack >= length
        # source k is late once its share runs ahead of it by more than 1 - 1/slack
        late_K = np.where(may_K, ((given_K + 1) * slack - 1) * length // (slots_K * slack), np.iinfo(np.int64).max)
        pattern_L[n - 1] = int(late_K.argmin())
        given_K[pattern_L[n - 1]] += 1
    return given[pattern_L]
