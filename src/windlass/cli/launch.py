"""`windlass launch ...`: every command parses, then makes one call."""

from typing import Annotated, Literal

import typer

from windlass.cli.arguments import Overrides, Recipe

app = typer.Typer(help="Start a run on several hosts.", no_args_is_help=True)


@app.callback()
def launch() -> None:
    """Start a run on several hosts."""


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
    from windlass.commands.launch_slurm import launch
    from windlass.launch.slurm import size_of

    given = {"partition": partition, "account": account, "qos": qos, "time": time}
    site = {key: value for key, value in given.items() if value is not None}
    size = size_of(nodes, gpus_per_node, tasks_per_node)
    print_lines(launch(recipe, overrides or [], site, size, job_name, dry_run))


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
    from windlass.commands.launch_kubernetes import launch
    from windlass.launch.slurm import size_of

    print_lines(launch(recipe, overrides or [], size_of(nodes, gpus_per_node, tasks_per_node), job_name, kind, dry_run))
