"""Whether ranks that failed are started again: by the table of windlass.errors, a number of times, and not for a step that has
failed three times."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from windlass.errors import NOT_RESTARTED
from windlass.safe_text import say
from windlass.status import Status, goes_on, hold_restarts, read_status, write_status
from windlass.supervise.incident import Incident
from windlass.supervise.watchdog import Deadlines

TIMES_AT_A_STEP: Final = 3
"""Failures in a row at one step after which a run is not started again. Chosen: two may be chance, a third is due to the step."""


class Failure(NamedTuple):
    """`code`: of the launcher, if it ends by this. `position`: where the batch of the failed step ends in the stream, 0 where
    none was taken."""

    code: int
    incident: Incident
    position: int = 0


class Restarts:
    """Counts the failures of one launch. `most`, `stall_s`: see LaunchConfig. `data_s`: the deadline that waiting for data has by
    itself. `batch_at`: names the samples of the batch that ends at a position of the stream."""

    def __init__(
        self, most: int, stall_s: float, data_s: float = 0.0, batch_at: Callable[[int], str] = lambda position: ""
    ):
        self.most, self._stall_s, self._data_s, self._batch_at = most, stall_s, data_s, batch_at
        self.count = 0
        self._steps: list[int | None] = []
        self._held: BinaryIO | None = None
        self._failed: tuple[Path, Status] | None = None

    def deadlines(self) -> Deadlines | None:
        """The deadlines of the next start's ranks; None where nothing is to be watched."""
        return Deadlines(self._stall_s, self._data_s + self._stall_s) if self._stall_s else None

    def why_not(self, failure: Failure) -> str | None:
        """Counts `failure` -> None if the ranks are started again, else why they are not; empty where that needs no words."""
        step = failure.incident.number
        self._steps.append(step)
        if failure.code in NOT_RESTARTED or not self.most:
            return ""
        if self._steps[-TIMES_AT_A_STEP:] == [step] * TIMES_AT_A_STEP:
            if step is None:
                return "three failures before the first step: the ranks are not started again"
            batch = f"\n{self._batch_at(failure.position)}" if failure.position else ""
            return f"three failures in step {step}: the ranks are not started again{batch}"
        if self.count == self.most:
            return f"the ranks are not started again after {self.most} restarts (launch.max_restarts={self.most})"
        self.count += 1
        return None

    def again(self, run_directory: Path) -> None:
        """Prints that the ranks are started again. From here to `close` the run counts as running, even while no rank is
        alive."""
        say(f"windlass: restart {self.count} of {self.most}, from the last commit", sys.stderr)
        before = read_status(run_directory)
        self._failed = (run_directory, before) if before is not None and before.state == "failed" else None
        self._held = hold_restarts(run_directory) or self._held

    def close(self) -> None:
        """Where no rank has begun since the last restart, the run counts as failed again, with the exit code that it had."""
        if self._held is not None:
            self._held.close()
        if self._failed is not None:
            run_directory, before = self._failed
            now = read_status(run_directory)
            with contextlib.suppress(OSError):  # a file system without locks
                if now is not None and now.state == "running" and not goes_on(run_directory):
                    write_status(run_directory, "failed", now.step, before.exit_code)
