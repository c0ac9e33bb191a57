"""docs/howto/flyte.md: its recipe loads, and its first command prints the pipeline that it describes."""

import json
from pathlib import Path

import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass.config import to_yaml
from windlass.flyte.page import EVERY_S

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "flyte.md").read_text()


def test_its_first_command_prints_the_pipeline(tmp_path, monkeypatch, capsys):
    """The second runs it here, in tests/flyte; the third needs a cluster."""
    first, local, submits = commands_in(PAGE)
    assert first == f"{submits} --dry-run" and local == f"{submits} --local"
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, run={"tokens_per_step": 1024}))) | {"checkpoint": {}}
    tree["run"]["directory"] = "mine"
    run_commands([first], tree | yaml.safe_load(recipe_in(PAGE)), tmp_path, monkeypatch, capsys)
    pipeline, _, inputs = capsys.readouterr().out.rpartition("# inputs: ")
    assert 'flyte.Resources(cpu=64, memory="512Gi", gpu="H200:8", shm="16Gi")' in pipeline
    assert "nproc_per_node=8" in pipeline and "@train_env.task(retries=10, report=True)" in pipeline
    assert len(pipeline.strip().splitlines()) <= 50 and "50\nlines long" in PAGE
    assert json.loads(inputs.partition("overrides=")[2]) == [] and f"at most once in {EVERY_S:.0f} seconds" in PAGE
