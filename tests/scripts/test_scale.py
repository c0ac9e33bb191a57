"""scripts/scale.py: the counts of its rows in small worlds. What grows with the world, and what does not."""

import math
from pathlib import Path

import pytest

from scripts import scale
from windlass.model.architecture import parameter_shapes

SMALL = {**scale.LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
SMALL["num_key_value_heads"] = 1


def rows_of(*calls):
    return scale.apart(list(calls))


def test_a_cut_over_all_ranks_asks_for_a_piece_per_rank_and_tensor():
    few, many = rows_of((scale.plan, (2, "shard", SMALL)), (scale.plan, (8, "shard", SMALL)))
    tensors = 3 * len(parameter_shapes(scale.architecture_of(SMALL, 1)))
    assert (few["asked"], many["asked"]) == (2 * tensors, 8 * tensors)
    assert few["pieces"] == few["asked"] and many["pieces"] == many["asked"], "no piece is held twice"
    assert few["later_pieces"] == many["later_pieces"] == 0
    assert many["later_bytes"] == 4 * few["later_bytes"], "an entry per file, whatever is in it"
    assert many["plan_bytes"] > 20 * many["later_bytes"]


def test_replicas_ask_for_the_same_pieces_and_one_of_them_is_saved():
    one, two = rows_of((scale.plan, (8, "hosts", SMALL)), (scale.plan, (16, "hosts", SMALL)))
    assert two["pieces"] == one["pieces"] == one["asked"] and two["asked"] == 2 * one["asked"]


@pytest.mark.parametrize(("world", "kind"), [(8, "shard"), (16, "hosts"), (512, "shard")])
def test_the_pieces_of_a_whole_model_are_counted_from_its_shapes(world, kind):
    (row,) = rows_of((scale.plan, (world, kind, SMALL)))
    assert scale.pieces_of(scale.architecture_of(SMALL, 1), world, kind) == (row["pieces"], row["asked"])
    assert row["whole_pieces"][0] > row["pieces"]


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
