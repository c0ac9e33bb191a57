"""docs/howto/text-to-chat.md: both recipes are trained and all commands run as they are written, at a small size."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import tiny
from tests.docs.pages import commands_in, run_commands
from windlass.config import parse_recipe
from windlass.model.flops import count_parameters

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "text-to-chat.md").read_text()
RECIPES = dict(re.findall(r"```yaml\n# (\S+)\n(.*?)```", PAGE, re.S))
SMALL = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}


def test_its_recipes_are_taken_and_the_base_has_the_parameters_that_it_says():
    base = parse_recipe(RECIPES["base.yaml"]).model.architecture(16384)
    rows = base.vocab_size * base.hidden_size
    assert f"{(count_parameters(base) - rows) / 1e6:.0f} million parameters beside the embedding" in PAGE


def test_its_finetune_of_few_chats_has_more_than_a_few_steps():
    """300 chats were two steps of 16,384 tokens, which taught nothing."""
    chat = parse_recipe(RECIPES["chat.yaml"])
    assert "300 short chats fill ten" in PAGE
    assert chat.run.epochs * 10 * chat.data.sequence_length // chat.run.tokens_per_step == 30


@pytest.mark.long
def test_text_becomes_a_model_that_chats(tmp_path, monkeypatch, capsys):
    tiny.write_corpus(tmp_path / "texts")
    rows = [{"messages": [{"role": "user", "content": f"Is rope {n} long?"}, {"role": "assistant", "content": f"Rope {n} is."}]}
            for n in range(200)]  # fmt: skip
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trees = {name: yaml.safe_load(text) for name, text in RECIPES.items()}
    trees["base.yaml"]["model"] |= SMALL
    trees["base.yaml"]["data"] |= {"tokenizer": {"train": 300}, "validation": 0.1}
    for name, tree in trees.items():
        tree["run"] |= {"epochs": 1, "tokens_per_step": 512}
        tree["data"] |= {"sequence_length": 64}
        (tmp_path / name).write_text(yaml.safe_dump(tree))
    commands = commands_in(PAGE)
    assert [command.split()[0] for command in commands] == (
        ["train", "generate", "export", "train", "evaluate", "generate", "export"]
    )
    run_commands(commands[:3], None, tmp_path, monkeypatch, capsys)
    (template,) = re.findall(r"```jinja\n(.*?)```", PAGE, re.S)
    (tmp_path / "base" / "chat_template.jinja").write_text(template)
    run_commands(commands[3:6], None, tmp_path, monkeypatch, capsys)
    done = subprocess.run(
        [sys.executable, "-m", "windlass", *commands[6].split()], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, ""), "nothing of what packages log while they are imported"
    assert done.stdout.startswith("chat: fp32; loads in transformers")

    from transformers import pipeline

    answer = pipeline("text-generation", str(tmp_path / "chat"))(rows[0]["messages"][:1], max_new_tokens=4)
    assert answer[0]["generated_text"][0] == rows[0]["messages"][0]
    assert answer[0]["generated_text"][1]["role"] == "assistant"
