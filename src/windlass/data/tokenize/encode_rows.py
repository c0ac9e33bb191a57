"""Conversations and pairs -> ids with flags, in order, in a pool of processes as text is (pool).

A worker imports transformers, for its template: that takes 2.5 CPU seconds and 170 MB, the time of about 6 MB of rows. So fewer
rows than for text are encoded by the parent alone, or share a worker.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from windlass.data.sources.bad_rows import Placed
from windlass.data.sources.chat_rows import parsed
from windlass.data.tokenize.chat_samples import conversation_samples, message_words
from windlass.data.tokenize.chat_template import Template, without_weights
from windlass.data.tokenize.cores import num_workers
from windlass.data.tokenize.flags import flagged
from windlass.data.tokenize.pool import COMPARED_EVERY, Workers
from windlass.data.tokenize.preferences import PairEncoder
from windlass.data.tokenize.resume import EncodedTexts
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError

REFUSED: Final = "refused by the chat template"
ROWS_AT_ONCE: Final = 64
CHARS_AT_ONCE: Final = 256 << 10
IN_PROCESS_BYTES: Final = 8 << 20  # chosen, as the next
BYTES_PER_WORKER: Final = 16 << 20
Named = tuple[int | str, str]
"""A row's place, as a.jsonl:12, or else its number in its set; and its text."""


class RowSettings(NamedTuple):
    """What encodes the rows of a set."""

    tokenizer_directory: Path
    name: str
    """The set's, for messages."""
    is_pairs: bool = False
    date: str | None = None
    """The day that a template sees as today."""
    cut_above: int | None = None
    """In conversations of more ids than this, what may be cut has the flag WORDS."""
    is_fast: bool = False
    """Whether tiktoken encodes."""


class RowEncoder:
    """Encodes batches of rows in this process: the documents of all rows, one behind the other, and the rows that are refused."""

    def __init__(self, settings: RowSettings):
        """Raises UserError for a tokenizer without a template, where one is needed."""
        self._settings, self._num_batches = settings, 0
        if settings.is_pairs:
            self._rows: Callable[[str, str], list[np.ndarray]] = self._pair
            self._pairs = PairEncoder(settings.tokenizer_directory, settings.date, settings.is_fast)
        else:
            self._rows = self._conversation
            self._template = Template(settings.tokenizer_directory, settings.date, settings.is_fast)
            self._eos_id = open_tokenizer(settings.tokenizer_directory)[1]

    def __call__(self, batch: list[Named]) -> EncodedTexts:
        if self._num_batches % COMPARED_EVERY == 0 and not self._settings.is_pairs:
            self._compare(min(batch, key=lambda row: len(row[1]))[1])
        self._num_batches += 1
        found, counts, refused = [np.empty(0, np.int32)], list[int](), list[tuple[str, str, str, str]]()
        what = "pair" if self._settings.is_pairs else "conversation"
        for name, text in batch:
            where = name if isinstance(name, str) else f"{what} {name} of {self._settings.name}"
            if self._settings.is_pairs:
                self._pairs.open_template(text)
            try:
                documents = self._rows(where, text)
            except UserError as error:  # of this row alone: the template itself is there
                documents = []
                refused.append((REFUSED, error.given, error.rule, error.change))
            counts.append(len(documents))
            found += documents
        return EncodedTexts(np.concatenate(found), counts, refused)

    def _compare(self, text: str) -> None:
        """Raises UserError where tiktoken gives other ids than the tokenizer. What the template refuses is refused later."""
        messages, tools = parsed(text)
        try:
            written = self._template.render(without_weights(messages), "a conversation", tools=tools)
        except UserError:
            return
        self._template.encoder.compare(written)

    def _pair(self, where: str, text: str) -> list[np.ndarray]:
        return [np.concatenate(self._pairs.rows(json.loads(text), where))]

    def _conversation(self, where: str, text: str) -> list[np.ndarray]:
        (messages, tools), cut_above = parsed(text), self._settings.cut_above
        where = f"{where} ({messages[0]['content'][:40]!r})"
        found = []
        for said, (ids_N, is_learned_N, unwritten), percent_N in conversation_samples(
            self._template, messages, where, tools
        ):
            is_long = cut_above is not None and len(ids_N) > cut_above
            is_words_N = message_words(self._template, said, ids_N, where, tools) & ~is_learned_N if is_long else None
            found.append(flagged(ids_N, is_learned_N, self._eos_id, unwritten, is_words_N, percent_N))
        return found


def num_row_workers(num_bytes: int, num_cores: int) -> int:
    """How many workers to start for rows."""
    return num_workers(num_bytes, num_cores, IN_PROCESS_BYTES, BYTES_PER_WORKER)


def row_batches(texts: Iterable[str], first: int = 0) -> Iterator[list[Named]]:
    """`first`: the number of the first text; it names those that know no place."""
    batch: list[Named] = []
    num_chars = 0
    for number, text in enumerate(texts, first):
        batch.append((text.place, str(text)) if isinstance(text, Placed) else (number, text))
        num_chars += len(text)
        if len(batch) == ROWS_AT_ONCE or num_chars >= CHARS_AT_ONCE:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def encode_rows(
    texts: Iterable[str], settings: RowSettings, num_bytes: int = 0, num_cores: int = 1
) -> Iterator[EncodedTexts]:
    """Ids with flags of all rows (see `conversation_of` and `pair_of`), in order, a batch at a time.

    num_bytes: about how much text there is; decides how many workers to start. Raises UserError.
    """
    count = num_row_workers(num_bytes, num_cores)
    if count == 0:
        yield from map(RowEncoder(settings), row_batches(texts))
        return
    with Workers(count, RowEncoder, settings) as workers:
        yield from workers.map(row_batches(texts))
