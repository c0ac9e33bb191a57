"""SLURM: batch scripts that train and prepare, and how they are submitted.

A script is one page for a person to read (job.sbatch.j2): it starts one task per rank, and says by the exit code of the ranks
whether the job is done, failed, or goes back to the queue. It needs bash, GNU env (coreutils 8.31) and SLURM's own commands, and
no windlass on the host where it runs: that may be in a container.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import jinja2

from windlass.errors import FINAL, Unavailable, UserError
from windlass.launch.agent import SHUTDOWN_S
from windlass.launch.config import LaunchConfig
from windlass.safe_text import redacted

TEMPLATE: Final = Path(__file__).with_name("job.sbatch.j2")
NOT_REQUEUED: Final = (*FINAL, 126, 127)
"""126, 127: the shell's, for a command that cannot be run. Unlike on one machine, 130 goes back to the queue: within a job a
signal is SLURM's, and a run may be preempted before its first checkpoint."""
IN_CONTAINER: Final = "python3"
FOLDER: Final = "slurm"
"""The folder in a run directory that holds the scripts, and what jobs print."""


class Size(NamedTuple):
    """The size of a job. `gpus_per_node`: 0 where ranks train on CPUs, else one for each task."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int = 0

    @property
    def world(self) -> int:
        return self.nodes * self.tasks_per_node


def size_of(nodes: int, gpus_per_node: int | None, tasks_per_node: int | None) -> Size:
    """Raises UserError unless exactly one of GPUs and tasks is given."""
    if (gpus_per_node is None) == (tasks_per_node is None):
        both = f"--gpus-per-node {gpus_per_node} with --tasks-per-node {tasks_per_node}"
        raise UserError(
            "neither --gpus-per-node nor --tasks-per-node" if gpus_per_node is None else both,
            "a rank is a task, with a GPU of its own where there are GPUs",
            "give --gpus-per-node for GPUs, --tasks-per-node for CPUs",
        )
    return Size(nodes, gpus_per_node or tasks_per_node or 0, gpus_per_node or 0)


def train_script(launch: LaunchConfig, size: Size, run: Path, name: str, arguments: list[str]) -> str:
    """The batch script of `windlass *arguments`, which trains in `run`, an absolute path. Raises UserError where it would hold a
    secret."""
    slurm, cpus = launch.slurm, launch.slurm.cpus_per_task
    counts = f"--nodes={size.nodes} --ntasks-per-node={size.tasks_per_node}"
    gpus = f" --gpus-per-node={size.gpus_per_node}" if size.gpus_per_node else ""
    srun = ["--kill-on-bad-exit=0", f"--wait={SHUTDOWN_S}", '--open-mode=append --output="${log//%/%%}-%N.log"']
    srun += [f"--cpus-per-task={cpus} --cpu-bind=cores"] if cpus else []  # srun takes no count of CPUs from sbatch
    srun += ["--gpu-bind=none"] if gpus else []  # each rank sees all GPUs of its node, and takes its own
    facts = {
        "purpose": f"Trains {run} on {size.nodes} x {size.tasks_per_node} = {size.world} ranks.",
        "options": _options(launch, f"{counts}{gpus}", run / FOLDER / "%j.out", name, []),
        "trains": True,
        "grace_s": slurm.grace_s,
        "run": shlex.quote(str(run)),
        "most": launch.max_restarts,
        "never": " | ".join(map(str, NOT_REQUEUED)),
        "script": shlex.quote(str(run / FOLDER / "train.sbatch")),
    }
    return _render(launch, facts, srun, arguments)


def prepare_scripts(launch: LaunchConfig, run: Path, name: str, arguments: list[str]) -> dict[str, str]:
    """File name -> script, in the order in which they run, of `windlass *arguments`, which prepares: one job on one node; or one
    for the tokenizer, an array of parts, and one that joins them."""
    num_parts = launch.slurm.prepare_parts
    if num_parts is None:
        return {"prepare": _prepare_script(launch, run, name, "prepare", arguments)}
    array = f" --array=0-{num_parts - 1}"
    return {
        "prepare-tokenizer": _prepare_script(launch, run, name, "prepare-tokenizer", [*arguments, "--tokenizer-only"]),
        "prepare-parts": _prepare_script(launch, run, name, "prepare-parts", [*arguments, "--part", "auto"], array),
        "prepare-join": _prepare_script(launch, run, name, "prepare-join", [*arguments, "--join"]),
    }


def _prepare_script(
    launch: LaunchConfig, run: Path, name: str, step: str, arguments: list[str], array: str = ""
) -> str:
    counts, output = f"--nodes=1 --ntasks=1{array}", run / FOLDER / "%j.out"
    facts = {
        "purpose": f"Prepares the data of {run}" + (f" ({step})." if step != "prepare" else "."),
        "options": _options(launch, counts, output, f"{name}-{step}", launch.slurm.prepare_options),
        "trains": False,
        "script": shlex.quote(str(run / FOLDER / f"{step}.sbatch")),
    }
    return _render(launch, facts, ["--ntasks=1"], arguments)


def _options(launch: LaunchConfig, counts: str, output: Path, name: str, more: list[str]) -> list[str]:
    """Lines of options; of one that is given twice, sbatch takes the last. Raises UserError."""
    slurm = launch.slurm
    for text in (str(output), str(Path.cwd()), name):
        if not text.isprintable() or not text.strip():
            raise UserError(
                f"{text!r} in a batch script",
                "its options are lines of printable characters, and none is empty",
                "choose another name",
            )
    site = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "time": slurm.time}
    chdir = f"--chdir={shlex.quote(str(Path.cwd()))}"
    log = shlex.quote(str(output.parent).replace("%", "%%") + f"/{output.name}")
    return [
        f"--job-name={shlex.quote(name)}",
        counts,
        *([f"--cpus-per-task={slurm.cpus_per_task}"] if slurm.cpus_per_task else []),
        *(f"--{key}={shlex.quote(value)}" for key, value in site.items() if value is not None),
        chdir,
        f"--output={log} --open-mode=append",
        *slurm.options,
        *more,
    ]


def _render(launch: LaunchConfig, facts: dict[str, object], srun: list[str], arguments: list[str]) -> str:
    slurm = launch.slurm
    python = slurm.python or (IN_CONTAINER if slurm.container else sys.executable)
    command = f"{shlex.quote(python)} -m windlass {shlex.join(arguments)}"
    template = jinja2.Template(
        TEMPLATE.read_text("utf-8"), trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    text = template.render(
        facts,
        setup=slurm.setup,
        environment={key: shlex.quote(str(value)) for key, value in slurm.environment.items()},
        wait_s=SHUTDOWN_S,
        srun_options=" ".join(srun),
        command=" ".join(filter(None, (slurm.container, command))),
    )
    if redacted(text) != text:
        raise UserError(
            "the script would hold a secret: a URL with a password or a signature, or a token of the hub",
            "a batch script is a file that others of the cluster may read",
            "write ${NAME} for it, in quotes, and export NAME in the shell that submits: jobs inherit its environment",
        )
    return text


def submit_slurm(file: Path, text: str, after: str | None = None) -> str:
    """Writes `text` to `file` and submits it -> the job's id. `after`: the id of a job that must have succeeded. Raises UserError
    where there is no sbatch or it refuses, Unavailable where the controller does not answer."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not installed here",
            "jobs are submitted on a host of the cluster, by SLURM's own commands",
            "run this command on a login node; --dry-run prints the scripts anywhere",
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(
            f"{file} cannot be written: {error.strerror}",
            "the script and what jobs print are in the run directory, which every node sees",
            "choose another run.directory",
        ) from None
    depends = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    done = subprocess.run(["sbatch", "--parsable", *depends, str(file)], capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip().split(";")[0]  # the rest names the cluster
    said = " ".join(done.stderr.split())
    kind = Unavailable if "contact slurm controller" in said or "timed out" in said else UserError
    raise kind(
        f"sbatch refused {file}: {said}",
        "a job is what the site allows: its partitions, accounts, limits and options",
        "correct launch.slurm in the recipe, or the options of this command; sinfo lists partitions and their limits",
    )


def cancel(job: str) -> None:
    subprocess.run(["scancel", job], capture_output=True)
