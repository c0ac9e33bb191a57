"""A recipe resolved against its files, its checkpoint and the ranks' devices: what is trained, before any of it is in memory.

What can be refused is refused before anything slow starts: the layout is checked against the world first, the rest by preflight,
before it prepares the data (on rank 0, once); then the model is shaped. The last thing decided is what is tried for real: sizes
that fit.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared
from windlass.host_speeds import check_hosts
from windlass.runtime import Runtime
from windlass.training.left_open import choose_policy, describe_few_steps, keep_choices, with_steps
from windlass.training.parts.device_memory import FindRoom
from windlass.training.preflight import check_data, make_ready_once
from windlass.training.run_directory import open_directory
from windlass.training.sizing.choose_flash import check_flash, choose_flash
from windlass.training.sizing.choose_sizes import choose_sizes
from windlass.training.start.base_model import complete_adapter
from windlass.training.start.drift import begun, check_ranks
from windlass.training.start.model_plan import ModelPlan, plan_model


class Resolved(NamedTuple):
    """`config`: with nothing left open. `prepared`: its data, opened. `sentences`: for the user, on what was chosen."""

    config: RunConfig
    trainer_state: Mapping[str, Any] | None
    """The trainer state in the checkpoint that the run goes on from; None for a new run."""
    prepared: Prepared
    plan: ModelPlan
    sentences: Sequence[str]


def resolve_run(
    config: RunConfig, runtime: Runtime, is_prepared: bool, find_room: FindRoom, opened: ExitStack
) -> Resolved:
    """`is_prepared`: the caller has just prepared the data. `opened` closes the run directory, which is locked from here on,
    and ends what is active for this run alone. Collective. Raises UserError."""
    config.parallel.layout(runtime.world)  # refused before anything slow
    check_ranks(config, runtime)
    check_flash(config, runtime)
    config, prepared = make_ready_once(config, runtime, is_prepared)
    sentences = check_hosts(prepared.stream, runtime)
    trainer_state = begun(config)
    asked, config = config, complete_adapter(with_steps(keep_choices(config, trainer_state), prepared), trainer_state)
    sentences += describe_few_steps(asked, config)
    config, choices = choose_policy(config, runtime.accelerators())
    sentences += choices + check_data(trainer_state, config, prepared, runtime)
    plan = plan_model(config, trainer_state, prepared, runtime)
    opened.enter_context(open_directory(config.run.directory, runtime))
    config, versions = choose_flash(config, trainer_state, plan.architecture, runtime, opened)
    config, plan, sizes = choose_sizes(config, trainer_state, plan, runtime, find_room)
    return Resolved(config, trainer_state, prepared, plan, [*sentences, *versions, *sizes])
