"""Validation of a model, over any number of ranks: a checkpoint on the sets of its own recipe, any model on those of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.config import RunConfig, check_recipe, load_recipe
from windlass.data.prepare.prepare import Prepared, open_prepared, other_stream
from windlass.data.stream.evaluation_set import EvaluationSet
from windlass.data.tokenize.tokenizer import TOKENIZER_FILE, open_tokenizer
from windlass.errors import UserError
from windlass.objectives.kept_scores import ReferenceScores
from windlass.objectives.objective import objective_of
from windlass.optim.groups import write_copies
from windlass.parallel.build import Parallelism, build_program
from windlass.parallel.config import ParallelConfig
from windlass.parallel.mesh import make_mesh
from windlass.precision.policy import precision_of
from windlass.runtime import start_runtime
from windlass.safe_text import say
from windlass.training.left_open import choose_policy, without_missing_fp8
from windlass.training.parts.open_data import evaluate_set, evaluation_sets, labels_of
from windlass.training.start.base_model import kept_base_files, kept_scores
from windlass.training.start.open_saved import Saved, find_saved, open_reader, stored_weights
from windlass.training.start.restore import weight_tensors
from windlass.units import bits_per_byte, perplexity


@dataclass(frozen=True)
class Score:
    """A model on a validation set. `loss`: in nats per target, per answer token or per pair, as `unit` says; `count`: of those.
    `step`: of the checkpoint. None where a figure has no meaning: perplexity and bits of pairs, accuracy and margin of texts."""

    name: str
    step: int | None
    loss: float
    count: int
    unit: Literal["targets", "answer tokens", "pairs"]
    perplexity: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    margin: float | None = None
    source_losses: Mapping[str, float] = field(default_factory=dict)
    """The loss on each source of a set of several."""
    samples: tuple[int, int] | None = None
    """Scored, and in the set."""

    @property
    def line(self) -> str:
        """The line that `windlass evaluate` prints; bits per byte only where the tokenizer's bytes are exact."""
        text = f"{self.name}: {'' if self.step is None else f'step {self.step}, '}loss {self.loss:.4f}"
        if self.unit == "pairs":
            return f"{text}, accuracy {self.accuracy:.1%}, margin {self.margin:.4g}, {self.count:,} pairs{self._share}"
        text += " nats per answer token" if self.unit == "answer tokens" else ""
        text += f", perplexity {'n/a' if self.perplexity is None else f'{self.perplexity:.4g}'}"
        text += "" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} bits per byte"
        by_source = "".join(f"; {label} {loss:.4f}" for label, loss in self.source_losses.items())
        return f"{text}, {self.count:,} {self.unit}{self._share}{by_source}"

    @property
    def _share(self) -> str:
        scored, held = self.samples or (0, 0)
        return f" ({scored:,} of {held:,} samples)" if scored < held else ""


def evaluate(
    path: Path | str,
    *,
    step: int | None = None,
    sequences: int | None = None,
    base: Path | None = None,
    recipe: str | None = None,
) -> list[Score]:
    """Scores every validation set on all ranks -> a score per set, on rank 0. `recipe`: whose prepared sets, in place of the
    run's own; a model that is no run needs it. `sequences`: per set, instead of the recipe's number. `base`: of an adapter,
    where that has moved. Collective. Raises UserError."""
    if sequences is not None and sequences < 1:
        raise UserError(f"--sequences {sequences}", "at least one sequence is scored", "use 1 or more")
    with start_runtime() as runtime:
        saved = runtime.shared(runtime.first(lambda: find_saved(Path(path), step, base)))
        assert saved is not None
        config, missing = without_missing_fp8(_recipe_of(saved, recipe), runtime.accelerators())
        config, choices = choose_policy(for_evaluation(config, sequences), runtime.accelerators())
        _check_has_sets(config)
        if runtime.rank == 0:
            for sentence in (*missing, *choices):
                say(sentence)
        prepared = open_prepared(config.data, config.evaluate.sets, looks=runtime.rank == 0)
        if recipe is not None:
            check_same_tokenizer(saved, prepared)
        elif prepared.stream != saved.trainer_state["data"]["stream"]:
            raise other_stream(prepared.where)
        mesh = make_mesh(config.parallel.layout(runtime.world), runtime.device.type)
        parallelism = Parallelism(config.parallel, precision_of(config.precision), mesh, runtime.device)
        program = build_program(saved.architecture, parallelism, stored_weights(saved), adapter=saved.adapter)
        if saved.step is not None:
            reader = open_reader(saved.directory, runtime.rank, runtime.world, runtime.saving)
            reader.restore_from(saved.directory, weight_tensors(program), what="weights")
            write_copies(program.records())
        objective, scores = objective_of(config.objective), []
        reference = _reference(config, saved)
        for name, data in evaluation_sets(config, mesh, runtime.device, prepared, reference).items():
            total, count, figures = evaluate_set(data, labels_of(config, name), objective, program)
            scores.append(score_of(name, saved.step, total, count, data, config, figures))
        return scores if runtime.rank == 0 else []


