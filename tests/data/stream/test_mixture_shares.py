"""Shares are exact over every pattern and within two samples over any window; they may change, and sources keep their place."""

import json

import numpy as np
import pytest

from windlass.data.stream.mixture_shares import LONGEST_PATTERN, Shares, Stage, pattern_of, slots_of

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


def test_a_weight_of_0_has_no_slot():
    assert slots_of([0, 3, 0, 1]) == [0, 3, 0, 1] and slots_of([0, 5]) == [0, 1]
    assert set(pattern_of([0, 3, 0, 1]).tolist()) == {1, 3} and pattern_of([0, 1]).tolist() == [1]
    odd = slots_of([0, 0.9371, 0.01417, 0.000013])
    assert odd[0] == 0 and min(odd[1:]) == 1


STAGES = [Stage(0, (3.0, 1.0)), Stage(10, (0.0, 1.0)), Stage(17, (1.0, 1.0))]


def test_what_is_taken_is_the_count_of_the_sources():
    for shares in (Shares(STAGES[:1]), Shares(STAGES), Shares(STAGES[1:], [100, 7])):
        start = shares.stages[0].start
        before = shares.taken(start)
        for end in range(start, 60):
            counted = np.bincount(shares.sources(start, end - start), minlength=2)
            assert (shares.taken(end) - before == counted).all()
    assert Shares(STAGES).taken(17).tolist() == [8, 9] and Shares(STAGES).sources(10, 7).tolist() == [1] * 7


def test_shares_are_made_again_from_their_facts():
    shares = Shares(STAGES[1:], [100, 7])
    again = Shares.of(json.loads(json.dumps(shares.facts())))
    assert (again.sources(10, 90) == shares.sources(10, 90)).all() and again.facts() == shares.facts()
    assert again.taken(60).tolist() == shares.taken(60).tolist()


def one(*weights, start=0, taken=None):
    return Shares([Stage(start, weights)], taken)


@pytest.mark.parametrize(
    ("now", "is_same", "taken", "kept"),
    [
        (one(3.0, 1.0), [True, True], [6, 2], True),
        (one(6.0, 2.0), [True, True], [6, 2], True),  # the same shares
        (one(1.0, 1.0), [True, True], [6, 2], False),
        (one(3.0, 1.0), [True, False], [6, 0], False),  # other shards behind a source
        (one(3.0, 1.0, 1.0), [True, True], [6, 2, 0], False),  # a source that was appended
        (one(1.0), [True], [6], False),  # the last one taken out
        (Shares([Stage(0, (3.0, 1.0)), Stage(9, (0.0, 1.0))]), [True, True], [6, 2], False),  # a stage to come
        (Shares([Stage(0, (1.0, 1.0)), Stage(8, (3.0, 1.0))]), [True, True], [6, 2], True),  # what is over is over
    ],
)
def test_a_stream_that_goes_on_keeps_each_source_where_it_was(now, is_same, taken, kept):
    before = one(3.0, 1.0)
    found = now.continued(before, 8, is_same)
    assert found.taken(8).tolist() == taken and (found is before) == kept
    if not kept:
        assert found.stages[0].start == 8 and found.stages[1:] == now.from_(8)[1:]


def test_lines_say_what_each_stage_gives():
    lines = Shares(STAGES).lines(["web", "notes"], [10, 4], 20)
    assert lines == [
        "web: asked 75 %, gets 75 % (3 of 4 samples); from sample 10 asked 0 %, gets 0 % (0 of 1 samples); from sample 17 asked "
        "50 %, gets 50 % (1 of 2 samples), 1.00 epochs of 10 samples",
        "notes: asked 25 %, gets 25 % (1 of 4 samples); from sample 10 asked 100 %, gets 100 % (1 of 1 samples); from sample 17 "
        "asked 50 %, gets 50 % (1 of 2 samples), 2.50 epochs of 4 samples",
    ]
    assert "from sample 17 (not reached) asked" in Shares(STAGES).lines(["web", "notes"], [10, 4], 17)[0]
