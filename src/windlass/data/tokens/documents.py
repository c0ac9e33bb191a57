"""Files of ids -> documents: int32 as bytes, without the EOS that ends each; or rows as they are stored (`stored: samples`).

    stream      rows are joined, across files too, and cut at EOS: nanoGPT puts EOS behind a document, llm.c before it
    documents   the end of a row ends a document, as EOS does
    samples     a row is a document, whatever it holds

A document of nothing is none: an EOS that follows another one, or begins the stream, is left out. (It is what a text without
letters is.) Each id is checked against the vocabulary where it is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from windlass.data.sources.config import SourceConfig, Stored
from windlass.data.sources.source_files import SourceFile, check_unchanged, hash_file
from windlass.data.tokens.megatron import MegatronIndex, megatron_rows, read_megatron_index
from windlass.data.tokens.mosaic_mds import MosaicShard, mosaic_rows, read_mosaic_index
from windlass.data.tokens.raw_ids import raw_rows
from windlass.data.tokens.stored_row import StoredRow
from windlass.errors import UserError

BYTES_PER_ID: Final = 4
LEAST_IDS: Final = 2  # of a sample: one target and what it follows


class IdVocabulary(NamedTuple):
    """What ids mean. `name`: the tokenizer's in the recipe; `size`: the highest id + 1."""

    name: str
    size: int
    eos_id: int


def stored_documents(
    config: SourceConfig, files: Sequence[SourceFile], vocabulary: IdVocabulary, sequence_length: int
) -> Iterator[bytes]:
    """Every document of a source. Raises UserError, which names file and position, for an id beyond the vocabulary, a row that
    is no sample, or a file that cannot be read."""
    stored = storage_kind(config, files)
    rows = _checked(islice(_rows(config, files), *config.slice), vocabulary)
    if stored == "samples":
        yield from _samples(rows, sequence_length)
    else:
        yield from _documents((row.ids for row in rows), vocabulary.eos_id, stored == "documents")


def storage_kind(config: SourceConfig, files: Sequence[SourceFile]) -> Stored:
    """What the recipe says, or what is usual for the kind."""
    return config.stored or ("documents" if files[0].kind == "megatron" else "stream")


def _rows(config: SourceConfig, files: Sequence[SourceFile]) -> Iterator[StoredRow]:
    shards, index = dict[str, MosaicShard](), None
    for file in files:
        path = Path(file.path)
        check_unchanged(file, hash_file(path, "", "").xxh3)
        if file.kind == "mds" and path.suffix == ".json":
            shards = {shard.file: shard for shard in read_mosaic_index(path)}
        elif file.kind == "mds":
            yield from mosaic_rows(path, shards[path.name], config.text, config.id_type)
        elif path.suffix == ".idx":
            index = read_megatron_index(path)
        elif file.kind == "megatron":
            assert isinstance(index, MegatronIndex)
            yield from megatron_rows(path, index)
        else:
            yield from raw_rows(path, config.id_type)


def _checked(rows: Iterable[StoredRow], vocabulary: IdVocabulary) -> Iterator[StoredRow]:
    """The rows as int32."""
    for row in rows:
        is_wrong_N = (row.ids < 0) | (row.ids >= vocabulary.size)
        if is_wrong_N.any():
            at = int(is_wrong_N.argmax())
            raise UserError(
                f"{row.where} holds the id {int(row.ids[at])} at position {row.first + at}",
                f"an id is below {vocabulary.size}, the size of the vocabulary of {vocabulary.name}",
                "name the tokenizer that made the ids in data.tokenizer.from; or fix `id_type` of the source",
            )
        yield row._replace(ids=row.ids.astype("<i4"))


def _samples(rows: Iterable[StoredRow], sequence_length: int) -> Iterator[bytes]:
    for row in rows:
        if not LEAST_IDS <= len(row.ids) <= sequence_length + 1:
            raise UserError(
                f"{row.where} holds {len(row.ids)} ids, and the source has `stored: samples`",
                f"a row is taken as it is stored: it holds {LEAST_IDS} to {sequence_length + 1} ids (data.sequence_length + 1)",
                f"set data.sequence_length={len(row.ids)}; or `stored: stream`, which packs the ids again",
            )
        yield row.ids.tobytes()


def _documents(rows: Iterable[np.ndarray], eos_id: int, ends_by_row: bool) -> Iterator[bytes]:
    held: list[bytes] = []
    for ids_N in rows:
        start = 0
        for end in np.flatnonzero(ids_N == eos_id).tolist():
            document = b"".join([*held, ids_N[start:end].tobytes()])
            if document:
                yield document
            held, start = [], end + 1
        held.append(ids_N[start:].tobytes())
        if ends_by_row:
            if held[-1] or len(held) > 1:
                yield b"".join(held)
            held = []
    document = b"".join(held)
    if document:
        yield document
