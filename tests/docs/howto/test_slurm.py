"""docs/howto/slurm.md: its recipe loads, its script is the one that its first command submits."""

import re
from pathlib import Path

import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass.config import to_yaml
from windlass.launch.config import LaunchConfig
from windlass.launch.slurm import Size, train_script

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "slurm.md").read_text()
HOME = "/shared/ada"


def test_the_script_is_the_one_of_its_recipe_and_command():
    launch = LaunchConfig(**yaml.safe_load(recipe_in(PAGE))["launch"])
    text = train_script(launch, Size(2, 4, 4), Path(HOME, "runs/mine"), "mine", ["train", "recipe.yaml"])
    assert re.search(r"```bash\n(.*?)```", PAGE, re.S)[1] == text.replace(
        f"--chdir={Path.cwd()}\n", f"--chdir={HOME}\n"
    )


def test_its_first_command_prints_that_script(tmp_path, monkeypatch, capsys):
    """The second submits it, the third needs a run: commands/launch/test_slurm.py, commands/test_status.py. Those of SLURM itself
    are in launch/test_slurm_cluster.py."""
    commands = commands_in(PAGE)
    assert commands[0] == f"{commands[1]} --dry-run" and commands[2:] == ["status runs/mine"]
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, run={"tokens_per_step": 256}))) | yaml.safe_load(
        recipe_in(PAGE)
    )
    run_commands(commands[:1], tree, tmp_path, monkeypatch, capsys)
    assert "-m windlass train recipe.yaml\n" in capsys.readouterr().out
