"""`windlass status RUN`: what became of a run, from its status.json and the lock on its directory. `windlass runs DIR`: the same
of every run below a directory, with its last figures. No torch."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from windlass.checkpoint.commit import committed_steps
from windlass.errors import EXIT_UNAVAILABLE, UserError
from windlass.status import FILE, Status, goes_on, read_status
from windlass.units import format_count, format_duration

TAIL_BYTES: Final = 1 << 18  # of events.jsonl: some hundreds of lines
MAX_DEPTH: Final = 4
INNER: Final = {"checkpoints", "logs", "data", "export"}  # of a run: no other run is there


@dataclass(frozen=True)
class Found:
    """`state`: of the run. `step`: completed optimizer steps, when it was last written down. `checkpoint`: the newest committed
    step. `problem`: of a damaged one, what cannot be read."""

    state: Literal["running", "stopped", "finished", "failed", "dead", "damaged"]
    step: int
    exit_code: int | None
    checkpoint: int | None
    age_s: float
    problem: str | None = None

    @property
    def line(self) -> str:
        where = "from its beginning" if self.checkpoint is None else f"from step {self.checkpoint}"
        match self.state:
            case "running":
                return f"running: at step {self.step} as of {format_duration(self.age_s)} ago"
            case "finished":
                return f"finished at step {self.step}"
            case "stopped":
                return f"stopped at step {self.step}; the same command goes on {where}"
            case "failed" if self.exit_code == EXIT_UNAVAILABLE:
                return f"stopped at step {self.step}: data or storage failed (74); the same command goes on {where}"
            case "failed":
                newest = "none" if self.checkpoint is None else str(self.checkpoint)
                return f"failed at step {self.step} with exit code {self.exit_code}; its newest checkpoint: {newest}"
            case "damaged":
                newest = "none" if self.checkpoint is None else str(self.checkpoint)
                return f"damaged: {self.problem}; its newest checkpoint: {newest}"
        return f"dead: killed at step {self.step} or later; the same command goes on {where}"


def status(run_directory: Path) -> Found:
    """Raises UserError where no run has begun."""
    try:
        return _status(run_directory)
    except OSError as error:
        problem = f"{error.filename or run_directory} cannot be read: {error.strerror}"
        return Found("damaged", 0, None, None, _age_s(run_directory / FILE), problem)


def _status(run_directory: Path) -> Found:
    found, is_alive = read_status(run_directory), goes_on(run_directory)
    steps = committed_steps(run_directory / "checkpoints") if run_directory.is_dir() else []
    checkpoint, file = steps[0] if steps else None, run_directory / FILE
    if is_alive:
        return Found("running", found.step if found else 0, None, checkpoint, _age_s(file, found))
    if found is not None:
        state = "dead" if found.state == "running" else found.state
        return Found(state, found.step, found.exit_code, checkpoint, _age_s(file, found))
    if os.path.lexists(file):
        return Found("damaged", checkpoint or 0, None, checkpoint, _age_s(file), f"{file} is no status of a run")
    raise UserError(
        f"{run_directory} holds no status of a run",
        "a run writes status.json into its directory before its first step",
        "name the directory that the recipe calls run.directory",
    )


def _age_s(file: Path, found: Status | None = None) -> float:
    """Since it was written; 0 where nobody knows."""
    try:
        return max(0.0, time.time() - (found.time if found else file.lstat().st_mtime))
    except OSError:
        return 0.0


@dataclass(frozen=True)
class Row:
    """A run below a directory. `loss`: of its last logged step, in nats. `validation`: its last loss on its first set.
    `tokens_per_s`: of all ranks, at its last logged step. `problem`: of a damaged one, what cannot be read."""

    run: str
    state: str
    step: int
    loss: float | None
    validation: float | None
    tokens_per_s: float | None
    age_s: float
    problem: str | None = None


def runs(directory: Path) -> list[Row]:
    """The runs below `directory`, the last written first. Raises UserError where it is none."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no directory", "runs are looked for below a directory", "correct the path")
    unreadable: list[OSError] = []
    found = [_row(run, directory) for run in _runs_below(directory, unreadable.append)]
    found += [_unreadable(error, directory) for error in unreadable]
    return sorted(found, key=lambda row: row.age_s)


def runs_as_table(rows: list[Row], directory: Path) -> Iterator[str]:
    """A line for each run, under a line of titles, and one for each problem."""
    if not rows:
        yield f"no run below {directory}: none has a {FILE}"
        return
    titles = ("run", "state", "step", "loss", "validation", "last tok/s", "written")
    table = [titles, *(_cells(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(titles))]
    for cells in table:
        padded = [
            text.ljust(width) if column < 2 else text.rjust(width)
            for column, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        yield "  ".join(padded).rstrip()
    yield from (f"{row.run} is damaged: {row.problem}" for row in rows if row.problem)


def _cells(row: Row) -> tuple[str, ...]:
    losses = (
        "-" if one is None else f"{one:.4f}" if abs(one) < 1e6 else f"{one:.1e}" for one in (row.loss, row.validation)
    )
    speed = "-" if row.tokens_per_s is None else format_count(row.tokens_per_s)
    return (row.run, row.state, str(row.step), *losses, speed, f"{format_duration(row.age_s)} ago")


def _runs_below(directory: Path, on_error: Callable[[OSError], None]) -> Iterator[Path]:
    """`on_error`: hears of folders that cannot be listed."""
    for folder, inner, files in os.walk(directory, onerror=on_error):
        depth = len(Path(folder).relative_to(directory).parts)
        is_run = FILE in files or FILE in inner
        inner[:] = [name for name in inner if depth < MAX_DEPTH and name[0] != "." and not (is_run and name in INNER)]
        if is_run:
            yield Path(folder)


def _row(run: Path, directory: Path) -> Row:
    try:
        found = status(run)
    except UserError as error:  # storage that is not mounted, say
        found = Found("damaged", 0, None, None, _age_s(run / FILE), error.given)
    last: dict[str, dict[str, Any]] = {}
    first_set = None
    for event in _last_events(run / "events.jsonl"):
        if event.get("kind") == "validation":
            first_set = first_set or event.get("name")
            if event.get("name") != first_set:
                continue
        last[str(event.get("kind"))] = event
    step, validation = last.get("step", {}), last.get("validation", {})
    loss, validation_loss = _number(step.get("loss")), _number(validation.get("loss"))
    speed = _number(step.get("tokens_per_s"))
    return Row(_name(run, directory), found.state, found.step, loss, validation_loss, speed, found.age_s, found.problem)


def _unreadable(error: OSError, directory: Path) -> Row:
    folder = Path(error.filename)
    problem = f"{folder} cannot be read: {error.strerror}"
    return Row(_name(folder, directory), "damaged", 0, None, None, None, _age_s(folder), problem)


def _name(run: Path, directory: Path) -> str:
    return str(run.relative_to(directory)) if run != directory else directory.name


def _number(value: Any) -> float | None:
    """What a line of events has there, if it is one: the line may be anybody's."""
    with contextlib.suppress(OverflowError):
        return float(value) if type(value) in (int, float) else None
    return None


def _last_events(path: Path) -> Iterator[dict[str, Any]]:
    """The lines at the end of events.jsonl that can be read: a table of runs is no place to complain of one."""
    if not path.is_file():
        return
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


def runs_as_json(rows: list[Row]) -> Iterator[str]:
    """One object per run."""
    return (json.dumps(asdict(row)) for row in rows)
