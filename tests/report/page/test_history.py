"""What is drawn: the curve as it counts, whatever the order of reading; spikes and gaps kept, time that restarts cost."""

import json
import random

import numpy as np
import pytest

from tests.report.page.events import line
from windlass.errors import UserError
from windlass.report import events
from windlass.report.events import RESTARTS, read_events, read_lines
from windlass.report.page import history as module
from windlass.report.page.buckets import COUNT, HIGH, HIGH_AT, SUM
from windlass.report.page.history import MAX_NOTES, MAX_TEXT, History, evenly_spread, read_history

read_columns = module.read_columns


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


def curve(history, name="loss"):
    rows = history.buckets.series[name]
    return history.buckets.last.tolist(), (rows[SUM] / rows[COUNT]).tolist()


def plain_ledger(lines):
    """The rule, without anything incremental: per session what counts, and the rest of its last line as redone."""
    total, sessions = {}, [[]]
    for event in lines:
        if event["kind"] in RESTARTS:
            sessions[-1].append(event["step"])
            sessions.append([])
        elif "ledger" in event:
            sessions[-1].append(event)
    for session in sessions:
        limit = session.pop() if session and isinstance(session[-1], int) else float("inf")
        if session:
            kept = ([{}] + [event["ledger"] for event in session if event["step"] <= limit])[-1]
            redone = sum(session[-1]["ledger"].values()) - sum(kept.values())
            for cause, seconds in [*kept.items(), *([("redone", redone)] if redone > 0 else [])]:
                total[cause] = total.get(cause, 0) + seconds
    return total


def test_a_resumed_run_is_drawn_once_per_step_with_the_values_that_count(log):
    history = read_history(log(*RESUMED))
    assert curve(history) == ([1, 2, 3, 4, 5, 6, 7], [8.0, 7.0, 6.0, 5.0, 3.5, 2.5, 1.5])
    assert [entry["loss"] for entry in history.validations["code"]] == [8.0, 3.0]
    assert history.resumed_at == [4] and history.end["reason"] == "finished"
    assert [note["kind"] for note in history.valid_notes] == ["start", "checkpoint", "resume", "end"]


class Writer:
    """A run whose sessions end anywhere and go on from anywhere before."""

    def __init__(self, seed, log):
        self.draw, self.log, self.step, self.training = random.Random(seed), log, 0, 0
        self.is_lost = False

    def some_steps(self):
        draw = self.draw
        for _ in range(draw.choice([1, 3, 60])):
            self.step, self.training = self.step + 1, self.training + draw.randrange(1, 5)
            self.is_lost = draw.random() < (0.6 if self.is_lost else 0.03)
            lost = {"loss": None, "non_finite": {"loss": "nan"}} if self.is_lost else {}
            fields = {"loss": self.step + draw.random(), **lost}
            self.log(line("step", self.step, **fields, ledger={"training": self.training, "data_wait": self.step}))
            if draw.random() < 0.1:
                self.log(line("validation", self.step, name="code", loss=draw.random()), line("checkpoint", self.step))

    def perhaps_end(self):
        draw, is_stopped = self.draw, self.draw.random() < 0.3
        if is_stopped:
            self.log(line("end", self.step, reason="stopped", ledger={"training": self.training + 3, "evaluate": 1}))
        if is_stopped or draw.random() < 0.4:
            self.step = draw.choice([self.step, max(0, self.step - 3), draw.randrange(self.step + 1)])
            self.training = 0
            self.log(line("resume" if self.step else "start", self.step))


@pytest.mark.parametrize("seed", range(20))
def test_reading_bit_by_bit_equals_reading_at_once_and_the_plain_rules(seed, log, monkeypatch):
    """Read after some of the writes, in small chunks, in few buckets."""
    monkeypatch.setattr(events, "CHUNK", 700)
    writer, path = Writer(seed, log), log(line("start", 0))
    follower = History(path, 16)
    for _ in range(25):
        writer.some_steps()
        writer.perhaps_end()
        if writer.draw.random() < 0.7:
            follower.read_new()
    follower.read_new()
    valid = read_events(path)
    steps = [event for event in valid if event["kind"] == "step"]
    numbers = [event for event in steps if event["loss"] is not None]
    best = max(numbers, key=lambda event: event["loss"])
    for history in (read_history(path, 16), follower):
        rows = history.buckets
        assert rows.lines.sum() == len(steps) and len(rows) <= 16 and rows.last_step == steps[-1]["step"]
        assert rows.series["loss"][SUM].sum() == pytest.approx(sum(event["loss"] for event in numbers))
        at = np.nanargmax(rows.series["loss"][HIGH])
        assert (rows.series["loss"][HIGH, at], rows.series["loss"][HIGH_AT, at]) == (best["loss"], best["step"])
        assert history.lost == {"loss": stretches_of(steps), "gradient_norm": []} and not history.lost_beyond
        assert history.ledger == plain_ledger(read_lines(path))
        found = [(event["step"], event["loss"]) for event in history.validations.get("code", [])]
        assert dict(found) == {event["step"]: event["loss"] for event in valid if event["kind"] == "validation"}
        assert found == sorted(found)


def stretches_of(steps):
    """Of neighbouring lines without a loss, by hand."""
    found = []
    for before, event in zip([{"loss": 0.0}, *steps], steps):
        if event["loss"] is None:
            found[-1:] = (
                [(found[-1][0], event["step"])] if before["loss"] is None else [*found[-1:], (event["step"],) * 2]
            )
    return found


