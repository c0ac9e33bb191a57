"""Documents nearly the same as an earlier one, by MinHash (Broder 1997) and banded hashing (LSH), from the library rensa.

    text -> its n-grams of words -> a sketch of K numbers; the share of equal numbers of two sketches estimates
    |A and B| / |A or B| of their n-grams, the Jaccard similarity J, with a standard error of sqrt(J (1 - J) / K)

A sketch is cut into bands. Two documents are compared where a band is equal, which has probability 1 - (1 - J^r)^(K/r) for r
numbers a band. r is the largest power of two that finds RECALL of the pairs at the limit. (rensa's own choice for a limit of 0.8
and K of 128 is 16, which finds one in five.)

A document is left out where it reaches the limit with an earlier one that is kept. So each that is left out resembles one that is
kept, and the first of a kind is kept. A sketch depends on the text and a fixed seed alone: workers compute them, and the result
is the same whatever their number. Of 1.2 MB of WikiText-2 (2,891 lines) an idle core makes the n-grams in 0.09 s and rensa 0.5.0
the sketches in 0.01 s, of 128 numbers. datasketch 2.0.0 took 40 times as long for them (docs/log.md), and needs scipy, 143 MB. A
kept document takes 2.8 kB of memory, for a sketch of 128 and a limit of 0.8.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from windlass.data.curate.config import NearDuplicatesConfig
from windlass.errors import UserError

UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, Kana, Han: scripts without spaces between words, of which each character counts as a word."""
WORD: Final = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
SEED: Final = 1
RECALL: Final = 0.99  # chosen: one pair in a hundred at the limit may stay
BATCH_CHARS: Final = 256 << 10  # as the pool's for encoding
EXCERPT_CHARS: Final = 200
MOST_PAIRS: Final = 5
MOST_EXCERPTS: Final = 100_000  # of the first documents: the pairs that are shown are with one of these


class NearPair(NamedTuple):
    """A document that is left out, and the earlier one that is kept."""

    similarity: float
    kept: int
    """Number of the document that is kept, among all documents, from 0."""
    left_out: int
    kept_text: str
    """How the document that is kept begins."""
    left_out_text: str


class Sketched(NamedTuple):
    sketch: Any
    """rensa's RMinHash."""
    excerpt: str


class SketchTexts(NamedTuple):
    """A worker's task: some texts to sketch."""

    texts: list[str]
    ngram: int
    num_perm: int

    def __call__(self, _kept: Mapping[Any, Any]) -> list[Sketched]:
        found = []
        for text in self.texts:
            sketch = rensa_library().RMinHash(self.num_perm, SEED)
            sketch.update(shingles_of(text, self.ngram))  # one by one: rensa's batches start threads, in every worker
            found.append(Sketched(sketch, text[:EXCERPT_CHARS]))
        return found


RunTasks = Callable[[Iterable[SketchTexts]], Iterator[list[Sketched]]]


def rensa_library() -> Any:
    """rensa. Raises UserError where it is missing."""
    try:
        import rensa
    except ImportError:
        raise UserError(
            "`data.deduplicate` with `similarity`, and rensa is not installed",
            "near-duplicates are found by rensa",
            "pip install 'windlass-lm[curate]'",
        ) from None
    return rensa


def library_version() -> str:
    """What a preparation is recognised by besides its settings. Raises UserError where the library is missing."""
    rensa_library()
    return f"rensa {version('rensa')}"


def shingles_of(text: str, n: int) -> list[str]:
    """Every n words in a row, in lower case; of fewer words all of them, and of none the text itself."""
    words = WORD.findall(text.lower())
    return list(map(" ".join, zip(*(words[at:] for at in range(n))))) or [" ".join(words) or text]


def num_bands(similarity: float, num_perm: int) -> int:
    """How many bands a sketch is cut into."""
    for rows in (16, 8, 4, 2):
        if 1 - (1 - similarity**rows) ** (num_perm // rows) >= RECALL:
            return num_perm // rows
    return num_perm


def near_duplicates(
    texts: Iterable[str], config: NearDuplicatesConfig, run: RunTasks
) -> tuple[list[bool], list[NearPair]]:
    """(of each text, whether it is left out; the first of these with what they resemble). `run`: yields the results of tasks in
    order. Raises UserError where the library is missing."""
    found = rensa_library().RMinHashDeduplicator(
        config.similarity,
        config.num_perm,
        use_lsh=True,
        num_bands=num_bands(config.similarity, config.num_perm),
        seed=SEED,
    )
    flags, pairs, first = list[bool](), list[NearPair](), dict[int, Sketched]()
    for batch in run(_tasks(texts, config)):
        for one in batch:
            number = len(flags)
            flags.append(not found.add(str(number), one.sketch))
            if len(pairs) == MOST_PAIRS:
                continue
            if not flags[-1]:
                if number < MOST_EXCERPTS:
                    first[number] = one
            elif (kept := min(map(int, found.get_duplicates(one.sketch)))) in first:
                similarity = first[kept].sketch.jaccard(one.sketch)
                pairs.append(NearPair(similarity, kept, number, first[kept].excerpt, one.excerpt))
    return flags, pairs


def _tasks(texts: Iterable[str], config: NearDuplicatesConfig) -> Iterator[SketchTexts]:
    batch, num_chars = list[str](), 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= BATCH_CHARS:
            yield SketchTexts(batch, config.ngram, config.num_perm)
            batch, num_chars = [], 0
    if batch:
        yield SketchTexts(batch, config.ngram, config.num_perm)
