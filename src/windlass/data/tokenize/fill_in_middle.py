"""Fill in the middle: the middle M of a document P M S is moved behind its end, and a model learns to write it from both sides.

    <prefix> P <suffix> S <middle> M            prefix first
    <prefix> <suffix> S <middle> P M            suffix first: P and M are encoded as one text

A document is cut at two positions between any two characters, drawn evenly, and each part is encoded by itself: a model in use is
asked at any character too, and not only where a token ends. A mark that is written in a document is text (`as_text`). Everything
is drawn from the hash of the text: a document has one form, whoever encodes it and whenever.

Source: Bavarian et al., Efficient Training of Language Models to Fill in the Middle, arXiv 2207.14255: half of the documents or
more cost nothing from left to right (section 4), cuts at characters (section 4.3), both orders (section 4.2).
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import xxhash
from tokenizers import Tokenizer

from windlass.data.sources.config import FillInMiddleConfig
from windlass.data.tokenize.tokenizer import TOKENIZER_FILE, token_bytes
from windlass.errors import UserError

MARKS: Final[Sequence[tuple[str, str, str]]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Qwen's, StarCoder's, SantaCoder's and DeepSeek's names of the marks of prefix, suffix and middle."""


class Middles(NamedTuple):
    """The recipe's settings, and the ids of the marks."""

    share: float
    suffix_first: float
    prefix_id: int
    suffix_id: int
    middle_id: int

    def parts(self, text: str) -> list[tuple[str, int | None]]:
        """The document as texts, each with the id that follows it; None: its end."""
        drawn = random.Random(xxhash.xxh64_intdigest(text.encode()))
        if drawn.random() >= self.share:
            return [(text, None)]
        is_suffix_first = drawn.random() < self.suffix_first
        first, second = sorted(int(drawn.random() * (len(text) + 1)) for _ in range(2))
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        if is_suffix_first:
            return [("", self.prefix_id), ("", self.suffix_id), (suffix, self.middle_id), (prefix + middle, None)]
        return [("", self.prefix_id), (prefix, self.suffix_id), (suffix, self.middle_id), (middle, None)]

    def as_text(self, tokenizer: Tokenizer) -> Tokenizer:
        """A copy that encodes a mark in a text by letters: its files may have it as a token that is not special."""
        held = json.loads(tokenizer.to_str())
        for token in held["added_tokens"]:
            token["special"] |= token["id"] in self.ids
        copy = Tokenizer.from_str(json.dumps(held))
        copy.encode_special_tokens = True
        return copy

    @property
    def ids(self) -> list[int]:
        return [self.prefix_id, self.suffix_id, self.middle_id]


def middles_of(config: FillInMiddleConfig | None, files: Sequence[Path], eos_id: int | None = None) -> Middles | None:
    """`files`: a tokenizer's; `eos_id`: the id that ends a document, once it is known. Raises UserError where the tokenizer has
    no such marks, or cannot encode parts of a text."""
    if config is None:
        return None
    file = next((file for file in files if file.name == TOKENIZER_FILE), None)
    if file is None:
        raise UserError(
            f"fill_in_middle, and a tokenizer that is trained here or has no {TOKENIZER_FILE}",
            "the parts of a document are encoded one by one, with a mark before each, which is a token of its own",
            "use data.tokenizer.from of a tokenizer that has marks, or take fill_in_middle out",
        )
    tokenizer = Tokenizer.from_file(str(file))
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = {token.content: number for number, token in added.items() if number != eos_id}
    marks = config.marks or next((known for known in MARKS if set(known) <= vocabulary.keys()), None)
    missing = [repr(mark) for mark in marks or () if mark not in vocabulary]
    if marks is None or missing:
        known = "; ".join(", ".join(one) for one in MARKS)
        raise UserError(
            f"fill_in_middle, and a tokenizer without {', '.join(missing) if missing else 'marks that are known'}",
            f"a mark comes before each part, and is an added token that does not end documents; known are {known}",
            "name the tokenizer's own as fill_in_middle.marks, or use a tokenizer that has some",
        )
    letter = tokenizer.encode("b", add_special_tokens=False).ids
    if token_bytes(tokenizer)[letter].sum() != 1:
        raise UserError(
            "fill_in_middle, and a tokenizer that puts a space before every text",
            "the parts of a document are encoded one by one, and none may be changed",
            "take fill_in_middle out, or use a tokenizer that keeps texts as they are",
        )
    return Middles(config.share, config.suffix_first, *(vocabulary[mark] for mark in marks))
