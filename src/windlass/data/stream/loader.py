"""This rank's micro-batches of the global batches, read ahead by one thread.

Global batch k is the next slice of the stream of an order: [c, c + G), with c the samples consumed so far and
G = micro_batch * accumulation * batch_ranks sequences. It may cross the border of an epoch; nothing is dropped.
Rank r of the batch axes takes the contiguous piece [c + r*G/R, c + (r+1)*G/R) and cuts it into its micro-batches, in
order. So the concatenation over ranks is the same sequence of samples for every world size and every accumulation,
and ranks that share a position on the batch axes (tensor, pipeline, context) read the same samples by construction.

The state is one number, `consumed`. A run that goes on with another G goes on at the same position of the same stream.

Whatever a run may add to this (data that grows, shards that are missing, sources that are mixed, documents that are isolated)
is in the order and in the function that makes a batch, or wraps the loader: see `open_stream`.

Speed (measured by benchmarks/loader.py, results beside it): thousands of times what a GPU asks for, so one thread is
enough. A failure in the thread is raised by `next()`; an epoch is never cut short.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Protocol

import numpy as np
import torch

from windlass.data.batch_fields import Batch
from windlass.data.shards.index import Shard
from windlass.data.stream.batch_source import Event
from windlass.data.stream.collate import MakeBatch
from windlass.data.stream.ledger import shards_fingerprint
from windlass.errors import Unavailable

BATCHES_AHEAD: Final = 2  # global batches read ahead; one would do, the second hides the opening of a shard


class StreamOrder(Protocol):
    """Which sample has which position of the endless stream."""

    def take(self, start: int, count: int) -> np.ndarray:
        """Positions start..start+count of the stream -> [count, 2] int64: (shard, row)."""

    def facts(self) -> dict[str, Any]:
        """What this order is a function of, besides the shards: fields of the run's events, from which it can be made again."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, besides the position."""


@dataclass(frozen=True)
class BatchCut:
    """How a global batch is cut: rank `batch_rank` of `batch_ranks` takes a contiguous piece, as `accumulation` micro-batches."""

    micro_batch: int
    accumulation: int = 1
    batch_rank: int = 0
    batch_ranks: int = 1
    world_rank: int = 0
    """This process's rank in the world, by which an error names it. Several ranks share a batch rank where tp, pp or context is
    over 1."""

    def __post_init__(self) -> None:
        assert 0 <= self.batch_rank < self.batch_ranks and self.micro_batch >= 1 and self.accumulation >= 1

    @property
    def global_batch(self) -> int:
        """Samples of a global batch, over all ranks."""
        return self.micro_batch * self.accumulation * self.batch_ranks

    @property
    def own(self) -> range:
        """The offsets in the global batch of this rank's samples."""
        per_rank = self.micro_batch * self.accumulation
        return range(self.batch_rank * per_rank, (self.batch_rank + 1) * per_rank)

    def starts(self) -> range:
        """The first sample of each of its micro-batches, counted within the global batch."""
        return self.own[:: self.micro_batch]


