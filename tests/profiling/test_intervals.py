"""Spans of time against the same counted second by second."""

import numpy as np

from windlass.profiling.intervals import clipped, common, length, union


def seconds(spans):
    return {second for begin, end in spans for second in range(int(begin), int(end))}


def test_unions_lengths_and_what_two_have_in_common_are_those_of_single_seconds():
    draw = np.random.default_rng(3)
    for _ in range(200):
        one, other = (
            np.sort(draw.integers(0, 40, (draw.integers(0, 7), 2)), axis=1).astype(float).reshape(-1, 2)
            for _ in range(2)
        )
        joined = union(one)
        assert seconds(joined) == seconds(one) and length(joined) == len(seconds(one))
        assert (joined[1:, 0] > joined[:-1, 1]).all(), "two touch"
        assert common(one, other) == len(seconds(one) & seconds(other))
        assert seconds(clipped(one, 10, 20)) == seconds(one) & set(range(10, 20))
