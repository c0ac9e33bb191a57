"""RunConfig: the rooms' configs side by side, from a YAML recipe and `a.b=value` overrides. No torch, no files but the recipe.

What can be checked without looking at data, weights or devices is checked here; training/resolve settles the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator

from windlass.adapters.config import AdapterConfig
from windlass.checkpoint.config import CheckpointConfig
from windlass.data.config import DataConfig
from windlass.data.stream.config import EvaluateConfig
from windlass.errors import UserError, raise_all
from windlass.hub.config import HubConfig, with_hub_cache
from windlass.launch.config import LaunchConfig
from windlass.mistakes import errors_in_order, gather_mistakes
from windlass.model.architecture import Architecture
from windlass.model.config import ModelConfig
from windlass.model.families.family_table import Family, add_family
from windlass.objectives.config import ObjectiveConfig
from windlass.optim.config import OptimConfig
from windlass.other_names.answers import other_names
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.batch import batch_errors
from windlass.parallel.rules.check_layout import OtherSettings, check_layout, layout_errors
from windlass.precision.config import POLICIES, PrecisionConfig
from windlass.recipe import apply_override, parse_yaml, recipe_text, with_environment
from windlass.report.config import ReportConfig
from windlass.safe_text import redacted, without_secrets
from windlass.settings import Settings, judged
from windlass.training.config import RunSettings


class RunConfig(Settings):
    """A whole recipe."""

    run: RunSettings
    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    adapter: AdapterConfig = AdapterConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optim: OptimConfig = OptimConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    report: ReportConfig = ReportConfig()
    hub: HubConfig = HubConfig()
    launch: LaunchConfig = LaunchConfig()

    _recipe: str = PrivateAttr("")

    @property
    def recipe(self) -> str:
        """The recipe's text as it was given, overrides as comments on top; without the secrets of its URLs."""
        return self._recipe or to_yaml(self)

    @property
    def sequences_per_step(self) -> int:
        return self.run.tokens_per_step // self.data.sequence_length

    @property
    def micro_batch(self) -> int:
        """Sequences per rank in one forward; where `auto` is not chosen yet, the least."""
        given = self.run.or_default("micro_batch")
        return self._per_sample if given == "auto" else given

    @property
    def _per_sample(self) -> int:
        return self.data.sequences_per_sample if self.data.known("sources") else 1

    @property
    def prepares_beside(self) -> bool:
        """Whether training begins while its data is prepared."""
        return self.data.may_grow and self.run.epochs is None

    @property
    def keeps_reference(self) -> bool:
        """Whether a new run scores all pairs before step 0: unless it begins as its base, which is there at any later step."""
        is_base = self.adapter.begins_as_base and self.run.start_from is None
        return self.objective.has_reference and not is_base

    @property
    def samples_per_step(self) -> int:
        """Samples of the training stream that a step takes: sequences, or pairs of them."""
        return self.sequences_per_step // self.data.sequences_per_sample

    def counts_answers(self, name: str) -> bool:
        """Whether all of a validation set are conversations, of which answers alone count."""
        return {source.format for source in self.data.sources_of(name, self.evaluate.sets)} == {"chat"}

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Refuses other tools' names, and passes hub.cache on to the sections that name something of the hub."""
        if isinstance(given, Mapping):
            raise_all(error for _, error in other_names(given, tuple(POLICIES)))
            return with_hub_cache(given)
        return given

    def rules(self) -> Sequence[Iterator[UserError]]:
        """What sections allow of each other; `check_layout` has the rules on a layout."""
        return (
            self._precision(),
            self._epochs(),
            self._hub(),
            self._warm_up(),
            self._adapter(),
            self._objective(),
            self._directories(),
            self._best(),
            self._attention(),
        )

    def _attention(self) -> Iterator[UserError]:
        has_documents = self.data.isolate or self.parallel.computes_slices
        computed = None if self.precision.known_policy is None else self.precision.computed
        yield from self.run.errors_beside(type(self).model_fields, has_documents, computed)

    def _precision(self) -> Iterator[UserError]:
        parallel, optim = self.parallel, self.optim
        yield from self.precision.errors_beside(
            parallel.zero_stage, optim.kind, optim.beta2, parallel.offload, self.adapter.kind
        )
        yield from optim.errors_beside(parallel.offload)

    def _epochs(self) -> Iterator[UserError]:
        run, best = self.run, self.checkpoint.keep_best
        yield from self.data.errors_beside(run.epochs, run.known_steps, run.tokens_per_step, best, self.evaluate.sets)

    def _hub(self) -> Iterator[UserError]:
        yield from self.hub.errors_beside(self.model.from_, self.data.tokenizer.from_)

    def _warm_up(self) -> Iterator[UserError]:
        run, optim = self.run, self.optim
        steps = -(-run.tokens // run.tokens_per_step) if run.tokens is not None else run.steps
        if steps is None:
            return
        decay = optim.decay_steps(steps)
        if optim.warmup_steps != "auto" and optim.warmup_steps + decay > steps:
            yield UserError(
                f"optim.warmup_steps={optim.warmup_steps} in a run of {steps} steps"
                + (f", the last {decay} of which decay" if decay else ""),
                f"warm-up ends within the run{', before the decay begins' if decay else ''}",
                f"use optim.warmup_steps={min(max(1, steps // 20), steps - decay)}, or more steps",
            )

    def _adapter(self) -> Iterator[UserError]:
        if self.adapter.kind == "none":
            return
        if self.model.from_ is None:
            yield UserError(
                f"adapter.kind={self.adapter.kind} without model.from",
                "an adapter is trained beside a pretrained model, and its checkpoints name that model's files",
                "give the model in model.from: a hub name or a directory (windlass export writes one from a run)",
            )
        if self.optim.kind == "muon":
            yield UserError(
                f"optim.kind=muon with adapter.kind={self.adapter.kind}",
                "Muon orthogonalises the update of a whole matrix, and an adapter trains two thin factors of it",
                "use optim.kind=adamw",
            )

    def _objective(self) -> Iterator[UserError]:
        sources = {source.label: source.format for source in self.data.sources}
        sets = {f"evaluate.sets.{name}": source.format for name, source in self.evaluate.sets.items()}
        is_written = self.data.order.first_epoch == "written"
        yield from self.objective.errors_beside(sources, sets, self.micro_batch, is_written and self.keeps_reference)

    def _directories(self) -> Iterator[UserError]:
        directory, data = self.run.directory.absolute(), Path(self.data.directory).absolute()
        if directory == data or data in directory.parents:
            yield UserError(
                f"run.directory={directory} and data.directory={data}",
                "prepared data has a directory of its own, which is replaced whole when the data changes",
                f"use data.directory={directory / 'data'}",
            )

    def _best(self) -> Iterator[UserError]:
        every, watch = self.checkpoint.every_steps, self.evaluate.every_steps
        if self.checkpoint.keep_best and every is not None and every % watch:
            yield UserError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} with checkpoint.every_steps={every} and "
                f"evaluate.every_steps={watch}",
                "a checkpoint is judged by the validation loss of its own step",
                f"make it a multiple of evaluate.every_steps: checkpoint.every_steps={max(1, every // watch) * watch}",
            )

    def model_post_init(self, context: Any) -> None:
        self._recipe = context or ""

    def changed(self, **updates: Any) -> Self:
        """A copy with `updates`, validated as a new config is; it keeps the text that was given. Raises UserError."""
        return self.model_validate(self.fields() | updates, context=self._recipe)

    def with_steps(self, steps: int) -> Self:
        """A copy of the recipe with its length as a number of steps, and its warm-up by that. Raises UserError where the schedule
        does not fit in it."""
        changed = {"run": self.run.changed(steps=steps, tokens=None, epochs=None), "optim": self.optim.within(steps)}
        return self.model_validate(self.fields() | changed, context=self.recipe)

    def kept(self) -> dict[str, Any]:
        """Every setting as files keep it: plain values, without the secrets of URLs."""
        found: dict[str, Any] = without_secrets(self.model_dump(mode="json", by_alias=True))
        return found

    def accumulation(self, batch_ranks: int) -> int:
        """Micro-batches per rank and step, where `batch_ranks` ranks hold different samples. Raises UserError."""
        batch = (self.run.tokens_per_step, self.data.sequence_length, self.micro_batch, batch_ranks)
        parallel = self.parallel
        raise_all(batch_errors(*batch, parallel.schedule, parallel.pp, per_sample=self._per_sample))
        return self.sequences_per_step // (self.micro_batch * batch_ranks)

    def _beside_layout(self) -> OtherSettings:
        """What the rules on a layout read of other sections. Settings that are wrong are not known."""
        return OtherSettings(
            policy=self.precision.known_policy,
            optimizer=self.optim.known("kind"),
            sequence_length=self.data.known("sequence_length"),
            tokens_per_step=self.run.known("tokens_per_step"),
            micro_batch=self.micro_batch,
            is_micro_batch_auto=self.run.or_default("micro_batch") == "auto",
            sequences_per_sample=self._per_sample,
            adds_in_bf16=self.precision.or_default("gradients") == "bf16",
            is_nf4=self.adapter.or_default("base") == "nf4",
        )

    def layout_violations(self, architecture: Architecture | None) -> Iterator[UserError]:
        """What the layout cannot have on any number of ranks."""
        return layout_errors(self.parallel, architecture, None, self._beside_layout())

    def check_layout(self, architecture: Architecture | None, world: int | None = None, here: bool = False) -> None:
        """parallel/rules/check_layout of this recipe, for a model and on `world` ranks where they are known."""
        check_layout(self.parallel, architecture, world, self._beside_layout(), here)


