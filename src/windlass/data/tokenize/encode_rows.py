"""Conversations and pairs -> ids with flags, in order, in a pool of processes as text is (pool).

A worker imports transformers, for its template: that takes 2.5 CPU seconds and 170 MB, the time of about 6 MB of rows. So fewer
rows than for text are encoded by the parent alone, or share a worker.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from windlass.data.tokenize.chat_template import Template
from windlass.data.tokenize.flags import flagged
from windlass.data.tokenize.pool import COMPARED_EVERY, MAX_WORKERS, Workers
from windlass.data.tokenize.preferences import PairEncoder
from windlass.data.tokenize.tokenizer import open_tokenizer

ROWS_AT_ONCE: Final = 64
CHARS_AT_ONCE: Final = 256 << 10
IN_PROCESS_BYTES: Final = 8 << 20
BYTES_PER_WORKER: Final = 16 << 20
Numbered = tuple[int, str]
"""A row's number in its set, and its text."""


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
    """Encodes batches of rows in this process: the ids with flags of all rows, one behind the other."""

    def __init__(self, settings: RowSettings):
        """Raises UserError for a tokenizer without a template, where one is needed."""
        self._settings, self._num_batches = settings, 0
        if settings.is_pairs:
            self._rows: Callable[[int, str], np.ndarray] = self._pair
            self._pairs = PairEncoder(settings.tokenizer_directory, settings.date, settings.is_fast)
        else:
            self._rows = self._conversation
            self._template = Template(settings.tokenizer_directory, settings.date, settings.is_fast)
            self._eos_id = open_tokenizer(settings.tokenizer_directory)[1]

    def __call__(self, batch: list[Numbered]) -> np.ndarray:
        if self._num_batches % COMPARED_EVERY == 0 and not self._settings.is_pairs:
            self._template.compare(json.loads(min(batch, key=lambda row: len(row[1]))[1]))
        self._num_batches += 1
        return np.concatenate([self._rows(*row) for row in batch])

    def _pair(self, number: int, text: str) -> np.ndarray:
        return np.concatenate(self._pairs.rows(json.loads(text), f"pair {number} of {self._settings.name}"))

    def _conversation(self, number: int, text: str) -> np.ndarray:
        messages, cut_above = json.loads(text), self._settings.cut_above
        where = f"conversation {number} of {self._settings.name} ({messages[0]['content'][:40]!r})"
        ids_N, is_learned_N, unwritten = self._template.encode(messages, where)
        is_long = cut_above is not None and len(ids_N) > cut_above
        is_words_N = self._template.words(messages, ids_N, where) & ~is_learned_N if is_long else None
        return flagged(ids_N, is_learned_N, self._eos_id, unwritten, is_words_N)


def num_workers(num_bytes: int, num_cores: int) -> int:
    """How many workers to start; 0: encode in this process."""
    if num_bytes <= IN_PROCESS_BYTES:
        return 0
    return min(num_cores, MAX_WORKERS, -(-num_bytes // BYTES_PER_WORKER))


def batches(texts: Iterable[str]) -> Iterator[list[Numbered]]:
    batch: list[Numbered] = []
    num_chars = 0
    for number, text in enumerate(texts):
        batch.append((number, text))
        num_chars += len(text)
        if len(batch) == ROWS_AT_ONCE or num_chars >= CHARS_AT_ONCE:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def encode_rows(
    texts: Iterable[str], settings: RowSettings, num_bytes: int = 0, num_cores: int = 1
) -> Iterator[np.ndarray]:
    """Ids with flags of all rows (see `conversation_of` and `pair_of`), in order, a batch at a time.

    num_bytes: about how much text there is; decides how many workers to start. Raises UserError.
    """
    count = num_workers(num_bytes, num_cores)
    if count == 0:
        yield from map(RowEncoder(settings), batches(texts))
        return
    with Workers(count, RowEncoder, settings) as workers:
        yield from workers.map(batches(texts))
