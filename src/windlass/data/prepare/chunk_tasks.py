"""What workers do with a chunk of a source: open its files, parse, hash, choose; count it (`CountChunk`), or encode it
(`EncodeChunk`) into parts on disk. The parent sends names; no row passes through it.

The documents of all sets that are taken from one source are chosen in one reading. What a chunk gives depends on it alone, so
whoever encodes it, and in whatever order, the parts are the same.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import xxhash

from windlass.data.curate.filters import Removed
from windlass.data.sources.bad_rows import BadRow, FoundRows
from windlass.data.sources.select import Amount, Selection
from windlass.data.sources.source_files import Document, Source, bytes_of
from windlass.data.tokenize import encode_rows, pool
from windlass.data.tokenize.fill_in_middle import Middles
from windlass.data.tokenize.resume import PartSize, PartWriter, found_once, is_whole, kept, kept_part_files

CHARS_AT_ONCE: Final = 1 << 20  # of documents, before they are encoded
SIZES_NAME: Final = "sizes"  # of parts, beside them
Encoders = dict[Any, Any]
"""A worker's encoders, by their settings."""
EncodedParts = dict[str, list[tuple[Path, PartSize]]]
"""By set."""


class SourceChunk(NamedTuple):
    """Files of a source, or a part of one, and the sets that take documents of it."""

    source: Source
    sets: Mapping[str, Selection]

    def documents(self, found: FoundRows) -> Iterator[tuple[str, Document]]:
        """(set, document) in order; `found` takes the bad rows. Raises UserError."""
        for document in self.source._replace(bad_rows=found).documents():
            digest = xxhash.xxh64_intdigest(bytes_of(document))
            for name, selection in self.sets.items():
                part = selection.part_of(document, digest)
                if part:
                    yield name, part


class Counted(NamedTuple):
    """A chunk in numbers."""

    num_rows: int
    bad: list[tuple[int, BadRow]]
    """With the number of each, from 1."""
    amounts: dict[str, Amount]
    """By set."""
    removed: Removed
    """What the source's filters removed of the chunk."""

    def as_json(self) -> list[Any]:
        return [self.num_rows, [(number, row.as_texts()) for number, row in self.bad], self.amounts, self.removed]

    @classmethod
    def of_json(cls, found: Sequence[Any]) -> Self:
        num_rows, bad, amounts, removed = found
        bad_rows = [(number, BadRow(*texts)) for number, texts in bad]
        return cls(num_rows, bad_rows, {name: Amount(*pair) for name, pair in amounts.items()}, Removed(*removed))


class CountChunk(NamedTuple):
    chunk: SourceChunk

    def __call__(self, _encoders: Encoders) -> Counted:
        found, amounts = FoundRows(), dict.fromkeys(self.chunk.sets, (0, 0))
        for name, document in self.chunk.documents(found):
            documents, num_bytes = amounts[name]
            amounts[name] = documents + 1, num_bytes + len(bytes_of(document))
        of_sets = {name: Amount(*pair) for name, pair in amounts.items()}
        filters = self.chunk.source.filters
        return Counted(found.num_rows, found.bad, of_sets, Removed(0, {}) if filters is None else filters.removed)


class TextSettings(NamedTuple):
    """What encodes texts."""

    tokenizer_directory: Path
    is_fast: bool
    middles: Middles | None = None
    """How documents are rearranged whose middle is moved; None: no middle is moved."""


class ChunkParts(NamedTuple):
    """Where the parts of a chunk's documents in one set are kept, and how they are encoded."""

    directory: Path
    settings: TextSettings | encode_rows.RowSettings
    first: int
    """Number of the set's documents, of this source, in the chunks before; for messages."""


