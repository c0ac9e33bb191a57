"""docs/howto/preferences.md: its recipe is taken, and its commands run, on a tiny model."""

import json
from pathlib import Path

import pytest
import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from tests.training.runs.test_chat_run import chat_recipe
from windlass.config import parse_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "preferences.md").read_text()
RECIPE, COMMANDS = recipe_in(PAGE), commands_in(PAGE)


def test_the_recipe_is_taken():
    config = parse_recipe(RECIPE)
    assert config.objective.preference_loss == "sigmoid" and not config.keeps_reference
    assert config.samples_per_step == 8, "as the page says"


def test_the_commands_are_those_of_preferences():
    assert [command.split()[0] for command in COMMANDS] == ["train", "verify", "evaluate", "export"]


@pytest.mark.long
def test_the_commands_run(tmp_path, monkeypatch, capsys):
    chat_recipe(tmp_path)  # writes a tokenizer with a template
    tokenizer = next((tmp_path / "data").rglob("tokenizer_config.json")).parent
    say, answer = [{"role": "user", "content": "wind"}], {"role": "assistant", "content": "rope"}
    words = [f"{word} {number}" for number in range(8) for word in ("anchor", "turn", "pull", "ship", "deck")]
    rows = [{"prompt": say, "chosen": [answer], "rejected": [answer | {"content": word}]} for word in words]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = yaml.safe_load(RECIPE)
    tree["model"] = {"from": str(tiny.write_base(tmp_path / "base"))}
    tree["data"] |= {"tokenizer": {"from": str(tokenizer)}, "sequence_length": 32, "validation": 0.2}
    tree["run"] |= {"tokens_per_step": 256}
    run_commands(COMMANDS, tree, tmp_path, monkeypatch, capsys)
    assert (tmp_path / "runs/pairs/export/adapter_model.safetensors").is_file()
