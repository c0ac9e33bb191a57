"""Sources in fixed shares, in lanes: each lane has the shares, every sample comes once, and each host reads its own parts."""

import json

import numpy as np
import pytest

from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_lanes import LaneShares, MixedLanes, spread_over_lanes
from windlass.data.stream.mixture_shares import Shares, Stage

SIZES, SOURCES = [5, 7, 3, 4, 4, 6], [3, 2, 1]
OWNER = np.array([0, 0, 0, 1, 1, 2])
TOTALS = [15, 8, 6]
THREE = Stage(0, (0.5, 0.3, 0.2))
STAGES = [THREE, Stage(37, (0.0, 1.0, 2.0)), Stage(38, (0.0, 1.0, 1.0)), Stage(120, (1.0, 0.0, 0.5))]
GOLDEN = "14 41 12 51 53 22 42 21 00 55 02 32 10 40 13 50 52 15 43 16 01 33 03 54"  # shard and row of each


def order(stages=(THREE,), lanes=3, block=4, window=2, taken=None, own=None):
    """Three sources with shards of 5, 7, 3 / 4, 4 / 6 samples."""
    return MixedLanes(SIZES, SOURCES, LaneShares(stages, lanes, block, taken), seed=3, shuffle_window=window, own=own)


@pytest.mark.parametrize(("lanes", "block"), [(1, 1), (2, 3), (3, 4), (5, 7), (4, 100)])
def test_indices_and_counts_are_those_of_one_position_after_the_other(lanes, block):
    shares = LaneShares(STAGES, lanes, block)
    sources_N = OWNER[order(STAGES, lanes, block).take(0, 500)[:, 0]]
    seen, counted = [0] * lanes, np.zeros((lanes, 3), np.int64)
    for position, source in enumerate(sources_N.tolist()):
        assert [shares.index(position, lane) for lane in range(lanes)] == seen
        assert position % 7 or shares.taken(position).tolist() == counted.tolist()
        seen[position // block % lanes] += 1
        counted[position // block % lanes, source] += 1


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0), (5.0, 2.0, 1.0), (0.123457, 0.876543)])
@pytest.mark.parametrize(("lanes", "block"), [(2, 4), (4, 2), (8, 8), (16, 1)])
def test_each_lane_has_the_shares_and_so_has_every_stretch_of_the_stream(weights, lanes, block):
    shares, count = LaneShares([Stage(0, weights)], lanes, block), 4096
    exact_K = np.array(weights) / sum(weights)
    assert np.abs(shares.taken(count * lanes) - count * exact_K).max() <= 1, "where a lane begins in its pattern"
    batches = np.diff([shares.taken(batch * lanes * block).sum(0) for batch in range(200)], axis=0)
    whole = Shares([Stage(0, weights)])
    plain = np.diff([whole.taken(batch * lanes * block) for batch in range(200)], axis=0)
    off, without = (np.abs(one - lanes * block * exact_K).max() for one in (batches, plain))
    assert off <= 2.0 and without <= 2.0


def test_stages_begin_at_their_sample():
    sources_N = OWNER[order(STAGES).take(0, 400)[:, 0]]
    assert sorted(set(sources_N[:37].tolist())) == [0, 1, 2] and 0 not in sources_N[37:120] and 1 not in sources_N[120:]
    assert abs(np.bincount(sources_N[38:120], minlength=3)[1] - 41) <= 3


@pytest.mark.parametrize("window", [1, 2, 100])
@pytest.mark.parametrize(("lanes", "block"), [(1, 5), (2, 3), (3, 4), (6, 2)])
def test_every_epoch_of_a_source_holds_every_sample_once_in_another_order(lanes, block, window):
    rows_N2 = order(lanes=lanes, block=block, window=window).take(0, 2000)
    lanes_N = np.arange(2000) // block % lanes
    for source, total in enumerate(TOTALS):
        every = sorted((s, row) for s, size in enumerate(SIZES) if OWNER[s] == source for row in range(size))
        epochs = [[] for _ in range(4)]
        for lane in range(lanes):
            part = total * (lane + 1) // lanes - total * lane // lanes
            own = rows_N2[(lanes_N == lane) & (OWNER[rows_N2[:, 0]] == source)].tolist()
            for number, epoch in enumerate(epochs):
                epoch += map(tuple, own[number * part : (number + 1) * part])
        assert all(sorted(epoch) == every for epoch in epochs)
        assert len(set(map(tuple, epochs))) >= (3 if total > lanes else 1)


