"""scripts/start_calls.py: what ranks ask for before they train, in real runs; and its counter on calls that are known."""

import io
import os

import pytest

from scripts import start_calls
from scripts.scale import apart


def test_calls_below_the_directory_are_counted_by_kind_and_path_and_others_are_not(tmp_path):
    (inside := tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "database").mkdir()
    real = open, io.open, os.open, os.stat, os.lstat, os.listdir, os.scandir
    with start_calls.counted(tmp_path / "data") as calls:
        (inside / "a").write_text("1")
        with open(inside / "a") as file:
            file.read()
        (inside / "a").stat()
        os.path.exists(inside / "b")
        list((tmp_path / "data").iterdir())
        (tmp_path / "database" / "a").write_text("1")
        os.listdir(tmp_path)
    assert {kind: dict(found) for kind, found in calls.items()} == {
        "open": {"train/a": 2}, "stat": {"train/a": 1, "train/b": 1}, "list": {".": 1},
    }  # fmt: skip
    assert (open, io.open, os.open, os.stat, os.lstat, os.listdir, os.scandir) == real


@pytest.mark.long
def test_the_first_rank_looks_at_every_shard_once_and_another_at_those_that_it_loads():
    few, many = (start_calls.directory(count, apart) for count in (64, 128))
    for row in (few, many):
        assert row["first_looks"] == row["shards"] and row["other_looks"] == 0
        assert 1 <= row["other_loads"] <= 4 and row["first_loads"] <= 60
    assert many["shards"] > few["shards"] + 60
    assert [few[name] for name in ("first_small", "other_small")] == [
        many[name] for name in ("first_small", "other_small")
    ]


@pytest.mark.long
def test_eight_ranks_of_a_host_fetch_each_shard_once_and_in_lanes_only_those_of_the_host():
    one, four = (start_calls.store(hosts, 64, apart) for hosts in (1, 4))
    assert one["fetches"] == one["shards_fetched"] == one["shards"]
    assert four["fetches"] == four["shards_fetched"] and one["shards"] / 4 <= four["shards_fetched"] < one["shards"] / 2
    for row in (one, four):
        assert row["listings"] == 1 and 11 <= row["small"] <= 8 * 4, "prepared.json by each rank, three small files"
