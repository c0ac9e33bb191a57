"""`windlass launch slurm`: a run as jobs of a SLURM cluster, one that prepares its data where it is not, and one that trains."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.config import RunConfig, load_recipe
from windlass.data.prepare.prepare import open_prepared, planned
from windlass.errors import AbsentSource, UserError
from windlass.launch.slurm import FOLDER, Size, cancel, prepare_script, submit, train_script
from windlass.training.preflight import check_run


def launch(
    recipe: str, overrides: list[str], site: Mapping[str, str], size: Size, name: str | None, is_dry: bool
) -> Iterator[str]:
    """Submits `recipe` -> lines on its jobs and how to follow them; of a dry run, the scripts. `site`: keys of launch.slurm with
    other values than the recipe's. Raises UserError before anything is submitted."""
    config = load_recipe(
        recipe, *overrides, *(f"launch.slurm.{key}={json.dumps(value)}" for key, value in site.items())
    )
    run = Path(os.path.abspath(config.run.directory))
    folder, name = run / FOLDER, run.name if name is None else name
    scripts = {
        "prepare": prepare_script(config.launch, run, f"{name}-prepare", ["prepare", recipe, *overrides]),
        "train": train_script(config.launch, size, run, name, ["train", recipe, *overrides]),
    }
    pinned, _, _ = check_run(config, size.world, "cuda" if size.gpus_per_node else "cpu")
    if pinned.prepares_beside or _is_prepared(pinned):
        del scripts["prepare"]
    if is_dry:
        yield "\n".join(scripts.values()).rstrip()
        return
    before = None
    if "prepare" in scripts:
        before = submit(folder / "prepare.sbatch", scripts["prepare"])
        yield f"job {before}: prepares {config.data.directory}"
    try:
        job = submit(folder / "train.sbatch", scripts["train"], after=before)
    except UserError:
        if before is not None:
            cancel(before)
        raise
    ranks = f"{size.nodes} x {size.tasks_per_node} = {size.world} ranks"
    yield f"job {job}: trains {config.run.directory} on {ranks}" + (f", after job {before}" if before else "")
    yield "to follow it:"
    yield f"  squeue --jobs={','.join(filter(None, (before, job)))}"
    yield f"  windlass status {config.run.directory}"
    yield f"  tail -F {folder / f'{job}.out'}   # segments, and how each ended; {job}-NODE.log: what ranks print"
    yield f"to stop it, saved: scontrol requeuehold {job}"


def _is_prepared(config: RunConfig) -> bool:
    """Whether the data of a recipe with pinned hub names is prepared and unchanged. Where nothing is prepared, no source is read;
    where a source is not on this host, what is prepared is taken as it is. Raises UserError."""
    try:
        prepared = open_prepared(config.data, config.evaluate.sets)
    except UserError:  # nothing there, other settings, damage: preparing mends it, or says what is wrong
        return False
    try:
        return planned(config.data, config.evaluate.sets).fingerprint == prepared.fingerprint
    except AbsentSource:
        return True
