"""The script of docs/howto/own-parts.md, whole, on one process; and resumed."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tiny
from windlass import UserError, export, load_recipe
from windlass.config import to_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "own-parts.md").read_text()
SCRIPT, FAMILY = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def run_script(folder):
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script_trains_with_its_parts_and_resumes(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    config = tiny.recipe(tmp_path, run={"steps": 4})
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    printed = run_script(tmp_path)
    assert "saved 4" in printed and re.search(r"learning rate +staircase", printed)
    parts = "objective LaterTokens, source Lowered, schedule staircase, sinks Table"
    (start, *_) = tiny.lines(config.run.directory)
    assert start["baselines"] == {}, "they are scored on every token, and this objective leaves some out"
    (*_, scored) = (line for line in tiny.lines(config.run.directory) if line["kind"] == "validation")
    assert scored["targets"] > 0 and scored["bits_per_byte"] is None
    assert start["derived"]["of the script"] == parts
    card = (export(config.run.directory).directory / "README.md").read_text()
    assert "trained from random weights by a script's objective `LaterTokens`." in card
    assert "| of the script | objective `LaterTokens`, source `Lowered`, schedule `staircase`, sinks `Table` |" in card
    longer = config.changed(run=config.run.changed(steps=8, accept_drift=["run.steps"]))
    (tmp_path / "recipe.yaml").write_text(to_yaml(longer))
    run_script(tmp_path)
    steps = [line for line in tiny.lines(config.run.directory) if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["learning_rate"] for line in steps[:4]] == [3e-3, 1.5e-3, 7.5e-4, 3.75e-4]
    assert {line["targets"] for line in steps} == {8 * (16 - 4)}
    rows = csv.reader((tmp_path / "numbers.csv").read_text().splitlines())
    losses = [(int(step), float(value)) for step, name, value in rows if name == "train/loss"]
    assert losses == [(line["step"], line["loss"]) for line in steps], "each step once, over both processes"


def test_a_family_of_the_scripts_own_is_trained_scored_and_exported(tmp_path):
    (tmp_path / "script.py").write_text(FAMILY)
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, run={"steps": 2})))
    tree["model"] = {"family": "house", "width": 32, "depth": 2}
    (tmp_path / "house.yaml").write_text(yaml.safe_dump(tree))
    printed = run_script(tmp_path)
    assert "of the script  family HouseFields" in printed and "nats per token" in printed
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "llama"
    with pytest.raises(UserError, match="house"):
        load_recipe(tmp_path / "house.yaml")