class EncodeChunk(NamedTuple):
    chunk: SourceChunk
    parts: Mapping[str, ChunkParts]
    """By set."""
    eos_id: int
    token_bytes: Path | None = None
    """File of the bytes of text per token id; None: the parts are not counted."""

    def __call__(self, encoders: Encoders) -> EncodedParts:
        """Writes what is not there yet -> the parts, by set, also of those that were deleted since. Raises UserError."""
        if self.token_bytes is None:
            self._encode(encoders)
            return {}
        files = {name: of_set.directory / SIZES_NAME for name, of_set in self.parts.items()}
        self._of([name for name, file in files.items() if not file.exists()])._encode(encoders)
        found = {}
        for name, of_set in self.parts.items():
            sizes = found_once(files[name], partial(self._of([name])._sizes, of_set, encoders))
            found[name] = [(of_set.directory / part, PartSize(*size)) for part, size in sizes]
        return found

    def again(self) -> None:
        """Writes what is missing or damaged."""
        for of_set in self.parts.values():
            for _ in kept_part_files(of_set.directory):  # deletes what is damaged
                pass
        self._encode({})

    def _of(self, names: Collection[str]) -> Self:
        return self._replace(parts={name: self.parts[name] for name in names})

    def _sizes(self, of_set: ChunkParts, encoders: Encoders) -> list[tuple[str, PartSize]]:
        """Encodes the chunk, again where parts were damaged, and returns the name and size of every part on disk."""
        self._encode(encoders)
        found = self._counted(of_set, encoders)
        if not is_whole(of_set.directory):  # some were damaged
            self._encode(encoders)
            found = self._counted(of_set, encoders)
        return found

    def _counted(self, of_set: ChunkParts, encoders: Encoders) -> list[tuple[str, PartSize]]:
        middles = of_set.settings.middles if isinstance(of_set.settings, TextSettings) else None
        marks = () if middles is None else tuple(middles.ids)
        known = self.token_bytes, marks
        if known not in encoders:
            assert self.token_bytes is not None
            encoders[known] = bytes_V = np.load(self.token_bytes)
            bytes_V[list(marks)] = 0
        return [
            (path.name, PartSize.of(part, encoders[known], marks)) for path, part in kept_part_files(of_set.directory)
        ]

    def _encode(self, encoders: Encoders) -> None:
        open_sets = {name: of_set for name, of_set in self.parts.items() if not is_whole(of_set.directory)}
        if not open_sets:
            return
        writers = {name: _SetOfChunk(of_set, encoders, self.eos_id) for name, of_set in open_sets.items()}
        chunk = self.chunk._replace(sets={name: self.chunk.sets[name] for name in open_sets})
        num_chars = 0
        for name, document in chunk.documents(FoundRows()):
            assert isinstance(document, str)
            writers[name].texts.append(document)
            num_chars += len(document)
            if num_chars >= CHARS_AT_ONCE:
                for writer in writers.values():
                    writer.encode()
                num_chars = 0
        for writer in writers.values():
            writer.encode()
            writer.parts.end(is_last=True)


class _SetOfChunk:
    def __init__(self, of_set: ChunkParts, encoders: Encoders, eos_id: int):
        before = [part.num_texts or 0 for part in kept(of_set.directory)]
        self.texts: list[str] = []
        self.parts = PartWriter(of_set.directory, eos_id, len(before))
        self._num_kept, self._number, self._is_rows = (
            sum(before),
            of_set.first,
            not isinstance(of_set.settings, TextSettings),
        )
        if of_set.settings not in encoders:
            encoders[of_set.settings] = (
                pool.Encoder(*of_set.settings)
                if isinstance(of_set.settings, TextSettings)
                else encode_rows.RowEncoder(of_set.settings)
            )
        self._encoder = encoders[of_set.settings]
        self._middles = of_set.settings.middles if isinstance(of_set.settings, TextSettings) else None

    def encode(self) -> None:
        """The texts that are held, but for those that are in parts already."""
        num_kept = min(self._num_kept, len(self.texts))
        texts, self.texts = self.texts[num_kept:], []
        self._num_kept, self._number = self._num_kept - num_kept, self._number + num_kept
        self.parts.sizes.extend(len(text.encode()) for text in texts)
        rows_or_texts = (
            encode_rows.row_batches(texts, self._number)
            if self._is_rows
            else pool.piece_batches(texts, None, self._middles)
        )
        for batch in rows_or_texts:
            self.parts.add(self._encoder(batch))
        self._number += len(texts)
