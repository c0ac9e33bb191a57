"""Runs that nobody interrupted, trained once for all that resume or read them; and where all runs of the folder are."""

import pytest

from tests.training.runs.resuming import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory, ranks):
    return Runs(tmp_path_factory.mktemp("runs"), ranks)


@pytest.fixture(scope="session")
def base(runs):
    """A directory whose corpus and prepared data all runs below it share; their names differ."""
    return runs.base
