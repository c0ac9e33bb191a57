"""What a recipe may say about data: sources, tokenizer, packing, and the evaluation sets.

Everything here is checked when it is made, without touching a file; `prepare` checks what depends on files. No torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from windlass.data.curate.config import NearDuplicatesConfig
from windlass.data.held_out import HeldOutConfig
from windlass.data.shards.config import CacheConfig
from windlass.data.sources.config import SourceConfig
from windlass.data.stream.config import (
    OrderConfig,
    StageConfig,
    beyond_stages,
    growing_errors,
    mixture_stage_errors,
    stage_starts,
    weight_errors,
)
from windlass.data.tokenizer_config import TokenizerConfig as TokenizerConfig
from windlass.errors import UserError
from windlass.settings import BrokenRule, Count, Settings
from windlass.units import KIB, MIB


def _kind(value: Any) -> str | None:
    if isinstance(value, dict):
        return "amount" if value and value.keys() <= {"bytes", "tokens"} else "source"
    if isinstance(value, (SourceConfig, HeldOutConfig)):
        return "source" if isinstance(value, SourceConfig) else "amount"
    return "none" if value == "none" else "share" if re.match(r"[-+.\d]", str(value)) else None


Share = Annotated[float, Field(gt=0.0, lt=1.0), Tag("share")]
Validation = Annotated[
    Share
    | Annotated[Literal["none"], Tag("none")]
    | Annotated[HeldOutConfig, Tag("amount")]
    | Annotated[SourceConfig, Tag("source")],
    Discriminator(
        _kind, "validation", "a share between 0 and 1, none, {bytes: ...}, {tokens: ...}, or a source as {path: ...}"
    ),
]


class DataConfig(Settings):
    sources: list[SourceConfig] = Field(min_length=1)
    """The training documents: sources are read one after the other, or mixed in the shares of their `weight`."""
    tokenizer: TokenizerConfig
    """The tokenizer that turns text into token ids."""
    directory: str = Field(min_length=1)
    """Directory of the prepared shards: a local one, or a URL that fsspec opens (s3://bucket/path, gs://, https:// to read
    only, file://), read through `cache`. `prepare` creates it and puts nothing else there. Credentials come from the
    environment (AWS_ACCESS_KEY_ID and the like)."""
    cache: CacheConfig | None = None
    """With a URL, where shards are kept on this host."""
    sequence_length: Count = Field(ge=2, le=1 << 24)
    """Targets per sequence, in tokens (T). A sample stores T+1 ids; neighbouring samples share one."""
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    """How documents become sequences. concatenate: one after the other, cut where a sequence ends, without padding. best-fit:
    whole documents that nearly fill a sequence (only longer documents are cut); `prepare` prints how full sequences are. A set
    with conversations always uses best-fit, which cuts none of them."""
    isolate: bool = False
    """Whether a document attends only to itself: positions begin at 0 in each, and no token is predicted across a border. The
    same holds in every evaluation set."""
    deduplicate: bool | NearDuplicatesConfig = False
    """Leave out every document of `sources` whose text came before: with `true` equal to the byte, with {similarity: 0.8} also
    nearly equal. `true` takes 16 bytes of memory per document while documents are counted, and about 60 for a moment at the
    end."""
    validation: Validation = 0.02
    """The part of the training documents that is held out, chosen by the hash of each document's text: a share of the documents
    (of a single text file a share of its bytes, its end), or an amount, {bytes: 10e6} or {tokens: 1e6}. Or a separate source,
    or none."""
    shard_bytes: int = Field(default=32 * MIB, ge=4 * KIB, le=1024 * MIB)
    """Size of a shard file: it holds as many samples as fit into these bytes at 8 bytes per token. On disk, text takes a
    quarter of them, or half if the vocabulary has more than 65,536 ids; padding or masks add a byte per token."""
    compression: Literal["none", "zstd"] = "none"
    """Compression of the shards. A shard is unpacked into memory while it is read. May change on resume."""
    workers: int | None = Field(default=None, ge=1, le=1024)
    """Largest number of processes that `prepare` encodes with; each takes about 150 MB. If not given: the cores that this
    process may use, by its affinity and its cgroup, and at most 32. Little text starts fewer. May change on resume."""
    rehash: bool = Field(default=False, exclude=True)
    """Whether every local file of the sources is hashed, including files whose size, time of change and inode have not changed;
    `--rehash` of `prepare` and `train` sets it."""
    shuffle_window: int = Field(default=8, ge=1)
    """Shards per shuffle window: shards are shuffled, then samples are permuted inside windows of this many shards."""
    stages: list[StageConfig] = []
    """Shares of the sources that change along the training stream, one stage after the other, instead of `weight`. A stage ends
    at its number of tokens, rounded to a sample, and each source continues where it was. On resume the shares from the
    checkpoint on may change, with run.accept_drift=[data.stages]."""
    order: OrderConfig = OrderConfig()
    """The order of the first epoch."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long a step waits for its batch, in seconds, before the run ends with exit code 74, because a disk or a store does
    not answer. May change on resume."""
    max_bad_shards: int = Field(default=0, ge=0)
    """Shards of the training set that a run may leave out because they are missing or their size or hash is wrong (shards of a
    store are fetched twice). From then on their samples count no target: all ranks agree on it, checkpoints remember it, and
    each shard is an incident. 0: the first bad shard ends the run. May change on resume."""

    @field_validator("directory")
    @classmethod
    def _no_secrets(cls, directory: str) -> str:
        if "://" in directory and ("@" in directory.partition("://")[2].partition("/")[0] or "?" in directory):
            rule = "checkpoints keep the URL to open it again, so it has no user, password or query"
            change = "give the bare URL as .directory, and credentials in the environment"
            raise BrokenRule({"directory": directory}, rule, change)
        if "::" in directory:
            rule = "a chain of file systems is not opened; `cache` keeps the shards of one URL here"
            raise BrokenRule({"directory": directory}, rule, "give one URL as .directory")
        return directory

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (
            self._chat(),
            self._formats(),
            self._held_out(),
            self._growing(),
            self._weights(),
            self._stages(),
            self._cached(),
        )

    def named(self) -> dict[str, SourceConfig]:
        """The sources, and that of the validation set where it has one, by their keys."""
        named = {f"sources[{number}]": source for number, source in enumerate(self.sources)}
        return named | ({"validation": self.validation} if isinstance(self.validation, SourceConfig) else {})

    def _chat(self) -> Iterator[BrokenRule]:
        rules = {
            "tokens": ("ids that were made before belong to the tokenizer that made them", "give .tokenizer.from"),
            "chat": (
                "conversations are written by a tokenizer's chat template, and a trained one has none",
                "give .tokenizer.from of a chat model",
            ),
        }
        for key, source in self.named().items():
            if self.tokenizer.train is not None and source.format in rules:
                rule, change = rules[source.format]
                given = {f"{key}.format": source.format, "tokenizer.train": self.tokenizer.train}
                yield BrokenRule(given, rule, f"{change}, in place of .tokenizer.train")
                return  # one mistake, of however many sources

    def _formats(self) -> Iterator[BrokenRule]:
        formats = {f"{key}.format": source.format for key, source in self.named().items()}
        pairs = [key for key, kind in formats.items() if kind == "preference"]
        others = [key for key in formats if key not in pairs]
        if pairs and others:
            yield BrokenRule(
                {key: formats[key] for key in (pairs[0], others[0])},
                "a sample of pairs differs from a sample of text or chat, so all sources (validation among them) hold pairs or "
                f"none does; here {len(pairs)} of {len(formats)} do",
                "set format=preference in all of them, or in none",
            )
        if pairs and (self.packing != "concatenate" or self.isolate):
            key = "isolate" if self.isolate else "packing"
            rule = "each answer of a pair has a sequence of its own, so the setting has no effect"
            yield BrokenRule({key: getattr(self, key), pairs[0]: "preference"}, rule, f"remove .{key}")
        wordless = [key for key in formats if key != "validation.format" and formats[key] not in ("text", "chat")]
        if isinstance(self.deduplicate, NearDuplicatesConfig) and wordless:
            given = {"deduplicate": self.deduplicate, wordless[0]: formats[wordless[0]]}
            rule = "near duplicates are found by the words of texts and conversations"
            yield BrokenRule(given, rule, "set .deduplicate=true, which compares all bytes")

    def _held_out(self) -> Iterator[BrokenRule]:
        if self.order.held_out_of is not None and not isinstance(self.validation, float):
            given: dict[str, object] = {"order.held_out_of": self.order.held_out_of, "validation": self.validation}
            rule = "it says of how many documents a share for `validation` is, and has no effect without a share"
            yield BrokenRule(given, rule, "remove .order.held_out_of")
        wants_tokens = isinstance(self.validation, HeldOutConfig) and self.validation.tokens is not None
        if wants_tokens and self.tokenizer.train is not None:
            given = {"validation": self.validation, "tokenizer.train": self.tokenizer.train}
            rule = "the tokenizer is trained on what is not held out, so no token is known before"
            yield BrokenRule(given, rule, "give an amount of bytes: .validation={bytes: ...}")

    def _growing(self) -> Iterator[BrokenRule]:
        yield from growing_errors(self.sources, self.order)

    def _weights(self) -> Iterator[BrokenRule]:
        yield from weight_errors(self.sources)
        for key in ("weight", "fill_in_middle") if isinstance(self.validation, SourceConfig) else ():
            if (value := getattr(self.validation, key)) is not None:
                rule = "it is for training sources, and has no effect on validation"
                yield BrokenRule({f"validation.{key}": value}, rule, f"remove .validation.{key}")

    def _stages(self) -> Iterator[BrokenRule]:
        if self.stages:
            length = self.sequence_length * self.sequences_per_sample
            yield from mixture_stage_errors(self.stages, [one.weight for one in self.sources], self.labels, length)

    def _cached(self) -> Iterator[BrokenRule]:
        if "://" in self.directory and self.cache is None:
            change = "set .cache={directory: /local/disk/cache, limit_mib: 10240}"
            given: dict[str, object] = {"directory": self.directory, "cache": None}
            yield BrokenRule(given, "shards at a URL are read through a local cache", change)
        if "://" not in self.directory and self.cache is not None:
            given = {"cache": self.cache, "directory": self.directory}
            yield BrokenRule(given, "a local directory is read in place, and `cache` has no effect", "remove .cache")

    @property
    def labels(self) -> list[str]:
        """What each source is called."""
        return [source.label for source in self.sources]

    @property
    def mixture(self) -> list[tuple[int, tuple[float, ...]]]:
        """The shares in which sources are mixed: of each stage its first sample, and the weight of each source. Empty where
        sources are read one after the other."""
        if self.stages:
            starts = stage_starts(self.stages, self.sequence_length * self.sequences_per_sample)
            own = [tuple(stage.weights.get(label, 0.0) for label in self.labels) for stage in self.stages]
            return list(zip(starts, own))
        weights = tuple(source.weight for source in self.sources if source.weight is not None)
        return [(0, weights)] if len(weights) > 1 else []

    def evaluated(self, sets: Mapping[str, SourceConfig]) -> tuple[str, ...]:
        """The names of all validation sets; `validation` comes first, where there is one."""
        return (*(["validation"] if self.validation != "none" else []), *sets)

    def sources_of(self, name: str, sets: Mapping[str, SourceConfig]) -> list[SourceConfig]:
        """Where the documents of a validation set come from."""
        own = sets.get(name, self.validation)
        return [own] if isinstance(own, SourceConfig) else self.sources

    @property
    def is_preference(self) -> bool:
        """Whether the sources hold pairs; then all do."""
        return self.sources[0].format == "preference"

    @property
    def sequences_per_sample(self) -> int:
        """Rows of a batch that one sample becomes: a pair has one for each answer."""
        return 2 if self.is_preference else 1

    @property
    def may_grow(self) -> bool:
        """Whether training may begin before all is prepared. Not from a URL, to which whole preparations are published; nor with
        a mixture, which takes from all sources at once, while they are written one behind the other."""
        return self.order.first_epoch == "written" and "://" not in self.directory and not self.mixture

    @property
    def batch_timeout_s(self) -> float:
        """The longest wait for a batch; none where a preparation may be under way, which has a limit of its own."""
        return math.inf if self.may_grow else self.timeout_s

    def errors_beside(
        self,
        epochs: float | None,
        steps: int | None,
        tokens_per_step: int,
        keep_best: int,
        sets: Mapping[str, SourceConfig],
    ) -> Iterator[UserError]:
        """A UserError where a run's length is in epochs and sources are mixed, or it goes on behind its stages, or its best
        checkpoints are kept by no loss."""
        if steps is not None:
            yield from beyond_stages(self.stages, steps, tokens_per_step)
        samples = tokens_per_step // (self.sequence_length * self.sequences_per_sample)
        if samples % self.order.lanes:
            yield UserError(
                f"data.order.lanes={self.order.lanes} with a global batch of {samples} samples",
                "a batch takes the same number of samples from each lane",
                f"use a divisor: data.order.lanes={math.gcd(samples, self.order.lanes)}, or another run.tokens_per_step",
            )
        if keep_best and not self.evaluated(sets):
            yield UserError(
                f"checkpoint.keep_best={keep_best} with data.validation: none and no evaluate.sets",
                "the best checkpoints are those of the lowest validation loss",
                "set checkpoint.keep_best=0, hold something out, or add a set to evaluate.sets",
            )
        if epochs is not None and self.mixture:
            yield UserError(
                f"run.epochs={epochs:g} with {len(self.sources)} sources in data.sources that are mixed",
                "each source of a mixture repeats in its own time, so the mixture has no epochs",
                "set run.tokens or run.steps; the epochs of each source are printed before the first step",
            )

    def check_pairs_are_not_trained(self, sets: Mapping[str, SourceConfig]) -> None:
        """Raises UserError where a run would train on pairs, or evaluate on them."""
        named = {f"data.sources[{number}]": source for number, source in enumerate(self.sources)}
        named |= {f"evaluate.sets.{name}": source for name, source in sets.items()}
        pairs = [name for name, source in named.items() if source.format == "preference"]
        if pairs:
            raise UserError(
                f"objective.kind=pretrain with `format: preference` of {', '.join(pairs)}",
                "pretrain learns or scores one text at a time, and a pair has a preferred and a rejected answer",
                "set objective.kind=dpo; or give texts or conversations (format: chat, with the chosen answers)",
            )
