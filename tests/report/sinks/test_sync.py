"""`windlass sync RUN`."""

import json
import os
import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.report.events import EventLog
from windlass.report.sinks import sync as room
from windlass.report.sinks.sync import sinks_of, sync
from windlass.training.run_directory import hold

ID = "0123456789abcdef"


class Kept:
    lines: list

    def __init__(self, place):
        pass

    def numbers(self, step, time_s, values):
        self.lines.append((step, values))

    def flush(self):
        pass

    def close(self):
        pass


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of one line, sent to memory: `Kept.lines`."""
    Kept.lines = []
    monkeypatch.setattr(room, "open_sink", lambda name, place: Kept(place))
    EventLog(tmp_path / "events.jsonl").write("step", 1, {"loss": 2.0})
    (tmp_path / "run.json").write_text(json.dumps({"run_id": ID}))
    return tmp_path


def test_what_was_logged_is_sent_once(run, capsys):
    sync(run, ["tensorboard"], None, "now", print)
    sync(run, ["tensorboard"], None, "now", print)
    assert capsys.readouterr().out == "tensorboard: 1 lines sent\ntensorboard: 0 lines sent\n"
    assert Kept.lines == [(1, {"train/loss": 2.0})]


def test_the_recipe_names_the_sinks(run, capsys):
    with pytest.raises(UserError, match="without --to"):
        sync(run, [], None, "now", print)
    (run / "resolved.yaml").write_text("report: {sinks: [wandb, tensorboard]}\n")
    sync(run, [], None, "now", print)
    assert capsys.readouterr().out == "wandb: 1 lines sent\ntensorboard: 1 lines sent\n"


def test_it_follows_until_nobody_trains_the_run(run, monkeypatch):
    lock = hold(run)
    log, waits = EventLog(run / "events.jsonl"), []

    def wait(seconds):
        waits.append(seconds)
        log.write("step", len(waits) + 1, {"loss": 1.0})
        if len(waits) == 3:
            lock.close()

    monkeypatch.setattr(room.time, "sleep", wait)
    sync(run, ["tensorboard"], None, "end", print)
    assert [step for step, _ in Kept.lines] == [1, 2, 3, 4] and len(waits) == 3


def test_it_follows_until_the_pipe_closes(run):
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.'); from windlass.report.sinks import sync as room\n"
        "class Kept:\n"
        "    def __init__(self, place): pass\n"
        "    def numbers(self, step, time_s, values): print(step, flush=True)\n"
        "    def flush(self): pass\n"
        "    def close(self): print('closed', flush=True)\n"
        "room.open_sink = lambda name, place: Kept(place)\n"
        f"room.sync(Path({str(run)!r}), ['tensorboard'], None, 'eof', print)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], text=True, env=os.environ, **pipes) as process:
        assert process.stdout.readline() == "1\n"
        EventLog(run / "events.jsonl").write("step", 2, {"loss": 1.0})
        process.stdin.close()
        assert process.stdout.read() == "2\nclosed\ntensorboard: 2 lines sent\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [(["tensorbord"], "did you mean `tensorboard`?"), (["mlflow"], "a sink is one of tensorboard, wandb, trackio")],
)
def test_another_sink_is_refused(given, words):
    with pytest.raises(UserError) as caught:
        sinks_of(given)
    assert words in str(caught.value)


def test_sinks_are_named_once():
    assert sinks_of(["wandb", "tensorboard", "wandb"]) == ["tensorboard", "wandb"] and sinks_of([]) == []


def test_one_process_follows_for_one_sink(run):
    with pytest.raises(UserError, match="--follow with tensorboard and wandb"):
        sync(run, ["tensorboard", "wandb"], None, "end", print)
    with pytest.raises(UserError, match=r"run\.json"):
        sync(run / "absent", ["tensorboard"], None, "now", print)
