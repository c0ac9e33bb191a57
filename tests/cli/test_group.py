"""Commands of a later version, and settings written as options, are answered in words."""

from pathlib import Path

import pytest

from windlass.cli import main as cli
from windlass.errors import UserError

RECIPE = """
run: {directory: runs/mine, steps: 1, tokens_per_step: 64}
model: {preset: gpt2-124m}
data: {sources: [{path: x.txt}], tokenizer: {train: 300}, sequence_length: 64, directory: data}
"""


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["train", "r.yaml", "--run.steps", "5"], "run.steps=5"),
        (["train", "r.yaml", "--optim.learning_rate=1e-4"], "optim.learning_rate=1e-4"),
        (["prepare", "r.yaml", "--data.tokenizer.train"], "data.tokenizer.train=VALUE"),
        (["verify", "r.yaml", "--checkpoint.async", "--run.steps", "5"], "checkpoint.async=VALUE"),
        (["doctor", "r.yaml", "--run.name="], "run.name="),
        (["launch", "nodes", "r.yaml", "--run.steps", "5"], "run.steps=5"),
        (["train", "r.yaml", "--learning-rate", "1e-4"], "optim.learning_rate=1e-4"),
        (["train", "r.yaml", "--sequence_length=64"], "data.sequence_length=64"),
    ],
)
def test_a_setting_with_dashes_is_answered_without(arguments, setting):
    with pytest.raises(UserError) as caught:
        cli.app(arguments, standalone_mode=False)
    assert caught.value.change == f"write {setting}"


@pytest.mark.parametrize(
    ("arguments", "given", "change"),
    [
        (["train", "--lr", "3", "r.yaml"], "windlass train --lr", "use optim.learning_rate=3"),
        (["train", "r.yaml", "--lr"], "windlass train --lr", "use optim.learning_rate=VALUE"),
        (["train", "--lr", "r.yaml"], "windlass train --lr", "use optim.learning_rate=VALUE"),
        (["train", "r.yaml", "--bf16"], "windlass train --bf16", "use precision.policy=bf16"),
        (
            ["train", "r.yaml", "--per_device_train_batch_size=4"],
            "windlass train --per_device_train_batch_size=4",
            "use run.micro_batch=4",
        ),
        (["train", "r.yaml", "--output_dir", "[x"], "windlass train --output_dir", "use run.directory=[x"),
        (["data", "lint", "r.yaml", "--seq-len", "4"], "windlass data lint --seq-len", "use data.sequence_length=4"),
        (["train", "r.yaml", "--resume"], "windlass train --resume", "remove it: the same command resumes"),
    ],
)
def test_another_tools_option_is_answered_with_our_setting(arguments, given, change):
    with pytest.raises(UserError) as caught:
        cli.app(arguments, standalone_mode=False)
    assert caught.value.given == given and caught.value.change.startswith(change)


@pytest.mark.parametrize(
    "arguments", [["status", "r.yaml"], ["report", "r.yaml"], ["export", "r.yaml", "out"], ["stacks", "r.yaml"]]
)
def test_a_recipe_in_the_place_of_its_run_is_answered_with_the_run(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Path("r.yaml")
    recipe.write_text(RECIPE)
    with pytest.raises(UserError) as caught:
        cli.app(arguments, standalone_mode=False)
    assert caught.value.given == "r.yaml is a recipe" and caught.value.change == "name runs/mine"
    recipe.write_text("run: {steps: many}")
    with pytest.raises(UserError, match=r"name what it calls run\.directory"):
        cli.app(arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "run", "--run.steps=5"], "No such option: --run.steps"),
        (["trian", "--run.steps=5"], "No such command"),
        (["train", "r.yaml", "--nonsense=5"], "No such option: --nonsense"),
        (["launch", "plan"], "No such command 'plan'"),
        (["report", "run", "--port", "99999"], "Invalid value for '--port': it is at most 65535"),
        (["import", "x.yaml", "--ranks", "0"], "Invalid value for '--ranks': it is at least 1"),
        (["report", "run", "--port", "many"], "Invalid value for '--port': it is a whole number"),
    ],
)
def test_a_command_without_settings_says_what_it_said(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.app(arguments)
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_the_shell_completes_behind_them(monkeypatch, capsys):
    monkeypatch.setenv("_WINDLASS_COMPLETE", "complete_bash")
    for line in ("windlass ", "windlass train r.yaml --run.steps 5 "):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
        with pytest.raises(SystemExit) as caught:
            cli.app(prog_name="windlass")
        assert caught.value.code == 0 and "rule" not in capsys.readouterr().out


def test_what_is_behind_two_dashes_is_no_setting(monkeypatch):
    monkeypatch.setattr("windlass.config.load_recipe", lambda recipe, *overrides: pytest.exit(f"{recipe} {overrides}"))
    with pytest.raises(pytest.exit.Exception, match=r"r\.yaml \('--run\.steps',\)"):
        cli.app(["prepare", "r.yaml", "--", "--run.steps"], standalone_mode=False)
