"""`windlass launch ...`: every command parses, then makes one call."""

import shlex
import sys
from functools import partial
from typing import Annotated

import typer

from windlass.cli.arguments import Nproc, Overrides, Recipe, restarts_of
from windlass.errors import EXIT_STOPPED
from windlass.launch import local
from windlass.safe_text import say

app = typer.Typer(help="Start a run on several hosts.", no_args_is_help=True)


@app.callback()
def launch() -> None:
    """Start a run on several hosts."""


@app.command("nodes")
def launch_nodes(
    recipe: Recipe,
    nodes: Annotated[str, typer.Option(metavar="MIN:MAX", help="Hosts: a number, or at least MIN and at most MAX.")],
    endpoint: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where they meet: one of the hosts, a free port.")],
    overrides: Overrides = None,
    nproc: Nproc = None,
) -> None:
    """Train on several hosts: the same command on each. A signal to one lets the others go on where they are MIN."""
    from windlass.config import load_recipe
    from windlass.launch.nodes import check_worlds, endpoint_of, launch_nodes, nodes_of
    from windlass.training.run_directory import interruptible

    hosts, place = nodes_of(nodes), endpoint_of(endpoint)
    config, num_ranks = load_recipe(recipe, *overrides or ()), local.choose_ranks(nproc)
    shape = config.model.shape(config.data.tokenizer.train)
    check_worlds(hosts, num_ranks, partial(config.check_layout, shape))
    with interruptible(config.run.directory):
        arguments = ["train", recipe, *(overrides or ())]
        code = launch_nodes(arguments, hosts, place, num_ranks, config.run.directory, restarts_of(config))
    if code == EXIT_STOPPED:
        say(f"the same command goes on: windlass {shlex.join(sys.argv[1:])}")
    raise typer.Exit(code)
