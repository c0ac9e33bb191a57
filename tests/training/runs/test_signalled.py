"""A signal at any moment of a run, from its first line on, ends it with a code that is true, and loses nothing that was saved."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests import tiny
from windlass.checkpoint.commit import committed_steps
from windlass.config import to_yaml
from windlass.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from windlass.signals import SIGNALS
from windlass.training.loop import train

STOPPED_AT = 3  # where every second run goes on from
EARLY, LATE = 8, 12  # moments before and after the first event of a run

# `python -m windlass train RECIPE` that sends itself signal NUMBER at its AT-th audit event (an import, an opened file) on the
# main thread, counted from the first line of __main__ on. A count and no clock: a loaded machine changes nothing. Writes
# the counts at which events.jsonl was opened.
CHILD = """
import json, os, runpy, signal, sys, threading
number, at, counts, recipe = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, whoever started the tests
signal.signal(signal.SIGHUP, signal.SIG_DFL)
main, num_events, opened = threading.get_ident(), 0, []

def count(event, args):
    global num_events
    if threading.get_ident() != main or (num_events == 0 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
        return
    num_events += 1
    if event == "open" and str(args[0]).endswith("events.jsonl"):
        opened.append(num_events)
    if num_events == at:
        os.kill(os.getpid(), number)

sys.addaudithook(count)
sys.argv = ["windlass", "train", recipe, "--nproc", "1"]
try:
    runpy.run_module("windlass", run_name="__main__", alter_sys=True)
finally:
    with open(counts, "w") as file:
        json.dump(opened, file)
"""


def recipe(base, name, **run):
    """Its schedule does not depend on the number of steps, so that a run that was shorter goes on as the whole one did."""
    return tiny.recipe(base, name, run={"accept_drift": ["run.steps"], **run}, optim={"schedule": "constant"})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with the whole run, and one that was stopped at STOPPED_AT."""
    base = tmp_path_factory.mktemp("signalled")
    train(recipe(base, "whole"))
    train(recipe(base, "stopped", steps=STOPPED_AT))
    return base


def start(base, name, number=0, at=0):
    """Trains `name` in a process of its own -> (its exit code and output, the counts at which it opened events.jsonl)."""
    file, counts = base / f"{name}.yaml", base / f"{name}.json"
    file.write_text(to_yaml(recipe(base, name)))
    command = [sys.executable, "-c", CHILD, str(int(number)), str(at), str(counts), str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    return done, json.loads(counts.read_text())


@pytest.fixture(scope="module")
def counts(base):
    """Of an undisturbed process, the counts at which it opened events.jsonl: the last one is the end of the run."""
    done, opened = start(base, "counted")
    assert done.returncode == 0, done.stderr
    assert tiny.losses(base / "counted") == tiny.losses(base / "whole") and len(opened) > tiny.STEPS
    return opened


def moments(counts):
    """EARLY counts up to the first event of the run, LATE ones from there to its end."""
    first, last = counts[0], counts[-1]
    early = [1 + (first - 1) * part // EARLY for part in range(EARLY)]
    return [*early, *(first + (last - first) * part // (LATE - 1) for part in range(LATE))]


@pytest.mark.long
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_at_any_moment_stops_a_run_and_loses_nothing(base, counts, number):
    whole, codes = tiny.losses(base / "whole"), []
    for index, at in enumerate(moments(counts)):
        name, goes_on = f"{signal.Signals(number).name}-{index}", index % 2 == 1
        directory = base / name
        if goes_on:
            shutil.copytree(base / "stopped", directory)
        done, _ = start(base, name, number, at)
        where, committed = (
            f"{name} at event {at}: {done.stdout}{done.stderr}",
            committed_steps(directory / "checkpoints"),
        )
        codes.append(done.returncode)
        assert "Traceback" not in done.stderr, where
        if done.returncode == EXIT_INTERRUPTED:
            assert not committed and not goes_on, where
        elif done.returncode == EXIT_STOPPED:
            done_steps = max(tiny.losses(directory), default=0)
            assert max(committed) == done_steps and max(committed) >= STOPPED_AT * goes_on, where
        else:
            assert done.returncode == 0 and max(committed) == tiny.STEPS, where
        train(recipe(base, name))
        assert tiny.losses(directory) == whole, where
        shutil.rmtree(directory)
    assert codes[0] == EXIT_INTERRUPTED and codes[1] == EXIT_STOPPED and codes[-1] in (0, EXIT_STOPPED), codes
    assert codes.count(EXIT_STOPPED) > LATE // 2, codes
