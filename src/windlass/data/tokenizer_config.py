"""What a recipe may say about its tokenizer. Checked when it is made, without touching a file. No torch."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from windlass.errors import UserError
from windlass.hub.config import revision_errors
from windlass.settings import Count, Settings, Violation, Violations


class TokenizerConfig(Settings):
    """Exactly one of `train` and `from`."""

    train: Annotated[Count, Field(ge=257, le=1_000_000)] | None = None
    """Size of the vocabulary of a byte-level BPE trained on the training documents: 256 bytes, the end-of-text token,
    and merges."""
    from_: str | None = Field(default=None, alias="from")
    """A Hugging Face tokenizer: its directory, a `tokenizer.json` with `tokenizer_config.json` beside it, or a name on the hub
    such as Qwen/Qwen3-4B."""
    revision: str | None = None
    """With a hub name: the branch, tag or full commit to take; main if not given."""
    commit: str | None = None
    """With a hub name: the revision's commit when the data was prepared. windlass writes it into resolved.yaml."""
    hub_cache: str | None = Field(None, exclude=True)
    """hub.cache of the recipe, which fills it in."""
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    """With `from`: the token that ends a document, if the tokenizer's files name none or another one."""
    trust_remote_code: str | None = None
    """The exact name (or directory) in `from`, if the tokenizer's own Python code may run, once, while data is prepared."""

    @field_validator("trust_remote_code", mode="before")
    @classmethod
    def _no_blanket_trust(cls, given: object, info: ValidationInfo) -> object:
        if isinstance(given, bool):
            name = info.data.get("from_") or "the name in data.tokenizer.from"
            error = UserError(
                f"data.tokenizer.trust_remote_code: {str(given).lower()}",
                "code of that repository will run here, so it is trusted by name, not by true",
                f"write data.tokenizer.trust_remote_code: {name}, once you have read its code"
                if given
                else "remove the setting: without it no such code runs",
            )
            raise Violations([error])
        return given

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (
            self._one_kind(),
            revision_errors("data.tokenizer", self.from_, self.revision, self.commit),
            self._trust(),
        )

    def _one_kind(self) -> Iterator[Violation]:
        yield from self.exactly_one("a tokenizer", "train", "from_")
        if self.train is not None and self.from_ is None and self.eos_token is not None:
            yield UserError(
                f"data.tokenizer.eos_token: {self.eos_token} with data.tokenizer.train: {self.train}",
                "a tokenizer that is trained here ends a text by <|endoftext|>",
                "remove data.tokenizer.eos_token",
            )

    def _trust(self) -> Iterator[UserError]:
        if self.trust_remote_code not in (None, self.from_):
            yield UserError(
                f"data.tokenizer.trust_remote_code: {self.trust_remote_code} with data.tokenizer.from: {self.from_}",
                "code is trusted by name: the setting repeats the name that the code comes from",
                "repeat the name of `from` where you have read its code, or remove the setting",
            )
