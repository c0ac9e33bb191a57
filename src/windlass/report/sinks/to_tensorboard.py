"""TensorBoard: event files in `tensorboard/` of the run directory. `tensorboard --logdir RUNS` shows all runs below it."""

import json
from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from windlass.report.sinks.sink import SentRun


class TensorBoard:
    """A Sink. Each process that follows writes a file of its own; TensorBoard joins them."""

    def __init__(self, run: SentRun):
        self._writer = SummaryWriter(str(run.directory / "tensorboard"))
        settings = json.dumps(run.settings, indent=1)
        self._writer.add_text("settings", "\n".join(f"    {line}" for line in settings.splitlines()), 0)

    def numbers(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, time_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
