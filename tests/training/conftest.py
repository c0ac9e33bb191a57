"""Runs that nobody interrupted, trained once for all that resume or read them."""

import pytest

from tests.training.resuming import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory, ranks):
    return Runs(tmp_path_factory.mktemp("runs"), ranks)
