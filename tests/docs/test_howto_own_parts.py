"""The script of docs/howto/own-parts.md, whole, on one process; and resumed."""

import csv
import re
import subprocess
import sys
from pathlib import Path

from tests import tiny
from windlass.config import to_yaml

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "own-parts.md").read_text()
SCRIPT = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]


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
    assert start["derived"]["of the script"] == parts
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
