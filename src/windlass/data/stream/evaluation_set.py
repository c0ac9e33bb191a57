"""A validation set as batches: the same first samples every time and for every layout, with their exact bytes.

Sample i of the first N goes to round i // (micro_batch * R) of R batch ranks; inside a round, rank r takes its
contiguous piece. All ranks get equally many batches of equal shape; rows without a sample count no target
(-100). The counts of targets and bytes are those of all N samples, on all ranks, so a summed loss needs no second
reduction.

A target's bytes are those of its token (special tokens, EOS among them, have 0), so a sequence may begin in the
middle of a document, and the bytes of all samples of a set add up to its text.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from windlass.data.packing import NOT_COUNTED, Borders
from windlass.data.shards.mds import Reader, ShardSource
from windlass.data.stream.batch_source import Batch
from windlass.data.stream.collate import collate
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
    num_targets: int
    """Targets counted, over all ranks."""
    num_bytes: int
    """Bytes of text of these targets; 0 where the bytes of tokens do not add up to the text."""


def evaluation_set(
    source: str | Path | ShardSource,
    *,
    num_sequences: int,
    micro_batch: int,
    batch_rank: int,
    batch_ranks: int,
    token_bytes_V: np.ndarray | None,
    borders: Borders | None = None,
    device: torch.device | str = "cpu",
    name: str = "validation",
    sequences: int = 1,
    change: ChangeBatch = unchanged,
) -> EvaluationSet:
    """The first `num_sequences` sequences of a set (all, if it has fewer), of which a sample has `sequences`, cut over the batch
    ranks. With `borders` documents are isolated. `change`: what is done to a batch of these samples of the set. Raises UserError
    where they count no target.

    token_bytes_V: bytes of text per token id (`Prepared.token_bytes`), or None if they are not known.
    """
    reader = Reader(Path(source) if isinstance(source, str) else source)
    num_samples = min(-(-num_sequences // sequences), reader.num_samples)
    places_N2 = all_places(reader)[:num_samples]
    sequence_length = len(reader.read(0, 0)[0]) // sequences - 1
    everywhere = [places_N2[at : at + ROWS_AT_ONCE] for at in range(0, num_samples, ROWS_AT_ONCE)]
    all_batches = (collate(reader, places, len(places), sequence_length, borders, sequences) for places in everywhere)
    targets = np.concatenate([(found := b["targets"].numpy())[found != NOT_COUNTED] for b in all_batches])
    if not len(targets):
        raise UserError(
            f"the first {num_samples} samples of the set {name} count no target",
            "a loss is an average over counted targets, and these are masked all (an answer longer than a sequence away?)",
            "raise evaluate.sequences or data.sequence_length, or give other rows for this set",
        )
    cut = (micro_batch // sequences, batch_rank, batch_ranks)
    rounds = batches_in_order(reader, num_samples, *cut, sequence_length, borders, sequences)
    batches = [change(batch, np.arange(first, first + count)) for first, count, batch in rounds]
    return EvaluationSet(
        batches=[{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches],
        num_samples=num_samples,
        num_targets=len(targets),
        num_bytes=0 if token_bytes_V is None else int(token_bytes_V[targets].sum(dtype=np.int64)),
    )


def batches_in_order(
    reader: Reader,
    num_samples: int,
    at_once: int,
    batch_rank: int,
    batch_ranks: int,
    sequence_length: int,
    borders: Borders | None = None,
    sequences: int = 1,
) -> Iterator[tuple[int, int, Batch]]:
    """(first sample, how many, their batch of `at_once` samples), of this rank's share of the first `num_samples`: as many on
    every rank, the last ones perhaps of no sample."""
    places_N2 = all_places(reader)[:num_samples]
    for at in range(batch_rank * at_once, _round_up(num_samples, at_once * batch_ranks), at_once * batch_ranks):
        piece = places_N2[at : at + at_once]
        yield min(at, num_samples), len(piece), collate(reader, piece, at_once, sequence_length, borders, sequences)


def all_places(reader: Reader) -> np.ndarray:
    """[samples, 2]: shard and row of every sample, in the order of the shards."""
    return np.array(
        [(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)], np.int64
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
