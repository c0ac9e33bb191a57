"""`windlass status RUN`: what became of a run, from its status.json and the lock on its directory. `windlass runs DIR`: the same
of every run below a directory, with its last figures. No torch."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from windlass.checkpoint.store import committed_steps
from windlass.errors import EXIT_UNAVAILABLE, UserError
from windlass.status import FILE, is_locked, read_status
from windlass.units import format_count, format_duration

TAIL_BYTES: Final = 1 << 18  # of events.jsonl: some hundreds of lines
MAX_DEPTH: Final = 4
INNER: Final = {"checkpoints", "logs", "data", "export"}  # of a run: no other run is there


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


@dataclass(frozen=True)
class Row:
    """A run below a directory. `loss`: of its last logged step, in nats. `validation`: its last loss on its first set.
    `tokens_per_s`: of all ranks, at its last logged step."""

    run: str
    state: str
    step: int
    loss: float | None
    validation: float | None
    tokens_per_s: float | None
    age_s: float


def runs(directory: Path) -> list[Row]:
    """The runs below `directory`, the last written first. Raises UserError where it is none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory", "runs are looked for below a directory", "correct the path")
    return sorted((_row(run, directory) for run in _runs_below(directory)), key=lambda row: row.age_s)


def as_table(rows: list[Row], directory: Path) -> Iterator[str]:
    """A line for each run, under a line of titles."""
    if not rows:
        yield f"no run below {directory}: none has a {FILE}"
        return
    titles = ("run", "state", "step", "loss", "validation", "tok/s", "written")
    table = [titles, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(titles))]
    for cells in table:
        padded = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    losses = ("-" if one is None else f"{one:.4f}" for one in (row.loss, row.validation))
    speed = "-" if row.tokens_per_s is None else format_count(row.tokens_per_s)
    return (row.run, row.state, str(row.step), *losses, speed, f"{format_duration(row.age_s)} ago")


def _runs_below(directory: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(directory):
        depth = len(Path(folder).relative_to(directory).parts)
        is_run = FILE in files
        inner[:] = [name for name in inner if depth < MAX_DEPTH and name[0] != "." and not (is_run and name in INNER)]
        if is_run:
            yield Path(folder)


def _row(run: Path, directory: Path) -> Row:
    found = status(run)
    last: dict[str, dict[str, Any]] = {}
    first_set = None
    for event in _last_events(run / "events.jsonl"):
        if event.get("kind") == "validation":
            first_set = first_set or event.get("name")
            if event.get("name") != first_set:
                continue
        last[str(event.get("kind"))] = event
    step, validation = last.get("step", {}), last.get("validation", {})
    name = str(run.relative_to(directory)) if run != directory else directory.name
    return Row(
        name, found.state, found.step, step.get("loss"), validation.get("loss"), step.get("tokens_per_s"), found.age_s
    )


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """The lines at the end of events.jsonl that can be read: a table of runs is no place to complain of one."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # the first is cut, and the last may be under way
            continue
        if isinstance(event, dict):
            yield event


def as_json(rows: list[Row]) -> Iterator[str]:
    """One object per run."""
    return (json.dumps(asdict(row)) for row in rows)
