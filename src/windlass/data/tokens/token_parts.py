"""Documents of ids -> parts for packing, as `tokenize` makes them of text; and samples of one row each.

A row that is taken as it is stored may hold EOS, which ends its documents; so on its way each EOS inside is flagged, an EOS
behind the row ends it, and `pack_samples` takes both away. A row of L ids has L - 1 targets: nothing comes before its first
one. So a row of `sequence_length` ids, as LLM Foundry writes it, trains what it trains there; one EOS that counts nothing fills
it up.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.packing import SAMPLES_AT_ONCE
from windlass.data.tokenize.flags import ID_BITS, INNER
from windlass.data.tokenize.resume import PART_TOKENS, FinishedPart


def token_parts(
    documents: Iterable[bytes], eos_id: int, bytes_V: np.ndarray, part_tokens: int | None, is_samples: bool
) -> Iterator[FinishedPart]:
    """Parts of at least `part_tokens` ids (PART_TOKENS if None), whole documents each. Nothing is kept of them: reading them
    again costs no more. bytes_V: bytes of text per id."""
    held, sizes, num_held = list[np.ndarray](), list[int](), 0
    for document in documents:
        ids_N = np.append(np.frombuffer(document, "<i4"), np.int32(eos_id))
        targets_N = ids_N[1:-1] if is_samples else ids_N
        sizes.append(int(bytes_V[targets_N].sum(dtype=np.int64)))
        if is_samples:
            ids_N[:-1][ids_N[:-1] == eos_id] |= INNER
        held.append(ids_N)
        num_held += len(ids_N)
        if num_held >= min(PART_TOKENS, part_tokens or PART_TOKENS):
            yield FinishedPart(np.concatenate(held), np.array(sizes, np.int64))
            held, sizes, num_held = [], [], 0
    if held:
        yield FinishedPart(np.concatenate(held), np.array(sizes, np.int64))


def targets_of_samples(ids_N: np.ndarray, eos_id: int) -> np.ndarray:
    """The ids that are targets, in rows as `token_parts` makes them: all but each row's first id and the EOS behind it."""
    is_target_N = ids_N != eos_id
    is_target_N[0] = False
    is_target_N[1:] &= ids_N[:-1] != eos_id
    return ids_N[is_target_N] & ID_BITS


def pack_samples(
    ids: Iterable[np.ndarray], eos_id: int, sequence_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Samples as `packing.pack` gives them: (input_ids [n, T+1], labels [n, T+1]), a row each, filled up with EOS that are no
    targets."""
    for part in ids:
        rows = np.split(part, np.flatnonzero(part == eos_id) + 1)[:-1]
        for start in range(0, len(rows), SAMPLES_AT_ONCE):
            some = rows[start : start + SAMPLES_AT_ONCE]
            input_ids = np.full((len(some), sequence_length + 1), eos_id, np.int32)
            labels = np.full((len(some), sequence_length + 1), NOT_COUNTED, np.int32)
            for number, row in enumerate(some):
                input_ids[number, : len(row) - 1] = row[:-1] & ID_BITS
                labels[number, : len(row) - 1] = row[:-1] & ID_BITS
            yield input_ids, labels
