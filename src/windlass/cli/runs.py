"""What is asked of run directories: `windlass status`, `stacks`, `profile`, `advise`, `runs`, `report`, `sync`; and `bench`."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.arguments import Overrides, Recipe, RunDirectory, check_run_arguments, complete_sink, print_lines
from windlass.errors import UserError
from windlass.safe_text import say


def status(
    run: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Whether a run is running, finished, stopped, failed or dead, at which step, and where it would go on."""
    from windlass.commands.status import status as look

    found = look(run)
    say(json.dumps(asdict(found)) if as_json else found.line)


def stacks(
    run: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per rank, for scripts.")] = False,
) -> None:
    """Where every rank of a run on this host is: step, phase, Python line, last collective. Nothing is stopped."""
    from windlass.commands.stacks import stacks as look

    print_lines(look(run, as_json))


def profile(
    run: RunDirectory,
    steps: Annotated[int, typer.Option(metavar="N", help="How many steps.")] = 5,
    rank: Annotated[
        int | None, typer.Option(metavar="RANK", help="Of which rank. Default: the lowest on this host.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Where the time of a step goes: a trace of the next steps of a run that goes on, summed up. The run is not stopped."""
    from windlass.commands.profile import profile as record

    print_lines(record(run, steps, rank, as_json, partial(typer.echo, err=True)))


def advise(
    run: RunDirectory,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for scripts.")] = False,
) -> None:
    """Where the time of a run goes, what to change next and what it brings, and what its MFU means; from the run's own events."""
    from windlass.commands.speed.advise import advise as look

    print_lines(look(run, as_json))


def bench(
    recipe: Recipe,
    overrides: Overrides = None,
    grid: Annotated[
        list[str] | None, typer.Option(metavar="KEY=A,B", help="An axis of the grid: parallel.recompute=none,full")
    ] = None,
    nproc: Annotated[str, typer.Option(metavar="N,M", help="Numbers of processes that each cell runs on.")] = "1",
    steps: Annotated[int, typer.Option(metavar="N", help="Of each run.")] = 15,
    repeats: Annotated[int, typer.Option(metavar="N", help="Runs of each cell.")] = 3,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Rows are appended to it; FILE.svg is drawn.")] = Path(
        "bench.json"
    ),
) -> None:
    """Throughput, MFU and memory of a recipe over a grid of settings, each cell in processes of its own."""
    from windlass.commands.speed import bench as room

    numbers = [int(number) if number.isdigit() else 0 for number in nproc.split(",")]
    if not all(numbers):
        raise UserError(f"--nproc {nproc}", "--nproc is one number of processes or several", "for example --nproc 1,2")
    print_lines(room.bench(recipe, overrides or [], grid or [], numbers, steps, repeats, output))


def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run, for scripts.")] = False,
) -> None:
    """A table of the runs below a directory: state, step, loss, validation loss, tok/s; the last written first."""
    from windlass.commands import status as room

    found = room.runs(directory)
    print_lines(room.runs_as_json(found) if as_json else room.runs_as_table(found, directory))


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="The run directory, or several.", callback=check_run_arguments)
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page there. Default: report.html in the run directory."),
    ] = None,
    is_served: Annotated[
        bool, typer.Option("--serve", help="Serve the page on this machine, live, until Ctrl-C; nothing is written.")
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, show_default=False, help="With --serve: the port. Default: any free one."
        ),
    ] = 0,
) -> None:
    """Write report.html: one page, works offline. Several runs are laid over each other, with the settings that differ."""
    from windlass.commands import report as room

    if is_served:
        room.serve_reports(runs, output, port, say)
    else:
        say(room.report(runs, output))


def sync(
    run: RunDirectory,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SINK",
            help="tensorboard, wandb or trackio. Default: the recipe's.",
            autocompletion=complete_sink,
        ),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Of wandb and trackio. Default: the recipe's.")] = None,
    is_followed: Annotated[bool, typer.Option("--follow", help="Go on until the run ends.")] = False,
    until_eof: Annotated[bool, typer.Option("--until-eof", hidden=True)] = False,
) -> None:
    """Send what a run has logged to TensorBoard, Weights & Biases or Trackio; a step that was sent is not sent again."""
    from windlass.report.sinks import sync as room

    room.sync(run, room.sinks_of(to or []), project, "eof" if until_eof else "end" if is_followed else "now", say)
