"""A stream in lanes: every sample once per epoch, from any place, and each host reads shards of its own."""

import numpy as np
import pytest

from windlass.data.stream.lane_order import LaneOrder
from windlass.data.stream.order import Order

UNEVEN = [5, 1, 7, 3, 3, 2, 6, 4, 9, 5, 5, 5, 2]


def places(order, start, count):
    return [tuple(place) for place in order.take(start, count).tolist()]


@pytest.mark.parametrize("window", [1, 2, 100])
@pytest.mark.parametrize(("lanes", "block"), [(1, 1), (2, 3), (3, 1), (5, 4), (13, 2), (4, 100)])
def test_every_epoch_holds_every_sample_once_in_another_order(lanes, block, window):
    every = sorted((shard, row) for shard, count in enumerate(UNEVEN) for row in range(count))
    order = LaneOrder(UNEVEN, 3, window, lanes, block)
    epochs = [places(order, epoch * len(every), len(every)) for epoch in range(3)]
    assert all(sorted(epoch) == every for epoch in epochs) and len(set(map(tuple, epochs))) == 3


def test_any_slice_is_the_slice_of_the_whole():
    whole = places(LaneOrder(UNEVEN, 5, 2, 3, 4), 0, 300)
    order = LaneOrder(UNEVEN, 5, 2, 3, 4)  # one object, asked forwards and backwards
    draw = np.random.default_rng(0)
    for start in draw.integers(0, 240, 60).tolist():
        count = int(draw.integers(0, 60))
        assert places(order, start, count) == whole[start : start + count]


def test_a_rank_is_given_its_own_places_and_no_others():
    whole = LaneOrder([64] * 12, 5, 2, 4, 4)
    for rank in range(8):
        own = LaneOrder([64] * 12, 5, 2, 4, 4, range(rank * 2, rank * 2 + 2))
        for step in (0, 1, 30, 47, 48, 100):
            found, wanted = own.take(16 * step, 16), whole.take(16 * step, 16)
            assert (found[rank * 2 : rank * 2 + 2] == wanted[rank * 2 : rank * 2 + 2]).all()
            assert (np.delete(found, [rank * 2, rank * 2 + 1], 0) == -1).all()


@pytest.mark.parametrize("hosts", [2, 4, 8])
def test_each_host_reads_its_part_of_the_shards_and_in_the_plain_order_all(hosts):
    """64 equal shards, 8 lanes: a host reads 64 / hosts in an epoch, and the hosts together all, each by one."""
    batch, samples = 64, [128] * 64
    touched = []
    for order in (LaneOrder(samples, 1, 2, 8, batch // 8), Order(samples, 1, 2)):
        shards_N = order.take(0, sum(samples))[:, 0].reshape(-1, hosts, batch // hosts)
        touched.append([set(shards_N[:, host].ravel().tolist()) for host in range(hosts)])
    assert [len(one) for one in touched[0]] == [64 // hosts] * hosts and len(set.union(*touched[0])) == 64
    assert [len(one) for one in touched[1]] == [64] * hosts


def test_uneven_shards_cost_a_host_the_ends_of_other_lanes_alone():
    """Lanes of 16 shards, one of them short: what is left of the others is less than a shard, out of their last windows."""
    samples = [128] * 63 + [5]
    shards_N = LaneOrder(samples, 1, 2, 4, 16).take(0, sum(samples))[:, 0]
    touched = [set(shards_N[np.arange(len(shards_N)) % 64 // 16 == host].tolist()) for host in range(4)]
    assert all(16 <= len(one) <= 16 + 3 * 2 for one in touched), touched


def test_a_batch_holds_samples_of_more_shards_than_in_the_plain_order():
    """What is permuted together: a window in the plain order, a window of each lane here."""
    samples = [128] * 64
    plain, lanes = (order.take(64 * 20, 64)[:, 0] for order in (Order(samples, 1, 2), LaneOrder(samples, 1, 2, 8, 8)))
    assert len(set(plain.tolist())) == 2 and len(set(lanes.tolist())) > 10


def test_each_window_of_each_lane_has_a_permutation_of_its_own():
    """With one permutation for all, ranks would read equal row numbers side by side: a share of 1 here, 1 in 128 by chance."""
    rows_N2 = LaneOrder([128] * 32, 7, 1, 4, 16).take(0, 128 * 32)
    of_lanes = [rows_N2[np.arange(len(rows_N2)) // 16 % 4 == lane, 1].reshape(-1, 128) for lane in range(4)]
    windows = np.concatenate(of_lanes)
    alike = [(one == two).mean() for at, one in enumerate(windows) for two in windows[:at]]
    assert len(alike) == 32 * 31 // 2 and max(alike) < 0.1


def test_what_makes_the_order_is_in_its_facts_and_in_checkpoints():
    order = LaneOrder(UNEVEN, 5, 2, 3, 4)
    assert order.facts() == {"seed": 5, "shuffle_window": 2, "lanes": [3, 4]} and order.state() == {"lanes": [3, 4]}
    facts = order.facts()
    again = LaneOrder(UNEVEN, facts["seed"], facts["shuffle_window"], *facts["lanes"])
    assert places(again, 30, 60) == places(order, 30, 60) != places(LaneOrder(UNEVEN, 5, 2, 3, 5), 30, 60)
