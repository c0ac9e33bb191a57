"""SkyPilot: the task of a managed job that trains a recipe on rented hosts.

Each host runs `windlass launch nodes` (one alone: `windlass train`), which restarts its own ranks. SkyPilot rents hosts, rents
others where one is lost or a spot host is taken back, and starts the same command there: it goes on from the last commit, on
a directory that all hosts mount, or, on one host, from `checkpoint.remote`. The recipe is part of the `run` lines, secrets go by
name.

Fields: SkyPilot 0.14's task. Of its exit codes only 75 (stopped and saved) starts again: such restarts are not counted there, and
`max_restarts_on_errors` would count, and repeat, the recipe's own mistakes too. 137 may not be among them: it is what SkyPilot
notes for every host that it ends because another has failed.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePath
from typing import Any, Final

import yaml

from windlass.errors import EXIT_STOPPED, UserError
from windlass.launch.config import SkyConfig
from windlass.launch.job_names import checked_job_name
from windlass.launch.kubernetes import PORT, Blocks
from windlass.launch.slurm import Size
from windlass.launch.volume import check_shared
from windlass.safe_text import redacted

RECIPE: Final = '"$HOME/windlass-recipe.yaml"'
"""Where a host has the recipe."""
ENDPOINT: Final = f'"$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
"""The first of the hosts' addresses, which SkyPilot gives to all of them, a line each."""

Tree = dict[str, Any]


def check_sky_hosts(sky: SkyConfig, run: PurePath, data: PurePath, has_remote: bool, size: Size) -> None:
    """Raises UserError where hosts would have no windlass, would lose what a run keeps, or would not see the same directories.
    `has_remote`: whether checkpoints are copied to a store."""
    if sky.image is None and not sky.setup:
        raise UserError(
            "neither launch.sky.image nor launch.sky.setup",
            "a rented host has no windlass of its own",
            "name an image that has it (see Containerfile), or the shell lines that install it",
        )
    if sky.gpu is None and size.gpus_per_node:
        raise UserError(
            f"--gpus-per-node {size.gpus_per_node} without launch.sky.gpu",
            "a host is rented by the name of its GPU",
            "name it, for example launch.sky.gpu=H100; `sky gpus list` lists them",
        )
    if sky.mount is None and (size.nodes > 1 or not has_remote):
        raise UserError(
            f"{size.nodes} hosts without launch.sky.mount" if size.nodes > 1 else "a host whose disk ends with it",
            "all hosts of a run see its directory and its data, and the directory outlives them",
            "name the directory where they mount what they share (launch.sky.volume, or a line of launch.sky.setup)"
            + ("" if size.nodes > 1 else ", or set checkpoint.remote"),
        )
    if sky.mount is not None:
        check_shared(sky.mount, run, data, ": hosts start there")


def task(sky: SkyConfig, text: str, arguments: list[str], size: Size, name: str) -> str:
    """YAML for `sky jobs launch`. `text`: the recipe; `arguments`: overrides behind it. Raises UserError."""
    tree = {
        "name": checked_job_name(name),
        "num_nodes": size.nodes,
        "resources": _resources(sky, size),
        "volumes": {sky.mount: sky.volume} if sky.volume else None,
        "envs": {name: str(value) for name, value in sky.environment.items()},
        "secrets": dict.fromkeys(sky.secrets),
        "setup": _lines(sky.setup),
        "run": _run(sky, text, arguments, size),
    }
    made = yaml.dump({key: value for key, value in tree.items() if value}, Dumper=Blocks, sort_keys=False)
    if redacted(made) != made:
        raise UserError(
            "the task would hold a secret: a URL with a password or a signature, or a token of the hub",
            "SkyPilot keeps the task, and shows it",
            "write ${NAME} for it, in quotes, and name it in launch.sky.secrets",
        )
    return made


def _resources(sky: SkyConfig, size: Size) -> Tree:
    found = {
        "infra": sky.infra,
        "accelerators": f"{sky.gpu}:{size.gpus_per_node}" if size.gpus_per_node else None,
        "cpus": f"{sky.cpus}+" if sky.cpus else None,
        "memory": f"{sky.memory_gib}+" if sky.memory_gib else None,
        "disk_size": sky.disk_gib,
        "image_id": f"docker:{sky.image}" if sky.image else None,
        "use_spot": sky.spot,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": [EXIT_STOPPED]},
    }
    return {key: value for key, value in found.items() if value is not None}


def _run(sky: SkyConfig, text: str, arguments: list[str], size: Size) -> str:
    """The shell lines of each host."""
    end = "RECIPE"
    while end in text:
        end += "_"
    command = "launch nodes" if size.nodes > 1 else "train"
    meeting = f" --nodes {size.nodes} --endpoint {ENDPOINT}" if size.nodes > 1 else ""
    given = "".join(f" {shlex.quote(argument)}" for argument in arguments)
    return _lines(
        [
            f"cat > {RECIPE} <<'{end}'",
            text.rstrip("\n"),
            end,
            f"cd {shlex.quote(sky.mount) if sky.mount else '~'}",
            f"exec python3 -m windlass {command} {RECIPE}{given} --nproc {size.tasks_per_node}{meeting}",
        ]
    )


def _lines(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def submit_sky(text: str, name: str, secrets: list[str]) -> str:
    """Hands the task to SkyPilot as a managed job -> what it prints. Raises UserError where there is no SkyPilot or it refuses.
    `secrets`: names of variables of this process, whose values it takes along."""
    if shutil.which("sky") is None:
        raise UserError(
            "SkyPilot is not installed here",
            "a job is handed over by its command, sky, with your own accounts",
            "pip install skypilot with the extra of your cloud, or print the task with --dry-run and launch it elsewhere",
        )
    missing = [secret for secret in secrets if secret not in os.environ]
    if missing:
        raise UserError(
            f"launch.sky.secrets names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not set here",
            "hosts get the values that the variables have where the job is submitted",
            "export them first, or remove the names",
        )
    with tempfile.TemporaryDirectory(prefix="windlass-sky-") as folder:
        file = Path(folder, "task.yaml")
        file.write_text(text, "utf-8")
        given = [part for secret in secrets for part in ("--secret", secret)]
        command = ["sky", "jobs", "launch", "--yes", "--detach-run", "--name", name, *given, str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    raise UserError(
        f"sky refused the task: {' '.join((done.stderr or done.stdout).split())}",
        "SkyPilot has an account at a cloud that rents such hosts, and knows what launch.sky names",
        "`sky check` shows the accounts, `sky gpus list` the GPUs; correct launch.sky",
    )
