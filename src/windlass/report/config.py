"""The recipe's `report:` block."""

from typing import Literal

from pydantic import Field

from windlass.settings import Count, Settings

SinkName = Literal["tensorboard", "wandb", "trackio"]
"""Each is the name of its package and of its extra too."""


class ReportConfig(Settings):
    every_steps: Count = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics; loss and gradient norm are read from the device on these only."""
    sinks: list[SinkName] = []
    """Where else the metrics go: a process beside the run sends them. tensorboard: event files in the run directory. wandb:
    Weights & Biases, one run over all resumes; WANDB_MODE=offline needs no account. trackio: its local
    database, which `trackio show` draws."""
    project: str | None = None
    """With wandb and trackio: their project. None: windlass."""
