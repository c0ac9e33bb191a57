"""`windlass launch kubernetes`: a run as pods of a cluster."""

from collections.abc import Iterator
from pathlib import PurePath
from typing import Literal

from windlass.commands.launch.submitted import check_layout_there
from windlass.config import RunConfig, load_recipe
from windlass.data.prepare.part_record import beside
from windlass.data.prepare.prepare import check_may_be_joined
from windlass.launch.job_names import job_name
from windlass.launch.kubernetes import apply, check_kubernetes_parts, check_pods, manifests
from windlass.launch.slurm import Size
from windlass.recipe import recipe_text


def launch_kubernetes(
    recipe: str,
    overrides: list[str],
    size: Size,
    name: str | None,
    kind: Literal["jobset", "trainjob"],
    is_dry: bool,
) -> Iterator[str]:
    """Applies the manifests of `recipe` -> what kubectl says, and how to follow the run; of a dry run, the manifests. Raises
    UserError before anything is applied."""
    config = load_recipe(recipe, *overrides)
    kubernetes = config.launch.kubernetes
    directories = config.run.directory, PurePath(config.data.directory)
    check_pods(kubernetes, *directories, config.checkpoint.remote is not None, size)
    _check_parts(config, kind)
    check_layout_there(config, size.world)
    name = job_name(name, config.run.directory)
    text = manifests(kubernetes, recipe_text(recipe)[0], overrides, size, name, kind)
    if is_dry:
        yield text.rstrip()
        return
    yield apply(text)
    of = f" -n {kubernetes.namespace}" if kubernetes.namespace else ""
    yield "to follow it:"
    yield f"  kubectl get{of} {kind}/{name}"
    yield f"  kubectl logs{of} -f -l jobset.sigs.k8s.io/jobset-name={name} --prefix"
    yield f"to stop it, saved: kubectl delete{of} {kind}/{name}"


def _check_parts(config: RunConfig, kind: Literal["jobset", "trainjob"]) -> None:
    """Raises UserError where pods are to prepare the data in parts, and cannot."""
    if config.launch.kubernetes.prepare_parts is not None:
        check_may_be_joined(config.data)
        key, directory = beside(config.data)
        check_kubernetes_parts(config.launch.kubernetes, kind, key, PurePath(directory))
