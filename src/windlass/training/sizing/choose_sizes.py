"""`run.micro_batch`, `parallel.zero`, `recompute` and `compile` where they are `auto`: as the checkpoint's run chose, where the
layout and the devices are the same; else by what fits, counted (plan/) and then tried (probe.py). They change memory and speed
and not the result, so a run that goes on elsewhere may choose anew. The precision policy may not: left_open.py keeps that."""

from collections.abc import Mapping, Sequence
from typing import Any

from windlass.config import RunConfig
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.parallel.config import RECOMPUTES
from windlass.parallel.mesh import make_silent_mesh
from windlass.plan.memory import RankMemory
from windlass.plan.sizes import StepSize, best_first, micro_batches, most_tokens, total_bytes, worth_trying
from windlass.runtime import Runtime
from windlass.training.parts.device_memory import FindRoom, Room
from windlass.training.parts.open_program import can_compile
from windlass.training.sizing.choose_zero import cuts_what_fits, memory_of, with_least_zero
from windlass.training.sizing.compiled import racing_kernels
from windlass.training.sizing.kept_choice import changes_since, fill_open, sizes_before
from windlass.training.sizing.probe import step_fits
from windlass.training.start.model_plan import ModelPlan, plan_of
from windlass.training.start.parameter_rules import rules_of
from windlass.units import format_bytes


def choose_sizes(
    config: RunConfig, trainer_state: Mapping[str, Any] | None, plan: ModelPlan, runtime: Runtime, room_of: FindRoom
) -> tuple[RunConfig, ModelPlan, list[str]]:
    """`config` without `auto` in the four settings, its plan, and sentences for the user. Collective. Raises UserError, on all
    ranks alike, where no size fits."""
    left_open = _left_open(config)
    if not left_open:
        return config, plan, cuts_what_fits(config, plan, runtime)
    changes = [] if trainer_state is None else changes_since(config, trainer_state, runtime)
    if trainer_state is not None and not changes:
        chosen = fill_open(config, **sizes_before(trainer_state))
        sentences = [f"{_shown(chosen, left_open)}: as the run began on the same layout and devices"]
    else:
        anew = [_anew(left_open, changes)] if changes else []
        config = fill_open(config, compile=_compile(config, plan.architecture, runtime))
        chosen, found = _by_room(config, plan, runtime, room_of(runtime), left_open)
        sentences = [*anew, *found]
    return chosen, _planned(chosen, plan, runtime), [*sentences, *cuts_what_fits(chosen, plan, runtime)]


def _left_open(config: RunConfig) -> list[str]:
    given = {
        "run.micro_batch": config.run.micro_batch,
        "parallel.zero": config.parallel.zero,
        "parallel.recompute": config.parallel.recompute,
        "parallel.compile": config.parallel.compile,
    }
    return [key for key, value in given.items() if value == "auto"]


def _shown(config: RunConfig, keys: Sequence[str]) -> str:
    parallel = config.parallel
    values = {
        "run.micro_batch": config.run.micro_batch,
        "parallel.zero": parallel.zero,
        "parallel.recompute": parallel.recompute,
        "parallel.compile": str(parallel.compile).lower(),
    }
    return "auto: " + ", ".join(f"{key}={values[key]}" for key in keys)


def _planned(config: RunConfig, plan: ModelPlan, runtime: Runtime) -> ModelPlan:
    return plan._replace(recompute=plan_of(config, plan.architecture, plan.rules, runtime))


def _anew(keys: Sequence[str], changes: Sequence[str]) -> str:
    return (
        f"{', '.join(keys)} {'are' if len(keys) > 1 else 'is'} chosen again, since {' and '.join(changes)}; "
        "this changes memory and speed, not the result"
    )


def _compile(config: RunConfig, architecture: Architecture, runtime: Runtime) -> bool:
    """Whether this device compiles, and every rule allows it."""
    if config.parallel.compile != "auto" or not can_compile(runtime.device.type):
        return config.parallel.compiles
    compiled = fill_open(config, compile=True)
    try:
        compiled.check_layout(architecture, runtime.world, here=True)
        rules_of(compiled, architecture)
    except UserError:
        return False
    return True


