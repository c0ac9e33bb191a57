"""Writes one set: documents -> ids, in parts that survive a kill -> samples of T+1 -> MDS shards; logs progress.

The sources of a set are one stream, so that only the last sample is short. Sources that are mixed by weight have samples and
shards of their own, since then a shard must not hold two sources; and so have those of validation, which is scored by source.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from windlass.data import packing
from windlass.data.config import DataConfig
from windlass.data.prepare.appended import KeptSources
from windlass.data.prepare.chunk_tasks import TextSettings
from windlass.data.prepare.chunked_sets import ChunkedSets
from windlass.data.prepare.counted_set import CountedSet
from windlass.data.prepare.manifest import SetInfo
from windlass.data.prepare.shard_tasks import MOST_IDS
from windlass.data.prepare.shards_of_workers import ShardsOfWorkers
from windlass.data.shards.journal import Beat, Journal, JournaledWriter
from windlass.data.shards.mds import Writer
from windlass.data.sources.bad_rows import BadRow, BadRows
from windlass.data.sources.config import BadRowsConfig
from windlass.data.sources.select import Amount, Selection, total_of
from windlass.data.sources.source_files import Source
from windlass.data.tokenize.cores import usable_cores
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.fill_in_middle import Middles, middles_of
from windlass.data.tokenize.flags import labelled, percent_of
from windlass.data.tokenize.pool import encode
from windlass.data.tokenize.preferences import ROWS, pack_pairs
from windlass.data.tokenize.resume import FinishedPart, encode_in_parts
from windlass.data.tokenize.tokenizer import TOKENIZER_FILE
from windlass.data.tokens.token_parts import pack_samples, token_parts
from windlass.errors import UserError

PACK: Final = {"concatenate": packing.pack, "best-fit": packing.pack_best_fit}
MOST_WORKERS: Final = 32  # unless the recipe says more: 150 MB each
BYTES_PER_ID = 8  # by which a shard's samples are counted (shards/mds)


class SetTokenizer(NamedTuple):
    """What encodes a set."""

    directory: Path
    eos_id: int
    bytes_V: np.ndarray
    """Bytes of text per token id."""
    is_fast: bool
    """Whether tiktoken encodes."""
    date: str | None = None
    """The day that a chat template sees as today; None where it does not ask."""


class SharedSettings(NamedTuple):
    """What all sets of a preparation are written with."""

    config: DataConfig
    tokenizer: SetTokenizer
    parts: Path
    """A directory that keeps ids across a kill."""
    log: Callable[[str], None]


class Growing(NamedTuple):
    """The journal of a set that is read while it is written, and its sign of life."""

    journal: Journal
    beat: Beat


def write_set(
    directory: Path,
    selection: Selection,
    amounts: Sequence[Amount],
    shared: SharedSettings,
    growing: Growing | None = None,
    chunked: ChunkedSets | None = None,
    kept: KeptSources | None = None,
) -> SetInfo:
    """Encodes, packs and writes one set; `directory`'s name is the set's. `chunked`: the sources that workers read themselves;
    `kept`: those whose shards are there."""
    config, tokenizer, parts, log = shared
    eos_id, T = tokenizer.eos_id, config.sequence_length
    is_mixed = bool(config.mixture) and directory.name == "train"
    is_apart = is_mixed or (directory.name == "validation" and len(selection.sources) > 1)
    width = ROWS if selection.is_pairs else 1  # sequences of a sample
    counted = CountedSet(directory.name, selection, total_of(amounts).bytes, (tokenizer.bytes_V, eos_id, T), log)
    at_once = None if growing is None else config.shard_bytes // BYTES_PER_ID  # a run may wait for the next shard

    def stream(number: int) -> Iterator[np.ndarray]:
        settings = SourceSettings(source := selection.sources[number], tokenizer, config)
        if chunked is not None and chunked.is_chunked(directory.name, number):
            found = chunked.parts(directory.name, number, settings.of_set, parts, eos_id)
        else:
            of_source = parts / directory.name / f"{number:03}"
            found = _parts_of_source(selection, number, amounts[number], settings, of_source, growing, at_once)
        return counted.through(_accepted(found, source, log), source, number, settings.marks(directory.name))

    is_chat = any(source.format == "chat" for source in selection.sources)  # an EOS may end a turn: ends are stored
    writer = _writer(directory, width * (T + 1), config, tokenizer, is_chat, growing)
    usual = _packing(selection.is_pairs, is_chat, config, directory.name, log)
    num_samples, max_documents, shards = _take_kept(kept, writer, counted)
    by_workers = ShardsOfWorkers(chunked, directory.name, selection.sources, parts, (eos_id, tokenizer.bytes_V), log)
    for numbers in _streams(selection.sources, is_apart)[len(shards) :]:
        if not is_chat and growing is None and by_workers.can_write(numbers, writer.format):
            settings = [SourceSettings(selection.sources[number], tokenizer, config) for number in numbers]
            written = by_workers.write(dict(zip(numbers, settings)), writer, counted, config.packing == "best-fit")
        else:
            pack = pack_samples if selection.sources[numbers[0]].is_samples else usual
            samples = pack(chain.from_iterable(map(stream, numbers)), eos_id, T)
            written = _write_samples(samples, writer, eos_id, T)
        num_samples, max_documents = num_samples + written[0], max(max_documents, written[1])
        shards.append(writer.end_shard() - sum(shards))
        if not shards[-1] and is_mixed:
            given = f"data.sources[{len(shards) - 1}] is mixed with others, and has no text for training"
            raise UserError(given, "every source of a mixture has a document", "take it out, or give it text")
    writer.close()
    return counted.end(num_samples, width * T, max_documents, shards if is_apart else [])


def workers_write_all(config: DataConfig, sets: Iterable[Selection], chunked: ChunkedSets) -> bool:
    """Whether workers write the shards of all sets, so that ids are deleted as their shards are there."""
    is_text = all(source.format == "text" for selection in sets for source in selection.sources)
    is_held = config.shard_bytes // BYTES_PER_ID <= MOST_IDS
    return is_text and is_held and not chunked.rest()


def _write_samples(
    samples: Iterable[tuple[np.ndarray, np.ndarray]], writer: Writer, eos_id: int, T: int
) -> tuple[int, int]:
    """-> samples, the most documents in one."""
    num_samples = most_documents = 0
    for input_ids_NL, labels_NL in samples:
        ends_NL, percent_NL = input_ids_NL == eos_id, percent_of(input_ids_NL)  # an EOS of a turn has a flag
        input_ids_NL, labels_NL = labelled(input_ids_NL, labels_NL)
        writer.write(input_ids_NL, labels_NL, ends_NL if writer.format.has_ends else None, percent_NL)
        num_samples += len(input_ids_NL)
        rows = (column.reshape(-1, T + 1) for column in (ends_NL, labels_NL))
        most_documents = max(most_documents, packing.most_documents(*rows))
    return num_samples, most_documents


def _take_kept(kept: KeptSources | None, writer: Writer, counted: CountedSet) -> tuple[int, int, list[int]]:
    """The shards of sources that are prepared -> samples, the most documents in one, shards of each source."""
    name = writer.directory.name
    if kept is None or (info := kept.of_set(name)) is None:
        return 0, 0, []
    writer.take(kept.prepared.directory / name, sum(info.source_shards))
    counted.go_on(info)
    return info.samples, info.max_documents, list(info.source_shards)


def _writer(
    directory: Path, num_ids: int, config: DataConfig, tokenizer: SetTokenizer, has_ends: bool, growing: Growing | None
) -> Writer:
    size, ends = (directory, num_ids, config.shard_bytes), (tokenizer.eos_id, config.sequence_length + 1)
    compression = None if config.compression == "none" else config.compression
    stored: Any = {"has_ends": has_ends, "vocab_size": len(tokenizer.bytes_V), "compression": compression}
    return Writer(*size, **stored) if growing is None else JournaledWriter(*size, *growing, *ends, **stored)


def _parts_of_source(
    selection: Selection,
    number: int,
    amount: Amount,
    settings: "SourceSettings",
    kept: Path,
    growing: Growing | None,
    at_once: int | None,
) -> Iterator[FinishedPart]:
    """The ids of one source, encoded where they are not there already. kept: a directory that keeps them across a kill;
    at_once: about how many ids of a part."""
    source, name, tokenizer = selection.sources[number], kept.parent.name, settings.tokenizer

    def alive(items: Any) -> Any:
        return items if growing is None else growing.beat.through(items)

    documents = alive(selection.documents_of(number))
    if source.format == "tokens":
        return token_parts(documents, tokenizer.eos_id, tokenizer.bytes_V, at_once, source.is_samples)

    def ids_of(texts: Any) -> Iterator[Any]:
        found: Iterator[Any] = alive(_encode(texts, settings, amount, at_once, name))
        return found

    return encode_in_parts(documents, ids_of, tokenizer.eos_id, kept, at_once)


def _streams(sources: Sequence[Source], is_apart: bool) -> list[list[int]]:
    """The numbers of the sources that are packed together: neighbours, but where all are apart, and those of samples."""
    found: list[list[int]] = []
    for number, source in enumerate(sources):
        is_alone = is_apart or source.is_samples or (number > 0 and sources[number - 1].is_samples)
        if found and not is_alone:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def _packing(is_pairs: bool, is_chat: bool, config: DataConfig, name: str, log: Callable[[str], None]) -> Any:
    """Only best-fit, of conversations that fit, cuts no answer and leaves no sample without a target."""
    if is_chat and config.packing != "best-fit" and name == "train":  # once for all sets
        log("conversations are packed whole (best-fit) whatever data.packing is: no answer is cut")
    return pack_pairs if is_pairs else PACK["best-fit" if is_chat else config.packing]


def _encode(
    texts: Iterable[str], settings: "SourceSettings", amount: Amount, at_once: int | None, name: str
) -> Iterator[Any]:
    """at_once: about how many characters to encode at once."""
    found, num_cores = settings.of_set(name), most_workers(settings.config)
    if isinstance(found, TextSettings):
        return encode(texts, amount.bytes, found.tokenizer_directory, num_cores, found.is_fast, at_once, found.middles)
    return encode_rows(texts, found, amount.bytes, num_cores)


class SourceSettings(NamedTuple):
    """What encodes a source."""

    source: Source
    tokenizer: SetTokenizer
    config: DataConfig

    def of_set(self, name: str) -> TextSettings | RowSettings:
        source, tokenizer = self.source, self.tokenizer
        if source.format == "text":
            return TextSettings(tokenizer.directory, tokenizer.is_fast, self.middles(name))
        is_cut = source.format == "chat" and source.too_long == "cut-prompt"
        cut_above, is_pairs = self.config.sequence_length if is_cut else None, source.format == "preference"
        return RowSettings(tokenizer.directory, name, is_pairs, tokenizer.date, cut_above, tokenizer.is_fast)

    def middles(self, name: str) -> Middles | None:
        """How the middle is moved in the documents that a model learns from; None: no middle is moved."""
        config = self.source.fill_in_middle if name == "train" else None
        return middles_of(config, [self.tokenizer.directory / TOKENIZER_FILE])

    def marks(self, name: str) -> list[int]:
        """Ids that are no text."""
        middles = self.middles(name)
        return [] if middles is None else middles.ids


def most_workers(config: DataConfig) -> int:
    """Processes that encode, at most."""
    return config.workers or min(usable_cores(), MOST_WORKERS)


def _accepted(parts: Iterable[FinishedPart], source: Source, log: Callable[[str], None]) -> Iterator[FinishedPart]:
    """The parts; what the chat template refuses counts among the source's bad rows. Raises TooManyBadRows, at the end where
    the source is all here."""
    of_source = source.bad_rows
    bad_rows = of_source if isinstance(of_source, BadRows) else BadRows("", "a source", BadRowsConfig())
    for part in parts:
        bad_rows.leave_out([BadRow(*texts) for texts in part.refused], log)
        if source.num_tokens is not None:  # the rest may never be read
            bad_rows.check_late()
        if not len(part.ids) and part.refused and bad_rows.is_too_many:
            break  # a hundred rows, and none is written
        if len(part.ids):
            yield part
    bad_rows.end(log)