class Loader:
    """`next()` gives this rank's `accumulation` micro-batches of the next global batch, for ever."""

    def __init__(
        self,
        order: StreamOrder,
        shards: Sequence[Shard],
        make: MakeBatch,
        cut: BatchCut,
        consumed: int = 0,
        device: torch.device | str = "cpu",
        limit_s: float = math.inf,
        named: Callable[[int], str] | None = None,
    ):
        """`order.take` and `make` are called by the loader's thread alone, for one global batch after another: first all of its
        positions, then this rank's micro-batches. `limit_s`: how long `next()` waits for a batch; `named`:
        what an error calls a shard, by its number."""
        assert consumed >= 0
        self.shards, self.consumed, self.wait_s = shards, consumed, 0.0
        self._order, self._make, self._cut = order, make, cut
        self._device = torch.device(device)
        self._limit_s, self._is_stuck = limit_s, False
        self._named = named or (lambda number: shards[number].stored.name)
        self._read_shards: list[int] = []
        """The shards of the micro-batch that the thread makes now."""
        self._ahead: deque[Future[list[Batch]]] = deque()
        self._requests: SimpleQueue[tuple[int, Future[list[Batch]]] | None] = SimpleQueue()
        # a daemon: a read that never returns must not keep the process from ending
        self._thread = threading.Thread(target=self._serve, name="windlass-loader", daemon=True)
        self._thread.start()
        self._read_start = consumed
        for _ in range(BATCHES_AHEAD):
            self._read_ahead()

    def _read_ahead(self) -> None:
        future: Future[list[Batch]] = Future()
        self._ahead.append(future)
        self._requests.put((self._read_start, future))
        self._read_start += self._cut.global_batch

    def _serve(self) -> None:
        while (request := self._requests.get()) is not None:
            start, future = request
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self._read(start))
                except BaseException as error:
                    future.set_exception(error)

    def _read(self, start: int) -> list[Batch]:
        per_batch, rows_G2 = self._cut.micro_batch, self._order.take(start, self._cut.global_batch)
        batches = []
        for at in self._cut.starts():
            self._read_shards = sorted(set(rows_G2[at : at + per_batch, 0].tolist()))
            batches.append(self._make(rows_G2[at : at + per_batch], start + at))
        if self._device.type == "cuda":
            batches = [_each(batch, torch.Tensor.pin_memory) for batch in batches]
        return batches

    def is_ready(self, timeout_s: float) -> bool:
        """Whether `next()` would return, or raise, at once; waits for that for at most `timeout_s`."""
        return bool(wait([self._ahead[0]], timeout_s).done)

    def next(self) -> list[Batch]:
        """Micro-batches of {input_ids, targets}, [micro_batch, T] int64 on the device. Raises what the thread raised, and
        Unavailable where it has made none within the limit."""
        start_s = time.perf_counter()
        if self._limit_s < math.inf and not self.is_ready(self._limit_s):
            raise self._no_batch()
        batches = self._ahead[0].result()  # stays in front when it raises, so that every later call raises it too
        self._ahead.popleft()
        self._read_ahead()
        self.consumed += self._cut.global_batch
        self.wait_s = time.perf_counter() - start_s
        if self._device.type == "cpu":
            return batches
        return [_each(batch, lambda tensor: tensor.to(self._device, non_blocking=True)) for batch in batches]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the stream."""
        return {"samples_consumed": self.consumed, **self._order.state()}

    def entry(self) -> dict[str, Any]:
        """What a start or resume writes under `data` in the run's events."""
        return {
            "shards": shards_fingerprint(self.shards),
            **self._order.facts(),
            "samples_consumed": self.consumed,
            "samples_per_step": self._cut.global_batch,
        }

    def drain_events(self, is_log_step: bool) -> list[Event]:
        """None: what a loader does at each step follows from its entry."""
        return []

    def _no_batch(self) -> Unavailable:
        self._is_stuck = True
        cut, samples = self._cut, f"{self.consumed:,} to {self.consumed + self._cut.global_batch:,}"
        names = ", ".join(map(self._named, self._read_shards)) or "no shard yet"
        return Unavailable(
            f"rank {cut.world_rank} (batch rank {cut.batch_rank} of {cut.batch_ranks}) waited {self._limit_s:g} s for samples "
            f"{samples} of the training stream; the loader is reading {names}",
            "a batch that takes longer than data.timeout_s means that a disk or a store does not answer",
            "check that storage; the same command resumes from the last checkpoint (for a slow store raise data.timeout_s)",
        )

    def close(self) -> None:
        """Stops the thread and waits for it, unless it is stuck. May be called twice; `next()` must not follow."""
        for future in self._ahead:
            future.cancel()
        self._requests.put(None)
        if not self._is_stuck:
            self._thread.join()


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return {name: change(tensor) for name, tensor in batch.items()}
