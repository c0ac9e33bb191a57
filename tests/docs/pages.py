"""What tests of several pages of docs/howto share."""

import re
import shlex
import sys

import pytest
import yaml

from windlass.cli import main as cli


def recipe_in(page: str) -> str:
    """The first YAML block of a page."""
    return re.search(r"```yaml\n(.*?)```", page, re.S)[1]


def commands_in(page: str) -> list[str]:
    """Its indented lines that call windlass, without that word and without their comments."""
    return re.findall(r"^    windlass (.+?)(?:  +#.*)?$", page, re.M)


def run_commands(commands, tree, directory, monkeypatch, capsys) -> None:
    """Each in `directory`, in order, beside `tree`, where it is one, as recipe.yaml; all of them end with 0."""
    if tree is not None:
        (directory / "recipe.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(directory)
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["windlass", *shlex.split(command)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code in (0, None), (command, capsys.readouterr())
