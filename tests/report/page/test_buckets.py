"""Buckets against lists: extremes at their steps, sums and counts kept, whatever was merged, dropped and read again."""

import math
import random

import numpy as np
import pytest

from windlass.report.page.buckets import COUNT, GAPS, HIGH, HIGH_AT, LOW, LOW_AT, SUM, Buckets, Stretch, joined
from windlass.report.page.step_lines import Columns


class Lines:
    """A pretended file: line i is bytes 10 i to 10 i + 9."""

    def __init__(self):
        self.events = []

    def write(self, buckets, steps, values):
        first = len(self.events)
        self.events += list(zip(steps, values))
        indices = range(first, len(self.events))
        buckets.append(self.columns(indices), [10 * i for i in indices], [10 * i + 9 for i in indices])

    def columns(self, indices):
        steps = np.array([float(self.events[i][0]) for i in indices])
        loss = np.array([math.nan if self.events[i][1] is None else self.events[i][1] for i in indices])
        return Columns(steps, steps * 2.0, steps * 64.0, {"loss": loss}, {"loss": np.isnan(loss)})

    def read_again(self, stretches):
        found = [i for part in stretches for i in range(part.start // 10, part.end // 10 + 1)]
        return self.columns(found), [10 * i for i in found], [10 * i + 9 for i in found]


def check(buckets, valid):
    """`valid`: (step, value) of every line that counts, in order."""
    assert buckets.lines.sum() == len(valid)
    at, loss = 0, buckets.series["loss"]
    for index, lines in enumerate(buckets.lines.astype(int).tolist()):
        part = valid[at : at + lines]
        assert (buckets.first[index], buckets.last[index]) == (part[0][0], part[-1][0])
        assert (buckets.time[index], buckets.tokens[index]) == (part[-1][0] * 2.0, part[-1][0] * 64.0)
        numbers = [(step, value) for step, value in part if value is not None]
        assert loss[COUNT, index] == len(numbers) and loss[GAPS, index] == lines - len(numbers)
        assert loss[SUM, index] == pytest.approx(sum(value for _, value in numbers))
        if numbers:
            low = min(numbers, key=lambda one: one[1])
            high = max(numbers, key=lambda one: one[1])
            assert (loss[LOW_AT, index], loss[LOW, index]) == low and (loss[HIGH_AT, index], loss[HIGH, index]) == high
        else:
            assert np.isnan(loss[LOW, index]) and np.isnan(loss[HIGH_AT, index])
        at += lines
    assert at == len(valid)


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_appending_and_going_back_equals_the_list_of_valid_lines(seed):
    draw, file, buckets, valid = random.Random(seed), Lines(), Buckets(16), []
    step = 0
    for _ in range(40):
        if valid and draw.random() < 0.3:
            step = draw.choice([valid[-1][0], draw.choice(valid)[0], draw.randrange(valid[-1][0] + 1)])
            valid = [line for line in valid if line[0] <= step]
            buckets.truncate(step, file.read_again)
        steps = list(range(step + 1, step + 1 + draw.choice([1, 2, 7, 50])))
        values = [None if draw.random() < 0.1 else float(draw.randrange(1000)) + one / 1e6 for one in steps]
        file.write(buckets, steps, values)
        valid += list(zip(steps, values))
        step = steps[-1]
        assert len(buckets) <= 16
        check(buckets, valid)


def test_a_spike_among_many_keeps_its_value_and_step():
    file, buckets = Lines(), Buckets(10)
    file.write(buckets, range(1, 1001), [{777: 50.0, 123: -50.0}.get(step, 1.0) for step in range(1, 1001)])
    loss = buckets.series["loss"]
    assert (np.nanmax(loss[HIGH]), loss[HIGH_AT, np.nanargmax(loss[HIGH])]) == (50.0, 777)
    assert (np.nanmin(loss[LOW]), loss[LOW_AT, np.nanargmin(loss[LOW])]) == (-50.0, 123)


def test_appending_changes_the_last_bucket_alone_until_the_revision_does():
    file, buckets = Lines(), Buckets(8)
    file.write(buckets, range(1, 11), [1.0] * 10)
    revision, lines = buckets.revision, buckets.lines[:-1].tolist()
    file.write(buckets, [11], [1.0])
    assert (buckets.revision, buckets.lines[: len(lines)].tolist()) == (revision, lines)
    file.write(buckets, range(12, 40), [1.0] * 28)
    assert buckets.revision > revision
    revision = buckets.revision
    buckets.truncate(20, file.read_again)
    assert buckets.revision > revision


def test_a_thinned_copy_has_fewer_buckets_and_leaves_the_original():
    file, buckets = Lines(), Buckets(100)
    file.write(buckets, range(1, 91), [float(step) for step in range(90)])
    thin = buckets.thinned(20)
    assert len(buckets) == 90 and len(thin) <= 20 and thin.lines.sum() == 90
    assert thin.series["loss"][HIGH].max() == 89.0


def test_a_quantity_that_appears_later_has_no_count_before():
    buckets = Buckets(8)
    one = np.array([1.0])
    buckets.append(Columns(one, one, one, {"loss": one}, {}), [0], [9])
    buckets.append(Columns(one + 1, one, one, {"mfu": one}, {}), [10], [19])
    assert buckets.series["mfu"][COUNT].tolist() == [0, 1] and buckets.series["loss"][COUNT].tolist() == [1, 0]


def test_stretches_of_one_epoch_join_and_those_around_a_restart_do_not():
    parts = [Stretch(0, 0, 9), Stretch(0, 10, 19), Stretch(1, 40, 49)]
    assert joined(parts) == [Stretch(0, 0, 19), Stretch(1, 40, 49)]
