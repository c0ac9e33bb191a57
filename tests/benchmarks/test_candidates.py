"""Settings of one row: the first that fits; or all that may be the fastest, each measured, and the fastest kept."""

from dataclasses import replace

import candidates
import pytest
import torch
from candidates import measure_best, measure_first_fit, smaller
from step import Setup

CPU = torch.device("cpu")
SETUP = Setup("tiny", 32, 4, 2, compile=False)
LONG = Setup("tiny", 8192, 8, 2, compile=False)


def test_what_does_not_fit_steps_down_and_is_reported(monkeypatch):
    tried = []

    def measure(setup, device, seconds):
        tried.append(setup.micro_batch)
        if setup.micro_batch > 1:
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(candidates, "measure_setup", measure)
    found = measure_first_fit(smaller(SETUP, (4, 2, 1)), CPU, 0.1)
    assert tried == [4, 2, 1] and found["tokens_per_s"] == 1.0
    assert [(setup["micro_batch"], why) for setup, why in found["before"]] == [
        (4, "Tried to allocate 9 GiB"),
        (2, "Tried to allocate 9 GiB"),
    ]
    with pytest.raises(torch.OutOfMemoryError, match="none of 2 settings fits: Tried to allocate 9 GiB"):
        measure_first_fit(smaller(SETUP, (4, 2)), CPU, 0.1)


def test_what_cannot_fit_is_not_tried(monkeypatch):
    monkeypatch.setattr(candidates, "memory_of", lambda device: 79.2 * 2**30)
    monkeypatch.setattr(candidates, "measure_setup", lambda *_: pytest.fail("was tried"))
    with pytest.raises(torch.OutOfMemoryError, match=r"none of 1 settings fits: needs \d+\.\d GiB at least, of 77.6"):
        measure_first_fit([Setup("llama-3.1-8b", 4096, 16, 1, recompute="full", states="bf16")], CPU, 0.1)


class Pace:
    """Measurements that take time by the clock of `candidates`; rates by (recomputation, micro-batch), None: out of memory."""

    def __init__(self, monkeypatch, rates, took_s=40.0):
        self.rates, self.took_s, self.now, self.measured = rates, took_s, 0.0, []
        monkeypatch.setattr(candidates, "measure_setup", self)
        monkeypatch.setattr(candidates.time, "monotonic", lambda: self.now)

    def __call__(self, setup, device, seconds):
        self.now += self.took_s
        self.measured.append((setup.recompute, setup.micro_batch, setup.policy))
        rate = self.rates[setup.recompute, setup.micro_batch]
        if rate is None:
            raise torch.OutOfMemoryError("Tried to allocate 9 GiB")
        return {"tokens_per_s": rate, "setup": vars(setup)}


def of(setup, *pairs):
    return [replace(setup, recompute=kind, micro_batch=size) for kind, size in pairs]


def why(found):
    return {(setup["recompute"], setup["micro_batch"]): reason for setup, reason in found["candidates"]}


def test_the_fastest_is_kept_and_not_the_first_that_fits(monkeypatch):
    pace = Pace(monkeypatch, {("none", 4): None, ("selective", 4): 11_777.0, ("none", 2): 12_025.0})
    pairs = [("none", 4), ("selective", 4), ("none", 2), ("selective", 2), ("full", 4)]
    found = measure_best(of(SETUP, *pairs), CPU, 1.0, budget_s=1000)
    assert found["tokens_per_s"] == 12_025.0 and found["setup"]["recompute"] == "none"
    assert why(found) == {
        ("none", 4): "Tried to allocate 9 GiB",
        ("selective", 4): 11_777.0,
        ("none", 2): 12_025.0,
        ("selective", 2): "repeats no less than selective x4, in products no larger",
        ("full", 4): "repeats no less than selective x4, in products no larger",
    }
    assert len(pace.measured) == 3


def test_beyond_the_tokens_at_full_rate_larger_products_are_not_taken_for_faster(monkeypatch):
    """2 x 8,192 tokens are at the rate; 4 x 8,192 are beyond it, so that 2 x 8,192 with as much repeated is measured too."""
    Pace(monkeypatch, dict.fromkeys((("selective", 4), ("selective", 2), ("none", 2)), 5.0))
    found = measure_best(of(LONG, ("selective", 4), ("selective", 2), ("selective", 1), ("none", 2)), CPU, 1.0, 1000)
    assert [reason if isinstance(reason, float) else "not" for reason in why(found).values()] == [5.0, 5.0, "not", 5.0]


def test_the_first_that_fits_is_measured_whatever_the_time_and_others_while_it_lasts(monkeypatch):
    pairs = [("selective", 4), ("none", 2), ("none", 1)]
    pace = Pace(monkeypatch, {("selective", 4): 1.0, ("none", 2): 2.0, ("none", 1): 3.0})
    found = measure_best(of(replace(LONG, sequences_per_step=4), *pairs), CPU, 1.0, budget_s=70)
    assert len(pace.measured) == 1 and why(found)["none", 2] == "no time: 70 s are for all candidates"
    pace.now = 0.0
    assert measure_best(of(LONG, *pairs), CPU, 1.0, budget_s=80)["tokens_per_s"] == 2.0


def test_other_precisions_are_for_devices_that_need_them(monkeypatch):
    setups = [*of(SETUP, ("none", 2)), *of(replace(SETUP, policy="bf16-pure"), ("none", 2))]
    pace = Pace(monkeypatch, {("none", 2): 1.0})
    measure_best(setups, CPU, 1.0, 1000)
    assert [policy for *_, policy in pace.measured] == ["bf16"]


def test_where_no_candidate_fits_it_is_out_of_memory(monkeypatch):
    Pace(monkeypatch, {("none", 2): None})
    with pytest.raises(torch.OutOfMemoryError, match="none of 1 settings fits: Tried to allocate 9 GiB"):
        measure_best(of(SETUP, ("none", 2)), CPU, 1.0, 1000)
