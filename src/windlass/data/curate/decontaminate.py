"""Texts that must not be learned, such as those of a benchmark: which documents share an n-gram of words with one of them.

A word is a run of letters and digits, in lower case; punctuation separates words. GPT-3 takes n of 13 (arXiv 2005.14165, C).
N-grams are compared by their xxh64: 10^9 of documents against 10^7 of texts match by chance with a probability of 5 * 10^-4. A
process keeps the hashes of the texts once, about 70 bytes for each.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

import xxhash

from windlass.errors import UserError

WORD: Final = re.compile(r"[^\W_]+")
Texts = Callable[[], Iterable[str]]


class Hashed(NamedTuple):
    """The n-grams of texts."""

    hashes: frozenset[int]
    num_texts: int
    num_short: int
    """Texts of fewer than n words, which have none."""


class Listed(NamedTuple):
    """Texts to look for. Hashable, so that a process reads them once; what is equal reads the same texts."""

    texts: Texts
    n: int

    def is_shared(self, text: str) -> bool:
        """Whether `text` has an n-gram of a listed text."""
        return not hashed(self).hashes.isdisjoint(ngram_hashes(text, self.n))

    def check(self, label: str, log: Callable[[str], None]) -> None:
        """Logs what the source `label` is compared with. Raises UserError where there is no n-gram."""
        found = hashed(self)
        if not found.hashes:
            raise UserError(
                f"`filters.decontaminate` of {label}: none of {found.num_texts:,} texts has {self.n} words",
                "a text is looked for by the n-grams of its words",
                "give a smaller `n`, or, as `text`, the key or column that holds the texts",
            )
        short = f"; shorter, and not looked for: {found.num_short:,}" if found.num_short else ""
        amount = f"{len(found.hashes):,} n-grams of {self.n} words of {found.num_texts:,} texts"
        log(f"decontaminate: {label} is compared with {amount}{short}")


def ngram_hashes(text: str, n: int) -> Iterator[int]:
    """xxh64 of every n words that follow each other."""
    words = [word.encode() for word in WORD.findall(text.lower())]
    joined = b" ".join(words)
    begins = [0, *accumulate(len(word) + 1 for word in words)]
    for begin, behind in zip(begins, begins[n:]):
        yield xxhash.xxh64_intdigest(joined[begin : behind - 1])


@lru_cache(maxsize=16)
def hashed(listed: Listed) -> Hashed:
    """Reads the texts. Raises UserError, also where one changed since it was scanned."""
    hashes, num_texts, num_short = set[int](), 0, 0
    for text in listed.texts():
        found = set(ngram_hashes(text, listed.n))
        hashes |= found
        num_texts, num_short = num_texts + 1, num_short + (not found)
    return Hashed(frozenset(hashes), num_texts, num_short)
