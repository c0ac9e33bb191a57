"""What a recipe may say about the order of the first epoch, about training while data is still prepared, about shares that
change along the stream, and about validation sets besides the one that is held out. No torch."""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, Literal

from pydantic import Field

from windlass.data.sources.config import SourceConfig
from windlass.errors import UserError
from windlass.settings import BrokenRule, Count, Settings

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

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return self._needs_written(), self._needs_shuffled()

    def _needs_shuffled(self) -> Iterator[BrokenRule]:
        if self.lanes > 1 and self.first_epoch == "written":
            given = {"lanes": self.lanes, "first_epoch": "written"}
            yield BrokenRule(given, "lanes are dealt from shuffled shards", "remove .lanes or .first_epoch")

    def _needs_written(self) -> Iterator[BrokenRule]:
        if self.first_epoch != "written":
            given: dict[str, object] = {"held_out_of": self.held_out_of} if self.held_out_of is not None else {}
            given |= {"deadline_s": self.deadline_s} if self.deadline_s != DEADLINE_S else {}
            rule = "it is for training that begins before all is prepared"
            for key, value in given.items():
                change = f"set .first_epoch=written, or remove .{key}"
                yield BrokenRule({key: value, "first_epoch": self.first_epoch}, rule, change)


class StageConfig(Settings):
    """A part of the training stream with its own shares."""

    tokens: Count | None = Field(default=None, ge=1)
    """Tokens to train on in this stage, rounded to whole samples. The last stage may leave it out and lasts to the end."""
    weights: dict[str, float] = Field(min_length=1)
    """Shares of the sources in this stage, relative to each other, by a source's `name`, or its path, if it has no name. A
    source that is missing here, or has 0, is not read in this stage."""

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (self._shares(),)

    def _shares(self) -> Iterator[BrokenRule]:
        wrong = {name: weight for name, weight in self.weights.items() if weight < 0}
        if wrong:
            yield BrokenRule({"weights": wrong}, "a share is 0 or more", "correct it in .weights")
        elif not any(self.weights.values()):
            rule = "a stage reads at least one source, and all shares are 0"
            yield BrokenRule({"weights": self.weights}, rule, "give a source in .weights a share above 0")


def growing_errors(sources: Sequence[SourceConfig], order: OrderConfig) -> Iterator[BrokenRule]:
    """The violated rule on a source that still grows."""
    growing = [number for number, source in enumerate(sources) if source.grows_until is not None]
    if growing and order.first_epoch != "written":
        key = f"sources[{growing[0]}].grows_until"
        yield BrokenRule(
            {key: sources[growing[0]].grows_until, "order.first_epoch": order.first_epoch},
            "a shuffled first epoch needs a complete source, so `grows_until` has no effect",
            f"set .order.first_epoch=written; or remove .{key}, and prepare when the source is complete",
        )


def weight_errors(sources: Sequence[SourceConfig]) -> Iterator[BrokenRule]:
    """The violated rule on weights that some sources have."""
    has = [number for number, source in enumerate(sources) if source.weight is not None]
    lacks = [number for number, source in enumerate(sources) if source.weight is None]
    if has and lacks:
        yield BrokenRule(
            {f"sources[{has[0]}].weight": sources[has[0]].weight, f"sources[{lacks[0]}].weight": None},
            f"weights mix the sources, so all have one or none has; here {len(has)} of {len(sources)} have one",
            "give each of .sources a weight, or none of them",
        )


def mixture_stage_errors(
    stages: Sequence[StageConfig], weights: Sequence[float | None], labels: Sequence[str], tokens_per_sample: int
) -> Iterator[BrokenRule]:
    """What is wrong with `stages` beside sources with these labels and, wrongly, weights of their own."""
    starts, first = stage_starts(stages, tokens_per_sample), {"stages[0].weights": stages[0].weights}
    if len(labels) < 2:
        rule = "stages give shares to several sources, and have no effect on one"
        yield BrokenRule({**first, "sources[0]": labels[0]}, rule, "remove .stages, or add sources to .sources")
        return
    for label in dict.fromkeys(label for label in labels if labels.count(label) > 1):
        same = [f"sources[{number}]" for number, other in enumerate(labels) if other == label]
        change = f"give each a name of its own: {', '.join(f'.{one}.name' for one in same)}"
        yield BrokenRule(dict.fromkeys(same, label), "stages find sources by name, so no two have the same", change)
    for number in [number for number, weight in enumerate(weights) if weight is not None][:1]:
        key = f"sources[{number}].weight"
        change = f"remove .stages, or .{key} and those of the others"
        yield BrokenRule({key: weights[number], **first}, "where there are stages, they give the shares", change)
    unknown = {
        f"stages[{number}].weights": {name: weight for name, weight in stage.weights.items() if name not in labels}
        for number, stage in enumerate(stages)
        if not stage.weights.keys() <= set(labels)
    }
    if unknown:
        rule = f"a stage gives shares to the sources, which are {', '.join(f'`{one}`' for one in labels)}"
        yield BrokenRule(unknown, rule, "take a name from those, or add the source to .sources")
    unread = [number for number, label in enumerate(labels) if not any(stage.weights.get(label) for stage in stages)]
    if unread and not unknown:
        given = {f"sources[{number}]": labels[number] for number in unread}
        change = "give it a share in one of .stages, or remove it from .sources"
        yield BrokenRule(given, "each source has a share above 0 in some stage", change)
    for number, stage in enumerate(stages[:-1]):
        key = f"stages[{number}].tokens"
        if stage.tokens is None:
            rule = "only the last stage may leave its tokens out"
            yield BrokenRule({f"stages[{number}].weights": stage.weights, key: None}, rule, f"give .{key}")
        elif starts[number + 1] <= starts[number]:
            rule = f"a stage holds at least one sample, here of {tokens_per_sample} tokens"
            yield BrokenRule({key: stage.tokens}, rule, f"give more as .{key}")


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

    def rules(self) -> Sequence[Iterator[BrokenRule]]:
        return (self._names(),)

    def _names(self) -> Iterator[BrokenRule]:
        for name, source in self.sets.items():
            if source.weight is not None:
                rule = "weights are shares of the training stream, and have no effect on a set"
                yield BrokenRule({f"sets.{name}.weight": source.weight}, rule, f"remove .sets.{name}.weight")
            if name in RESERVED_NAMES:
                rule = "a set's directory has its name, and that one is taken"
                yield BrokenRule({"sets": {name: source}}, rule, "choose another name in .sets")
            if not SET_NAME.fullmatch(name):
                rule = "a set's name is a directory's name, and may hold letters, digits, _ . - only"
                yield BrokenRule({"sets": {name: source}}, rule, "choose another name in .sets")
