"""The text of a template -> ids, and where in the text each begins.

The special tokens that the template writes cut the text; what is between them is encoded alone. Where tiktoken gives the
tokenizer's own ids (tiktoken_encoder) it encodes that, three times as fast, and a token's offset follows from the bytes of the
tokens before it. Else the tokenizer itself says both.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from windlass.data.tokenize.tiktoken_encoder import Encode, Unfit, compile_bpe
from windlass.data.tokenize.tokenizer import token_bytes
from windlass.errors import UserError


class Tokens(NamedTuple):
    """A text as ids."""

    ids_N: np.ndarray
    """[N] int32."""
    starts_N: np.ndarray
    """[N] int64: where in the text each begins, in characters or in bytes."""
    offsets: np.ndarray
    """The offsets that were asked for, in the same unit."""


class TextEncoder:
    """Encodes what the chat template of one tokenizer writes."""

    def __init__(self, directory: Path, tokenizer: Tokenizer, is_fast: bool = False):
        """`tokenizer`: of the same directory, and its special tokens are no text; `is_fast`: tiktoken may encode."""
        self._tokenizer = tokenizer
        added = {number: token for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._numbers = {token.content: number for number, token in added.items()}
        self.finder = finder_of(self._numbers)
        found = compile_bpe(directory) if is_fast and not any(map(_strips, added.values())) else None
        self._fast: Encode | None = None if found is None or isinstance(found, Unfit) else found
        self._bytes_V = token_bytes(tokenizer).astype(np.int64)
        for content, number in self._numbers.items():
            self._bytes_V[number] = len(content.encode())

    @property
    def is_fast(self) -> bool:
        return self._fast is not None

    def encode(self, text: str, offsets: Sequence[int] = ()) -> Tokens:
        """`offsets`: characters of the text, in order."""
        if self._fast is None:
            found = self._tokenizer.encode(text, add_special_tokens=False)
            starts_N = np.array([start for start, _ in found.offsets], np.int64)
            return Tokens(np.array(found.ids, np.int32), starts_N, np.array(offsets, np.int64))
        ids_N = self._fast_ids(text)
        sizes_N = self._bytes_V[ids_N]
        assert sizes_N.sum() == len(text.encode()), "a byte-level tokenizer that rewrites nothing"
        return Tokens(ids_N, np.cumsum(sizes_N) - sizes_N, _in_bytes(text, offsets))

    def _fast_ids(self, text: str) -> np.ndarray:
        assert self._fast is not None
        parts = self.finder.split(text)  # text and special tokens in turn
        found = [
            np.array([self._numbers[part]], np.int32) if at % 2 else self._fast(part)
            for at, part in enumerate(parts)
            if part
        ]
        return np.concatenate([np.empty(0, np.int32), *found])

    def compare(self, text: str) -> None:
        """Raises UserError where tiktoken gives other ids than the tokenizer."""
        if (
            self._fast is None
            or self._fast_ids(text).tolist() == self._tokenizer.encode(text, add_special_tokens=False).ids
        ):
            return
        raise UserError(
            f"tiktoken and the tokenizer give other ids for {text[:60]!r}",
            "tiktoken is used where it gives the tokenizer's own ids; a sample had shown no difference",
            "uninstall tiktoken, and prepare again: then the tokenizer itself encodes",
        )


def finder_of(specials: Sequence[str] | dict[str, int]) -> re.Pattern[str]:
    """Finds the first special token in a text, the longest of those that begin there; nothing where there are none."""
    names = sorted(specials, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else r"(?!)()")


def _strips(token: Any) -> bool:
    return bool(token.lstrip or token.rstrip or token.single_word)


def _in_bytes(text: str, offsets: Sequence[int]) -> np.ndarray:
    if text.isascii():
        return np.array(offsets, np.int64)
    return np.cumsum([len(text[start:end].encode()) for start, end in pairwise([0, *offsets])], dtype=np.int64)
