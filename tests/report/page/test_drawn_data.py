"""The JSON that page.js draws: rounded, gaps as null, marks of what counts; what is new joins what the page has."""

from tests.report.page.events import line
from windlass.report.page import drawn_data as module
from windlass.report.page.drawn_data import drawn_data, marks_of
from windlass.report.page.history import MAX_LOST, History, read_history


def steps(*numbers):
    return [line("step", step, loss=10.0 / step, tokens=step * 64) for step in numbers]


def test_a_short_run_is_its_lines(log):
    lost = line("step", 3, loss=None, non_finite={"loss": "nan"}, memory_bytes=3 << 30)
    found = drawn_data(read_history(log(line("start", 0), *steps(1, 2), lost, *steps(4))), "mine")
    assert found["grid"]["step"] == [1, 2, 3, 4] and found["grid"]["time"] == [1.0, 2.0, 3.0, 4.0]
    assert found["grid"]["tokens"] == [64, 128, None, 256]
    assert found["series"]["loss"] == {"y": [10.0, 5.0, None, 2.5], "gaps": [2]}
    assert found["series"]["memory_bytes"]["y"] == [None, None, 3.0, None]
    assert (found["name"], found["from"]) == ("mine", 0)


def test_a_long_run_has_extremes_with_their_steps(log):
    history = read_history(log(*steps(*range(1, 101))), most=10)
    loss, first = (found := drawn_data(history, "mine"))["series"]["loss"], found["grid"]["first"]
    assert len(first) <= 10 and loss["high"][0] == 10.0 and first[0] + loss["high_at"][0] == 1
    assert loss["low"][-1] == 0.1 and first[-1] + loss["low_at"][-1] == 100
    thin = drawn_data(history, "mine", most=3)
    assert len(thin["grid"]["step"]) <= 3 and thin["series"]["loss"]["high"][0] == 10.0


def test_numbers_have_five_digits(log):
    found = drawn_data(read_history(log(line("step", 1, loss=1 / 3))), "mine")
    assert found["series"]["loss"]["y"] == [0.33333]


def joined(old, news):
    """As page.js joins them."""
    at = news["from"]
    grid = {name: old["grid"][name][:at] + fresh for name, fresh in news["grid"].items()}
    series = {}
    for name, fresh in news["series"].items():
        held = old["series"].get(name, {"gaps": []})
        series[name] = {part: (held.get(part) or [None] * at)[:at] + fresh[part] for part in fresh if part != "gaps"}
        series[name]["gaps"] = [gap for gap in held["gaps"] if gap < at] + fresh["gaps"]
    return {**news, "from": 0, "grid": grid, "series": series}


def test_what_is_new_joins_to_what_a_page_that_reads_all_has(log):
    path = log(line("start", 0))
    history = History(path, 16)
    history.read_new()
    page, tails = drawn_data(history, "mine"), 0
    at = 0
    for round_ in range(30):
        log(*steps(*range(at + 1, at + 4)), line("validation", at + 3, name="a", loss=1.0))
        at += 3
        if round_ % 7 == 6:
            at -= 5
            log(line("resume", at))
        history.read_new()
        news = drawn_data(history, "mine", revision=page["revision"], rows=len(page["grid"]["step"]))
        tails += news["from"] > 0
        page = joined(page, news) if news["from"] else news
        whole = drawn_data(history, "mine")
        assert page == whole
    assert tails > 15  # most answers are small


def test_marks_are_of_what_counts(log):
    lines = [line("start", 0), *steps(1, 2), line("checkpoint", 2), line("incident", 6, what="lost"), *steps(*range(3, 7)),
             line("checkpoint", 6), line("resume", 2), line("step", 3, loss=None, non_finite={"loss": "inf"}),
             line("validation", 3, name="a", loss=1.0), line("end", 3, reason="stopped")]  # fmt: skip
    assert marks_of(read_history(log(*lines))) == [
        [2, "resumed", "resumed"], [3, "not finite", "loss not finite", "loss", 3], [2, "checkpoint", "checkpoint"],
        [3, "end", "stopped"], [3, "validation", "validation"],
    ]  # fmt: skip


def test_many_marks_and_validations_are_bounded_and_the_extremes_stay(log, monkeypatch):
    monkeypatch.setattr(module, "MAX_BUCKETS", 50)
    losses = {500: -7.0, 501: 70.0}
    lines = [line("validation", step, name="a", loss=losses.get(step, 1.0)) for step in range(1000)]
    found = drawn_data(read_history(log(*lines, *[line("checkpoint", step) for step in range(1000)])), "mine")
    points = found["points"]["a"]
    assert len(points["step"]) <= 50 and {-7.0, 70.0} <= set(points["y"]) and points["step"] == sorted(points["step"])
    assert len(found["marks"]) <= 2 * module.MAX_MARKS


def lost_step(step, *names):
    return line("step", step, **dict.fromkeys(names), non_finite=dict.fromkeys(names, "nan"))


def test_a_stretch_that_is_not_finite_is_one_mark_of_its_quantity(log):
    path = log(*steps(1, 2), lost_step(3, "gradient_norm"), lost_step(4, "loss", "gradient_norm"))
    history = History(path)
    history.read_new()
    log(lost_step(5, "loss"), *steps(6), lost_step(7, "loss"))
    history.read_new()
    assert marks_of(history) == [
        [4, "not finite", "loss not finite until step 5", "loss", 5], [7, "not finite", "loss not finite", "loss", 7],
        [3, "not finite", "gradient norm not finite until step 4", "gradient_norm", 4],
    ]  # fmt: skip
    log(line("resume", 4))
    history.read_new()
    assert [mark[-1] for mark in marks_of(history) if mark[1] == "not finite"] == [4, 4]


def test_the_last_mark_says_that_later_ones_are_missing(log):
    lines = [lost_step(step, "loss") if step % 2 else steps(step)[0] for step in range(1, 2 * MAX_LOST + 1)]
    history = History(log(*lines))
    history.read_new()
    assert len(marks_of(history)) == MAX_LOST and marks_of(history)[-1][2] == "loss not finite"
    log(lost_step(2 * MAX_LOST + 1, "loss"))
    history.read_new()
    marks = marks_of(history)
    assert len(marks) == MAX_LOST and marks[-1][:3:2] == [
        2 * MAX_LOST - 1,
        "loss not finite; later ones are not marked",
    ]
