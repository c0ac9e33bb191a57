"""A folder that is split already keeps its split in a new recipe."""

import json

import pytest

from tests.commands.command_line import run_command
from tests.commands.recipes.test_new_recipe import ROWS
from windlass.commands.recipes.new_recipe import init
from windlass.config import load_recipe
from windlass.data.held_out import HeldOutConfig
from windlass.units import counted


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "names", [["train.txt", "validation.txt"], ["train-0.txt", "train-1.txt", "valid.txt", "test.txt"]]
)
def test_a_folder_that_is_split_is_trained_on_by_its_training_files(here, names, monkeypatch, capsys):
    """validation.txt was training text, and the end of one of the files was held out."""
    (here / "texts").mkdir()
    for name in [*names, ".hidden"]:
        (here / "texts" / name).write_text(f"{name} wind and rope " * 400)
    code, done = run_command(["init", "--data", "texts/", "--steps", "1", "-o", "r.yaml"], monkeypatch, capsys)
    means = "texts/val*, not trained on" + "; texts/test* is not read" * ("test.txt" in names)
    assert code == 0 and done.out.splitlines()[0] == f"data.validation: {means}"
    assert f"# {means}\n" in (here / "r.yaml").read_text()
    data = load_recipe(here / "r.yaml").data
    assert ([source.path for source in data.sources], data.validation.path) == (["texts/train*"], "texts/val*")
    code, done = run_command(["prepare", "r.yaml"], monkeypatch, capsys)
    assert code == 0 and "validation: 1 document," in done.out, done.err
    assert f"train: {counted(len(names) - 1 - ('test.txt' in names), 'document')}," in done.out


@pytest.mark.parametrize(
    "names", [["train.txt", "test.txt"], ["validation.txt"], ["train.txt", "validation.txt", "more.txt"]]
)
def test_any_other_folder_is_one_source(here, names):
    (here / "texts").mkdir()
    for name in names:
        (here / "texts" / name).write_text("wind and rope " * 400)
    assert init(here / "r.yaml", "texts", "small", 1, None, None)[0] == []
    data = load_recipe(here / "r.yaml").data
    assert ([source.path for source in data.sources], type(data.validation)) == (["texts"], HeldOutConfig)


def test_validation_rows_are_read_as_the_training_rows_are(here):
    (here / "rows").mkdir()
    for name in ("train", "valid"):
        (here / f"rows/{name}.jsonl").write_text(json.dumps(ROWS["sft"]))
    init(here / "r.yaml", "rows", "some/model", None, None, None)
    recipe = load_recipe(here / "r.yaml")
    assert (recipe.objective.kind, recipe.data.sources[0].path) == ("sft", "rows/train*")
    assert (recipe.data.validation.format, recipe.data.validation.too_long) == ("chat", "drop")
