"""The bodies of a pipeline's tasks. A recipe travels as text: a path of the host that submits means nothing in a pod.

prepare   writes data below data.directory, in a folder named by the fingerprint, so another setting prepares beside it
make_tokenizer, make_part   the same in parts, which `prepare` with `is_join` joins
train     all ranks; goes on from the run directory or checkpoint.remote by itself, and gives back a checkpoint and an export
key_of    the fingerprint: what a preparation is a function of, and so the cache's key

Flyte's cache takes it as an input, and ignores the others. (Not `Cache("override")`: local execution of Flyte 2.12 writes such
results and never reads them.)
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import flyte
import flyte.report
from flyte.errors import NonRecoverableError
from flyte.io import Dir

from windlass import contract
from windlass.checkpoint.commit import committed_steps
from windlass.checkpoint.manifest import step_name
from windlass.checkpoint.verify import verify_checkpoint
from windlass.commands.models.export import export
from windlass.config import RunConfig, parse_recipe
from windlass.data.config import DataConfig
from windlass.data.prepare.part import prepare_part, prepare_tokenizer
from windlass.data.prepare.part_record import Part
from windlass.data.prepare.prepare import prepare as prepare_data
from windlass.errors import FINAL, BadCheckpoint, WindlassError, exit_code_of
from windlass.flyte.page import flushed_page
from windlass.runtime import recorded
from windlass.safe_text import say
from windlass.training.loop import train as train_run
from windlass.training.start.pins import fingerprint, pin_tokenizer

FORMAT: Final = "windlass-prepare-1"
"""Changes when what is prepared would, for the same fingerprint."""


class _Format:
    """A cache policy of Flyte: the version is of windlass's preparation, not of the text of a task's function."""

    def get_version(self, salt: str, params: Any) -> str:
        return FORMAT + salt


def by_fingerprint() -> flyte.Cache:
    """For a task `prepare(recipe, overrides, key)`: `key` alone decides."""
    return flyte.Cache("auto", policies=[_Format()], ignored_inputs=("recipe", "overrides"), serialize=True)


def key_of(recipe: str, overrides: list[str]) -> str:
    """The fingerprint of the recipe's data. Reads its sources. A mistake of the user is not retried."""
    with _mistakes_are_final():
        return fingerprint(parse_recipe(recipe, "the recipe", *overrides))


def prepare(recipe: str, overrides: list[str], key: str, is_join: bool = False) -> Dir:
    """Prepares the data of `recipe`, whose key is `key` -> where it is; what a pod has on its own disk is uploaded."""
    with _mistakes_are_final():
        config, data = _config_of(recipe, overrides, key)
        say(f"task prepare: {data.directory}")
        prepare_data(data, config.evaluate.sets, is_join=is_join)
        return _kept(config, data.directory)


def make_tokenizer(recipe: str, overrides: list[str], key: str) -> None:
    """What the parts of `prepare` need first: hashes and counts of the sources, and the tokenizer."""
    with _mistakes_are_final():
        config, data = _config_of(recipe, overrides, key)
        prepare_tokenizer(data, config.evaluate.sets)


def make_part(recipe: str, overrides: list[str], key: str, number: int, of: int) -> None:
    """Encodes part `number`, from 0, of `of`; or what is missing of it."""
    with _mistakes_are_final():
        config, data = _config_of(recipe, overrides, key)
        say(f"task part {number}/{of}: {data.directory}")
        prepare_part(data, config.evaluate.sets, Part(number, of))


def _config_of(recipe: str, overrides: list[str], key: str) -> tuple[RunConfig, DataConfig]:
    """The recipe; and its data, in the folder that the key names."""
    config = pin_tokenizer(parse_recipe(recipe, "the recipe", *overrides))
    directory = f"{str(config.data.directory).rstrip('/')}/{key[:16]}"
    data = parse_recipe(recipe, "the recipe", *overrides, f"data.directory={json.dumps(directory)}").data
    return config, data.changed(tokenizer=config.data.tokenizer)


def train(recipe: str, overrides: list[str], data: Dir, start_from: Dir | None = None) -> tuple[Dir, Dir]:
    """Trains on every rank alike -> the newest checkpoint, verified, and the export, from rank 0.

    Raises NonRecoverableError, in a rank SystemExit, for mistakes; Stopped after a signal, which Flyte retries."""
    given = [*overrides, f"data.directory={json.dumps(data.path)}"]
    if start_from is not None:
        given.append(f"run.start_from={json.dumps(start_from.path)}")
    with _mistakes_are_final():
        config = parse_recipe(recipe, "the recipe", *given)
        run = config.run.directory
        with flushed_page(run, _flush) if contract.rank() == 0 else nullcontext():
            recorded(train_run)(config, raise_on_stop=True)
        if contract.rank() != 0:
            return Dir(path=str(run)), Dir(path=str(run))  # of which Flyte takes rank 0's alone
        checkpoint, exported = newest_whole(run), export(run).directory
        return _kept(config, str(checkpoint)), _kept(config, str(exported))


def newest_whole(run: Path) -> Path:
    """The newest checkpoint of a run whose every byte is what its manifest promises. Raises BadCheckpoint where there is none."""
    folders = [run / "checkpoints" / step_name(step) for step in committed_steps(run / "checkpoints")]
    for folder in folders:
        if not verify_checkpoint(folder):
            return folder
    raise BadCheckpoint(
        f"{run} has {len(folders)} checkpoints, and none of them is whole",
        "a training task gives back a checkpoint that was verified",
        "see windlass checkpoint verify; the store of checkpoint.remote may hold an older one",
    )


def _outlives_the_pod(config: RunConfig, directory: str) -> bool:
    if "://" in directory or flyte.ctx().mode == "local":
        return True
    mount = config.launch.flyte.mount
    return mount is not None and Path(directory).is_relative_to(mount)


def _kept(config: RunConfig, directory: str) -> Dir:
    """A pointer to what outlives the pod, else an upload."""
    return Dir(path=directory) if _outlives_the_pod(config, directory) else Dir.from_local_sync(directory)


def _flush(page: str) -> None:
    flyte.report.replace(page)
    flyte.report.flush()


@contextmanager
def _mistakes_are_final() -> Iterator[None]:
    """What windlass.errors never retries, Flyte does not either. A rank exits with the code, which its agent reads: see ranks."""
    try:
        yield
    except (WindlassError, SystemExit) as error:
        if (code := exit_code_of(error)) not in FINAL:
            raise
        if not contract.is_elastic():
            raise NonRecoverableError(str(error)) from error
        print(error, file=sys.stderr, flush=True)
        raise SystemExit(code) from error
