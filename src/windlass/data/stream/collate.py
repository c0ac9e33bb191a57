"""Samples -> tensors of one micro-batch: the shift from ids to targets, isolated documents, and a key per sample.

The shift happens here, once: a sample stores T+1 ids; input_ids = ids[:-1], targets = labels[1:].
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.data.packing import WHOLE, Borders, isolate
from windlass.data.shards.index import REPAIR
from windlass.data.shards.mds import Reader
from windlass.data.stream.batch_source import PERCENT, SOURCES
from windlass.errors import BadShard, UserError

MakeBatch = Callable[[np.ndarray, int], Batch]
"""(samples as [N, 2] pairs of shard and row, stream position of the first) -> their batch."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio


class SampleReader(Protocol):
    """What `collate` needs of a `Reader`."""

    def name(self, number: int) -> str:
        """The file of shard `number`, for messages."""

    def read(self, number: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Sample `row` of shard `number` -> (input_ids [T+1], labels [T+1]). Raises BadShard."""

    def ends(self, number: int, row: int) -> np.ndarray | None:
        """Which of its ids end documents, [T+1] bool; None where every EOS does."""

    def percent(self, number: int, row: int) -> np.ndarray | None:
        """How much each of its labels weighs, [T+1] uint8; None where all weigh 100."""


def check_length(reader: Reader, sequence_length: int, max_missing: int = 0, sequences: int = 1) -> None:
    """Raises UserError when the samples on disk are not `sequences` times `sequence_length` + 1 ids long.

    The first readable shard of the first 1 + `max_missing` is looked at; if none is readable, reading them in turn reports it.
    """
    for number in range(min(1 + max_missing, len(reader.shards))):
        try:
            stored = len(reader.read(number, 0)[0]) // sequences - 1
            break
        except BadShard:
            if max_missing == 0:
                raise
    else:
        return
    if stored != sequence_length:
        raise UserError(
            f"sequence_length {sequence_length}, but the samples in {reader.source.where} hold {stored} targets each",
            "samples are cut to length when data is prepared",
            f"prepare again with sequence_length {sequence_length}, or train with {stored}",
        )


def collate(
    reader: SampleReader,
    rows_N2: np.ndarray,
    samples: int,
    sequence_length: int,
    borders: Borders | None = None,
    sequences: int = 1,
) -> Batch:
    """The samples at `rows_N2` as one batch of `samples` x `sequences` rows (of each sample, next to each other); rows without
    a sample hold id 0 and count no target.

    Returns input_ids and targets, [rows, T] int64. `borders` isolates documents and adds `documents`, [rows, M] int64.
    """
    num_rows, length = samples * sequences, sequences * (sequence_length + 1)
    input_ids_BT, targets_BT = (np.empty((num_rows, sequence_length), np.int64) for _ in range(2))
    input_ids_BT[len(rows_N2) * sequences :], targets_BT[len(rows_N2) * sequences :] = 0, NOT_COUNTED
    ends_BL = np.zeros((num_rows, sequence_length + 1), bool)
    for number, (shard, sample) in enumerate(rows_N2.tolist()):
        ids, labels = reader.read(shard, sample)
        if len(ids) != length:
            given = f"sample {sample} of {reader.name(shard)} holds {len(ids)} ids"
            raise BadShard(given, f"every sample of this set holds {length}", REPAIR)
        row = slice(number * sequences, (number + 1) * sequences)
        input_ids_BT[row] = ids.reshape(sequences, -1)[:, :-1]
        targets_BT[row] = labels.reshape(sequences, -1)[:, 1:]
        if borders is not None:
            stored = reader.ends(shard, sample)
            ends_BL[row] = (ids == borders.eos_id if stored is None else stored).reshape(sequences, -1)
    parts = {"input_ids": input_ids_BT, "targets": targets_BT}
    if borders is not None:
        parts["documents"], parts["targets"] = isolate(ends_BL, targets_BT, borders.max_documents)
    return {name: torch.from_numpy(part) for name, part in parts.items()}


def batches_of(
    reader: SampleReader, sequence_length: int, borders: Callable[[], Borders] | None = None, sequences: int = 1
) -> MakeBatch:
    """Batches of whole samples. `borders` is called once per batch and isolates its documents."""

    def make(rows_N2: np.ndarray, _position: int) -> Batch:
        found = borders() if borders else None
        return collate(reader, rows_N2, len(rows_N2), sequence_length, found, sequences)

    return make


def changed_batches(
    make: MakeBatch, change: Callable[[Batch, np.ndarray], Batch], shard_samples: Sequence[int]
) -> MakeBatch:
    """Batches of `make` after `change`, which sees the numbers of their samples in the set."""
    firsts_S = np.cumsum([0, *shard_samples])

    def make_changed(rows_N2: np.ndarray, position: int) -> Batch:
        return change(make(rows_N2, position), firsts_S[rows_N2[:, 0]] + rows_N2[:, 1])

    return make_changed


def add_keys(make: MakeBatch, seed: int, sequences: int = 1) -> MakeBatch:
    """Batches of `make` with `keys`, [rows] int64."""

    def make_with_keys(rows_N2: np.ndarray, position: int) -> Batch:
        rows = sequences * position, sequences * len(rows_N2)
        return {**make(rows_N2, position), "keys": sample_keys(seed, *rows)}

    return make_with_keys


def add_percent(make: MakeBatch, reader: SampleReader) -> MakeBatch:
    """Batches of `make` with `percent`, [rows, T] int64. `reader`: what `make` reads."""

    def make_with_percent(rows_N2: np.ndarray, position: int) -> Batch:
        batch = make(rows_N2, position)
        percent_BT = np.full(batch["targets"].shape, WHOLE, np.int64)
        for row, (shard, sample) in enumerate(rows_N2.tolist()):
            found = reader.percent(shard, sample)
            if found is not None:
                percent_BT[row] = found[1:]
        return {**batch, PERCENT: torch.from_numpy(percent_BT)}

    return make_with_percent


def add_sources(make: MakeBatch, source_shards: Sequence[int]) -> MakeBatch:
    """Batches of `make` with `sources`, [N, S] bool: which of the S sources a sample is of. Their shards follow one another,
    `source_shards` of each."""
    ends_S = np.cumsum(source_shards)

    def make_with_sources(rows_N2: np.ndarray, position: int) -> Batch:
        sources_N = np.searchsorted(ends_S, rows_N2[:, 0], "right")
        sources_NS = torch.from_numpy(sources_N[:, None] == np.arange(len(ends_S)))
        return {**make(rows_N2, position), SOURCES: sources_NS}

    return make_with_sources


def sample_keys(seed: int, start: int, count: int) -> torch.Tensor:
    """[count] int64: a key for each of the positions start..start+count of the stream, for what is random per sample (dropout).

    Two rounds of SplitMix64 (Steele et al. 2014). The position determines epoch and step, so a sample gets a new key each time
    it comes. Ranks, batch sizes and the world do not enter.
    """
    with np.errstate(over="ignore"):  # integers that wrap, on purpose
        positions = np.uint64(start) + np.arange(count, dtype=np.uint64)
        return torch.from_numpy(_splitmix(_splitmix(np.uint64(seed)) + positions * _GOLDEN).view(np.int64))


def _splitmix(x: Any) -> Any:
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
