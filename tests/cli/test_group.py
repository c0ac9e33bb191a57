"""What is often tried and is not there is answered in words."""

import pytest

from windlass.cli import main as cli
from windlass.errors import UserError


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        (["train", "r.yaml", "--run.steps", "5"], "run.steps=5"),
        (["train", "r.yaml", "--optim.learning_rate=1e-4"], "optim.learning_rate=1e-4"),
        (["prepare", "r.yaml", "--data.tokenizer.train"], "data.tokenizer.train=VALUE"),
        (["evaluate", "run", "--a.b="], "a.b="),
    ],
)
def test_a_setting_with_dashes_is_answered_without(arguments, setting):
    with pytest.raises(UserError) as caught:
        cli.app(arguments, standalone_mode=False)
    assert caught.value.change == f"write {setting}"


def test_what_stands_behind_two_dashes_is_no_setting(monkeypatch):
    monkeypatch.setattr("windlass.config.load_recipe", lambda recipe, *overrides: pytest.exit(f"{recipe} {overrides}"))
    with pytest.raises(pytest.exit.Exception, match=r"r\.yaml \('--run\.steps',\)"):
        cli.app(["prepare", "r.yaml", "--", "--run.steps"], standalone_mode=False)
