"""`windlass checkpoint ...`: every command parses, then makes one call."""

from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli.arguments import RunDirectory, Step, print_lines
from windlass.errors import EXIT_NOT_EQUAL
from windlass.safe_text import say

app = typer.Typer(help="List, verify, compare, reshard and prune the checkpoints of a run.", no_args_is_help=True)


@app.command("list")
def checkpoint_list(
    run: RunDirectory,
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte.")] = False,
) -> None:
    """The checkpoints of a run: step, time, size, validation loss."""
    from windlass.commands.checkpoints import table

    print_lines(table(run, verify))


@app.command("verify")
def checkpoint_verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run directory or one checkpoint directory.")],
) -> None:
    """Check every byte against the manifest. Exit code 2 and the file's name where something differs."""
    from windlass.commands.checkpoints import verify_checkpoints

    print_lines(verify_checkpoints(path))


@app.command("diff")
def checkpoint_diff(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A checkpoint directory.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another one.")],
) -> None:
    """Which tensors of two checkpoints differ. Exit code 3 where one does."""
    from windlass.commands.checkpoints import compare_checkpoints

    lines, is_equal = compare_checkpoints(first, second)
    print_lines(lines)
    if not is_equal:
        raise typer.Exit(EXIT_NOT_EQUAL)


@app.command("reshard")
def checkpoint_reshard(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run directory, or one of its checkpoints.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A run directory: made, or without that step.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="The whole layout: parallel.tp=2 parallel.shard=4. Without: one rank."
        ),
    ] = None,
    step: Step = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks of it. Default: what the sizes multiply to.", min=1)] = None,
) -> None:
    """Write a checkpoint once more, in the files of another layout. Its bytes, and so the run, stay the same.

    A run resumes from any checkpoint in any layout without this. Afterwards each rank reads its own file from end to
    end, instead of rows out of many: worth it where one checkpoint starts many runs, where storage is slow at small
    reads, or on the way to another cluster. One process, a few hundred MiB of memory at any size; every byte is
    verified as it is read. A run in TARGET goes on from it; `windlass checkpoint diff PATH TARGET` proves it equal.
    """
    from windlass.commands.reshard import move
    from windlass.recipe import apply_override

    layout: dict[str, Any] = {}
    for setting in settings or []:
        apply_override(layout, setting)
    print_lines(move(path, target, layout, num_ranks=ranks, step=step))


@app.command("prune")
def checkpoint_prune(
    run: RunDirectory,
    keep_last: Annotated[int, typer.Option(help="How many of the newest to keep.")] = 1,
    keep_best: Annotated[int, typer.Option(help="How many with the lowest validation loss to keep besides.")] = 0,
) -> None:
    """Delete older checkpoints. The newest whole one always stays."""
    from windlass.commands.checkpoints import prune_checkpoints

    say(prune_checkpoints(run, keep_last, keep_best))
