"""The stream is arithmetic: every sample once per epoch, the same from any place, shuffled and local."""

import numpy as np
import pytest

from windlass.data.stream.order import Order

UNEVEN = [5, 1, 7, 3, 3, 2, 6]


def stream(shard_samples, seed, window, start, count):
    return [tuple(place) for place in Order(shard_samples, seed, window).take(start, count).tolist()]


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("shard_samples", [[1], [4], UNEVEN])
def test_every_epoch_holds_every_sample_once(shard_samples, window):
    every = sorted((shard, row) for shard, count in enumerate(shard_samples) for row in range(count))
    total = len(every)
    for epoch in range(4):
        assert sorted(stream(shard_samples, 3, window, epoch * total, total)) == every


@pytest.mark.parametrize("window", [1, 3, 100])
def test_any_piece_is_the_piece_of_the_whole(window):
    whole = stream(UNEVEN, 5, window, 0, 200)
    order = Order(UNEVEN, 5, window)  # one object, asked forwards and backwards
    draw = np.random.default_rng(0)
    for start in draw.integers(0, 150, 60).tolist():
        count = int(draw.integers(0, 50))
        assert [tuple(place) for place in order.take(start, count).tolist()] == whole[start : start + count]


def test_samples_are_permuted_inside_windows_of_whole_shards():
    """With equal shards of 10 and windows of 4 shards, every 40 places hold 4 whole shards and nothing else."""
    places = stream([10] * 20, 1, 4, 200, 200)  # epoch 1
    for at in range(0, 200, 40):
        window = places[at : at + 40]
        shards = {shard for shard, _ in window}
        assert len(shards) == 4 and sorted(window) == sorted((shard, row) for shard in shards for row in range(10))
        assert len({shard for shard, _ in window[:10]}) > 1  # and not one shard behind the other


def test_epochs_and_seeds_and_windows_are_shuffled_differently():
    many = [10] * 20
    epochs = [stream(many, 0, 4, epoch * 200, 200) for epoch in range(3)]
    others = [stream(many, seed, 4, 0, 200) for seed in (1, 2**63 + 1, 2**64 - 1)]
    found = [tuple(order) for order in [*epochs, *others]]
    assert len(set(found)) == len(found) and sorted(epochs[0]) not in epochs
    first_windows = [np.argsort([10 * s + r for s, r in epochs[0][at : at + 40]]).tolist() for at in (0, 40, 80)]
    assert len({tuple(window) for window in first_windows}) == 3


def test_the_shuffle_is_uniform_enough():
    """Where one of 8 samples is, over 4000 epochs: chi-square with 7 degrees of freedom, 99.9 % at 24.3."""
    order = Order([8], 11, 1)
    places = np.array([order.take(8 * epoch, 8)[:, 1].tolist().index(0) for epoch in range(4000)])
    counts = np.bincount(places, minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 24.3


def test_the_order_never_changes():
    """Golden: a run resumed by a later version must see the same stream."""
    assert stream([3, 2, 4], 17, 2, 0, 12) == [
        (0, 1),
        (2, 3),
        (2, 1),
        (2, 0),
        (2, 2),
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 1),
        (0, 2),
        (1, 1),
        (0, 0),
    ]


def test_no_more_than_one_window_is_held():
    order = Order([1000] * 50, 0, 2)
    order.take(0, 10_000)
    assert len(order._windows._rows_N2) == 2000


def written_order(shard_samples, window=3, is_complete=True, seed=5):
    return Order(shard_samples, seed, window, written=True, is_complete=is_complete)


def places(order, start, count):
    return [tuple(place) for place in order.take(start, count).tolist()]


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
def test_the_first_epoch_in_written_order_is_the_written_order_in_windows_and_later_epochs_are_as_ever(window):
    order = written_order(UNEVEN, window)
    at = 0
    for first in range(0, len(UNEVEN), window):
        shards = range(first, min(first + window, len(UNEVEN)))
        every = sorted((shard, row) for shard in shards for row in range(UNEVEN[shard]))
        assert sorted(places(order, at, len(every))) == every
        at += len(every)
    assert places(order, at, 5 * at) == stream(UNEVEN, 5, window, at, 5 * at)
    assert places(written_order([10] * 20, 4), 0, 40) != sorted(
        places(written_order([10] * 20, 4), 0, 40)
    )  # permuted, too


@pytest.mark.parametrize("window", [1, 2, 3, 7, 100])
def test_an_order_that_grows_gives_ever_more_of_one_stream(window):
    """With any number of shards written, what can be known is the finished stream's, to the last place of a whole window."""
    finished = places(written_order(UNEVEN, window), 0, 100)
    growing = written_order([], window, is_complete=False)
    for known in range(len(UNEVEN) + 1):
        if known:
            growing.grow(UNEVEN[:known], is_complete=False)
        fresh = written_order(UNEVEN[:known], window, is_complete=False)
        end = sum(UNEVEN[: known // window * window])
        assert growing.end == fresh.end == end
        assert places(growing, 0, end) == places(fresh, 0, end) == finished[:end]
        with pytest.raises(AssertionError):
            growing.take(0, end + 1)
    growing.grow(UNEVEN, is_complete=True)
    assert growing.end is None and places(growing, 0, 100) == finished


def test_the_shards_that_places_can_come_from_are_the_same_however_many_are_known():
    finished = written_order(UNEVEN, 3)
    for place in range(sum(UNEVEN) + 1):
        needed = finished.shards_before(place)
        assert {shard for shard, _ in places(finished, 0, place)} <= set(range(needed)) or place == 0
        assert needed == (0 if place == 0 else 3 if place <= 13 else 6 if place <= 21 else 7)
        for known in (3, 4, 5, 6):
            fresh = written_order(UNEVEN[:known], 3, is_complete=False)
            if place <= fresh.end:
                assert fresh.shards_before(place) == needed
    assert finished.shards_before(28) == 7 and Order(UNEVEN, 5, 3).shards_before(1) == 7


def test_the_order_in_written_order_never_changes():
    """Golden, as above."""
    order = Order([3, 2, 4], 17, 2, written=True)
    whole = [(1, 0), (0, 1), (0, 0), (0, 2), (1, 1), (2, 0), (2, 2), (2, 1), (2, 3), (0, 2)]
    assert places(order, 0, 10) == whole  # the tenth is of epoch 1, as above
