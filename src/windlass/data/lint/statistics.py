"""Statistics of a prepared set: amounts, lengths of documents, use of the vocabulary, and one sample to read.

Amounts of the whole set come from prepared.json. Lengths, the share of targets and the vocabulary are counted from the shards,
over at most `most_samples` samples in runs of neighbours spread over the set; the result says how many.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.documents import DocumentWalk, SampleBlock, blocks, content_lengths, position, runs_of
from windlass.data.lint.lint import expected_of
from windlass.data.prepare.manifest import Prepared, SetInfo
from windlass.data.shards.mds import Reader
from windlass.data.tokenize.preferences import ROWS
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError

PERCENTS: Final = (0, 10, 50, 90, 99, 100)
NUM_FREQUENT: Final = 12
Kind = Literal["context", "target", "masked", "end", "padding"]


class Survey(NamedTuple):
    """A set in numbers. `info`: of the whole set; the rest: of the samples that were read."""

    name: str
    info: SetInfo
    sequence_length: int
    num_read: int
    """Samples that were read."""
    num_targets: int
    """Ids in them that count in the loss."""
    num_content: int
    """Ids in them after the first that are no padding."""
    lengths: np.ndarray
    """Tokens of each document that is whole in the samples, without EOS, sorted."""
    num_pieces: int
    """Documents that are not whole: cut by packing, or by the border of what was read."""
    num_distinct: int
    """Ids that occur."""
    vocab_size: int
    frequent: list[tuple[str, float]]
    """The most frequent tokens as text, and their share."""
    rows_per_sample: int
    """Sequences of a sample: 2 of a pair, the chosen answer and the rejected one."""

    @property
    def fill(self) -> float:
        return self.num_content / max(1, self.num_read * self.rows_per_sample * self.sequence_length)

    @property
    def counted(self) -> float:
        return self.num_targets / max(1, self.num_content)

    @property
    def percentiles(self) -> dict[int, int]:
        """Percent -> tokens; empty without documents."""
        if not len(self.lengths):
            return {}
        return {percent: int(np.percentile(self.lengths, percent, method="nearest")) for percent in PERCENTS}

    @property
    def histogram(self) -> list[tuple[int, int]]:
        """(shortest length of the bin, documents in it), bins by powers of two, those between the first and last in use."""
        if not len(self.lengths):
            return []
        bins = np.bincount([int(length).bit_length() for length in self.lengths])
        first = int(np.flatnonzero(bins)[0])
        return [(1 << bit >> 1, int(bins[bit])) for bit in range(first, len(bins))]


class Segment(NamedTuple):
    """Neighbouring tokens of one kind, as text."""

    kind: Kind
    text: str
    num_tokens: int


class Sample(NamedTuple):
    where: str
    rows: list[list[Segment]]
    """One row; two for a pair."""


def survey_set(prepared: Prepared, name: str, most_samples: int) -> Survey:
    """Raises BadShard."""
    reader = Reader(prepared.shards(name))
    tokenizer, _ = open_tokenizer(prepared.tokenizer_directory)
    documents = DocumentWalk(prepared.eos_id)
    counts_V = np.zeros(prepared.vocab_size, np.int64)
    lengths: list[int] = []
    num_read = num_targets = num_content = num_pieces = 0
    for block in blocks(reader, runs_of(reader.num_samples, most_samples), *kind_of_rows(prepared, name)):
        is_content_NT = np.arange(1, block.ids_NL.shape[1]) < content_lengths(block, prepared.eos_id)[:, None]
        ids = block.ids_NL[:, 1:][is_content_NT]
        counts_V += np.bincount(ids[(ids >= 0) & (ids < len(counts_V))], minlength=len(counts_V))
        num_read += block.num_samples
        num_content += len(ids)
        num_targets += int((block.labels_NL[:, 1:] != NOT_COUNTED).sum())
        for document in documents.add(block):
            if document.is_whole:
                lengths.append(len(document.ids_N))
            else:
                num_pieces += 1
    num_pieces += len(list(documents.end()))
    return Survey(
        name=name,
        info=prepared.sets[name],
        sequence_length=prepared.settings["sequence_length"],
        num_read=num_read,
        num_targets=num_targets,
        num_content=num_content,
        lengths=np.sort(np.array(lengths, np.int64)),
        num_pieces=num_pieces,
        num_distinct=int((counts_V > 0).sum()),
        vocab_size=prepared.vocab_size,
        frequent=_frequent(counts_V, tokenizer),
        rows_per_sample=kind_of_rows(prepared, name)[0],
    )


def _frequent(counts_V: np.ndarray, tokenizer: Tokenizer) -> list[tuple[str, float]]:
    top = [int(number) for number in np.argsort(-counts_V, kind="stable")[:NUM_FREQUENT] if counts_V[number]]
    total = int(counts_V.sum())
    return [(tokenizer.decode([number], skip_special_tokens=False), counts_V[number] / total) for number in top]


def sample_number(prepared: Prepared, name: str, sample: str) -> int:
    """The number, in the order of the shards, of what a user calls a sample of the set: that number, or `shard/row` as the events
    of a run name it. Raises UserError where the set has no such sample."""
    counts = [shard.num_samples for shard in prepared.shards(name).shards]
    match = re.fullmatch(r"(?:(\d{1,9})/)?(\d{1,18})", sample, re.ASCII)
    if match is not None:
        shard, row = None if match[1] is None else int(match[1]), int(match[2])
        if shard is None and row < sum(counts):
            return row
        if shard is not None and shard < len(counts) and row < counts[shard]:
            return sum(counts[:shard]) + row
    rule = f"the samples of {name} are 0 to {sum(counts) - 1}; or shard/row, of the shards 0 to {len(counts) - 1}"
    raise UserError(f"--sample {sample}", rule, "give one of them")


def read_sample(prepared: Prepared, name: str, number: int, is_isolated: bool = False) -> Sample:
    """Sample `number` of the set, in the order of the shards. Raises BadShard."""
    reader = Reader(prepared.shards(name))
    block = next(blocks(reader, [range(number, number + 1)], *kind_of_rows(prepared, name)))
    rows = [list(_segments(block, row, prepared, is_isolated)) for row in range(len(block.ids_NL))]
    return Sample(f"{name}, {position(reader, number)}", rows)


def kind_of_rows(prepared: Prepared, name: str) -> tuple[int, bool, bool]:
    """Rows per sample, whether they are plain text, and whether none follows another, as `blocks` takes them."""
    kind = expected_of(prepared, name, False).format
    return ROWS if kind == "preference" else 1, kind in ("text", "samples"), kind == "samples"


def _segments(block: SampleBlock, row: int, prepared: Prepared, is_isolated: bool) -> Iterator[Segment]:
    tokenizer, _ = open_tokenizer(prepared.tokenizer_directory)
    kinds = _kinds(block, row, prepared.eos_id, is_isolated)
    size, ids_L = prepared.vocab_size, block.ids_NL[row]
    borders = [0, *(at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1] or kinds[at] == "end"), len(kinds)]
    for start, end in pairwise(borders):
        ids = [number for number in ids_L[start:end].tolist() if 0 <= number < size]
        text = "" if kinds[start] == "padding" else tokenizer.decode(ids, skip_special_tokens=False)
        yield Segment(kinds[start], text, end - start)


def _kinds(block: SampleBlock, row: int, eos_id: int, is_isolated: bool) -> list[Kind]:
    """The kind of each id of the row. The first is only context: it is the last target of the sample before."""
    ids_L, labels_L, ends_L = block.ids_NL[row], block.labels_NL[row].copy(), block.ends(eos_id)[row]
    if is_isolated:
        labels_L[1:][ends_L[:-1]] = NOT_COUNTED  # as packing.isolate, for one sample
    length = int(content_lengths(block, eos_id)[row])
    kinds: list[Kind] = ["context"]
    for at in range(1, len(ids_L)):
        if at >= length:
            kinds.append("padding")
        elif ends_L[at]:
            kinds.append("end")
        else:
            kinds.append("masked" if labels_L[at] == NOT_COUNTED else "target")
    return kinds
