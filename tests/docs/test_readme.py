"""README's recipe is one, and the commands that show its claims name files that are there."""

import re
import textwrap
from pathlib import Path

from windlass.config import load_recipe

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_recipe_of_the_readme_loads(tmp_path):
    (block,) = (part for part in re.findall(r"(?:^    .*\n|^\n)+", README, re.M) if "\n    model: " in part)
    (tmp_path / "readme.yaml").write_text(textwrap.dedent(block))
    recipe = load_recipe(tmp_path / "readme.yaml")
    assert len(recipe.data.sources) == 2 and recipe.data.isolate


def test_files_that_the_readme_names_exist():
    named = re.findall(r"(?:tests|benchmarks|scripts|recipes|docs|src)/[\w./-]+\w", README)
    assert len(named) > 20
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing
