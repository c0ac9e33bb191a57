"""Writes one set: documents -> ids, in parts that survive a kill -> samples of T+1 -> MDS shards; logs progress.

The sources of a set are one stream, so that only the last sample is short. Only sources that are mixed by weight have samples and
shards of their own, since then a shard must not hold two sources.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from windlass.data import packing
from windlass.data.config import DataConfig
from windlass.data.prepare.manifest import SetInfo
from windlass.data.shards.journal import Beat, Journal, JournaledWriter
from windlass.data.shards.mds import Writer
from windlass.data.sources.bad_rows import BadRow, BadRows
from windlass.data.sources.config import BadRowsConfig
from windlass.data.sources.fetch import BYTES_PER_TOKEN, fetched_bytes
from windlass.data.sources.select import UNKNOWN_BYTES, Amount, Selection, total_of
from windlass.data.sources.source_files import Source
from windlass.data.tokenize.encode_rows import RowSettings, encode_rows
from windlass.data.tokenize.fitting import Fitting
from windlass.data.tokenize.flags import ID_BITS, MASKED, count_unwritten, labelled
from windlass.data.tokenize.pool import encode
from windlass.data.tokenize.preferences import ROWS, pack_pairs
from windlass.data.tokenize.resume import FinishedPart, encode_in_parts, limited
from windlass.errors import UserError
from windlass.units import format_bytes, format_count, format_duration

REPORT_EVERY_S = 10.0
PACK: Final = {"concatenate": packing.pack, "best-fit": packing.pack_best_fit}
BYTES_PER_ID = 8  # of a shard: an id and its label


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


class Growing(NamedTuple):
    """The journal of a set that is read while it is written, and its sign of life."""

    journal: Journal
    beat: Beat


def write_set(
    directory: Path,
    selection: Selection,
    amounts: Sequence[Amount],
    config: DataConfig,
    tokenizer: SetTokenizer,
    parts: Path,
    log: Callable[[str], None],
    growing: Growing | None = None,
) -> SetInfo:
    """Encodes, packs and writes one set; `directory`'s name is the set's. `parts`: a directory that keeps ids across a kill."""
    eos_id, T = tokenizer.eos_id, config.sequence_length
    is_mixed = config.weights is not None and directory.name == "train"
    width = ROWS if selection.is_pairs else 1  # sequences of a sample
    counted = _Counted(directory.name, selection, total_of(amounts).bytes, (tokenizer.bytes_V, eos_id, T), log)
    # a run may wait for the next shard of a set that grows: encode no more than one at once
    at_once = None if growing is None else config.shard_bytes // BYTES_PER_ID
    heard: Callable[[Iterable[Any]], Iterator[Any]] = iter if growing is None else growing.beat.through

    def stream(number: int) -> Iterator[np.ndarray]:
        source = selection.sources[number]

        def ids_of(texts: Any) -> Iterator[Any]:
            return heard(_encode(texts, source, amounts[number], tokenizer, at_once, directory.name, T))

        kept = parts / directory.name / f"{number:03}"
        found = encode_in_parts(heard(selection.texts_of(number)), ids_of, eos_id, kept, at_once)
        return counted.through(_accepted(found, source, log), source, number)

    streams = map(stream, range(len(selection.sources)))
    is_chat = any(source.format == "chat" for source in selection.sources)  # an EOS may end a turn: ends are stored
    writer = _writer((directory, width * (T + 1), config.shard_bytes), eos_id, T + 1, is_chat, growing)
    pack = _packing(selection.is_pairs, is_chat, config, directory.name, log)
    num_samples, max_documents, shards = 0, 0, list[int]()
    for ids in streams if is_mixed else [chain.from_iterable(streams)]:
        for input_ids_NL, labels_NL in pack(ids, eos_id, T):
            ends_NL = input_ids_NL == eos_id  # an EOS of a turn has a flag
            input_ids_NL, labels_NL = labelled(input_ids_NL, labels_NL)
            writer.write(input_ids_NL, labels_NL, ends_NL if is_chat else None)
            num_samples += len(input_ids_NL)
            rows = ends_NL.reshape(-1, T + 1), labels_NL.reshape(-1, T + 1)
            max_documents = max(max_documents, packing.most_documents(*rows))
        shards.append(writer.end_shard() - sum(shards))
        if not shards[-1]:
            given = f"data.sources[{len(shards) - 1}] has a weight, and no text for training"
            raise UserError(given, "every source of a mixture has a document", "take it out, or give it text")
    writer.close()
    return counted.end(num_samples, width * T, max_documents, shards if is_mixed else [])


def _writer(size: tuple[Path, int, int], eos_id: int, row: int, has_ends: bool, growing: Growing | None) -> Writer:
    """size: directory, elements of a sample, bytes of a shard; row: elements of a sequence."""
    if growing is None:
        return Writer(*size, has_ends=has_ends)
    return JournaledWriter(*size, *growing, eos_id, row, has_ends)


def _packing(is_pairs: bool, is_chat: bool, config: DataConfig, name: str, log: Callable[[str], None]) -> Any:
    """Only best-fit, of conversations that fit, cuts no answer and leaves no sample without a target."""
    if is_chat and config.packing != "best-fit":
        log(f"{name}: conversations are packed whole (best-fit) whatever data.packing is: no answer is cut")
    return pack_pairs if is_pairs else PACK["best-fit" if is_chat else config.packing]


def _encode(
    texts: Iterable[str],
    source: Source,
    amount: Amount,
    tokenizer: SetTokenizer,
    at_once: int | None,
    name: str,
    sequence_length: int,
) -> Iterator[Any]:
    """at_once: about how many characters to encode at once."""
    num_cores = os.cpu_count() or 1
    if source.format == "text":
        return encode(texts, amount.bytes, tokenizer.directory, num_cores, tokenizer.is_fast, at_once)
    cut_above = sequence_length if source.format == "chat" and source.too_long == "cut-prompt" else None
    is_pairs = source.format == "preference"
    settings = RowSettings(tokenizer.directory, name, is_pairs, tokenizer.date, cut_above, tokenizer.is_fast)
    return encode_rows(texts, settings, amount.bytes, num_cores)


def _accepted(parts: Iterable[FinishedPart], source: Source, log: Callable[[str], None]) -> Iterator[FinishedPart]:
    """The parts; what the chat template refuses counts among the source's bad rows. Raises TooManyBadRows, at the end where
    the source is all here."""
    bad_rows = source.bad_rows or BadRows("", "a source", BadRowsConfig())
    for part in parts:
        bad_rows.leave_out([BadRow(*texts) for texts in part.refused], log)
        if source.num_tokens is not None:  # the rest may never be read
            bad_rows.check_late()
        if not len(part.ids) and part.refused and bad_rows.is_too_many:
            break  # a hundred rows, and none is written
        if len(part.ids):
            yield part
    bad_rows.end(log)


def _check_limit(source: Source, parts: Iterable[FinishedPart]) -> Iterator[FinishedPart]:
    """`parts`, unchanged. Raises UserError where they end before the source's limit in tokens because fetching stopped."""
    num_tokens = 0
    for part in parts:
        num_tokens += len(part.ids)
        yield part
    fetched = fetched_bytes(source.files)
    if source.num_tokens is not None and num_tokens < source.num_tokens <= fetched // BYTES_PER_TOKEN:
        raise UserError(
            f"`tokens: {source.num_tokens}` of a source; {format_bytes(fetched)} of its text were fetched, {num_tokens} tokens",
            f"for a limit in tokens {BYTES_PER_TOKEN} bytes of text are fetched for each, and this text has more",
            "give the limit as `documents` or `rows`",
        )


