"""Samples as they are stored, and the documents in them reassembled: for inspecting data, not for training.

A set is read whole, or, where it has more samples than asked for, in runs of neighbours spread evenly over it. Only neighbours
can be joined: a document of a concatenated stream continues in the next sample.

    concatenated   [EOS a a a EOS b]  [b b b b EOS c]  [c EOS . . . .]      the first id is the last one of the sample before
    best-fit       [EOS a a a EOS .]  [EOS b b b b b]  [EOS c EOS . .]      the first id is EOS; "." is EOS that is no target

Where chats store which EOS end documents, the others are ids like any. A sample that does not begin with EOS continues the
document before. One that does begins a new document; if the one before had no EOS, it was a piece of a document that best-fit
cut. The rest of a cut text ends with EOS as a whole one does, but its first id is no target. A sample of pairs is two rows, each
laid out as best-fit.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.shards.mds import Reader

SAMPLES_AT_ONCE: Final = 256
NUM_RUNS: Final = 8


class SampleBlock(NamedTuple):
    """Neighbouring samples as rows, [N, T+1] int32 each; `first`: the number of the first sample in its set. `begins_run`:
    whether the sample before it was not read. `rows_per_sample`: 2 for pairs. `is_text`: every id is a target, EOS too, except
    the first of the rest of a cut document; in chats a mask selects the targets."""

    ids_NL: np.ndarray
    labels_NL: np.ndarray
    first: int
    begins_run: bool
    rows_per_sample: int = 1
    is_text: bool = False
    ends_NL: np.ndarray | None = None
    """Whether each id ends a document, bool, where that is stored (in chats)."""
    is_alone: bool = False
    """Whether a sample is a row that follows no other, instead of beginning with the last id of the one before."""

    @property
    def num_samples(self) -> int:
        return len(self.ids_NL) // self.rows_per_sample

    def ends(self, eos_id: int) -> np.ndarray:
        """Whether each id ends a document, [N, T+1] bool: as stored, else every EOS does."""
        return self.ids_NL == eos_id if self.ends_NL is None else self.ends_NL

    def sample(self, row: int) -> int:
        """The number of the sample that `row` belongs to."""
        return self.first + row // self.rows_per_sample


class Document(NamedTuple):
    """A document as the samples hold it."""

    ids_N: np.ndarray
    """Without EOS."""
    counted_N: np.ndarray
    """Whether each id is a target, and last whether its EOS is, [n + 1] bool; [n] without EOS."""
    sample: int
    """The sample of the set that it begins in."""
    is_whole: bool
    """False where it begins before the samples that were read, continues after them, or is a piece of a cut one."""


def runs_of(num_samples: int, most: int, num_runs: int = NUM_RUNS) -> list[range]:
    """Which samples to read: all, or `num_runs` runs of neighbours, `most` samples in all, with the first and last of the set."""
    if num_samples <= most:
        return [range(num_samples)]
    count = min(num_runs, most)
    length = most // count
    starts = [(num_samples - length) * k // max(1, count - 1) for k in range(count)]
    return [range(start, start + length) for start in starts]


def position(reader: Reader, sample: int) -> str:
    """The position of a sample of the set: "shard.00003.mds, sample 17" (of the shard, from 0)."""
    for shard, num_samples in zip(reader.shards, reader.shard_samples):
        if sample < num_samples:
            return f"{shard.stored.name}, sample {sample}"
        sample -= num_samples
    raise AssertionError("a sample after the end of its set")


def blocks(
    reader: Reader, runs: list[range], rows_per_sample: int = 1, is_text: bool = False, is_alone: bool = False
) -> Iterator[SampleBlock]:
    """The samples of `runs`, at most SAMPLES_AT_ONCE at a time; other arguments as in SampleBlock. Raises BadShard."""
    ends = np.cumsum(reader.shard_samples)
    for run in runs:
        for start in range(run.start, run.stop, SAMPLES_AT_ONCE):
            numbers = range(start, min(start + SAMPLES_AT_ONCE, run.stop))
            rows, stored = [], []
            for number in numbers:
                shard = int(np.searchsorted(ends, number, "right"))
                at = shard, number - int(ends[shard - 1]) if shard else number
                rows.append(reader.read(*at))
                stored.append(reader.ends(*at))
            ids_NL, labels_NL = (np.stack(column) for column in zip(*rows))
            known = [row for row in stored if row is not None]
            length = ids_NL.shape[1] // rows_per_sample
            parts = ids_NL.reshape(-1, length), labels_NL.reshape(-1, length)
            ends_NL = np.stack(known) if known else None
            yield SampleBlock(*parts, start, start == run.start, rows_per_sample, is_text, ends_NL, is_alone)


def content_lengths(block: SampleBlock, eos_id: int) -> np.ndarray:
    """Ids of each sample before its padding, [N]. Padding is the EOS at its end that are no targets, except one that ends a
    document whose end is not learned."""
    ends_NL = block.ends(eos_id)
    is_content_NL = ~ends_NL | (block.labels_NL != NOT_COUNTED)
    is_content_NL[:, 0] = True
    length = block.ids_NL.shape[1]
    lengths_N = length - np.argmax(is_content_NL[:, ::-1], 1)
    ends_open_N = ~ends_NL[np.arange(len(lengths_N)), lengths_N - 1]
    if block.is_text:  # its end is a target, so EOS that are none are padding, after a piece too
        ends_open_N &= ~(block.labels_NL[:, 1:] != NOT_COUNTED).any(1)
    return np.where(ends_open_N & (lengths_N < length), lengths_N + 1, lengths_N)


class DocumentWalk:
    """Reassembles documents. `add` the blocks of a set in order; `end` yields the remaining piece."""

    def __init__(self, eos_id: int):
        self._eos_id = eos_id
        self._ids: list[np.ndarray] = []
        self._counted: list[np.ndarray] = []
        self._sample, self._begins, self._is_open = 0, False, False

    def add(self, block: SampleBlock) -> Iterator[Document]:
        if block.begins_run:
            yield from self.end()
        ends_NL = block.ends(self._eos_id)
        for row, length in enumerate(content_lengths(block, self._eos_id).tolist()):
            ids_L, is_counted_L = block.ids_NL[row, :length], block.labels_NL[row, :length] != NOT_COUNTED
            number = block.sample(row)
            if ends_NL[row, 0] or block.is_alone:
                yield from self.end()
            if ends_NL[row, 0]:
                self._begin(number, begins=True)
            elif not self._is_open:
                self._begin(number, begins=False)
            start = 0 if block.is_alone and not ends_NL[row, 0] else 1
            for end in (np.flatnonzero(ends_NL[row, 1:length]) + 1).tolist():
                self._ids.append(ids_L[start:end])
                self._counted.append(is_counted_L[start : end + 1])
                yield self._take(is_whole=self._begins and not (block.is_text and self._is_rest()))
                self._begin(number, begins=True)
                start = end + 1
            self._ids.append(ids_L[start:])
            self._counted.append(is_counted_L[start:])

    def end(self) -> Iterator[Document]:
        """The document that was begun and did not end."""
        if self._is_open and any(map(len, self._ids)):
            yield self._take(is_whole=False)
        self._is_open = False

    def _begin(self, sample: int, begins: bool) -> None:
        self._ids, self._counted = [], []
        self._sample, self._begins, self._is_open = sample, begins, True

    def _is_rest(self) -> bool:
        counted_N = next((part for part in self._counted if len(part)), None)
        return counted_N is not None and not counted_N[0]

    def _take(self, is_whole: bool) -> Document:
        return Document(np.concatenate(self._ids), np.concatenate(self._counted), self._sample, is_whole)
