"""One pool of gloo ranks for the whole session: torch is imported once, and every multi-rank case reuses the ranks."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long matrices too (make test-all)")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="long: runs in `make test-all`")
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(world, function, *args)` runs an importable function on `world` gloo ranks; returns one result per rank."""
    from windlass.proof.pool import Ranks

    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory, ranks):
    """The directory of a finished run on two ranks, with a checkpoint at step 0 too: trained once for all that read it back."""
    from tests import tiny

    config = tiny.recipe(tmp_path_factory.mktemp("saved"), "run", checkpoint={"keep_steps": [0]})
    ranks.run(2, tiny.train, config)
    return config.run.directory


@pytest.fixture(scope="session")
def exported(run):
    from windlass.commands.export import export

    return export(run)
