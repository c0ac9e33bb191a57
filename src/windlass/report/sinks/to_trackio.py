"""Trackio: a run in its local database, which `trackio show` draws; no account and no network.

The package reads its own settings: TRACKIO_DIR for the place of the database, TRACKIO_SPACE_ID for a Space of the hub. It
knows a run by its name alone, so the name holds the id of run.json: two runs of one name stay two, and a resumed run goes on
where it was.
"""

import contextlib
import sys
from collections.abc import Mapping

import trackio

from windlass.report.sinks.sink import SentRun


class Trackio:
    """A Sink."""

    def __init__(self, run: SentRun):
        with contextlib.redirect_stdout(sys.stderr):  # it prints how to look at the run
            self._trackio = trackio.init(
                project=run.project,
                name=f"{run.directory.resolve().name}-{run.run_id[:8]}",
                config=run.settings,
                resume="allow",
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )

    def numbers(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        self._trackio.log(dict(values), step=step)

    def flush(self) -> None:
        """A thread of trackio writes every line within half a second of its call."""

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            trackio.finish()  # not the run's own: that is called once more, and prints, when the process ends
