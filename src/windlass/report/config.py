"""The recipe's `report:` block."""

from pydantic import Field

from windlass.settings import Count, Settings


class ReportConfig(Settings):
    every_steps: Count = Field(default=10, ge=1)
    """Optimizer steps between two lines of metrics; loss and gradient norm are read from the device on these only."""
