"""Preference pairs -> ids: two answers to one prompt, kept together, with a mask of what each answer is.

A pair (sources/preference_rows) travels through preparation as one array of ids: the prompt with the chosen answer, an EOS that
carries the flag CHOSEN_END (see flags), the prompt with the rejected answer, EOS.

**A sample of pairs** holds 2 (T + 1) ids: two rows as best-fit would write them, each of one document,

    EOS prompt chosen EOS . . .     EOS prompt rejected EOS . .      "." is EOS that counts nothing

and labels of -100 but for the answers and their EOS. So the order of samples, their hashes, the cache and the ledger work
for pairs unchanged, and the two answers are never apart. Prompts are equal id by id, so where the prompt of two texts ends does
not change an objective of their difference (Rafailov et al., arXiv 2305.18290). No pair is ever cut: one that is too long is
refused, or dropped whole and counted (fitting).
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from windlass.data.batch_fields import NOT_COUNTED
from windlass.data.tokenize.chat_samples import as_inference
from windlass.data.tokenize.chat_template import Encoded, Template
from windlass.data.tokenize.flags import CHOSEN_END, flagged
from windlass.data.tokenize.tokenizer import open_tokenizer
from windlass.errors import UserError

ROWS: Final = 2  # of a sample: chosen and rejected
ROWS_AT_ONCE: Final = 256


class PairEncoder:
    """Encodes pairs (see `pair_of`)."""

    def __init__(self, tokenizer_directory: Path, date: str | None = None, is_fast: bool = False):
        self._directory, self._date, self._is_fast = tokenizer_directory, date, is_fast
        self._tokenizer, self._eos_id = open_tokenizer(tokenizer_directory)
        self._template: Template | None = None

    def open_template(self, pair: str) -> None:
        """Once, before a pair of conversations. Raises UserError where there is none."""
        if self._template is None and not isinstance(json.loads(pair)["chosen"], str):
            self._template = Template(self._directory, self._date, self._is_fast)

    def rows(self, pair: dict[str, Any], where: str) -> list[np.ndarray]:
        """Chosen and rejected, each with its prompt, and with flags."""
        encoded = self._texts(pair) if isinstance(pair["chosen"], str) else self._conversations(pair, where)
        first, second = (flagged(row.ids_N, row.is_learned_N, self._eos_id, row.unwritten) for row in encoded)
        first[-1] |= CHOSEN_END
        return [first, second]

    def _texts(self, pair: dict[str, Any]) -> list[Encoded]:
        """A prompt is encoded by itself, as it is when an answer to it is to be generated."""
        prompt, *answers = [
            self._tokenizer.encode(pair[key] or "", add_special_tokens=False).ids
            for key in ("prompt", "chosen", "rejected")
        ]
        rows = [np.array([*prompt, *answer, self._eos_id], np.int32) for answer in answers]
        num_prompt = len(prompt) if pair["prompt"] is not None else _num_common(*rows)
        return [Encoded(row, np.arange(len(row)) >= num_prompt, []) for row in rows]

    def _conversations(self, pair: dict[str, Any], where: str) -> list[Encoded]:
        assert self._template is not None
        prompt = pair["prompt"]
        where = f"{where} ({prompt[0]['content'][:40]!r})"
        rows = [self._answer(prompt, pair[key], f"{where} {key}") for key in ("chosen", "rejected")]
        starts = [int(row.is_learned_N.argmax()) for row in rows]
        if rows[0].ids_N[: starts[0]].tolist() != rows[1].ids_N[: starts[1]].tolist():
            rule = "the template writes the prompt of both answers alike"
            raise UserError(
                f"{where} has a prompt that is written in two ways",
                rule,
                "fix the chat template, or leave the pair out",
            )
        return rows

    def _answer(self, prompt: list[dict[str, Any]], said: list[dict[str, Any]], where: str) -> Encoded:
        assert self._template is not None
        if len(said) > 1:
            return self._template.encode(prompt + said, where, len(prompt))
        return as_inference(self._template, prompt + said, where)


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def chosen_and_rejected(pair: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chosen and rejected of one pair's ids with flags."""
    border = int(np.flatnonzero(pair & CHOSEN_END)[0]) + 1
    return pair[:border], pair[border:]


def pack_pairs(ids: Iterable[np.ndarray], eos_id: int, sequence_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (input_ids, labels), [n, 2 (T + 1)] int32 with flags: a sample is a pair. All pairs fit (see fitting)."""
    rows: list[np.ndarray] = []
    held = np.empty(0, np.int32)
    for part in ids:
        held = np.concatenate([held, part])
        ends = np.flatnonzero(held == eos_id) + 1
        for pair in np.split(held, ends)[:-1]:
            rows += chosen_and_rejected(pair)
            if len(rows) >= ROWS_AT_ONCE:
                yield _samples(rows, eos_id, sequence_length)
                rows = []
        held = held[ends[-1] :] if len(ends) else held
    if rows:
        yield _samples(rows, eos_id, sequence_length)


def _samples(rows: list[np.ndarray], eos_id: int, sequence_length: int) -> tuple[np.ndarray, np.ndarray]:
    input_ids = np.full((len(rows), sequence_length + 1), eos_id, np.int32)
    labels = np.full((len(rows), sequence_length + 1), NOT_COUNTED, np.int32)
    for number, row in enumerate(rows):
        input_ids[number, 1 : 1 + len(row)] = labels[number, 1 : 1 + len(row)] = row
    width = ROWS * (sequence_length + 1)
    return input_ids.reshape(-1, width), labels.reshape(-1, width)
