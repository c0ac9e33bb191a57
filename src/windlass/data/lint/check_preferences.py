"""Checks on preference pairs: one prompt, two different answers, each with targets, and no pair twice or swapped."""

import numpy as np
import xxhash

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.lint.check_ids import Copies, Seen, Where
from windlass.data.lint.documents import SampleBlock
from windlass.data.lint.findings import Findings


class PairChecks:
    """A sample at a time: its first row is the chosen answer, its second the rejected one."""

    def __init__(self, found: Findings, where: Where):
        self._found, self._where = found, where
        self.seen: Seen = {}
        self._num_pairs = self._num_turned = 0
        self._turned = (0, 0)
        self._copies = Copies()

    def add(self, block: SampleBlock) -> None:
        rows_N2L = block.ids_NL.reshape(block.num_samples, 2, -1)
        is_counted_N2L = block.labels_NL.reshape(rows_N2L.shape) != NOT_COUNTED
        is_counted_N2L[:, :, 0] = False  # context alone
        starts_N2 = is_counted_N2L.argmax(2)
        for number, (rows_2L, starts) in enumerate(zip(rows_N2L, starts_N2.tolist())):
            sample = block.first + number
            self._num_pairs += 1
            if not is_counted_N2L[number].any(1).all():
                self._found.add("mask-empty", "a pair with an answer of which nothing is learned", self._where(sample))
                continue
            chosen, rejected = rows_2L
            if np.array_equal(chosen, rejected):
                self._found.add("pair-of-equals", "chosen and rejected are the same", self._where(sample))
            elif starts[0] != starts[1] or not np.array_equal(chosen[: starts[0]], rejected[: starts[1]]):
                what = f"the answers follow prompts of {starts[0] - 1} and {starts[1] - 1} tokens, which differ"
                self._found.add("pair-of-two-prompts", what, self._where(sample))
            self._compare(chosen, rejected, int(is_counted_N2L[number].sum()), sample)

    def _compare(self, chosen: np.ndarray, rejected: np.ndarray, num_learned: int, sample: int) -> None:
        one, other = (xxhash.xxh3_64_hexdigest(np.ascontiguousarray(row).data) for row in (chosen, rejected))
        digest, turned = (xxhash.xxh3_64_intdigest(text.encode()) for text in (one + other, other + one))
        if digest in self.seen:
            self._copies.add(num_learned, self.seen[digest][0], sample)
        elif turned in self.seen and digest != turned:
            self._num_turned += 1
            self._turned = (self.seen[turned][0], sample)
        self.seen.setdefault(digest, (sample, num_learned))

    def end(self) -> None:
        if self._copies.are_many(self._num_pairs):
            length, first, sample = self._copies.longest
            what = f"a pair with answers of {length:,} tokens is also in {self._where(first)}"
            self._found.add("duplicate-documents", what, self._where(sample), self._copies.num)
        if self._num_turned:
            first, sample = self._turned
            what = f"what is chosen here is rejected in {self._where(first)}, against the same answer"
            self._found.add("pair-contradicted", what, self._where(sample), self._num_turned)
