"""docs/howto/preferences.md: its recipe is taken, and its commands run, on a tiny model."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests import tiny
from tests.training.test_chat_run import chat_recipe
from windlass.cli import main as cli
from windlass.config import parse_recipe

PAGE = (Path(__file__).parents[2] / "docs" / "howto" / "preferences.md").read_text()
RECIPE = re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1]
COMMANDS = re.findall(r"^    windlass (.+?)(?:  +#.*)?$", PAGE, re.M)


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
    say = [{"role": "user", "content": "wind"}]
    rows = [
        {
            "prompt": say,
            "chosen": [{"role": "assistant", "content": "rope"}],
            "rejected": [{"role": "assistant", "content": word}],
        }
        for word in ("anchor", "turn", "pull", "ship", "deck") * 8
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = yaml.safe_load(RECIPE)
    tree["model"] = {"from": str(tiny.write_base(tmp_path / "base"))}
    tree["data"] |= {"tokenizer": {"from": str(tokenizer)}, "sequence_length": 32}
    tree["run"] |= {"tokens_per_step": 256}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        monkeypatch.setattr(sys, "argv", ["windlass", *shlex.split(command)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code in (0, None), (command, capsys.readouterr())
    assert (tmp_path / "runs/pairs/export/adapter_model.safetensors").is_file()
