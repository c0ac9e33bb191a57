"""The Recorder: when it reads, what it computes, what it leaves out of the throughput."""

import cProfile
import math
import pstats

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.report import metrics
from windlass.report.events import EventLog, read_events
from windlass.report.metrics import Recorder
from windlass.report.recorded_run import Gauges, ModelFlops, RecordedRun


class Clock:
    """time.perf_counter under the test's control."""

    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now_s)


class Number:
    """A scalar that notes when it is read."""

    def __init__(self, value, reads, label):
        self.value, self.reads, self.label = value, reads, label

    def __float__(self):
        self.reads.append(self.label)
        return float(self.value)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def make(path, *, total_steps=20, every_steps=5, log=True, start_step=0, peak=1e9, **gauges):
    run = RecordedRun(total_steps, tokens_per_step=1000, num_devices=4, start_step=start_step)
    gauges = Gauges(**{"gather_max": lambda value: value, "memory": lambda: 7.0} | gauges)
    log = EventLog(path) if log else None
    return Recorder(log, None, run, ModelFlops(2e6, peak), gauges, every_steps=every_steps)


def steps(path):
    return [line for line in read_events(path) if line["kind"] == "step"]


def test_scalars_are_read_on_logging_steps_only(tmp_path):
    reads = []
    recorder = make(tmp_path / "e", total_steps=13)
    for step in range(1, 14):
        scalars = (Number(1.0, reads, step), Number(1.0, reads, step), Number(1.0, reads, step))
        recorder.step(step, scalars[0], scalars[1], 0.1, scalars[2], 0.0)
    assert reads == [1] * 3 + [5] * 3 + [10] * 3 + [13] * 3
    assert [line["step"] for line in steps(tmp_path / "e")] == [1, 5, 10, 13]


def test_between_logging_steps_no_aten_op_runs_and_few_python_calls(tmp_path):
    class Count(TorchDispatchMode):
        ops = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.ops += 1
            return func(*args, **(kwargs or {}))

    recorder = make(tmp_path / "e")
    loss = torch.tensor(1.0)
    recorder.step(1, loss, loss, 0.1, loss, 0.0)
    profile = cProfile.Profile()
    with Count():
        profile.runcall(recorder.step, 2, loss, loss, 0.1, loss, 0.0)
    assert Count.ops == 0
    assert pstats.Stats(profile).total_calls <= 3
    with Count():
        recorder.step(5, loss, loss, 0.1, loss, 0.0)
    assert Count.ops == 3  # so the counter does see reads


def test_rates_mfu_and_cumulative_tokens(tmp_path, clock):
    recorder = make(tmp_path / "e")
    for step in range(1, 11):
        clock.now_s += 2.0
        recorder.step(step, torch.tensor(3.0), torch.tensor(0.5), step * 0.1, torch.tensor(990), 0.25)
    line = steps(tmp_path / "e")[-1]
    assert line["step"] == 10 and line["tokens"] == 10_000 and line["targets"] == 990
    assert line["loss"] == 3.0 and line["gradient_norm"] == 0.5 and line["learning_rate"] == 1.0
    assert line["tokens_per_s"] == pytest.approx(500.0)
    assert line["tokens_per_s_per_gpu"] == pytest.approx(125.0)
    assert line["mfu"] == pytest.approx(125.0 * 2e6 / 1e9)
    assert line["data_wait_s"] == pytest.approx(0.25) and line["step_s"] == pytest.approx(2.0)
    assert line["memory_bytes"] == 7


def test_mfu_is_null_where_the_peak_is_unknown(tmp_path, clock):
    recorder = make(tmp_path / "e", peak=None)
    for step in range(1, 6):
        clock.now_s += 1.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.0)
    recorder.end(5, "finished")
    assert [line["mfu"] for line in read_events(tmp_path / "e")] == [None, None, None]


def test_pauses_do_not_count_for_the_throughput(tmp_path, clock):
    recorder = make(tmp_path / "e")
    for step in range(1, 6):
        clock.now_s += 1.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.0)
        if step in (2, 5):
            with recorder.pause("evaluate"):
                clock.now_s += 50.0
    for step in range(6, 11):
        clock.now_s += 1.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.0)
    assert [line["tokens_per_s"] for line in steps(tmp_path / "e")] == pytest.approx([1000.0] * 3)
    assert steps(tmp_path / "e")[-1]["ledger"]["evaluate"] == pytest.approx(100.0)


