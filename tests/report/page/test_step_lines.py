"""Step lines as arrays: pyarrow's reading and Python's agree, and what a line lacks is no number."""

import json
import math
import random

import numpy as np
import pytest

from windlass.errors import UserError
from windlass.report.events import parse_line
from windlass.report.page.step_lines import MAX_NAMES, read_columns, step_columns


def refuse(line, index):
    raise AssertionError(f"line {index} was parsed by Python: {line}")


def parse(line, index):
    return parse_line(line, index + 1, "events.jsonl")


def step_line(step, **fields):
    return {"kind": "step", "time": 100.0 + step, "step": step, "tokens": step * 64, "loss": 3.5, **fields}


def encoded(events):
    return [json.dumps(event).encode() for event in events]


def same(one, other):
    assert np.array_equal(one.step, other.step) and np.array_equal(one.time, other.time)
    assert np.array_equal(one.tokens, other.tokens, equal_nan=True)
    assert one.values.keys() == other.values.keys() and one.gaps.keys() == other.gaps.keys()
    for name, column in one.values.items():
        assert np.array_equal(column, other.values[name], equal_nan=True), name
    for name, flags in one.gaps.items():
        assert np.array_equal(flags.astype(bool), other.gaps[name].astype(bool)), name


def random_events(seed):
    draw = random.Random(seed)
    events = []
    for step in range(1, 60):
        fields = {"warm_up": step < 3, "data_wait_s": draw.random(), "step_s": draw.choice([1, 2.5])}
        fields["ledger"] = {"training": step * 0.5, "data_wait": 1e-7}
        fields |= {name: draw.choice([draw.random(), 7, None]) for name in ("gradient_norm", "tokens_per_s", "mfu")}
        if draw.random() < 0.2:
            fields |= {"loss": None, "non_finite": {"loss": "nan"}}
        if draw.random() < 0.5:
            fields["expert_loads"] = [1.0 + draw.random() for _ in range(draw.choice([1, 3, 4]))]
            fields["source_losses"] = {"web": draw.random(), "code": draw.choice([2, 2.5])}
        events.append(step_line(step, **fields))
    return events


@pytest.mark.parametrize("seed", range(5))
def test_both_ways_of_reading_give_the_same_arrays(seed):
    events = random_events(seed)
    same(read_columns(encoded(events), refuse, few=0), step_columns(events))


def test_a_number_that_was_not_finite_is_a_gap_and_an_absent_one_is_not():
    events = [step_line(1), step_line(2, loss=None, non_finite={"loss": "nan"}), step_line(3, mfu=0.5)]
    columns = read_columns(encoded(events), refuse, few=0)
    assert columns.values["loss"][[0, 2]].tolist() == [3.5, 3.5] and math.isnan(columns.values["loss"][1])
    assert columns.gaps.keys() == {"loss"} and columns.gaps["loss"].tolist() == [False, True, False]
    assert np.isnan(columns.values["mfu"]).tolist() == [True, True, False]


def test_the_throughput_of_warm_up_is_a_gap_and_its_loss_is_not():
    events = [step_line(step, warm_up=step < 3, tokens_per_s=10.0 * step) for step in (1, 2, 3)]
    columns = read_columns(encoded(events), refuse, few=0)
    assert np.isnan(columns.values["tokens_per_s"]).tolist() == [True, True, False]
    assert columns.gaps["tokens_per_s"].tolist() == [True, True, False] and "loss" not in columns.gaps


def test_the_wait_is_a_share_of_the_step():
    columns = read_columns(
        encoded([step_line(1, data_wait_s=0.5, step_s=2.0), step_line(2, data_wait_s=1.0)]), refuse, few=0
    )
    assert columns.values["wait_share"][0] == 0.25 and math.isnan(columns.values["wait_share"][1])


def test_the_load_of_experts_is_that_of_the_worst_layer_and_of_the_middle_one():
    columns = read_columns(encoded([step_line(1, expert_loads=[1.5, 3.0, 1.25])]), refuse, few=0)
    assert (columns.values["worst_load"].tolist(), columns.values["median_load"].tolist()) == ([3.0], [1.5])


def test_a_group_has_a_quantity_per_name_and_a_bounded_number_of_them():
    events = [step_line(1, source_losses={f"s{index:02d}": 1.0 * index for index in range(MAX_NAMES + 5)})]
    for columns in (read_columns(encoded(events), refuse, few=0), step_columns(events)):
        names = [name for name in columns.values if name.startswith("source_losses.")]
        assert len(names) == MAX_NAMES and columns.values["source_losses.s03"].tolist() == [3.0]


def test_lines_that_pyarrow_refuses_are_read_by_python():
    lines = [*encoded([step_line(1)]), b'{"kind": "step", "time": 1, "step": 2, "loss": NaN, "mfu": "n/a"}']
    columns = read_columns(lines, parse, few=0)
    assert columns.values["loss"][0] == 3.5 and columns.gaps["loss"].tolist() == [False, True]
    assert "mfu" not in columns.values


BAD = [b'{"kind": "step", "time": 1}', b'{"kind": "step", "time', b'{"kind": "step", "time": 1, "step": null}']


@pytest.mark.parametrize("few", [0, 2])
@pytest.mark.parametrize("bad", BAD)
def test_a_line_without_a_step_or_that_is_torn_is_named(bad, few):
    with pytest.raises(UserError, match="line 2"):
        read_columns([*encoded([step_line(1)]), bad], parse, few)


def test_few_lines_are_read_by_python():
    asked = []
    read_columns(
        encoded([step_line(1), step_line(2)]), lambda line, index: asked.append(index) or parse(line, index), few=2
    )
    assert asked == [0, 1]
