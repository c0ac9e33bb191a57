"""`windlass bench RECIPE`: throughput, MFU and memory of a recipe over a grid of settings and numbers of ranks.

Every cell is `windlass train` in a process of its own, in a scratch directory: one that is refused, that runs out of memory or
that crashes is a row of the table with its reason, and the next cell starts clean. A cell runs a few times; its figure is the
median, its spread (largest - smallest) / median. Steps of the warm-up are not in it. Rows are appended to a JSON file with the
hardware and the versions that they were measured with, as soon as they are there.

Scaling efficiency is tok/s on N ranks / (N / n x tok/s on n ranks), n the fewest of the same cell, at the same global batch.
"""

import datetime
import importlib.metadata
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from windlass.checkpoint.provenance import git_state
from windlass.commands.speed.plot import plot
from windlass.config import load_recipe
from windlass.errors import EXIT_BUG, UserError
from windlass.hardware import cpu_name
from windlass.report.events import read_events
from windlass.units import format_bytes, format_count
from windlass.version import __version__

LEAST_EFFICIENCY: Final = 0.8  # of scaling, below which a cell is warned of; chosen
OVERRIDES: Final = (
    "run.tokens=null", "run.epochs=null", "run.start_what=weights", "optim.warmup_steps=0", "checkpoint.keep_best=0",
    "checkpoint.keep_steps=[]", "checkpoint.remote=null", "report.every_steps=3", "report.sinks=[]",
)  # fmt: skip
LEAST_STEPS: Final = 6  # the first three warm up
MEMORY: Final = re.compile(r"out of memory|OutOfMemory|fits? no", re.IGNORECASE)
KILLED: Final = (-9, 137)
AS_IT_IS: Final = "as the recipe is"
REFUSED: Final = "refused: "


@dataclass(frozen=True)
class GridCell:
    """Settings of the grid, and ranks."""

    settings: tuple[str, ...]
    ranks: int


@dataclass(frozen=True)
class BenchRow:
    """A measured cell. `tokens_per_s`: of all ranks, one number for each repeat. `attention`: the kernel that ran. `error`: why
    there is no number, in a line; `explanation`: with the rule and what to change, where windlass refused the cell."""

    settings: tuple[str, ...]
    ranks: int
    tokens_per_s: tuple[float, ...] = ()
    mfu: float | None = None
    memory_bytes: int | None = None
    device: str | None = None
    attention: str | None = None
    error: str | None = None
    explanation: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.tokens_per_s) if self.tokens_per_s else None

    @property
    def spread(self) -> str:
        """(largest - smallest) / median; "-" for a single run, which has none."""
        if len(self.tokens_per_s) < 2:
            return "-"
        return f"{(max(self.tokens_per_s) - min(self.tokens_per_s)) / statistics.median(self.tokens_per_s):.1%}"


def bench(
    recipe: str,
    overrides: Sequence[str],
    grid: Sequence[str],
    ranks: Sequence[int],
    steps: int,
    repeats: int,
    output: Path,
) -> Iterator[str]:
    """Lines to print, a table at the end. Raises UserError for a grid that is none, and where no cell gives a number."""
    cells = cells_of(grid, ranks)
    if steps < LEAST_STEPS or repeats < 1:
        raise UserError(
            f"--steps {steps} --repeats {repeats}",
            f"the first steps warm up, so a cell is of {LEAST_STEPS} steps or more, and is run once or more",
            "try --steps 15 --repeats 3",
        )
    kept = _read(output)
    session = _session(recipe, overrides, steps)
    rows: list[BenchRow] = []
    for number, cell in enumerate(cells, 1):
        row = _measure(recipe, overrides, cell, steps, repeats)
        rows.append(row)
        yield f"{number} of {len(cells)}: {label(row)}: {figure(row)}"
        yield from (row.explanation or "").splitlines()[1:]
        if not all((one.error or "").startswith(REFUSED) for one in rows):  # else nothing was measured yet
            output.write_text(json.dumps([*kept, {**session, "rows": [asdict(one) for one in rows]}], indent=1) + "\n")
    yield ""
    yield from bench_as_table(rows)
    if all(row.error for row in rows):
        raise UserError(
            f"none of {len(rows)} cells ran",
            "a figure needs at least one cell that runs",
            f"the first: {rows[0].error}",
        )
    drawing = output.with_suffix(".svg")
    drawing.write_text(plot([(label(row), row.median) for row in rows], "tokens per second"), "utf-8")
    yield f"{output}, {drawing}"


def cells_of(grid: Sequence[str], ranks: Sequence[int]) -> list[GridCell]:
    """`section.key=a,b` of each axis, all combinations, on each number of ranks."""
    axes = []
    for axis in grid:
        key, found, values = axis.partition("=")
        if not found or "." not in key or not all(values.split(",")):
            raise UserError(
                f"--grid {axis}",
                "an axis is section.key=VALUE,VALUE",
                "for example --grid parallel.recompute=none,full",
            )
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [GridCell(settings, number) for settings in itertools.product(*axes) for number in ranks]


def _measure(recipe: str, overrides: Sequence[str], cell: GridCell, steps: int, repeats: int) -> BenchRow:
    try:
        directory = load_recipe(recipe, *overrides, *cell.settings).run.directory
    except UserError as error:
        return BenchRow(cell.settings, cell.ranks, error=f"{REFUSED}{error.given}", explanation=str(error))
    found = []
    for _ in range(repeats):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=directory.parent) as scratch:
            one = _run(recipe, [*overrides, *cell.settings, *_limits(steps)], cell.ranks, Path(scratch) / "run")
        if "error" in one:
            return BenchRow(cell.settings, cell.ranks, **one)
        found.append(one)
    rates = tuple(one["tokens_per_s"] for one in found)
    rest = {key: found[-1][key] for key in ("mfu", "memory_bytes", "device", "attention")}
    return BenchRow(cell.settings, cell.ranks, rates, **rest)