def test_a_pause_that_raises_is_still_counted(tmp_path, clock):
    recorder = make(tmp_path / "e")
    with pytest.raises(KeyError), recorder.pause("checkpoint"):
        clock.now_s += 3.0
        raise KeyError
    clock.now_s += 1.0
    recorder.step(1, 1.0, 1.0, 0.1, 1, 0.0)
    assert steps(tmp_path / "e")[0]["tokens_per_s"] == pytest.approx(1000.0)


def test_a_pause_first_waits_for_the_steps_before_it(tmp_path, clock):
    """On a GPU the steps still run when the host reaches the pause; their time is training, not evaluation."""

    class Running:
        def __float__(self):
            clock.now_s += 9.0
            return 1.0

    recorder = make(tmp_path / "e", every_steps=10)
    recorder.step(1, 1.0, 1.0, 0.1, 1, 0.0)
    recorder.step(2, 1.0, Running(), 0.1, 1, 0.0)
    with recorder.pause("evaluate"):
        clock.now_s += 1.0
    recorder.step(10, 1.0, 1.0, 0.1, 1, 0.0)
    assert steps(tmp_path / "e")[-1]["ledger"]["evaluate"] == pytest.approx(1.0)
    assert steps(tmp_path / "e")[-1]["step_s"] == pytest.approx(1.0)


def test_warm_up_is_marked_and_left_out_of_the_average(tmp_path, clock):
    recorder = make(tmp_path / "e")
    for step in range(1, 11):
        clock.now_s += 60.0 if step == 1 else 1.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.0)
    recorder.end(10, "finished")
    assert [line["warm_up"] for line in steps(tmp_path / "e")] == [True, False, False]
    end = read_events(tmp_path / "e")[-1]
    assert end["tokens_per_s"] == pytest.approx(1000.0) and end["reason"] == "finished"
    assert end["ledger"]["warm_up"] == pytest.approx(60.0)


def test_the_ledger_adds_up_to_the_time_that_passed(tmp_path, clock):
    start_s = clock.now_s
    recorder = make(tmp_path / "e")
    for step in range(1, 9):
        clock.now_s += 1.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.125)
        if step % 3 == 0:
            with recorder.pause("evaluate"):
                clock.now_s += 4.0
            with recorder.pause("checkpoint"):
                clock.now_s += 2.0
    recorder.end(8, "stopped", signal="SIGINT")
    end = read_events(tmp_path / "e")[-1]
    ledger = end["ledger"]
    assert (end["reason"], end["signal"]) == ("stopped", "SIGINT")
    assert sum(ledger.values()) == pytest.approx(clock.now_s - start_s)
    assert ledger["data_wait"] == pytest.approx(1.0) and ledger["checkpoint"] == pytest.approx(4.0)


def test_a_resumed_run_counts_from_its_own_start(tmp_path, clock):
    recorder = make(tmp_path / "e", start_step=7)
    for step in range(8, 13):
        clock.now_s += 2.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.0)
    lines = steps(tmp_path / "e")
    assert [(line["step"], line["tokens"], line["warm_up"]) for line in lines] == [(8, 8000, True), (10, 10_000, True)]
    assert lines[1]["tokens_per_s"] == pytest.approx(500.0)


def test_other_ranks_read_nothing_but_take_part_in_the_gathering(tmp_path):
    reads, gathered = [], []
    recorder = make(tmp_path / "e", log=False, gather_max=lambda value: gathered.append(value) or value)
    for step in range(1, 21):
        recorder.step(step, *[Number(1.0, reads, step)] * 2, 0.1, Number(1.0, reads, step), 0.5)
    recorder.end(20, "finished")
    assert reads == [] and not (tmp_path / "e").exists()
    assert gathered == [0.5, 7.0, 2.0, 7.0, 2.5, 7.0, 2.5, 7.0, 2.5, 7.0]


