"""The clock: medians over repeats, the kernels of a call, and sensors that report nothing where there are none."""

import time
from types import SimpleNamespace

import pytest
import timed
import torch
from timed import MIN_REPEATS, Sensors, Timer, kernels_of

CPU = torch.device("cpu")


def test_the_median_is_reported_and_repeats_fill_the_time():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.5 if len(calls) == 4 else 0.001)  # one call that is disturbed

    found = Timer(CPU, seconds=0.02).time(call)
    assert 0.001 <= found.fastest_s <= found.median_s < 0.25
    assert MIN_REPEATS <= found.repeats == len(calls) - 2


def test_the_operators_that_ran_are_named():
    x = torch.randn(256, 256)
    assert {"aten::mm", "aten::sum"} <= {one["kernel"] for one in kernels_of(lambda: (x @ x).sum(), CPU)}


def test_the_operator_that_took_longest_comes_first(monkeypatch):
    """On made-up times: on a busy machine any operator may take longest."""
    times_us = {"short": 1.0, "long": 300.04, "none": 0.0, "middle": 20.0} | {f"other {n}": 2.0 for n in range(9)}
    found = [SimpleNamespace(key=name, self_cpu_time_total=us) for name, us in times_us.items()]
    monkeypatch.setattr(torch.profiler.profile, "key_averages", lambda self: found)
    logged = kernels_of(lambda: None, CPU)
    assert logged[:2] == [{"kernel": "long", "us": 300.0}, {"kernel": "middle", "us": 20.0}]
    assert len(logged) == 8 and not {"none", "short"} & {one["kernel"] for one in logged}


def test_sensors_take_numbers_and_leave_what_a_card_does_not_tell():
    sensors = Sensors(CPU)
    with sensors:
        pass
    assert sensors.medians() is None
    for line in ("1980, 690.5, 60\n", "1700, [N/A], 61\n", "1200, 700.5, 62\n", "1500, 695.0, 64\n"):
        sensors._take(line)
    assert sensors.medians() == pytest.approx({"sm_mhz": 1500, "watts": 695.0, "celsius": 62})


def sampled(monkeypatch, *command):
    monkeypatch.setattr(timed, "SAMPLE_S", 0.01)
    monkeypatch.setattr(Sensors, "COMMAND", command)
    with Sensors(torch.device("cuda")) as sensors:
        time.sleep(0.3)
    return sensors.medians()


def test_sensors_ask_while_the_work_goes_on_and_live_without_nvidia_smi(monkeypatch):
    assert sampled(monkeypatch, "echo", "1980, 690.5, 60") == {"sm_mhz": 1980, "watts": 690.5, "celsius": 60}
    assert sampled(monkeypatch, "no-such-program") is None
    assert sampled(monkeypatch, "echo", "No devices were found") is None


class Event:
    """A CUDA event on a clock of the test's own: milliseconds since the process began."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def elapsed_time(self, other):
        return other.at - self.at


def test_a_gpu_is_timed_by_its_events_with_an_empty_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = Timer(CPU, seconds=0.02)
    flushes = []

    class Flush:
        def zero_(self):
            flushes.append(1)
            Event.now += 100.0  # what empties the cache is not counted

    timer._flush = Flush()

    def call():
        Event.now += 2.0

    found = timer.time(call)
    assert (found.median_s, found.fastest_s, found.repeats, len(flushes)) == (0.002, 0.002, 10, 11)
