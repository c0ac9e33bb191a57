"""A stream of token ids -> samples of T+1 ids where neighbours share one: nothing lost, every token a target exactly
once.

    stream   = EOS d0 d0 d0 EOS d1 d1 EOS ...            EOS first, so that the very first token has a context like
all others     sample i = stream[i*T : i*T + T + 1]                 its targets: stream[i*T + 1 : i*T + T + 1]

So the N tokens behind the first EOS (all documents, each with its EOS) are targets once each, in ceil(N / T) samples.
The last sample is short when T does not divide N: it is filled with EOS whose labels are -100, which nobody counts.
These at most T-1 positions per set are the only padding.
"""

from collections.abc import Iterable, Iterator

import numpy as np

NOT_COUNTED = -100


def pack(ids: Iterable[np.ndarray], eos_id: int, sequence_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (input_ids [n, T+1], labels [n, T+1]), int32, n varying; labels are the ids themselves, unshifted."""
    held: list[np.ndarray] = [np.array([eos_id], np.int32)]
    num_held = 1
    for part in ids:
        held.append(part)
        num_held += len(part)
        num_samples = (num_held - 1) // sequence_length
        if num_samples == 0:
            continue
        stream = np.concatenate(held)
        windows = np.lib.stride_tricks.sliding_window_view(stream, sequence_length + 1)[::sequence_length]
        yield windows, windows
        held = [stream[num_samples * sequence_length :]]
        num_held = len(held[0])
    if num_held > 1:
        rest = np.concatenate(held)
        input_ids = np.full((1, sequence_length + 1), eos_id, np.int32)
        labels = np.full((1, sequence_length + 1), NOT_COUNTED, np.int32)
        input_ids[0, : len(rest)] = labels[0, : len(rest)] = rest
        yield input_ids, labels


def unpack(samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The stream again, as one int32 array, from (input_ids, labels) pairs in order: the first EOS and every target."""
    parts: list[np.ndarray] = []
    for input_ids, labels in samples:
        if not parts:
            parts.append(input_ids[:1])
        parts.append(labels[1:][labels[1:] != NOT_COUNTED])
    return np.concatenate(parts)