def test_the_latest_line_of_a_step_counts(log):
    history = read_history(log(*[line("step", step, loss=1.0) for step in (1, 2, 3)], line("step", 3, loss=7.0)))
    assert curve(history) == ([1, 2, 3], [1.0, 1.0, 7.0])
    log(line("step", 3, loss=8.0), line("step", 4, loss=9.0))
    history.read_new()
    assert curve(history) == ([1, 2, 3, 4], [1.0, 1.0, 8.0, 9.0])


def test_validations_stay_beside_step_lines_that_are_taken_later(log):
    steps = [line("step", 1), line("step", 2)]
    checks = [line("validation", step, name="a", loss=1.0) for step in (1, 2)]
    history = read_history(log(steps[0], checks[0], steps[1], checks[1]))
    assert [event["step"] for event in history.validations["a"]] == [1, 2]


def test_a_torn_line_waits_for_its_rest(log):
    path = log(line("step", 1, loss=1.0))
    history = read_history(path)
    text = json.dumps(line("step", 2, loss=2.0)) + "\n"
    with open(path, "a") as file:
        file.write(text[:20])
    assert not history.read_new() and history.buckets.last_step == 1
    with open(path, "a") as file:
        file.write(text[20:])
    assert history.read_new() and history.buckets.last_step == 2
    assert history.last_line == line("step", 2, loss=2.0)


def test_only_what_is_new_is_read(log, monkeypatch):
    path = log(*[line("step", step, loss=1.0) for step in range(1, 500)])
    history, seen = read_history(path), []
    monkeypatch.setattr(
        module, "read_columns", lambda lines, parse: seen.append(len(lines)) or read_columns(lines, parse)
    )
    log(line("step", 500, loss=1.0))
    history.read_new()
    history.read_new()
    assert seen == [1] and history.offset == path.stat().st_size


def test_a_log_that_became_shorter_is_read_anew(log):
    path = log(*RESUMED)
    history = read_history(path)
    path.write_text(json.dumps(line("step", 1, loss=5.0)) + "\n")
    assert history.read_new() and curve(history) == ([1], [5.0]) and history.notes == []


def test_a_run_killed_after_its_resume_has_no_end_although_an_earlier_session_had_one(log):
    history = read_history(log(*RESUMED, line("resume", 7), line("step", 8, loss=1.0)))
    assert history.end is None and history.last_line["step"] == 8


def test_an_incident_beyond_the_resumed_step_stays_in_the_list_of_what_happened(log):
    history = read_history(log(line("start", 0), line("incident", 9, what="nan"), line("resume", 4)))
    assert [note["kind"] for note in history.notes] == ["start", "incident", "resume"]
    assert [note["kind"] for note in history.valid_notes] == ["start", "resume"]


def test_an_empty_log_and_one_without_a_start_can_be_read(log):
    empty = read_history(log())
    assert len(empty.buckets) == 0 and empty.opening == {} and empty.last_line == {} and empty.ledger == {}
    assert curve(read_history(log(line("step", 1, loss=1.0)))) == ([1], [1.0])


BAD = ["not json", '{"kind": "step", "time": 1}', '{"time": 1, "step": 2, "kind": "step"', "[1]"]
BAD += [f'{{"kind": "{kind}", "name": "a", "time": 1, "step": 2, "loss": "much"}}' for kind in ("step", "validation")]


@pytest.mark.parametrize("bad", BAD)
def test_a_line_that_is_no_event_is_named_by_its_number(bad, log):
    path = log(line("start", 0), line("step", 1, loss=1.0))
    with open(path, "a") as file:
        file.write(bad + "\n")
    with pytest.raises(UserError, match="line 3"):
        read_history(path)


def test_blank_lines_and_fields_in_another_order_are_read(log):
    path = log(line("step", 1, loss=1.0))
    with open(path, "a") as file:
        file.write('\n{"step": 2, "loss": 2.0, "time": 5, "kind": "step"}\n')
    assert curve(read_history(path)) == ([1, 2], [1.0, 2.0])


def test_a_session_that_was_wholly_lost_is_wholly_redone(log):
    path = log(line("start", 0), line("step", 5, ledger={"training": 7.0}), line("start", 0))
    assert read_history(path).ledger == {"redone": 7.0}


def test_samples_are_grouped_by_prompt_and_cut(log):
    lines = [line("sample", step, prompt="class", text="x" * 10_000) for step in range(0, 100, 10)]
    samples = read_history(log(*lines, line("sample", 5, prompt="def", text="short"))).samples
    assert list(samples) == ["class", "def"]
    assert [event["step"] for event in samples["class"]] == list(range(0, 100, 10))
    assert len(samples["class"][0]["text"]) == MAX_TEXT


def test_the_list_of_what_happened_keeps_the_first_and_the_latest(log):
    notes = read_history(log(*[line("checkpoint", step) for step in range(1000)])).notes
    assert len(notes) == MAX_NOTES and [note["step"] for note in notes] == [*range(50), *range(850, 1000)]


def test_spread_keeps_first_and_last():
    assert evenly_spread([1, 2, 3], 6) == [1, 2, 3]
    assert evenly_spread(list(range(11)), 3) == [0, 5, 10]


def test_each_source_of_a_validation_set_has_a_curve(log):
    losses = {"web": 3.0, "code": 2.0}
    path = log(line("start", 0), line("validation", 5, name="validation", loss=2.5, source_losses=losses))
    found = read_history(path).validations
    assert list(found) == ["validation", "validation, web", "validation, code"]
    assert [(one["step"], one["loss"]) for one in found["validation, code"]] == [(5, 2.0)]
