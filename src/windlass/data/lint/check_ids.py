"""Checks on ids and labels, without their text: the masks, the borders, the vocabulary, copies."""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import xxhash

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.documents import Document, SampleBlock, content_lengths
from windlass.data.lint.findings import Findings

SHORT: Final = 64  # tokens: shorter documents may be alike by chance (a licence line, "Yes."), a few of them at least
# Chosen, so that none of them is found in a plain corpus: these are warnings, and end no run.
A_FEW: Final = 0.01  # of all documents
REPEATED: Final = 64  # times in a row; half of the document, too
FEW_DOCUMENTS: Final = 20  # too few to take shares of
MUCH_PADDING: Final = 0.2  # of all positions
MANY_CUT: Final = 0.1  # of all documents


class Vocabulary(NamedTuple):
    """What the checks need of a tokenizer. `specials`: id -> text of the special tokens."""

    size: int
    eos_id: int
    """From the preparation: what the loader takes for the end of a document."""
    tokenizers_eos_id: int
    """From the tokenizer's files: the same, or there is a finding."""
    bos_id: int | None
    specials: dict[int, str]


class Expected(NamedTuple):
    """What a set must be like by its preparation."""

    format: str
    """text, chat, preference, or mixed: in text every token is a target, in the others the answers are. samples: text, and rows
    that are taken as they are stored, which follow no other."""
    is_isolated: bool
    is_packed_whole: bool
    """Whether documents longer than a sequence are the only ones cut (best-fit)."""
    documents: int
    """Number of EOS that end documents: two per pair."""
    tokens: int
    samples: int
    bytes_add_up: bool
    """Whether the tokenizer keeps text as it is."""


Where = Callable[[int], str]
Seen = dict[int, tuple[int, int]]
"""Hash of each whole document -> the sample where it begins, and its length in tokens."""


class Copies:
    """Documents that occur twice. A few short ones are no finding."""

    def __init__(self) -> None:
        self.num = 0
        self.longest = (0, 0, 0)

    def add(self, length: int, first: int, sample: int) -> None:
        """A document of `length` tokens that begins in `sample` and equals one that begins in `first`."""
        self.num += 1
        self.longest = max(self.longest, (length, first, sample), key=lambda copy: copy[0])

    def are_many(self, num_documents: int) -> bool:
        return self.longest[0] >= SHORT or (self.num > 1 and self.num > A_FEW * num_documents)


