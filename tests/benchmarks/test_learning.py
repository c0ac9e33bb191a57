"""What fewer bits cost: the recipes, the text, and a trial on a CPU."""

import json

import pytest
from learning import PRECISIONS, STEPS, main, make_cells, recipe_of, write_source_files

from windlass import parse_recipe


def test_runs_differ_in_their_precision_alone_but_for_one_seed():
    recipes = {name: recipe_of(name, tiny=False) for name in PRECISIONS}
    for recipe in recipes.values():
        recipe.pop("precision")
    seeds = {name: recipe["run"].pop("seed") for name, recipe in recipes.items()}
    assert [name for name, seed in seeds.items() if seed] == ["bf16, another seed"]
    assert all(recipe == recipes["fp32"] for recipe in recipes.values())
    assert len(make_cells(tiny=False)) == len(PRECISIONS)


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_recipe_is_one_that_windlass_takes(name):
    given = parse_recipe(json.dumps(recipe_of(name, tiny=False)))
    assert given.run.steps == STEPS and given.run.tokens_per_step == 8192


def test_text_is_that_of_the_files_in_the_order_of_their_paths(tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    for name, size in (("b.py", 600), ("a.py", 700), ("c.py", 800), ("small.py", 10), ("table.py", 300_000)):
        (packages / name).write_text(name[0] * size)
    assert write_source_files(tmp_path / "text.jsonl", packages, 1000) == 2
    rows = [json.loads(line)["text"] for line in (tmp_path / "text.jsonl").read_text().splitlines()]
    assert rows == ["a" * 700, "b" * 600]
    assert write_source_files(tmp_path / "text.jsonl", packages, 10**6) == 3


@pytest.mark.long
def test_a_trial_learns_and_is_held_against_fp32(tmp_path, capsys):
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--only", "^(fp32|bf16)$", "--out", str(out)]) == 0
    fp32, bf16 = (cell["result"] for cell in json.loads(out.read_text())["cells"])
    assert len(fp32["losses"]) == 20 and fp32["tokens"] == 19 * 8 * 64, "before the last step"
    assert fp32["losses"][-1] < fp32["losses"][0] and fp32["training"] == pytest.approx(
        sum(fp32["losses"][-4:]) / 4, abs=1e-4
    )
    assert 0 < abs(bf16["validation"] - fp32["validation"]) < 0.01
    assert "bf16" in capsys.readouterr().out
