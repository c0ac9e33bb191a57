"""What a recipe may say about data: sources, tokenizer, packing, and the evaluation sets.

Everything here is checked when it is made, without touching a file; `prepare` checks what depends on files. This file
imports no torch.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from windlass.settings import Settings
from windlass.units import KIB, MIB

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVED_NAMES = ("train", "validation", "tokenizer")


class SourceConfig(Settings):
    """Where documents come from: exactly one of `path` and `builtin`."""

    path: str | list[str] | None = None
    """A file, a directory or a glob (`**` allowed), or a list of these. A text file is one document; a line of a
    `.jsonl` file is one document; a directory stands for every text file below it, sorted."""
    builtin: Literal["python-stdlib"] | None = None
    """`python-stdlib`: the sources of the running Python's own standard library, without its tests."""
    text: str | None = None
    """The key that holds the document in a line of a `.jsonl` file; `text` if not given."""
    weight: float = 1.0
    """Share of this source in a mixture; only 1 is possible: sources are read one behind the other."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.path is None) == (self.builtin is None):
            given = "neither is" if self.path is None else "both are"
            raise ValueError(f"a source has exactly one of `path` and `builtin`; {given} given")
        if not all(self.paths) or (self.path is not None and not self.paths):
            raise ValueError("`path` is empty; give a file, a directory or a glob")
        if any("://" in path for path in self.paths):
            raise ValueError(f"`path: {self.path}` is a URL; only local files are read: copy the data here first")
        if self.builtin is not None and self.text is not None:
            raise ValueError(f"`text: {self.text}` has no effect on `builtin`; it names the key of a .jsonl file")
        if self.weight != 1.0:
            raise ValueError(f"`weight: {self.weight:g}` asks for a mixture; only weight 1 is supported: leave it out")
        return self

    @property
    def paths(self) -> list[str]:
        if self.path is None:
            return []
        return [self.path] if isinstance(self.path, str) else self.path


class TokenizerConfig(Settings):
    """Exactly one of `train` and `from`."""

    train: Annotated[int, Field(ge=257, le=1_000_000)] | None = None
    """Size of the vocabulary of a byte-level BPE trained on the training documents: 256 bytes, the end-of-text token,
    and merges."""
    from_: str | None = Field(default=None, alias="from")
    """A local Hugging Face tokenizer: its directory, or a `tokenizer.json` with `tokenizer_config.json` beside it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.train is None) == (self.from_ is None):
            given = "neither is" if self.train is None else "both are"
            raise ValueError(f"a tokenizer has exactly one of `train` and `from`; {given} given")
        return self


def _share_or_source(value: Any) -> str:
    return "source" if isinstance(value, (dict, SourceConfig)) else "share"


Share = Annotated[float, Field(gt=0.0, lt=1.0), Tag("share")]
ShareOrSource = Annotated[Share | Annotated[SourceConfig, Tag("source")], Discriminator(_share_or_source)]


class DataConfig(Settings):
    sources: list[SourceConfig] = Field(min_length=1)
    """The training documents, read one source behind the other."""
    tokenizer: TokenizerConfig
    """How text becomes token ids."""
    directory: str = Field(min_length=1)
    """Local directory of the prepared shards. It is made by `prepare` and belongs to it alone."""
    sequence_length: int = Field(ge=2, le=1 << 24)
    """Targets per sequence, in tokens (T). A sample stores T+1 ids; neighbouring samples share one."""
    validation: ShareOrSource = 0.02
    """Share of the documents that is held out, chosen by the hash of each document's text, or a source of its own."""
    shard_bytes: int = Field(default=32 * MIB, ge=4 * KIB, le=1024 * MIB)
    """Largest size of a shard file in bytes (one sample may exceed it)."""
    shuffle_window: int = Field(default=8, ge=1)
    """Shards per shuffle window: shards are shuffled, then samples are permuted inside windows of this many shards."""

    @field_validator("directory")
    @classmethod
    def _local(cls, directory: str) -> str:
        if "://" in directory:
            raise ValueError(f"`directory: {directory}` is a URL; prepared shards are kept in a local directory")
        return directory


class EvaluateConfig(Settings):
    every_steps: int = Field(default=100, ge=1)
    """Evaluate after every so many optimizer steps; besides, at step 0 and at the end."""
    sequences: int = Field(default=64, ge=1)
    """Sequences scored per set: the first so many of the set, the same ones every time (all, if the set has fewer)."""
    sets: dict[str, SourceConfig] = Field(default_factory=dict)
    """Further validation sets by name, besides `validation`."""

    @field_validator("sets")
    @classmethod
    def _names(cls, sets: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        for name in sets:
            if name in RESERVED_NAMES:
                raise ValueError(f"a set cannot be named `{name}`: that name is taken; choose another")
            if not SET_NAME.fullmatch(name):
                raise ValueError(f"a set's name is a directory's name: `{name}` may hold letters, digits, _ . - only")
        return sets