class BlockChecks:
    """Vectorised over samples: cheap enough for every sample of a set."""

    def __init__(self, found: Findings, vocabulary: Vocabulary, expected: Expected, where: Where):
        self._found, self._vocabulary, self._expected, self._where = found, vocabulary, expected, where
        self.num_samples = self.num_eos = self.num_counted = self.num_content = self.num_positions = 0
        self._specials = np.zeros(vocabulary.size, np.int64)
        self._last: int | None = None  # the set's last target

    def add(self, block: SampleBlock) -> None:
        ids_NL, labels_NL, eos_id = block.ids_NL, block.labels_NL, self._vocabulary.eos_id
        is_counted_NT = labels_NL[:, 1:] != NOT_COUNTED
        lengths_N = content_lengths(block, eos_id)
        is_content_NT = np.arange(1, ids_NL.shape[1]) < lengths_N[:, None]
        self.num_samples += block.num_samples
        self.num_positions += is_content_NT.size
        self.num_content += int(is_content_NT.sum())
        self.num_counted += int(is_counted_NT.sum())
        self.num_eos += int((is_content_NT & block.ends(eos_id)[:, 1:]).sum())
        targets_of_last = ids_NL[-1, 1:][labels_NL[-1, 1:] != NOT_COUNTED]
        if block.first + block.num_samples == self._expected.samples and len(targets_of_last):
            self._last = int(targets_of_last[-1])
        self._check_ids(block)
        self._check_labels(block, is_counted_NT, is_content_NT)

    def _check_ids(self, block: SampleBlock) -> None:
        size, ids_NL = self._vocabulary.size, block.ids_NL
        is_bad_NL = (ids_NL < 0) | (ids_NL >= size)
        self._add("ids-out-of-vocabulary", block, is_bad_NL, lambda n, at: f"id {ids_NL[n, at]}, of {size} tokens")
        known = ids_NL[:, 1:][~is_bad_NL[:, 1:]]
        self._specials += np.bincount(known, minlength=size)[:size]
        bos_id = self._vocabulary.bos_id
        if bos_id is not None and bos_id != self._vocabulary.eos_id:
            is_bos_NL = ids_NL == bos_id
            bos = self._vocabulary.specials.get(bos_id, str(bos_id))
            self._add("bos-doubled", block, is_bos_NL[:, 1:] & is_bos_NL[:, :-1], lambda n, at: f"{bos} twice in a row")

    def _check_labels(self, block: SampleBlock, is_counted_NT: np.ndarray, is_content_NT: np.ndarray) -> None:
        ids_NL, labels_NL = block.ids_NL, block.labels_NL
        differs_NT = is_counted_NT & (labels_NL[:, 1:] != ids_NL[:, 1:])
        self._add(
            "labels-are-other-ids",
            block,
            differs_NT,
            lambda n, at: f"label {labels_NL[n, at + 1]} for id {ids_NL[n, at + 1]}",
        )
        follows_eos_NT = block.ends(self._vocabulary.eos_id)[:, :-1]
        if self._expected.format == "text":
            is_empty_N = is_counted_NT.sum(1) == 0
            self._add("mask-empty", block, is_empty_N[:, None], lambda n, at: "no token of the sample is a target")
            is_special_NT = np.isin(ids_NL[:, 1:], list(self._vocabulary.specials))  # ends have checks of their own
            holes_NT = is_content_NT & ~is_special_NT & ~is_counted_NT & ~follows_eos_NT & ~is_empty_N[:, None]
            self._add("mask-holes", block, holes_NT, lambda n, at: f"position {at + 1} is no target, and is text")
        if self._expected.is_isolated and block.ends_NL is None:  # the loader takes away what follows eos_id
            leaks_NT = is_counted_NT & ~follows_eos_NT & (ids_NL[:, :-1] == self._vocabulary.tokenizers_eos_id)
            self._add(
                "leak-across-documents",
                block,
                leaks_NT,
                lambda n, at: f"position {at + 1} is predicted from the document before, isolated or not",
            )

    def _add(self, code: str, block: SampleBlock, is_bad_NX: np.ndarray, what: Callable[[int, int], str]) -> None:
        count = int(is_bad_NX.sum())
        if count:
            row, at = (int(indices[0]) for indices in np.nonzero(is_bad_NX))
            self._found.add(code, what(row, at), self._where(block.sample(row)), count)

    def end(self, is_all: bool) -> None:
        """What can be said when all samples have been seen (`is_all`: of the whole set)."""
        expected = self._expected
        if is_all and self.num_eos < expected.documents:
            self._add_missing(f"occurs {self.num_eos:,} times for {expected.documents:,} documents")
        elif (
            expected.documents  # which is not known before the end is written
            and expected.format == "text"
            and not expected.is_packed_whole
            and self._last not in (None, self._vocabulary.eos_id)
        ):
            self._add_missing("does not end the last document")
        if self.num_counted == 0 and "mask-empty" not in self._found:
            self._found.add("mask-empty", "no token of the set is a target")
        if expected.format == "chat" and 0 < self.num_content == self.num_counted:
            self._found.add("mask-full", "every token of the set is a target, prompts too")
        padding = 1 - self.num_content / max(1, self.num_positions)
        if padding > MUCH_PADDING and self.num_samples >= FEW_DOCUMENTS and expected.format != "preference":
            self._found.add("mostly-padding", f"{padding:.0%} of all positions hold nothing")

    def _add_missing(self, what: str) -> None:
        eos_id, specials = self._vocabulary.eos_id, self._vocabulary.specials
        others = [number for number in specials if number != eos_id]
        often = max(others, key=lambda number: self._specials[number], default=eos_id)
        share = self.num_samples / max(1, self._expected.samples)
        if others and self._specials[often] >= max(1, self._expected.documents * share / 2):
            found = f"{specials[often]} occurs {self._specials[often]:,} times where it should"
            self._found.add("eos-of-another", f"{specials.get(eos_id, eos_id)} {what}; {found}")
        else:
            self._found.add("eos-missing", f"{specials.get(eos_id, eos_id)} {what}")


