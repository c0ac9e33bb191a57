"""Flyte 2: the file of a pipeline that prepares, trains and reports, and what is refused before it is submitted.

The file is plain Flyte, written to be read and copied; its tasks call windlass.flyte.tasks. A pod's disk ends with it, so what a
retry goes on from is in `checkpoint.remote` or on a volume that all pods mount. Flyte itself is not imported here.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import jinja2

from windlass.errors import UserError, raise_all
from windlass.launch.config import FlyteConfig
from windlass.launch.volume import off_volume
from windlass.safe_text import redacted

TEMPLATE: Final = Path(__file__).with_name("pipeline.py.j2")
MODULE: Final = "windlass_pipeline"
"""The file's name, by which pods import it."""
PUT_THERE: Final = ", which is put there"


def check_tasks(flyte: FlyteConfig, run: Path, has_remote: bool) -> None:
    """Raises UserError where the tasks could not start in a cluster, or would lose what a run keeps. `has_remote`: whether
    checkpoints are copied to a store."""
    raise_all(_problems(flyte, run, has_remote))


def _problems(flyte: FlyteConfig, run: Path, has_remote: bool) -> Iterator[UserError]:
    if flyte.image is None:
        yield UserError(
            "launch.flyte.image is missing",
            "a task runs in an image that has windlass and its `flyte` extra",
            "build and push one, and name it there; or give --local",
        )
    if flyte.retries and not has_remote and flyte.mount is None:
        yield UserError(
            f"launch.flyte.retries={flyte.retries} without checkpoint.remote or launch.flyte.mount",
            "a retry starts on an empty disk, and would begin at step 0 each time",
            "set checkpoint.remote, or mount a shared volume; or set launch.flyte.retries=0",
        )
    if flyte.nodes > 1 and flyte.mount is None:
        yield UserError(
            f"launch.flyte.nodes={flyte.nodes} without launch.flyte.mount",
            "all hosts of a run see its directory",
            "name the path where the cluster's pod template mounts a volume that all pods share",
        )
    rule = "the run directory is on the volume"
    if flyte.mount is not None and (error := off_volume("run.directory", run, flyte.mount, rule, PUT_THERE)):
        yield error


def check_flyte_parts(flyte: FlyteConfig, key: str, directory: Path) -> None:
    """Raises UserError where pods could not make or join the parts of a preparation. `directory`: theirs, given as `key`."""
    parts = f"launch.flyte.prepare_parts={flyte.prepare_parts}"
    if flyte.mount is None:
        raise UserError(
            f"{parts} without launch.flyte.mount",
            "a part is made by one pod, and joined by another",
            "name the path where the cluster's pod template mounts a volume that all pods share",
        )
    rule = f"parts are beside {key}, where all pods see them"
    if error := off_volume(f"{parts}, and {key}", directory, flyte.mount, rule, PUT_THERE):
        raise error


def ranks_per_node(flyte: FlyteConfig, nproc: int | None) -> int:
    """One rank per GPU; `nproc` where there is none. Raises UserError where both are given and differ."""
    gpus = int(str(flyte.gpu).rpartition(":")[2]) if flyte.gpu is not None else None
    if gpus is not None and nproc not in (None, gpus):
        raise UserError(
            f"--nproc {nproc} with launch.flyte.gpu={flyte.gpu}",
            "a rank has a GPU of its own",
            "leave --nproc out, or change launch.flyte.gpu",
        )
    return gpus or nproc or 1


def driver(flyte: FlyteConfig, name: str, nproc: int) -> str:
    """The pipeline's file. Raises UserError where it would hold a secret."""
    template = jinja2.Template(
        TEMPLATE.read_text("utf-8"), trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    machine = {"cpu": flyte.cpu, "memory": flyte.memory}
    text = template.render(
        flyte=flyte,
        name=name,
        nproc=nproc,
        prepare_resources=_keywords(machine),
        train_resources=_keywords({**machine, "gpu": flyte.gpu, "shm": flyte.shm}),
    )
    check_no_secret(text)
    return text


def check_no_secret(text: str) -> None:
    """Raises UserError where a text that Flyte keeps and shows would hold a secret."""
    if redacted(text) != text:
        raise UserError(
            "the inputs of the tasks would hold a secret: a URL with a password or a signature, or a token of the hub",
            "Flyte keeps inputs, and shows them",
            "write ${NAME} for it, in quotes, and give the tasks that variable as a secret of Flyte",
        )


def _keywords(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items() if value is not None)
