"""What the blocks recompute in backward: the recipe's word, or a mix that a budget of bytes chose, and the line that tells it."""

from windlass.config import RunConfig
from windlass.model.architecture import Architecture
from windlass.parallel.activations import RecomputePlan, plan_recompute
from windlass.precision.policy import precision_of
from windlass.training.parameter_rules import frozen_names, rules_of


def plan_of(config: RunConfig, architecture: Architecture, device_type: str) -> RecomputePlan:
    """The kind of every block. Raises UserError where the budget is less than even full recomputation keeps."""
    return plan_recompute(
        architecture,
        config.parallel,
        precision_of(config.precision),
        device_type,
        config.run.micro_batch,
        config.data.sequence_length,
        frozen_names(rules_of(config, architecture)),
    )


def describe_recompute(config: RunConfig, architecture: Architecture, device_type: str) -> dict[str, str]:
    """A line for the table, where something is recomputed."""
    if config.parallel.recompute == "none":
        return {}
    return {"activations": str(plan_of(config, architecture, device_type))}
