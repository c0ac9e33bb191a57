"""`windlass launch flyte`: a run as a Flyte 2 pipeline, submitted with the user's own configuration of Flyte, or run here."""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windlass.commands.launch.submitted import check_layout_there
from windlass.config import RunConfig, load_recipe
from windlass.data.prepare.part_record import beside
from windlass.data.prepare.prepare import check_may_be_joined
from windlass.errors import Unavailable, UserError
from windlass.launch.flyte import MODULE, check_flyte_parts, check_no_secret, check_tasks, driver, ranks_per_node
from windlass.launch.job_names import job_name
from windlass.recipe import recipe_text


def launch_flyte(
    recipe: str, overrides: list[str], nproc: int | None, name: str | None, is_local: bool, is_dry: bool
) -> Iterator[str]:
    """Submits the pipeline of `recipe` -> its address; with `is_local` runs it here -> what it gave back; with `is_dry` ->
    its file and inputs. Raises UserError before anything is submitted."""
    config = load_recipe(recipe, *overrides)
    flyte = config.launch.flyte
    if not is_local:
        check_tasks(flyte, config.run.directory, config.checkpoint.remote is not None)
    if flyte.prepare_parts is not None:
        check_may_be_joined(config.data)
        key, directory_of_parts = beside(config.data)
        if not is_local:
            check_flyte_parts(flyte, key, Path(directory_of_parts))
    num_ranks = 1 if is_local else ranks_per_node(flyte, nproc)
    check_layout_there(config, num_ranks if is_local else flyte.nodes * num_ranks)
    name = job_name(name, config.run.directory)
    text, given = driver(flyte, name, num_ranks), [*overrides, *_directories_on_volume(config, is_local)]
    source = recipe_text(recipe)[0]
    check_no_secret("\n".join([source, *given]))
    if is_dry:
        yield text.rstrip()
        yield ""
        yield f"# inputs: the text of {recipe}, and overrides={json.dumps(given)}"
        return
    if find_spec("flyte") is None or find_spec("flyteplugins") is None:
        raise UserError(
            "flyte is not installed here",
            "a pipeline is submitted, or run locally, by Flyte's own library",
            "pip install 'windlass-lm[flyte]', or print the pipeline with --dry-run",
        )
    with _module(text) as (folder, module):
        yield from (_run_here if is_local else _submit)(folder, module, source, given)


def _directories_on_volume(config: RunConfig, is_local: bool) -> Iterator[str]:
    """Overrides that put relative directories where they outlive a task: below the volume, or, locally, below this directory."""
    root = Path.cwd() if is_local else config.launch.flyte.mount
    directories: dict[str, Path | str] = {
        "run.directory": config.run.directory,
        "data.directory": config.data.directory,
    }
    if config.launch.flyte.prepare_parts is not None:
        directories |= [beside(config.data)]
    for setting, directory in directories.items():
        if root is not None and "://" not in str(directory) and not os.path.isabs(directory):
            yield f"{setting}={json.dumps(str(Path(root) / directory))}"


@contextmanager
def _module(text: str) -> Iterator[tuple[Path, Any]]:
    """The pipeline as a module of a folder of its own, which is all that Flyte uploads."""
    with tempfile.TemporaryDirectory(prefix="windlass-flyte-") as folder:
        Path(folder, f"{MODULE}.py").write_text(text, "utf-8")
        sys.path.insert(0, folder)
        try:
            yield Path(folder), importlib.import_module(MODULE)
        finally:
            sys.path.remove(folder)
            sys.modules.pop(MODULE, None)


def _run_here(folder: Path, module: Any, source: str, given: list[str]) -> Iterator[str]:
    import flyte
    from flyte.errors import RuntimeUserError

    flyte.init(root_dir=folder)
    try:
        run = flyte.with_runcontext(mode="local").run(module.pipeline, source, given)
    except RuntimeUserError as error:
        if error.code != "NonRecoverableError":
            raise
        raise _mistake(str(error)) from None
    checkpoint, exported = run.outputs()
    yield f"report: {run.url}"
    yield f"checkpoint: {checkpoint.path}"
    yield f"export: {exported.path}"


def _mistake(words: str) -> UserError:
    """The UserError that a task ended by, from what Flyte keeps of it: its words."""
    given, _, rest = words.partition("\n  rule:   ")
    rule, _, change = rest.partition("\n  change: ")
    if not change:  # several mistakes
        return UserError(
            words, "mistakes ended a task, and mistakes are not retried", "correct them as the messages say"
        )
    return UserError(given, rule, change)


def _submit(folder: Path, module: Any, source: str, given: list[str]) -> Iterator[str]:
    import flyte
    from flyte.errors import InitializationError

    try:
        flyte.init_from_config(root_dir=folder)
        run = flyte.with_runcontext(mode="remote").run(module.pipeline, source, given)  # else, unconfigured: here
    except InitializationError as error:
        if error.code == "EndpointUnavailable":
            raise Unavailable(
                f"Flyte does not answer: {error}",
                "a pipeline is submitted to the endpoint of your configuration of Flyte",
                "see that it is up and in reach, then give the command again",
            ) from None
        raise UserError(
            f"Flyte is not configured here: {error}",
            "a pipeline is submitted with your own configuration of Flyte",
            "make one with `flyte create config`, or run here with --local",
        ) from None
    yield f"submitted: {run.url}"
