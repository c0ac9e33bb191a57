"""Models and what one process trains of them, made once for all cells of the matrix."""

import pytest

from tests.proof.matrix import References


@pytest.fixture(scope="session")
def references(tmp_path_factory, ranks):
    return References(tmp_path_factory.mktemp("references"), ranks)
