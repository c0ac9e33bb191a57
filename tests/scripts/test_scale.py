"""scripts/scale.py: the counts of its rows in small worlds. What grows with the world, and what does not."""

import json
import math
from pathlib import Path

import pytest

from scripts import scale
from windlass.model.architecture import parameter_shapes

SMALL = {**scale.LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
SMALL["num_key_value_heads"] = 1


def rows_of(*calls):
    return scale.apart(list(calls))


def test_what_a_plan_and_the_index_hold_does_not_grow_with_the_ranks():
    few, many = rows_of((scale.plan, (8, "shard", SMALL, 1)), (scale.plan, (32, "shard", SMALL, 1)))
    tensors = 3 * len(parameter_shapes(scale.architecture_of(SMALL, 1)))
    assert (few["tensors"], many["tensors"]) == (tensors, tensors) and (few["files"], many["files"]) == (8, 32)
    assert (few["boxes"], many["boxes"]) == (8 * tensors, 32 * tensors), "a box per rank and tensor"
    assert few["grids"] == many["grids"] == tensors, "a grid per tensor"
    assert abs(few["index_bytes"] - many["index_bytes"]) < 5 * tensors, "numbers of two digits"
    assert 1.5 < many["plan_bytes"] / few["plan_bytes"] < 1.8, "rank 0 hears of 5 ranks and of 3"
    assert many["later_bytes"] == pytest.approx(4 * few["later_bytes"], rel=0.02), (
        "an entry per file, whatever is in it"
    )


def test_rows_that_ranks_do_not_divide_are_two_grids():
    """1,001 rows on 512 ranks: 500 have two, one has one, 11 have none."""
    uneven = {**SMALL, "intermediate_size": 1001}
    (row,) = rows_of((scale.plan, (512, "shard", uneven, 1)))
    shapes = parameter_shapes(scale.architecture_of(uneven, 1)).values()
    assert row["boxes"] == 3 * sum(-(-shape[0] // -(-shape[0] // 512)) for shape in shapes)
    assert row["grids"] == 3 * (len(shapes) + 2), "of the gate and of what goes up"


def test_replicas_hold_the_same_boxes_and_one_of_them_is_saved():
    one, two = rows_of((scale.plan, (8, "hosts", SMALL, 1)), (scale.plan, (16, "hosts", SMALL, 1)))
    assert (one["boxes"], one["grids"]) == (two["boxes"], two["grids"]) and (one["files"], two["files"]) == (8, 16)


def test_a_host_takes_its_share_of_the_samples_and_touches_most_shards(monkeypatch):
    monkeypatch.setattr(scale, "SHARDS", 32)
    monkeypatch.setattr(scale, "SAMPLES", 64)
    one, many = scale.stream(8), scale.stream(256)
    assert (one["samples_read"], many["samples_read"]) == (32 * 64, 32 * 64 // 32)
    assert one["shards_touched"] == 32 and 16 < many["shards_touched"] <= 32


def test_in_lanes_a_host_reads_its_part_of_the_shards_and_in_the_plain_order_all(monkeypatch):
    """64 hosts of 8 ranks, 128 shards of 1,024 samples of 4,096 tokens: of two shards each, windows of eight."""
    monkeypatch.setattr(scale, "TRILLION", 128 * 1024 * 4096)
    row = scale.reading(512)
    assert (row["hosts"], row["shards"], row["plain"], row["lanes"]) == (64, 128, 128, 2)
    assert (row["plain_gb"], row["lanes_gb"]) == (1.1, 0.0), "128 and 2 files of 8.4 MB"


def test_the_program_of_a_rank_is_built_in_any_world():
    rows = rows_of((scale.build, (8, "shard")), (scale.build, (4096, "hosts")))
    assert [(row["ranks"], row["parameters"]) for row in rows] == [(8, 12), (4096, 12)]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts in /proc")
@pytest.mark.parametrize(
    "world", [2, 4, pytest.param(8, marks=pytest.mark.long), pytest.param(16, marks=pytest.mark.long)]
)
def test_sockets_and_requests_of_a_real_world(world):
    row = scale.real(world)
    log = math.ceil(math.log2(world))
    assert row["host_sockets"] <= 2 * log + 20
    assert row["host_sockets"] == 2 * log + 8, "two trees; a socket that listens per group; the store"
    assert row["cpu_sockets"] == (2 * log + 12 if world > 2 else 12), "and the two neighbours of a ring, in two groups"
    assert row["start_requests"] <= 4 * log + 12
    assert row["served"] == world + 1, "a socket that listens, and one per rank"
    assert (row["asking"], row["step_requests"]) == (1, 1.0), "one rank of a host asks, once a step"


def test_start_up_of_1t_tokens_is_a_look_per_shard_on_one_rank_and_the_small_files_on_all():
    counted = {"first_small": 27, "other_small": 15}
    row = scale.started({"what": "reading", "shards": 1000}, counted)
    assert (row["start_first"], row["start_other"], row["shards"]) == (1000 + 27 + 7 * 15, 8 * 15, 1000)


def test_the_kept_rows_of_1t_tokens_follow_from_those_that_were_counted():
    rows = json.loads(scale.RESULTS.read_text())["rows"]
    counted = [row for row in rows if row["what"] == "start"]
    assert [(row["first_looks"], row["other_looks"]) for row in counted] == [(row["shards"], 0) for row in counted]
    assert len(counted) == 2 and len({(row["first_small"], row["other_small"]) for row in counted}) == 1
    reading = [row for row in rows if row["what"] == "reading"]
    assert len(reading) == 2 and [scale.started(row, counted[-1]) for row in reading] == reading
    fetched = [(row["shards_fetched"], row["fetches"]) for row in rows if row["what"] == "host"]
    assert len(fetched) == 2 and all(shards == fetches for shards, fetches in fetched)
