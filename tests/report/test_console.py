"""What is printed: a plain line per logging step into a file, a line rewritten on a terminal, the final table."""

import io

from windlass.report.console import Console, shed
from windlass.report.metrics import Recorder
from windlass.report.recorded_run import Gauges, ModelFlops, RecordedRun


class TerminalStream(io.StringIO):
    def isatty(self):
        return True


LINE = {
    "loss": 5.4321,
    "gradient_norm": 1.234,
    "learning_rate": 4e-3,
    "tokens_per_s": 12_300.0,
    "tokens_per_s_per_gpu": 6150.0,
    "mfu": 0.412,
    "memory_bytes": 3 << 30,
    "data_wait_s": 0.01,
    "step_s": 0.5,
}


def record(stream, total_steps=20, begun_s=None, **more):
    run = RecordedRun(total_steps, tokens_per_step=1000, num_devices=2, begun_s=begun_s)
    console, gauges = Console(stream, total_steps=total_steps, device="GPU"), Gauges(lambda value: value, lambda: 7.0)
    return Recorder(None, console, run, ModelFlops(2e6, None), gauges, every_steps=10, **more)


def test_lines_go_through_the_stream_in_a_notebook_too(monkeypatch):
    """rich would hand them to IPython, box by box, and the log of the run would have none."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    stream = io.StringIO()
    Console(stream, total_steps=20, device="GPU").step(10, LINE, eta_s=None)
    assert stream.getvalue().startswith("step 10/20 | loss 5.4321 |") and stream.getvalue().count("\n") == 1


def test_a_logging_step_is_one_plain_line_with_every_figure():
    stream = io.StringIO()
    Console(stream, total_steps=1193, device="GPU").step(120, LINE, eta_s=130.0)
    assert stream.getvalue() == (
        "step  120/1193 | loss 5.4321 | 12.3 k tok/s (6.15 k per GPU) | ETA  2m10s | norm  1.23 | lr 4.00e-03 | "
        "MFU 41.2% |   3.0 GiB | wait  2.0%\n"
    )


def test_one_device_has_one_rate():
    stream = io.StringIO()
    Console(stream, total_steps=9, device="process").step(1, LINE | {"tokens_per_s_per_gpu": 12_300.0}, eta_s=1.0)
    assert " | 12.3 k tok/s | ETA  1.00s | " in stream.getvalue()


def test_skipped_updates_are_reported_where_there_are_any():
    for skipped, begin in ((0, "loss 5.4321 | 12.3 k tok/s"), (3, "loss 5.4321 | skipped 3 | 12.3 k tok/s")):
        stream = io.StringIO()
        Console(stream, total_steps=1193, device="GPU").step(120, LINE | {"skipped": skipped}, eta_s=130.0)
        assert begin in stream.getvalue()


def test_a_model_with_experts_reports_its_routers_loss_and_the_busiest_expert_of_all_layers():
    stream = io.StringIO()
    more = {"router_loss": 8.04321, "expert_loads": [1.25, 1.9, 1.5]}
    Console(stream, total_steps=1193, device="GPU").step(120, LINE | more, eta_s=130.0)
    assert stream.getvalue().endswith("wait  2.0% | router 8.04 | busiest expert 1.9x\n")


def test_unknown_figures_are_na_and_divergence_is_reported():
    stream = io.StringIO()
    line = LINE | {"mfu": None, "loss": float("nan"), "gradient_norm": float("inf")}
    Console(stream, total_steps=9, device="process").step(1, line, eta_s=None)
    text = stream.getvalue()
    assert (
        "loss nan" in text
        and "norm   inf" in text
        and "ETA    n/a" in text
        and "per process" in text
        and "MFU" not in text
    )


def test_figures_of_other_digits_are_as_wide():
    """Bars of the lines of a log are below each other."""
    stream = io.StringIO()
    console = Console(stream, total_steps=100, device="process")
    rates = {"tokens_per_s": 14_000.0, "tokens_per_s_per_gpu": 14_000.0, "gradient_norm": 0.57, "mfu": None}
    console.step(9, LINE | rates, eta_s=9.5)
    console.step(
        10, LINE | rates | {"gradient_norm": 12.345, "memory_bytes": 985 << 20, "data_wait_s": 0.06}, eta_s=130.0
    )
    first, second = stream.getvalue().splitlines()
    assert first == (
        "step   9/100 | loss 5.4321 | 14.0 k tok/s | ETA  9.50s | norm 0.570 | lr 4.00e-03 |   3.0 GiB | wait  2.0%"
    )
    assert second == (
        "step  10/100 | loss 5.4321 | 14.0 k tok/s | ETA  2m10s | norm  12.3 | lr 4.00e-03 | 985.0 MiB | wait 12.0%"
    )


def test_a_terminal_line_is_rewritten_in_place_and_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = TerminalStream()
    console = Console(stream, total_steps=20, device="GPU")
    console.step(10, LINE, eta_s=1.0)
    console.step(20, LINE, eta_s=0.0)
    assert "\n" not in stream.getvalue() and stream.getvalue().count("\r\x1b[2K") == 1
    console.say("news")
    assert stream.getvalue().endswith("\r\x1b[2Knews\n")  # the progress line made room
    assert "\x1b[?25l" not in stream.getvalue()  # the cursor is never hidden: a killed run leaves a sane terminal


def test_a_narrow_terminal_sheds_whole_fields_those_without_a_value_first(monkeypatch):
    fields = ["step 1/9", "loss 5.4321", "ETA n/a", "norm 1.23", "MFU n/a", "wait 2.0%"]
    whole = len(" | ".join(fields))
    assert shed(fields, whole) == fields
    assert shed(fields, whole - 1) == ["step 1/9", "loss 5.4321", "norm 1.23", "MFU n/a", "wait 2.0%"]
    assert shed(fields, 40) == ["step 1/9", "loss 5.4321", "norm 1.23"]
    assert shed(fields, 3) == ["step 1/9"]
    for columns in (40, 60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = TerminalStream()
        Console(stream, total_steps=20, device="GPU").step(10, LINE, eta_s=1.0)
        shown = stream.getvalue()
        assert len(shown) < columns and "…" not in shown and "step 10/20 | loss 5.4321" in shown


def test_a_wide_terminal_gets_a_bar(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    stream = TerminalStream()
    Console(stream, total_steps=20, device="GPU").step(10, LINE, eta_s=1.0)
    assert stream.getvalue().count("━") == 16


def test_text_of_a_sample_is_never_read_as_markup():
    stream = io.StringIO()
    Console(stream, total_steps=9, device="GPU").event(
        "sample", 5, {"prompt": "class A", "text": ":\n    x = [red]1[/]"}
    )
    assert stream.getvalue() == "step 5: sample\n    | class A:\n    |     x = [red]1[/]\n"


def test_what_is_said_drives_no_terminal_and_holds_no_secret():
    stream = TerminalStream()
    Console(stream, total_steps=20, device="process").say("https://h/x?sig=51gn \x1b]0;owned\x07\nnext")
    assert "https://h/x?*** \\x1b]0;owned\\x07" in stream.getvalue() and "\x1b]" not in stream.getvalue()


def test_an_event_is_one_line_with_its_fields():
    stream = io.StringIO()
    fields = {"path": "checkpoints/step-00000005", "seconds": 0.123456, "settings": {"much": 1}}
    Console(stream, total_steps=9, device="GPU").event("resume", 5, fields)
    assert stream.getvalue() == "step 5: resume path checkpoints/step-00000005, seconds 0.1235\n"


def test_validation_is_reported_beside_the_first_one():
    stream = io.StringIO()
    recorder = record(stream)
    recorder.validation(0, "code", 770.0, 100, 330)
    recorder.validation(10, "code", 500.0, 100, 330)
    first, second = stream.getvalue().splitlines()
    assert first == "step 0: code loss 7.7000, perplexity 2208, 3.366 bits per byte"
    assert second == "step 10: code loss 5.0000, perplexity 148.4, 2.186 bits per byte (at step 0: loss 7.7000)"


def test_a_resume_with_nothing_left_to_do_has_no_line_of_times():
    stream = io.StringIO()
    record(stream).end(20, "finished")
    assert "finished at step 20" in stream.getvalue() and "time:" not in stream.getvalue()


def test_the_summary_shows_first_and_last_validation_baselines_rates_and_ledger():
    stream = io.StringIO()
    recorder = record(stream)
    for at, nats in ((0, 770.0), (10, 500.0), (20, 400.0)):
        recorder.validation(at, "code", nats, 100, 330)
    for step in range(1, 21):
        recorder.step(step, 1.0, 1.0, 1e-3, 1000, 0.0)
    recorder.end(20, "finished", {"bigram": {"loss": 4.44, "bits_per_byte": 2.05}, "gzip": {"bits_per_byte": 2.04}})
    rows = [row.split() for row in stream.getvalue().splitlines()]
    assert ["finished", "at", "step", "20", "of", "20"] in rows
    assert ["code", "0", "7.7000", "2208", "3.366"] in rows and ["code", "20", "4.0000", "54.6", "1.749"] in rows
    assert ["baseline:", "bigram", "4.4400", "2.050"] in rows and ["baseline:", "gzip", "2.040"] in rows
    assert not any(row[:2] == ["code", "10"] for row in rows)
    assert "per GPU, without warm-up and pauses" in stream.getvalue() and "time: warm up" in stream.getvalue()


def test_the_lowest_loss_is_a_row_of_its_own_where_it_is_not_the_last():
    stream = io.StringIO()
    past = {"code": [{"step": 0, "loss": 7.7, "perplexity": 2208.3}, {"step": 5, "loss": 2.5, "perplexity": 12.18}]}
    recorder = record(stream, past_validations=past)
    for at, nats in ((10, 300.0), (20, 400.0)):
        recorder.validation(at, "code", nats, 100, 0)
    recorder.validation(0, "more", 200.0, 100, 0)
    recorder.validation(20, "more", 400.0, 100, 0)
    recorder.end(20, "finished")
    rows = [
        row.split() for row in stream.getvalue().splitlines() if row.startswith(("set", "code  ", "code (", "more"))
    ]
    assert rows[-6:] == [
        ["set", "step", "loss", "(nats)", "perplexity"],
        ["code", "0", "7.7000", "2208"],
        ["code", "(lowest)", "5", "2.5000", "12.18"],
        ["code", "20", "4.0000", "54.6"],
        ["more", "(lowest)", "0", "2.0000", "7.389"],
        ["more", "20", "4.0000", "54.6"],
    ], "and no column of figures that no row has"


def test_the_time_of_a_run_begins_with_its_preparation(monkeypatch):
    stream, now = io.StringIO(), iter(range(100, 200))
    monkeypatch.setattr("windlass.report.metrics.time.perf_counter", lambda: float(next(now)))
    record(stream, begun_s=80.0).end(20, "finished")
    assert stream.getvalue().splitlines()[-1] == "time: preparation 20s (100%)"


def test_a_run_too_short_for_an_average_says_so():
    stream = io.StringIO()
    recorder = record(stream, total_steps=2)
    recorder.step(1, 1.0, 1.0, 1e-3, 1000, 0.0)
    recorder.step(2, 1.0, 1.0, 1e-3, 1000, 0.0)
    recorder.end(2, "finished")
    assert "n/a tok/s, without warm-up" in stream.getvalue()


def test_a_checkpoint_is_reported_with_its_size_and_what_it_cost():
    stream = io.StringIO()
    Console(stream, total_steps=9, device="GPU").event("checkpoint", 5, {"stall_s": 0.25, "bytes": 3 << 20})
    assert stream.getvalue() == "step 5: checkpoint, 3.0 MiB, 0.25s of waiting\n"


def test_an_incident_is_reported_in_its_own_words():
    stream = io.StringIO()
    fields = {"what": "checkpoint not saved", "error": "the disk is full"}
    Console(stream, total_steps=9, device="GPU").event("incident", 5, fields)
    assert stream.getvalue() == "step 5: incident: checkpoint not saved, the disk is full\n"


def test_an_incident_reports_its_numbers_once():
    stream = io.StringIO()
    fields = {"what": "waited 1.59s for data", "waited_s": 1.5891663809998136, "left_out": {"shard": 3}}
    Console(stream, total_steps=9, device="GPU").event("incident", 5, fields)
    assert stream.getvalue() == "step 5: incident: waited 1.59s for data\n"
