"""Weights & Biases: a run with the id of run.json, so that a resumed run goes on where it was, on any host.

The package reads its own settings: `wandb login` or WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE=offline. Offline, files are in
`sinks/wandb` of the run directory, for `wandb sync`.
"""

from collections.abc import Mapping

import wandb

from windlass.errors import UserError
from windlass.report.sinks.sink import SentRun


class WeightsAndBiases:
    """A Sink."""

    def __init__(self, run: SentRun):
        try:
            self._wandb = wandb.init(
                project=run.project,
                name=run.directory.resolve().name,
                id=run.run_id,
                resume="allow",
                dir=str(run.directory / "sinks"),
                config=run.settings,
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"wandb does not begin a run: {error}",
                "wandb needs an account, or WANDB_MODE=offline",
                "wandb login, set WANDB_API_KEY, or set WANDB_MODE=offline; then: windlass sync RUN --to wandb",
            ) from None
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")  # lines of one step may come in several calls

    def numbers(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._wandb.log({**values, "step": step, "time": time_s})

    def flush(self) -> None:
        """wandb hands every line to a process of its own when it is logged."""

    def close(self) -> None:
        self._wandb.finish()
