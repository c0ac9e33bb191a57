"""`windlass data ...`: every command parses, then makes one call."""

from pathlib import Path
from typing import Annotated

import typer

from windlass.cli.arguments import Overrides, PreparedData, print_lines
from windlass.cli.group import Commands
from windlass.errors import EXIT_USER_ERROR

app = typer.Typer(cls=Commands, help="See what is in prepared data, and what is wrong with it.", no_args_is_help=True)


@app.command("inspect")
def data_inspect(
    prepared: PreparedData,
    overrides: Overrides = None,
    name: Annotated[str, typer.Option("--set", help="train, validation, or a further set.")] = "train",
    sample: Annotated[
        str, typer.Option(help="Which sample is shown: its number in the order of the shards, from 0, or SHARD/ROW.")
    ] = "0",
    no_color: Annotated[bool, typer.Option("--no-color", help="Mark what is not learned with brackets.")] = False,
) -> None:
    """Documents, tokens, lengths, fill, vocabulary, and one sample with its borders and loss mask."""
    from windlass.commands.data_inspect import print_set

    print_set(prepared, overrides or [], name, sample, no_color)


@app.command("lint")
def data_lint(prepared: PreparedData, overrides: Overrides = None) -> None:
    """Faults of the data, by name, with where they are and what to change. Exit code 2 if one is an error."""
    from windlass.commands.data_lint import lint_data

    lines, has_error = lint_data(prepared, overrides or [])
    print_lines(lines)
    raise typer.Exit(EXIT_USER_ERROR if has_error else 0)


@app.command("report")
def data_report(
    prepared: PreparedData,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="The page. Default: data.html in this directory.")] = None,
) -> None:
    """One page that works offline: sources, lengths, what was left out, findings, samples."""
    from windlass.commands.data_inspect import write_data_report

    print_lines([str(write_data_report(prepared, overrides or [], output))])


@app.command("consumed")
def data_consumed(
    run_directory: Annotated[Path, typer.Argument(help="The run.directory of a run.")],
    list_to: Annotated[Path | None, typer.Option("--list", help="A file for the list: shard and row of each.")] = None,
) -> None:
    """Which samples a run has consumed, proved from its events and the hashes of its shards."""
    from windlass.commands.data_consumed import consumed

    print_lines(consumed(run_directory, list_to))