def _limits(steps: int) -> list[str]:
    return [*OVERRIDES, f"run.steps={steps}", f"checkpoint.every_steps={steps}", f"evaluate.every_steps={steps}"]


def _run(recipe: str, settings: list[str], ranks: int, run_directory: Path) -> dict[str, Any]:
    """One run -> its figures, or `error` and `explanation`."""
    command = [sys.executable, "-m", "windlass", "train", recipe, *settings, f"run.directory={run_directory}"]
    done = subprocess.run([*command, "--nproc", str(ranks), "--quiet"], capture_output=True, text=True)
    if done.returncode:
        printed = done.stdout + done.stderr
        return {"error": failure_reason(done.returncode, printed), "explanation": _explanation(printed)}
    events = read_events(run_directory / "events.jsonl")
    start = next(event for event in events if event["kind"] == "start")
    steps = [event for event in events if event["kind"] == "step"]
    return {
        **{key: events[-1][key] for key in ("tokens_per_s", "mfu")},
        "memory_bytes": max(step["memory_bytes"] for step in steps),
        "device": start["facts"]["device"],
        "attention": start["derived"]["attention"],
    }


def _explanation(printed: str) -> str | None:
    """What was given, the rule and what to change, as windlass prints an error: a line and the indented ones below it."""
    lines = printed.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith("windlass:")), None)
    if first is None:
        return None
    below = itertools.takewhile(lambda line: line.startswith("  "), lines[first + 1 :])
    return "\n".join([lines[first].removeprefix("windlass: "), *below])


def failure_reason(code: int, printed: str) -> str:
    """Why a process gave no figure, in a line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    if code in KILLED:
        return "killed, most often for memory"
    if any(MEMORY.search(line) for line in lines):
        return "out of memory"
    line = lines[-1] if code == EXIT_BUG and lines else next((one for one in lines if one.startswith("windlass:")), "")
    return f"exit code {code}: {line or (lines[-1] if lines else 'nothing printed')}"


def _read(output: Path) -> list[Any]:
    """The sessions that the file has. Raises UserError where it is another file."""
    if not output.exists():
        return []
    try:
        found = json.loads(output.read_text("utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, dict) and "rows" in one for one in found):
        raise UserError(
            f"{output} holds no rows of windlass bench",
            "bench appends rows to a file of its own",
            "name another --output",
        )
    return found


def _session(recipe: str, overrides: Sequence[str], steps: int) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "recipe": Path(recipe).name,
        "overrides": list(overrides),
        "steps": steps,
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count()},
        "versions": {"windlass": __version__}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        "checkout": checkout(Path(__file__).parents[4]),
    }


def checkout(root: Path) -> dict[str, Any] | None:
    """The commit of windlass's own repository, and whether files differ from it; None where it is installed without one."""
    state = git_state(root) if (root / ".git").exists() else None
    return None if state is None else {"commit": state["commit"], "is_changed": bool(state["diff"])}


def efficiencies(rows: Sequence[BenchRow]) -> dict[BenchRow, float]:
    """The scaling efficiency of each row that has a row of the same settings on fewer ranks."""
    found = {}
    for row in rows:
        same = [one for one in rows if one.settings == row.settings and one.median]
        base = min(same, key=lambda one: one.ranks, default=None)
        if base is not None and base.median and row.median and base.ranks < row.ranks:
            found[row] = row.median / (row.ranks / base.ranks * base.median)
    return found


def label(row: BenchRow) -> str:
    return f"{' '.join(row.settings) or AS_IT_IS}, {row.ranks} rank{'s' * (row.ranks > 1)}"


def figure(row: BenchRow) -> str:
    if row.median is None:
        return row.error or "no figure"
    return f"{format_count(row.median)} tok/s, spread {row.spread}"


def bench_as_table(rows: Sequence[BenchRow]) -> Iterator[str]:
    """A line for each row, under a line of titles; then a warning for each that scales badly."""
    scaled = efficiencies(rows)
    titles = ("cell", "tok/s", "spread", "per rank", "MFU", "memory", "scaling", "attention")
    table = [titles, *(_cells(row, scaled.get(row)) for row in rows)]
    widths = [max(len(cells[at]) for cells in table if len(cells) > 2) for at in range(len(titles))]
    widths[0] = max(len(cells[0]) for cells in table)
    for cells in table:
        yield "  ".join(text.ljust(width) if at in (0, 7) else text.rjust(width)
                        for at, (text, width) in enumerate(zip(cells, widths, strict=False))).rstrip()  # fmt: skip
    for row, share in scaled.items():
        if share < LEAST_EFFICIENCY:
            yield f"warning: {label(row)} has {share:.0%} of what its ranks do alone: windlass advise on such a run says why"


def _cells(row: BenchRow, efficiency: float | None) -> tuple[str, ...]:
    if row.median is None:
        return label(row), row.error or "no figure"
    return (
        label(row),
        format_count(row.median),
        row.spread,
        format_count(row.median / row.ranks),
        "n/a" if row.mfu is None else f"{row.mfu:.1%}",
        "-" if row.memory_bytes is None else format_bytes(row.memory_bytes),
        "-" if efficiency is None else f"{efficiency:.2f}",
        row.attention or "-",
    )
