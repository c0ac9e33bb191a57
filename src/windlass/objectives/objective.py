"""What the loop and validation may know of an objective, and which one a recipe asks for."""

from typing import Protocol

import torch

from windlass.data.batch_fields import Batch
from windlass.objectives.config import ObjectiveConfig
from windlass.objectives.preference import Preference
from windlass.objectives.pretrain import Pretrain
from windlass.parallel.program import Program


class Objective(Protocol):
    """Every objective is another data format and another count, never another loop."""

    def weigh(self, batches: list[Batch], program: Program) -> tuple[list[Batch], torch.Tensor]:
        """A global batch, or a validation set -> what `program.run` or `program.evaluate` is called with, and how many of
        ObjectiveConfig.unit count over all ranks (0-dim, on the device). Collective."""
        ...

    def figures(self) -> dict[str, torch.Tensor]:
        """Further figures of the batches that were weighed last, equal on every rank. Collective."""
        ...


def is_ours(objective: Objective, unit: str) -> bool:
    """Whether it is windlass's objective that counts `unit`, and not one that a script brings."""
    return type(objective) is {"targets": Pretrain, "pairs": Preference}[unit]


def objective_of(config: ObjectiveConfig) -> Objective:
    return Preference(config) if config.kind == "dpo" else Pretrain()
