"""A stream of token ids -> samples of T+1 ids, in two ways. Both keep every document's border (its EOS) in the sample.

    stream   = EOS d0 d0 d0 EOS d1 d1 EOS ...            EOS first, so that the first token has a context like all others

**concatenate.** sample i = stream[i*T : i*T + T + 1]    its targets: stream[i*T + 1 : i*T + T + 1]
Neighbours share one token and nothing is lost: each of the N tokens after the first EOS (all documents, each with its EOS) is a
target once, in ceil(N / T) samples. If T does not divide N, the last sample is filled with EOS whose labels are -100. These at
most T-1 positions per set are the only padding. Documents are cut wherever a sample ends.

**best-fit.** A sample is EOS and whole documents, each with its EOS; the remaining room is filled with EOS that are no targets.
Only documents longer than T are cut, into pieces of T and a rest of at least two ids. Best-fit decreasing (Johnson 1974; for
language models Ding et al., arXiv 2404.10830): of a buffer of documents the longest is placed first, each into the fullest sample
that has room. Samples that stay too empty are dissolved into the next buffer. So every token is in exactly one sample, and all
but the first of each rest are targets: the rest of a cut document follows an EOS, which does not predict it.

**Isolation.** `isolate` returns where the documents of a sample begin, so that attention and positions stay inside a document,
and removes the targets across a border. In text every EOS ends a document. In conversations an EOS may end a turn, so
there the ends are stored beside the ids (shards/mds).
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED

WHOLE: Final = 100  # percent that a target weighs, unless said
BUFFER_SAMPLES: Final = 2048  # of best-fit, in samples' worth of documents: 16 MB at T = 2048
SAMPLES_AT_ONCE: Final = 256  # written out: twice 2 MB at T = 2048
DISSOLVED_SHARE: Final = 0.005  # a sample of a buffer with more room than this goes into the next buffer


class Borders(NamedTuple):
    """What isolation needs of a set: the id of EOS, which ends documents where no ends are stored, and the most documents in one
    sample."""

    eos_id: int
    max_documents: int


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
        end = num_samples * sequence_length
        yield samples_of(stream[: end + 1], eos_id, sequence_length)
        held = [stream[end:]]
        num_held = len(held[0])
    if num_held > 1:
        yield samples_of(np.concatenate(held), eos_id, sequence_length)


def samples_of(ids_N: np.ndarray, eos_id: int, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids [n, T+1], labels [n, T+1]) of two or more ids of such a stream: neighbours share one, the last is filled up."""
    num_full = (len(ids_N) - 1) // sequence_length
    rest = ids_N[num_full * sequence_length :]
    full = np.empty((0, sequence_length + 1), np.int32)
    if num_full:
        full = np.lib.stride_tricks.sliding_window_view(ids_N, sequence_length + 1)[::sequence_length]
    if len(rest) == 1:
        return full, full
    input_ids = np.full((1, sequence_length + 1), eos_id, np.int32)
    labels = np.full((1, sequence_length + 1), NOT_COUNTED, np.int32)
    input_ids[0, : len(rest)] = labels[0, : len(rest)] = rest
    return np.concatenate([full, input_ids]), np.concatenate([full, labels])