def _reference(config: RunConfig, saved: Saved) -> ReferenceScores | None:
    """The scores of the pairs under the model that a run began with; None where its base is that, or its objective needs none."""
    if not config.objective.has_reference:
        return None
    if saved.step is None:
        raise UserError(
            f"{saved.directory} and pairs of objective.loss={config.objective.preference_loss}",
            "a pair is scored against the model that a run began with, and only checkpoints record it",
            "give the run or one of its checkpoints; or a recipe with texts or chats",
        )
    return kept_scores(saved.trainer_state, kept_base_files(saved.directory), saved.directory)


def _check_has_sets(config: RunConfig) -> None:
    if not config.data.evaluated(config.evaluate.sets):
        raise UserError(
            "data.validation: none and no evaluate.sets",
            "a model is scored on the validation sets of a recipe",
            "name a recipe that has one: windlass evaluate PATH --recipe RECIPE",
        )


def _recipe_of(saved: Saved, recipe: str | None) -> RunConfig:
    if recipe is not None:
        return load_recipe(recipe)
    if saved.step is None:
        raise UserError(
            f"{saved.directory} has no recipe",
            "a run is scored on the validation sets of its own recipe; any other model on those that a recipe names",
            "name one whose data is prepared: windlass evaluate PATH --recipe RECIPE",
        )
    return check_recipe(saved.trainer_state["config"])


def check_same_tokenizer(saved: Saved, prepared: Prepared) -> None:
    """Raises UserError where the data was made by another tokenizer than the model's."""
    if not (saved.tokenizer_directory / TOKENIZER_FILE).is_file():
        raise UserError(
            f"{saved.tokenizer_directory} has no {TOKENIZER_FILE}",
            "a model is scored on ids of its own tokenizer",
            f"copy the model's {TOKENIZER_FILE} there",
        )
    own, of_data = (open_tokenizer(path)[0] for path in (saved.tokenizer_directory, prepared.tokenizer_directory))
    if own.get_vocab() != of_data.get_vocab():
        raise UserError(
            f"the data in {prepared.where} was made by another tokenizer than the one in {saved.tokenizer_directory}",
            "a model is scored on ids of its own tokenizer",
            "prepare the recipe's data with it: data.tokenizer.from, and a data.directory of its own",
        )


def for_evaluation(config: RunConfig, sequences: int | None) -> RunConfig:
    """The recipe on whatever ranks are here: parameters sharded, whatever the run's layout was."""
    watch = config.evaluate if sequences is None else config.evaluate.changed(sequences=sequences)
    return config.changed(evaluate=watch, parallel=ParallelConfig())


def score_of(
    name: str,
    step: int | None,
    total: float,
    count: int,
    data: EvaluationSet,
    config: RunConfig,
    figures: Mapping[str, Any],
) -> Score:
    """`total`: the loss of all `count` targets or pairs of a set. `figures`: of the objective, on the same."""
    samples = (data.num_samples, data.held_samples)
    if config.objective.unit == "pairs":
        kept = {key: figures[key] for key in ("accuracy", "margin")}
        return Score(name, step, total / count, count, "pairs", **kept, samples=samples)
    loss = total / data.num_targets
    unit: Literal["answer tokens", "targets"] = "answer tokens" if config.counts_answers(name) else "targets"
    bits, losses = bits_per_byte(total, data.num_bytes), figures.get("source_losses", {})
    return Score(
        name, step, loss, data.num_targets, unit, perplexity(loss), bits, source_losses=losses, samples=samples
    )
