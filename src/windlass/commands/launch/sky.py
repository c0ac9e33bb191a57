"""`windlass launch sky`: a run on hosts that SkyPilot rents."""

from collections.abc import Iterator
from pathlib import PurePath

from windlass.commands.launch.submitted import check_layout_there
from windlass.config import load_recipe
from windlass.launch.job_names import job_name
from windlass.launch.sky import check_sky_hosts, submit_sky, task
from windlass.launch.slurm import Size
from windlass.recipe import recipe_text


def launch_sky(recipe: str, overrides: list[str], size: Size, name: str | None, is_dry: bool) -> Iterator[str]:
    """Submits `recipe` as a managed job -> what SkyPilot prints, and how to follow the run; of a dry run, the task. Raises
    UserError before anything is submitted."""
    config = load_recipe(recipe, *overrides)
    sky = config.launch.sky
    directories = config.run.directory, PurePath(config.data.directory)
    check_sky_hosts(sky, *directories, config.checkpoint.remote is not None, size)
    check_layout_there(config, size.world)
    name = job_name(name, config.run.directory)
    text = task(sky, recipe_text(recipe)[0], overrides, size, name)
    if is_dry:
        yield text.rstrip()
        return
    yield submit_sky(text, name, sky.secrets)
    yield "to follow it:"
    yield "  sky jobs queue"
    yield f"  sky jobs logs --name {name}"
    yield f"to stop it: sky jobs cancel --name {name}"
