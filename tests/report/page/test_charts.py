"""The charts: each by name, with its lines, unit and axis; nothing empty."""

import json

import pytest

from windlass.report.page.charts import LEAST_WAIT_AXIS, bits_rows, chart_scale, make_charts
from windlass.report.page.history import read_history

BASELINES = {"bigram": {"loss": 4.4, "bits_per_byte": 2.05}, "gzip": {"bits_per_byte": 2.0}}


def step_line(step, **changes):
    fields = {
        "loss": 9.0 - step / 10, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_s": 1000.0,
        "tokens_per_s_per_gpu": 500.0, "mfu": 0.4, "memory_bytes": 2 << 30, "data_wait_s": 0.01, "step_s": 0.5,
        "warm_up": step == 1, "ledger": {"training": step * 0.5, "warm_up": 1.0},
    }  # fmt: skip
    return {"kind": "step", "time": 0.0, "step": step, **fields, **changes}


def validation(step, loss, bits):
    return {"kind": "validation", "time": 0.0, "step": step, "name": "code", "loss": loss, "bits_per_byte": bits}


@pytest.fixture
def history(tmp_path):
    def of(*lines, name="events"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return read_history(path)

    return of


@pytest.fixture
def charts(history):
    def of(*lines):
        return {chart["key"]: chart for chart in make_charts([history(*lines)], BASELINES)}

    return of


def names(chart):
    return [line["name"] for line in chart["lines"]]


def test_a_run_has_the_charts_of_what_it_measured(charts):
    full = charts(validation(0, 9.0, 3.0), *[step_line(step) for step in range(1, 9)])
    assert list(full) == ["loss", "learning_rate", "gradient_norm", "throughput", "mfu", "memory", "data_wait"]
    assert names(full["loss"]) == ["training", "code"] and full["loss"]["lines"][1]["points"] == "code"
    assert full["loss"]["levels"] == [{"name": "bigram 4.40", "y": 4.4}]
    assert full["data_wait"]["least_top"] == LEAST_WAIT_AXIS and full["mfu"]["form"] == "percent"


def test_a_run_without_a_known_peak_has_no_chart_of_mfu(charts):
    assert "mfu" not in charts(*[step_line(step, mfu=None) for step in range(1, 5)])


def test_a_run_that_has_not_begun_has_no_charts(charts):
    assert charts() == {}


def test_lines_of_another_writer_without_our_extra_fields_are_drawn(charts):
    assert set(charts({"kind": "step", "time": 0.0, "step": 1, "loss": 2.0})) == {"loss"}


def test_a_run_that_diverged_from_its_first_step_on_still_has_charts(charts):
    lost = {"loss": None, "gradient_norm": None, "non_finite": {"loss": "nan", "gradient_norm": "nan"}}
    found = charts(*[step_line(step, **lost) for step in range(1, 100)])
    assert "loss" not in found and "gradient_norm" not in found and "throughput" in found


def test_a_wide_norm_is_drawn_on_a_log_axis(charts):
    narrow = charts(*[step_line(step) for step in range(1, 5)])["gradient_norm"]
    wide = charts(*[step_line(step, gradient_norm=10.0**step) for step in range(1, 5)])["gradient_norm"]
    assert (narrow["log"], narrow["zero"], wide["log"], wide["zero"]) == (False, True, True, False)


def test_the_axis_of_the_loss_is_in_what_it_is_a_mean_over(charts):
    for more, unit in (({}, "nats per target token"), ({"pairs": 4}, "loss per pair")):
        assert charts(*[step_line(step, **more) for step in (1, 2)])["loss"]["unit"] == unit


def test_rewards_are_of_pairs_alone(charts):
    pairs = {"reward_chosen": 0.5, "reward_rejected": -0.25, "margin": 0.75, "accuracy": 1.0}
    found = charts(step_line(1, **pairs))
    assert names(found["rewards"]) == ["chosen", "rejected", "margin"] and found["accuracy"]["form"] == "percent"
    assert not {"rewards", "accuracy"} & set(charts(step_line(1)))


def test_experts_and_groups_are_drawn_where_lines_carry_them(charts):
    found = charts(
        step_line(1, expert_loads=[1.5, 2.0], router_loss=1.01, source_losses={"web": 3.0, "code": 2.0},
                  expert_shares={"0": 0.4, "1": 0.6}, memory_parts={"weights": 1 << 30, "states": 2 << 30})
    )  # fmt: skip
    assert names(found["experts"]) == ["worst layer", "median"] and names(found["source_losses"]) == ["code", "web"]
    assert names(found["expert_shares"]) == ["0", "1"] and "router_loss" in found
    assert names(found["memory_parts"]) == ["states", "weights"] and found["memory_parts"]["stack"]


def test_memory_is_in_gib():
    assert (2 << 30) * chart_scale("memory_bytes") == (2 << 30) * chart_scale("memory_parts.states") == 2.0
    assert chart_scale("loss") == 1.0


def test_charts_of_several_runs_have_the_lines_of_all(history):
    one = history(step_line(1, memory_parts={"weights": 1}), name="one")
    other = history(step_line(1, router_loss=1.0), validation(1, 4.0, 1.0), name="other")
    found = {chart["key"]: chart for chart in make_charts([one, other], {})}
    assert names(found["loss"]) == ["training", "code"] and {"router_loss", "memory_parts"} <= set(found)
    assert not found["memory_parts"]["stack"]


def test_bits_are_the_latest_of_each_set_among_the_baselines_the_best_first(history):
    run = history(validation(0, 9.0, 3.0), validation(8, 5.0, 1.5))
    assert bits_rows(run, BASELINES) == [("code, step 8", 1.5, True), ("gzip", 2.0, False), ("bigram", 2.05, False)]
    assert bits_rows(run, {}) == [] and bits_rows(history(), BASELINES) == []
