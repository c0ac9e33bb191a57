"""docs/howto/skypilot.md: its recipe loads, and its first command prints the task that it describes."""

from pathlib import Path

import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass.config import to_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "skypilot.md").read_text()


def test_its_first_command_prints_the_task(tmp_path, monkeypatch, capsys):
    """The second submits it: commands/launch/test_sky.py."""
    first, second = commands_in(PAGE)
    assert first == f"{second} --dry-run"
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, run={"tokens_per_step": 512})))
    tree["run"]["directory"], tree["data"]["directory"] = "mine", "shards"
    run_commands([first], tree | yaml.safe_load(recipe_in(PAGE)), tmp_path, monkeypatch, capsys)
    task = yaml.safe_load(capsys.readouterr().out)
    assert (task["num_nodes"], task["volumes"], task["resources"]["use_spot"]) == (2, {"/runs": "runs"}, True)
    assert "windlass launch nodes" in task["run"] and list(task["secrets"]) == ["AWS_SECRET_ACCESS_KEY"]
