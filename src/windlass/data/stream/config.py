"""What a recipe may say about the order of the first epoch, about training while data is still prepared, about shares that
change along the stream, and about validation sets besides the one that is held out. No torch."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal

from pydantic import Field

from windlass.data.sources.config import SourceConfig
from windlass.errors import UserError
from windlass.settings import Count, Settings, Violation

DEADLINE_S: Final = 300.0
SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
RESERVED_NAMES = ("train", "validation", "tokenizer")


class OrderConfig(Settings):
    """The order of the first epoch, and training that begins before all data is prepared. Later epochs are always shuffled."""

    first_epoch: Literal["shuffled", "written"] = "shuffled"
    """shuffled: shards are shuffled, so all of them must be prepared first. written: shards come in the order in which they are
    written, and samples are permuted inside windows of `shuffle_window` shards. `train` then begins when the other sets and the
    first window exist; it reads the same samples as from a finished preparation under this setting."""
    lanes: int = Field(default=1, ge=1)
    """With `shuffled`: the number of lanes among which the shards of each epoch are dealt; a global batch takes an equal share
    from each. With one lane per host, or a multiple of that, each host reads only the shards of its own lanes; with a single
    lane every host reads every shard. Samples are permuted inside windows of each lane, and come once per epoch. In a mixture
    each lane has an equal part of each source, with epochs of its own."""
    held_out_of: int | None = Field(default=None, ge=1)
    """With `written` and a share for `validation`: the share is of the first `held_out_of` documents of each source. Later
    documents are trained on, except copies of held-out ones. Needed if a source is streamed or still growing."""
    deadline_s: float = Field(default=DEADLINE_S, ge=1.0, le=86400.0)
    """With `written`: the longest silence, in seconds, of a preparation that the run waits for, and of a source that still
    grows; then the run ends with an error. May change on resume."""

    def rules(self) -> Sequence[Iterator[Violation]]:
        return self._needs_written(), self._needs_shuffled()

    def _needs_shuffled(self) -> Iterator[ValueError]:
        if self.lanes > 1 and self.first_epoch == "written":
            yield ValueError(
                f"`lanes: {self.lanes}` with `first_epoch: written`: lanes are dealt from shuffled shards: leave one out"
            )

    def _needs_written(self) -> Iterator[ValueError]:
        if self.first_epoch != "written":
            given = [f"`held_out_of: {self.held_out_of}`"] if self.held_out_of is not None else []
            given += [f"`deadline_s: {self.deadline_s:g}`"] if self.deadline_s != DEADLINE_S else []
            rule = "is for training that begins before all is prepared"
            yield from (ValueError(f"{one} {rule}: set `first_epoch: written`, or leave it out") for one in given)


class StageConfig(Settings):
    """A part of the training stream with its own shares."""

    tokens: Count | None = Field(default=None, ge=1)
    """Tokens to train on in this stage, rounded to whole samples. The last stage may leave it out and lasts to the end."""
    weights: dict[str, float] = Field(min_length=1)
    """Shares of the sources in this stage, relative to each other, by a source's `name`, or its path, if it has no name. A
    source that is missing here, or has 0, is not read in this stage."""

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._shares(),)

    def _shares(self) -> Iterator[ValueError]:
        wrong = [f"`{name}: {weight:g}`" for name, weight in self.weights.items() if weight < 0]
        if wrong:
            yield ValueError(f"{', '.join(wrong)} in `weights`; a share is 0 or more")
        elif not any(self.weights.values()):
            yield ValueError("all `weights` are 0; a stage reads at least one source")


def mixture_stage_errors(
    stages: Sequence[StageConfig], weights: Sequence[float | None], labels: Sequence[str], tokens_per_sample: int
) -> Iterator[ValueError]:
    """What is wrong with `stages` beside sources with these labels and, wrongly, weights of their own."""
    starts = stage_starts(stages, tokens_per_sample)
    if len(labels) < 2:
        yield ValueError("`stages` has no effect on one source: leave it out, or add sources")
        return
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        yield ValueError(
            f"`stages` finds sources by name, and {labels.count(label)} are `{label}`: give each its own `name`"
        )
    own = [f"{label} has `weight: {weight:g}`" for label, weight in zip(labels, weights) if weight is not None]
    if own:
        yield ValueError(f"{own[0]}, and `stages` gives the shares: leave one of them out")
    unknown = [name for name in dict.fromkeys(name for stage in stages for name in stage.weights) if name not in labels]
    if unknown:
        given = ", ".join(f"`{name}`" for name in unknown)
        yield ValueError(
            f"`stages` has a weight of {given}, and the sources are {', '.join(f'`{one}`' for one in labels)}"
        )
    unread = [label for label in labels if not any(stage.weights.get(label) for stage in stages)]
    if unread and not unknown:
        yield ValueError(f"no stage reads {', '.join(unread)}: give it a weight, or take it out of `sources`")
    for number, stage in enumerate(stages[:-1]):
        if stage.tokens is None:
            yield ValueError(f"`stages[{number}]` has no `tokens`; only the last stage may leave them out")
        elif starts[number + 1] <= starts[number]:
            given = f"`stages[{number}].tokens: {stage.tokens}`"
            yield ValueError(f"{given} holds no sample of {tokens_per_sample} tokens; give the stage more")


def stage_starts(stages: Sequence[StageConfig], tokens_per_sample: int) -> list[int]:
    """The position of each stage's first sample."""
    ends = accumulate((stage.tokens or 0 for stage in stages[:-1]), initial=0)  # of the stage before, in tokens
    return [round(end / tokens_per_sample) for end in ends]


def beyond_stages(stages: Sequence[StageConfig], steps: int, tokens_per_step: int) -> Iterator[UserError]:
    """A UserError where a run has a whole step behind the last stage."""
    if not stages or stages[-1].tokens is None:
        return
    end = sum(stage.tokens or 0 for stage in stages)
    if (steps - 1) * tokens_per_step >= end:
        yield UserError(
            f"data.stages end at {end} tokens, and the run has {steps * tokens_per_step}",
            "stages say where every token of a run comes from",
            "leave `tokens` of the last stage out, which then lasts to the end, or make the run as long",
        )


class EvaluateConfig(Settings):
    every_steps: Count = Field(default=100, ge=1)
    """Evaluate every N optimizer steps, at step 0 and at the end."""
    sequences: Count = Field(default=64, ge=1)
    """Sequences scored per set: the first N of the set, the same ones every time (all, if the set has fewer)."""
    sets: dict[str, SourceConfig] = Field(default_factory=dict)
    """Further validation sets by name, besides `validation`."""

    def rules(self) -> Sequence[Iterator[Violation]]:
        return (self._names(),)

    def _names(self) -> Iterator[ValueError]:
        for name, source in self.sets.items():
            if source.weight is not None:
                yield ValueError(
                    f"`{name}.weight` has no effect: weights are shares of the training stream; leave it out"
                )
            if name in RESERVED_NAMES:
                yield ValueError(f"a set cannot be named `{name}`: that name is taken; choose another")
            if not SET_NAME.fullmatch(name):
                yield ValueError(f"a set's name is a directory's name: `{name}` may hold letters, digits, _ . - only")