def test_memory_and_data_wait_are_the_worst_ranks(tmp_path):
    recorder = make(tmp_path / "e", gather_max=lambda value: value * 10)
    recorder.step(1, 1.0, 1.0, 0.1, 1, 0.5)
    assert steps(tmp_path / "e")[0]["memory_bytes"] == 70 and steps(tmp_path / "e")[0]["data_wait_s"] == 5.0


def test_a_diverged_step_is_logged_as_such(tmp_path):
    recorder = make(tmp_path / "e")
    recorder.step(1, torch.tensor(math.nan), torch.tensor(math.inf), 0.1, torch.tensor(8), 0.0)
    line = steps(tmp_path / "e")[0]
    assert line["loss"] is None and line["non_finite"] == {"loss": "nan", "gradient_norm": "inf"}


def test_validation_gives_loss_perplexity_and_bits_per_byte(tmp_path):
    recorder = make(tmp_path / "e")
    recorder.validation(0, "code", total=200.0, count=100, num_bytes=300)
    (line,) = read_events(tmp_path / "e")
    assert line["kind"] == "validation" and line["name"] == "code" and line["step"] == 0
    assert line["loss"] == 2.0 and line["perplexity"] == pytest.approx(math.exp(2.0))
    assert line["bits_per_byte"] == pytest.approx(200.0 / math.log(2) / 300)


def test_a_validation_without_bytes_or_with_a_diverged_loss_has_nulls(tmp_path):
    recorder = make(tmp_path / "e")
    recorder.validation(0, "ids", total=200.0, count=100, num_bytes=0)
    recorder.validation(5, "ids", total=math.nan, count=100, num_bytes=10)
    first, second = read_events(tmp_path / "e")
    assert first["bits_per_byte"] is None and first["loss"] == 2.0
    assert second["loss"] is None and second["perplexity"] is None and second["bits_per_byte"] is None


def test_other_events_keep_their_fields(tmp_path):
    recorder = make(tmp_path / "e")
    recorder.event("resume", 7, path="checkpoints/step-00000007")
    assert read_events(tmp_path / "e")[0]["path"] == "checkpoints/step-00000007"


@pytest.mark.parametrize(
    ("experts", "names"), [(3, ["0", "1", "2"]), (32, [f"{e:02d}" for e in range(32)]), (33, None)]
)
def test_shares_of_experts_have_names_as_long_as_a_chart_shows_them_apart(tmp_path, experts, names):
    recorder = make(tmp_path / "e", every_steps=1, memory_parts=lambda peak: {"states": int(peak) - 1})
    recorder.step(1, 1.0, 1.0, 1e-3, 8, 0.0, figures={"expert_loads": [1.5], "expert_shares": [1 / experts] * experts})
    (line,) = steps(tmp_path / "e")
    assert line["expert_loads"] == [1.5] and line["memory_parts"] == {"states": 6}
    shares = line["expert_shares"]
    assert shares is None if names is None else list(shares.items()) == [(name, 1 / experts) for name in names]


class Shown:
    """A console that keeps the seconds to the end of each line."""

    def __init__(self):
        self.eta_s = []

    def step(self, step, line, eta_s):
        self.eta_s.append(eta_s)


def test_the_eta_is_at_the_pace_of_the_last_lines_with_the_pauses_of_all(tmp_path, clock):
    recorder = make(tmp_path / "e", total_steps=300, every_steps=1)
    recorder._console = shown = Shown()
    with recorder.pause("evaluate"):
        clock.now_s += 99.0  # before the first step: of no step to come
    for step in range(1, 61):
        clock.now_s += 40.0 if step == 1 else 80.0 if step == 30 else 2.0
        recorder.step(step, 1.0, 1.0, 0.1, 1, 0.0)
        if step % 10 == 0:
            with recorder.pause("checkpoint"):
                clock.now_s += 5.0
    assert shown.eta_s[0] is None, "the first step compiles"
    assert shown.eta_s[1] == pytest.approx(2.0 * 298)
    assert shown.eta_s[10] == pytest.approx((2.0 + 5.0 / 10) * 289)
    assert shown.eta_s[29] == pytest.approx(((80 + 19 * 2.0) / 20 + 10.0 / 29) * 270)
    assert shown.eta_s[49] == pytest.approx((2.0 + 20.0 / 49) * 250), "a stall is forgotten after twenty lines"