def pack_best_fit(
    ids: Iterable[np.ndarray], eos_id: int, sequence_length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Samples as `pack` gives them, of whole documents. The same documents give the same samples, however `ids` is cut."""
    for samples in best_fit(_pieces(ids, eos_id, sequence_length), sequence_length):
        for start in range(0, len(samples), SAMPLES_AT_ONCE):
            yield samples_of_pieces(samples[start : start + SAMPLES_AT_ONCE], eos_id, sequence_length)


Piece = TypeVar("Piece", bound=tuple[Any, ...])
"""Begins with the ids of a document with its EOS, at most T of them, or with their range in an array; and whether they are the
rest of a cut one."""


def best_fit(pieces: Iterable[Piece], sequence_length: int) -> Iterator[list[list[Piece]]]:
    """The pieces of each sample, some samples at a time."""
    budget = BUFFER_SAMPLES * sequence_length
    held: list[Piece] = []
    num_held = 0
    for piece in pieces:
        held.append(piece)
        num_held += len(piece[0])
        if num_held >= budget:
            full, left = _fit(held, sequence_length, keep=True)
            num_held = sum(len(piece[0]) for piece in left)
            if num_held > budget * 3 // 4:  # documents that do not fit together will not do so later: bound the buffer
                (full, left), num_held = _fit(held, sequence_length, keep=False), 0
            held = left
            yield full
    if held:
        yield _fit(held, sequence_length, keep=False)[0]


def document_ends(ids: np.ndarray, eos_id: int) -> list[int]:
    """Behind the last id of each document."""
    ends: list[int] = (np.flatnonzero(ids == eos_id) + 1).tolist()
    return ends


def ranges_of(ends: Iterable[int], sequence_length: int, is_rest: bool = False) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, whether it is the rest of a cut one) of each piece of the documents with these ends. `is_rest`: whether the
    first of them began before."""
    start = 0
    for end in ends:
        while end - start > sequence_length:
            cut = sequence_length - (end - start == sequence_length + 1)  # a rest of EOS alone would not be learned
            yield start, start + cut, is_rest
            start, is_rest = start + cut, True
        yield start, end, is_rest
        start, is_rest = end, False


def _pieces(ids: Iterable[np.ndarray], eos_id: int, sequence_length: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Whole documents; of longer ones all pieces of T ids, and the rest. Holds one piece at a time."""
    held = np.empty(0, np.int32)
    is_rest = False
    for part in ids:
        held, end = np.concatenate([held, part]), 0
        for start, end, of_cut in ranges_of(document_ends(held, eos_id), sequence_length, is_rest):
            yield held[start:end], of_cut
        held, is_rest = held[end:], is_rest and not end
        while len(held) > sequence_length:  # a document that is longer than what has come so far
            yield held[:sequence_length], is_rest
            held, is_rest = held[sequence_length:], True
    assert not len(held), "a document without EOS"


def _fit(pieces: list[Piece], capacity: int, keep: bool) -> tuple[list[list[Piece]], list[Piece]]:
    """Best-fit decreasing -> (samples, pieces of samples that were dissolved: none unless `keep`), in the pieces' order."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    by_room: dict[int, list[int]] = {}
    open_rooms = 0  # bit r: some sample has room r; the lowest bit from the length up is the best fit
    for number in sorted(range(len(pieces)), key=lambda number: -len(pieces[number][0])):
        length = len(pieces[number][0])
        fitting = open_rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            bin_ = by_room[room].pop()
            if not by_room[room]:
                open_rooms ^= 1 << room
            bins[bin_].append(number)
        else:
            room, bin_ = capacity, len(bins)
            bins.append([number])
            rooms.append(0)
        rooms[bin_] = room - length
        if rooms[bin_]:
            by_room.setdefault(rooms[bin_], []).append(bin_)
            open_rooms |= 1 << rooms[bin_]
    wasteful = int(capacity * DISSOLVED_SHARE)
    full = [sorted(numbers) for numbers, room in zip(bins, rooms) if not keep or room <= wasteful]
    left = sorted(number for numbers, room in zip(bins, rooms) if keep and room > wasteful for number in numbers)
    return [[pieces[number] for number in numbers] for numbers in sorted(full)], [pieces[number] for number in left]


def samples_of_pieces(
    samples: list[list[tuple[np.ndarray, bool]]], eos_id: int, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids [n, T+1], labels [n, T+1]) of the pieces of n samples."""
    dtype = np.result_type(np.int32, *{ids.dtype for pieces in samples for ids, _ in pieces})
    input_ids = np.full((len(samples), sequence_length + 1), eos_id, dtype)
    labels = np.full((len(samples), sequence_length + 1), NOT_COUNTED, dtype)
    for row, pieces in enumerate(samples):
        at = 1
        for ids, is_rest in pieces:
            input_ids[row, at : at + len(ids)] = labels[row, at : at + len(ids)] = ids
            if is_rest:
                labels[row, at] = NOT_COUNTED
            at += len(ids)
    return input_ids, labels


def isolate(ends_BS: np.ndarray, targets_BT: np.ndarray, max_documents: int) -> tuple[np.ndarray, np.ndarray]:
    """(documents [B, M], targets [B, T]) of samples [B, T+1]: where documents begin, rising, filled up with T; and the targets
    without those across a border. A document's EOS is its own, and the first token of none is a target. ends_BS: whether each
    id is the EOS of a document, bool. M = `max_documents`."""
    num_positions = ends_BS.shape[1] - 1
    begins_BT = _begins(ends_BS, targets_BT)
    assert int(begins_BT.sum(1).max()) <= max_documents
    starts_BT = np.sort(np.where(begins_BT, np.arange(num_positions), num_positions), axis=1)
    fill = max(0, max_documents - num_positions)
    documents_BM = np.pad(starts_BT[:, :max_documents], ((0, 0), (0, fill)), constant_values=num_positions)
    return documents_BM, np.where(ends_BS[:, :-1], NOT_COUNTED, targets_BT)


def most_documents(ends_BS: np.ndarray, labels_BS: np.ndarray) -> int:
    """The most documents in one sample."""
    return int(_begins(ends_BS, labels_BS[:, 1:]).sum(1).max())


def _begins(ends_BS: np.ndarray, targets_BT: np.ndarray) -> np.ndarray:
    """Whether a document begins at each position, [B, T] bool: at the first, and after each end. The padding after the last
    target begins none."""
    begins_BT = np.ones((len(ends_BS), ends_BS.shape[1] - 1), bool)
    begins_BT[:, 1:] = ends_BS[:, :-2]
    is_counted_BT = targets_BT != NOT_COUNTED
    is_used_BT = np.flip(np.maximum.accumulate(np.flip(is_counted_BT, 1), 1), 1)  # a target here or later
    is_used_BT[:, 0] = True
    return begins_BT & is_used_BT


def targets(samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[np.ndarray]:
    """The stream again, in int32 arrays, from (input_ids, labels) pairs in order: the first EOS and every target."""
    for number, (input_ids, labels) in enumerate(samples):
        if number == 0:
            yield input_ids[:1]
        yield labels[1:][labels[1:] != NOT_COUNTED]


def unpack_samples(samples: Iterable[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The `targets` of samples, as one array."""
    return np.concatenate(list(targets(samples)))
