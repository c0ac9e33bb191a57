"""`windlass status RUN`: what became of a run, from its status.json and the lock on its directory. No torch."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from windlass.checkpoint.store import committed_steps
from windlass.errors import EXIT_UNAVAILABLE, UserError
from windlass.status import is_locked, read_status
from windlass.units import format_duration


@dataclass(frozen=True)
class Found:
    """`state`: of the run. `step`: completed optimizer steps, when it was last written down. `checkpoint`: the newest committed
    step."""

    state: Literal["running", "stopped", "finished", "failed", "dead"]
    step: int
    exit_code: int | None
    checkpoint: int | None
    age_s: float

    @property
    def line(self) -> str:
        goes_on = "from its beginning" if self.checkpoint is None else f"from step {self.checkpoint}"
        match self.state:
            case "running":
                return f"running: at step {self.step} as of {format_duration(self.age_s)} ago"
            case "finished":
                return f"finished at step {self.step}"
            case "stopped":
                return f"stopped at step {self.step}; the same command goes on {goes_on}"
            case "failed" if self.exit_code == EXIT_UNAVAILABLE:
                return f"stopped at step {self.step}: data or storage failed (74); the same command goes on {goes_on}"
            case "failed":
                newest = "none" if self.checkpoint is None else str(self.checkpoint)
                return f"failed at step {self.step} with exit code {self.exit_code}; its newest checkpoint: {newest}"
        return f"dead: killed at step {self.step} or later; the same command goes on {goes_on}"


def status(run_directory: Path) -> Found:
    """Raises UserError where no run has begun."""
    found, is_alive = read_status(run_directory), is_locked(run_directory)
    steps = committed_steps(run_directory / "checkpoints") if run_directory.is_dir() else []
    checkpoint = steps[0] if steps else None
    if found is None and not is_alive:
        raise UserError(
            f"{run_directory} holds no status of a run",
            "a run writes status.json into its directory before its first step",
            "name the directory that the recipe calls run.directory",
        )
    if found is None:
        return Found("running", 0, None, checkpoint, 0.0)
    age_s = max(0.0, time.time() - found.time)
    if is_alive:
        return Found("running", found.step, None, checkpoint, age_s)
    state = "dead" if found.state == "running" else found.state
    return Found(state, found.step, found.exit_code, checkpoint, age_s)
