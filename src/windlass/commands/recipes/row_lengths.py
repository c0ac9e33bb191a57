"""How long conversations and pairs are, so that a new recipe's sequences hold them: none of their answers is ever cut. No torch.

The first rows of a file are counted, MANY at most, in tokens of the model's own tokenizer where its files are on this host,
else by CHARACTERS each; with TURN tokens for the marks around each message, whatever the template writes.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tokenizers import Tokenizer

from windlass.commands.recipes.first_rows import MANY, Row, Shape, first_rows
from windlass.data.sources.chat_rows import texts_in
from windlass.data.tokenize.template_files import check_has_template
from windlass.data.tokenize.tokenizer import COPIED_FILES, TOKENIZER_FILE
from windlass.errors import UserError
from windlass.hub.client import locate

CHARACTERS: Final = 4  # of a token of English, by the usual rule of thumb
TURN: Final = 4  # `<|im_start|>`, a new line, `<|im_end|>`, a new line; role and keys are counted as words
USUAL: Final = 1024
MOST: Final = 8192
"""Above it a person decides: activations grow with the length."""
FEW: Final = 0.01
"""The share of the rows that may be longer than the chosen length."""
SHORT: Final = (128, 256, 512)
"""For files of fewer than LITTLE tokens: packed into sequences of USUAL, 100 short rows would be two sequences an epoch."""
LITTLE: Final = 32 * USUAL


class Chosen(NamedTuple):
    """The length of a recipe's sequences, what becomes of longer rows, what that means for the rows at hand, if known, and how
    many sequences an epoch has, where all rows were counted."""

    length: int
    too_long: Literal["drop", "cut-prompt"]
    meaning: str
    sequences: int | None = None


def choose_length(file: Path, shape: Shape, model: str) -> Chosen:
    """The least length that all but FEW of the rows of `file` fit, up to MOST and the model's positions."""
    folder = _folder(model)
    positions = _positions(folder)
    lengths = list(_lengths(file, shape, folder))
    if not lengths:
        return Chosen(min(USUAL, positions), "drop", "")
    is_little = len(lengths) < MANY and sum(lengths) < LITTLE
    sizes = (*(size for size in SHORT if is_little and max(lengths) <= size), USUAL, 2048, 4096, MOST)
    candidates = [size for size in sizes if size < positions] + [positions] * (positions <= MOST)
    length = next((one for one in candidates if _longer(lengths, one) <= FEW * len(lengths)), candidates[-1])
    among = f"{'the first ' if len(lengths) == MANY else ''}{len(lengths)} rows"
    by = "" if folder else f", by {CHARACTERS} characters a token"
    packed = -(-sum(min(one, length) for one in lengths) // length)
    an_epoch = None if len(lengths) == MANY else 2 * len(lengths) if shape.kind == "dpo" else packed
    if not (longer := _longer(lengths, length)):
        return Chosen(length, "drop", f"holds all of {among}{by}", an_epoch)
    rows = f"about {longer} of {among} are longer{by}; the longest has {max(lengths)} tokens"
    if shape.kind == "dpo":
        return Chosen(length, "drop", f"{rows}; they are left out", an_epoch)
    return Chosen(length, "cut-prompt", f"{rows}; what they ask is cut, no answer is", an_epoch)


def missing_template(model: str) -> str | None:
    """What to set where the model's files are here and none of them has a chat template."""
    folder = _folder(model)
    try:
        if folder is not None:
            check_has_template([folder / name for name in COPIED_FILES if (folder / name).is_file()], model)
    except UserError as error:
        return f"{error.given}: {error.rule}. {error.change[0].upper()}{error.change[1:]}"
    return None


def _longer(lengths: Sequence[int], length: int) -> int:
    return sum(one > length for one in lengths)


def _folder(model: str) -> Path | None:
    """Where the tokenizer's files are on this host."""
    try:
        folder = locate(model, None, "--model")
    except UserError:
        return None
    return folder if (folder / TOKENIZER_FILE).is_file() else None


def _positions(folder: Path | None) -> int:
    try:
        found = json.loads((folder / "config.json").read_bytes())["max_position_embeddings"] if folder else None
    except (OSError, ValueError, LookupError, TypeError):
        found = None
    return found if isinstance(found, int) and found > 1 else 1 << 30


def _lengths(file: Path, shape: Shape, folder: Path | None) -> Iterator[int]:
    """In tokens, with the end of the text."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE)) if folder else None
    for row in islice(first_rows(file), MANY):
        yield 1 + max(_tokens(tokenizer, one) for one in _rows(row, shape))


def _rows(row: Row, shape: Shape) -> list[list[Any]]:
    if shape.kind == "dpo":
        asked = [row.get(key) for key in shape.read if key not in ("chosen", "rejected")]
        return [[*asked, row.get(answer)] for answer in ("chosen", "rejected")]
    return [[row.get(key) for key in shape.read]]


def _tokens(tokenizer: Tokenizer | None, values: list[Any]) -> int:
    turns = sum(len(value) if isinstance(value, list) else value is not None for value in values)
    texts = list(texts_in(values))
    if tokenizer is None:
        return turns * TURN + sum(map(len, texts)) // CHARACTERS
    return turns * TURN + sum(len(one.ids) for one in tokenizer.encode_batch(texts, add_special_tokens=False))