class _Counted:
    """Counts documents, tokens and their bytes as they pass; logs progress every ten seconds."""

    def __init__(
        self,
        name: str,
        selection: Selection,
        num_bytes: int,
        known: tuple[np.ndarray, int, int],
        log: Callable[[str], None],
    ):
        """known: bytes per token [V], EOS id, targets per sequence."""
        self._name, self._num_bytes, self._log = name, num_bytes, log
        self._bytes_V, self._eos_id, self._length = known
        self.is_masked = any(source.format != "text" for source in selection.sources)
        self._is_pairs = any(source.format == "preference" for source in selection.sources)
        self.documents = self.tokens = self.bytes = self.text_bytes = self.left_out = self.cut = 0
        self._of_sources: list[str] = []
        self._num_sources = len(selection.sources)
        self.unwritten: Counter[str] = Counter()
        self._start_s = self._logged_s = time.monotonic()

    def through(self, parts: Iterator[FinishedPart], source: Source, number: int) -> Iterator[np.ndarray]:
        """The ids of one source up to its limit in tokens; of pairs and conversations those that fit."""
        fit: Iterator[FinishedPart] = _check_limit(source, parts)
        fitting = None
        if source.format != "text":
            fitting = Fitting(self._eos_id, self._length, source.format, source.too_long)
            fit = fitting.through(fit, self._name)
        before, num_targets = (self.documents, self.tokens), 0
        for part in limited(fit, self._eos_id, source.num_tokens):
            self.documents += len(part.sizes)
            self.tokens += len(part.ids)
            self.text_bytes += int(part.sizes.sum())
            self.bytes += int(self._bytes_V[part.ids & ID_BITS].sum(dtype=np.int64))
            num_targets += int(((part.ids & MASKED) == 0).sum())
            if self.is_masked:
                self.unwritten += count_unwritten(part.ids)
            now_s = time.monotonic()
            if now_s - self._logged_s > REPORT_EVERY_S:
                self._logged_s = now_s
                rate = self.text_bytes / (now_s - self._start_s)
                done = f"{format_bytes(self.text_bytes)} of {format_bytes(self._num_bytes)}"
                left = format_duration(max(0, self._num_bytes - self.text_bytes) / rate) if rate else "?"
                left = f", {left} left"
                if self._num_bytes >= UNKNOWN_BYTES:
                    done, left = format_bytes(self.text_bytes), ""
                self._log(f"{self._name}: {done}, {format_bytes(rate)}/s{left}")
            yield part.ids
        where, num_tokens = f"source {number}: ", self.tokens - before[1]
        samples = num_tokens / (
            self._length * (ROWS if self._is_pairs else 1)
        )  # sources share a sample at their border
        self._of_sources.append(
            f"{where}{self.documents - before[0]} documents, {num_tokens} tokens, {num_targets} of them targets, "
            f"{samples:.1f} samples full"
        )
        if fitting is not None:
            fitting.check(self._name)  # also where the limit in tokens came before the end
            self.left_out += fitting.num_dropped
            self.cut += fitting.num_cut
            self._of_sources += [where + line for line in fitting.report()]

    def end(self, num_samples: int, num_targets: int, max_documents: int, shards: list[int]) -> SetInfo:
        """Logs and returns the set in numbers. `num_targets`: targets that a sample has room for."""
        info = SetInfo(
            documents=self.documents,
            tokens=self.tokens,
            bytes=self.text_bytes,
            samples=num_samples,
            padding=num_samples * num_targets - self.tokens,
            bytes_add_up=self.bytes == self.text_bytes and not self.is_masked,
            max_documents=max_documents,
            source_shards=shards,
            left_out=self.left_out,
            cut=self.cut,
            unwritten=dict(self.unwritten),
        )
        self._log_end(info, num_targets)
        return info

    def _log_end(self, info: SetInfo, num_targets: int) -> None:
        took = format_duration(time.monotonic() - self._start_s)
        amount = f"{info.documents} documents, {format_bytes(info.bytes)}, {format_count(info.tokens)} tokens"
        fill = 100 * info.tokens / (info.samples * num_targets)
        self._log(
            f"{self._name}: {amount}, {info.samples} samples ({fill:.2f} % full, {info.padding} positions are empty), {took}"
        )
        for line in self._of_sources if self.is_masked or self._num_sources > 1 else ():
            self._log(f"{self._name}: {line}")
        for field, count in info.unwritten.items():
            answers = "1 answer holds" if count == 1 else f"{count} answers hold"
            self._log(f"{self._name}: {answers} `{field}`, which the chat template does not write: it is not learned")
        if self.is_masked:
            learned = (
                "of a pair only the answers count" if self._is_pairs else "of conversations only answers are learned"
            )
            self._log(f"{self._name}: {learned}: there are no bits per byte")
        elif not info.bytes_add_up:
            difference = self.bytes - info.bytes
            rewrites = f"this tokenizer rewrites text (its tokens add up to {difference:+d} bytes)"
            self._log(f"{self._name}: {rewrites}: bits per byte are not exact and are left out")
