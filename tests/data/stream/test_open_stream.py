"""The door wraps the loader only in what the recipe asks for."""

import json

import pytest

from tests.data.shards.test_mds import write
from tests.data.streams import Mixed, open_bare
from windlass.data.packing import Borders
from windlass.data.shards.mds import Folder
from windlass.data.stream.growing_stream import GrowingStream, WrittenOrder
from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.loader import Loader
from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_lanes import MixedLanes
from windlass.data.stream.order import Order
from windlass.data.stream.skipping_stream import SkippingReader, SkippingStream
from windlass.errors import Unavailable, UserError

WRITTEN = {"first_epoch": "written"}
HALVES = Mixed([4, 4], [1.0, 1.0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight shards."""
    directory = tmp_path_factory.mktemp("door") / "train"
    write(directory, num_samples=100, num_ids=9, shard_bytes=1500)
    return Folder(directory)


@pytest.mark.parametrize(
    ("features", "sources", "orders"),
    [
        ({}, [Loader], [Order]),
        ({"shares": HALVES}, [Loader], [Mixture]),
        (WRITTEN, [GrowingStream, Loader], [WrittenOrder]),
        (
            {**WRITTEN, "shares": HALVES},
            [Loader],
            [Mixture],
        ),  # sources are written one after another: all must be there
        ({"lanes": 2}, [Loader], [LaneOrder]),
        ({"lanes": 2, "shares": HALVES}, [Loader], [MixedLanes]),
        ({"lanes": 2, "shares": HALVES, "limit": 1}, [SkippingStream, Loader], [SkippingReader, MixedLanes]),
        ({"limit": 1}, [SkippingStream, Loader], [SkippingReader, Order]),
        ({"limit": 1, **WRITTEN}, [SkippingStream, GrowingStream, Loader], [SkippingReader, WrittenOrder]),
        ({"limit": 1, "skipped": [[2, 6]]}, [SkippingStream, Loader], [SkippingReader, Order]),
    ],
)
def test_each_feature_is_one_layer(folder, features, sources, orders):
    source = open_bare(folder, 8, 2, 7, **features)
    source.close()
    layers = [source]
    while not isinstance(layers[-1], Loader):
        layers.append(getattr(layers[-1], "_source", None) or layers[-1]._loader)
    assert [type(layer) for layer in layers] == sources
    found = [layers[-1]._order]
    if isinstance(found[0], SkippingReader):
        found.append(found[0]._order)
    assert [type(order) for order in found] == orders


def test_what_a_checkpoint_keeps_is_what_each_layer_adds(folder):
    source = open_bare(folder, 8, 2, 7, consumed=6, limit=1, skipped=[[2, 4]], **WRITTEN)
    source.next()
    state = source.state()
    source.close()
    assert list(state) == ["samples_consumed", "read_from", "skipped"]
    assert state["samples_consumed"] == 8 and state["skipped"] == [[2, 4]] and state["read_from"]["num_shards"] == 2


def test_tensors_are_what_is_asked_for(folder):
    names = []
    for more in ({}, {"with_keys": True}, {"with_keys": True, "borders": Borders(0, 9)}):
        source = open_bare(folder, 8, 2, 7, **more)
        names.append(list(source.next()[0]))
        source.close()
    assert names == [
        ["input_ids", "targets"],
        ["input_ids", "targets", "keys"],
        ["input_ids", "targets", "documents", "keys"],
    ]


def test_all_features_at_once_give_the_samples_of_the_plain_stream(folder):
    """One loader reads all; four ranks of two micro-batches read their parts through all layers."""
    plain = open_bare(folder, 8, 2, 7, micro_batch=16, first_epoch="written")
    wanted = [plain.next()[0]["input_ids"].tolist() for _ in range(8)]
    plain.close()
    more = {"limit": 2, "borders": Borders(0, 9), "with_keys": True, **WRITTEN}
    ranks = [open_bare(folder, 8, 2, 7, 2, 2, rank, 4, **more) for rank in range(4)]
    found = [[row for rank in ranks for batch in rank.next() for row in batch["input_ids"].tolist()] for _ in range(8)]
    for rank in ranks:
        rank.close()
    assert found == wanted


@pytest.mark.parametrize(
    ("shares", "labels", "said"),
    [
        (HALVES, ["a/*.txt", "b/*.txt"], ["a/*.txt", "b/*.txt"]),
        (None, ["a/*.txt", "b/*.txt"], ["a/*.txt, b/*.txt"]),
    ],
)
def test_a_batch_that_does_not_come_names_shard_directory_and_source(folder, monkeypatch, shares, labels, said):
    source = open_bare(folder, 8, 2, 7, shares=shares, labels=labels, timeout_s=0.5)
    assert source.is_ready(60.0)
    monkeypatch.setattr(Loader, "is_ready", lambda *_: False)
    with pytest.raises(Unavailable) as caught:
        source.next()
    source._is_stuck = False  # its thread is well, and close waits for it
    source.close()
    given = caught.value.given
    assert given.startswith("rank 0 (batch rank 0 of 1) waited 0.5 s for samples 0 to 2 of the training stream")
    named = {shard.stored.name: k for k, shard in enumerate(source.shards) if shard.stored.name in given}
    assert named, given
    for name, number in named.items():
        assert f"{name} of here (source {said[0 if shares is None else number // 4]})" in given


def rows_of(source, batches):
    """The ids of each sample, in order; closes it."""
    found = [row for _ in range(batches) for row in source.next()[0]["input_ids"].tolist()]
    source.close()
    return found


def test_shares_change_at_their_sample_and_on_resume_and_sources_go_on(folder):
    """Two of three samples from the first half, from sample 9 on none, then, after a resume with other weights, half."""
    alone = [rows_of(open_bare(folder, 8, 2, 7, shares=Mixed([4, 4], weights)), 30) for weights in ([1, 0], [0, 1])]
    staged = Mixed([4, 4], [2.0, 1.0], [(9, [0.0, 1.0])])
    first = open_bare(folder, 8, 2, 7, shares=staged)
    found = [row for _ in range(6) for row in first.next()[0]["input_ids"].tolist()]
    state = json.loads(json.dumps(first.state()))
    first.close()
    same = open_bare(folder, 8, 2, 7, shares=staged, consumed=12, kept=state["shares"])
    whole = open_bare(folder, 8, 2, 7, shares=staged)
    assert same.entry()["shares"] == whole.entry()["shares"] and same.state() == {
        **whole.state(),
        "samples_consumed": 12,
    }
    assert found + rows_of(same, 6) == rows_of(whole, 12)
    said = []
    halves = open_bare(folder, 8, 2, 7, shares=HALVES, consumed=12, kept=state["shares"], log=said.append)
    again = open_bare(folder, 8, 2, 7, shares=HALVES, consumed=12, kept=halves.state()["shares"], log=said.append)
    assert halves.entry() == again.entry() and halves.entry()["shares"]["taken"] == [6, 6]
    again.close()
    found += rows_of(halves, 4)
    owners = [[], []]
    for row in found:
        owners[row in alone[1]].append(row)
    assert len(found) == 20 and owners == [alone[0][:10], alone[1][:10]]
    assert said == ["the shares change at sample 12: a continues at its sample 6, b continues at its sample 6"]


def test_a_source_with_other_shards_begins_anew(folder):
    before = open_bare(folder, 8, 2, 7, shares=HALVES)
    before.close()
    kept = before.state()["shares"]
    kept["sources"][1] = "another"
    source = open_bare(folder, 8, 2, 7, shares=HALVES, consumed=12, kept=kept)
    source.close()
    assert source.entry()["shares"] == {"stages": [[12, [1.0, 1.0]]], "taken": [6, 0]}


def test_lanes_give_each_rank_its_part_and_a_resume_keeps_the_block(folder):
    """Two lanes of batches of eight. With a batch of four from place 16 on, the stream is the same."""
    whole = rows_of(open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2), 12)
    ranks = [open_bare(folder, 8, 2, 7, 2, 2, rank, 2, lanes=2) for rank in range(2)]
    state = ranks[0].state()
    assert state == {"samples_consumed": 0, "lanes": [2, 4]} and ranks[0].entry()["lanes"] == [2, 4]
    halves = [[row for batch in rank.next() for row in batch["input_ids"].tolist()] for rank in ranks for _ in range(2)]
    for rank in ranks:
        rank.close()
    assert halves[0] + halves[2] + halves[1] + halves[3] == whole[:16]
    smaller = open_bare(folder, 8, 2, 7, micro_batch=4, lanes=2, consumed=16, kept_lanes=[2, 4])
    assert rows_of(smaller, 20) == whole[16:]
    skipping = open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2, limit=1)
    assert rows_of(skipping, 12) == whole


def test_lanes_of_a_mixture_give_each_rank_its_part_and_go_on_with_other_batches_and_shares(folder):
    """Two lanes of batches of eight, two of three samples from the first half; from place 24 on batches of four, then halves."""
    shares = Mixed([4, 4], [2.0, 1.0])
    whole = rows_of(open_bare(folder, 8, 2, 7, micro_batch=8, lanes=2, shares=shares), 12)
    ranks = [open_bare(folder, 8, 2, 7, 2, 2, rank, 2, lanes=2, shares=shares) for rank in range(2)]
    assert ranks[0].entry() == ranks[1].entry() and ranks[0].entry()["lanes"] == [2, 4]
    parts = [[row for batch in rank.next() for row in batch["input_ids"].tolist()] for _ in range(3) for rank in ranks]
    state = json.loads(json.dumps(ranks[1].state()))
    for rank in ranks:
        rank.close()
    assert sum(parts, []) == whole[:24] and state["samples_consumed"] == 24
    kept = {"consumed": 24, "kept": state["shares"], "kept_lanes": state["lanes"], "lanes": 2}
    assert rows_of(open_bare(folder, 8, 2, 7, micro_batch=4, shares=shares, **kept), 18) == whole[24:]
    skipping = open_bare(folder, 8, 2, 7, micro_batch=8, shares=shares, limit=1, **kept)
    assert rows_of(skipping, 9) == whole[24:]

    halves = open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **kept, log=lambda _: None)
    state = json.loads(json.dumps(halves.state()))
    assert state["shares"]["stages"] == [[24, [1.0, 1.0]]] and state["shares"]["taken"] == [16, 8]
    changed = rows_of(halves, 9)
    again = {**kept, "kept": state["shares"]}
    assert rows_of(open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **again), 9) == changed

    uneven = {**state["shares"], "of_lanes": [[9, 3], [7, 5]]}
    source = open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **{**kept, "kept": uneven})
    source.close()
    assert source.state()["shares"]["of_lanes"] == [[9, 3], [7, 5]], "of each lane, and not the half of the sum"
    source = open_bare(folder, 8, 2, 7, micro_batch=8, shares=HALVES, **{**kept, "kept": uneven, "lanes": 4})
    source.close()
    assert source.state()["shares"]["of_lanes"] == [[4, 2]] * 4 and source.state()["lanes"] == [4, 2]

    def of_lane(rows, lane, source):
        return [row for at, row in enumerate(rows) if at // 4 % 2 == lane and (row in first_half) == (source == 0)]

    first_half = rows_of(open_bare(folder, 8, 2, 7, shares=Mixed([4, 4], [1, 0])), 28)
    for lane, source in ((0, 0), (0, 1), (1, 0), (1, 1)):
        given, longer = of_lane(whole[:24] + changed, lane, source), of_lane(whole, lane, source)
        common = min(len(given), len(longer))
        assert common > 12 and given[:common] == longer[:common], "each lane goes on in each source"


def test_a_source_of_fewer_samples_than_lanes_is_refused(folder):
    with pytest.raises(UserError) as caught:
        open_bare(folder, 8, 2, 7, micro_batch=16, lanes=16, shares=Mixed([7, 1], [1.0, 1.0]))
    assert caught.value.given == "data.order.lanes=16, and source b has 2 samples"
    assert caught.value.change == "set data.order.lanes=2 or fewer, or leave the source out"


def test_more_lanes_than_shards_are_refused(folder):
    with pytest.raises(UserError) as caught:
        open_bare(folder, 8, 2, 7, micro_batch=16, lanes=16)
    assert caught.value.given == "data.order.lanes=16, and here/train has 8 shards"
