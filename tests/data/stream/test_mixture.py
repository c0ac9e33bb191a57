"""Each source of a mixture runs through its own epochs, in an order of its own, whatever its share."""

from itertools import pairwise

import numpy as np

from windlass.data.stream.mixture import Mixture
from windlass.data.stream.mixture_shares import Shares, Stage

SIZES, SOURCES = [5, 7, 3, 4, 4, 6], [3, 2, 1]
OWNER = np.array([0, 0, 0, 1, 1, 2])
THREE = Stage(0, (0.5, 0.3, 0.2))
GOLDEN = "14 33 20 54 16 43 22 52 21 31 12 41 10 51 13 30 15 50 11 42 03 32 04 53"  # shard and row of each


def mixture(*stages, taken=None, window=2):
    """Three sources with shards of 5, 7, 3 / 4, 4 / 6 samples."""
    return Mixture(SIZES, SOURCES, Shares(stages or [THREE], taken), seed=3, shuffle_window=window)


def test_each_source_is_read_whole_before_it_begins_again():
    mixed = mixture()
    places = mixed.take(0, 400)
    owner = OWNER[places[:, 0]]
    assert (owner == mixed.shares.sources(0, 400)).all()
    for source, samples in enumerate((15, 8, 6)):
        own = [tuple(place) for place in places[owner == source].tolist()]
        assert len(own) >= 5 * samples
        epochs = [own[at : at + samples] for at in range(0, 5 * samples, samples)]
        assert all(len(set(epoch)) == samples and set(epoch) == set(epochs[0]) for epoch in epochs)
        assert epochs[0] != epochs[1], "each time in another order"


def test_any_slice_is_the_slice_of_the_whole():
    stages = [THREE, Stage(37, (0.0, 1.0, 1.0)), Stage(120, (1.0, 0.0, 0.0))]
    for own in ([THREE], stages):
        whole = mixture(*own).take(0, 300)
        for start, count in ((0, 0), (0, 1), (7, 13), (30, 20), (36, 1), (37, 1), (99, 101), (250, 50)):
            assert (mixture(*own).take(start, count) == whole[start : start + count]).all()


def test_each_source_goes_on_where_it_was_when_the_shares_change():
    """Of every source the samples that come are those that come without a change, in the same order."""
    stages = [THREE, Stage(37, (0.0, 1.0, 3.0)), Stage(120, (1.0, 0.0, 1.0))]
    plain, changed = mixture().take(0, 2000), mixture(*stages).take(0, 600)
    for source in range(3):
        own = changed[OWNER[changed[:, 0]] == source]
        assert len(own) > 30 and (own == plain[OWNER[plain[:, 0]] == source][: len(own)]).all()
    counts = [np.bincount(OWNER[changed[a:b, 0]], minlength=3).tolist() for a, b in pairwise((37, 120, 600))]
    assert counts == [[0, 21, 62], [240, 0, 240]], "83 samples in thirds and quarters, exact from the border on"


def test_sources_of_equal_size_are_permuted_differently():
    mixed = Mixture([50, 50], [1, 1], Shares([Stage(0, (1.0, 1.0))]), seed=0, shuffle_window=1)
    rows = [mixed.take(0, 100)[mixed.shares.sources(0, 100) == k, 1].tolist() for k in (0, 1)]
    assert sorted(rows[0]) == sorted(rows[1]) and rows[0] != rows[1]


def test_in_written_order_each_source_begins_with_its_first_shards():
    sizes, shares = [4] * 12, Shares([Stage(0, (1.0, 1.0))])
    mixture = Mixture(sizes, [8, 4], shares, 3, 2, written=True)
    first = mixture.take(0, 16)
    assert set(first[:, 0].tolist()) == {0, 1, 8, 9} and len({tuple(place) for place in first.tolist()}) == 16
    assert (first != Mixture(sizes, [8, 4], shares, 3, 2).take(0, 16)).any()


def test_the_stream_of_a_mixture_is_what_it_was():
    """So that a run of before goes on with the same samples."""
    assert " ".join(f"{shard}{row}" for shard, row in mixture().take(0, 24)) == GOLDEN
