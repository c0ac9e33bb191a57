"""docs/howto/finetune.md: its recipe is taken, and its commands run, on a tiny model."""

import re
from pathlib import Path

import pytest
import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from tests.training.runs.test_chat_run import chat_recipe
from windlass.config import check_recipe, parse_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "finetune.md").read_text()
RECIPE, COMMANDS = recipe_in(PAGE), commands_in(PAGE)


def test_the_recipe_is_taken():
    config = parse_recipe(RECIPE)
    assert (config.adapter.kind, config.adapter.base, config.objective.kind) == ("lora", "plain", "sft")
    for snippet in re.findall(r"`(adapter|optim): (\{.*?\})`", PAGE):
        section, text = snippet
        tree = yaml.safe_load(RECIPE)
        check_recipe(tree | {section: tree[section] | yaml.safe_load(text)})


def test_the_commands_are_those_of_a_finetune():
    assert [command.split()[0] for command in COMMANDS] == [
        "train",
        "verify",
        "evaluate",
        "generate",
        "export",
        "export",
    ]


@pytest.mark.long
def test_the_commands_run(tmp_path, monkeypatch, capsys):
    chat_recipe(tmp_path)  # writes chats, and a tokenizer with a template
    tokenizer = next((tmp_path / "data").rglob("tokenizer_config.json")).parent
    tree = yaml.safe_load(RECIPE)
    tree["model"] = {"from": str(tiny.write_base(tmp_path / "base"))}
    tree["data"]["sources"][0] |= {"path": str(tmp_path / "chat.jsonl"), "too_long": "cut-prompt"}
    tree["data"] |= {"tokenizer": {"from": str(tokenizer)}, "sequence_length": 64, "validation": 0.1}
    tree["run"] |= {"tokens_per_step": 256}
    run_commands(COMMANDS, tree, tmp_path, monkeypatch, capsys)
    assert (tmp_path / "runs/chats/export/adapter_model.safetensors").is_file()
    assert (tmp_path / "merged/model.safetensors").is_file()