def load_recipe(path: str | Path, *overrides: str, family: type[Family] | None = None) -> RunConfig:
    """The checked recipe at `path` (a file, or the name of one that ships with windlass), with `a.b=value` overrides. `${NAME}`
    in a value is that environment variable. `family`: one of the caller's own, for the recipes of this process.

    Raises UserError for a missing file, bad YAML, unset variables, unknown or mistyped keys, and settings that contradict each
    other.
    """
    return parse_recipe(*recipe_text(path), *overrides, family=family)


def parse_recipe(text: str, name: str = "the recipe", *overrides: str, family: type[Family] | None = None) -> RunConfig:
    """The checked recipe that `text` holds as YAML. `name`: what errors call it. No file is read. All else as `load_recipe`."""
    if family is not None:
        add_family(family)
    tree = parse_yaml(text, name)
    if not isinstance(tree, dict):
        found = "is empty" if tree is None else f"holds {type(tree).__name__}"
        change = "`windlass init` writes one; the sections: windlass keys"
        raise UserError(f"{name} {found}", "a recipe is a mapping of sections", change)
    has_secret = without_secrets(tree) != tree
    for override in overrides:
        apply_override(tree, override)
    kept = redacted("".join(f"# override: {override}\n" for override in overrides) + text)
    if has_secret or without_secrets(tree) != tree:  # YAML can spell a secret so that no search finds it
        kept = "# as given, with the overrides, and *** for the secrets of URLs\n" + _dumped(without_secrets(tree))
    return check_recipe(with_environment(tree), kept)


