"""Commands of a later version, and settings written as options, are answered in words."""

import pytest

from windlass.cli import main as cli
from windlass.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["train", "r.yaml", "--run.steps", "5"], "run.steps=5"),
        (["train", "r.yaml", "--optim.learning_rate=1e-4"], "optim.learning_rate=1e-4"),
        (["prepare", "r.yaml", "--data.tokenizer.train"], "data.tokenizer.train=VALUE"),
        (["verify", "r.yaml", "--checkpoint.async", "--run.steps", "5"], "checkpoint.async=VALUE"),
        (["doctor", "r.yaml", "--run.name="], "run.name="),
    ],
)
def test_a_setting_with_dashes_is_answered_without(arguments, setting):
    with pytest.raises(UserError) as caught:
        cli.app(arguments, standalone_mode=False)
    assert caught.value.change == f"write {setting}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "run", "--run.steps=5"], "No such option: --run.steps"),
        (["trian", "--run.steps=5"], "No such command"),
    ],
)
def test_a_command_without_settings_says_what_it_said(arguments, says, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.app(arguments)
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_the_shell_completes_behind_them(monkeypatch, capsys):
    monkeypatch.setenv("_WINDLASS_COMPLETE", "complete_bash")
    for line in ("windlass plan ", "windlass train r.yaml --run.steps 5 "):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
        with pytest.raises(SystemExit) as caught:
            cli.app(prog_name="windlass")
        assert caught.value.code == 0 and "rule" not in capsys.readouterr().out


def test_what_stands_behind_two_dashes_is_no_setting(monkeypatch):
    monkeypatch.setattr("windlass.config.load_recipe", lambda recipe, *overrides: pytest.exit(f"{recipe} {overrides}"))
    with pytest.raises(pytest.exit.Exception, match=r"r\.yaml \('--run\.steps',\)"):
        cli.app(["prepare", "r.yaml", "--", "--run.steps"], standalone_mode=False)
