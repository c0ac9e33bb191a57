"""A trained tiny run and its export, made once for all tests that read them back."""

import pytest

from tests.jobs import tiny
from windlass.jobs.export import export


@pytest.fixture(scope="session")
def run(tmp_path_factory, ranks):
    """The directory of a finished run on two ranks, with a checkpoint at step 0 too."""
    config = tiny.recipe(tmp_path_factory.mktemp("saved"), "run", checkpoint={"keep_steps": [0]})
    ranks.run(2, tiny.train, config)
    return config.run.directory


@pytest.fixture(scope="session")
def exported(run):
    return export(run)
