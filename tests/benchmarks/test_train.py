"""The real `train` on one device: its recipe, and the figures that are read from a run's events."""

import json

import pytest
from train import LOGGED, SAVE_AT, figures, main


def event(step, at_s, warm_up=False):
    fixed = {"tokens_per_s": 100.0, "mfu": 0.5, "memory_bytes": 7, "loss": 2.0}
    return {"kind": "step", "step": step, "time": at_s, "warm_up": warm_up, **fixed}


def test_what_a_save_cost_is_what_its_interval_took_beyond_the_median():
    assert SAVE_AT % LOGGED == 1, "the save is inside of an interval"
    save = SAVE_AT - 1
    events = [
        {"kind": "start", "derived": {"parameters": "7"}},
        event(save - 2 * LOGGED, 0.0, warm_up=True),
        event(save - LOGGED, 90.0),
        event(save, 96.0),
        event(save + LOGGED, 106.5),
        event(save + 2 * LOGGED, 112.5),
        {"kind": "checkpoint", "step": SAVE_AT, "stall_s": 0.25, "bytes": 11},
    ]
    found = figures(events)
    assert (found["step_ms"], found["slowest_ms"], found["save_wait_s"]) == (2000.0, 2000.0, 4.5)
    assert (found["tokens_per_s"], found["save_stall_s"], found["save_bytes"]) == (100.0, 0.25, 11)
    assert found["derived"] == {"parameters": "7"}


def test_without_a_save_there_is_no_figure():
    with pytest.raises(ValueError):
        figures([{"kind": "start", "derived": {}}, event(3, 0.0), event(6, 1.0)])


def test_a_trial_trains_on_a_cpu(tmp_path, capsys):
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["cells"]
    assert row["status"] == "measured" and row["result"]["save_bytes"] > 0
    assert "global batch: 4 sequences" in capsys.readouterr().out
