"""Shares are exact over every pattern and within two samples over any window; each source runs through its own epochs."""

import numpy as np
import pytest

from windlass.data.stream.mixture import LONGEST_PATTERN, Mixture, Shares, pattern_of, shares_of, slots_of

WEIGHTS = [
    [1.0],
    [0.7, 0.3],
    [3, 1, 1],
    [0.5, 0.25, 0.125, 0.125],
    [0.62, 0.21, 0.1, 0.05, 0.02],
    [1 / 3, 2 / 3],
    [0.9371, 0.01417, 0.000013],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_window_holds_every_source_in_its_share(weights):
    slots = slots_of(weights)
    pattern = pattern_of(slots)
    length, shares = len(pattern), np.asarray(slots) / sum(slots)
    assert np.bincount(pattern, minlength=len(weights)).tolist() == slots or len(weights) == 1
    counts = np.cumsum(np.tile(pattern, 2)[:, None] == np.arange(len(weights)), 0)
    prefix = np.arange(1, 2 * length + 1)[:, None] * shares
    assert np.abs(counts - prefix).max() < 1, "every prefix, so every window within two"


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_are_the_weights(weights):
    slots = slots_of(weights)
    wanted = np.asarray(weights) / sum(weights)
    off = np.abs(np.asarray(slots) / sum(slots) - wanted).max()
    assert off <= 1 / LONGEST_PATTERN and min(slots) >= 1
    if max(len(str(weight)) for weight in weights) <= 5:
        assert off < 1e-12, "short decimals are exact"


def mixture(window=2):
    """Three sources with shards of 5, 7, 3 / 4, 4 / 6 samples."""
    return Mixture([5, 4, 7, 6, 4, 3], [0, 1, 0, 2, 1, 0], [0.5, 0.3, 0.2], seed=3, shuffle_window=window)


def test_each_source_is_read_whole_before_it_begins_again():
    mixed = mixture()
    places = mixed.take(0, 400)
    owner = np.array([0, 1, 0, 2, 1, 0])[places[:, 0]]
    assert (owner == mixed.sources(0, 400)).all()
    for source, samples in enumerate((15, 8, 6)):
        own = [tuple(place) for place in places[owner == source].tolist()]
        assert len(own) >= 5 * samples
        epochs = [own[at : at + samples] for at in range(0, 5 * samples, samples)]
        assert all(len(set(epoch)) == samples and set(epoch) == set(epochs[0]) for epoch in epochs)
        assert epochs[0] != epochs[1], "each time in another order"


def test_any_slice_is_the_slice_of_the_whole():
    whole = mixture().take(0, 300)
    for start, count in ((0, 0), (0, 1), (7, 13), (99, 101), (250, 50)):
        assert (mixture().take(start, count) == whole[start : start + count]).all()
        assert mixture().taken(start).tolist() == [(mixture().sources(0, start) == k).sum() for k in range(3)]


def test_sources_of_equal_size_are_permuted_differently():
    mixed = Mixture([50, 50], [0, 1], [1, 1], seed=0, shuffle_window=1)
    rows = [mixed.take(0, 100)[mixed.sources(0, 100) == k, 1].tolist() for k in (0, 1)]
    assert sorted(rows[0]) == sorted(rows[1]) and rows[0] != rows[1]


def test_in_written_order_each_source_begins_with_its_first_shards():
    sizes, owners = [4] * 12, [0] * 8 + [1] * 4
    mixture = Mixture(sizes, owners, [1, 1], 3, 2, written=True)
    first = mixture.take(0, 16)
    assert set(first[:, 0].tolist()) == {0, 1, 8, 9} and len({tuple(place) for place in first.tolist()}) == 16
    assert (first != Mixture(sizes, owners, [1, 1], 3, 2).take(0, 16)).any()


def test_shards_are_those_of_each_source_in_turn():
    assert shares_of([2, 1], None) is None
    assert shares_of([2, 1], [1.0, 3.0]) == Shares([0, 0, 1], [1.0, 3.0])
