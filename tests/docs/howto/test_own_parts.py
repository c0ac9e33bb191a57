"""The scripts of docs/howto/own-*.md, whole, on one process; one of them resumed."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tiny
from windlass import UserError, export, load_recipe, train
from windlass.config import to_yaml

PAGES = Path(__file__).parents[3] / "docs" / "howto"


def write_script(folder, page):
    """script.py, as the page has it."""
    (script,) = re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)
    (folder / "script.py").write_text(script)


def run_script(folder):
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_page(tmp_path, page, printed=""):
    """The page's script on the tiny recipe -> the lines of its run."""
    write_script(tmp_path, page)
    config = tiny.recipe(tmp_path, run={"steps": 4})
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    assert printed in run_script(tmp_path)
    return config, tiny.lines(config.run.directory)


def of_kind(lines, kind):
    return [line for line in lines if line["kind"] == kind]


def test_an_objective_that_leaves_targets_out_has_neither_bits_per_byte_nor_baselines(tmp_path):
    config, (start, *lines) = run_page(tmp_path, "own-objective.md", "of the script  objective LaterTokens")
    assert {line["targets"] for line in of_kind(lines, "step")} == {8 * (16 - 4)}
    assert start["baselines"] == {}, "they are scored on every token, and this objective leaves some out"
    scored = of_kind(lines, "validation")[-1]
    assert scored["targets"] > 0 and scored["bits_per_byte"] is None
    card = (export(config.run.directory).directory / "README.md").read_text()
    assert "trained from random weights by a script's objective `LaterTokens`." in card
    assert "| of the script | objective `LaterTokens` |" in card


def test_a_source_changes_what_the_model_reads(tmp_path):
    _, (start, *lines) = run_page(tmp_path, "own-source.md")
    assert start["derived"]["of the script"] == "source Lowered"
    plain = tiny.recipe(tmp_path, "plain", run={"steps": 4})
    train(plain)
    steps = of_kind(tiny.lines(plain.run.directory), "step")
    assert [a["loss"] != b["loss"] for a, b in zip(of_kind(lines, "step"), steps, strict=True)] == [True] * 4


def test_a_schedule_gives_the_rate_of_each_step(tmp_path):
    _, (start, *lines) = run_page(tmp_path, "own-schedule.md")
    assert start["derived"]["of the script"] == "schedule staircase"
    assert [line["learning_rate"] for line in of_kind(lines, "step")] == [3e-3, 1.5e-3, 7.5e-4, 3.75e-4]


def test_a_sink_has_each_step_once_over_two_processes_and_a_listener_each_line(tmp_path):
    config, (start, *_) = run_page(tmp_path, "own-sink.md", "saved 4")
    assert start["derived"]["of the script"] == "sinks Table"
    longer = config.changed(run=config.run.changed(steps=8, accept_drift=["run.steps"]))
    (tmp_path / "recipe.yaml").write_text(to_yaml(longer))
    run_script(tmp_path)
    steps = of_kind(tiny.lines(config.run.directory), "step")
    assert [line["step"] for line in steps] == list(range(1, 9))
    rows = csv.reader((tmp_path / "numbers.csv").read_text().splitlines())
    losses = [(int(step), float(value)) for step, name, value in rows if name == "train/loss"]
    assert losses == [(line["step"], line["loss"]) for line in steps]


def test_a_family_of_the_scripts_own_is_trained_scored_and_exported(tmp_path):
    write_script(tmp_path, "own-family.md")
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, run={"steps": 2})))
    tree["model"] = {"family": "house", "width": 32, "depth": 2}
    (tmp_path / "house.yaml").write_text(yaml.safe_dump(tree))
    printed = run_script(tmp_path)
    assert "of the script  family HouseFields" in printed and "nats per token" in printed
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "llama"
    with pytest.raises(UserError, match="house"):
        load_recipe(tmp_path / "house.yaml")
