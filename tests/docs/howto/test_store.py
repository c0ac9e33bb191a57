"""docs/howto/object-store.md: its command, run twice, ends the same on an empty machine, and its numbers are the code's."""

import shutil
from pathlib import Path

import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass.checkpoint import mirror
from windlass.checkpoint.config import CheckpointConfig
from windlass.config import to_yaml

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "object-store.md").read_text()


def test_the_same_command_on_an_empty_machine_goes_on_from_the_store(tmp_path, monkeypatch, capsys):
    given = yaml.safe_load(recipe_in(PAGE))["checkpoint"]
    store = given["remote"].replace("s3://bucket", f"file://{tmp_path}/bucket")
    every = given["every_steps"] // 125  # four steps: the run of a test is short
    monkeypatch.chdir(tmp_path)
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, "mine", checkpoint={"every_steps": every, "remote": store})))
    run_commands(commands_in(PAGE), tree, tmp_path, monkeypatch, capsys)
    losses = tiny.losses(tmp_path / "mine")
    shutil.rmtree(tmp_path / "mine")
    capsys.readouterr()
    longer = tree | {"run": tree["run"] | {"steps": tiny.STEPS + 2}}
    run_commands(commands_in(PAGE), longer, tmp_path, monkeypatch, capsys)
    shown = next(line.strip() for line in PAGE.splitlines() if ": fetching step-" in line)
    said = shown.replace(given["remote"], store).replace("step-00001500", f"step-{tiny.STEPS:08d}")
    assert said in capsys.readouterr().out.splitlines()
    found = tiny.losses(tmp_path / "mine")
    assert len(found) == tiny.STEPS + 2 and losses.items() <= found.items()


def test_its_numbers_and_names_are_the_codes():
    assert f"{mirror.DEADLINE_S:.0f} seconds and a second\n  per {mirror.BYTES_PER_S / (1 << 20):.0f} MiB" in PAGE
    kept = [name for name in ("keep_last", "keep_best", "keep_steps") if name in CheckpointConfig.model_fields]
    assert "`checkpoint.keep_last`, `keep_best` and `keep_steps`" in PAGE and len(kept) == 3
