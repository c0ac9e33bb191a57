"""Curves of any length in bounded space: neighbouring lines share a bucket, and where there are too many buckets, they merge.

A bucket keeps its first and last step, the tokens and the time at its end, and of each quantity the lowest and the highest value
with their steps, the sum, the count and the number of gaps. So a spike of a single step among a million stays visible, at its
step. It also keeps where its lines are in events.jsonl: a resume in the middle of a bucket reads those lines again.

    append:    the last bucket is filled up to `width` lines, then new ones are begun
    full:      buckets merge in pairs, and `width` doubles
    truncate:  buckets beyond a step go; the one that holds the step is made anew from its lines
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from windlass.report.page.step_lines import Columns, Floats

MAX_BUCKETS: Final = 2000  # more than a screen has columns
LOW, HIGH, LOW_AT, HIGH_AT, SUM, COUNT, GAPS = range(7)
FIELDS: Final = 7
Starts = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Stretch:
    """Bytes of events.jsonl that hold lines of a bucket and, between them, none that a restart made void."""

    epoch: int
    start: int
    end: int


def joined(stretches: Sequence[Stretch]) -> list[Stretch]:
    """Neighbours of one epoch become one."""
    found: list[Stretch] = []
    for stretch in stretches:
        if found and found[-1].epoch == stretch.epoch:
            found[-1] = Stretch(stretch.epoch, found[-1].start, stretch.end)
        else:
            found.append(stretch)
    return found


class Buckets:
    """At most `most` buckets of `width` lines each, the last one perhaps of fewer."""

    def __init__(self, most: int = MAX_BUCKETS):
        self._most = most
        self.width = 1
        self.revision = 0
        """Changes whenever a bucket other than the last one changes; buckets are only added while it stays."""
        self._epoch = 0
        self.first, self.last, self.lines = (np.zeros(0) for _ in range(3))
        self.tokens, self.time, self.last_offset = (np.zeros(0) for _ in range(3))
        """At the last line of each bucket."""
        self.series: dict[str, Floats] = {}
        """Quantity -> [FIELDS, buckets]."""
        self.stretches: list[list[Stretch]] = []

    def __len__(self) -> int:
        return len(self.last)

    @property
    def last_step(self) -> float:
        return float(self.last[-1]) if len(self) else -np.inf

    def append(self, columns: Columns, starts: Sequence[int], ends: Sequence[int]) -> None:
        """Lines in the order of steps, all later than those here. `starts`, `ends`: their byte offsets in the file."""
        num = len(columns.step)
        if not num:
            return
        at, open_lines = len(self), int(self.lines[-1]) if len(self) else self.width
        used = open_lines if open_lines < self.width else 0
        group = (used + np.arange(num)) // self.width
        self._add_rows(columns, starts, ends, np.flatnonzero(np.diff(group, prepend=-1)))
        if used:
            self._merge(np.delete(np.arange(len(self)), at))
        while len(self) > self._most:
            self.width *= 2
            self.revision += 1
            self._merge(np.arange(0, len(self), 2))

    def truncate(
        self, step: float, read_again: Callable[[Sequence[Stretch]], tuple[Columns, list[int], list[int]]]
    ) -> None:
        """Drop every line beyond `step`. `read_again`: the step lines of stretches with their byte offsets."""
        at = int(np.searchsorted(self.last, step, side="right"))
        if at == len(self):
            return
        holds, stretches = self.first[at] <= step, self.stretches[at]
        self._keep_rows(at)
        self.revision += 1
        if holds:
            columns, starts, ends = read_again(stretches)
            kept = [index for index, at_step in enumerate(columns.step) if at_step <= step]
            starts, ends = [starts[index] for index in kept], [ends[index] for index in kept]
            self._add_rows(columns.take(columns.step <= step), starts, ends, np.zeros(1, np.intp))
            last = [max((end for end in ends if end <= part.end), default=0) for part in stretches]
            self.stretches[-1] = [
                Stretch(part.epoch, part.start, end) for part, end in zip(stretches, last) if end > part.start
            ]
        self._epoch += 1

    def thinned(self, most: int) -> "Buckets":
        """A copy in at most `most` buckets."""
        copy = Buckets(most)
        copy.__dict__ |= {**vars(self), "_most": most, "series": dict(self.series), "stretches": list(self.stretches)}
        while len(copy) > most:
            copy.width *= 2
            copy._merge(np.arange(0, len(copy), 2))
        return copy

    def _add_rows(self, columns: Columns, starts: Sequence[int], ends: Sequence[int], groups: Starts) -> None:
        """A bucket at the end for the lines from each of `groups` to the next."""
        before, last = len(self), np.append(groups[1:], len(columns.step)) - 1
        self.lines = np.append(self.lines, last + 1 - groups)
        self.first, self.last = np.append(self.first, columns.step[groups]), np.append(self.last, columns.step[last])
        self.tokens, self.time = np.append(self.tokens, columns.tokens[last]), np.append(self.time, columns.time[last])
        new = zip(groups.tolist(), last.tolist())
        self.stretches = self.stretches + [[Stretch(self._epoch, starts[one], ends[end])] for one, end in new]
        self.last_offset = np.append(self.last_offset, [float(starts[end]) for end in last.tolist()])
        for name in columns.values.keys() | self.series.keys():
            rows = np.full((FIELDS, len(self)), np.nan)
            rows[SUM:] = 0
            if name in self.series:
                rows[:, :before] = self.series[name]
            if name in columns.values:
                rows[:, before:] = merged_buckets(bucket_rows(columns, name), groups)
            self.series[name] = rows

    def _keep_rows(self, num: int) -> None:
        for name in ("first", "last", "lines", "tokens", "time", "last_offset", "stretches"):
            setattr(self, name, getattr(self, name)[:num])
        self.series = {name: rows[:, :num] for name, rows in self.series.items()}

    def _merge(self, starts: Starts) -> None:
        """Rows from each of `starts` to the next become one."""
        num = len(self)
        if len(starts) == num:
            return
        ends = np.append(starts[1:], num)
        self.series = {name: merged_buckets(rows, starts) for name, rows in self.series.items()}
        self.first, self.lines = self.first[starts], np.add.reduceat(self.lines, starts)
        self.last, self.tokens, self.time = self.last[ends - 1], self.tokens[ends - 1], self.time[ends - 1]
        self.last_offset = self.last_offset[ends - 1]
        self.stretches = [
            self.stretches[start]
            if end - start == 1
            else joined([one for row in self.stretches[start:end] for one in row])
            for start, end in zip(starts.tolist(), ends.tolist())
        ]


def bucket_rows(columns: Columns, name: str) -> Floats:
    """One quantity as a bucket per line: [FIELDS, lines]."""
    value = columns.values[name]
    is_there = np.isfinite(value)
    at = np.where(is_there, columns.step, np.nan)
    gaps = columns.gaps.get(name, np.zeros(len(value)))
    return np.stack((value, value, at, at, np.where(is_there, value, 0), is_there, gaps))


def merged_buckets(rows: Floats, starts: Starts) -> Floats:
    """[FIELDS, buckets] -> [FIELDS, groups]; the earliest step of an extreme counts."""
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, rows.shape[1])))
    found = np.empty((FIELDS, len(starts)))
    found[SUM:] = np.add.reduceat(rows[SUM:], starts, axis=1)
    for value, at, extreme in ((LOW, LOW_AT, np.fmin), (HIGH, HIGH_AT, np.fmax)):
        found[value] = extreme.reduceat(rows[value], starts)
        steps = np.minimum.reduceat(np.where(rows[value] == found[value][group], rows[at], np.inf), starts)
        found[at] = np.where(np.isfinite(steps), steps, np.nan)
    return found
