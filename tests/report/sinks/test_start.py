"""The process beside a run: it lives as long as the run's, sends the last lines, and takes nothing down."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests import tiny
from windlass.config import to_yaml
from windlass.report.events import EventLog
from windlass.report.sinks import start as room
from windlass.report.sinks.start import following, sending

ROOT = Path(__file__).parents[3]
ID = "0123456789abcdef"
CHILD = """
import os, sys, pathlib
run = pathlib.Path(sys.argv[1])
(run / "pid").write_text(str(os.getpid()))
(run / "began").touch()
sys.stdin.read()
(run / "ended").write_text((run / "events.jsonl").read_text())
"""

COUNTED = """
import json, sys
from pathlib import Path
from meters.counting import Count
from windlass.config import load_recipe
from windlass.model.transformer import Decoder
from windlass.training.loop import train
class Mine:
    def numbers(self, step, time_s, values): ...
    def flush(self): ...
    def close(self): ...
recipe = Path(sys.argv[1])
count = Count(Decoder.forward.__code__)
count.start()
train(load_recipe(recipe), sinks=[Mine()])
found = count.per_step() | {"modules": sorted(sys.modules)}
recipe.with_suffix(".json").write_text(json.dumps(found))
"""


@pytest.fixture
def run(tmp_path):
    EventLog(tmp_path / "events.jsonl").write("start", 0, {})
    (tmp_path / "run.json").write_text(json.dumps({"run_id": ID}))
    return tmp_path


def wait_for(path):
    for _ in range(6000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not come")


def started(monkeypatch, program):
    """`_start` starts `program` in place of `windlass sync`."""
    popen = subprocess.Popen

    def other(command, **given):
        return popen([sys.executable, "-c", program, command[command.index("sync") + 1]], **given)

    monkeypatch.setattr(room.subprocess, "Popen", other)


def test_it_ends_when_the_run_does_and_has_seen_the_last_line(run, monkeypatch):
    started(monkeypatch, CHILD)
    said = []
    with following(run, ["tensorboard"], said.append):
        wait_for(run / "began")
        EventLog(run / "events.jsonl").write("end", 1, {"reason": "finished"})
        assert not (run / "ended").exists()
    assert '"finished"' in (run / "ended").read_text() and said == []


def test_it_ends_when_the_run_is_killed(run):
    program = (
        "import os, subprocess, sys; from pathlib import Path; from windlass.report.sinks import start as room\n"
        "popen = subprocess.Popen\n"
        f"room.subprocess.Popen = lambda command, **given: popen([sys.executable, '-c', {CHILD!r}, command[5]], **given)\n"
        f"run = Path({str(run)!r})\n"
        "with room.following(run, ['tensorboard'], print):\n"
        "    while not (run / 'began').exists(): pass\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    wait_for(run / "ended")


def test_a_ctrl_c_of_the_terminal_does_not_reach_it(run, monkeypatch):
    started(monkeypatch, CHILD)
    with following(run, ["tensorboard"], print):
        wait_for(run / "began")
        assert os.getsid(int((run / "pid").read_text())) != os.getsid(0)


def test_one_that_fails_is_reported_once_and_ends_no_run(run, monkeypatch):
    started(monkeypatch, "import sys; sys.stderr.write('windlass: a reason\\n'); sys.exit(2)")
    said, heard = [], threading.Event()

    def say(text):
        said.append(text)
        heard.set()

    with following(run, ["tensorboard"], say):
        assert heard.wait(60)
    assert said == [f"metrics are not sent to tensorboard: a reason; later: windlass sync {run} --to tensorboard"]


def test_one_that_hangs_is_left_behind(run, monkeypatch):
    started(monkeypatch, "import time; time.sleep(600)")
    kept, said, real = [], [], room._start
    monkeypatch.setattr(room, "_start", lambda *given: kept.append(real(*given)) or kept[-1])
    with following(run, ["tensorboard"], said.append, longest_s=0.0):
        pass
    kept[0].kill()
    kept[0].wait()
    assert said[0].startswith("tensorboard is still sent what the run logged; windlass sync")


def test_no_sink_starts_nothing(run, monkeypatch):
    monkeypatch.setattr(room.subprocess, "Popen", lambda *args, **given: pytest.fail("started"))
    with following(run, [], print), sending(run, [], print):
        pass
    assert not (run / "logs").exists() and not (run / "sinks").exists()


class Hangs:
    def __init__(self):
        self.goes_on = threading.Event()

    def numbers(self, step, time_s, values):
        pass

    def flush(self):
        self.goes_on.wait()

    def close(self):
        pass


def test_an_object_that_hangs_is_left_behind_and_named(run):
    (run / "run.json").write_text(json.dumps({"run_id": ID}))
    said, sink = [], Hangs()
    with sending(run, [sink], said.append, longest_s=0.0):
        pass
    sink.goes_on.set()
    assert said == ["metrics are still being sent to Hangs; a resume continues from there"]


@pytest.mark.long
def test_a_step_pays_for_a_sink_the_line_of_the_log_and_calls_none(tmp_path):
    """What the thread of a run that logs every step calls: function -> times a step, by benchmarks/meters/counting.py."""
    pytest.importorskip("tensorboard")
    config = tiny.recipe(tmp_path, "with", run={"steps": 52, "tokens_per_step": 32},
                         report={"every_steps": 1, "sinks": ["tensorboard"]},
                         checkpoint={"every_steps": 1000}, evaluate={"every_steps": 1000})  # fmt: skip
    (tmp_path / "with.yaml").write_text(to_yaml(config))
    ways = os.pathsep.join([str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", COUNTED, str(tmp_path / "with.yaml")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ways}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "with.json").read_text())
    assert not [module for module in found["modules"] if "tensorboard" in module], "the sink's package is in the run"
    assert found["by_function"]["report/events.py:EventLog.write"] == 1.0
    assert not [name for name in found["by_function"] if "sink" in name or "Mine" in name]
    sent = {
        file.name: json.loads(file.read_text())["sent"]["train"] for file in (tmp_path / "with/sinks").glob("*.json")
    }
    assert sent == {"tensorboard.json": 52, "Mine.json": 52}
