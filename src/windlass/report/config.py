"""The recipe's `report:` block."""

from typing import Literal

from pydantic import Field

from windlass.settings import Count, Settings

SinkName = Literal["tensorboard", "wandb", "trackio"]
"""Each is the name of its package and of its extra too."""


class ReportConfig(Settings):
    every_steps: Count = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics. Only on these steps are loss and gradient norm read from the device."""
    sinks: list[SinkName] = []
    """Where else the metrics go; a separate process sends them. tensorboard: event files in the run directory. wandb: Weights &
    Biases, one run over all resumes; WANDB_MODE=offline needs no account. trackio: its local database, which `trackio show`
    draws."""
    project: str | None = None
    """Project name in wandb and trackio. None: windlass."""
