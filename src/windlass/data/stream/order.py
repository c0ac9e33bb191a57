"""Which sample has which position of the endless training stream: arithmetic only, no state, no file is read.

The stream is order(seed, epoch 0), order(seed, epoch 1), ... joined. In one epoch the shards are shuffled; then,
window by window of W consecutive shuffled shards, the samples of the window are permuted. So every sample comes
exactly once per epoch, reading touches W shards at a time, and each sample follows from (seed, position):
no ranks, workers or batch sizes enter. Random access costs one window's permutation, which is kept until another
window is asked for.

With `written` the shards of epoch 0 are not shuffled: they come in the order they are written, permuted inside windows of W of
them, so that training can read the first while the last are not there.

    shards written   0 1 2 | 3 4 5 | 6 7 .        W = 3; the third window is not whole
    known            <- windows 0, 1 ->           its samples are permuted over all of it, so it must be whole, or the last one

A window is shards kW .. kW+W, whatever else is written. So an order that grows only adds positions, each the same as in the order
of the finished set. The start of epoch 1 is known once the set is complete.

Randomness: Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") keyed by (seed, epoch) with the
counter started at (window + 1) << 192, so windows never share numbers; 0 is for the shards. A permutation is the
stable argsort of raw 64-bit draws: NumPy promises that raw draws stay the same between versions, and does not promise
it for `Generator.permutation`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def permutation(seed: int, epoch: int, number: int, count: int) -> np.ndarray:
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, number], np.uint64))
    return np.argsort(bits.random_raw(count), kind="stable")


class Windows:
    """Shards one behind the other, their samples permuted inside windows of `shuffle_window` of them; window k is permuted by
    `number` + k. The permutation of the last window that was asked for is kept. `rows`: of each of the shards the first row and
    how many; all, if not given."""

    def __init__(
        self,
        seed: int,
        epoch: int,
        shards: np.ndarray,
        shard_samples: np.ndarray,
        shuffle_window: int,
        number: int,
        rows: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        self._seed, self._epoch, self._shards, self._number = seed, epoch, shards, number
        self._first_rows: np.ndarray = rows[0] if rows else np.zeros(len(shards), np.int64)
        self._counts: np.ndarray = rows[1] if rows else shard_samples[shards]
        self._shuffle_window = shuffle_window
        ends = np.cumsum(self._counts)
        self.num_samples = int(ends[-1]) if len(ends) else 0
        last_shards = np.arange(shuffle_window, len(ends) + shuffle_window, shuffle_window) - 1
        self._starts = np.concatenate([[0], ends[np.minimum(last_shards, len(ends) - 1)]])  # of windows, in samples
        self._window, self._rows_N2 = -1, np.empty((0, 2), np.int64)

    def take(self, start: int, count: int) -> np.ndarray:
        """Samples start..start+count -> [count, 2] int64: (shard, row). They must be there."""
        parts = [np.empty((0, 2), np.int64)]
        while count > 0:
            window = int(np.searchsorted(self._starts, start, "right")) - 1
            if window != self._window:
                self._enter(window)
            offset = start - int(self._starts[window])
            parts.append(self._rows_N2[offset : offset + count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return np.concatenate(parts)

    def _enter(self, window: int) -> None:
        own = slice(window * self._shuffle_window, (window + 1) * self._shuffle_window)
        shards, first_rows, counts = self._shards[own], self._first_rows[own], self._counts[own]
        rows_N2 = np.empty((int(counts.sum()), 2), np.int64)
        rows_N2[:, 0] = np.repeat(shards, counts)
        rows_N2[:, 1] = np.concatenate([np.arange(first, first + count) for first, count in zip(first_rows, counts)])
        self._window = window
        self._rows_N2 = rows_N2[permutation(self._seed, self._epoch, self._number + window, len(rows_N2))]


class Order:
    """Positions of the stream -> (shard, row). `shard_samples[s]`: samples in shard s. `written`: epoch 0 in written order; only
    then may shards be missing yet (`is_complete` false; see `grow`)."""

    def __init__(
        self,
        shard_samples: Sequence[int],
        seed: int,
        shuffle_window: int,
        *,
        written: bool = False,
        is_complete: bool = True,
    ):
        assert 0 <= seed < 1 << 64 and shuffle_window >= 1 and (written or is_complete)
        self.seed, self.shuffle_window, self.written = seed, shuffle_window, written
        self._shard_samples = np.empty(0, np.int64)
        self.is_complete = False
        self.grow(shard_samples, is_complete)

    def grow(self, shard_samples: Sequence[int], is_complete: bool) -> None:
        """More shards are there: `shard_samples` continues the list of before. Known positions stay as they are."""
        assert not self.is_complete and (not is_complete or len(shard_samples) >= 1)
        known = self._shard_samples
        self._shard_samples = np.asarray(shard_samples, np.int64)
        assert (self._shard_samples[: len(known)] == known).all() and (self._shard_samples >= 1).all()
        self.num_samples = int(self._shard_samples.sum())
        self.is_complete = is_complete
        self._epoch = -1

    @property
    def end(self) -> int | None:
        """The first position that is not known yet; None where all are."""
        if self.is_complete:
            return None
        whole = len(self._shard_samples) // self.shuffle_window * self.shuffle_window
        return int(self._shard_samples[:whole].sum())

    def shards_before(self, position: int) -> int:
        """How many shards, in written order, the positions before `position` can come from."""
        if not self.written or position > self.num_samples:
            return len(self._shard_samples)
        if position == 0:
            return 0
        last = int(np.searchsorted(np.cumsum(self._shard_samples), position - 1, "right"))  # shard of the last sample
        return min(len(self._shard_samples), (last // self.shuffle_window + 1) * self.shuffle_window)

    def facts(self) -> dict[str, Any]:
        """What this order is a function of, besides the shards, as the run's events keep it (see `ledger`)."""
        first_epoch = {"first_epoch": "written"} if self.written else {}
        return {"seed": self.seed, "shuffle_window": self.shuffle_window, **first_epoch}

    def state(self) -> dict[str, Any]:
        """Nothing: the position is all."""
        return {}

    def _enter_epoch(self, epoch: int) -> None:
        num_shards = len(self._shard_samples)
        is_written_order = self.written and epoch == 0
        shards = np.arange(num_shards) if is_written_order else permutation(self.seed, epoch, 0, num_shards)
        self._epoch = epoch
        self._windows = Windows(self.seed, epoch, shards, self._shard_samples, self.shuffle_window, 1)

    def take(self, start: int, count: int) -> np.ndarray:
        """Positions start..start+count of the stream -> [count, 2] int64: (shard, row). Any start >= 0 and count, up to `end`."""
        assert self.end is None or start + count <= self.end
        parts = [np.empty((0, 2), np.int64)]
        while count > 0:
            epoch, position = divmod(start, self.num_samples) if self.is_complete else (0, start)
            if epoch != self._epoch:
                self._enter_epoch(epoch)
            part = self._windows.take(position, min(count, self.num_samples - position))
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts)
