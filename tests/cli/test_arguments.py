"""An argument that is another one's: what it is, and what to write instead."""

import pytest

from windlass.cli import main as cli
from windlass.cli.arguments import check_overrides, check_recipe_file, check_run_argument
from windlass.errors import UserError


def refused(arguments):
    with pytest.raises(UserError) as caught:
        cli.app(arguments, standalone_mode=False)
    return caught.value


@pytest.mark.parametrize("name", ["my chats.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_data_in_place_of_a_recipe_is_answered_with_init(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert check_recipe_file(name) == name, "what is not there is answered by the reader of recipes"
    (tmp_path / name).touch()
    error = refused(["train", name])
    assert error.given == f"{name} is a file of data"
    assert error.change == f"windlass init --data {name!r} writes a recipe for it".replace("'", "'" * (" " in name))
    (tmp_path / "recipe.json").touch()
    assert check_recipe_file("recipe.json") == "recipe.json", "JSON is YAML"


def test_a_value_that_the_shell_has_split_is_answered_with_its_quotes():
    words = ["run.steps=5", "data.sources=[{path:", "a,", "weight:", "2}]", "run.seed=1"]
    error = refused(["train", "demo", *words])
    assert error.given == "data.sources=[{path: and 3 words after it" and "splits" in error.rule
    assert error.change == "put it into quotes: 'data.sources=[{path: a, weight: 2}]'"


@pytest.mark.parametrize("words", [[], ["data.sources=[{path: x}]"], ["a.b=[", "c.d=1"], ["a.b=]"], ["a.b=1", "[x]"]])
def test_other_words_are_left_to_the_recipe(words):
    assert check_overrides(words) == words


def test_a_folder_of_runs_is_answered_with_the_runs_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        (tmp_path / f"runs/{number}").mkdir(parents=True)
        (tmp_path / f"runs/{number}/events.jsonl").touch()
    for arguments in (["report", "runs"], ["generate", "runs"], ["status", "runs"]):
        error = refused(arguments)
        assert error.given == "runs is a folder of runs"
        names = "runs/0, runs/1, runs/2, runs/3, and 2 more"
        assert error.change == f"name one of {names}; `windlass runs runs` lists them"
    assert check_run_argument(tmp_path / "runs/1") == tmp_path / "runs/1"
    (tmp_path / "runs/events.jsonl").touch()
    assert check_run_argument(tmp_path / "runs") == tmp_path / "runs", "a run with runs in it is one"


def test_hugging_faces_name_of_the_longest_continuation_is_ours_too(monkeypatch, tmp_path):
    from windlass.commands.models import generate as room

    asked = []
    monkeypatch.setattr(room, "generate", lambda path, given, sampling, **more: asked.append(sampling) or [""])
    for option in ("--max-tokens", "--max-new-tokens"):
        cli.app(["generate", str(tmp_path), option, "7"], standalone_mode=False)
    assert [one.max_tokens for one in asked] == [7, 7]
