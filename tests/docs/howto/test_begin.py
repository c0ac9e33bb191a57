"""The commands of docs/howto/begin-a-recipe.md: each is run as it is written there."""

import shutil
from pathlib import Path

from tests.commands.recipes.test_new_recipe import FILES, write_texts
from tests.docs.pages import commands_in, run_commands
from windlass.config import load_recipe

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "begin-a-recipe.md").read_text()


def test_a_recipe_is_begun_and_trained_and_three_are_imported(tmp_path, monkeypatch, capsys):
    write_texts(tmp_path / "texts", 30)
    for name, file in (("axolotl", "axolotl-qlora"), ("factory", "llama-factory-lora"), ("tune", "torchtune-lora")):
        shutil.copy(FILES / f"{file}.yaml", tmp_path / f"{name}.yaml")
    commands = commands_in(PAGE)
    assert len(commands) == 5
    run_commands(commands, None, tmp_path, monkeypatch, capsys)
    printed = capsys.readouterr()
    for line in ("adapter: qlora -> ", "4 micro batch x 2 accumulation", "not mapped: optimizer paged_adamw_8bit: "):
        (quoted,) = [one.strip() for one in PAGE.splitlines() if one.strip().startswith(line)]
        assert quoted in printed.err
    assert load_recipe(tmp_path / "from-factory.yaml").run.tokens_per_step == 4 * 8 * 2048
