"""Commands that ask what is in a run directory: `status`, `stacks`, `runs`, `report`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.arguments import RunDirectory, print_lines
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


def runs(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to look.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run, for scripts.")] = False,
) -> None:
    """A table of the runs below a directory: state, step, loss, validation loss, tok/s; the last written first."""
    from windlass.commands import status as room

    found = room.runs(directory)
    print_lines(room.as_json(found) if as_json else room.as_table(found, directory))


def report(run: RunDirectory) -> None:
    """Write report.html: one page, works offline."""
    from windlass.commands.report import report as write

    say(write(run))
