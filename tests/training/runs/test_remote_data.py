"""A run whose shards are in an S3 store is the local run; its events prove which samples it consumed."""

import os
import random

import numpy as np
import pytest

from tests import tiny
from windlass.data.prepare.manifest import open_prepared
from windlass.data.shards.mds import Reader
from windlass.data.stream.ledger import consumed_samples, spans
from windlass.proof.pool import RankFailed
from windlass.report.events import read_events

WORLD = 2


def train(environment, config, kill=None):
    """On one rank of the pool, which was started without the credentials."""
    os.environ.update(environment)
    try:
        return tiny.train(config, kill)
    finally:
        for name in environment:
            del os.environ[name]


def remote_recipe(base, url, name, cache):
    place = {"directory": url, "cache": {"directory": str(cache), "limit_mib": 8, "deadline_s": 30}}
    return tiny.recipe(base, name, data=place)


@pytest.mark.long
def test_a_run_from_a_store_killed_and_resumed_is_the_local_run(base, ranks, s3_session, s3_place, tmp_path):
    local = tiny.recipe(base, "local")
    expected = ranks.run(WORLD, tiny.train, local)
    config = remote_recipe(base, s3_place[0], "remote", tmp_path / "cache")
    kill = (random.Random(5).randrange(WORLD), 5)
    with pytest.raises(RankFailed):
        ranks.run(WORLD, train, s3_session[0], config, kill)
    ranks.run(WORLD, train, s3_session[0], config)
    assert tiny.losses(config.run.directory) == tiny.losses(local.run.directory)
    prove(config, expected)
    prove(local, expected)


def prove(config, expected):
    """The ledger of the run expands to the rows that the uninterrupted run's ranks were given."""
    given = [row for step in range(tiny.STEPS) for result in expected for row in result["rows"][step]]
    reader = Reader(open_prepared(config.data, config.evaluate.sets).shards("train"))
    found = spans(read_events(config.run.directory / "events.jsonl"))
    proved = [reader.read(shard, row)[0][:-1].tolist() for shard, row in consumed_samples(found, reader.shards)]
    assert len(given) == tiny.STEPS * config.sequences_per_step and np.array_equal(proved, given)
