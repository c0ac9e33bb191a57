"""One version: the package's, the distribution's and the one that `windlass` names."""

import tomllib
from pathlib import Path

import windlass
from windlass.version import __version__


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((Path(__file__).parents[1].parent / "pyproject.toml").read_text())["project"]
    assert project["version"] == __version__ == windlass.__version__
