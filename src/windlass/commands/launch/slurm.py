"""`windlass launch slurm`: a run as jobs of a SLURM cluster, one that prepares its data where it is not, and one that trains."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from windlass.config import RunConfig, load_recipe
from windlass.data.prepare.prepare import check_may_be_joined, open_prepared, planned
from windlass.errors import AbsentSource, UserError
from windlass.launch.slurm import FOLDER, Size, cancel, prepare_scripts, submit_slurm, train_script
from windlass.training.preflight import check_run

STEPS: Final = {
    "prepare": "prepares {data}",
    "prepare-tokenizer": "makes the tokenizer of {data}",
    "prepare-parts": "prepares {parts} parts of it, a task each",
    "prepare-join": "joins them",
}


def launch_slurm(
    recipe: str, overrides: list[str], site: Mapping[str, str], size: Size, name: str | None, is_dry: bool
) -> Iterator[str]:
    """Submits `recipe` -> lines on its jobs and how to follow them; of a dry run, the scripts. `site`: keys of launch.slurm with
    other values than the recipe's. Raises UserError before anything is submitted."""
    config = load_recipe(
        recipe, *overrides, *(f"launch.slurm.{key}={json.dumps(value)}" for key, value in site.items())
    )
    run = Path(os.path.abspath(config.run.directory))
    folder, name = run / FOLDER, run.name if name is None else name
    if config.launch.slurm.prepare_parts is not None:
        check_may_be_joined(config.data)
    before = prepare_scripts(config.launch, run, name, ["prepare", recipe, *overrides])
    train = train_script(config.launch, size, run, name, ["train", recipe, *overrides])
    pinned, _, _ = check_run(config, size.world, "cuda" if size.gpus_per_node else "cpu")
    if pinned.prepares_beside or _is_prepared(pinned):
        before = {}
    if is_dry:
        yield "\n".join((*before.values(), train)).rstrip()
        return
    jobs: list[str] = []
    try:
        for step, script in (before | {"train": train}).items():
            jobs.append(submit_slurm(folder / f"{step}.sbatch", script, after=jobs[-1] if jobs else None))
    except UserError:
        for job in jobs:
            cancel(job)
        raise
    for job, step in zip(jobs, before):
        yield f"job {job}: {STEPS[step].format(parts=config.launch.slurm.prepare_parts, data=config.data.directory)}"
    job, ranks = jobs[-1], f"{size.nodes} x {size.tasks_per_node} = {size.world} ranks"
    yield f"job {job}: trains {config.run.directory} on {ranks}" + (f", after job {jobs[-2]}" if before else "")
    yield "to follow it:"
    yield f"  squeue --jobs={','.join(jobs)}"
    yield f"  windlass status {config.run.directory}"
    yield f"  tail -F {folder / f'{job}.out'}   # segments, and how each ended; {job}-NODE.log: what ranks print"
    yield f"to stop it, saved: scontrol requeuehold {job}"


def _is_prepared(config: RunConfig) -> bool:
    """Whether the data of a recipe with pinned hub names is prepared and unchanged. Where nothing is prepared, no source is read;
    where a source is not on this host, what is prepared is taken as it is. Raises UserError."""
    try:
        prepared = open_prepared(config.data, config.evaluate.sets)
    except UserError:  # nothing there, other settings, damage: preparing fixes it, or says what is wrong
        return False
    try:
        return planned(config.data, config.evaluate.sets).fingerprint == prepared.fingerprint
    except AbsentSource:
        return True
