"""The distribution is windlass-lm: a bare `pip install windlass` brings another project."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from windlass.commands.models.export_adapter import load_with_peft
from windlass.errors import UserError

ROOT = Path(__file__).parents[2]
BARE = re.compile(r"pip3? install [^\n`]*?(?<![\w./-])windlass(?![-\w./])")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files():
    folders = [
        path for name in ("docs", "src", "scripts", "recipes", "benchmarks") for path in (ROOT / name).rglob("*")
    ]
    named = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Containerfile", "Makefile", "pyproject.toml", ".ci/run")
    for path in [*folders, *(ROOT / name for name in named)]:
        if path.is_file() and path.suffix not in (".pyc", ".png", ".svg"):
            yield path


def test_no_page_and_no_message_installs_another_project():
    found = [
        (path.name, line) for path in files() for line in path.read_text("utf-8").splitlines() if BARE.search(line)
    ]
    assert not found


def test_the_pattern_finds_what_it_is_for():
    assert all(
        map(BARE.search, ("pip install windlass", "pip install -U 'windlass[s3]'", "x: pip install windlass==1"))
    )
    assert not any(
        map(BARE.search, ("pip install 'windlass-lm[s3]'", "pip install .", "cd windlass && pip install -e ."))
    )


def test_extras_that_are_named_exist():
    named = {
        extra
        for path in files()
        for extras in re.findall(r"(?:windlass-lm|\.)\[([\w,-]+)\]\'", path.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert PROJECT["name"] == "windlass-lm" and named
    assert named <= set(PROJECT["optional-dependencies"]), named


def test_the_export_of_an_adapter_names_its_extra_on_every_page(monkeypatch):
    """In README it could be read as optional, and the message was the first to name it: after the training."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="an adapter is exported, and peft is not installed") as caught:
        load_with_peft(ROOT, ROOT, None)
    install = "pip install 'windlass-lm[peft]'"
    assert caught.value.change == f"{install}, or export the merged model with --merge"
    for page in ("README.md", "docs/howto/finetune.md"):
        lines = [line for line in (ROOT / page).read_text().splitlines() if "# PEFT's adapter" in line]
        assert len(lines) == 1 and install in lines[0], page
