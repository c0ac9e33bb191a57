"""The pages read first: their recipes are taken, their commands run on a tiny model, their figures are the code's."""

import re
from pathlib import Path

import pytest
import yaml

from tests import tiny
from tests.docs.pages import commands_in, recipe_in, run_commands
from windlass import errors, prepare, train
from windlass.config import RunConfig, load_recipe, parse_recipe, to_yaml
from windlass.model.flops import flops_per_token
from windlass.other_names.answers import answers
from windlass.other_names.renamed_keys import renamed_elsewhere, renamed_key_advice

DOCS = Path(__file__).parents[3] / "docs"
PAGES = {name: (DOCS / f"{name}.md").read_text() for name in (
    "howto/install", "howto/continue-a-model", "howto/resume", "howto/choose-a-layout", "howto/cost", "troubleshooting",
    "from/trainer", "from/fsdp1",
)}  # fmt: skip
SMALL = {"sequence_length": 32, "tokenizer": {"train": 300}, "validation": 0.1}


@pytest.mark.parametrize("name", ["howto/install", "howto/continue-a-model"])
def test_their_recipes_are_taken(name):
    assert parse_recipe(recipe_in(PAGES[name])).data.sources


@pytest.mark.long
def test_the_first_runs_commands(tmp_path, monkeypatch, capsys):
    commands = commands_in(PAGES["howto/install"])
    assert commands == [
        "doctor",
        "train demo run.steps=20 run.directory=runs/first",
        "train recipe.yaml --smoke",
        "train recipe.yaml",
        "report runs/gpt2",
    ]
    tiny.write_corpus(tmp_path / "corpus")
    tree = yaml.safe_load(recipe_in(PAGES["howto/install"]))
    tree["run"] |= {"steps": 2, "tokens_per_step": 256, "micro_batch": 2}
    tree["model"], tree["parallel"] = tiny.MODEL, {}
    tree["data"] |= SMALL
    run_commands(commands[2:], tree, tmp_path, monkeypatch, capsys)
    assert (tmp_path / "runs/gpt2/report.html").is_file()


@pytest.mark.long
def test_a_model_is_continued(tmp_path, monkeypatch, capsys):
    tree = yaml.safe_load(recipe_in(PAGES["howto/continue-a-model"]))
    prepare(tiny.recipe(tmp_path))  # trains a tokenizer of 300 ids
    tokenizer = str(next((tmp_path / "data").rglob("tokenizer_config.json")).parent)
    tree["run"] |= {"tokens": 2048, "tokens_per_step": 256, "micro_batch": 2}
    tree["model"] = {"from": str(tiny.write_base(tmp_path / "base"))}
    tree["data"] |= SMALL | {"sources": [{"path": str(tmp_path / "corpus")}], "tokenizer": {"from": tokenizer}}
    run_commands(commands_in(PAGES["howto/continue-a-model"]), tree, tmp_path, monkeypatch, capsys)
    assert (tmp_path / "runs/continued/export/model.safetensors").is_file()


def test_a_run_is_resumed_changed_and_branched_from(tmp_path, monkeypatch, capsys):
    tree = yaml.safe_load(to_yaml(tiny.recipe(tmp_path, checkpoint={"keep_last": 9})))
    tree["run"] |= {"directory": "runs/mine", "steps": 20}
    tree["optim"]["learning_rate"] = 1e-3
    commands = commands_in(PAGES["howto/resume"])
    assert len(commands) == 7
    run_commands(commands[:5], tree, tmp_path, monkeypatch, capsys)
    (refused,) = re.findall(r"^    windlass: (.+)$", PAGES["howto/resume"], re.M)
    with pytest.raises(errors.UserError) as caught:
        train(load_recipe(tmp_path / "recipe.yaml", "run.steps=40", "optim.learning_rate=5e-4"))
    assert caught.value.given == refused
    run_commands(commands[5:], tree, tmp_path, monkeypatch, capsys)
    assert [line["step"] for line in tiny.lines(tmp_path / "runs/branch") if line["kind"] == "step"] == list(
        range(1, 41)
    )


def test_settings_that_a_layout_is_chosen_by_are_keys():
    page = PAGES["howto/choose-a-layout"]
    named = re.findall(r"`(parallel|adapter|precision)(?:\.(\w+))?: ([^`]+)`", page)
    assert len(named) >= 9
    for section, key, text in named:
        given = {key} if key else yaml.safe_load(text).keys()
        assert given <= RunConfig.model_fields[section].annotation.model_fields.keys(), (section, given)


def test_costs_are_those_of_the_formula():
    rows = re.findall(r"^\| ([\w.-]+) \| ([\d.]+) \| (\d+) \| ([\d,]+) \$ \|$", PAGES["howto/cost"], re.M)
    assert len(rows) == 3
    for recipe, giga, hours, dollars in rows:
        flops = flops_per_token(load_recipe(recipe).model.architecture(), 4096).causal
        spent = 10e9 * flops / (989e12 * 0.4) / 3600
        assert (giga, hours, dollars) == (f"{flops / 1e9:.1f}", f"{spent:.0f}", f"{3 * spent:,.0f}")


def test_every_exit_code_is_in_the_table_of_troubleshooting():
    rows = {int(code) for code in re.findall(r"^\| (\d+) \| ", PAGES["troubleshooting"], re.M)}
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_") and name != "EXIT_SIGNAL"}
    assert rows == codes | {0}


SECTION = {"output_dir": "run", "save_steps": "checkpoint", "eval_steps": "evaluate"}


@pytest.mark.parametrize("page", ["from/trainer", "from/fsdp1"])
def test_the_tables_say_what_windlass_answers(page):
    rows = re.findall(r"^\| `(\w+): (\S+)` \| (?:`([^`]+)`|(nothing).*?)(?: \(.*\))? \|$", PAGES[page], re.M)
    assert len(rows) == PAGES[page].count("\n| `") >= 12
    for key, text, ours, _ in rows:
        value = yaml.safe_load(text)
        found = [
            *answers(key, value),
            renamed_key_advice(SECTION.get(key, ""), key, value),
            renamed_elsewhere(key, value),
        ]
        is_own = ours.partition("=")[0].rpartition(".")[2] == key
        assert is_own or any((ours or "remove it: ") in answer for answer in found), (key, found)
