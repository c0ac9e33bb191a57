"""`windlass launch ...`: every command parses, then makes one call."""

import shlex
import sys
from functools import partial
from typing import Annotated, Literal

import typer

from windlass.cli.arguments import Nproc, Overrides, Recipe, endpoint_of, interruptions, restarts_of
from windlass.cli.group import Commands
from windlass.errors import EXIT_STOPPED
from windlass.launch import local
from windlass.safe_text import say

app = typer.Typer(cls=Commands, help="Start a run on several hosts.", no_args_is_help=True)


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
    from windlass.launch.nodes import check_worlds, launch_nodes, nodes_of
    from windlass.training.interruptible import interruptible

    hosts, meeting = nodes_of(nodes), endpoint_of(endpoint)
    config, num_ranks = load_recipe(recipe, *overrides or ()), local.choose_ranks(nproc)
    shape = config.model.shape(config.data.tokenizer.train)
    check_worlds(hosts, num_ranks, partial(config.check_layout, shape))
    with interruptions(), interruptible(config.run.directory):
        arguments = ["train", recipe, *(overrides or ())]
        code = launch_nodes(arguments, hosts, meeting, num_ranks, config.run.directory, restarts_of(config))
    if code == EXIT_STOPPED:
        say(f"the same command goes on: windlass {shlex.join(sys.argv[1:])}")
    raise typer.Exit(code)


@app.command("slurm")
def launch_slurm(
    recipe: Recipe,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")],
    overrides: Overrides = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of each host, a rank each.")] = None,
    tasks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of each host, on CPUs.")] = None,
    partition: Annotated[str | None, typer.Option(help="This and the next three: as launch.slurm has them.")] = None,
    account: Annotated[str | None, typer.Option()] = None,
    qos: Annotated[str | None, typer.Option()] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of a segment: 4:00:00.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the name of the run directory.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts, and submit nothing.")] = False,
) -> None:
    """Submit a run that goes back to the queue until it is finished, and a job that prepares its data where it is not."""
    from windlass.cli.arguments import print_lines
    from windlass.commands.launch.slurm import launch_slurm
    from windlass.launch.slurm import size_of

    given = {"partition": partition, "account": account, "qos": qos, "time": time}
    site = {key: value for key, value in given.items() if value is not None}
    size = size_of(nodes, gpus_per_node, tasks_per_node)
    print_lines(launch_slurm(recipe, overrides or [], site, size, job_name, dry_run))


@app.command("kubernetes")
def launch_kubernetes(
    recipe: Recipe,
    nodes: Annotated[int, typer.Option(min=1, help="Pods, a host each.")],
    overrides: Overrides = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of each pod, a rank each.")] = None,
    tasks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of each pod, on CPUs.")] = None,
    kind: Annotated[
        Literal["jobset", "trainjob"], typer.Option(help="Which controller: JobSet, or Kubeflow Trainer 2.")
    ] = "jobset",
    job_name: Annotated[str | None, typer.Option(help="Default: the name of the run directory.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the manifests, and apply nothing.")] = False,
) -> None:
    """Apply manifests whose pods train, by kubectl. Needs launch.kubernetes in the recipe: image, and a volume claim."""
    from windlass.cli.arguments import print_lines
    from windlass.commands.launch.kubernetes import launch_kubernetes
    from windlass.launch.slurm import size_of

    size = size_of(nodes, gpus_per_node, tasks_per_node)
    print_lines(launch_kubernetes(recipe, overrides or [], size, job_name, kind, dry_run))


@app.command("flyte")
def launch_flyte(
    recipe: Recipe,
    overrides: Overrides = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of each pod, on CPUs. Default: its GPUs.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the name of the run directory.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Run the pipeline in this process, as one rank.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the pipeline, and submit nothing.")] = False,
) -> None:
    """Submit a Flyte 2 pipeline that prepares, trains and reports. Needs the flyte extra, and launch.flyte in the recipe."""
    from windlass.cli.arguments import print_lines
    from windlass.commands.launch.flyte import launch_flyte

    print_lines(launch_flyte(recipe, overrides or [], nproc, job_name, local, dry_run))


@app.command("sky")
def launch_sky(
    recipe: Recipe,
    nodes: Annotated[int, typer.Option(min=1, help="Hosts.")],
    overrides: Overrides = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="GPUs of each host, a rank each.")] = None,
    tasks_per_node: Annotated[int | None, typer.Option(min=1, help="Ranks of each host, on CPUs.")] = None,
    job_name: Annotated[str | None, typer.Option(help="Default: the name of the run directory.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the task, and submit nothing.")] = False,
) -> None:
    """Submit a managed job of SkyPilot, which rents hosts that train, and others where it loses some."""
    from windlass.cli.arguments import print_lines
    from windlass.commands.launch.sky import launch_sky
    from windlass.launch.slurm import size_of

    print_lines(launch_sky(recipe, overrides or [], size_of(nodes, gpus_per_node, tasks_per_node), job_name, dry_run))
