"""What the page says in words and figures."""

import json
from dataclasses import fields

import pytest

from tests.report.page.events import line
from windlass.advice.facts import RunFacts
from windlass.report.page.history import read_history
from windlass.report.page.tables import (
    OF_ADVICE,
    differing,
    facts,
    ledger_rows,
    median,
    remark,
    run_rows,
    status_badge,
    tiles,
    value_in_words,
)


@pytest.fixture
def history(tmp_path):
    def of(*lines, most=2000):
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        return read_history(tmp_path / "events.jsonl", most)

    return of


def test_the_state_is_the_end_or_that_there_is_none(history):
    running = history(line("start", 0), line("step", 7, loss=1.0))
    assert status_badge(running) == (
        "no end yet",
        "step 7, last line 1970-01-01 00:16:47 UTC: still running, or killed",
    )
    stopped = history(line("end", 9, reason="stopped", signal="SIGINT"))
    assert status_badge(stopped) == ("stopped", "by Ctrl-C (SIGINT) at step 9, 1970-01-01 00:16:49 UTC")
    assert status_badge(history(line("end", 9, reason="stopped"))) == ("stopped", "at step 9, 1970-01-01 00:16:49 UTC")


def test_tiles_have_medians_peaks_and_the_share_of_useful_time(history):
    lines = [
        line("step", step, loss=1.5, tokens=step * 10, tokens_per_s=float(step), memory_bytes=step << 20,
             ledger={"training": 3.0 * step, "data_wait": 1.0 * step})
        for step in (1, 2, 3, 4, 100)
    ]  # fmt: skip
    found = {what: (figure, remark) for what, figure, remark in tiles(history(line("start", 0), *lines))}
    assert found["training loss"] == ("1.5000", "step 100") and found["tokens trained"] == ("1 k", "1,000")
    assert found["tokens per second"] == ("3", "median") and found["MFU"][0] == "n/a"
    assert found["peak memory"][0] == "100.0 MiB" and found["goodput"][0] == "75.0%" and found["time"][1] == "1 session"


def test_a_run_without_steps_has_the_tiles_of_its_validations(history):
    lines = [
        line("validation", step, name="code", loss=loss, bits_per_byte=1.5) for step, loss in ((0, 8.0), (5, None))
    ]
    assert tiles(history(*lines)) == [("code loss", "not finite", "8.00 at step 0, 1.500 bits per byte")]


def test_the_median_is_that_of_the_lines_and_near_it_in_buckets(history):
    lines = [line("step", step, tokens_per_s=float(step)) for step in range(1, 1001)]
    assert median(history(*lines), "tokens_per_s") == 501.0 and median(history(*lines), "mfu") is None
    assert median(history(*lines, most=100), "tokens_per_s") == pytest.approx(500.5, rel=0.02)


def test_ledger_rows_are_sorted_and_leave_nothing_out_but_zero():
    rows = ledger_rows({"training": 6.0, "data_wait": 0.0, "warm_up": 2.0, "redone": 8.0})
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("redone", "8.00s", 0.5), ("training", "6.00s", 0.375), ("warm up", "2.00s", 0.125),
    ]  # fmt: skip


def test_settings_that_differ_are_named_with_each_runs_value():
    one = "optim:\n  learning_rate: 0.001\n  weight_decay: 0.1\nrun:\n  steps: 10\n"
    other = "optim:\n  learning_rate: 0.003\n  weight_decay: 0.1\nrun:\n  steps: 10\n  note: x\n"
    assert differing([one, other]) == [("optim.learning_rate", ["0.001", "0.003"]), ("run.note", ["", "x"])]
    assert differing([one, "\x00"])[-1] == ("resolved.yaml", ["", "cannot be read"])
    assert differing([one, one]) == [] and differing(["", ""]) == []


def test_the_rows_of_runs_say_where_each_is(history):
    run = history(line("start", 0), line("step", 7, loss=1.25, tokens=70, tokens_per_s=5.0))
    titles = ("run", "state", "step", "tokens", "training loss", "tok/s, median")
    assert run_rows([("mine", run)]) == [titles, ("mine", "no end yet", "7", "70", "1.2500", "5")]
    assert run_rows([("mine", history())])[1] == ("mine", "no end yet", "0", "n/a", "n/a", "n/a")


def test_the_rows_of_runs_have_the_latest_loss_of_each_validation_set(history):
    sets = [
        line("validation", step, name=name, loss=loss)
        for step, name, loss in ((0, "validation", 8.0), (5, "validation", 3.5), (5, "code", None))
    ]
    titles, mine, other = run_rows([("mine", history(*sets)), ("other", history())])
    assert titles[4:7] == ("training loss", "validation loss", "code loss")
    assert mine[4:7] == ("n/a", "3.5000", "not finite") and other[4:7] == ("n/a", "n/a", "n/a")


def test_facts_are_tables_and_a_nested_table_is_one_of_its_own():
    opening = line(
        "start",
        0,
        argv=["a", "b"],
        derived={"ranks": "2"},
        provenance={"git": {"commit": "abc", "x": [1]}, "python": "3"},
    )
    assert facts(opening) == [
        ("run", False, [("argv", "a b")]), ("derived", False, [("ranks", "2")]), ("provenance", False, [("python", "3")]),
        ("git", False, [("commit", "abc"), ("x", "1")]),
    ]  # fmt: skip


def test_numbers_for_advice_have_names_of_their_own():
    found = {"device": "CPU", "end_elements": 5, "gathered_bytes": 4, "peak_flops": None}
    assert facts(line("start", 0, facts=found)) == [
        ("facts", False, [
            ("device", "CPU"), ("parameters outside the blocks", "5"), ("bytes of a gathered element", "4"),
        ])
    ]  # fmt: skip
    assert set(OF_ADVICE) == {one.name for one in fields(RunFacts)} - {"device", "ranks", "hosts", "layout"}


def test_what_changed_since_the_checkpoint_is_said_once():
    opening = line("resume", 3, drift=["drift: run.steps 4", "accepted drift: optim.beta1"], run_from=None, fast=True)
    assert facts(opening) == [
        ("run", False, [
            ("run_from", "null"), ("fast", "true"),
            ("since the checkpoint", "drift: run.steps 4; accepted drift: optim.beta1"),
        ])
    ]  # fmt: skip


def test_values_are_written_as_in_a_recipe():
    one, other = "a: null\nb: [{path: x, weight: 1.0}]\nc: true\n", "a: 1\nb: []\nc: false\n"
    assert differing([one, other]) == [("a", ["null", "1"]), ("b", ["path x, weight 1", ""]), ("c", ["true", "false"])]


def test_long_words_are_cut():
    assert value_in_words("x" * 2000) == "x" * 1000 + " ..." and value_in_words(0.1234567) == "0.123457"


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (line("checkpoint", 5, bytes=3 << 20, stall_s=0.25), "3.0 MiB, 0.25s of waiting"),
        (line("profile", 5, steps=[1, 5], directory="run/profile/5"), "of steps 1 to 5, in run/profile/5"),
        (line("incident", 5, what="it failed", error="why", positions=[1, 2], restart=None), "it failed, why"),
        (line("end", 5, reason="finished", tokens=2000), "finished, 2 k tokens"),
        (line("end", 5, reason="stopped", signal="SIGTERM", tokens=2000), "stopped by SIGTERM, 2 k tokens"),
        (line("resume", 5, samples=40, drift=["drift: a", "b"], data={"x": 1}), "samples 40; drift: a; b"),
    ],
)
def test_what_happened_is_said_in_words(note, said):
    assert remark(note) == said
