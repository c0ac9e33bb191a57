"""Faults on a GPU: a trial on a CPU keeps every promise, and what is not kept is a failure."""

import json
import signal
import subprocess
import sys

import command
import faults
import pytest
from faults import is_time, main, make_cells


@pytest.mark.long
def test_a_run_that_is_killed_and_one_that_is_stopped_keep_their_losses(tmp_path, capsys):
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    killed, stopped = (cell["result"] for cell in json.loads(out.read_text())["cells"])
    assert (killed["left_with"], stopped["left_with"]) == (-9, 75)
    assert killed["equal_losses"] == stopped["equal_losses"] == faults.STEPS
    assert killed["went_on_from"] % faults.SAVE_EVERY == 0 and killed["went_on_from"] <= killed["last_step_before"]
    assert stopped["went_on_from"] >= stopped["last_step_before"]
    assert "SIGKILL" in capsys.readouterr().out


@pytest.mark.parametrize(("last", "is_equal"), [(2.5, True), (2.5 + 1e-9, False)])
def test_a_loss_that_is_another_is_a_failure(tmp_path, monkeypatch, last, is_equal):
    """Runs that are played: one to its end, one that leaves with 75 after step 20 and goes on from there."""
    runs = []

    def played(recipe, directory):
        runs.append(directory)
        is_one = len(runs) == 1
        losses = [2.5] * 40 if is_one else [2.5] * 39 + [last]
        events = [{"kind": "step", "step": step, "loss": loss} for step, loss in enumerate(losses)]
        middle = [] if is_one else [{"kind": "checkpoint", "step": 20}, {"kind": "resume", "step": 20}]
        (directory / "run").mkdir(exist_ok=True)
        lines = [json.dumps(event) for event in [*events[:20], *middle, *events[20:]]]
        (directory / "run" / "events.jsonl").write_text("\n".join(lines) + "\n")

    def started(recipe, directory):
        played(recipe, directory)
        left = "import signal, sys; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); signal.pause()"
        process = subprocess.Popen([sys.executable, "-c", left], stdout=subprocess.PIPE, text=True)
        process.stdout.readline()
        return process

    monkeypatch.setattr(faults, "train", played)
    monkeypatch.setattr(faults, "start", started)
    out = tmp_path / "trial.json"
    assert main(["--device", "cpu", "--tiny", "--only", "TERM", "--out", str(out)]) == (0 if is_equal else 1)
    (cell,) = json.loads(out.read_text())["cells"]
    if is_equal:
        assert cell["result"]["equal_losses"] == 40 and cell["result"]["went_on_from"] == 20
    else:
        assert "1 of 40 losses differ, first at step 39" in cell["message"]


def test_the_signal_waits_for_a_save():
    steps = [{"kind": "step", "step": step, "loss": 1.0} for step in range(20)]
    assert not is_time([]) and not is_time(steps)
    assert not is_time([*steps[:10], {"kind": "checkpoint", "step": 10}])
    assert is_time([*steps, {"kind": "checkpoint", "step": 10}])


def test_the_step_that_cannot_fit_is_left_out_of_a_trial():
    assert [cell.name for cell in make_cells(tiny=False)] == ["SIGKILL", "SIGTERM", "too large"]
    assert [cell.name for cell in make_cells(tiny=True)] == ["SIGKILL", "SIGTERM"]


def test_a_run_that_ends_before_its_signal_is_an_error(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "print('over')"], stdout=subprocess.PIPE, text=True)
    with pytest.raises(RuntimeError, match="before it was signalled"):
        command.signal_when(process, tmp_path, lambda events: False, signal.SIGTERM)


def test_another_exit_code_is_an_error_with_the_last_words(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)left with 2, not 0: .*nothing"):
        command.train({"nothing": 1}, tmp_path)
