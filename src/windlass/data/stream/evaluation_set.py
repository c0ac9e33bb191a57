"""A validation set as batches: the same first samples every time and for every layout, with their exact bytes.

Sample i of the first N goes to round i // (micro_batch * R) of R batch ranks; inside a round, rank r takes its
contiguous piece. All ranks get equally many batches of equal shape; rows without a sample count no target
(-100). The counts of targets and bytes are those of all N samples, on all ranks, so a summed loss needs no second
reduction.

A target's bytes are those of its token (special tokens, EOS among them, have 0), so a sequence may begin in the
middle of a document, and the bytes of all samples of a set add up to its text.
"""

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
) -> EvaluationSet:
    """The first `num_sequences` samples of a set (all, if it has fewer), cut over the batch ranks. With `borders` documents are
    isolated. Raises UserError where they count no target.

    token_bytes_V: bytes of text per token id (`Prepared.token_bytes`), or None if they are not known.
    """
    reader = Reader(Path(source) if isinstance(source, str) else source)
    num_samples = min(num_sequences, reader.num_samples)
    rows = [(shard, row) for shard, count in enumerate(reader.shard_samples) for row in range(count)][:num_samples]
    places_N2 = np.array(rows, np.int64)
    sequence_length = len(reader.read(0, 0)[0]) - 1
    everywhere = [places_N2[at : at + ROWS_AT_ONCE] for at in range(0, num_samples, ROWS_AT_ONCE)]
    all_batches = (collate(reader, places, len(places), sequence_length, borders) for places in everywhere)
    targets = np.concatenate([(found := b["targets"].numpy())[found != NOT_COUNTED] for b in all_batches])
    if not len(targets):
        raise UserError(
            f"the first {num_samples} samples of the set {name} count no target",
            "a loss is an average over counted targets, and these are masked all (an answer longer than a sequence away?)",
            "raise evaluate.sequences or data.sequence_length, or give other rows for this set",
        )
    starts = range(
        batch_rank * micro_batch, _round_up(num_samples, micro_batch * batch_ranks), micro_batch * batch_ranks
    )
    pieces = [places_N2[at : at + micro_batch] for at in starts]
    batches = [collate(reader, piece, micro_batch, sequence_length, borders) for piece in pieces]
    return EvaluationSet(
        batches=[{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches],
        num_samples=num_samples,
        num_targets=len(targets),
        num_bytes=0 if token_bytes_V is None else int(token_bytes_V[targets].sum(dtype=np.int64)),
    )


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step
