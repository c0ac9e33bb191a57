"""What a recipe may say about the hub: where its models and tokenizers are kept. No torch, no file touched."""

from pathlib import Path
from typing import Protocol

from pydantic import field_validator

from windlass.errors import UserError
from windlass.settings import Settings


class Named(Protocol):
    """A section of a recipe that may name a repository of the hub."""

    @property
    def from_(self) -> str | None: ...
    def keep_in(self, cache: str | None) -> None: ...


class HubConfig(Settings):
    cache: str | None = None
    """Directory for what `model.from` and `data.tokenizer.from` name of the hub, in place of huggingface_hub's own (HF_HUB_CACHE,
    HF_HOME). On a cluster without a network: a directory that compute nodes see; `windlass prepare` fills it where there is one,
    and HF_HUB_OFFLINE=1 runs from it."""

    @field_validator("cache")
    @classmethod
    def _local(cls, cache: str | None) -> str | None:
        if cache is not None and (not cache or "://" in cache):
            raise ValueError(f"`cache: {cache}` is no local directory; give one that every node sees")
        return cache if cache is None else str(Path(cache).expanduser())

    def tell(self, *sections: Named) -> None:
        """The sections are told where names of the hub are kept. Raises UserError where none of them may name one."""
        for section in sections:
            section.keep_in(self.cache)
        if self.cache is not None and all(section.from_ is None for section in sections):
            raise UserError(
                f"hub.cache={self.cache} with neither model.from nor data.tokenizer.from",
                "it keeps what those name of the hub",
                "remove hub.cache",
            )
