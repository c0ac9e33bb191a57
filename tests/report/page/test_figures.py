"""The charts: valid plotly, gaps where a value is missing, marks where a run resumed or diverged, nothing empty."""

import plotly.graph_objects as graph_objects
import pytest

from windlass.report.page.figures import make_figures, running_mean
from windlass.report.page.history import Curve, read_history

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


def figures_of(*lines):
    return make_figures(read_history([{"kind": "start", "time": 0.0, "step": 0}, *lines]), BASELINES)


@pytest.fixture
def full():
    nan = {"loss": None, "non_finite": {"loss": "nan"}}
    lines = [validation(0, 9.0, 3.0), *[step_line(step, **(nan if step == 3 else {})) for step in range(1, 9)]]
    return figures_of(*lines, validation(8, 5.0, 1.5), {"kind": "resume", "time": 0.0, "step": 8}, step_line(9))


def test_every_chart_is_valid_plotly(full):
    assert set(full) == {
        "loss", "bits", "throughput", "learning_rate", "gradient_norm", "memory", "data_wait", "ledger",
    }  # fmt: skip
    for figure in full.values():
        graph_objects.Figure(figure)  # raises on an unknown or ill-typed property


def test_a_step_without_a_loss_is_a_gap_and_a_red_mark(full):
    single = full["loss"]["data"][0]
    assert single["x"] == list(range(1, 10)) and single["y"][2] is None
    assert single["connectgaps"] is False
    assert [note["text"] for note in full["loss"]["layout"]["annotations"]] == ["resumed", "not finite"]
    assert [shape["x0"] for shape in full["loss"]["layout"]["shapes"]] == [8, 3]


def test_baselines_with_a_loss_stand_in_the_loss_chart_and_all_of_them_among_the_bits(full):
    assert [trace["name"] for trace in full["loss"]["data"]][-2:] == ["code", "bigram 4.40"]
    bars = full["bits"]["data"][0]
    assert bars["y"] == ["bigram", "gzip", "code, step 8"] and bars["x"] == [2.05, 2.0, 1.5]


def test_throughput_leaves_warm_up_out_and_reads_the_same_curve_as_mfu(full):
    trace = full["throughput"]["data"][0]
    assert trace["y"][0] is None and trace["y"][1] == 1000.0
    layout = full["throughput"]["layout"]
    assert layout["yaxis2"]["range"][1] / layout["yaxis"]["range"][1] == pytest.approx(0.4 / 1000.0)


def test_without_a_known_peak_there_is_no_second_scale():
    figures = figures_of(*[step_line(step, mfu=None) for step in range(1, 5)])
    assert "yaxis2" not in figures["throughput"]["layout"] and len(figures["throughput"]["data"]) == 1


def test_the_load_of_experts_is_that_of_the_worst_layer_and_of_the_middle_one():
    figures = figures_of(*[step_line(step, expert_loads=[1.5, 1.0 + step, 1.25]) for step in (1, 2)])
    worst, middle = figures["experts"]["data"]
    assert (worst["x"], worst["y"], middle["y"]) == ([1, 2], [2.0, 3.0], [1.5, 1.5])
    assert "experts" not in figures_of(step_line(1), step_line(2))


def test_rewards_are_of_pairs_alone():
    pairs = {"reward_chosen": 0.5, "reward_rejected": -0.25, "margin": 0.75, "accuracy": 1.0}
    figures = figures_of(*[step_line(step, **pairs) for step in (1, 2)])
    chosen, rejected, margin, accuracy = figures["rewards"]["data"]
    assert (chosen["y"], rejected["y"], margin["y"]) == ([0.5, 0.5], [-0.25, -0.25], [0.75, 0.75])
    assert accuracy["y"] == [1.0, 1.0] and accuracy["yaxis"] == "y2"
    assert "rewards" not in figures_of(step_line(1), step_line(2))


def test_the_axis_of_the_loss_is_in_what_it_is_a_mean_over():
    for more, unit in (({}, "nats per token"), ({"pairs": 4}, "loss per pair")):
        figures = figures_of(*[step_line(step, **more) for step in (1, 2)])
        assert figures["loss"]["layout"]["yaxis"]["title"]["text"] == unit


def test_memory_is_in_gib_and_data_wait_a_share_of_the_step(full):
    assert full["memory"]["data"][0]["y"][0] == 2.0
    assert full["data_wait"]["data"][0]["y"][0] == pytest.approx(0.02)


def test_a_wide_norm_is_drawn_on_a_log_axis():
    narrow = figures_of(*[step_line(step) for step in range(1, 5)])
    wide = figures_of(*[step_line(step, gradient_norm=10.0**step) for step in range(1, 5)])
    assert narrow["gradient_norm"]["layout"]["yaxis"].get("type") is None
    assert wide["gradient_norm"]["layout"]["yaxis"]["type"] == "log"


def test_a_run_that_has_not_begun_has_no_charts():
    assert figures_of() == {}


def test_a_run_that_diverged_from_its_first_step_on_still_has_a_page():
    lost = {"loss": None, "gradient_norm": None, "non_finite": {"loss": "nan", "gradient_norm": "nan"}}
    figures = figures_of(*[step_line(step, **lost) for step in range(1, 100)])
    assert "loss" not in figures and "gradient_norm" not in figures and "throughput" in figures
    assert len(figures["throughput"]["layout"]["shapes"]) == 40  # bounded


def test_lines_of_another_writer_without_our_extra_fields_are_drawn():
    plain = {"kind": "step", "time": 0.0, "step": 1, "loss": 2.0}
    assert set(figures_of(plain)) == {"loss"}


def test_the_running_mean_is_centred_and_skips_gaps():
    assert running_mean(Curve([1, 2, 3], [1.0, None, 3.0])).values == [2.0, None, 2.0]
    straight = Curve(list(range(60)), [float(step) for step in range(60)])
    assert running_mean(straight).values[2:-2] == straight.values[2:-2]  # no lag


def test_a_short_run_has_no_running_mean():
    names = [trace["name"] for trace in figures_of(*[step_line(step) for step in range(1, 49)])["loss"]["data"]]
    assert names == ["training, one step", "bigram 4.40"]


def test_a_wait_of_next_to_nothing_is_drawn_as_that():
    figures = figures_of(*[step_line(step, data_wait_s=1e-6) for step in range(1, 9)])
    assert figures["data_wait"]["layout"]["yaxis"]["range"] == [0, 0.01]
