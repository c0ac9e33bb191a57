"""Every rule on a layout, in one list: what `parallel` asks for, against itself, the rest of the recipe, the model and the ranks.

    degrees    tp and context: heads, channels, positions      effects   settings that change nothing, and contradictions
    expert     experts over ranks, and what they rule out       pipeline  schedules, stages, micro-batches
    batch      the global batch in micro-batches

Each rule is a function that yields a UserError for every violation. `check_layout` runs all rules whose inputs are known and
raises one error that lists everything they yield. Each process runs it when it loads a recipe (config.check_recipe: no world,
and no model that a file describes), and rank 0 once more before anything slow starts (training/preflight: all is known). A
launcher asks before it starts ranks, and whoever chooses a setting that is `auto` asks for each candidate. No torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from windlass.errors import UserError, raise_all
from windlass.model.architecture import Architecture, parameter_shapes
from windlass.parallel.config import ParallelConfig
from windlass.parallel.rules.batch import batch_errors, sequence_errors
from windlass.parallel.rules.degrees import (
    context_errors,
    degree_errors,
    exchange_errors,
    head_errors,
    length_errors,
    nf4_errors,
    position_errors,
)
from windlass.parallel.rules.effects import axis_errors, effect_errors, fp8_errors, gradient_errors, unit_errors
from windlass.parallel.rules.expert import expert_errors, expert_rank_errors, model_expert_errors
from windlass.parallel.rules.pipeline import empty_stage_errors, pipeline_errors, schedule_errors
from windlass.precision.config import unfit_errors
from windlass.settings import judged


@dataclass(frozen=True)
class OtherSettings:
    """Settings of other sections that layout rules read. None: not known, and the rules that need it are left out."""

    policy: str | None = None
    optimizer: str | None = None
    sequence_length: int | None = None
    is_length_fixed: bool = False
    """No message proposes another sequence length: the checkpoint at hand was trained with this one."""
    tokens_per_step: int | None = None
    micro_batch: int = 1
    is_micro_batch_auto: bool = False
    """Whether `micro_batch` is the least that can be, and no number of the recipe's."""
    sequences_per_sample: int = 1
    adds_in_bf16: bool = False
    """Whether gradients are added up in bf16 (precision.gradients)."""
    is_nf4: bool = False
    """Whether an adapter's base is stored in four bits."""


def check_layout(
    parallel: ParallelConfig,
    architecture: Architecture | None = None,
    world: int | None = None,
    others: OtherSettings = OtherSettings(),
    here: bool = False,
) -> None:
    """Raises one UserError that lists every violation, in the order of the rules below. `here`: also what the torch of this host
    cannot run. A recipe is checked without where it does not train, as on the host that a job is submitted from."""
    raise_all(layout_errors(parallel, architecture, world, others, here))


def layout_errors(
    parallel: ParallelConfig,
    architecture: Architecture | None,
    world: int | None,
    others: OtherSettings,
    here: bool = False,
) -> Iterator[UserError]:
    """All violations. Where a setting of `parallel` is wrong itself, and so missing, the rules that read it are left out."""
    sequences = list(_sequence_errors(parallel, others))
    yield from sequences
    contradictions = _found_by(lambda: axis_errors(parallel))
    yield from contradictions
    yield from _found_by(lambda: effect_errors(parallel))
    yield from _found_by(lambda: context_errors(parallel.context, parallel.context_kind))
    yield from _found_by(lambda: expert_errors(parallel.expert, parallel.zero_stage))
    yield from _found_by(lambda: pipeline_errors(parallel))
    if (policy := others.policy) is not None:
        yield from _found_by(lambda: fp8_errors(parallel, policy))
        if policy == "fp8" and architecture is not None:
            yield from unfit_errors(parameter_shapes(architecture))
    cuts = list(_cut_errors(parallel, architecture, others)) if architecture is not None else []
    yield from cuts
    if architecture is not None:
        yield from _model_errors(parallel, architecture, others)
    if (length := others.sequence_length) is not None:
        if architecture is not None:
            yield from _found_by(lambda: length_errors(length, architecture))
        if not cuts:  # no length helps a model that cannot be cut so
            yield from _found_by(lambda: _position_errors(parallel, architecture, length, others.is_length_fixed))
    if world is not None and not contradictions:
        yield from _found_by(lambda: _world_errors(parallel, world, others, are_sequences_whole=not sequences))
    elif parallel.or_default("shard") > 0:
        yield from _found_by(lambda: _known_rank_errors(parallel))
    if here:
        yield from _found_by(lambda: schedule_errors(parallel.schedule, parallel.pp))
        yield from _found_by(lambda: exchange_errors(parallel.context, parallel.context_kind, parallel.compiles))


def _found_by(rule: Callable[[], Iterator[UserError]]) -> list[UserError]:
    """What a rule finds; nothing where it reads a missing setting."""

    def called() -> Iterator[UserError]:
        yield from rule()

    return list(judged(called()))


def _cut_errors(parallel: ParallelConfig, architecture: Architecture, others: OtherSettings) -> Iterator[UserError]:
    degrees = _found_by(lambda: degree_errors(parallel.tp, architecture))
    yield from degrees
    if not degrees:
        if others.is_nf4:
            yield from _found_by(lambda: nf4_errors(parallel.tp, architecture))
        yield from _found_by(lambda: head_errors(parallel.context, parallel.context_kind, parallel.tp, architecture))


def _model_errors(parallel: ParallelConfig, architecture: Architecture, others: OtherSettings) -> Iterator[UserError]:
    layers = architecture.num_layers
    yield from _found_by(lambda: empty_stage_errors(parallel.schedule, parallel.pp, layers))
    yield from _found_by(lambda: unit_errors(parallel, layers))
    yield from _found_by(lambda: model_expert_errors(architecture, parallel, others.optimizer))


def _known_rank_errors(parallel: ParallelConfig) -> Iterator[UserError]:
    if parallel.zero_stage:
        yield from expert_rank_errors(parallel.expert, parallel.shard, parallel.context)


def _position_errors(
    parallel: ParallelConfig, architecture: Architecture | None, length: int, is_fixed: bool
) -> Iterator[UserError]:
    yield from position_errors(parallel.tp, length, parallel.context, parallel.context_kind, architecture, is_fixed)


def _sequence_errors(parallel: ParallelConfig, others: OtherSettings) -> Iterator[UserError]:
    if others.tokens_per_step is None or others.sequence_length is None:
        return
    replicate, shard, schedule, pp = map(parallel.or_default, ("replicate", "shard", "schedule", "pp"))
    together = others.micro_batch * max(1, replicate) * max(1, shard)  # -1: the ranks that are left, not known here
    yield from sequence_errors(others.tokens_per_step, others.sequence_length, together, schedule, pp)


def _world_errors(
    parallel: ParallelConfig, world: int, others: OtherSettings, are_sequences_whole: bool
) -> Iterator[UserError]:
    try:
        layout = parallel.layout(world)
    except UserError as error:
        yield error
        return
    if parallel.zero_stage:  # zero 0 has no experts over ranks at all
        yield from expert_rank_errors(layout.expert, layout.shard, layout.context)
    yield from gradient_errors(world, others.adds_in_bf16)
    if others.tokens_per_step is not None and others.sequence_length is not None and are_sequences_whole:
        batch = (others.tokens_per_step, others.sequence_length, others.micro_batch)
        more = (others.is_micro_batch_auto, others.sequences_per_sample)
        yield from batch_errors(*batch, layout.batch_ranks, parallel.schedule, parallel.pp, *more)