def _by_room(
    config: RunConfig, plan: ModelPlan, runtime: Runtime, room: Room | None, left_open: Sequence[str]
) -> tuple[RunConfig, list[str]]:
    """The sizes that fit, and how they were found."""
    config, of_zero = with_least_zero(config, plan, runtime, room)
    keys = [key for key in left_open if key != "parallel.zero"]
    if not keys:
        return config, of_zero
    chosen, how = _sized(config, plan, runtime, room, keys)
    if (
        room is not None
        and "parallel.compile" in keys
        and chosen.parallel.compiles
        and (racing := racing_kernels(runtime))
    ):
        plain = config.changed(parallel=config.parallel.changed(compile=False))
        chosen, how = _sized(plain, plan, runtime, room, keys)
        how += f"; not compiled, since {racing[0]} would read back what its other threads have just written"
    return chosen, [*of_zero, f"{_shown(chosen, keys)}: {how}"]


def _sized(
    config: RunConfig, plan: ModelPlan, runtime: Runtime, room: Room | None, keys: Sequence[str]
) -> tuple[RunConfig, str]:
    """`keys`: those that the recipe leaves open."""
    least = fill_open(config, micro_batch=config.micro_batch, recompute="none")
    layout, memory = config.parallel.layout(runtime.world), memory_of(config, plan, runtime)
    if room is None:
        words = {"micro_batch": "the smallest micro-batch", "recompute": "no recomputation", "compile": "not compiled"}
        return least, "on a CPU " + ", ".join(words[key.rpartition(".")[2]] for key in keys)
    if not memory.is_counted:
        return least, "the smallest, since what a rank of this layout keeps is not counted; numbers of yours are taken"
    sizes = _sizes(config, plan.architecture, runtime.world, layout.batch_ranks)
    length = config.data.sequence_length
    trials = worth_trying(sizes, memory, length, room.limit_bytes)
    mesh = make_silent_mesh(layout, runtime.device.type)
    for number, size in enumerate(trials, 1):
        chosen = fill_open(config, micro_batch=size.micro_batch, recompute=size.recompute)
        if step_fits(chosen, runtime, _planned(chosen, plan, runtime), mesh, size, room):
            counted, limit = format_bytes(total_bytes(memory, size, length)), format_bytes(room.limit_bytes)
            left_out = len(sizes) - len(trials)
            return chosen, (
                f"{counted} counted of {limit}, and tried; of {len(sizes)} sizes {left_out} were not tried by their count, and "
                f"{number - 1} ran out of memory"
            )
    raise _no_size(trials[-1], memory, length, room)


def _sizes(config: RunConfig, architecture: Architecture, world: int, batch_ranks: int) -> list[StepSize]:
    """All that the recipe leaves open, the best first."""
    length, per_rank = config.data.sequence_length, config.sequences_per_step // batch_ranks
    least = config.data.sequences_per_sample
    given, kinds = config.run.micro_batch, [config.parallel.recompute]
    if kinds == ["auto"]:
        kinds = [kind for kind in RECOMPUTES if _is_allowed(config, kind, architecture, world)]
    sizes = [
        StepSize(batch, kind)
        for kind in kinds
        for batch in (micro_batches(per_rank, least, length, most_tokens(kind)) if given == "auto" else [given])
    ]
    return best_first(sizes)


def _is_allowed(config: RunConfig, kind: str, architecture: Architecture, world: int) -> bool:
    try:
        fill_open(config, recompute=kind).check_layout(architecture, world)
    except UserError:
        return False
    return True


def _no_size(size: StepSize, memory: RankMemory, length: int, room: Room) -> UserError:
    lasting, in_step = memory.lasting_bytes(), memory.step_bytes(size.micro_batch, length, size.recompute)
    kinds = {
        "weights": lasting.weights + lasting.copies,
        "gradients": lasting.gradients,
        "optimizer states": lasting.states,
        "gathered weights": lasting.gathered,
        "the micro-batch": in_step.total,
    }
    return UserError(
        f"not even {size} fits into {format_bytes(room.limit_bytes)}; by the count it needs "
        + ", ".join(f"{format_bytes(held)} for {kind}" for kind, held in kinds.items()),
        "what a step holds at once fits into the memory of its device",
        "cut it smaller: parallel.shard over more ranks (zero 3), parallel.tp, parallel.pp; a shorter data.sequence_length; or "
        "adapter.kind=lora",
    )
