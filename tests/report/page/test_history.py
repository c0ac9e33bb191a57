"""What is drawn: the curve as it counts, gaps and spikes kept, time that restarts cost, everything bounded."""

import random

from windlass.report.page.history import MAX_POINTS, MAX_SAMPLES, MAX_TEXT, read_history, spread, thin, total_ledger


def line(kind, step, **fields):
    return {"kind": kind, "time": 1000.0 + step, "step": step, **fields}


RESUMED = [
    line("start", 0),
    line("validation", 0, name="code", loss=8.0),
    *[line("step", step, loss=9.0 - step) for step in range(1, 7)],
    line("checkpoint", 4),
    line("validation", 6, name="code", loss=99.0),
    line("resume", 4),
    *[line("step", step, loss=8.5 - step) for step in range(5, 8)],
    line("validation", 7, name="code", loss=3.0),
    line("end", 7, reason="finished"),
]


def test_a_resumed_run_is_drawn_once_per_step_with_the_values_that_count():
    history = read_history(RESUMED)
    curve = history.curve("loss")
    assert curve.steps == [1, 2, 3, 4, 5, 6, 7]
    assert curve.values == [8.0, 7.0, 6.0, 5.0, 3.5, 2.5, 1.5]
    assert [entry["loss"] for entry in history.validations["code"]] == [8.0, 3.0]
    assert history.resumed_at == [4] and history.end["reason"] == "finished"


def test_a_run_killed_after_its_resume_has_no_end_although_an_earlier_session_had_one():
    history = read_history([*RESUMED, line("resume", 7), line("step", 8, loss=1.0)])
    assert history.end is None and history.steps[-1]["step"] == 8


def test_an_incident_beyond_the_resumed_step_stays_in_the_list_of_what_happened():
    history = read_history([line("start", 0), line("incident", 9, what="nan"), line("resume", 4)])
    assert [note["kind"] for note in history.notes] == ["start", "incident", "resume"]


def test_an_empty_log_and_one_without_a_start_can_be_read():
    assert read_history([]).steps == [] and read_history([]).opening == {}
    assert read_history([line("step", 1, loss=1.0)]).curve("loss").values == [1.0]


def test_a_field_that_no_line_has_is_all_gaps():
    assert read_history([line("step", 1)]).curve("mfu").values == [None]


def test_short_curves_are_left_alone():
    steps, values = list(range(MAX_POINTS)), [1.0] * MAX_POINTS
    assert thin(steps, values).steps == steps


def test_thinning_bounds_the_points_and_keeps_spikes_gaps_and_both_ends():
    generator = random.Random(0)
    values = [generator.random() for _ in range(100_000)]
    values[54_321], values[77_777], values[12_345] = 50.0, -50.0, None
    curve = thin(list(range(100_000)), values)
    assert len(curve.steps) <= MAX_POINTS and curve.steps == sorted(set(curve.steps))
    assert curve.steps[0] == 0 and curve.steps[-1] == 99_999
    assert {50.0, -50.0, None} <= set(curve.values)
    assert all(values[step] == value for step, value in zip(curve.steps, curve.values))


def test_thinning_a_curve_of_gaps_only_is_safe():
    curve = thin(list(range(9000)), [None] * 9000)
    assert len(curve.steps) <= MAX_POINTS and set(curve.values) == {None}


def test_the_ledger_adds_sessions_and_counts_lost_work_as_redone():
    lines = [
        line("start", 0),
        line("step", 10, ledger={"training": 10.0, "data_wait": 1.0}),
        line("step", 20, ledger={"training": 20.0, "data_wait": 2.0, "evaluate": 5.0}),
        line("resume", 10),
        line("step", 20, ledger={"training": 8.0, "data_wait": 0.5}),
    ]
    assert total_ledger(lines) == {"training": 18.0, "data_wait": 1.5, "redone": 16.0}


def test_a_session_that_was_wholly_lost_is_wholly_redone():
    lines = [line("start", 0), line("step", 5, ledger={"training": 7.0}), line("start", 0)]
    assert total_ledger(lines) == {"redone": 7.0}


def test_samples_are_grouped_by_prompt_spread_over_the_run_and_cut():
    lines = [line("sample", step, prompt="class", text="x" * 10_000) for step in range(0, 1000, 10)]
    samples = read_history([*lines, line("sample", 5, prompt="def", text="short")]).samples
    assert list(samples) == ["class", "def"] and len(samples["class"]) == MAX_SAMPLES
    assert samples["class"][0]["step"] == 0 and samples["class"][-1]["step"] == 990
    assert len(samples["class"][0]["text"]) == MAX_TEXT


def test_spread_keeps_first_and_last():
    assert spread([1, 2, 3], 6) == [1, 2, 3]
    assert spread(list(range(11)), 3) == [0, 5, 10]
