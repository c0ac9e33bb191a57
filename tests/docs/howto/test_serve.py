"""docs/howto/serve.md: its first command runs, and the others are those that the export's model card has for this model."""

import re
import shutil
from pathlib import Path

from tests.docs.pages import commands_in, run_commands
from windlass.commands.models.model_card import IN_LLAMA_CPP
from windlass.model.families.family_table import FAMILIES

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "serve.md").read_text()


def test_its_commands_are_those_of_the_card(run, tmp_path, monkeypatch, capsys):
    (export,) = commands_in(PAGE)
    (tmp_path / "runs").mkdir()
    shutil.copytree(run, tmp_path / "runs" / "mine")
    run_commands([export], None, tmp_path, monkeypatch, capsys)
    card = (tmp_path / "runs/mine/export/README.md").read_text()
    of_the_card = re.findall(r"```sh\n(.*)\n```", card.split("## Serve it\n")[1].split("## Where it comes from\n")[0])
    commands = re.findall(r"^    ((?:vllm|python) .+)$", PAGE, re.M)
    vllm, of_the_hub, trained = (command.replace("runs/mine/export", '"PATH OR NAME"') for command in commands)
    assert [vllm, trained] == of_the_card, "a tokenizer that the run trained"
    assert of_the_hub == 'python convert_hf_to_gguf.py "PATH OR NAME" --outfile model.gguf'
    assert "They need vLLM and llama.cpp" in PAGE


def test_its_table_has_the_families_of_the_card_first():
    rows = [row.split(", ") for row in re.findall(r"^\| ([\w, ]+) \| [^|]+ \|$", PAGE, re.M)[1:]]
    names = [name for row in rows for name in row]
    assert len(names) == len(set(names)) and set(names) == set(FAMILIES) - {"qwen2"}, "qwen2 was not tried"
    assert {name for row in rows[:3] for name in row} == IN_LLAMA_CPP and "for the first three rows," in PAGE