def test_any_slice_is_the_slice_of_the_whole():
    whole, one = order(STAGES).take(0, 400), order(STAGES)  # one object, asked forwards and backwards
    draw = np.random.default_rng(0)
    for start in draw.integers(0, 340, 80).tolist():
        count = int(draw.integers(0, 60))
        assert (one.take(start, count) == whole[start : start + count]).all()


def test_a_rank_is_given_its_own_places_and_no_others():
    whole = order(STAGES, lanes=4, block=4)
    for rank in range(8):
        own = order(STAGES, lanes=4, block=4, own=range(rank * 2, rank * 2 + 2))
        for step in (0, 1, 2, 3, 7, 8, 30, 100):
            found, wanted = own.take(16 * step, 16), whole.take(16 * step, 16)
            assert (found[rank * 2 : rank * 2 + 2] == wanted[rank * 2 : rank * 2 + 2]).all()
            assert (np.delete(found, [rank * 2, rank * 2 + 1], 0) == -1).all()


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_each_host_reads_its_part_of_each_source(hosts):
    """Two sources of 64 equal shards, 8 lanes, shares 3 : 1: in an epoch a host reads 64 / hosts of each, and the hosts all."""
    batch, stages = 64, [Stage(0, (3.0, 1.0))]
    laned = MixedLanes([128] * 128, [64, 64], LaneShares(stages, 8, batch // 8), 1, 2)
    plain = Mixture([128] * 128, [64, 64], Shares(stages), 1, 2)
    for source, end in ((0, 64 * 128 * 4 // 3 // batch * batch), (1, 64 * 128 * 4)):  # an epoch of it
        for mixed, each in ((laned, 64 // hosts), (plain, 64)):
            shards_N = mixed.take(0, end)[:, 0].reshape(-1, hosts, batch // hosts)
            touched = [set(shards_N[:, host].ravel().tolist()) for host in range(hosts)]
            touched = [{shard for shard in one if shard // 64 == source} for one in touched]
            assert [len(one) for one in touched] == [each] * hosts and len(set.union(*touched)) == 64


def test_parts_that_meet_inside_a_shard_cost_two_shards_more_per_lane():
    mixed = MixedLanes([100] * 30, [15, 15], LaneShares([Stage(0, (1.0, 1.0))], 4, 16), 1, 2)
    shards_N = mixed.take(0, 2944)[:, 0]  # a little less than an epoch
    for lane in range(4):
        own = set(shards_N[np.arange(2944) // 16 % 4 == lane].tolist())
        assert 2 * (15 // 4) <= len(own) <= 2 * (15 // 4 + 2)


def test_each_lane_goes_on_in_each_source_where_it_was_when_the_shares_change():
    plain, changed = order().take(0, 3000), order(STAGES).take(0, 900)
    of_plain, of_changed = (np.arange(len(places)) // 4 % 3 for places in (plain, changed))
    for source in range(3):
        for lane in range(3):
            own = changed[(of_changed == lane) & (OWNER[changed[:, 0]] == source)]
            before = plain[(of_plain == lane) & (OWNER[plain[:, 0]] == source)]
            assert len(own) >= 10 and (own == before[: len(own)]).all()


def test_what_makes_the_order_is_in_its_facts_and_in_checkpoints():
    taken = [[3, 1, 0], [2, 0, 1], [4, 1, 1]]
    first = order([Stage(37, (1.0, 1.0, 2.0)), *STAGES[3:]], taken=taken)
    facts, state = (json.loads(json.dumps(one)) for one in (first.facts(), first.state()))
    assert facts["lanes"] == state["lanes"] == [3, 4] and state["shares"] == {**facts["shares"], "sources": []}
    assert facts["shares"]["of_lanes"] == taken and facts["shares"]["taken"] == [9, 2, 2]
    shares = LaneShares(Shares.of(facts["shares"]).stages, *facts["lanes"], facts["shares"]["of_lanes"])
    again = MixedLanes(SIZES, facts["source_shards"], shares, facts["seed"], facts["shuffle_window"])
    assert (again.take(37, 300) == first.take(37, 300)).all()


def test_sums_are_spread_evenly():
    for lanes in (1, 3, 7):
        found = np.array(spread_over_lanes(np.array([0, 7, 100]), lanes))
        assert found.sum(0).tolist() == [0, 7, 100] and (found.max(0) - found.min(0) <= 1).all() and len(found) == lanes


def test_the_stream_is_what_it_was():
    places = order(STAGES).take(0, 24).tolist()
    assert " ".join(f"{shard}{row}" for shard, row in places) == GOLDEN
