"""What is sent of a run: every number of its lines, once, in order, whatever kills or resumes it."""

import json
import math
import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.sinks import follow as room
from windlass.report.sinks.follow import Follower, check_packages, locked_to_send, numbers_of, send_until, sent_run
from windlass.report.sinks.sink import SentRun

ID = "0123456789abcdef"


class Kept:
    """A sink in memory."""

    def __init__(self, place):
        self.place, self.lines, self.flushed, self.is_closed = place, [], 0, False

    def numbers(self, step, time_s, values):
        self.lines.append((step, values))

    def flush(self):
        self.flushed = len(self.lines)

    def close(self):
        self.is_closed = True


@pytest.fixture
def run(tmp_path):
    """A run directory; `run.log` writes its events, `run.follower()` is a process that follows it, with `sink`."""
    directory = tmp_path / "mine"
    log = EventLog(directory / "events.jsonl")
    (directory / "run.json").write_text(json.dumps({"run_id": ID}))
    (directory / "sinks").mkdir()

    class Run:
        path, sinks = directory, []

        def write(self, kind, step, **fields):
            log.write(kind, step, fields)

        def follower(self):
            def opens(place):
                self.sinks.append(Kept(place))
                return self.sinks[-1]

            return Follower("kept", sent_run(directory), opens)

        @property
        def sent(self):
            return [line for sink in self.sinks for line in sink.lines]

    Run.sinks = []
    return Run()


def test_every_number_has_a_name_and_what_was_not_measured_has_none(run):
    run.write("start", 0, derived={"parameters": 3})
    run.write("step", 1, loss=math.nan, gradient_norm=2.0, mfu=None, warm_up=True, ledger={"training": 0.5}, tokens=8)
    run.write("validation", 1, name="web", loss=3.5, perplexity=33.1)
    run.write("checkpoint", 1, stall_s=0.1)
    assert run.follower().send_new() == 2
    assert run.sent == [
        (1, {"train/gradient_norm": 2.0, "train/ledger/training": 0.5, "train/tokens": 8.0}),
        (1, {"validation/web/loss": 3.5, "validation/web/perplexity": 33.1}),
    ]
    assert dict(numbers_of({"a": {"b": 1, "c": "text", "d": [1]}}, "p")) == {"p/a/b": 1.0}


def test_only_what_is_new_is_sent_by_the_next_process(run):
    run.write("step", 1, loss=4.0)
    first = run.follower()
    assert (first.send_new(), first.send_new()) == (1, 0)
    run.write("step", 2, loss=3.0)
    assert run.follower().send_new() == 1 and [step for step, _ in run.sent] == [1, 2]
    assert len(run.sinks) == 2 and run.follower().send_new() == 0 and len(run.sinks) == 2, (
        "nothing to send opens no sink"
    )


def test_a_step_that_is_done_again_is_not_sent_again(run):
    for step in (1, 2, 3):
        run.write("step", step, loss=4.0)
    run.write("validation", 2, name="a", loss=1.0)
    follower = run.follower()
    follower.send_new()
    run.write("resume", 1)
    for step in (2, 3, 4):
        run.write("step", step, loss=5.0)
    run.write("validation", 2, name="a", loss=2.0)
    run.write("validation", 2, name="b", loss=2.0)
    assert run.follower().send_new() == 2
    assert [(step, sorted(values)) for step, values in run.sent[4:]] == [
        (4, ["train/loss"]),
        (2, ["validation/b/loss"]),
    ]


def test_what_was_not_flushed_is_sent_again(run):
    run.write("step", 1, loss=4.0)
    follower = run.follower()
    follower.send_new()
    run.write("step", 2, loss=4.0)

    def killed():
        raise KeyboardInterrupt

    run.sinks[0].flush = killed
    with pytest.raises(KeyboardInterrupt):
        follower.send_new()
    assert run.follower().send_new() == 1 and [step for step, _ in run.sent] == [1, 2, 2]


def test_a_torn_line_waits_and_a_damaged_one_is_passed_over(run):
    run.write("step", 1, loss=4.0)
    with open(run.path / "events.jsonl", "ab") as file:
        file.write(b'\xff{"no\n[]\n{"kind": "step", "step": "x", "time": 1}\n{"kind": "step", "ti')
    follower = run.follower()
    assert follower.send_new() == 1
    with open(run.path / "events.jsonl", "ab") as file:
        file.write(b'me": 1.0, "step": 2, "loss": 3.0}\n')
    assert follower.send_new() == 1 and run.sent[-1] == (2, {"train/loss": 3.0})


@pytest.mark.parametrize(
    "state", ["", "{", "[]", '{"run_id": "another", "offset": 9, "sent": {}}', f'{{"run_id": "{ID}"}}']
)
def test_a_state_that_is_another_runs_or_damaged_begins_anew(run, state):
    run.write("step", 1, loss=4.0)
    (run.path / "sinks" / "kept.json").write_text(state)
    assert run.follower().send_new() == 1


def test_it_sends_what_is_left_when_it_is_over_and_closes(run):
    polls = iter((False, False, True))

    def is_over(seconds):
        over = next(polls)
        run.write("step", len(run.sent) + 1, loss=1.0)
        return over

    assert send_until(run.follower(), is_over) == 3 and run.sinks[0].is_closed and run.sinks[0].flushed == 3


def test_a_sink_that_fails_is_closed(run):
    run.write("step", 1, loss=1.0)
    follower = run.follower()

    def is_over(seconds):
        if run.sinks:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        send_until(follower, is_over)
    assert run.sinks[0].is_closed


def test_the_place_says_what_the_recipe_says(run):
    assert sent_run(run.path) == SentRun(run.path, ID, {}, "windlass")
    (run.path / "resolved.yaml").write_text("report: {project: mine, sinks: [wandb]}\n")
    assert sent_run(run.path).project == "mine" and sent_run(run.path, "given").project == "given"
    (run.path / "run.json").unlink()
    with pytest.raises(UserError, match=r"holds no run\.json"):
        sent_run(run.path)


def test_one_process_sends_at_a_time(run):
    program = (
        "import sys; from pathlib import Path; from windlass.report.sinks.follow import locked_to_send\n"
        f"with locked_to_send('kept', Path({str(run.path)!r})): print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with (
            pytest.raises(UserError, match=f"another process sends {run.path} to kept"),
            locked_to_send("kept", run.path, 0.0),
        ):
            pass
        with locked_to_send("another", run.path, 0.0):
            pass
        other.stdin.close()
        with locked_to_send("kept", run.path):
            pass


def test_a_package_that_is_missing_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    check_packages(["tensorboard"])
    with pytest.raises(UserError) as caught:
        check_packages(["tensorboard", "wandb"])
    assert caught.value.given == "wandb as a sink, and wandb is not installed"
    assert caught.value.change == "pip install 'windlass-lm[wandb]', or leave it out of report.sinks"