class DocumentChecks:
    """One document at a time: a hash and a few comparisons each."""

    def __init__(self, found: Findings, expected: Expected, where: Where, sequence_length: int):
        self._found, self._expected, self._where = found, expected, where
        self._sequence_length = sequence_length
        self.num_documents = self._num_rests = self._num_empty = self._num_long = self._num_unlearned = (
            self._num_all_learned
        ) = 0
        self._first_empty = 0
        self.seen: Seen = {}
        self._stems: dict[int, int] = {}  # hash of a document without its last token -> its sample
        self._copies = Copies()

    def add(self, document: Document) -> None:
        ids_N = document.ids_N
        # a piece has one id less where the rest would have been EOS alone
        self._num_long += len(ids_N) >= self._sequence_length - (not document.is_whole)
        if not document.is_whole:
            self._num_rests += len(document.counted_N) > len(ids_N)
            return
        self.num_documents += 1
        if not len(ids_N):
            self._first_empty = document.sample if not self._num_empty else self._first_empty
            self._num_empty += 1
            return
        where = self._where(document.sample)
        self._num_unlearned += not document.counted_N.any()
        self._num_all_learned += bool(document.counted_N.all())
        run, repeated = longest_run(ids_N)
        if run >= REPEATED and 2 * run >= len(ids_N):
            self._found.add(
                "repeated-token", f"a document of {len(ids_N)} tokens holds id {repeated} {run} times in a row", where
            )
        if self._expected.format == "preference":  # many pairs share an answer; check_preferences compares pairs
            return
        digest = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids_N).data)
        if digest in self.seen:
            self._copies.add(len(ids_N), self.seen[digest][0], document.sample)
            return
        self.seen[digest] = (document.sample, len(ids_N))
        if len(ids_N) >= SHORT:
            stem = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids_N[:-1]).data)
            if stem in self._stems:
                what = f"a document of {len(ids_N):,} tokens equals {self._where(self._stems[stem])} up to the last"
                self._found.add("near-duplicates", what, where)
            self._stems.setdefault(stem, document.sample)

    def end(self) -> None:
        where = self._where(self._first_empty) if self._num_empty else ""
        rest = self.num_documents - self._num_empty
        if self._num_empty and self._num_empty >= rest - 1:
            self._found.add("eos-doubled", "two EOS in a row end a document", where, self._num_empty)
        elif self._num_empty:
            self._found.add("empty-documents", "a document without a token", where, self._num_empty)
        self._end_of_masks(rest)
        if self._copies.are_many(rest):
            length, first, sample = self._copies.longest
            what = f"a document of {length:,} tokens is also in {self._where(first)}"
            self._found.add("duplicate-documents", what, self._where(sample), self._copies.num)
        cuts = self._expected.is_packed_whole or self._expected.format == "chat"
        ends = rest + self._num_rests
        if cuts and ends >= FEW_DOCUMENTS and self._num_long > MANY_CUT * ends:
            what = f"{ends:,} documents, and {self._num_long:,} times {self._sequence_length:,} tokens or more of one"
            self._found.add("documents-cut", what)

    def _end_of_masks(self, num_documents: int) -> None:
        """Per conversation, where EOS ends conversations and not each turn of one."""
        if self._expected.format != "chat":
            return
        if num_documents > self._expected.documents:
            return
        if self._num_unlearned:
            self._found.add("mask-empty", "a conversation without a target", count=self._num_unlearned)
        if self._num_all_learned:
            self._found.add("mask-full", "a conversation of which every token is a target", count=self._num_all_learned)


def longest_run(ids_N: np.ndarray) -> tuple[int, int]:
    """(how often, which id) of the longest run of one id."""
    borders = np.flatnonzero(np.diff(ids_N)) + 1
    starts = np.concatenate([[0], borders])
    lengths = np.diff(np.concatenate([starts, [len(ids_N)]]))
    longest = int(lengths.argmax())
    return int(lengths[longest]), int(ids_N[starts[longest]])


def check_overlap(found: Findings, train: Seen, other: Seen, where: Where, train_where: Where) -> None:
    """Documents of a validation set that are in the training set too."""
    copies = Copies()
    for digest in other.keys() & train.keys():
        copies.add(other[digest][1], train[digest][0], other[digest][0])
    if copies.are_many(len(other)):
        length, train_sample, sample = copies.longest
        what = f"{copies.num} of {len(other)} documents are training documents"
        which = f"the longest, of {length:,} tokens, is in {train_where(train_sample)} of train"
        found.add("validation-in-train", f"{what}; {which}", where(sample))
