"""What a recipe may say about an amount of the training documents that is held out for validation. No torch."""

from collections.abc import Iterator, Sequence
from typing import Final

from pydantic import Field

from windlass.settings import BrokenRule, Count, Settings

MOST: Final = 10**18  # what counts bytes and tokens holds 63 bits


class HeldOutConfig(Settings):
    """How much of the training documents is held out: exactly one of `bytes` and `tokens`. Whole documents are taken in the
    order of the hashes of their texts, until the amount is reached; a text that is longer than the missing amount gives its
    last lines. So one long text file has a validation set too."""

    bytes: Count | None = Field(default=None, ge=1, le=MOST)
    """Bytes of text (UTF-8); rows of tokens count four bytes per token."""
    tokens: Count | None = Field(default=None, ge=1, le=MOST)
    """Approximate number of tokens: a sample of the documents says how many bytes of text a token has. Needs `tokenizer: {from:
    ...}`."""

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (self.exactly_one("an amount to hold out", "bytes", "tokens"),)

    @property
    def in_words(self) -> str:
        return f"{{bytes: {self.bytes}}}" if self.bytes is not None else f"{{tokens: {self.tokens}}}"