def check_recipe(tree: Mapping[str, Any], text: str = "") -> RunConfig:
    """A RunConfig from plain dicts. `text`: the file's. Raises one UserError that lists every mistake, in the recipe's order."""
    try:
        config = RunConfig.model_validate(tree, context=text)
        config.check_layout(config.model.shape(config.data.tokenizer.train))
    except (ValidationError, UserError):
        raise_all(_mistakes(tree))
        raise
    return config


def _mistakes(tree: Mapping[str, Any]) -> list[UserError]:
    """What is wrong with a recipe. Rules on a layout are judged without the model where that is wrong itself."""
    config, found = gather_mistakes(RunConfig, with_hub_cache(tree), other_names(tree, tuple(POLICIES)))
    between = [error for error in config.violations() if isinstance(error, UserError)]
    architecture = None
    if not any(location[:1] == ("model",) for location, _ in found):
        try:
            tokenizer = config.data.known("tokenizer")
            architecture = config.model.shape(tokenizer.train if tokenizer is not None else None)
        except UserError as error:
            between.append(error)
    return [*errors_in_order(tree, found), *between, *judged(config.layout_violations(architecture))]


def to_yaml(config: RunConfig) -> str:
    """A recipe that gives `config` again, every default written out; without the secrets of URLs."""
    return _dumped(config.kept())


def _dumped(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, width=120)
