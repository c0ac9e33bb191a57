"""Which documents a set holds: of each source those whose hash falls into the set's share, without duplicates where asked.

The hash of a document's text alone decides its set. So a growing corpus moves no document, and two copies of a document are
never in two sets.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import xxhash

from windlass.data.curate.config import NearDuplicatesConfig
from windlass.data.curate.near_duplicates import NearPair, RunTasks, SketchTexts, near_duplicates
from windlass.data.sources.source_files import Document, Source, bytes_of
from windlass.errors import UserError

HASHES = 1 << 64
BYTES_PER_ID = 4  # of a document of ids
UNKNOWN_BYTES = 1 << 50


class Amount(NamedTuple):
    documents: int
    bytes: int


UNKNOWN = Amount(0, UNKNOWN_BYTES)
"""The amount in a source that is trained on while it is read."""


RunSized = Callable[[Iterable[SketchTexts], int], Iterator[Any]]


class Split(NamedTuple):
    """The document with this hash is in two sets: its last `num_bytes` are held out."""

    digest: int
    num_bytes: int

    def parts(self, text: Document) -> tuple[Document, Document]:
        """(what is trained on, what is held out), cut before a line where one begins in the part that is held out."""
        if isinstance(text, bytes):
            at = (len(text) - self.num_bytes) // BYTES_PER_ID * BYTES_PER_ID
            return text[:at], text[at:]
        data = text.encode()
        at = len(data) - self.num_bytes
        line = data.find(b"\n", at - 1) + 1
        at = line if 0 < line < len(data) else at
        while at and data[at] & 0xC0 == 0x80:  # inside a character
            at -= 1
        return data[:at].decode(), data[at:].decode()


class Border(NamedTuple):
    """What is held out: texts that hash below `hash`, and a part of the one that is cut."""

    hash: int
    cut: Split | None = None


class Duplicates(NamedTuple):
    """Documents that came before, in their source or an earlier one."""

    flags: list[np.ndarray]
    """Per source, [documents] bool."""
    pairs: Sequence[NearPair] = ()
    """The first near-duplicates."""

    @property
    def counts(self) -> list[int]:
        """Per source."""
        return [int(flags.sum()) for flags in self.flags]


class Selection(NamedTuple):
    """The documents of `sources` whose text hashes into low..high of 2**64, without those that `dropped` flags."""

    sources: Sequence[Source]
    low: int
    high: int
    dropped: Duplicates | None = None
    held_out: frozenset[int] = frozenset()
    """Hashes of texts that belong to another set."""
    cut: Split | None = None
    """The document that is cut, of which this set has one part: the end, where low is 0."""

    @property
    def is_pairs(self) -> bool:
        """Whether the set holds preferences; then all its sources do."""
        return self.sources[0].format == "preference"

    def documents_of(self, number: int) -> Iterator[Document]:
        """The documents of one source."""
        dropped = None if self.dropped is None else self.dropped.flags[number]
        for at, document in enumerate(self.sources[number].documents()):
            digest = xxhash.xxh64_intdigest(bytes_of(document))
            if not (dropped is not None and dropped[at]):
                part = self.part_of(document, digest)
                if part:
                    yield part

    def part_of(self, document: Document, digest: int) -> Document | None:
        """What the set holds of a document that is not dropped; `digest`: xxh64 of its text."""
        if not self.low <= digest < self.high or digest in self.held_out:
            return None
        is_cut = self.cut is not None and digest == self.cut.digest
        return self.cut.parts(document)[self.low == 0] if self.cut is not None and is_cut else document

    def documents(self) -> Iterator[Document]:
        return chain.from_iterable(map(self.documents_of, range(len(self.sources))))

    def texts(self) -> Iterator[str]:
        """The documents that are texts."""
        return (document for document in self.documents() if isinstance(document, str))


def select(
    training: Sequence[Source],
    validation: Source | float | Callable[[Selection], Border] | None,
    sets: Mapping[str, Source],
    dropped: Duplicates | None = None,
    held_out_of: int | None = None,
) -> dict[str, Selection]:
    """Every set's documents. `validation`: a share, a source of its own, none, or what finds the border of an amount among all
    documents. `dropped`: of `training`. `held_out_of`: the share is taken of the first N documents of each source."""
    chosen = {"train": Selection(training, 0, HASHES, dropped)}
    if isinstance(validation, Source):
        chosen["validation"] = Selection([validation], 0, HASHES)
    elif callable(validation):
        unlimited = [source._replace(num_tokens=None) for source in training]
        border, cut = validation(Selection(unlimited, 0, HASHES, dropped))
        chosen = {
            "train": Selection(training, border, HASHES, dropped, cut=cut),
            "validation": Selection(unlimited, 0, border + (cut is not None), dropped, cut=cut),
        }
    elif validation is not None:
        border = int(validation * HASHES)
        first = [source._replace(num_tokens=None, first_documents=held_out_of) for source in training]
        held_out, rest = Selection(first, 0, border, dropped), Selection(training, border, HASHES, dropped)
        if held_out_of is not None:
            hashes = frozenset(xxhash.xxh64_intdigest(bytes_of(one)) for one in held_out.documents())
            rest = Selection(training, 0, HASHES, dropped, hashes)
        chosen = {"train": rest, "validation": held_out}
    further = {name: Selection([source], 0, HASHES) for name, source in sets.items()}
    return chosen | further


def duplicates(
    sources: Sequence[Source], asked: bool | NearDuplicatesConfig, run: RunSized, log: Callable[[str], None]
) -> Duplicates | None:
    """The duplicates that `data.deduplicate` leaves out; None where it asks for none. `run`: (tasks, about how many bytes they
    hold) -> their results, in order. Raises UserError."""
    if isinstance(asked, NearDuplicatesConfig):
        num_bytes = sum(file.num_bytes for source in sources for file in source.files)
        found = near_copies(sources, asked, lambda tasks: run(tasks, num_bytes))
        why = f"which have a similarity of {asked.similarity:g} or more with an earlier one"
    elif asked:
        found, why = exact_copies(sources), "whose text came before"
    else:
        return None
    log(f"deduplicate: {sum(found.counts)} documents are left out, {why}")
    return found


def near_copies(sources: Sequence[Source], config: NearDuplicatesConfig, run: RunTasks) -> Duplicates:
    """`run`: tasks -> their results, in order."""
    counts = []

    def texts() -> Iterator[str]:
        for source in sources:
            counts.append(0)
            for document in source.documents():
                assert isinstance(document, str), "the config refuses sources of ids"
                counts[-1] += 1
                yield source.text_of(document)

    flags, pairs = near_duplicates(texts(), config, run)
    return Duplicates(np.split(np.array(flags, bool), np.cumsum(counts)[:-1]), pairs)


def exact_copies(sources: Sequence[Source]) -> Duplicates:
    """By xxh3-128: among 10^9 documents two different texts collide with a probability of 10^-21."""
    digests = bytearray()
    counts = []
    for source in sources:
        before = len(digests)
        for document in source.documents():
            digests += xxhash.xxh3_128_digest(bytes_of(document))
        counts.append((len(digests) - before) // 16)
    halves_N2 = np.frombuffer(digests, np.uint64).reshape(-1, 2)
    order_N = np.lexsort((halves_N2[:, 0], halves_N2[:, 1]))  # stable: of equal texts the first comes first
    sorted_N2 = halves_N2[order_N]
    came_before_N = np.zeros(len(halves_N2), bool)
    came_before_N[order_N[1:]] = (sorted_N2[1:] == sorted_N2[:-1]).all(1)
    return Duplicates(np.split(came_before_N, np.cumsum(counts)[:-1]))


def amount_of(documents: Iterable[Document]) -> Amount:
    num_documents = num_bytes = 0
    for document in documents:
        num_documents, num_bytes = num_documents + 1, num_bytes + len(bytes_of(document))
    return Amount(num_documents, num_bytes)


def check_not_empty(amounts: Mapping[str, Sequence[Amount]], share: float | None) -> None:
    """Raises UserError where a set holds no document: before slow work. `share`: the share held out for validation, or None."""
    total = total_of(amounts["train"]).documents + total_of(amounts.get("validation", ())).documents
    for name, found in amounts.items():
        if total_of(found).documents or UNKNOWN in found:
            continue
        if name in ("train", "validation") and share is not None and total:
            given = f"validation: {share:g} of {total} documents leaves none for {name}"
            rule = "a share of whole documents is taken by hash, equal ones together; both sides need one"
            change = (
                "give an amount, such as validation: {bytes: 10e6}, or a source of its own: validation: {path: ...}"
            )
            raise UserError(given, rule, change)
        raise UserError(f"the source of {name} holds no text", "a set has at least one document", "give another source")


def total_of(amounts: Sequence[Amount]) -> Amount:
    return Amount(sum(amount.documents for amount in amounts), sum(amount.bytes for amount in amounts))
