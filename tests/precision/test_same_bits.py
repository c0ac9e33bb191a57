"""`run.deterministic`: in force while a run trains, off after it, and no drift on resume."""

import os

import torch

from tests import tiny
from windlass.precision.same_bits import same_bits
from windlass.training.loop import train


def state():
    return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory


def test_it_is_in_force_meanwhile_and_what_was_comes_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = state()
    with same_bits(False):
        assert state() == before and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with same_bits(True):
        assert state() == (True, False) and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert state() == before
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with same_bits(True):
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(before[0])
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with same_bits(True):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "the user's own is kept"


def test_a_run_trains_under_it_and_a_resume_may_leave_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that the run's own does not stay behind
    seen, before = [], state()
    one = {"deterministic": True, "steps": 2}
    train(tiny.recipe(tmp_path, run=one), on_event=lambda event: seen.append((event["kind"], state()[0])))
    assert {kind for kind, _ in seen} >= {"start", "step", "end"} and all(on for _, on in seen)
    assert state() == before
    seen.clear()
    found = train(
        tiny.recipe(tmp_path, run={"steps": 4}), on_event=lambda event: seen.append((event["kind"], state()[0]))
    )
    assert found.step == 4 and ("resume", False) in seen
