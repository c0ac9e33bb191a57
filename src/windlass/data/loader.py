"""This rank's micro-batches of the global batches, read ahead by one thread.

Global batch k is the next slice of the stream of `windlass.data.order`: [c, c + G) with c the samples consumed so far
and G = micro_batch * accumulation * batch_ranks sequences. It may cross the border of an epoch; nothing is dropped.
Rank r of the batch axes takes the contiguous piece [c + r*G/R, c + (r+1)*G/R) and cuts it into its micro-batches, in
order. So the concatenation over ranks is the same sequence of samples for every world size and every accumulation,
and ranks that share a place on the batch axes (tensor, pipeline, context) read the same samples by construction.

The state is one number, `consumed`. A run that goes on with another G goes on at the same place of the same stream.

The shift happens here, once: a sample stores T+1 ids; input_ids = ids[:-1], targets = labels[1:].

Speed (measured by benchmarks/loader.py, results beside it): thousands of times what a GPU asks for, so one thread is
enough. A failure in the thread is raised by `next()`; an epoch is never cut short.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from windlass.data.mds import REPAIR, Reader
from windlass.data.order import Order
from windlass.data.packing import NOT_COUNTED
from windlass.errors import BadShard, UserError

BATCHES_AHEAD = 2  # global batches read ahead; one would do, the second hides the opening of a shard
Batch = dict[str, torch.Tensor]


def check_length(reader: Reader, sequence_length: int) -> None:
    """Raises UserError when the samples on disk are not `sequence_length` + 1 ids long."""
    stored = len(reader.read(0, 0)[0]) - 1
    if stored != sequence_length:
        raise UserError(
            f"sequence_length {sequence_length}, but the samples in {reader.directory} hold {stored} targets each",
            "samples are cut to length when data is prepared",
            f"prepare again with sequence_length {sequence_length}, or train with {stored}",
        )


def collate(reader: Reader, places_N2: np.ndarray, rows: int, sequence_length: int) -> Batch:
    """The samples at `places_N2` as one batch of `rows` rows; rows without a sample hold id 0 and count no target.

    Returns input_ids and targets, [rows, T] int64.
    """
    input_ids_BT = np.zeros((rows, sequence_length), np.int64)
    targets_BT = np.full((rows, sequence_length), NOT_COUNTED, np.int64)
    for row, (shard, sample) in enumerate(places_N2.tolist()):
        ids, labels = reader.read(shard, sample)
        if len(ids) != sequence_length + 1:
            given = f"sample {sample} of {reader.shards[shard].path} holds {len(ids)} ids"
            raise BadShard(given, f"every sample of this set holds {sequence_length + 1}", REPAIR)
        input_ids_BT[row] = ids[:-1]
        targets_BT[row] = labels[1:]
    return {"input_ids": torch.from_numpy(input_ids_BT), "targets": torch.from_numpy(targets_BT)}


class Loader:
    """`next()` gives this rank's `accumulation` micro-batches of the next global batch, for ever."""

    def __init__(
        self,
        directory: str | Path,
        *,
        sequence_length: int,
        micro_batch: int,
        accumulation: int,
        batch_rank: int,
        batch_ranks: int,
        seed: int,
        shuffle_window: int,
        consumed: int = 0,
        device: torch.device | str = "cpu",
    ):
        assert 0 <= batch_rank < batch_ranks and micro_batch >= 1 and accumulation >= 1 and consumed >= 0
        self.consumed = consumed
        self.global_batch = micro_batch * accumulation * batch_ranks
        self.wait_s = 0.0
        self._sequence_length, self._micro_batch, self._accumulation = sequence_length, micro_batch, accumulation
        self._batch_rank, self._device = batch_rank, torch.device(device)
        self._pin = self._device.type == "cuda"
        self._reader = Reader(Path(directory), max_mapped=2 * shuffle_window + 2)
        check_length(self._reader, sequence_length)
        self._order = Order(self._reader.shard_samples, seed, shuffle_window)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-loader")
        self._ahead: deque[Future[list[Batch]]] = deque()
        self._read_start = consumed
        for _ in range(BATCHES_AHEAD):
            self._read_ahead()

    @property
    def num_samples(self) -> int:
        """Samples in one epoch."""
        return self._order.num_samples

    def _read_ahead(self) -> None:
        self._ahead.append(self._thread.submit(self._batches, self._read_start))
        self._read_start += self.global_batch

    def _batches(self, start: int) -> list[Batch]:
        rows = self._micro_batch
        per_rank = rows * self._accumulation
        places_N2 = self._order.take(start + self._batch_rank * per_rank, per_rank)
        pieces = [places_N2[at : at + rows] for at in range(0, per_rank, rows)]
        batches = [collate(self._reader, piece, rows, self._sequence_length) for piece in pieces]
        return [_each(batch, torch.Tensor.pin_memory) for batch in batches] if self._pin else batches

    def next(self) -> list[Batch]:
        """Micro-batches of {input_ids, targets}, [micro_batch, T] int64 on the device. Raises what the thread met."""
        start_s = time.perf_counter()
        item = self._ahead[0].result()  # stays in front when it raises, so that every later call raises it too
        self.wait_s = time.perf_counter() - start_s
        self._ahead.popleft()
        self._read_ahead()
        self.consumed += self.global_batch
        if self._device.type == "cpu":
            return item
        return [_each(batch, lambda tensor: tensor.to(self._device, non_blocking=True)) for batch in item]

    def close(self) -> None:
        """Stops the thread and waits for it. May be called twice; `next()` must not follow."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _each(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    return {name: change(tensor) for name, tensor in batch.items()}
