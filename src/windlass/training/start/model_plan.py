"""The model of a run before any of it is in memory: its shape, the rules of its parameters, what each layer recomputes."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from windlass.config import RunConfig
from windlass.data.prepare.prepare import Prepared
from windlass.errors import UserError
from windlass.model.architecture import Architecture
from windlass.model.config import architecture_from_hf
from windlass.model.lora.adapter import Adapter, adapter_of
from windlass.model.open_config import architecture_of
from windlass.optim.rules import Rules, frozen_names
from windlass.parallel.activations import RecomputePlan, Workload, plan_recompute
from windlass.parallel.mesh import make_silent_mesh
from windlass.precision.policy import precision_of
from windlass.runtime import Runtime
from windlass.training.start.parameter_rules import rules_of


class ModelPlan(NamedTuple):
    """A model that passed all checks: its shape, the rules of its parameters, and what each layer recomputes."""

    architecture: Architecture
    adapter: Adapter | None
    rules: Rules
    recompute: RecomputePlan


def plan_model(
    config: RunConfig, trainer_state: Mapping[str, Any] | None, prepared: Prepared, runtime: Runtime
) -> ModelPlan:
    """The model of the checkpoint that a run goes on from, or of the recipe. Collective. Raises UserError."""
    architecture = (
        architecture_from_hf(trainer_state["model"]) if trainer_state else recipe_architecture(config, prepared)
    )
    rules = rules_of(config, architecture)
    recompute = plan_of(config, architecture, rules, runtime)
    check_vocabulary(prepared.vocab_size, architecture)
    return ModelPlan(architecture, adapter_of(config.adapter, architecture), rules, recompute)


def plan_of(config: RunConfig, architecture: Architecture, rules: Rules, runtime: Runtime) -> RecomputePlan:
    """What every block recomputes in backward: as the recipe says, or a mix within its budget. Collective. Raises UserError."""
    layout, device_type = config.parallel.layout(runtime.world), runtime.device.type
    is_cut = config.parallel.activation_gib is not None and layout.tp * layout.context > 1
    mesh = make_silent_mesh(layout, device_type) if is_cut else None
    return plan_recompute(workload(config, architecture, rules, runtime.world, device_type), mesh)


def workload(config: RunConfig, architecture: Architecture, rules: Rules, world: int, device_type: str) -> Workload:
    """What the blocks of a rank compute in one micro-batch."""
    return Workload(
        architecture=architecture,
        config=config.parallel,
        precision=precision_of(config.precision),
        device_type=device_type,
        shape_BT=(config.micro_batch, config.data.sequence_length),
        frozen=frozen_names(rules),
        adapter=adapter_of(config.adapter, architecture),
        num_micro=config.accumulation(config.parallel.layout(world).batch_ranks),
    )


def check_vocabulary(tokens: int, architecture: Architecture) -> None:
    """A tokenizer that was trained anew may have more entries than the model has rows."""
    if tokens > architecture.vocab_size:
        raise UserError(
            f"a tokenizer of {tokens} entries for a checkpoint of {architecture.vocab_size}",
            "every token has a row in the embedding",
            "use the tokenizer that the run began with: it is in its checkpoints, under tokenizer/",
        )


def recipe_architecture(config: RunConfig, prepared: Prepared) -> Architecture:
    """The architecture of the recipe's model, with the vocabulary of its data."""
    architecture = architecture_of(config.model, prepared.vocab_size)
    if config.model.from_ is None:  # a new model learns the end of a text from this tokenizer, whatever its preset says
        architecture = replace(architecture, eos_token_id=prepared.eos_id)
    return architecture
