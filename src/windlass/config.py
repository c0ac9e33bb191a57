"""RunConfig: the rooms' configs side by side, from a YAML recipe and `a.b=value` overrides. No torch, no files but the recipe.

Everything that can be checked without looking at data, weights or devices is checked here, before anything starts. What
depends on those (the trained vocabulary, `shard: -1`, `epochs`) is resolved in training/assemble.
"""

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import PrivateAttr, ValidationError, model_validator

from windlass.checkpoint.config import CheckpointConfig
from windlass.data.config import DataConfig, EvaluateConfig
from windlass.errors import UserError, nearest
from windlass.hub.config import HubConfig, with_hub_cache
from windlass.model.architecture import Architecture
from windlass.model.config import ModelConfig
from windlass.objectives.config import ObjectiveConfig
from windlass.optim.config import OptimConfig
from windlass.other_names import refuse_other_names
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.batch import batch_errors
from windlass.parallel.rules.check_layout import Beside, check_layout
from windlass.precision.config import POLICIES, PrecisionConfig
from windlass.recipe import apply_override, parse_yaml, with_environment
from windlass.report.config import ReportConfig
from windlass.safe_text import redacted, without_secrets
from windlass.settings import Settings
from windlass.training.config import AdapterConfig, RunSettings


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

    _recipe: str = PrivateAttr("")

    @property
    def recipe(self) -> str:
        """The recipe's text as it was given, overrides as comments on top; without the secrets of its URLs."""
        return self._recipe or to_yaml(self)

    @property
    def sequences_per_step(self) -> int:
        return self.run.tokens_per_step // self.data.sequence_length

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Refuses other tools' names, and passes hub.cache on to the sections that name something of the hub."""
        if isinstance(given, Mapping):
            refuse_other_names(given, tuple(POLICIES))
            return with_hub_cache(given)
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.precision.check_beside(self.parallel.zero, self.optim.kind, self.optim.beta2)
        tokens, length = self.run.tokens_per_step, self.data.sequence_length
        self.data.check_epochs(self.run.epochs)
        self.hub.check_beside(self.model.from_, self.data.tokenizer.from_)
        if tokens % length:
            below = tokens // length * length
            choices = f"{below} or {below + length}" if below else str(length)
            raise UserError(
                f"run.tokens_per_step={tokens} with data.sequence_length={length}",
                f"a global batch is whole sequences, and {tokens} / {length} = {tokens / length:.2f}",
                f"the nearest that divide: run.tokens_per_step={choices}",
            )
        steps = -(-self.run.tokens // tokens) if self.run.tokens is not None else self.run.steps
        if steps is not None:
            self._check_schedule(steps)
        return self

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        if self.optim.kind == "muon" and self.parallel.offload:
            raise UserError(
                "optim.kind=muon with parallel.offload=true",
                "Muon multiplies matrices in every step, and offloaded ones lie where the host's cores would have to",
                "set parallel.offload=false, or optim.kind=adamw",
            )
        return self

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        directory, data = self.run.directory.absolute(), Path(self.data.directory).absolute()
        if directory == data or data in directory.parents:
            raise UserError(
                f"run.directory={directory} and data.directory={data}",
                "prepared data has a directory of its own, which is replaced whole when the data changes",
                f"use data.directory={directory / 'data'}",
            )
        return self

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        every, watch = self.checkpoint.every_steps, self.evaluate.every_steps
        if self.checkpoint.keep_best and every is not None and every % watch:
            raise UserError(
                f"checkpoint.keep_best={self.checkpoint.keep_best} with checkpoint.every_steps={every} and "
                f"evaluate.every_steps={watch}",
                "a checkpoint is judged by the validation loss of its own step",
                f"make it a multiple of evaluate.every_steps: checkpoint.every_steps={max(1, every // watch) * watch}",
            )
        return self

    def model_post_init(self, context: Any) -> None:
        self._recipe = context or ""

    def changed(self, **updates: Any) -> Self:
        """A copy with `updates`, validated as a new config is; it keeps the text that was given. Raises UserError."""
        return self.model_validate(self.fields() | updates, context=self._recipe)

    def with_steps(self, steps: int) -> Self:
        """The same recipe with its length as a number of steps. Raises UserError where the schedule does not fit in it."""
        run = self.run.changed(steps=steps, tokens=None, epochs=None)
        return self.model_validate(self.fields() | {"run": run}, context=self.recipe)

    def _check_schedule(self, steps: int) -> None:
        optim = self.optim
        decay = max(1, round(optim.decay_fraction * steps)) if optim.schedule == "wsd" else 0
        if optim.warmup_steps + decay > steps:
            raise UserError(
                f"optim.warmup_steps={optim.warmup_steps} in a run of {steps} steps"
                + (f", the last {decay} of which decay" if decay else ""),
                f"warm-up ends within the run{', before the decay begins' if decay else ''}",
                f"use optim.warmup_steps={min(max(1, steps // 20), steps - decay)}, or more steps",
            )

    def kept(self) -> dict[str, Any]:
        """Every setting as files keep it: plain values, without the secrets of URLs."""
        found: dict[str, Any] = without_secrets(self.model_dump(mode="json", by_alias=True))
        return found

    def accumulation(self, batch_ranks: int) -> int:
        """Micro-batches per rank and step, where `batch_ranks` ranks hold different samples. Raises UserError."""
        batch = (self.run.tokens_per_step, self.data.sequence_length, self.run.micro_batch)
        for error in batch_errors(*batch, batch_ranks, self.parallel.schedule, self.parallel.pp):
            raise error
        return self.sequences_per_step // (self.run.micro_batch * batch_ranks)

    def check_layout(self, architecture: Architecture | None, world: int | None = None) -> None:
        """Raises one UserError that lists what the layout cannot have: beside the other sections, for the model and on `world`
        ranks, where they are known."""
        beside = Beside(
            policy=self.precision.assumed,
            optimizer=self.optim.kind,
            sequence_length=self.data.sequence_length,
            tokens_per_step=self.run.tokens_per_step,
            micro_batch=self.run.micro_batch,
        )
        check_layout(self.parallel, architecture, world, beside)


def load_recipe(path: str | Path, *overrides: str) -> RunConfig:
    """The checked recipe at `path` (a file, or the name of one that ships with windlass), with `a.b=value` overrides. `${NAME}`
    in a value is that environment variable.

    Raises UserError for a missing file, bad YAML, unset variables, unknown or mistyped keys, and settings that contradict each
    other.
    """
    text, name = _read(path)
    tree = parse_yaml(text, name)
    if not isinstance(tree, dict):
        raise UserError(
            f"{name} holds {type(tree).__name__}", "a recipe is a mapping of sections", "see docs/recipe.md"
        )
    has_secret = without_secrets(tree) != tree
    for override in overrides:
        apply_override(tree, override)
    kept = redacted("".join(f"# override: {override}\n" for override in overrides) + text)
    if has_secret or without_secrets(tree) != tree:  # YAML can spell a secret so that no search finds it
        kept = "# as given, with the overrides, and *** for the secrets of URLs\n" + _dumped(without_secrets(tree))
    return check_recipe(with_environment(tree), kept)


def check_recipe(tree: Mapping[str, Any], text: str = "") -> RunConfig:
    """A RunConfig from plain dicts; pydantic's complaints become one UserError that names each key. `text`: the file's."""
    try:
        config = RunConfig.model_validate(tree, context=text)
    except ValidationError as error:
        raise _explain(error) from None
    config.check_layout(config.model.shape(config.data.tokenizer.train))
    return config


def to_yaml(config: RunConfig) -> str:
    """A recipe that gives `config` again, every default written out; without the secrets of URLs."""
    return _dumped(config.kept())


def _dumped(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(tree, sort_keys=False, width=120)


def shipped_recipes() -> dict[str, Path]:
    """name -> file, of the recipes that come with windlass (in the wheel, or beside src/ in a checkout)."""
    inside = Path(str(importlib.resources.files("windlass"))) / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def _read(path: str | Path) -> tuple[str, str]:
    file = Path(path)
    if file.is_file():
        try:
            return file.read_text("utf-8"), str(file)
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is no text: {error}", "a recipe is YAML in UTF-8", "save it as UTF-8") from None
    shipped = shipped_recipes()
    if str(path) in shipped:
        return shipped[str(path)].read_text("utf-8"), str(path)
    raise UserError(
        f"no recipe at {file}",
        "a recipe is a YAML file, or the name of one that ships with windlass",
        nearest(file.stem, list(shipped)) + f"shipped recipes: {', '.join(shipped)}",
    )


def _explain(error: ValidationError) -> UserError:
    given, rules, changes = [], [], []
    for item in error.errors():
        path = _path(item["loc"])
        if item["type"] == "extra_forbidden":
            choices = _keys_at(item["loc"][:-1])
            where = _path(item["loc"][:-1]) or "the recipe"
            given.append(path)
            rules.append(f"{where} has no key `{item['loc'][-1]}`")
            changes.append(nearest(str(item["loc"][-1]), choices) + f"keys of {where}: {', '.join(choices)}")
        elif item["type"] == "missing":
            given.append(f"{path} is missing")
            rules.append(f"{path} has no default")
            changes.append(f"add {path} to the recipe")
        else:
            given.append(f"{path}={item['input']!r}")
            rules.append(f"{path}: {item['msg'][0].lower()}{item['msg'][1:]}")
            choices = item["msg"].split("'")[1::2] if item["type"] == "literal_error" else []
            changes.append(nearest(str(item["input"]), choices) + f"see {path} in docs/recipe.md")
    return UserError("; ".join(given), "; ".join(rules), "; ".join(changes))


def _path(location: tuple[int | str, ...]) -> str:
    """`optim.groups[0].names`, as all messages write it."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _keys_at(location: tuple[int | str, ...]) -> list[str]:
    model: Any = RunConfig
    for part in location:
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None) if model else None
        annotations = [field.annotation, *getattr(field.annotation, "__args__", ())] if field else [model]
        model = next((a for a in annotations if isinstance(a, type) and issubclass(a, Settings)), None)
    return [field.alias or name for name, field in model.model_fields.items() if not field.exclude] if model else []
