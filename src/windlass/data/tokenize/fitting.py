"""Pairs and conversations that are longer than a sequence: refused, dropped and counted, or, of conversations, their prompts cut.

No answer is ever cut, since a model would learn to stop where a sequence does. `too_long` of a source chooses:

    refuse       an error at the end that names the length they need (the default)
    drop         left out whole and counted
    cut-prompt   every message that is no answer keeps at most L ids, its first (L+1)//2 and its last L//2; the marks of turns
                 and all answers stay. L is the largest with which the conversation fits, so short messages (the system's) stay
                 whole and the longest are cut most. With L < LEAST_WORDS the question would be gone: that one is left out
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, Literal

import numpy as np

from windlass.data.sources.config import TooLong
from windlass.data.tokenize.flags import UNWRITTEN_BITS, WORDS
from windlass.data.tokenize.preferences import chosen_and_rejected
from windlass.data.tokenize.resume import FinishedPart
from windlass.errors import UserError

LEAST_WORDS: Final = 16  # ids that a cut message keeps: our choice, about a sentence's begin and its end
ROUND: Final = 64
"""A length that is proposed is a multiple of it: other sets may be a little longer, and tokens per step divide by it."""
NAMES: Final = {"chat": "conversations", "preference": "pairs"}


class Fitting:
    """The pairs or conversations of one source that fit a sequence, and counts of those that do not."""

    def __init__(
        self, eos_id: int, sequence_length: int, format: Literal["chat", "preference"], too_long: TooLong | None
    ):
        self._eos_id, self._length, self._format, self._too_long = eos_id, sequence_length, format, too_long
        self.num_documents = self.num_dropped = self.num_cut = self.num_cut_tokens = 0
        self.longest = 0
        """The smallest sequence, in tokens, that holds every one."""
        self._first_dropped = 0

    def through(self, parts: Iterable[FinishedPart], name: str) -> Iterator[FinishedPart]:
        """The parts, of what fits. Raises UserError at the end, as `check` does."""
        for part in parts:
            documents = np.split(part.ids, np.flatnonzero(part.ids == self._eos_id)[:-1] + 1)
            fitted = [self._fitted(document) for document in documents]
            kept = [ids for ids in fitted if ids is not None]
            if sum(map(len, kept)) == len(part.ids):
                yield part
            elif kept:
                yield FinishedPart(np.concatenate(kept), part.sizes[[ids is not None for ids in fitted]])
        self.check(name)

    def check(self, name: str) -> None:
        """Raises UserError where some are too long and the recipe does not say what to do, or where none is left."""
        if self.num_dropped and (self._too_long in (None, "refuse") or self.num_dropped == self.num_documents):
            raise self._error(name)

    def _fitted(self, document: np.ndarray) -> np.ndarray | None:
        self.num_documents += 1
        needed = len(document) if self._format == "chat" else max(map(len, chosen_and_rejected(document)))
        kept: np.ndarray | None = document
        if needed > self._length and self._too_long == "cut-prompt":
            needed, kept = _least(document), cut_prompts(document, self._length)
            if kept is not None:
                self.num_cut += 1
                self.num_cut_tokens += len(document) - len(kept)
        elif needed > self._length:
            kept = None
        if kept is None:
            self._first_dropped = self._first_dropped if self.num_dropped else self.num_documents - 1
            self.num_dropped += 1
        self.longest = max(self.longest, needed)
        return kept

    def _error(self, name: str) -> UserError:
        given = f"{self.num_dropped} of {self.num_documents} {NAMES[self._format]} of {name} are longer than "
        given += f"data.sequence_length={self._length}"
        length = f"set data.sequence_length={-(-self.longest // ROUND) * ROUND}"
        ways = f"`too_long: drop` of the source of {name}, which leaves them out"
        if self._format == "preference":
            given += f"; the longest answer has {self.longest} tokens with its prompt and EOS"
            rule = "nothing of a pair is cut: each answer is whole in a sequence"
        else:
            cut = f" with prompts cut to {LEAST_WORDS} tokens" if self._too_long == "cut-prompt" else ""
            given += f"{cut}; the longest has {self.longest} tokens with its EOS{cut}"
            rule = "no answer is cut, and a conversation is whole in a sequence"
            shorten = f"`too_long: cut-prompt` of the source of {name}, which shortens what is asked"
            ways = shorten if self._too_long == "drop" else f"{shorten}, or {ways}"
        has_no_other = self._too_long == "cut-prompt" or (self._too_long == "drop" and self._format == "preference")
        return UserError(given, rule, length if has_no_other else f"{length}, or {ways}")

    def report(self) -> Iterator[str]:
        """A sentence on conversations whose prompts were cut and one on rows that were dropped; none where all fit."""
        if self.num_cut:
            yield (
                f"{self.num_cut} of {self.num_documents} conversations are cut to a sequence: {self.num_cut_tokens} tokens of "
                "what is asked are left out, and of no answer (too_long: cut-prompt)"
            )
        if self.num_dropped:
            what = f"{self.num_dropped} {NAMES[self._format]} are left out, which are longer than a sequence"
            if self._too_long == "cut-prompt":
                what += f" with prompts cut to {LEAST_WORDS} tokens"
            yield f"{what} (too_long: {self._too_long}); the first is number {self._first_dropped}"


def cut_prompts(ids_N: np.ndarray, length: int) -> np.ndarray | None:
    """A conversation's ids with flags, [N] -> [at most `length`] by the rule above; None where a cut message would keep less than
    LEAST_WORDS."""
    is_words_N, spans = _words(ids_N)
    sizes = np.array([end - start for start, end in spans], np.int64)
    room = length - int((~is_words_N).sum())
    levels = range(1, int(sizes.max(initial=0)) + 1)
    level = bisect_right(levels, room, key=lambda level: int(np.minimum(sizes, level).sum()))
    if level < min(LEAST_WORDS, len(levels)) or not len(levels):
        return None
    is_kept_N = np.ones(len(ids_N), bool)
    for start, end in spans:
        if end - start > level:
            is_kept_N[start + (level + 1) // 2 : end - level // 2] = False
    # the flags of answer k are on the k-th id, and are to stay there
    unwritten_N = ids_N & UNWRITTEN_BITS
    kept: np.ndarray = (ids_N & ~UNWRITTEN_BITS)[is_kept_N]
    return kept | unwritten_N[: len(kept)]


def _words(ids_N: np.ndarray) -> tuple[np.ndarray, list[list[int]]]:
    """Which ids are words of a message that may be cut, [N] bool; and start and end of each message's."""
    is_words_N = (ids_N & WORDS) != 0
    borders: list[list[int]] = np.flatnonzero(np.diff(is_words_N, prepend=False, append=False)).reshape(-1, 2).tolist()
    return is_words_N, borders


def _least(ids_N: np.ndarray) -> int:
    """The length of a conversation with every message of words cut to LEAST_WORDS."""
    return len(ids_N) - sum(max(0, end - start - LEAST_WORDS) for start, end in _words(ids_N)[1])
