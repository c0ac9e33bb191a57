"""A validation set as batches: the same first samples every time and for every layout, with their exact bytes.

Sample i of the first N goes to round i // (micro_batch * R) of R batch ranks; inside a round, rank r takes its
contiguous piece. All ranks get equally many batches of equal shape; rows without a sample count no target
(-100). The counts of targets and bytes are those of all N samples, on all ranks, so a summed loss needs no second
reduction.

Of a set of several sources, sample i of a source of n is taken before sample j of one of m where i / n < j / m: the first N
hold every source, each in its share. Each source's have batches of their own, so that it has a loss of its own.

A target's bytes are those of its token (special tokens, EOS among them, have 0), so a sequence may begin in the
middle of a document, and the bytes of all samples of a set add up to its text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from windlass.data.batch_fields import NOT_COUNTED, Batch
from windlass.data.config import DataConfig
from windlass.data.packing import Borders
from windlass.data.prepare.manifest import Prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.collate import collate
from windlass.data.stream.loader import BatchCut
from windlass.errors import UserError

ROWS_AT_ONCE: Final = 256  # while targets are counted


ChangeBatch = Callable[[Batch, np.ndarray], Batch]


def unchanged(batch: Batch, _samples: np.ndarray) -> Batch:
    return batch


@dataclass(frozen=True)
class EvaluationSet:
    batches: list[Batch]
    """This rank's: input_ids and targets, [micro_batch, T] int64, and documents if isolated; as many on every rank."""
    num_samples: int
    """Samples scored, over all ranks."""
    held_samples: int
    """Samples in the set."""
    num_targets: int
    """Targets counted, over all ranks."""
    num_bytes: int
    """Bytes of text of these targets; 0 where the bytes of tokens do not add up to the text."""
    of_sources: list[tuple[int, slice]] = field(default_factory=list)
    """The number of each source that is scored by itself, and its batches."""

    def bytes_of(self, count: float) -> int:
        """Bytes of the text that was scored; 0, not known, where an objective has left out some of the targets."""
        return self.num_bytes if count == self.num_targets else 0


def evaluation_set(
    prepared: Prepared,
    config: DataConfig,
    name: str,
    cut: BatchCut,
    num_sequences: int,
    *,
    change: ChangeBatch = unchanged,
    device: torch.device | str = "cpu",
) -> EvaluationSet:
    """The first `num_sequences` sequences of the set `name` (all, if it has fewer), as micro-batches of `cut`. Sources that are
    stored apart are scored apart, but not pairs. `change`: what is done to a batch of these samples of the set. Raises UserError
    where they count no target.
    """
    reader, sequences = Reader(prepared.shards(name)), config.sequences_per_sample
    borders = prepared.borders(name) if config.isolate else None
    token_bytes_V = None if config.is_preference else prepared.token_bytes(name)
    num_samples = min(-(-num_sequences // sequences), reader.num_samples)
    order_N, source_N = dealt(reader.shard_samples, prepared.sets[name].source_shards, num_samples)
    rows_N2 = all_sample_rows(reader)[order_N]
    sequence_length = len(reader.read(0, 0)[0]) // sequences - 1
    everywhere = [rows_N2[at : at + ROWS_AT_ONCE] for at in range(0, num_samples, ROWS_AT_ONCE)]
    all_batches = (collate(reader, rows, len(rows), sequence_length, borders, sequences) for rows in everywhere)
    targets = np.concatenate([(found := b["targets"].numpy())[found != NOT_COUNTED] for b in all_batches])
    if not len(targets):
        raise UserError(
            f"the first {num_samples} samples of the set {name} count no target",
            "a loss is an average over counted targets, and all of these are masked: are answers cut off by the length?",
            "raise evaluate.sequences or data.sequence_length, or give other rows for this set",
        )
    numbers = [order_N] if sequences > 1 else [order_N[source_N == source] for source in np.unique(source_N)]
    batches, ends = list[Batch](), [0]
    for taken in numbers:
        rounds = batches_in_order(reader, taken, cut, sequence_length, borders, sequences)
        batches += [change(batch, taken[first : first + count]) for first, count, batch in rounds]
        ends.append(len(batches))
    return EvaluationSet(
        batches=[{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches],
        num_samples=num_samples,
        held_samples=reader.num_samples,
        num_targets=len(targets),
        num_bytes=0 if token_bytes_V is None else int(token_bytes_V[targets].sum(dtype=np.int64)),
        of_sources=list(zip(np.unique(source_N).tolist(), map(slice, ends, ends[1:]))) if len(numbers) > 1 else [],
    )


def dealt(shard_samples: Sequence[int], source_shards: Sequence[int], first: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the `first` samples in the order in which they are taken, and the source of each, [N] int64. Without
    `source_shards` all are of one source."""
    source_shards = source_shards or [len(shard_samples)]
    ends = np.cumsum(source_shards)
    sizes = [sum(shard_samples[end - number : end]) for end, number in zip(ends.tolist(), source_shards)]
    source_N = np.repeat(np.arange(len(sizes)), sizes)
    share_N = np.concatenate([np.arange(size) / max(1, size) for size in sizes])
    order_N = np.argsort(share_N, kind="stable")[:first]
    return order_N, source_N[order_N]


def batches_in_order(
    reader: Reader,
    numbers_N: np.ndarray,
    cut: BatchCut,
    sequence_length: int,
    borders: Borders | None = None,
    sequences: int = 1,
) -> Iterator[tuple[int, int, Batch]]:
    """(first sample, how many, their micro-batch), of this rank's share of the samples `numbers_N`: as many on every rank, the
    last ones perhaps of no sample."""
    rows_N2, num_samples = all_sample_rows(reader)[numbers_N], len(numbers_N)
    at_once = cut.micro_batch
    per_round = at_once * cut.batch_ranks
    for at in range(cut.batch_rank * at_once, _round_up(num_samples, per_round), per_round):
        piece = rows_N2[at : at + at_once]
        yield min(at, num_samples), len(piece), collate(reader, piece, at_once, sequence_length, borders, sequences)


def all_sample_rows(reader: Reader) -> np.ndarray:
    """[samples, 2]: shard and row of every sample, in the order of the shards."""
    return np.array(
        [(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)], np.int64
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
